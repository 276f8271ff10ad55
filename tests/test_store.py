"Records on disk: whole or not there, claimed by one, and read in spite of what else lies about."
import errno, json, math, os, subprocess, sys, warnings
from pathlib import Path

import pandas as pd, pytest
from hypothesis import given, settings, strategies as st

from phew_nb import store as S
from phew_nb.store import append_line, as_record, as_text, claim, load_results, read_failures, read_records, write_record

base = dict(run='a', data='digits', model='mlp', method='phew', density=.1, seed=0)
def record(run, **more): return base | dict(run=run) | more

words = st.text(max_size=5).filter(lambda t: t not in ('inf', '-inf', 'nan', *base))
leaves = st.none() | st.booleans() | st.integers(-10**6, 10**6) | st.floats() | words
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3), max_leaves=10)
anything = st.lists(st.dictionaries(words, values, max_size=4), max_size=5)

@given(anything)
@settings(max_examples=40, deadline=None)
def test_records_come_back_as_written(tmp_path_factory, records):
    one, lines = tmp_path_factory.mktemp('one'), tmp_path_factory.mktemp('lines')
    records = [record(str(i), more=r) for i,r in enumerate(records)]
    for r in records: write_record(one, r); append_line(lines/'records.jsonl', r)
    assert repr(read_records(one)) == repr(read_records(lines)) == repr(records) # as text, for nan is not equal to itself

@given(values)
@settings(max_examples=200, deadline=None)
def test_whatever_is_json_is_a_record_or_refused(value):
    try: found = as_record(json.dumps(value).encode())
    except ValueError as e: assert 'no record' in str(e) or 'cut off' in str(e)
    else: assert base.keys() <= found.keys()

def test_text_is_strict_json(tmp_path):
    def refuse(name): raise ValueError(name)
    assert json.loads(as_text(record('a', log10_trace=-math.inf)), parse_constant=refuse)['log10_trace'] == '-inf'

foreign = dict(cut=as_text(base)[:-20], empty=b'', nothing=b'{}', null=b'null', number=b'12', list=b'[1, 2]', deep=b'['*10**5,
               other=as_text(record('b')), bytes=b'\xff\xfe', density=as_text(base | dict(density=None)))

@pytest.mark.parametrize('name', foreign)
def test_what_is_no_record_is_named_and_put_aside(tmp_path, name):
    for run in 'a', 'z': write_record(tmp_path, record(run))
    path = tmp_path/'records'/'a.json'
    path.write_bytes(foreign[name])
    with pytest.warns(UserWarning, match=r'a\.json .*and left out'): assert read_records(tmp_path) == [record('z')]
    assert path.exists() # reading changes nothing
    with pytest.warns(UserWarning, match='it is now in'): assert read_records(tmp_path, aside=True) == [record('z')]
    assert not path.exists() and (tmp_path/'set_aside'/'a.json').read_bytes() == foreign[name]

@pytest.mark.parametrize('name', sorted(set(foreign) - {'other'}))
def test_a_line_that_is_no_record(tmp_path, name):
    path = tmp_path/'records.jsonl'
    path.write_bytes(as_text(record('x')) + foreign[name].replace(b'\n', b'') + b'\n' + as_text(record('y')))
    with warnings.catch_warnings(): warnings.simplefilter('ignore'); assert len(read_records(tmp_path)) == 2

def test_cut_anywhere_only_the_last_record_is_lost(tmp_path):
    path, records = tmp_path/'records.jsonl', [record(str(i), text='é'*i) for i in range(3)]
    for r in records: append_line(path, r)
    whole, last = path.read_bytes(), path.read_bytes().rindex(b'\n', 0, -1) + 1
    for cut in range(last + 1, len(whole) - 1, 7):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match='line 3, .*left out'): assert read_records(tmp_path) == records[:2]
        append_line(path, records[2])
        with pytest.warns(UserWarning): assert read_records(tmp_path) == records
    path.write_bytes(whole[:-1]) # only the end of the line is missing
    append_line(path, record('3'))
    assert len(read_records(tmp_path)) == 4

