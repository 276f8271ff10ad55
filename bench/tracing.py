"""How long tracing takes beside another version: `python bench/tracing.py FOLDER [--repeat 2] [--names NAME ...]`, with the other's checkout.

    git worktree add ../before 535d65b^; python bench/tracing.py ../before
"""
import argparse, os, subprocess, sys, time
from pathlib import Path

root = Path(__file__).resolve().parent.parent

def worker(repeat):
    "Read names of torchvision's classifiers, print the least seconds of some traces."
    import torch, torchvision
    from phew_nb.graph import trace
    torch.set_num_threads(1)
    for name in map(str.strip, sys.stdin):
        size = torchvision.models.get_model_weights(name).DEFAULT.transforms().crop_size[0]
        model, seconds = torchvision.models.get_model(name, weights=None), []
        for _ in range(repeat):
            start = time.perf_counter()
            trace(model, (3, size, size))
            seconds.append(time.perf_counter() - start)
        print(min(seconds), flush=True)

def started(folder, repeat):
    command = [sys.executable, '-W', 'ignore', __file__, '--worker', '--repeat', str(repeat)]
    env = os.environ | dict(PYTHONPATH=str(folder))
    return subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

def asked(process, name):
    process.stdin.write(f'{name}\n')
    return float(process.stdout.readline())

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', nargs='?', type=Path, help="the other version's checkout")
    parser.add_argument('--names', nargs='+', help='classifiers of torchvision; all but vit_h_14 (2.5 GB) by default')
    parser.add_argument('--repeat', type=int, default=2, help='traces of each, of which the least counts')
    parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker: return worker(args.repeat)
    import torchvision
    names = args.names or [n for n in torchvision.models.list_models(module=torchvision.models) if n != 'vit_h_14']
    before, now, sums = started(args.folder.resolve(), args.repeat), started(root, args.repeat), [0, 0]
    print('| network | before, s | now, s | ratio |\n|---|---|---|---|')
    for i, name in enumerate(names): # which goes first takes turns
        pair = [(p, asked(p, name)) for p in ((before, now), (now, before))[i % 2]]
        old, new = dict(pair)[before], dict(pair)[now]
        sums = [sums[0] + old, sums[1] + new]
        print(f'| {name} | {old:.3f} | {new:.3f} | {new/old:.2f} |', flush=True)
    print(f'| all | {sums[0]:.1f} | {sums[1]:.1f} | {sums[1]/sums[0]:.3f} |')
    for p in (before, now): p.stdin.close(); p.wait()

if __name__ == '__main__': main()
