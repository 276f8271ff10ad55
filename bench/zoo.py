"""Trace every torchvision classifier at its own input size: `python bench/zoo.py` resumes and prints the table.

Each model runs in a process of its own (for its peak memory) and adds one line to results/zoo.csv.
"""
import argparse, contextlib, csv, json, os, resource, subprocess, sys, time
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))

# model, input size, refusal; then what was traced, seconds, and memory in MiB
columns = '''model size refused layers params weights units forks junctions skips left_out build_s forward_s trace_s
             model_mb forward_mb trace_mb'''.split()

def names():
    import torchvision
    return torchvision.models.list_models(module=torchvision.models)

def input_size(name):
    "The size at which the default weights of a model were evaluated."
    import torchvision
    crop = torchvision.models.get_model_weights(name).DEFAULT.transforms().crop_size
    return 3, crop[0], crop[0]

@contextlib.contextmanager
def quick_init():
    "Leave out the slow initialisations while a model is built."
    import torch
    inits = {n: f for n, f in vars(torch.nn.init).items() if n.endswith('_') and not n.startswith('_') and callable(f)}
    for n in inits: setattr(torch.nn.init, n, lambda t, *args, **kwargs: t)
    try: yield
    finally:
        for n, f in inits.items(): setattr(torch.nn.init, n, f)

def build(name, seed=0):
    "The model with weights of a scale that keeps activations finite, in evaluation mode."
    import torch, torchvision
    with quick_init(): model = torchvision.models.get_model(name, weights=None)
    gen, noise = torch.Generator().manual_seed(seed), torch.empty(2**20)
    for p in model.parameters():
        fan = max(p[0].numel(), 1) if p.ndim > 1 else 1
        noise.normal_(generator=gen)
        flat = p.data.view(-1)
        for at in range(0, flat.numel(), len(noise)):
            flat[at:at+len(noise)] = noise[:len(flat) - at]*fan**-.5 if p.ndim > 1 else 1.
    for m in model.modules():
        if getattr(m, 'bias', None) is not None: m.bias.data.zero_()
    return model.eval()

def peak_mb(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

def now_mb():
    with open('/proc/self/statm') as f: return int(f.read().split()[1]) * resource.getpagesize() / 2**20

@contextlib.contextmanager
def clock(row, name):
    start = time.perf_counter()
    yield
    row[name] = round(time.perf_counter() - start, 3)

def count_forks(graph):
    "Units that several layers or junctions read."
    import torch
    readers = torch.zeros(graph.n_units, dtype=torch.long)
    for node in graph.nodes:
        read = (node.src if hasattr(node, 'src') else node.child).unique()
        readers[read[read >= 0]] += 1
    return int((readers > 1).sum())

def measure(name):
    "One row of the table."
    import torch
    from phew_nb.graph import trace, TraceError
    torch.set_num_threads(int(os.environ.get('OMP_NUM_THREADS', 2)))
    size, row = input_size(name), {c: '' for c in columns}
    with clock(row, 'build_s'): model = build(name)
    row |= dict(model=name, size='x'.join(map(str, size)), model_mb=round(sum(p.numel()*4 for p in model.parameters())/2**20))
    base, x = now_mb(), torch.randn(1, *size)
    with torch.no_grad(), clock(row, 'forward_s'): model(x)
    row['forward_mb'] = round(peak_mb() - base)
    try:
        with clock(row, 'trace_s'): graph = trace(model, size)
    except TraceError as e: return row | dict(refused=str(e))
    row['trace_mb'] = round(peak_mb() - base)
    junctions = graph.junctions
    return row | dict(layers=len(graph.layers), params=len(graph.params), weights=graph.total, units=graph.n_units,
                      forks=count_forks(graph), junctions=sum(len(j.dst) for j in junctions),
                      skips=int(sum(j.skip.sum() for j in junctions)), left_out=len(graph.left_out))

def read(path):
    if not path.exists(): return {}
    with open(path, newline='') as f: return {row['model']: row for row in csv.DictReader(f)}

def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    with open(path, 'w', newline='') as f:
        out = csv.DictWriter(f, columns, restval='', extrasaction='ignore', lineterminator='\n')
        out.writeheader()
        out.writerows(rows.values())

def show(rows):
    heads = [c for c in columns if c != 'refused']
    wide = [max(len(str(r.get(h, ''))) for r in [dict(zip(heads, heads)), *rows.values()]) for h in heads]
    for row in [dict(zip(heads, heads)), *rows.values()]:
        print('  '.join(str(row.get(h, '')).rjust(w) if i else str(row.get(h, '')).ljust(w) for i,(h, w) in enumerate(zip(heads, wide))))
        if row.get('refused', '') not in ('', 'refused'): print('    refused:', row['refused'][:300])

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('models', nargs='*', help='names of models; all of them if none is given')
    parser.add_argument('--out', default=root/'results'/'zoo.csv', type=Path)
    parser.add_argument('--again', action='store_true', help='measure again what is in the file already')
    parser.add_argument('--one', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one: return print(json.dumps(measure(args.one)))
    order = names()
    for name in args.models or order:
        rows = read(args.out)
        if name in rows and not args.again: continue
        run = subprocess.run([sys.executable, __file__, '--one', name], capture_output=True, text=True)
        row = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else \
            {'model': name, 'refused': (run.stderr.strip().splitlines() or [f'exit {run.returncode}'])[-1]}
        rows = read(args.out) | {name: row}
        write(args.out, {n: rows[n] for n in [*order, *rows] if n in rows})
        print({k: row.get(k) for k in ('model', 'refused', 'weights', 'forward_s', 'trace_s', 'trace_mb')}, flush=True)
    show(read(args.out))

if __name__ == '__main__': main()
