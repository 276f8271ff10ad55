"Runs, records and sweeps: what is interrupted or fails loses nothing else."
import json, math, os, signal, subprocess, sys, time, warnings
from dataclasses import replace
from pathlib import Path

import numpy as np, pandas as pd, pytest, torch
from hypothesis import given, settings, strategies as st

from phew_nb import experiments as E
from phew_nb.experiments import Config, append_line, grid, load_results, read_records, run, run_name, sweep
from phew_nb.training import Recipe

small = dict(hidden=(20,), epochs=1, per_class=10, test_per_class=5)
config = Config(method='magnitude', density=.2, **small)
def same(record): return {k: v for k,v in record.items() if not k.startswith('seconds')}

changes = [dict(seed=1), dict(density=.3), dict(method='random'), dict(epochs=2), dict(hidden=(21,)), dict(bn=True),
           dict(per_class=9), dict(test_per_class=4), dict(init='normal'), dict(recipe='vgg19_cifar10')]

@pytest.mark.parametrize('change', [*changes, dict(amp='bf16'), dict(data='digits_transform')], ids=str)
def test_every_setting_changes_the_name(change):
    assert run_name(replace(config, **change)) != run_name(config)

def test_kinds_of_numbers_do_not_change_the_name():
    other = replace(config, seed=np.int64(0), density=np.float64(.2), hidden=[20])
    assert run_name(other) == run_name(config) and json.dumps(other.seed) == '0'

@pytest.mark.parametrize('change', changes, ids=str)
def test_every_setting_changes_the_outcome(change):
    outcome = lambda c: [run(c)[k] for k in ('loss', 'kept', 'masks', 'n_train', 'n_test', 'curve')]
    assert outcome(replace(config, **change)) != outcome(config)

def test_same_seed_same_record_whatever_ran_before():
    first = run(config)
    torch.manual_seed(99); np.random.seed(99); run(replace(config, seed=5)); torch.rand(3)
    assert same(run(config)) == same(first)

def test_methods_start_from_the_same_weights_and_data():
    configs = replace(config, method='dense'), replace(config, method='phew', density=.1)
    a, b = (E.config_model(c, (1, 8, 8), 10).state_dict() for c in configs)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(*(E.config_data(c).train.x for c in configs))

def test_a_checkpointed_run_equals_an_undisturbed_one(tmp_path):
    longer = replace(config, epochs=3)
    assert same(run(longer, checkpoint=tmp_path/'run.pt')) == same(run(longer))
    assert same(run(longer, checkpoint=tmp_path/'run.pt')) == same(run(longer)) # nothing is left to train

def test_names_of_existing_records():
    "A stored name must be found again by every later release, or its run would be done twice."
    records = read_records(Path(__file__).parent.parent/'results'/'digits')
    for r in records:
        recipe = Recipe(**r['settings'].pop('recipe') | dict(drops=(1/2, 3/4)))
        assert run_name(Config(**r['settings'], recipe=recipe)) == r['run']
    seeds, methods, densities = range(3), ['dense', 'phew', 'random', 'magnitude'], [.02, .05, .1]
    assert {run_name(c) for c in grid(seed=seeds, method=methods, density=densities)} == {r['run'] for r in records}
    assert run_name(Config('mnist_transform', 'mlp', hidden=(300, 300), bn=True)) == '19e7a6cac580'
    assert run_name(Config('cifar10', 'resnet20', 'gmp', .05, width=.5, amp='bf16', init='normal')) == 'e43746aadfce'

# records

words = st.text(max_size=5).filter(lambda t: t not in ('inf', '-inf', 'nan', 'run'))
leaves = st.none() | st.booleans() | st.integers(-10**6, 10**6) | st.floats() | words
values = st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3), max_leaves=10)

