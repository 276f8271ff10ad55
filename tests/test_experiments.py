"Runs: what decides them, and that they can be repeated and gone on with."
import os, signal
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from phew_nb import experiments as E
from phew_nb.cli import usual_methods
from phew_nb.experiments import Config, grid, read_records, run, run_name
from phew_nb.together import shared_settings
from phew_nb.training import Callback, Recipe

small = dict(hidden=(20,), epochs=1, per_class=10, test_per_class=5)
config = Config(method='magnitude', density=.2, **small)
def same(record): return {k: v for k,v in record.items() if not k.startswith('seconds')}

def test_names_of_existing_records():
    "A stored name must be found again by every later release, or its run would be done twice."
    results = Path(__file__).parent.parent/'results'
    records = read_records(results/'comparison_digits') # those of the first three seeds were written by version 0.1
    for r in records:
        recipe = Recipe(**r['settings'].pop('recipe') | dict(drops=(1/2, 3/4)))
        assert run_name(Config(**r['settings'], recipe=recipe)) == r['run']
    digits = {r['run']: r for r in read_records(results/'digits')}
    configs = grid(seed=range(3), method=list(usual_methods), density=[.02, .05, .1])
    assert {run_name(c) for c in configs} == digits.keys()
    assert len(records) == 250 and len(digits.keys() & {r['run'] for r in records}) == 51
    assert run_name(Config('mnist_transform', 'mlp', hidden=(300, 300), bn=True)) == '19e7a6cac580'
    assert run_name(Config('cifar10', 'resnet20', 'gmp', .05, width=.5, amp='bf16', init='normal')) == 'e43746aadfce'

def test_killed_after_any_epoch_a_run_ends_as_it_would_have(tmp_path):
    longer, path = replace(config, epochs=4), tmp_path/'run.pt'
    class Stop(Callback):
        order = 99 # after the checkpoint is written
        def after_epoch(self):
            if self.epoch == self.at: raise KeyboardInterrupt
    whole = same(run(longer))
    for at in range(4):
        stop = Stop(); stop.at = at
        with pytest.raises(KeyboardInterrupt): run(longer, checkpoint=path, cbs=[stop])
        assert path.exists() and same(run(longer, checkpoint=path)) == whole
        path.unlink()

def test_runs_that_share_their_beginning_are_as_if_alone():
    "One network, one order of walks and one set of data in memory serve them; none of it changes."
    method = ['phew', 'phew_uniform', 'dense', 'magnitude', 'lottery', 'phew_kernel']
    configs = grid(seed=[0, 1], method=method, density=[.1, .3], **small)
    E.prune_ahead(configs)
    together = [run(c) for c in configs]
    E.prune_ahead([])
    for c,r in zip(configs, together):
        E._start.clear(); E._load.cache_clear()
        assert same(run(c)) == same(r), c

@dataclass(frozen=True)
class Younger(Config):
    "With a field that nothing here knows yet."
    gain:float = 1.

def test_no_field_is_passed_over_by_what_runs_share():
    "Networks at initial weights and stacks of networks are shared between runs that differ in named fields alone."
    known = set(E._after) | {'model', 'seed', 'epochs', 'hidden', 'bn', 'width', 'init'}
    assert {f.name for f in fields(Config)} == known, 'say in 61 and 63 whether initial weights and stacks depend on the new field'
    data = E.config_data(config)
    one, two = (E.untrained(Younger(gain=g, **small), data)[0] for g in (1., 2.))
    assert one is not two
    assert shared_settings(Config(**small)) and shared_settings(Younger(gain=2., **small)) is None
    for changed in (dict(seed=1), dict(hidden=(21,)), dict(bn=True), dict(init='xavier_uniform')):
        assert E.untrained(replace(config, **changed), data)[0] is not E.untrained(config, data)[0], changed
    assert E.untrained(replace(config, method='phew', density=.5), data)[0] is E.untrained(config, data)[0]

@pytest.mark.slow
def test_killed_at_epoch_100_of_160_a_run_ends_equal_to_the_bit(tmp_path):
    "The paper's length, by its recipe; the process is killed, with its checkpoint of epoch 100 on disk."
    longer, path = replace(config, epochs=160, recipe='resnet20_cifar10'), tmp_path/'run.pt'
    class Stop(Callback):
        order = 99 # after the checkpoint is written
        def after_epoch(self):
            if self.epoch == 99: os.kill(os.getpid(), signal.SIGKILL)
    child = get_context('fork').Process(target=lambda: run(longer, 'cpu', path, cbs=[Stop()]))
    child.start(); child.join()
    assert child.exitcode == -signal.SIGKILL and path.exists()
    began = []
    class Watch(Callback):
        def before_train(self): began.append(self.epoch)
    record = run(longer, 'cpu', path, cbs=[Watch()])
    assert began == list(range(100, 160)) and same(record) == same(run(longer, 'cpu'))

