"""The measures behind the paper's notebooks that need no training, of every method on ResNet20, VGG19 and ResNet18: results/traces.

    python nbs/paper/_runs.py traces

Records are lines of records.jsonl. What is there already is not made again: interrupted, the same command goes on.
Runs with training are grids of experiments/, done by `phew_sweep`.
"""
import argparse, hashlib, itertools, json, math, sys, time, warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

root = Path(__file__).resolve().parents[2]
if str(root) not in sys.path: sys.path.insert(0, str(root))

# ----- traces: every method that needs no training, on real networks

trace_pairs = { # network and data set of section 5: size of an image, classes, seeds
    ('resnet20', 'cifar10'):       ((3, 32, 32), 10, 3),
    ('vgg19', 'cifar10'):          ((3, 32, 32), 10, 3),
    ('resnet18', 'tiny_imagenet'): ((3, 64, 64), 200, 1),
    ('resnet20', 'cifar100'):      ((3, 32, 32), 100, 3),
    ('vgg19', 'cifar100'):         ((3, 32, 32), 100, 3),
    ('vgg19', 'tiny_imagenet'):    ((3, 64, 64), 200, 1)}
trace_networks = {('vgg19', 'tiny_imagenet'): dict(hidden=[1024, 1024])} # what else a network is made with
trace_methods = ('phew', 'random', 'uniform', 'erk', 'magnitude', 'snip', 'iter_snip', 'grasp', 'synflow', 'synflow_l2',
                 'phew_kernel', 'phew_uniform', 'phew_inverse', 'phew_squared')
trace_densities = .5, .2, .1, .05, .02, .01

def trace_jobs():
    "Every network and its data, method, density and seed, a seed of all before the next."
    for s, ((m, data), (*_, seeds)) in itertools.product(range(3), trace_pairs.items()):
        if s >= seeds: continue
        job = dict(model=m, data=data, **trace_networks.get((m, data), {}))
        yield job | dict(method='dense', density=1., seed=s)
        for d, method in itertools.product(trace_densities, trace_methods):
            if (method, d) == ('phew_inverse', .5): continue # inverse walks hardly ever find the large weights that are left
            if method == 'iter_snip' and data != 'cifar10': continue # thirty gradients of ten examples of 100 or 200 classes
            yield job | dict(method=method, density=d, seed=s)

def log10(n): return math.log10(n) if n else -math.inf

def graph_measures(net, graph, masks):
    "Traces and numbers of paths as log10 (`spatial` of an image of ones, `skips` with identity shortcuts), units by layer."
    from phew_nb.metrics import count_paths, effective_density, flops, path_trace, widths
    units, skips = widths(graph, masks), widths(graph, masks, skips=True)
    return dict(kept=masks.kept, total=graph.total, spatial=path_trace(net, masks, graph, spatial=True).log10,
                graph=path_trace(graph, masks).log10, skips=path_trace(graph, masks, skips=True).log10,
                paths=log10(count_paths(graph, masks)), paths_skips=log10(count_paths(graph, masks, skips=True)),
                effective=float(effective_density(graph, masks)), flops=int(flops(graph, masks)),
                empty=sum(not m.any() for m in masks.values()), widths=[w.live for w in units.values()],
                live_skips=[w.live for w in skips.values()], filters=[w.kept for w in units.values()])

def measure(job, device='cpu'):
    "What a network is like before training, its masks by the method of the job."
    from phew_nb.experiments import Config, config_data, config_masks, config_model, need_data
    from phew_nb.graph import trace
    size, n_out, _ = trace_pairs[job['model'], job['data']]
    start, config = time.time(), Config(**job)
    net = config_model(config, size, n_out).to(device)
    masks = config_masks(config, net, size, config_data(config) if config.method in need_data else None).to('cpu')
    seconds = time.time() - start
    return job | graph_measures(net.cpu(), trace(net, size), masks) | dict(seconds=round(seconds, 1), device=device)

# ----- the filler

def run_id(job): return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:12]

def quietly(do, job, device, threads):
    "A record of `do(job, device)`, with its name."
    import torch
    torch.set_num_threads(threads)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # empty layers: the record says so
        return dict(run=run_id(job)) | do(job, device)

def fill(jobs, do, folder, device='cpu', workers=1, threads=1, say=print):
    "Make the records that a folder lacks; a job that fails is said, and the rest go on."
    from phew_nb.experiments import append_line, read_records, records_file
    (folder := Path(folder)).mkdir(parents=True, exist_ok=True)
    done = {r['run'] for r in read_records(folder)}
    todo = list({run_id(job): job for job in jobs if run_id(job) not in done}.values())
    with ProcessPoolExecutor(workers, get_context('spawn')) as pool:
        running = {pool.submit(quietly, do, job, device, threads): job for job in todo}
        for n, future in enumerate(as_completed(running), 1):
            if error := future.exception(): say(f'failed: {running[future]}: {error!r}'); continue
            append_line(folder/records_file, record := future.result())
            say(f"{n}/{len(todo)}", *running[future].values(), record.get('accuracy', ''), f"{record['seconds']} s")

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['traces'])
    parser.add_argument('--out', default=root/'results'/'traces', help='folder of results')
    parser.add_argument('--seeds', type=int, help='only seeds below this')
    parser.add_argument('--where', nargs='*', default=[], help='only runs with these values, such as model=vgg19')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--workers', type=int, default=1, help='processes')
    parser.add_argument('--threads', type=int, default=1, help='of each process')
    args = parser.parse_args()
    jobs = list(trace_jobs())
    if args.seeds: jobs = [job for job in jobs if job['seed'] < args.seeds]
    for k, v in (w.split('=') for w in args.where): jobs = [job for job in jobs if str(job[k]) == v]
    say = lambda *words: print(*words, flush=True)
    fill(jobs, measure, args.out, args.device, args.workers, args.threads, say)

if __name__ == '__main__': main()
