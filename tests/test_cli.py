"The console commands, as a user types them."
import os, shlex, signal, subprocess, sys, time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from phew_nb import cli
from phew_nb.experiments import read_records
from phew_nb.masks import Masks

here = os.environ | {'PYTHONPATH': str(Path(__file__).resolve().parent.parent)}
fast = '--hidden 20 --epochs 1 --per-class 10 --test-per-class 5'.split()
def shell(command, *words, **kwargs):
    "Run a command in a process of its own."
    line = [*python(command), *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=here, **kwargs)

def python(command): return [sys.executable, '-c', f'import sys; from phew_nb.cli import {command}; sys.exit({command}())']

def refused(capsys, command, *words):
    "The sentence with which a command refuses a line."
    with pytest.raises(SystemExit) as e: command([*map(str, words)])
    out, err = capsys.readouterr()
    assert e.value.code == 2 and out == '' and err.count('\n') == 1 and err.startswith(f'{command.__name__}: '), err
    return err

@pytest.mark.parametrize('command', ['phew_compare', 'phew_prune'])
def test_help_imports_nothing_heavy(command):
    code = (f"import sys; from phew_nb.cli import {command}\ntry: {command}(['--help'])\n"
            "except SystemExit as e: assert e.code == 0\n"
            "print([m for m in ('torch', 'numpy', 'fastai', 'pandas') if m in sys.modules])")
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=here)
    assert run.returncode == 0 and run.stdout.endswith('\n[]\n'), run.stdout[-300:] + run.stderr

