"Records on disk: whole or not there, claimed by one, and read in spite of what else lies about."
import hashlib, json, os, subprocess, sys
from pathlib import Path

import pandas as pd, pytest
from hypothesis import given, settings, strategies as st

from phew_nb.store import append_line, as_record, claim, load_results, read_records, write_record

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

@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full on this system')
def test_a_full_disk(tmp_path):
    (tmp_path/'records.jsonl').symlink_to('/dev/full')
    with pytest.raises(OSError, match='No space left'): append_line(tmp_path/'records.jsonl', base)

def test_version_01(tmp_path):
    folder = Path(__file__).parent.parent/'results'/'comparison_digits'
    assert len(read_records(folder)) == 250 and isinstance(load_results(folder), pd.DataFrame)
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

def test_the_store_loads_no_torch():
    code = 'import sys, phew_nb.store; print([m for m in ("torch", "fastai", "numpy") if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'

@pytest.mark.parametrize('change', ['settings', 'density', 'both'])
def test_a_record_that_was_changed_by_hand_is_not_that_of_its_run(tmp_path, change):
    "Of a made-up run; what a stored record's name is stands in `test_names_of_existing_records`."
    made = dict(data='digits', model='mlp', method='phew', density=.1, seed=0)
    good = made | dict(run=hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:12], settings=made)
    write_record(tmp_path, good)
    assert read_records(tmp_path) == [good]
    path, other = tmp_path/'records'/f"{good['run']}.json", dict(density=.2)
    bad = good | (other if change != 'settings' else {}) | (dict(settings=made | other) if change != 'density' else {})
    path.write_text(json.dumps(bad))
    with pytest.warns(UserWarning, match=f"{good['run']}.json was changed: .*, and left out"): assert read_records(tmp_path) == []

def test_the_folder_of_claims_goes_with_the_last(tmp_path, monkeypatch):
    "Somebody else may remove it between its making and the lock in it."
    import filelock
    own, removed = filelock.FileLock.acquire, []
    def late(self, *args, **kwargs):
        if not removed: removed.append((tmp_path/'claims').rmdir()); raise FileNotFoundError(2, 'no such folder')
        return own(self, *args, **kwargs)
    monkeypatch.setattr(filelock.FileLock, 'acquire', late)
    with claim(tmp_path, 'a') as mine, claim(tmp_path, 'b') as other:
        assert mine and other
        for run in 'a', 'b': write_record(tmp_path, record(run))
    assert removed and sorted(p.name for p in tmp_path.iterdir()) == ['records']
    with claim(tmp_path, 'c'): pass
    assert [p.name for p in (tmp_path/'claims').iterdir()] == ['c.lock'] # not done: somebody may wait for it
