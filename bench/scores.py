"""Time and memory of pruning by scores, as tables: `python bench/scores.py [--only synflow|methods] [--quick] [--device cpu]`

SynFlow is compared with a plain loop of the usual kind in one process: a deep copy of the network at each step, float64 as
well, and the same exact number of weights after each step; both must give the same masks. Every row of the other table runs
in a process of its own, so that its peak memory is its own. `--quick` takes few iterations.
"""
import argparse, copy, json, subprocess, sys, time, warnings
from statistics import median

from measure import peak, wait

networks = {'resnet20': ('resnet20(10, seed=0)', (3, 32, 32)), 'vgg19': ('vgg19(10, seed=0)', (3, 32, 32)),
            'resnet50': ("tv('resnet50')", (3, 224, 224))}
methods = ['random', 'uniform', 'erk', 'magnitude', 'snip', 'iter_snip', 'grasp', 'synflow', 'synflow_l2', 'phew', 'phew_kernel']

def build(name, device='cpu'):
    "A network and the size of its input."
    import torchvision
    from phew_nb.models import resnet20, vgg19
    code, size = networks[name]
    return eval(code, dict(resnet20=resnet20, vgg19=vgg19, tv=torchvision.models.get_model)).to(device), size

def plain(model, graph, size, k, iterations):
    "SynFlow, plainly: copy, take magnitudes, go forward and backward, choose."
    import torch
    from phew_nb.masks import Masks
    from phew_nb.scores import steps_down
    device = next(model.parameters()).device
    masks = {n: torch.ones_like(p, dtype=torch.bool) for n, p in graph.params.items()}
    for left in steps_down(graph.total, k, iterations):
        net = copy.deepcopy(model).double().eval()
        params = dict(net.named_parameters())
        with torch.no_grad():
            for n, p in params.items(): p.abs_()
            for n, mask in masks.items(): params[n].mul_(mask)
        net(torch.ones(1, *size, dtype=torch.float64, device=device)).sum().backward()
        with torch.no_grad():
            flat = torch.cat([(params[n].grad*params[n]).flatten() for n in masks])
            threshold = flat.kthvalue(len(flat) - left + 1)[0]
            keep = flat > threshold
            keep[(flat == threshold).nonzero()[:left - int(keep.sum()), 0]] = True
        masks = {n: part.view_as(masks[n]) for n, part in zip(masks, keep.split([m.numel() for m in masks.values()]))}
    return Masks({n: m.cpu() for n, m in masks.items()})

class Timed:
    "A function that keeps the time of each call."
    def __init__(self, f, device): self.f, self.device, self.times = f, device, []
    def __call__(self, *args, **kwargs):
        wait(self.device); start = time.perf_counter()
        out = self.f(*args, **kwargs)
        wait(self.device); self.times.append(time.perf_counter() - start)
        return out

    @property
    def seconds(self): return sum(self.times)

def compare(name, iterations, device, density=.05):
    "Ours and the plain loop, in turn: seconds, shares, and whether the masks agree."
    from phew_nb import synflow as module
    from phew_nb.graph import trace
    model, size = build(name, device)
    graph = trace(model, size)
    k, choose = round(density*graph.total), Timed(module._keep_best, device)
    steps, original = Timed(module._flow_steps, device), (module._keep_best, module._flow_steps, module._ByPixels.__call__)
    passes = Timed(module._ByPixels.__call__, device)
    ours, theirs = Timed(module.synflow, device), Timed(plain, device)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        plain(model, graph, size, k, 1), module.synflow(model, kept=k, input_size=size, iterations=1) # warm up
        module._keep_best, module._flow_steps = choose, steps
        module._ByPixels.__call__ = lambda self: passes(self)
        a = ours(model, kept=k, input_size=size, iterations=iterations)
        module._keep_best, module._flow_steps, module._ByPixels.__call__ = original
        b = theirs(model, graph, size, k, iterations)
    return dict(network=name, iterations=iterations, ours=ours.seconds, plain=theirs.seconds, ratio=ours.seconds/theirs.seconds,
                choice=median(choose.times)/(median(choose.times) + median(passes.times)), busiest=choose.seconds/steps.seconds,
                setup=1 - steps.seconds/ours.seconds, same=a == b)

def measure(name, method, iterations, device):
    "One row of the table of methods, in this process."
    import torch
    from phew_nb.graph import trace
    from phew_nb.pruners import prune
    model, size = build(name, device)
    n, classes = (100, 10) if size[1] == 32 else (16, 1000)
    gen = torch.Generator().manual_seed(0)
    dl = [(torch.randn(n, *size, generator=gen), torch.randint(classes, (n,), generator=gen))]
    graph = trace(model, size)
    more = dict(iterations=iterations) if method in ('iter_snip', 'synflow', 'synflow_l2') else {}
    before = peak(device)
    wait(device); start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        masks = prune(model, method, .05, size if 'synflow' in method else graph, dl=dl, **more)
    wait(device)
    return dict(network=name, method=method, seconds=time.perf_counter() - start, memory=peak(device) - before,
                weights=4*graph.total, kept=masks.kept, **more)

def in_a_process(name, method, iterations, device):
    command = [sys.executable, __file__, '--row', name, method, str(iterations), '--device', device]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode: sys.exit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])

def synflow_table(iterations, device):
    print('| network | ours, s | plain loop, s | ours over plain | choice, of a step (medians) | choice, of all steps | setup, of all '
          '| same masks |\n|---|---|---|---|---|---|---|---|')
    for name in 'resnet20', 'vgg19':
        r = compare(name, iterations, device)
        print(f"| {name}, {iterations} iterations | {r['ours']:.1f} | {r['plain']:.1f} | {r['ratio']:.2f} | {r['choice']:.2f} | {r['busiest']:.2f} | {r['setup']:.2f} | "
              f"{'yes' if r['same'] else 'NO'} |", flush=True)

def methods_table(iterations, device):
    print('| network | method | iterations | seconds | seconds an iteration | peak memory over the weights |\n|---|---|---|---|---|---|')
    for name, method in ((n, m) for n in ('vgg19', 'resnet50') for m in methods):
        r = in_a_process(name, method, iterations, device)
        n = r.get('iterations', 1)
        print(f"| {name} | {method} | {n if n > 1 else ''} | {r['seconds']:.2f} | {r['seconds']/n:.2f} | {r['memory']/r['weights']:.1f} |", flush=True)

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', choices=['synflow', 'methods'])
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--row', nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row: print(json.dumps(measure(args.row[0], args.row[1], int(args.row[2]), args.device)))
    else:
        if args.only != 'methods': synflow_table(10 if args.quick else 100, args.device)
        if args.only != 'synflow': methods_table(3 if args.quick else 10, args.device)