def test_a_comparison(tmp_path):
    words = ['phew_compare', '--methods', 'dense,phew,random', *fast]
    run = shell(*words, '--densities', '0.1 0.3', '--seeds', 2, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    lines, out = run.stdout.splitlines(), tmp_path/'phew_results'
    rows = ['dense 1.0', 'phew 0.1', 'phew 0.3', 'random 0.1', 'random 0.3']
    assert [line.split()[:2] for line in lines[1:]] == [row.split() for row in rows]
    assert sorted(os.listdir(out)) == ['accuracy.png', 'records.jsonl', 'widths.png'] and len(read_records(out)) == 10
    assert all((out/p).read_bytes()[:4] == b'\x89PNG' for p in ('accuracy.png', 'widths.png'))
    assert 'runs:' in run.stderr and 'Warning' not in run.stderr and 'Traceback' not in run.stderr
    again = shell(*words, '--densities', '.1,.3', '--seeds', '0,1', cwd=tmp_path)
    assert again.stdout == run.stdout and len(read_records(out)) == 10 # nothing was run twice

def test_regression_reports_the_squared_error(tmp_path, capsys):
    words = '--data digits_transform --methods dense,magnitude --densities .3 --seeds 1'.split()
    assert cli.phew_compare([*words, *fast, '--out', str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert 'MSE' in table and 'accuracy' not in table

def lines(text): # 'words => message' in lines
    names, messages = zip(*(line.split(' => ') for line in text.strip().splitlines()))
    return pytest.mark.parametrize('words, message', list(zip(map(shlex.split, names), messages)), ids=names)

@lines('''
--densities 0 => density must be in (0, 1]
--densities -0.1 => density must be in (0, 1]
--densities -.1,.2 => density must be in (0, 1]
--densities 0.1,-0.2 => density must be in (0, 1]
--densities 1.01 => density must be in (0, 1]
--densities nan => density must be in (0, 1]
--densities inf => density must be in (0, 1]
--densities -inf => density must be in (0, 1]
--densities x => 'x' is not a number
--densities '' => the list is empty
--densities '.1;.2' => is not a number
--seeds 0 => must be 1 or more
--seeds -1 => must be 1 or more
--seeds 1,-1 => must be 0 or more
--seeds 1.5 => not a whole number
--epochs 0 => must be 1 or more
--epochs -3 => must be 1 or more
--epochs many => not a whole number
--methods pheww => did you mean 'phew'
--methods , => the list is empty
--methods zzz => Known: dense,
--data digit => did you mean 'digits'
--model resnet21 => did you mean 'resnet20'
--init kaiming => Known: kaiming_normal
--recipe defalt => did you mean 'default'
--model vgg19 => takes images
--per-class 9999 => has 1 to 143
--test-per-class 99 => has 1 to 35
--hidden 0 => must be 1 or more
--width -1 => above 0
--lr nan => above 0
--batch-size 0 => must be 1 or more
--device abacus => cannot use the device
--frobnicate => unrecognized
digits => unrecognized
''')
def test_a_wrong_line_is_refused_in_one_sentence(tmp_path, capsys, words, message):
    assert message in refused(capsys, cli.phew_compare, *words, '--out', tmp_path/'a'/'results')
    assert os.listdir(tmp_path) == []

def test_places_that_cannot_be_written(tmp_path, capsys):
    (tmp_path/'file').write_text('mine')
    (tmp_path/'full').mkdir(); (tmp_path/'full'/'accuracy.png').mkdir()
    (tmp_path/'loop').symlink_to(tmp_path/'nowhere')
    said = lambda place: refused(capsys, cli.phew_compare, '--out', tmp_path/place)
    for place in 'file', 'file/below', 'loop': assert 'is not a folder' in said(place)
    assert 'is a folder; name a file' in said('full')
    assert said('x'*300)
    assert sorted(os.listdir(tmp_path)) == ['file', 'full', 'loop'] and (tmp_path/'file').read_text() == 'mine'

@pytest.mark.skipif(not Path('/proc').is_dir(), reason='no folder that nobody can write to')
def test_a_folder_that_nobody_can_write_to(capsys):
    assert "cannot be written" in refused(capsys, cli.phew_compare, '--out', '/proc/phew_results')

@pytest.mark.skipif(not hasattr(os, 'geteuid') or os.geteuid() == 0, reason='the superuser may write anywhere')
def test_a_read_only_folder(tmp_path, capsys):
    tmp_path.chmod(0o555)
    assert 'cannot be written (Permission denied)' in refused(capsys, cli.phew_compare, '--out', tmp_path/'results')

def test_data_that_cannot_be_downloaded(tmp_path, capsys, monkeypatch):
    import fastai.data.external
    def no_network(*args, **kwargs):
        print('downloading', end='') # as fastai shows its progress
        raise OSError('no network')
    monkeypatch.setenv('FASTAI_HOME', str(tmp_path/'home'))
    monkeypatch.setattr(fastai.data.external, 'untar_data', no_network)
    from phew_nb.experiments import _load
    _load.cache_clear()
    with pytest.raises(SystemExit) as e:
        cli.phew_compare(['--data', 'cifar10', '--model', 'resnet20', '--out', str(tmp_path/'results')])
    out, err = capsys.readouterr()
    assert e.value.code == 2 and out == '' and err.startswith('downloading\nphew_compare: cifar10 is neither in')
    assert 'nor could it be downloaded (no network)' in err and not (tmp_path/'results').exists()

def test_a_failing_run_does_not_lose_the_others(tmp_path, capsys):
    "Code 1, and the table of what has finished; the next call runs what is missing."
    words = ['--methods', 'dense,magnitude', '--densities', '.1', '--seeds', '1', *fast, '--out', str(tmp_path)]
    from phew_nb import experiments
    run = experiments.run
    def run_but_dense(config, *args):
        if config.method == 'dense': raise FloatingPointError('the loss is nan')
        return run(config, *args)
    experiments.run = run_but_dense
    try: code = cli.phew_compare(words)
    finally: experiments.run = run
    out, err = capsys.readouterr()
    assert code == 1 and 'magnitude' in out and 'dense 1 seed 0: the loss is nan' in err and '1 of 2 runs failed' in err
    assert cli.phew_compare(words) == 0 and 'dense' in capsys.readouterr().out

@pytest.mark.skipif(os.name != 'posix', reason='signals of POSIX')
def test_interrupted_and_gone_on_with(tmp_path):
    words = ['--methods', 'random', '--densities', '.1', '--seeds', '40', *fast, '--out', str(tmp_path)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([*python('phew_compare'), *words], env=here, **pipes)
    while process.poll() is None and len(read_records(tmp_path)) < 2: time.sleep(.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    done = len(read_records(tmp_path))
    assert process.returncode == 130 and out == '' and 'Traceback' not in err
    assert 'the same line goes on from there' in err
    assert 2 <= done < 40
    assert shell('phew_compare', *words).returncode == 0 and len(read_records(tmp_path)) == 40

# phew_prune

def test_masks_alone(tmp_path):
    words = 'phew_prune --model resnet20 --density .05 --seed 3 --out'.split()
    init = tmp_path/'new'/'init.safetensors'
    run = shell(*words, tmp_path/'new'/'masks.safetensors', '--weights-out', init)
    assert run.returncode == 0, run.stderr
    from phew_nb.models import resnet20
    masks, model = Masks.load(tmp_path/'new'/'masks.safetensors'), resnet20(10)
    model.load_state_dict(load_file(init))
    masks.apply(model)
    assert f'{masks.kept:,} of {masks.total:,} weights kept\n' in run.stdout
    assert round(.05*masks.total) <= masks.kept < round(.05*masks.total) + 20
    assert 'Traceback' not in run.stderr and 'Warning' not in run.stderr
    again = shell(*words, tmp_path/'again.safetensors', '--weights', init)
    assert again.stdout == run.stdout and Masks.load(tmp_path/'again.safetensors') == masks

@lines('''
--density 0 => density must be in (0, 1]
--density -.5 => density must be in (0, 1]
--density nan => density must be in (0, 1]
--density 90% => is not a number
--model vgg16 => did you mean 'vgg19'
--method magnitud => did you mean 'magnitude'
--method snip => name a data set with --data
--method lottery => trains the network
--data cifar => Known: digits
--method snip --data digits --n-out 3 => must be those of the data set
--seed -1 => must be 0 or more
--n-out 0 => must be 1 or more
--input-size 3,32 => takes images
--input-size 3,x,32 => not a whole number
--weights none.safetensors => there is no file of weights
''')
def test_wrong_lines(tmp_path, capsys, words, message):
    line = ['--model', 'resnet20', '--density', '.1', '--out', tmp_path/'masks.safetensors', *words]
    assert message in refused(capsys, cli.phew_prune, *line)
    assert os.listdir(tmp_path) == []

def test_what_is_needed_is_asked_for(capsys):
    assert '--model, --density, --out' in refused(capsys, cli.phew_prune)

def test_weights_of_another_network(tmp_path, capsys):
    mlp, text, out = (tmp_path/f'{name}.safetensors' for name in ('mlp', 'text', 'masks'))
    assert cli.phew_prune(['--model', 'mlp', '--density', '.1', '--out', str(out), '--weights-out', str(mlp)]) == 0
    out.unlink(); text.write_text('no tensors'); capsys.readouterr()
    def said(model, weights, *words):
        line = ['--model', model, '--density', '.1', '--out', out, '--weights', weights, *words]
        return refused(capsys, cli.phew_prune, *line)
    assert 'are of another network' in said('resnet20', mlp)
    assert 'has the shape (100, 784)' in said('mlp', mlp, '--input-size', '1,8,8')
    assert 'is not a safetensors file' in said('mlp', text)
    assert not out.exists()

def test_files_that_cannot_be_written(tmp_path, capsys):
    (tmp_path/'file').touch()
    def said(*files): return refused(capsys, cli.phew_prune, '--model', 'mlp', '--density', '.1', '--out', *files)
    assert 'is a folder; name a file' in said(tmp_path)
    assert 'is a folder; name a file' in said(tmp_path/'masks', '--weights-out', tmp_path)
    assert 'is not a folder' in said(tmp_path/'file'/'masks')
    assert os.listdir(tmp_path) == ['file']

def test_masks_are_those_of_the_comparison(tmp_path, capsys):
    words = '--methods phew --densities .1 --seeds 4,'.split()
    assert cli.phew_compare([*words, *fast, '--out', str(tmp_path)]) == 0
    words = '--model mlp --data digits --hidden 20 --density .1 --seed 4'.split()
    assert cli.phew_prune([*words, '--out', str(tmp_path/'masks')]) == 0
    assert read_records(tmp_path)[0]['masks'] == Masks.load(tmp_path/'masks').hash()[:12]
