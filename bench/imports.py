"What importing takes over `import torch`: `python bench/imports.py [--repeat 5]`, a row for each module below training."
import argparse, statistics, subprocess, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
code = """
import sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import phew_nb.{0}
print(middle - start, time.perf_counter() - middle, *(m for m in ("fastai", "pandas", "matplotlib") if m in sys.modules))
"""

def measured(module):
    "Seconds of `import torch`, seconds of the module after it, and what heavy came along, in a process of its own."
    run = subprocess.run([sys.executable, '-W', 'ignore', '-c', code.format(module)], cwd=root, capture_output=True, text=True, check=True)
    torch, own, *heavy = run.stdout.split()
    return float(torch), float(own), heavy

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--repeat', type=int, default=5, help='processes for each module; the median counts')
    args = parser.parse_args()
    names = [p.stem[3:] for p in sorted((root/'nbs').glob('[0-4][0-9]_*.ipynb'))]
    print('| module | over `import torch`, s | `import torch`, s | in parts of it | came along |\n|---|---|---|---|---|')
    for name in names:
        found = [measured(name) for _ in range(args.repeat)]
        torch, own = (statistics.median(f[i] for f in found) for i in (0, 1))
        print(f"| {name} | {own:.3f} | {torch:.2f} | {own/torch:.2f} | {', '.join(found[0][2])} |", flush=True)

if __name__ == '__main__': main()
