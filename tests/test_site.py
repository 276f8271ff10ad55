"The site, built as plain HTML: every link and anchor leads somewhere, every figure says what it shows."
import importlib.util, json, re, shutil, subprocess, sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest, yaml

root = Path(__file__).resolve().parent.parent
required = re.search(r'^requirements = (.*)$', (root/'settings.ini').read_text(encoding='utf-8'), re.M)[1]

class Page(HTMLParser):
    "Links, anchors and figures of a page."
    def __init__(self, text):
        super().__init__()
        self.links, self.ids, self.alts = [], [], []
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if 'id' in attrs: self.ids.append(attrs['id'])
        if tag == 'a' and 'href' in attrs: self.links.append(attrs['href'])
        if tag == 'img': self.alts.append(attrs.get('alt', ''))

def test_quarto_is_told_of_everything():
    "Its configuration names files that are there; the reading order has every notebook once; search and the table of methods are on."
    config, order = (yaml.safe_load((root/'nbs'/name).read_text(encoding='utf-8')) for name in ('_quarto.yml', 'sidebar.yml'))
    form, site = config['format']['html'], config['website']
    named = [form['css'], form['include-after-body'], *config['project']['resources'], *(item['href'] for item in site['navbar']['left'])]
    assert all((root/'nbs'/name).is_file() for name in named + [m for m in config['metadata-files']]), named
    assert site['search']['location'] == 'navbar' and '45_pruners.ipynb' in named and {'source', 'issue'} == set(site['repo-actions'])
    parts = [[part] if isinstance(part, str) else part['contents'] for part in order['website']['sidebar']['contents']]
    patterns = [p for part in parts for p in ([part] if isinstance(part, str) else part)]
    found = [p for pattern in patterns for p in (root/'nbs').glob(pattern) if not p.name.startswith('_')]
    assert all(any((root/'nbs').glob(pattern)) for pattern in patterns) and len(found) == len(set(found))
    assert set(found) == {p for p in (root/'nbs').rglob('[!._]*.ipynb') if '.ipynb_checkpoints' not in p.parts}

@pytest.mark.skipif(not shutil.which('node'), reason='no node')
def test_the_link_to_colab_is_made_of_the_link_to_the_source(tmp_path):
    script = re.search(r'<script>(.*)</script>', (root/'nbs'/'colab.html').read_text(encoding='utf-8'), re.S)[1]
    page = """
const after = [], make = href => ({href, textContent: 'View source', matches: () => false, closest: () => item, querySelector: () => null})
const source = make('https://github.com/u/r/blob/main/nbs/tutorials/train_it.ipynb')
const item = {cloneNode: () => { const link = make(source.href); return {matches: () => false, querySelector: () => link, link} }, after: x => after.push(x)}
const document = {querySelectorAll: () => [source]}
"""
    (tmp_path/'t.js').write_text(page + script + '\nconsole.log(after[0].link.href, after[0].link.textContent)')
    run = subprocess.run(['node', tmp_path/'t.js'], capture_output=True, text=True)
    assert run.stdout == 'https://colab.research.google.com/github/u/r/blob/main/nbs/tutorials/train_it.ipynb Open in Colab\n', run.stderr

def test_what_opens_in_colab_installs_what_it_imports():
    "A tutorial installs the library there, and what its cells import beside it; `#| eval: false` keeps that from running here."
    there = {'torch', 'torchvision', 'numpy', 'IPython', 'google'}
    for path in sorted((root/'nbs'/'tutorials').glob('*.ipynb')):
        cells = [''.join(c['source']) for c in json.loads(path.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'code']
        if path.stem == 'watch_walks': continue # it needs the file beside it
        assert cells[0].startswith('#| hide\n#| eval: false\n! [ -e /content ] && pip install')
        named = {m for c in cells for m in re.findall(r'^(?:import|from) (\w+)', c, re.M)} - set(sys.stdlib_module_names) - there
        assert all(m in cells[0] or m in required for m in named), (path.stem, named)

@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    out = tmp_path_factory.mktemp('site')
    sys.path.insert(0, str(root/'tools'))
    try:
        spec = importlib.util.spec_from_file_location('site_tool', root/'tools'/'site.py')
        tool = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tool)
        tool.build(out)
    finally: sys.path.remove(str(root/'tools'))
    return {p.relative_to(out).as_posix(): p.read_text(encoding='utf-8') for p in out.rglob('*.html')}

@pytest.fixture(scope='module')
def parsed(pages): return {name: Page(text) for name, text in pages.items()}

def test_tutorials_alone_open_in_colab(pages):
    opened = {name for name, text in pages.items() if 'colab.research.google.com' in text}
    assert opened == {n for n in pages if n.startswith('tutorials/') and 'watch' not in n}

def test_every_notebook_is_a_page(pages):
    notebooks = {p.relative_to(root/'nbs').with_suffix('.html').as_posix() for p in (root/'nbs').rglob('[!._]*.ipynb')}
    assert notebooks <= pages.keys()

def test_links_and_anchors(parsed):
    broken = []
    for name, page in parsed.items():
        for link in page.links:
            if '://' in link or link.startswith('mailto:'): continue
            file, _, anchor = link.partition('#')
            goal = name if not file else (Path(name).parent/file).as_posix()
            goal = str(Path('/', goal).resolve())[1:] if '..' in goal else goal
            if goal not in parsed or (anchor and anchor not in parsed[goal].ids): broken.append(f'{name}: {link}')
    assert not broken, broken

def test_anchors_are_unique_and_figures_are_described(parsed):
    for name, page in parsed.items():
        twice = [i for i, n in Counter(page.ids).items() if n > 1]
        assert not twice, f'{name}: {twice}'
        assert all(page.alts), f'{name} has a figure without a description'

def test_formulas_are_rendered_and_directives_hidden(pages):
    assert '<math' in pages['34_walks.html']
    for name, text in pages.items(): assert '#| ' not in text and '#| hide' not in text, f'{name} shows a directive'

def test_a_page_does_not_begin_with_the_imports_of_its_module(pages):
    assert 'tqdm.auto' not in pages['34_walks.html'] # exported, and nothing but imports
    assert 'phew_nb.walks' in pages['index.html'] # an example shows its own

def test_the_page_to_play_with_needs_nothing_else(pages):
    text = pages['tutorials/watch.html']
    assert not [word for word in (' src=', '<link', '@import', 'fetch(') if word in text] and '__' not in text
