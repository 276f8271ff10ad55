"Sweeps: killed, interrupted, beside others, on a bad disk: nothing is lost, and nothing is done twice."
import os, signal, subprocess, sys, threading, time, warnings
from dataclasses import replace
from pathlib import Path

import pytest

from phew_nb import sweep as S
from phew_nb.cli import phew_sweep
from phew_nb.config import Config, grid, run_name
from phew_nb.experiments import run
from phew_nb.store import read_failures, read_records
from phew_nb.plots import plot_curves
from phew_nb.sweep import sweep

small = dict(hidden=(20,), epochs=1, per_class=10, test_per_class=5)
config = Config(method='magnitude', density=.2, **small)
alone = dict(progress=False, together=False)
def same(record): return {k: v for k,v in record.items() if not k.startswith('seconds')}

def script(out, n=4, how='together=False', method="'random'", epochs=1, more=''):
    "A process that does a sweep."
    code = f'''
import warnings; warnings.simplefilter('ignore')
from phew_nb.config import grid
from phew_nb.sweep import sweep
{more}
if __name__ == '__main__':
    configs = grid(seed=range({n}), method={method}, hidden=(20,), epochs={epochs}, per_class=10, test_per_class=5)
    sweep(configs, {str(out)!r}, progress=False, seconds=0, {how})
'''
    path = Path(out).with_suffix('.py'); path.write_text(code)
    return subprocess.Popen([sys.executable, '-W', 'ignore', str(path)], stderr=subprocess.PIPE, text=True, start_new_session=True)

def wait_for(what, process):
    while not what():
        assert process.poll() is None, process.stderr.read()
        time.sleep(.02)

def n_records(out): return len(list((out/'records').glob('*.json'))) if (out/'records').exists() else 0

def test_a_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    "Broken off in its third epoch, it begins at the third again."
    longer, trained = replace(config, epochs=5), []
    def stop(self):
        trained.append(self.epoch)
        if trained == [0, 1, 2]: raise KeyboardInterrupt
    from phew_nb.training import Checkpoint
    class Watch(Checkpoint): order = 1; before_train = stop; __init__ = before_fit = after_epoch = after_train = lambda self: None
    monkeypatch.setitem(S.trackers, 'watch', lambda how, config: [Watch()])
    with pytest.raises(KeyboardInterrupt): sweep([longer], tmp_path, track='watch', seconds=0, **alone)
    record, = sweep([longer], tmp_path, track='watch', seconds=0, **alone)
    assert trained == [0, 1, 2, 2, 3, 4] and same(record) == same(run(longer))
    assert not list((tmp_path/'checkpoints').iterdir())

def test_tensorboard(tmp_path):
    pytest.importorskip('tensorboard')
    sweep([config], tmp_path, track='tensorboard', **alone)
    assert list((tmp_path/'tensorboard').rglob('events*'))

def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip('wandb')
    for name,value in dict(WANDB_MODE='offline', WANDB_SILENT='true', WANDB_DIR=str(tmp_path)).items(): monkeypatch.setenv(name, value)
    record, = sweep([config], tmp_path, track='wandb', **alone)
    assert same(record) == same(run(config)) and list(tmp_path.rglob('*.wandb'))

# processes

def test_killed_driver_and_two_at_once(tmp_path):
    "One process is killed; then two work on the folder at once: every run is done once."
    out = tmp_path/'results'
    process = script(out, 8)
    wait_for(lambda: n_records(out) >= 2, process)
    os.kill(process.pid, signal.SIGKILL); process.wait()
    before = {p.name: p.stat().st_mtime_ns for p in (out/'records').iterdir()}
    note = f"import phew_nb.sweep as S, os; w = S.write_record\nS.write_record = lambda out, r, m: (open({str(tmp_path)!r} + '/log', 'a').write(r['run'] + chr(10)), w(out, r, m))"
    both = [script(out, 8, more=note) for _ in range(2)]
    for p in both: assert p.wait() == 0, p.stderr.read()
    records, log = read_records(out), (tmp_path/'log').read_text().split()
    assert sorted(r['seed'] for r in records) == list(range(8))
    assert len(log) == len(set(log)) == 8 - len(before)
    assert {p.name: p.stat().st_mtime_ns for p in (out/'records').iterdir() if p.name in before} == before
    assert same(next(r for r in records if r['seed'] == 0)) == same(run(Config(method='random', seed=0, **small)))

def test_sigterm_stops_within_seconds(tmp_path):
    out = tmp_path/'results'
    process = script(out, 200, epochs=2)
    wait_for(lambda: n_records(out) >= 1, process)
    process.terminate(); process.wait(30)
    said = process.stderr.read()
    assert process.returncode != 0 and f'of 200 runs are recorded in {out}' in said and 'the same call goes on' in said