def test_a_run_whose_last_step_diverges_has_failed():
    "Its only training loss is finite; together with others, too, it leaves no record."
    wild = replace(config, hidden=(8,), per_class=5, recipe=replace(config.full_recipe, lr=1e30, epochs=1))
    with pytest.raises(FloatingPointError, match='validation loss is nan after epoch 0'): run(wild, 'cpu')
    rows = [dict(train_loss=2., valid_loss=float('nan'), accuracy=.1, seconds=0)]
    with pytest.raises(FloatingPointError, match='validation loss is nan after epoch 0'): E.summed_up(rows)

def test_data_of_your_own_are_read_again_when_the_file_changes(tmp_path):
    from phew_nb.experiments import Config, config_data, own_files
    text = """import torch
def make():
    split = [(torch.full((3,), {}.), i % 2) for i in range(4)]
    return split, split
"""
    place, seen = tmp_path/'mine.py', []
    for value in 7, 8:
        place.write_text(text.format(value))
        config = Config(data=f'{place}:make')
        seen.append((config_data(config).train.x.max().item(), own_files(config)[str(place)]))
        assert config_data(config).train.x is config_data(config).train.x # unchanged, they are kept
    assert [x for x,_ in seen] == [7, 8] and seen[0][1] != seen[1][1]

def test_a_folder_of_images_is_read_again_when_it_changes(tmp_path):
    from PIL import Image
    from phew_nb.experiments import Config, config_data
    for split in 'train', 'test':
        for name in 'a', 'b':
            (tmp_path/split/name).mkdir(parents=True)
            for i in range(3): Image.new('L', (4, 4), 50*i).save(tmp_path/split/name/f'{i}.png')
    config = Config(data=str(tmp_path))
    assert len(config_data(config).train) == 6
    Image.new('L', (4, 4), 7).save(tmp_path/'train'/'b'/'late.png')
    assert len(config_data(config).train) == 7
    before = config_data(config).train.x.float().mean()
    Image.new('L', (4, 4), 255).save(tmp_path/'train'/'b'/'late.png') # under its name
    assert config_data(config).train.x.float().mean() != before

def test_a_record_names_the_module_that_was_imported(tmp_path, monkeypatch):
    "Python does not read a module again when its file changes."
    from phew_nb.experiments import Config, config_data, own_files
    from phew_nb.models import source_of
    (tmp_path/'own_package').mkdir()
    place = tmp_path/'own_package'/'data.py'
    text = "import torch\ndef make():\n    split = [(torch.full((3,), {}.), i % 2) for i in range(4)]\n    return split, split\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    place.write_text(text.format(7))
    assert source_of('own_package.data:make') == {} # it is not imported yet
    config = Config(data='own_package.data:make')
    assert own_files(config).keys() == {'own_package.data'}
    first = config_data(config).train.x.max(), own_files(config)
    place.write_text(text.format(88))
    assert (config_data(config).train.x.max(), own_files(config)) == first and first[0] == 7

def test_what_walks_hold_too_much_is_told_beside_other_densities():
    from phew_nb.experiments import grid
    from phew_nb.sweep import sweep
    import tempfile
    few = dict(seed=0, method='phew', epochs=1, per_class=5, test_per_class=5)
    for densities in [5e-5], [5e-5, .1]:
        with tempfile.TemporaryDirectory() as out:
            record = next(r for r in sweep(grid(density=densities, **few), out, progress=False) if r['density'] < 1e-4)
        assert record['kept'] == 3 and any('1 of 17,400 weights are asked for, and 3 are kept' in w for w in record['warnings'])

@pytest.mark.parametrize('method', ['gmp', 'lottery'])
def test_methods_that_train_are_broken_off_and_end_as_they_would_have(method, tmp_path, monkeypatch):
    "Once in the middle of the pruning, which begins anew, and once after it, where the training goes on."
    from phew_nb import iterative
    config = Config(method=method, density=.5, **small | dict(epochs=3))
    whole, path, calls, own = run(config, 'cpu'), tmp_path/'run.pt', [], iterative._train
    def stops(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2: raise KeyboardInterrupt
        return own(*args, **kwargs)
    class Stop(Callback):
        def after_epoch(self):
            if self.epoch == 1: raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(iterative, '_train', stops)
        run(config, 'cpu', path)
    assert not path.exists()
    with pytest.raises(KeyboardInterrupt): run(config, 'cpu', path, cbs=[Stop()])
    assert path.exists()
    assert same(run(config, 'cpu', path)) == same(whole)
