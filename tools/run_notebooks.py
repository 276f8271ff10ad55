"Run notebooks in place and keep their outputs: `python tools/run_notebooks.py [NOTEBOOK ...] [--flags 'slow data']`."
import argparse, os, re, sys, tempfile, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell
from nbdev.config import get_config

root = Path(__file__).resolve().parent.parent

def directives(cell):
    "The names of a cell's `#| name` lines, with what follows them."
    return dict(m.groups() for m in re.finditer(r'^#\s*\|\s*([\w-]+)[ :]*(.*)$', cell.source, re.M))

def is_skipped(cell, skip):
    "Whether a cell is left alone, with the outputs it has."
    found = directives(cell)
    return bool(skip & found.keys()) or found.get('eval') == 'false' or 'nbdev_export(' in cell.source

def places():
    "Folders of this machine and what stands for them in a stored output, the longest first."
    pairs = {os.environ.get('FASTAI_HOME', ''): '~/.fastai', str(root): '.', sys.prefix: 'venv', sys.base_prefix: 'python',
             str(Path.home()): '~', tempfile.gettempdir(): 'temp'}
    return sorted(((k, v) for k, v in pairs.items() if len(k) > 1), key=lambda p: -len(p[0]))

def clean_warnings(text):
    "Warnings without the numbers of cells they came from, and without those of other libraries."
    text = re.sub(r'^<ipython-input-[^>]*>:\d+: (.*\n)(?:  .*\n?)?', r'\1', text, flags=re.M)
    return re.sub(r'^venv/\S*site-packages/(?!phew_nb)\S+:\d+: .*\n(?:  .*\n?)?', '', text, flags=re.M)

def clean_text(text):
    "Text without escape sequences, overwritten progress lines, control characters and absolute paths."
    text = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', text)
    text = re.sub(r'[^\n]*\r(?!\n)', '', text)
    text = re.sub(r'[\x00-\x08\x0b-\x1f\x7f]', '', text)
    for place, name in places(): text = re.sub(re.escape(place) + r'(?![\w-])', name, text)
    text = re.sub(r'\btemp/tmp\w{8}\b', 'temp', text) # another one each time
    return clean_warnings(text)

def clean_output(out):
    "One output with all of its text cleaned; None for what is only a progress bar."
    data = out.get('data', {})
    if '<progress' in ''.join(data.get('text/html', '')): return None
    for holder, key in [(out, 'text')] + [(data, k) for k in data if k.startswith('text/')]:
        if key in holder: holder[key] = clean_text(''.join(holder[key])).splitlines(True)
    return out if data or ''.join(out.get('text', '')).strip() else None

def run_cell(shell, cell):
    "Run a cell and store its outputs; a closing `;` hides the value, not what was printed."
    source = cell.source
    cell.outputs = []
    if source.rstrip().endswith(';'): cell.source += '\nNone'
    shell.cell(cell)
    cell.source = source
    cell.outputs = [o for o in map(clean_output, cell.outputs) if o]

def run_notebook(fn, skip):
    "Run one notebook in its own folder, write it back with its outputs; returns the seconds and the error, if any."
    start, nb = time.time(), read_nb(fn)
    if any('skip_exec: true' in c.source for c in nb.cells[:2]): return 0, ''
    sys.path.insert(0, str(root))
    os.chdir(fn.parent)
    shell = CaptureShell(fn, mpl_format='png')
    for cell in (c for c in nb.cells if c.cell_type == 'code' and not is_skipped(c, skip)):
        run_cell(shell, cell)
        if shell.exc: return time.time() - start, f'{cell.source}\n\n{shell.prettytb(fname=fn)}'
    write_nb(nb, fn)
    return time.time() - start, ''

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('notebooks', nargs='*', help='notebooks to run; all of nbs/ by default')
    parser.add_argument('--flags', default='', help='cells to run that are skipped otherwise: slow cuda data')
    args = parser.parse_args()
    fns = [Path(f).resolve() for f in args.notebooks] or sorted((root/'nbs').rglob('[!._]*.ipynb'))
    skip = set(get_config(path=root).tst_flags.split()) - set(args.flags.split())
    errors = 0
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        for fn, (seconds, error) in zip(fns, pool.map(run_notebook, fns, [skip]*len(fns))):
            if error: print(error, file=sys.stderr)
            print(f'{fn.relative_to(root)}: {seconds:.1f} s{" FAILED" if error else ""}', flush=True)
            errors += bool(error)
    sys.exit(errors > 0)

if __name__ == '__main__': main()
