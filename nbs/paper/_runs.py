"""The runs behind the paper's notebooks that `phew_compare` and `phew_sweep` have no words for.

    python nbs/paper/_runs.py traces                            # measures without training: results/traces
    python nbs/paper/_runs.py experiments/widening_small.toml   # any grid of experiments/: results/widening_small

A grid is a TOML file (see experiments/README.md). Beside the settings of a run it may have `rewire`, what becomes of the masks
('as pruned'; 'shuffle': the weights of each layer anywhere in it; a number: spread by that width factor), and `reinit`,
what becomes of the kept weights ('as drawn', or a name in `phew_nb.rewire.reinits`). Records are lines of records.jsonl.
What is there already is not made again: interrupted, the same command goes on.
"""
import argparse, hashlib, itertools, json, math, sys, time, tomllib, warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

root = Path(__file__).resolve().parents[2]
if str(root) not in sys.path: sys.path.insert(0, str(root))
as_made = dict(rewire='as pruned', reinit='as drawn')

# ----- traces: every method that needs no training, on real networks

trace_seeds = dict(resnet20=3, vgg19=3)
trace_methods = ('phew', 'random', 'uniform', 'erk', 'magnitude', 'snip', 'iter_snip', 'grasp', 'synflow', 'synflow_l2',
                 'phew_kernel', 'phew_uniform', 'phew_inverse', 'phew_squared')
trace_densities = .5, .2, .1, .05, .02, .01

def trace_jobs():
    "Every network, method, density and seed, a seed of all before the next."
    for s, m in itertools.product(range(max(trace_seeds.values())), trace_seeds):
        if s >= trace_seeds[m]: continue
        yield dict(model=m, method='dense', density=1., seed=s)
        for d, method in itertools.product(trace_densities, trace_methods):
            if (method, d) != ('phew_inverse', .5): # inverse walks hardly ever find the large weights that are left
                yield dict(model=m, method=method, density=d, seed=s)

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
    "What a network is like before training, its masks by the method of the job; data are CIFAR-10's."
    from phew_nb.experiments import Config, config_data, config_masks, config_model, need_data
    from phew_nb.graph import trace
    size, start, config = (3, 32, 32), time.time(), Config('cifar10', **job)
    net = config_model(config, size, 10).to(device)
    masks = config_masks(config, net, size, config_data(config) if config.method in need_data else None).to('cpu')
    seconds = time.time() - start
    return job | dict(data='cifar10') | graph_measures(net.cpu(), trace(net, size), masks) | dict(seconds=round(seconds, 1), device=device)

# ----- grids: runs of training, with masks moved or weights drawn anew in between

def grid_jobs(path):
    "The runs of a TOML grid: every combination of what is a list, a seed of all before the next."
    return sorted((job for table in tables(path) for job in combinations(table)), key=lambda job: job['seed'])

def combinations(table):
    "A dict for every combination of the values of its lists; `hidden` may be a list of lists."
    vary = {k: v for k, v in table.items() if isinstance(v, list) and (k != 'hidden' or isinstance(v[0], list))}
    for values in itertools.product(*vary.values()): yield as_made | table | dict(zip(vary, values))

def tables(path):
    "The grids of a file: its top level goes for each of the `[[grid]]` tables, if there are any."
    top = tomllib.loads(Path(path).read_text(encoding='utf8'))
    return [top | part for part in top.pop('grid', [{}])]

def moved(graph, masks, rewire, seed):
    "Masks after `rewire`."
    from phew_nb.rewire import shuffle, widen
    return masks if rewire == 'as pruned' else shuffle(masks, seed) if rewire == 'shuffle' else widen(graph, masks, float(rewire), seed=seed)

def as_config(job):
    "A job's `Config`, and what comes after pruning."
    from phew_nb.experiments import Config
    job = dict(job)
    after = {k: job.pop(k, v) for k, v in as_made.items()}
    if 'hidden' in job: job['hidden'] = tuple(job['hidden'])
    return Config(**job), after

def trained(job, device='cpu'):
    "The record of a run: pruned, rewired, drawn anew, trained."
    from phew_nb.config import resolved_init
    from phew_nb.experiments import config_data, config_masks, config_model, config_size, settings, stream, train
    from phew_nb.graph import trace
    from phew_nb.rewire import reinit
    start, (config, after) = time.time(), as_config(job)
    data = config_data(config)
    model, size = config_model(config, data.input_size, data.n_out).to(device), config_size(config, data.input_size)
    graph = trace(model, size)
    masks = moved(graph, config_masks(config, model, size, data), after['rewire'], stream(config.seed, 'other'))
    if after['reinit'] != 'as drawn': reinit(model, masks, after['reinit'], resolved_init(config), stream(config.seed, 'other'))
    found = compact_measures(trace(model, size), masks) | train(config, model, masks, data)
    plain = {k: getattr(config, k) for k in ('data', 'model', 'method', 'density', 'seed')} | after
    return plain | dict(epochs=config.full_recipe.epochs, n_train=len(data.train), n_test=len(data.test)) | found | dict(
        seconds=round(time.time() - start, 1), device=device, settings=settings(config))

def compact_measures(graph, masks):
    "What the ablations look at: trace without and with shortcuts, units with any weight."
    from phew_nb.metrics import path_trace
    from phew_nb.rewire import survivors
    alive = survivors(graph, masks)
    return dict(kept=masks.kept, total=graph.total, log10_trace=path_trace(graph, masks).log10,
                log10_trace_skips=path_trace(graph, masks, skips=True).log10,
                units=sum(int(alive[layer.dst].sum()) for layer in graph.layers),
                units_dense=sum(layer.dst.numel() for layer in graph.layers), empty=sum(not m.any() for m in masks.values()))

# ----- one filler for both

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
    parser.add_argument('what', help="'traces', or a TOML grid")
    parser.add_argument('--out', help='folder of results; by default results/ and the name of the grid')
    parser.add_argument('--seeds', type=int, help='only seeds below this')
    parser.add_argument('--where', nargs='*', default=[], help='only runs with these values, such as model=vgg19')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--workers', type=int, default=1, help='processes')
    parser.add_argument('--threads', type=int, default=1, help='of each process')
    args = parser.parse_args()
    jobs, do = (trace_jobs(), measure) if args.what == 'traces' else (grid_jobs(args.what), trained)
    if args.seeds: jobs = [job for job in jobs if job['seed'] < args.seeds]
    for k, v in (w.split('=') for w in args.where): jobs = [job for job in jobs if str(job[k]) == v]
    say = lambda *words: print(*words, flush=True)
    fill(jobs, do, args.out or root/'results'/Path(args.what).stem, args.device, args.workers, args.threads, say)

if __name__ == '__main__': main()
