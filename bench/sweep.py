"What a sweep costs beside its runs: `python bench/sweep.py [--runs 10000] [--together] [--step] [--command]`."
import argparse, random, shutil, tempfile, time, warnings
from pathlib import Path

warnings.filterwarnings('ignore')
from phew_nb.store import claim, load_results, read_records, write_record

def records(n):
    "Records as a run makes them, of 20 epochs."
    one = read_records(Path(__file__).resolve().parent.parent/'results'/'digits')[1]
    methods, densities = [f'method{i}' for i in range(8)], [round(.01*k, 2) for k in range(1, 17)]
    for i in range(n):
        more = dict(run=f'{i:012x}', method=methods[i % 8], density=densities[i//8 % 16], seed=i//128, accuracy=random.random())
        yield one | more

def timed(f):
    "Seconds of wall clock and of this process's work, and the value."
    wall, own = time.perf_counter(), time.process_time()
    value = f()
    return time.perf_counter() - wall, time.process_time() - own, value

def bench_store(folder, n):
    "Claim and record n runs; read and tabulate them."
    def write():
        for r in records(n):
            with claim(folder, r['run']) as mine:
                if mine: write_record(folder, r)
    def table():
        from phew_nb.plots import results_table
        return results_table(load_results(folder))
    wall, own, _ = timed(write)
    yield 'claim and record a run', f'{1e3*wall/n:.2f} ms', f'{1e3*own/n:.2f} ms', 'under 5 ms'
    wall, own, found = timed(lambda: load_results(folder))
    yield f'read {n:,} records', f'{wall:.1f} s', f'{own:.1f} s', ''
    wall, own, found = timed(table)
    yield f'read and tabulate {n:,} records', f'{wall:.1f} s', f'{own:.1f} s', 'about 5 s'

def bench_together(units, n):
    "Perceptrons on the digits, one by one and together."
    from phew_nb.config import grid
    from phew_nb.experiments import run
    from phew_nb.together import run_together
    methods = ['dense', 'phew', 'random', 'magnitude']
    configs = grid(seed=range(3), method=methods, density=[.02, .05, .1], hidden=(units, units))[:n]
    run(configs[0])
    wall, own, some = timed(lambda: run_together(configs, 'cpu'))
    yield f'{n} perceptrons 64-{units}-{units}-10, 20 epochs, together', f'{wall:.1f} s', f'{own:.1f} s', ''
    wall, all, ones = timed(lambda: [run(c, 'cpu') for c in configs])
    equal = sum(a['accuracy'] == b['accuracy'] for a,b in zip(some, ones))
    yield f'    one by one: {equal} of {n} accuracies are equal', f'{wall:.1f} s', f'{all:.1f} s', f'{all/own:.1f} times'

def bench_step(epochs):
    "A step of the digits perceptron: in `run`, with all that it watches, and in a plain loop with masks."
    import torch
    from phew_nb.config import Config
    from phew_nb.experiments import config_loaders, prepared, run
    torch.set_num_threads(1)
    config = Config(density=.1, epochs=epochs)
    run(config, 'cpu')
    data, model, masks, _ = prepared(config)
    batches = config_loaders(config, data, 'cpu').train
    optimizer = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9, weight_decay=1e-4)
    masks.apply(model); masks.keep(model, optimizer)
    def plain():
        n = 0
        for _ in range(epochs):
            for x,y in batches:
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step(); optimizer.zero_grad(); n += 1
        return n
    wall, own, n = timed(plain)
    yield 'a step of a plain loop with masks', f'{1e3*wall/n:.2f} ms', f'{1e3*own/n:.2f} ms', ''
    wall, own, _ = timed(lambda: run(config, 'cpu'))
    yield 'the same in `run`, with tests after each epoch, pruning and measures', f'{1e3*wall/n:.2f} ms', f'{1e3*own/n:.2f} ms', ''

def bench_command(folder, seeds):
    "The first command of the README in processes of its own: its runs one by one, and together where it pays."
    import subprocess, sys
    code = ('import sys; from phew_nb.config import grid; from phew_nb.cli import usual_methods; from phew_nb.sweep import sweep\n'
            'sweep(grid(seed=range(int(sys.argv[1])), method=list(usual_methods), density=[.02, .05, .1]), sys.argv[2], "cpu",'
            ' progress=False, together=None if sys.argv[3] == "together" else False)')
    for how in 'one by one', 'together':
        wall, _, done = timed(lambda: subprocess.run([sys.executable, '-W', 'ignore', '-c', code, str(seeds), f'{folder}/{how}', how]))
        yield f'the runs of `phew_compare`, {seeds} seeds, {how}', f'{wall:.0f} s', '', 'less than half' if how == 'together' else ''

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--runs', type=int, default=10_000, help='records to write and read')
    parser.add_argument('--together', action='store_true', help='also train perceptrons together and one by one')
    parser.add_argument('--step', action='store_true', help='also a step of training, in `run` and in a plain loop')
    parser.add_argument('--command', action='store_true', help="also the README's first command, together and one by one")
    parser.add_argument('--seeds', type=int, default=3, help='of --command')
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    rows = [bench_store(folder, args.runs)]
    if args.together: rows += [bench_together(units, n) for units,n in ((100, 30), (200, 10), (300, 10), (500, 10))]
    if args.step: rows.append(bench_step(20))
    if args.command: rows.append(bench_command(folder/'command', args.seeds))
    print('| what | wall | processor | to reach |\n|---|---|---|---|')
    try:
        for part in rows:
            for row in part: print('| ' + ' | '.join(row) + ' |', flush=True)
    finally: shutil.rmtree(folder)

if __name__ == '__main__': main()
