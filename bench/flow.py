"""Time of sums over paths and of metrics, tracing apart: `python bench/flow.py [--threads N] [--quick]`

Masks keep a tenth of the weights, at random. The shortest of five runs counts. The last column is the plain way of the
literature for a trace: a ones image through the squared network in float64, forward and backward. On two idle cores the
trace and the count of a masked ResNet20 or VGG19 take under half a second.
"""
import argparse, time

import torch, torchvision
from measure import peak
from phew_nb.flow import linearised, path_flow
from phew_nb.graph import trace
from phew_nb.masks import Masks
from phew_nb.metrics import count_paths, effective_density, flops, path_trace, summary, widths
from phew_nb.models import mlp, resnet20, vgg19

tv = lambda name: lambda: torchvision.models.get_model(name, weights=None)
networks = {'resnet20': (lambda: resnet20(10, seed=0), (3, 32, 32)), 'vgg19': (lambda: vgg19(10, seed=0), (3, 32, 32)),
            'mlp, 1000 layers of 100': (lambda: mlp([100]*1001, bias=False, seed=0), (100,)),
            'resnet50': (tv('resnet50'), (3, 224, 224)), 'resnet152': (tv('resnet152'), (3, 224, 224)),
            'densenet201': (tv('densenet201'), (3, 224, 224)), 'swin_t': (tv('swin_t'), (3, 224, 224))}

def seconds(task, repeat=5):
    "The shortest of several runs."
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        task()
        times.append(time.perf_counter() - start)
    return min(times)

def random_masks(graph):
    gen = torch.Generator().manual_seed(0)
    return Masks({name: torch.rand(p.shape, generator=gen) < .1 for name, p in graph.params.items()})

def measure(build, size):
    "Seconds of each task on one network."
    model = build()
    start = time.perf_counter()
    graph = trace(model, size)
    found = {'tracing': time.perf_counter() - start}
    masks = random_masks(graph)
    net = linearised(model, 2, masks=masks)
    tasks = {'path_trace': lambda: path_trace(graph, masks), 'dense': lambda: path_trace(graph),
             'count_paths': lambda: count_paths(graph, masks), 'shares': lambda: path_flow(graph, masks, 1).shares(),
             'widths': lambda: widths(graph, masks), 'effective_density': lambda: effective_density(graph, masks),
             'flops': lambda: flops(graph, masks), 'summary': lambda: summary(graph, masks)}
    found |= {name: seconds(task) for name, task in tasks.items()}
    try: found['ones image'] = seconds(lambda: net.gradients(*net.ones(size)), 2)
    except OverflowError: found['ones image'] = float('inf')
    return found

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--quick', action='store_true', help='the first two networks only')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = {}
    for name, (build, size) in list(networks.items())[:2 if args.quick else None]:
        rows[name] = measure(build, size)
        if len(rows) == 1: print('| network |', ' | '.join(rows[name]), '|'); print('|---'*(len(rows[name]) + 1) + '|')
        cells = ['overflow' if v == float('inf') else f'{v:.3f}' for v in rows[name].values()]
        print(f'| {name} |', ' | '.join(cells), '|', flush=True)
    print(f'\npeak memory {peak()/2**30:.1f} GiB, torch {torch.__version__}, {args.threads} threads')

if __name__ == '__main__': main()
