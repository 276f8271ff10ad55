"The site, built as plain HTML: every link and anchor leads somewhere, every figure says what it shows."
import importlib.util, sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

root = Path(__file__).resolve().parent.parent

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

def test_the_page_to_play_with_needs_nothing_else(pages):
    text = pages['tutorials/watch.html']
    assert not [word for word in (' src=', '<link', '@import', 'fetch(') if word in text] and '__' not in text
