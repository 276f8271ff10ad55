"""The ledger of the paper notebooks: each notebook records what it measured, `claims.ipynb` gathers the records.

`claims/paper.toml` has the paper's sentences in its own order, each with the names of the records that look at it. A record
that no sentence names is a question of ours.

    book = Claims('a2_lemma2')
    book.add('a2.equal_width', 'A.2, Lemma 2', 'Equal widths have the most paths.', 'Three hidden layers',
             'fails', f'{ratio:.2f} times as many paths with unequal widths', 'D = 8, all integer widths')
    book.save()                 # writes claims/a2_lemma2.json
    book.table()                # paper | here | scale | holds?

A notebook runs in its own folder, where this file lies; nbdev neither exports nor tests it. Numbers are strings made of
measured values. A record from a cell that is skipped by default (`#| slow`, `#| data`) is added with `skipped=True`:
when that cell does not run, `save` keeps the record of its last run.
"""
import json, os, re, tempfile, tomllib
from collections import Counter
from pathlib import Path

from IPython.display import Markdown

VERDICTS = ('holds', 'holds under conditions', 'fails', 'needs the full-size run')
FIELDS = ('id', 'section', 'claim', 'notebook', 'cell', 'verdict', 'number', 'scale')

def check(record):
    "Raise on a record that the ledger cannot hold; returns the record."
    name = record.get('id', record)
    for field in FIELDS:
        if not isinstance(record.get(field), str) or not record[field].strip():
            raise ValueError(f'claim {name!r}: {field!r} must be a non-empty string')
    if record['verdict'] not in VERDICTS:
        raise ValueError(f"claim {name!r}: verdict {record['verdict']!r} is not one of {', '.join(VERDICTS)}")
    extra = set(record) - {*FIELDS, 'skipped'}
    if extra: raise ValueError(f'claim {name!r}: unknown fields {sorted(extra)}')
    return record

def markdown_table(rows, header):
    "A list of tuples as a markdown table."
    cell = lambda o: str(o).replace('|', r'\|').replace('\n', ' ')
    lines = [header, ['---']*len(header), *rows]
    return Markdown('\n'.join(f"| {' | '.join(map(cell, line))} |" for line in lines))

def read_json(path): return json.loads(Path(path).read_text(encoding='utf8'))

def write_json(path, content):
    "Write sorted and indented JSON in one step; an unchanged file is left alone."
    path, text = Path(path), json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + '\n'
    if path.exists() and path.read_text(encoding='utf8') == text: return
    path.parent.mkdir(exist_ok=True)
    file = tempfile.NamedTemporaryFile('w', encoding='utf8', dir=path.parent, suffix='.tmp', delete=False)
    with file as f: f.write(text)
    os.chmod(f.name, 0o644)
    os.replace(f.name, path)

class Claims:
    "The records of one notebook."
    def __init__(self, notebook, folder='claims'):
        self.notebook, self.path, self.records = notebook, Path(folder)/f'{notebook}.json', {}
        self.before = {r['id']: r for r in read_json(self.path)} if self.path.exists() else {}

    def add(self, id, section, claim, cell, verdict, number, scale, skipped=False):
        "Record one claim: the heading of the `cell` that measures it, the verdict, the measured number and the scale."
        if id in self.records: raise ValueError(f'claim {id!r} is recorded twice')
        record = dict(id=id, section=section, claim=claim, notebook=self.notebook, cell=cell, verdict=verdict,
                      number=number, scale=scale)
        self.records[id] = check(record | ({'skipped': True} if skipped else {}))

    def all(self):
        "This run's records and those of skipped cells from an earlier run, sorted by name."
        kept = {k: r for k, r in self.before.items() if r.get('skipped')}
        return [r for _, r in sorted((kept | self.records).items())]

    def save(self, test='IN_TEST' in os.environ):
        "Write the records to the notebook's file; in a test (nbdev_test) it stays as it is, and has to have these verdicts."
        if not test: return write_json(self.path, self.all())
        changed = [name for name, r in self.records.items() if r['verdict'] != self.before.get(name, {}).get('verdict')]
        if changed: raise ValueError(f'{self.path}: run the notebook again, the verdicts of {changed} are others than its file says')

    def table(self):
        "The closing table of a notebook: `paper | here | scale | holds?`; records of skipped cells last, whether they ran or not."
        order = [name for name, r in self.records.items() if not r.get('skipped')]
        records = sorted(self.all(), key=lambda r: order.index(r['id']) if r['id'] in order else len(order))
        rows = [(f"{r['claim']} ({r['section']})", r['number'], r['scale'], r['verdict']) for r in records]
        return markdown_table(rows, ('paper', 'here', 'scale', 'holds?'))

def gather(folder='claims'):
    "Every notebook's records, checked, sorted by name; two records of one name are refused."
    records = [check(r) for path in sorted(Path(folder).glob('*.json')) for r in read_json(path)]
    twice = [k for k, n in Counter(r['id'] for r in records).items() if n > 1]
    if twice: raise ValueError(f'claims recorded twice: {twice}')
    return sorted(records, key=lambda r: r['id'])

def paper(folder='claims'):
    "The sections of the paper (number -> title), and its sentences: dicts of section, text and names of records."
    content = tomllib.loads((Path(folder)/'paper.toml').read_text(encoding='utf8'))
    return content['sections'], content['says']

def gaps(records, sections, says):
    "What the ledger lacks: sections without a sentence, sentences without a record, names without a record, wrong order."
    known, order = {r['id'] for r in records}, list(sections)
    found = [f'section {s} has no sentence' for s in sections if s not in {c['section'] for c in says}]
    found += [f'no record looks at: {c["text"]}' for c in says if not c['records']]
    found += [f'no record is called {name!r}' for c in says for name in c['records'] if name not in known]
    found += [f'unknown section {c["section"]}' for c in says if c['section'] not in sections]
    places = [order.index(c['section']) for c in says if c['section'] in sections]
    return found + ['sentences are not in the order of the paper']*(places != sorted(places))

def together(verdicts, universal=False):
    """One verdict for a sentence, of those of its records: what all say, or else that it depends. Beside a record that needs
    the full-size run small ones only hold under conditions, and refute nothing; but a universal statement fails by any one."""
    *_, depends, fails, undecided = VERDICTS
    said = [v for v in verdicts if v != undecided]
    if universal and fails in said: return fails
    one = undecided if not said else said[0] if len(set(said)) == 1 else depends
    if len(said) == len(verdicts) or not said: return one
    return undecided if one == fails else depends

def judged(records, says):
    "The verdict of each sentence, from records by name."
    return [together([records[n]['verdict'] for n in c['records']], c.get('universal')) for c in says]

def headings(notebook, folder='.'):
    "The headings of a notebook beside this one."
    cells = read_json(Path(folder)/f'{notebook}.ipynb')['cells']
    text = '\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'markdown')
    return re.findall(r'^#+ (.+?)\s*$', text, re.M)

def link(record):
    "A markdown link to the heading under which a record was measured."
    anchor = re.sub(r'[^\w\- ]', '', record['cell'].lower()).strip().replace(' ', '-')
    return f"[{record['notebook']}: {record['cell']}]({record['notebook']}.ipynb#{anchor})"
