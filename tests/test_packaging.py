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
extras = {key.removesuffix('_requirements'): value.split() for key, value in cfg.items() if key.endswith('_requirements')}

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
    assert set(re.findall(r'^Provides-Extra: (\w+)$', meta, re.M)) == extras.keys()

def test_the_page_of_the_package_has_links_that_work_there(wheel):
    "On PyPI a link has no repository beside it: all are absolute, and lead to files that are there."
    meta = info(wheel, 'METADATA')
    links = re.findall(r'(!?)\[[^]]*\]\(([^)\s]+)\)', meta)
    assert [link for _, link in links if '://' not in link] == ['#the-map']
    for picture, link in links:
        file = re.match(rf'{re.escape(cfg["git_url"])}/(blob|raw)/main/([^#]*)', link)
        if file: assert (root/file[2]).exists() and file[1] == ('raw' if picture else 'blob'), link
    assert any(picture for picture, _ in links)
    assert re.search(r'^Project-URL: Documentation, https://\S+$', meta, re.M)

imported_as = {'pillow': 'PIL', 'scikit-learn': 'sklearn', 'pyyaml': 'yaml'}
def module(requirement):
    "The name by which a requirement is imported."
    name = re.match(r'[\w-]+', requirement)[0]
    return imported_as.get(name, name.replace('-', '_'))

def imports(source):
    "The packages that Python code imports, or asks for by their name."
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): yield from (a.name.split('.')[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level: yield node.module.split('.')[0]

def test_the_library_imports_what_it_requires_and_requires_what_it_imports():
    found = {m for p in (root/'phew_nb').glob('*.py') for m in imports(p.read_text(encoding='utf-8'))}
    own, required = found - set(sys.stdlib_module_names) - {'phew_nb'}, {module(r) for r in cfg['requirements'].split()}
    asked_for = {module(r) for name, rs in extras.items() if name != 'dev' for r in rs}
    assert own <= required | asked_for, own - required - asked_for
    assert required - own == {'torchvision'} # fastai needs it, of the version that goes with torch's

def test_every_extra_is_used():
    "By the library, its tests, its benchmarks or its notebooks."
    paths = [p for d in ('phew_nb', 'tests', 'bench', 'tools') for p in (root/d).glob('*.py')] + [*(root/'nbs').rglob('*.ipynb')]
    text = '\n'.join(p.read_text(encoding='utf-8') for p in paths if p.name != 'test_packaging.py')
    for name, requirements in extras.items():
        unused = [r for r in requirements if name != 'dev' and not re.search(rf'\b{module(r)}\b', text)]
        assert not unused, f'{name}: {unused}'

def address(text): return set(re.findall(r'https://github\.com/([\w.-]+)/phew_nb(?![\w-])', text))

def test_the_owner_is_named_in_one_place():
    "All addresses of the repository are those of `user` in settings.ini, which stands there once."
    lines = (root/'settings.ini').read_text(encoding='utf-8').splitlines()
    assert sum(cfg['user'] in line for line in lines) == 1 == sum(line.startswith('user =') for line in lines)
    for p in [*root.glob('*.*'), *(root/'nbs').rglob('*.ipynb'), *(root/'nbs').glob('*.yml'), *(root/'bench').glob('*'), *(root/'tools').glob('*.py')]:
        if p.is_file() and p.suffix not in ('.png', '.pyc'): assert address(p.read_text(encoding='utf-8')) <= {cfg['user']}, p

def test_a_new_owner_reaches_the_readme(clone, tmp_path):
    shutil.copytree(clone, tmp_path/'c')
    text = (tmp_path/'c'/'settings.ini').read_text(encoding='utf-8')
    (tmp_path/'c'/'settings.ini').write_text(text.replace(f"user = {cfg['user']}", 'user = somebody-else'), encoding='utf-8')
    for how in [], ['--check']:
        run = subprocess.run([sys.executable, 'tools/make_readme.py', *how], cwd=tmp_path/'c', capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    for name in 'README.md', 'nbs/index.ipynb', 'nbs/tutorials/train_it.ipynb': assert address((tmp_path/'c'/name).read_text(encoding='utf-8')) == {'somebody-else'}

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
