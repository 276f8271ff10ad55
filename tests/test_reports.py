"The report of a folder: one page, nothing from elsewhere, every name escaped."
import json, re
from html.parser import HTMLParser

import pytest

from phew_nb.reports import read_failed, report_html, write_report

def run(method='phew', density=.1, seed=0, **more):
    return dict(run=f'{method}-{density}-{seed}', method=method, density=density, seed=seed, data='pets', model='net', accuracy=.5) | more

class Page(HTMLParser):
    "Tags with their attributes; fails where they do not nest."
    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(text)
        assert not self.open
    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ('meta', 'img', 'br', 'link'): self.open.append(tag)
    def handle_endtag(self, tag): assert self.open.pop() == tag
    def handle_data(self, data): self.words.append(data)
    def named(self, tag): return [attrs for name,attrs in self.tags if name == tag]

evil = '<script>alert(1)</script>"\'><img src=x onerror=alert(2)>&{{7*7}}'

def test_hostile_names_stay_text():
    records = [run(evil, seed=s, data=evil, model=evil, fingerprint=evil, warnings=[evil], device=evil,
                   settings={evil: evil, 'recipe': {evil: evil}}, widths={evil: 3}, widths_dense={evil: 4}) for s in (0, 1)]
    failed = [dict(run=evil, error=evil, traceback=evil, settings=dict(model=evil, data=evil))]
    page = Page(report_html(records, failed, [evil], evil))
    assert not page.named('script') and all('onerror' not in attrs for _,attrs in page.tags)
    assert all(img['src'].startswith('data:image/svg+xml;base64,') and img['alt'] for img in page.named('img'))
    assert sum('alert(1)' in words for words in page.words) > 8

def test_nothing_comes_from_elsewhere():
    page = Page(report_html([run(seed=s) for s in (0, 1)]))
    sources = [attrs.get(k) for _,attrs in page.tags for k in ('src', 'href') if attrs.get(k)]
    assert sources and all(s.startswith('data:') for s in sources)
    assert 'width=device-width' in str(page.named('meta'))

def test_four_columns_are_enough():
    page = Page(report_html([dict(method='phew', density=d, seed=0, accuracy=.5) for d in (.1, .2)]))
    assert len(page.named('figure')) == 1 and 'phew' in page.words

def test_data_sets_have_a_part_each():
    records = [run(fingerprint=f, seed=s) for f in ('3fa2', '81cc') for s in (0, 1)]
    page = Page(report_html(records))
    assert len(page.named('h2')) == 2 and 'net on pets, fingerprint 81cc' in page.words

def test_missing_and_failed_runs():
    records = [run(m, d, s) for m in ('phew', 'snip') for d in (.1, .2) for s in (0, 1)][:-1]
    failed = [dict(run='snip-0.2-1', error='ValueError("no")', traceback='line 7', settings=dict(method='snip', density=.2, seed=1))]
    text = report_html(records, failed)
    assert 'of the grid, without a record: 1 run' in text and '1 failed' in text and 'snip, 0.2, 1: ValueError(&quot;no&quot;)' in text

def test_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match='there are no results in'): write_report(tmp_path)
    lines = [json.dumps(run(seed=s)) for s in (0, 1)]
    (tmp_path/'records.jsonl').write_text('\n'.join([*lines, '{"run": "cut'])+'\n')
    (tmp_path/'failed.jsonl').write_text('\n'.join(json.dumps(dict(run=r, error='no')) for r in ('phew-0.1-0', 'x', 'x')) + '\n{')
    assert [f['run'] for f in read_failed(tmp_path, {'phew-0.1-0'})] == ['x'] # the other was done later
    path = write_report(tmp_path)
    text = path.read_text(encoding='utf-8')
    assert path == tmp_path/'report.html' and '2 runs finished, 1 failed' in text and 'line 3' in text
    before = path.read_bytes()
    assert write_report(tmp_path).read_bytes() == before
    assert re.search(r'<h1>.*</h1>', text)