def children(pid):
    found = subprocess.run(['ps', '-ww', '-eo', 'pid=,ppid=,args='], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()]
    return [int(child) for child,parent,args in rows if int(parent) == pid and 'spawn_main' in args]

@pytest.mark.slow
def test_killed_worker(tmp_path):
    "A worker is killed in the middle of a long run: another goes on with it, from its checkpoint."
    out = tmp_path/'results'
    process = script(out, 3, 'workers=2, together=False', epochs=300)
    wait_for(lambda: list(out.glob('checkpoints/*.pt')) or n_records(out), process)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    assert process.wait() == 0, process.stderr.read()
    assert sorted(r['seed'] for r in read_records(out)) == [0, 1, 2] and not read_failures(out)

own = """
def alternate(model, density, input_size):
    from phew_nb.pruners import prune
    return prune(model, 'magnitude', density, input_size)
"""

def test_what_is_registered_here_is_known_to_other_processes(tmp_path, capsys):
    "A lambda, a method in a file, a network and data that are named in this process alone; and what cannot be sent is refused."
    from phew_nb.data import datasets
    from phew_nb.models import mlp, models
    from phew_nb.pruners import prune, pruners
    (tmp_path/'own.py').write_text(own)
    rows = dict(mine=(pruners, lambda model, density, input_size: prune(model, 'magnitude', density, input_size)),
                my_net=(models, lambda sizes, seed: mlp(sizes, seed=seed)), my_data=(datasets, lambda: datasets['digits']()),
                lock=(pruners, lambda model, density, file=threading.Lock(): None))
    for name,(table, row) in rows.items(): table[name] = row
    try:
        how = small | dict(density=.2, seed=[0, 1])
        configs = grid(method=['mine', f"{tmp_path/'own.py'}:alternate"], **how) + grid(model='my_net', data='my_data', method='mine', **how)
        records = sweep(configs, tmp_path/'r', workers=1, **alone)
        assert len(records) == 6 and not read_failures(tmp_path/'r')
        assert [r["masks"] for r in records] == 3*[run(Config(method='magnitude', density=.2, seed=s, **small))['masks'] for s in (0, 1)]
        with pytest.raises(ValueError, match="the method 'lock' cannot be sent to another process"):
            sweep(grid(method='lock', **small), tmp_path/'none', workers=1, **alone)
        assert not (tmp_path/'none').exists()
    finally:
        for name,(table, row) in rows.items(): del table[name]
        del pruners[f"{tmp_path/'own.py'}:alternate"]

@pytest.mark.slow
def test_a_run_that_kills_its_worker_is_given_up(tmp_path):
    "As when memory is short; the others are done."
    out = tmp_path/'results'
    deadly = '''
import os, phew_nb.pruners as P
P.pruners['deadly'] = lambda model, density, input_size: os.kill(os.getpid(), 9)
'''
    process = script(out, 1, 'workers=1, together=False', method="['deadly', 'random']", more=deadly)
    assert process.wait() == 0
    assert 'died three times' in process.stderr.read()
    assert [r['method'] for r in read_records(out)] == ['random'] and len(read_failures(out)) == 1

@pytest.mark.slow
def test_ray_cluster_with_a_node_killed(tmp_path, monkeypatch):
    "Every run finishes once, though a node dies."
    pytest.importorskip('ray')
    monkeypatch.setenv('RAY_worker_niceness', '0') # else it waits for whatever else the machine does
    import ray
    from ray.cluster_utils import Cluster
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1))
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        configs, killed, told = grid(seed=range(6), method='random', **small | dict(epochs=30)), [], []
        parts, how = [[c] for c in configs], S.How(str(tmp_path))
        def tell(word, name, what):
            told.append((word, name))
            if word == 'done' and not killed: killed.append(cluster.remove_node(node))
        S.ray_work(parts, how, tell)
    finally: ray.shutdown(); cluster.shutdown()
    assert killed and sorted(r['seed'] for r in read_records(tmp_path)) == list(range(6)) and not read_failures(tmp_path)
    assert sorted(n for w,n in told if w == 'done') == sorted(map(run_name, configs))

def test_a_file_that_has_changed_since_is_named(tmp_path):
    "Records of what a file of your own was stay, and that they are old is said."
    net = 'from torch import nn\ndef make(): return nn.Sequential(nn.Flatten(), nn.Linear(64, {0}), nn.ReLU(), nn.Linear({0}, 10))\n'
    (file := tmp_path/'mine.py').write_text(net.format(12))
    configs = [Config(model=f'{file}:make', method='magnitude', epochs=1, per_class=2, seed=s) for s in (0, 1)]
    old = sweep(configs[:1], tmp_path/'out', progress=False)
    assert list(old[0]['files']) == [str(file)]
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        assert sweep(configs[:1], tmp_path/'out', progress=False) == old
    file.write_text(net.format(20))
    with pytest.warns(UserWarning, match="mine.py' has changed since 1 of these runs was recorded"):
        new = sweep(configs, tmp_path/'out', progress=False)
    assert new[0] == old[0] and new[1]['files'] != old[0]['files'] and new[1]['total'] == 20*74

