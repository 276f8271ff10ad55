"The shape of the project: notebooks and modules, layers, directives, stored outputs."
import ast, json, re, subprocess, sys
from pathlib import Path

import pytest

root = Path(__file__).resolve().parent.parent
notebooks = sorted((root/'nbs').rglob('[!._]*.ipynb'))
numbered = [p for p in notebooks if re.match(r'\d\d_', p.name) and p.parent.name == 'nbs']
number = {p.stem[3:]: int(p.name[:2]) for p in numbered}
ids = lambda p: p.stem

def code_cells(path):
    "The sources of a notebook's code cells."
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [''.join(c['source']) for c in cells if c['cell_type'] == 'code']

def imported(source):
    "The modules of this library that a piece of Python imports."
    lines = '\n'.join(l for l in source.splitlines() if not re.match(r'\s*[%!]', l))
    for node in ast.walk(ast.parse(lines)):
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('phew_nb.'): yield node.module.split('.')[1]
        elif isinstance(node, ast.ImportFrom) and node.level == 1 and node.module: yield node.module.split('.')[0]
        elif isinstance(node, ast.Import): yield from (a.name.split('.')[1] for a in node.names if a.name.startswith('phew_nb.'))

@pytest.mark.parametrize('path', numbered, ids=ids)
def test_module_is_named_as_its_notebook(path):
    names = [m[1] for s in code_cells(path) for m in re.finditer(r'^#\|\s*default_exp\s+(\S+)', s, re.M)]
    assert names == [path.stem[3:]] and (root/'phew_nb'/f'{names[0]}.py').exists()

def test_every_module_has_its_notebook():
    modules = {p.stem for p in (root/'phew_nb').glob('*.py')} - {'__init__', '__main__', '_modidx', 'all'}
    assert modules == number.keys()

@pytest.mark.parametrize('path', numbered, ids=ids)
def test_a_notebook_imports_lower_numbers_only(path):
    own = int(path.name[:2])
    for source in code_cells(path): # (its own module: to show the call before the machinery)
        for module in {*imported(source)} - ({path.stem[3:]} if not source.startswith('#| export') else set()):
            assert number.get(module, 99) < own, f'{path.name} imports {module}'

below = [name for name,k in number.items() if k < 50]

@pytest.fixture(scope='module')
def loaded():
    "What each module below training brings in, when they are imported in their order."
    code = """import sys, importlib
for name in sys.argv[1:]:
    importlib.import_module(f'phew_nb.{name}')
    print(name, *({'fastai', 'pandas'} & sys.modules.keys()))"""
    run = subprocess.run([sys.executable, '-c', code, *below], cwd=root, capture_output=True, text=True)
    return {name: found for name, *found in map(str.split, run.stdout.splitlines())}, run.stderr

@pytest.mark.parametrize('name', below)
def test_no_fastai_below_training(loaded, name):
    found, wrong = loaded
    assert found.get(name) == [], wrong

@pytest.mark.parametrize('path', numbered, ids=ids)
def test_exported_cells(path):
    for source in code_cells(path):
        exported = re.search(r'^\s*#\s*\|\s*export', source, re.M)
        if not exported: continue
        assert re.match(r'#\| exporti?$', source, re.M), f'{path.name}: the directive must be the first line of\n{source[:200]}'
        assert not re.search(r'^#\|\s*(slow|cuda|data)\b', source, re.M), f'{path.name}: a flagged cell is exported\n{source[:200]}'
        long = [l for l in source.splitlines() if len(l) > 120]
        assert not long, f'{path.name}: longer than 120 columns: {long[0]}'

@pytest.mark.parametrize('path', notebooks, ids=ids)
def test_outputs_are_stored_and_hold_no_errors(path):
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    outputs = [o for c in cells for o in c.get('outputs', [])]
    assert outputs, f'{path.name} was never run'
    assert not [o for o in outputs if o['output_type'] == 'error']
    printed = ''.join(line for o in outputs for line in o.get('text', []))
    assert not (m := re.search('<ipython-input.*|.*site-packages/(?!phew_nb).*Warning.*', printed)), f'{path.name}: {m[0]}'
    assert not (m := re.search(r'temp/tmp\w{8}.*', printed)), f'{path.name}: the name of a temporary folder: {m[0]}'

@pytest.mark.parametrize('path', notebooks, ids=ids)
def test_every_figure_says_what_it_shows(path):
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    shown = [''.join(c['source']) for c in cells if any('image/png' in o.get('data', {}) for o in c.get('outputs', []))]
    assert not (mute := [s for s in shown if not re.search(r'^#\| fig-alt: \S', s, re.M)]), f'{path.name}: {mute[0][:200]}'

@pytest.mark.parametrize('path', notebooks, ids=ids)
def test_draws_of_a_notebook_are_seeded(path):
    "What a notebook draws is the same, whichever notebooks its process ran before."
    sources = [s for s in code_cells(path) if not s.startswith('#| export')]
    first = next((i for i,s in enumerate(sources) if 'manual_seed(0)' in s), len(sources))
    draws = re.compile(r'\bnn\.[A-Z]|\btorch\.rand|\.(normal|uniform)_\(')
    assert not (early := [s for s in sources[:first] if draws.search(s)]), f'{path.name}: not seeded\n{early[0][:200]}'

def test_no_paths_of_a_machine():
    machine = re.compile(r'(^|[^A-Za-z0-9_.])/(work|tmp|root|home|Users)/[A-Za-z0-9_.-]')
    texts = {p: p.read_text(encoding='utf-8') for d in ('phew_nb', 'tools', 'tests', '.github') for p in (root/d).rglob('*.[py]*ml')}
    texts |= {p: p.read_text(encoding='utf-8') for d in ('phew_nb', 'tools', 'tests', 'bench') for p in (root/d).rglob('*.py')}
    for p in notebooks: texts[p] = re.sub(r'"image/png": ".*"', '', p.read_text(encoding='utf-8'))
    for p,text in texts.items(): assert not (m := machine.search(text)), f'{p.name}: {text[m.start():m.end()+60]}'
