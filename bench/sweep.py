"What a sweep costs beside its runs: `python bench/sweep.py [--runs 10000] [--together]`."
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

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--runs', type=int, default=10_000, help='records to write and read')
    parser.add_argument('--together', action='store_true', help='also train perceptrons together and one by one')
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    rows = [bench_store(folder, args.runs)]
    if args.together: rows += [bench_together(units, n) for units,n in ((100, 30), (200, 10), (300, 10), (500, 10))]
    print('| what | wall | processor | to reach |\n|---|---|---|---|')
    try:
        for part in rows:
            for row in part: print('| ' + ' | '.join(row) + ' |', flush=True)
    finally: shutil.rmtree(folder)

if __name__ == '__main__': main()