def test_ray_holds_no_more_claims_than_tasks_are_out(tmp_path):
    "An open file for each run of a long sweep would be more than a process may have."
    import resource
    from types import SimpleNamespace
    out, parts = [], [[c] for c in grid(method='random', seed=list(range(300)), hidden=(4,))]
    task = SimpleNamespace(remote=lambda part, how: (out.append(part), f'ref {len(out)}')[1])
    ray = SimpleNamespace(get=lambda ref: [('failed', S.run_name(part[0]), dict(run=S.run_name(part[0]), error='no'), None)
                                           for part in [out[int(ref.split()[1]) - 1]]])
    how, running, words = S.How(str(tmp_path)), {}, []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 64, limit[1]))
    try:
        for part in parts:
            S._submit(part, how, lambda *a: words.append(a[0]), task, running)
            if len(running) == 8:
                ref = next(iter(running))
                S._collect(ray, ref, *running.pop(ref), how, lambda *a: words.append(a[0]))
        while running: S._collect(ray, ref := next(iter(running)), *running.pop(ref), how, lambda *a: words.append(a[0]))
    finally: resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert words.count('begin') == words.count('failed') == 300

def test_a_run_of_wandb_ends_when_ours_fails(monkeypatch):
    from types import SimpleNamespace
    ends = []
    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(finish=lambda exit_code: ends.append(exit_code)))
    monkeypatch.setitem(S.trackers, 'wandb', lambda how, config: [])
    how = S.How('.', track='wandb')
    with S.tracking(how, None): pass
    with pytest.raises(RuntimeError), S.tracking(how, None): raise RuntimeError('no')
    assert ends == [0, 1]

def test_looking_at_the_test_set_less_often_changes_nothing_else(tmp_path):
    several = replace(config, epochs=5)
    often, = sweep([several], tmp_path/'a', **alone)
    seldom, = sweep([several], tmp_path/'b', evaluate_every=2, progress=False)
    looked = [False, True, False, True, True]
    for name in 'accuracy', 'valid_loss':
        assert seldom['curve'][name] == [v if now else None for now, v in zip(looked, often['curve'][name])]
    assert seldom['curve']['train_loss'] == often['curve']['train_loss'] and seldom['accuracy'] == often['accuracy']
    line = plot_curves(tmp_path/'b').axes[0].lines[0]
    assert list(line.get_xdata()) == [2, 4, 5]

def test_runs_by_torch_compile(tmp_path, compiler):
    file = tmp_path/'grid.toml'
    file.write_text('method = "magnitude"\ndensity = 0.2\nhidden = [20]\nepochs = 1\nper_class = 10\ntest_per_class = 5\n')
    assert phew_sweep([str(file), '--out', str(tmp_path/'a'), '--workers', '0', '--compile', '--quiet']) == 0
    eager, = sweep([config], tmp_path/'b', **alone)
    record, = read_records(tmp_path/'a')
    assert record['run'] == eager['run'] and record['compiled'] and 'compiled' not in eager
    assert abs(record['loss'] - eager['loss']) < 1e-4

def test_a_line_of_progress_counts_all_runs_of_a_stack(tmp_path, monkeypatch, capsys):
    "On a clock on which everything takes minutes: networks trained together end together."
    import itertools, re
    from types import SimpleNamespace
    ticks = itertools.count(0, 100)
    monkeypatch.setattr(S, 'time', SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda s: None))
    some = grid(seed=[0, 1, 2], method='random', **small | dict(hidden=[(20,), (30,), (40,)]))
    S.sweep(some, tmp_path, device='cpu')
    told = re.findall(r'^(\d+) runs? in .* left', capsys.readouterr().err, re.M)
    assert set(told) == {'3', '6'}

def test_a_plan_refuses_a_size_for_data_that_have_one(tmp_path, monkeypatch, capsys):
    "Without loading them; data of one's own take it."
    from phew_nb import data
    def fails(): raise AssertionError('it is loaded')
    monkeypatch.setitem(data.datasets, 'digits', fails)
    monkeypatch.chdir(tmp_path)
    Path('mine.py').write_text('def make(): 1/0')
    Path('grid.toml').write_text('model = "mlp"\nimage_size = 12\n')
    with pytest.raises(SystemExit): phew_sweep(['grid.toml', '--dry-run'])
    assert 'grid.toml, line 2: digits has images of one size' in capsys.readouterr().err
    with pytest.raises(ValueError, match='digits has images of one size'): grid(data=['mine.py:make', 'digits'], image_size=8)
    Path('grid.toml').write_text('data = "mine.py:make"\nimage_size = [12, 16]\n')
    assert phew_sweep(['grid.toml', '--dry-run']) == 0 and '2 to do' in capsys.readouterr().out
