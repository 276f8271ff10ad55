"""Time and memory of walks, as a table: `python bench/walks.py [--rows NAME ...] [--growth] [--repeat 3] [--device cpu]`

Every row runs in a process of its own, so that its peak memory is its own. Two baselines are measured in the same process:
one walk at a time (a draw from each row by `numpy.random.choice`, as the published code does it; on the same weights, for
two seconds), and random reads of the weights (16 bytes a step: what a walk cannot do without). `--growth` asks instead how
time grows: with the weights (VGG19 of other widths, density 0.05) and with the density (VGG19, up to 0.8).
"""
import argparse, csv, json, os, subprocess, sys, time
from statistics import median

from measure import peak, wait

ladder = [.8**k for k in range(3, 19)]
rows = { # name: (network, input size, densities; the last one is asked of an order up to the first)
    'mlp 784-300-300-784': ("mlp((784, 300, 300, 784), seed=0)", (784,), [.1]),
    'resnet20': ("resnet20(10, seed=0)", (3, 32, 32), [.028]),
    'resnet20 dense': ("resnet20(10, seed=0)", (3, 32, 32), [.512]),
    'resnet18 tiny-imagenet': ("resnet18(200, seed=0)", (3, 64, 64), [.028]),
    'vgg19': ("vgg19(100, seed=0)", (3, 32, 32), [.028]),
    'vgg19 ladder': ("vgg19(100, seed=0)", (3, 32, 32), ladder),
    'resnet152': ("tv('resnet152')", (3, 224, 224), [.05]), 'convnext_large': ("tv('convnext_large')", (3, 224, 224), [.05]),
    'vgg16': ("tv('vgg16')", (3, 224, 224), [.05]), 'vit_l_16': ("tv('vit_l_16')", (3, 224, 224), [.05]),
}
growth = {f'vgg19 width {w}': (f"vgg19(100, width={w}, seed=0)", (3, 32, 32), [.05]) for w in (.125, .25, .5, 1, 2)}
growth |= {f'vgg19 density {d}': ("vgg19(100, seed=0)", (3, 32, 32), [d]) for d in (.01, .02, .05, .1, .2, .5, .8)}

def one_at_a_time(graph, seconds=2):
    "Walks a second of a plain loop over steps, on chains of layers (the longest way through others)."
    import numpy as np
    tables = [np.abs(l.weight().double().cpu().numpy()).transpose(0, 2, 1, 3).reshape(l.size[0]*l.size[2], -1) for l in graph.layers
              if l.weight().numel() < 3e6 and bool(l.weight().abs().sum((1, 3)).all())]
    start, n = time.time(), 0
    while time.time() - start < seconds:
        for t in tables:
            row = t[n % len(t)]
            np.random.choice(len(row), p=row/row.sum())
        n += 1
    return n*len(tables)/(time.time() - start) # steps a second

def random_reads(graph, n=2_000_000):
    "Random reads a second of the largest parameter, 16 bytes each."
    import torch
    p = max(graph.params.values(), key=lambda p: p.numel()).detach().reshape(-1)
    p, at = p[:p.numel()//4*4].view(-1, 4), torch.randint(p.numel()//4, (n,), device=p.device)
    p[at[:1000]]
    wait(p.device); start = time.time(); p[at]; wait(p.device)
    return n/(time.time() - start)

def measure(name, repeat, device):
    "One row, in this process."
    import torch, torchvision
    from phew_nb.graph import trace
    from phew_nb.models import mlp, resnet18, resnet20, vgg19
    from phew_nb.walks import walk_order
    tv = torchvision.models.get_model
    code, size, densities = (rows | growth)[name]
    model = eval(code, dict(mlp=mlp, resnet18=resnet18, resnet20=resnet20, vgg19=vgg19, tv=tv)).to(device)
    start = time.time(); graph = trace(model, size); traced = time.time() - start
    if device != 'cpu': walk_order(graph, densities[0], seed=0, progress=False) # warm up
    before, times = peak(device), []
    for seed in range(repeat):
        order = masks = None # of the run before
        start = time.time()
        order = walk_order(graph, densities[0], seed=seed, progress=False)
        masks = [order.masks(d) for d in densities]
        wait(device); times.append(time.time() - start)
        after, steps = peak(device), order.n_walks*len(graph.layers)
    times.sort()
    return dict(network=name, device=device, density=round(densities[0], 4), masks=len(masks), weights=graph.total, walks=order.n_walks,
                kept=masks[0].kept, trace_s=round(traced, 3), walk_s=round(median(times), 3), best_s=round(times[0], 3),
                memory_over_weights=round((after - before)/(4*graph.total), 2),
                steps_per_s=int(steps/median(times)), loop_steps_per_s=int(one_at_a_time(graph)),
                random_reads_per_s=int(random_reads(graph)), threads=torch.get_num_threads())

def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument('--rows', nargs='*', default=list(rows)); ask.add_argument('--repeat', type=int, default=3)
    ask.add_argument('--growth', action='store_true'); ask.add_argument('--device', default='cpu')
    ask.add_argument('--out', help='default: results/walks.csv, walks_growth.csv, with the device in the name if it is not the CPU')
    ask.add_argument('--one', help=argparse.SUPPRESS)
    args, results = ask.parse_args(), []
    if args.one: return print(json.dumps(measure(args.one, args.repeat, args.device)))
    name = '_'.join(['walks'] + ['growth']*args.growth + [args.device]*(args.device != 'cpu'))
    args.out = args.out or f'results/{name}.csv'
    for name in growth if args.growth else args.rows:
        run = subprocess.run([sys.executable, __file__, '--one', name, '--repeat', str(args.repeat), '--device', args.device],
                             capture_output=True, text=True)
        if run.returncode: print(name, 'failed:', run.stderr.strip().splitlines()[-1]); continue
        results.append(json.loads(run.stdout.splitlines()[-1]))
        if len(results) == 1: print('  '.join(results[0]))
        print('  '.join(str(v) for v in results[-1].values()), flush=True)
    os.makedirs(os.path.dirname(args.out) or '.', exist_ok=True)
    with open(args.out + '.part', 'w', newline='') as f:
        table = csv.DictWriter(f, results[0]); table.writeheader(); table.writerows(results)
    os.replace(args.out + '.part', args.out)

if __name__ == '__main__': main()