@given(st.lists(st.dictionaries(words, values, max_size=4), max_size=5))
@settings(max_examples=60, deadline=None)
def test_records_come_back_as_written(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp('records')
    records = [dict(r, run=str(i)) for i,r in enumerate(records)]
    for r in records: append_line(folder/'records.jsonl', r)
    assert repr(read_records(folder)) == repr(records) # as text, for nan is not equal to itself

def test_lines_are_strict_json(tmp_path):
    append_line(tmp_path/'records.jsonl', dict(run='a', log10_trace=-math.inf))
    def refuse(name): raise ValueError(name)
    assert json.loads((tmp_path/'records.jsonl').read_text(), parse_constant=refuse)['log10_trace'] == '-inf'

def test_cut_anywhere_only_the_last_record_is_lost(tmp_path):
    path, records = tmp_path/'records.jsonl', [dict(run=str(i), text='é'*i) for i in range(3)]
    for r in records: append_line(path, r)
    whole, last = path.read_bytes(), path.read_bytes().rindex(b'\n', 0, -1) + 1
    for cut in range(last + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match='line 3, is cut off'): assert read_records(tmp_path) == records[:2]
        append_line(path, records[2])
        with pytest.warns(UserWarning): assert read_records(tmp_path) == records
    path.write_bytes(whole[:-1]) # only the end of the line is missing
    append_line(path, dict(run='3'))
    assert len(read_records(tmp_path)) == 4

def test_load_results(tmp_path):
    with pytest.raises(FileNotFoundError, match='there is no records.jsonl'): load_results(tmp_path/'none')
    records = sweep(grid(method=['dense', 'random'], density=[.1, .2], **small), tmp_path, progress=False)
    table = load_results(tmp_path)
    assert isinstance(table, pd.DataFrame) and table.accuracy.tolist() == [r['accuracy'] for r in records]

# sweeps

def test_grid_is_every_combination_once():
    configs = grid(seed=range(2), method=['dense', 'random'], density=[.1, .2], **small)
    each = [('dense', 1), ('random', .1), ('random', .2)]
    assert [(c.seed, c.method, c.density) for c in configs] == [(seed, *m) for seed in (0, 1) for m in each]

def test_interrupted_sweep_goes_on(tmp_path, monkeypatch):
    configs, calls = grid(seed=range(4), method='random', **small), []
    def run_some(c, *args):
        if len(calls) == 2: raise KeyboardInterrupt
        calls.append(c)
        return run(c, *args)
    monkeypatch.setattr(E, 'run', run_some)
    with pytest.raises(KeyboardInterrupt): sweep(configs, tmp_path, progress=False)
    assert [r['seed'] for r in read_records(tmp_path)] == [0, 1]
    monkeypatch.setattr(E, 'run', lambda c, *args: calls.append(c) or run(c, *args))
    records = sweep(configs, tmp_path, progress=False)
    assert [c.seed for c in calls] == [0, 1, 2, 3] and [r['seed'] for r in records] == [0, 1, 2, 3]

def test_a_failing_run_is_reported_and_tried_again(tmp_path, capsys):
    configs = [replace(config, recipe=replace(config.full_recipe, lr=1e30, epochs=2), epochs=2), config]
    records = sweep(configs, tmp_path, progress=False)
    said = capsys.readouterr().err
    assert [r['run'] for r in records] == [run_name(config)]
    assert 'mlp on digits, magnitude 0.2 seed 0: the loss is' in said
    failed = json.loads((tmp_path/'failed.jsonl').read_text())
    assert 'FloatingPointError' in failed['error'] and 'Traceback' in failed['traceback']
    assert failed['settings']['recipe']['lr'] == 1e30
    sweep(configs, tmp_path, progress=False)
    assert len((tmp_path/'failed.jsonl').read_text().splitlines()) == 2 and len(read_records(tmp_path)) == 1

def test_warnings_go_into_the_record(monkeypatch):
    prune = E.prune
    monkeypatch.setattr(E, 'prune', lambda *args, **kwargs: warnings.warn('a layer is empty') or prune(*args, **kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert run(config)['warnings'] == ['a layer is empty']

@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='no SIGKILL on this system')
def test_killed_sweep_goes_on(tmp_path):
    "Killed by the system, the folder holds what had finished, and the rest is run by the next call."
    code = ("from phew_nb.experiments import *\n"
            "configs = grid(seed=range(30), method='random', hidden=(20,), epochs=1, per_class=10, test_per_class=5)\n"
            f"sweep(configs, {str(tmp_path)!r}, progress=False)")
    process = subprocess.Popen([sys.executable, '-W', 'ignore', '-c', code])
    while process.poll() is None and len(read_records(tmp_path)) < 3: time.sleep(.01)
    os.kill(process.pid, signal.SIGKILL); process.wait()
    done = len(read_records(tmp_path))
    records = sweep(grid(seed=range(30), method='random', **small), tmp_path, progress=False)
    assert 3 <= done < 30 and [r['seed'] for r in records] == list(range(30))
    assert same(records[0]) == same(run(Config(method='random', seed=0, **small)))