def test_a_short_write_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(S, 'write_bytes', lambda path, data: path.write_bytes(data[:-1]))
    with pytest.raises(OSError, match='written in part: .* is the disk full'): write_record(tmp_path, base)

@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full on this system')
def test_a_full_disk(tmp_path):
    (tmp_path/'records.jsonl').symlink_to('/dev/full')
    with pytest.raises(OSError, match='No space left'): append_line(tmp_path/'records.jsonl', base)

def test_at_an_address():
    "An object store, as fsspec has them: no locks and no renaming."
    for run in 'a', 'b': write_record('memory://test_store/results', record(run))
    fs, root = S._remote('memory://test_store/results')
    fs.pipe_file(f'{root}/records/c.json', b'{}')
    S.write_failure('memory://test_store/results', dict(run='d', error='no'))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert [r['run'] for r in read_records('memory://test_store/results')] == ['a', 'b']
        assert [f['run'] for f in read_failures('memory://test_store/results')] == ['d']
        assert load_results('memory://test_store/results').seed.tolist() == [0, 0]
    with claim('memory://test_store/results', 'a') as mine: assert mine is False

def test_version_01(tmp_path):
    folder = Path(__file__).parent.parent/'results'/'comparison_digits'
    assert len(read_records(folder)) == 75 and isinstance(load_results(folder), pd.DataFrame)
    with pytest.raises(FileNotFoundError, match='there is no records.jsonl'): load_results(tmp_path)

hold = '''
import sys, time
from phew_nb.store import claim
with claim(sys.argv[1], 'a') as mine:
    print(mine, flush=True)
    time.sleep(60)
'''

def test_a_lock_is_lost_with_its_process(tmp_path):
    process = subprocess.Popen([sys.executable, '-c', hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == 'True'
    with claim(tmp_path, 'a') as mine, claim(tmp_path, 'b') as other: assert (mine, other) == (None, True)
    process.kill(); process.wait()
    with claim(tmp_path, 'a') as mine: assert mine is True
    write_record(tmp_path, record('a'))
    with claim(tmp_path, 'a') as mine: assert mine is False
    assert [p.name for p in (tmp_path/'claims').iterdir()] == ['b.lock']

other_clock = """
import sys, time
real, hours = time.time, float(sys.argv[2])
time.time, time.time_ns = lambda: real() + 3600*hours, lambda: int(1e9*(real() + 3600*hours))
""" + hold

@pytest.mark.parametrize('hours', [-5000, 5000])
def test_claims_ask_no_clock(tmp_path, hours):
    "The holder's clock is far off, and so is the time of its file: while it lives the run is its own, and no longer."
    process = subprocess.Popen([sys.executable, '-c', other_clock, str(tmp_path), str(hours)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == 'True'
    for jump in 0, hours, -hours:
        at = max(0, os.stat(tmp_path).st_mtime + 3600*jump)
        os.utime(tmp_path/'claims'/'a.lock', (at, at))
        with claim(tmp_path, 'a') as mine: assert mine is None
    process.kill(); process.wait()
    with claim(tmp_path, 'a') as mine: assert mine is True

@pytest.mark.skipif(os.name != 'posix', reason='locks of POSIX')
@pytest.mark.parametrize('code, words', [(errno.ENOSYS, 'has no locks'), (errno.ENOLCK, 'has no locks'), (errno.EIO, None)])
def test_a_file_system_without_locks(tmp_path, monkeypatch, code, words):
    "Is said, and what is recorded is not done again; another fault is one."
    import fcntl
    def fail(*args): raise OSError(code, os.strerror(code))
    monkeypatch.setattr(fcntl, 'flock', fail)
    write_record(tmp_path, record('b'))
    for run in 'a', 'b':
        if words is None:
            with pytest.raises(OSError, match='Input/output'), claim(tmp_path, run): pass
        else:
            with pytest.warns(UserWarning, match=words), claim(tmp_path, run) as mine: assert mine is (run == 'a')

def test_the_store_loads_no_torch():
    code = 'import sys, phew_nb.store; print([m for m in ("torch", "fastai", "numpy") if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'
