"The ledger of the paper notebooks (every section has sentences, every sentence records, every record a cell), and their grids."
import json, re, sys
from pathlib import Path

import pytest

from phew_nb import config, sweep
from phew_nb.store import read_records

folder = Path(__file__).resolve().parent.parent/'nbs'/'paper'
sys.path.insert(0, str(folder))
from _claims import check, gaps, gather, headings, judged, paper
sys.path.remove(str(folder))
grids = sorted((folder.parent.parent/'experiments').glob('*.toml'))

records = gather(folder/'claims')
sections, says = paper(folder/'claims')
notebooks = sorted(p.stem for p in folder.glob('[!._]*.ipynb'))

def test_sections_are_those_of_the_paper():
    assert list(sections) == '1 2.1 2.2 2.3 3 3.1 4 4.1 5.1 5.2 6 A.1 A.2 A.3 A.4 B B.1 B.2 C D.1 D.2'.split()

def test_none_is_without_a_record():
    assert gaps(records, sections, says) == []

def test_a_missing_record_is_found():
    "The test above can fail: without any one record that a sentence names there is a gap."
    for name in {n for c in says for n in c['records']}:
        assert gaps([r for r in records if r['id'] != name], sections, says)

@pytest.mark.parametrize('record', records, ids=[r['id'] for r in records])
def test_a_record_names_a_cell_that_exists(record):
    assert check(record) and record['cell'] in headings(record['notebook'], folder)

@pytest.mark.parametrize('name', [n for n in notebooks if n != 'claims'])
def test_a_notebook_saves_what_it_records(name):
    "Names in the notebook's calls of `book.add` and in its file are the same, where they are written out."
    code = [''.join(c['source']) for c in json.loads((folder/f'{name}.ipynb').read_text())['cells'] if c['cell_type'] == 'code']
    written = set(re.findall(r"book\.add\(\s*'([\w.]+)'", '\n'.join(code)))
    saved = {r['id'] for r in records if r['notebook'] == name}
    assert written <= saved and (saved == written or re.search(r"book\.add\(\s*(f'|\w+,)", '\n'.join(code)))

def in_a_table(text): return text.replace('|', r'\|').replace('\n', ' ')

def test_stored_table_is_of_these_records():
    "The ledger's stored output was made from the files as they are: every number, and every sentence with its verdict."
    cells = json.loads((folder/'claims.ipynb').read_text())['cells']
    text = '\n'.join(''.join(o.get('data', {}).get('text/markdown', '')) for c in cells for o in c.get('outputs', []))
    for r in records: assert in_a_table(r['number']) in text, r['id']
    for c, said in zip(says, judged({r['id']: r for r in records}, says), strict=True):
        assert f"| {c['section']} | {in_a_table(c['text'])} | **{said}** |" in text, c['text']
    assert text.count('**') == 2*len(says)

@pytest.mark.parametrize('path', grids, ids=[p.stem for p in grids])
def test_a_grid_is_made_of_configs(path):
    "Every run of a grid is a `Config`, none stands there twice, and the file begins with its command."
    made, combine = [], config.grid
    with pytest.MonkeyPatch.context() as m:
        m.setattr(config, 'grid', lambda **values: made.extend(found := combine(**values)) or found)
        assert len(sweep.read_grid(path)) == len(made) > 0
    assert re.search(rf'^# +phew_sweep experiments/{path.name} --out results/{path.stem}( |$)', path.read_text(), re.M)

@pytest.mark.parametrize('name', ['ablations_digits', 'widening_digits', 'kernels_digits'])
def test_lines_of_the_first_driver_are_records_of_its_grid(name):
    "They were named by other hashes; none of their runs is done again."
    root = folder.parent.parent
    done = {r['run'] for r in read_records(root/'results'/name)}
    wanted = sweep.plan(sweep.read_grid(root/'experiments'/f'{name}.toml'), root/'results'/name)
    lines = (root/'results'/name/'records.jsonl').read_text().splitlines()
    assert len(done) == len(lines) == len(wanted.done) and done <= wanted.wanted.keys()
