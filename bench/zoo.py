"""Trace and prune every torchvision classifier at its own input size: `python bench/zoo.py` resumes and prints the table.

Each model runs in a process of its own (for its peak memory) and adds one line to results/zoo.csv. Checked on each, at
densities 0.05 and 0.01: `over` is how many weights more than asked for are kept (less than the layers of one walk),
`empty` how many layers keep nothing (never one that every path crosses), and every kept weight lies on a kept path.
"""
import argparse, contextlib, csv, json, os, resource, subprocess, sys, time
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))
densities = .05, .01

# sizes of what was traced; seconds; memory in MiB beyond the model; what walks keep
columns = '''model size refused failed layers params weights units forks junctions skips left_out build_s forward_s trace_s
             model_mb forward_mb trace_mb'''.split()
columns += [f'{name}_{d}' for d in densities for name in ('walk_s', 'over', 'empty')] + ['walk_mb']

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
    more = dict(image_size=input_size(name)[1]) if name.startswith('vit') else {} # (a ViT has positions for one size)
    with quick_init(): model = torchvision.models.get_model(name, weights=None, **more)
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

def peak_mb():
    from measure import peak
    return peak() / 2**20

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
    row |= dict(model=name, size='x'.join(map(str, size)), model_mb=sum(p.numel()*4 for p in model.parameters()) >> 20)
    base, x = now_mb(), torch.randn(1, *size)
    with torch.no_grad(), clock(row, 'forward_s'): model(x)
    row['forward_mb'] = round(peak_mb() - base)
    try:
        with clock(row, 'trace_s'): graph = trace(model, size)
    except TraceError as e: return row | dict(refused=str(e))
    row['trace_mb'] = round(peak_mb() - base)
    junctions = graph.junctions
    row |= dict(layers=len(graph.layers), params=len(graph.params), weights=graph.total, units=graph.n_units,
                forks=count_forks(graph), junctions=sum(len(j.dst) for j in junctions),
                skips=int(sum(j.skip.sum() for j in junctions)), left_out=len(graph.left_out))
    try: row |= prune(model, graph)
    except (AssertionError, ValueError) as e: row['failed'] = str(e)
    return row | dict(walk_mb=round(peak_mb() - base))

def longest(graph):
    "Layers on the longest path: the most weights that one walk can add."
    import torch
    depth = torch.zeros(graph.n_units, dtype=torch.long)
    for node in graph.nodes:
        if hasattr(node, 'src'): depth[node.dst] = depth[node.src[node.src >= 0]].max() + 1
        else: depth[node.dst] = torch.zeros(len(node.dst), dtype=torch.long).scatter_reduce_(0, node.row, depth[node.child], 'amax')
    return int(depth.max())

def off_path(graph, masks):
    "Number of kept weights that lie on no complete path of kept weights."
    live, on = graph.live(masks), {}
    for layer in graph.layers:
        if layer.name not in masks: continue
        good = on.setdefault(layer.name, masks[layer.name].new_zeros(masks[layer.name].shape))
        ends = (live[layer.src.clamp(min=0)] & (layer.src >= 0))[:, None, :] & live[layer.dst][:, :, None]
        view = layer.pick(good)
        if layer.stride is None: good.view(-1)[layer.numbers[ends[..., None].expand(layer.size)]] = True
        elif layer.stride[0] == 0 and layer.size[0] > 1: view[:1] |= ends.any(0)[None, ..., None]
        else: view |= ends[..., None]
    return sum(int((masks[name] & ~good).sum()) for name, good in on.items())

def check(graph, masks, density):
    "Weights kept beyond the density, and empty layers; raises where an invariant does not hold."
    over = masks.kept - round(density*graph.total)
    assert 0 <= over < longest(graph), f'{over} weights more than asked for at density {density}'
    assert not (off := off_path(graph, masks)), f'{off} kept weights are on no kept path at density {density}'
    return dict(over=over, empty=sum(not m.any() for m in masks.values()))

def prune(model, graph):
    "Seconds for each mask, and what it keeps."
    from phew_nb.walks import phew
    row, larger = {}, None
    for d in densities:
        seconds = {}
        with clock(seconds, 'walk_s'): masks = phew(model, d, graph, seed=0)
        row |= {f'{k}_{d}': v for k, v in (seconds | check(graph, masks, d)).items()}
        assert larger is None or all((larger[n] | ~m).all() for n, m in masks.items()), 'masks are not nested'
        larger = masks
    return row

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
    heads = [c for c in columns if c not in ('refused', 'failed', 'build_s')]
    cells = [heads] + [[row.get(h, '') for h in heads] for row in rows.values()]
    wide = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    for row in cells: print(row[0].ljust(wide[0]), *(c.rjust(w) for c, w in zip(row[1:], wide[1:])))
    for name, row in rows.items():
        for what in ('refused', 'failed'):
            if row.get(what): print(f'{name} {what}: {row[what]}')

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
            {'model': name, 'failed': (run.stderr.strip().splitlines() or [f'exit {run.returncode}'])[-1]}
        rows = read(args.out) | {name: row}
        write(args.out, {n: rows[n] for n in [*order, *rows] if n in rows})
        print({k: v for k, v in row.items() if v != ''}, flush=True)
    show(read(args.out))

if __name__ == '__main__': main()
