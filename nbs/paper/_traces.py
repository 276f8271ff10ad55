"""Trace and width of real networks under every method that needs no training: `python nbs/paper/_traces.py [--device cuda]`

Fills results/s3_max_trace.csv, which section 3's notebook shows: ResNet20 (three seeds) and VGG19 (one seed) for CIFAR-10,
six densities. Methods with data see 10 training images of each class. What is in the file already is not made again.
"""
import argparse, csv, math, os, sys, time, warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

root = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(root))
file = root/'results'/'s3_max_trace.csv'

seeds = dict(resnet20=3, vgg19=1)
methods = ('dense', 'phew', 'random', 'uniform', 'erk', 'magnitude', 'snip', 'iter_snip', 'grasp', 'synflow', 'synflow_l2',
           'phew_kernel', 'phew_uniform', 'phew_inverse', 'phew_squared')
densities = .5, .2, .1, .05, .02, .01

# traces as log10: `spatial` of a ones image, `graph` without and `skips` with identity shortcuts; paths as log10, likewise;
# `widths` and `live_skips` are units on complete paths without and with them, `filters` units with any weight, by layer
columns = '''model method density seed kept total spatial graph skips paths paths_skips effective flops empty widths live_skips filters
             seconds device'''.split()

def jobs():
    "Every (model, method, density, seed), the quick ones first."
    cases = [(m, method, d, s) for m in seeds for s in range(seeds[m]) for d in densities for method in methods[1:]
             if (method, d) != ('phew_inverse', .5)] # inverse walks hardly ever find the large weights that are left
    return [(m, 'dense', 1., s) for m in seeds for s in range(seeds[m])] + cases

def measure(model, method, density, seed, device='cpu'):
    "One row."
    from phew_nb.experiments import Config, config_data, config_masks, config_model, need_data
    from phew_nb.graph import trace
    from phew_nb.metrics import count_paths, effective_density, flops, path_trace, widths
    size, start = (3, 32, 32), time.time()
    config = Config('cifar10', model, method, density, seed)
    net = config_model(config, size, 10).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # empty layers: a column says so
        masks = config_masks(config, net, size, config_data(config) if method in need_data else None).to('cpu')
    seconds, graph = time.time() - start, trace(net.cpu(), size)
    units, skips = widths(graph, masks), widths(graph, masks, skips=True)
    number = lambda x: f'{x:.6g}'
    row = dict(model=model, method=method, density=f'{density:g}', seed=seed, kept=masks.kept, total=graph.total,
               spatial=path_trace(net, masks, graph, spatial=True).log10, graph=path_trace(graph, masks).log10,
               skips=path_trace(graph, masks, skips=True).log10, paths=log10(count_paths(graph, masks)),
               paths_skips=log10(count_paths(graph, masks, skips=True)),
               effective=effective_density(graph, masks), flops=flops(graph, masks),
               empty=sum(not m.any() for m in masks.values()), seconds=round(seconds, 1), device=device,
               widths=' '.join(str(w.live) for w in units.values()), filters=' '.join(str(w.kept) for w in units.values()),
               live_skips=' '.join(str(w.live) for w in skips.values()))
    return {k: number(v) if isinstance(v, float) and k != 'seconds' else str(v) for k, v in row.items()}

def log10(n): return math.log10(n) if n else -math.inf

def key(row): return row['model'], row['method'], float(row['density']), int(row['seed'])

def read():
    if not file.exists(): return {}
    with open(file, newline='') as f: return {key(row): row for row in csv.DictReader(f)}

def write(rows):
    "All rows in the order of the jobs, in one step."
    order = {job: i for i, job in enumerate(jobs())}
    with open(part := file.with_suffix('.part'), 'w', newline='') as f:
        out = csv.DictWriter(f, columns, lineterminator='\n')
        out.writeheader()
        out.writerows(rows[k] for k in sorted(rows, key=order.__getitem__))
    os.replace(part, file)

def start(threads):
    import torch
    torch.set_num_threads(threads)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--workers', type=int, default=1, help='processes')
    parser.add_argument('--threads', type=int, default=2, help='of each process')
    parser.add_argument('--models', nargs='*', default=list(seeds))
    args = parser.parse_args()
    rows = read()
    todo = [job for job in jobs() if job not in rows and job[0] in args.models]
    with ProcessPoolExecutor(args.workers, get_context('spawn'), start, (args.threads,)) as pool:
        running = {pool.submit(measure, *job, args.device): job for job in todo}
        for n, done in enumerate(as_completed(running), 1):
            row = done.result()
            rows[key(row)] = row
            write(rows)
            print(f'{n}/{len(todo)}', *(row[c] for c in columns[:11]), f"{row['seconds']} s", flush=True)

if __name__ == '__main__': main()
