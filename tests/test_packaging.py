"The built distributions hold what they must, and all files agree on the version."
import ast, re, shutil, subprocess, sys, tarfile, zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

root = Path(__file__).resolve().parent.parent
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
version = cfg['version']

@pytest.fixture(scope='module')
def clone(tmp_path_factory):
    "A copy of the repository."
    source = tmp_path_factory.mktemp('source')/'phew_nb'
    skip = shutil.ignore_patterns('.git', 'build', '*.egg-info', '__pycache__', '.*_cache', '.hypothesis', 'results', 'phew_results')
    shutil.copytree(root, source, ignore=skip)
    return source

@pytest.fixture(scope='module')
def dist(clone, tmp_path_factory):
    "The folder with an sdist, and a wheel built from that sdist."
    out = tmp_path_factory.mktemp('dist')
    run = subprocess.run([sys.executable, '-m', 'build', '--no-isolation', '--outdir', out, clone], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return out

@pytest.fixture(scope='module')
def wheel(dist):
    "From the name of each file in the wheel to its text."
    with zipfile.ZipFile(next(dist.glob('*.whl'))) as z: return {n: z.read(n).decode() for n in z.namelist()}

def info(wheel, name): return next(text for n,text in wheel.items() if n.endswith(f'.dist-info/{name}'))

def test_wheel_holds_every_module_and_nothing_else(wheel):
    modules = {f'phew_nb/{p.name}' for p in (root/'phew_nb').glob('*.py')} | {'phew_nb/py.typed'}
    assert {n for n in wheel if '.dist-info/' not in n and not n.endswith('.pyi')} == modules
    assert any(n.endswith('licenses/LICENSE') for n in wheel)

def test_stubs_show_the_methods_that_cells_and_modules_add(wheel):
    stubs = {n: ast.parse(text) for n, text in wheel.items() if n.endswith('.pyi')}
    masks = next(n for n in stubs['phew_nb/masks.pyi'].body if isinstance(n, ast.ClassDef) and n.name == 'Masks')
    names = {f.name: [d.id for d in f.decorator_list] for f in masks.body if isinstance(f, ast.FunctionDef)}
    assert names['kept'] == ['property'] and names['load'] == ['classmethod'] and not names['save'] and 'keep' in names
    assert all(n.replace('.pyi', '.py') in wheel for n in stubs)

def test_building_leaves_nothing_in_the_clone(dist, clone):
    assert not [p for p in clone.rglob('*') if p.name == 'build' or p.suffix == '.egg-info']

def test_sdist_holds_nothing_else(dist):
    with tarfile.open(next(dist.glob('*.tar.gz'))) as tar: names = {n.split('/', 1)[-1] for n in tar.getnames() if '/' in n}
    files = {n for n in names if '/' not in n} - {'phew_nb', 'tools', 'phew_nb.egg-info'}
    assert files == {'setup.py', 'setup.cfg', 'settings.ini', 'pyproject.toml', 'PKG-INFO', 'MANIFEST.in', 'LICENSE', 'README.md',
                     'CHANGELOG.md', 'CITATION.cff', 'CONTRIBUTING.md'}
    assert all(n.split('/')[0] in ('phew_nb', 'phew_nb.egg-info') or n == 'tools/stubs.py' for n in names - files if '/' in n)

def test_sdist_can_build_itself(dist):
    with tarfile.open(next(dist.glob('*.tar.gz'))) as tar: names = {n.split('/', 1)[-1] for n in tar.getnames()}
    assert {'setup.py', 'settings.ini', 'pyproject.toml', 'LICENSE', 'CHANGELOG.md', 'CITATION.cff', 'phew_nb/models.py'} <= names

def test_console_scripts(wheel):
    scripts = dict(re.findall(r'^(phew_\w+) = (\S+:phew_\w+)$', info(wheel, 'entry_points.txt'), re.M))
    assert scripts == {f'phew_{c}': f'phew_nb.__main__:phew_{c}' for c in ('compare', 'sweep', 'prune', 'report')}

def test_metadata(wheel):
    meta = info(wheel, 'METADATA')
    assert f'Version: {version}\n' in meta and f'Requires-Python: >={cfg["min_python"]}\n' in meta
    required = re.findall(r'^Requires-Dist: ([\w-]+)([^;\n]*)$', meta, re.M)
    assert {name for name,_ in required} == {re.match(r'[\w-]+', r)[0] for r in cfg['requirements'].split()}
    assert not [name for name,spec in required if '==' in spec or not spec], 'requirements are ranges'
    assert set(re.findall(r'^Provides-Extra: (\w+)$', meta, re.M)) == {'dev', 'ray', 'track', 'onnx', 'accelerate', 'foreign'}

@pytest.mark.parametrize('name, pattern', [('CITATION.cff', r'^version: (\S+)$'), ('CHANGELOG.md', r'^## (\d\S*)'),
                                           ('phew_nb/__init__.py', r'^__version__ = "(.*)"$')])
def test_version_is_the_same_everywhere(name, pattern):
    assert re.search(pattern, (root/name).read_text(encoding='utf-8'), re.M)[1] == version

def test_readme_is_made_from_the_index():
    run = subprocess.run([sys.executable, root/'tools'/'make_readme.py', '--check'], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

def test_readme_has_the_two_commands():
    text = (root/'README.md').read_text(encoding='utf-8')
    assert 'pip install . && phew_compare' in text.splitlines()
    assert re.search(r"^pip install -e '\.\[dev\]' && (\w+=\S+ )*nbdev_test && pytest -n auto --dist worksteal$", text, re.M)
