"""What width is worth to ResNet20 on CIFAR-10: `python nbs/paper/_widening.py [--epochs 160] [--device cuda]`

SynFlow at density 0.05, its weights spread over more units by each width factor, then trained by the paper's recipe on all
of CIFAR-10. Adds to results/s3_widening.csv; runs that are in the file already are not made again.
"""
import argparse, csv, os, sys, time, warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

root = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(root))
file = root/'results'/'s3_widening.csv'
columns = 'model data method density x seed epochs kept channels accuracy seconds device'.split()

def measure(x, seed, epochs, density=.05, device=None):
    "One run: SynFlow's own masks where `x` is None."
    from phew_nb.experiments import Config, config_data, config_masks, config_model, stream, train
    from phew_nb.graph import trace
    from phew_nb.rewire import survivors, widen
    start, size = time.time(), (3, 32, 32)
    config = Config('cifar10', 'resnet20', 'synflow', density, seed, epochs)
    model = config_model(config, size, 10).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # a layer beside a shortcut may be empty
        masks = config_masks(config, model, size).to('cpu')
    graph = trace(model, size)
    if x is not None: masks = widen(graph, masks, x, seed=stream(seed, 'other'))
    alive = survivors(graph, masks)
    channels = sum(int(alive[layer.dst].sum()) for layer in graph.layers)
    accuracy = train(config, model, masks, config_data(config))['accuracy']
    return dict(zip(columns, map(str, ('resnet20', 'cifar10', 'synflow', density, '' if x is None else x, seed, epochs, masks.kept, channels,
                                       f'{accuracy:.4f}', round(time.time() - start), device))))

def key(row): return row['x'], row['seed'], row['epochs']

def read():
    if not file.exists(): return {}
    with open(file, newline='') as f: return {key(row): row for row in csv.DictReader(f)}

def write(rows):
    with open(part := file.with_suffix('.part'), 'w', newline='') as f:
        out = csv.DictWriter(f, columns, lineterminator='\n')
        out.writeheader()
        out.writerows(rows[k] for k in sorted(rows))
    os.replace(part, file)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--workers', type=int, default=1, help='processes')
    parser.add_argument('--epochs', type=int, default=160)
    parser.add_argument('--seeds', type=int, default=2)
    args = parser.parse_args()
    rows = read()
    todo = [(x, s) for s in range(args.seeds) for x in (0, 1, .5, None) if ('' if x is None else str(x), str(s), str(args.epochs)) not in rows]
    with ProcessPoolExecutor(args.workers, get_context('spawn')) as pool:
        for done in as_completed([pool.submit(measure, x, s, args.epochs, device=args.device) for x, s in todo]):
            rows = read() | {key(done.result()): done.result()}
            write(rows)
            print(done.result(), flush=True)

if __name__ == '__main__': main()
