"The console commands, as a user types them."
import json, os, re, shlex, signal, subprocess, sys, time
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

every = [f'phew_{name}' for name in cli.commands]

@pytest.mark.parametrize('command', every)
def test_help_imports_nothing_heavy(command):
    code = (f"import sys; from phew_nb.cli import {command}\nassert {command}(['--help']) == 0\n"
            "print([m for m in ('torch', 'numpy', 'fastai', 'pandas', 'matplotlib') if m in sys.modules])")
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=here)
    assert run.returncode == 0 and run.stdout.endswith('\n[]\n'), run.stdout[-300:] + run.stderr

leaks = r'# %%|#\|| at 0x|Ellipsis|<class|None\b|False\b|True\b|\\x1b|`'

@pytest.mark.parametrize('command', every)
def test_help_is_made_for_people(capsys, command):
    "80 columns, no marks of the source, no addresses, every option with a line of help."
    assert getattr(cli, command)(['--help']) == 0
    page, err = capsys.readouterr()
    assert err == '' and not re.search(leaks, page), re.search(leaks, page)
    assert max(map(len, page.splitlines())) <= 80 and page.isascii()
    options = re.findall(r'^  (--[a-z-]+)', page, re.M)
    assert {'--quiet', '--json', '--version', '--list', '--help', '--config'} <= set(options) and len(set(options)) == len(options)
    assert page.startswith(f'usage: {command} ')
    assert getattr(cli, command)(['-h']) == 0 and capsys.readouterr().out == page

@pytest.mark.parametrize('command', every)
def test_what_is_answered_at_once(capsys, command):
    assert getattr(cli, command)(['--version']) == 0
    assert re.fullmatch(r'phew_nb \d+\.\d+\.\d+\n', capsys.readouterr().out)
    assert getattr(cli, command)(['--list']) == 0
    page = capsys.readouterr().out
    from phew_nb.config import known
    for kind in cli.known: assert all(re.search(rf'^  {name} +\S', page, re.M) for name in known(kind)), kind
    assert max(map(len, page.splitlines())) <= 80 and ('rewire ' in page) == (command == 'phew_sweep')

def test_prune_never_imports_fastai(tmp_path):
    code = ("import sys; from phew_nb.cli import phew_prune\n"
            f"assert phew_prune(['--model', 'mlp', '--density', '.1', '--out', {str(tmp_path/'m')!r}]) == 0\n"
            "print([m for m in ('fastai', 'pandas', 'matplotlib') if m in sys.modules])")
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=here)
    assert run.returncode == 0 and run.stdout.endswith('\n[]\n'), run.stdout[-300:] + run.stderr

def test_python_m(tmp_path):
    run = lambda *words: subprocess.run([sys.executable, '-m', 'phew_nb', *words], capture_output=True, text=True, env=here)
    assert run('compare', '--version').stdout == run('phew_compare', '--version').stdout == run('--version').stdout
    page = run('--help').stdout
    assert all(f'  {name}' in page for name in cli.commands) and 'argv' not in page and max(map(len, page.splitlines())) <= 80
    wrong = run('comprae')
    assert wrong.returncode == 2 and wrong.stderr == "phew_nb: unknown command 'comprae'; did you mean 'compare'?\n"

def test_a_comparison(tmp_path, capsys, monkeypatch):
    words = ['phew_compare', '--methods', 'dense,phew,random', *fast]
    run = shell(*words, '--densities', '0.1 0.3', '--seeds', 2, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    lines, out = run.stdout.splitlines(), tmp_path/'phew_results'
    rows = ['dense 1.0', 'phew 0.3', 'random 0.3', 'phew 0.1', 'random 0.1'] # by density, then by method
    assert [line.split()[:2] for line in lines[1:]] == [row.split() for row in rows]
    assert {'accuracy.png', 'widths.png'} < set(os.listdir(out)) and len(read_records(out)) == 10
    assert all((out/p).read_bytes()[:4] == b'\x89PNG' for p in ('accuracy.png', 'widths.png'))
    assert '10 runs into' in run.stderr and 'Warning' not in run.stderr and 'Traceback' not in run.stderr
    monkeypatch.chdir(tmp_path)
    assert cli.phew_compare([*words[1:], '--densities', '.1,.3', '--seeds', '0,1']) == 0
    assert capsys.readouterr().out == run.stdout and len(read_records(out)) == 10 # nothing was run twice

def test_regression_reports_the_squared_error(tmp_path, capsys):
    words = '--data digits_transform --methods dense,magnitude --densities .3 --seeds 1'.split()
    assert cli.phew_compare([*words, *fast, '--out', str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert 'MSE' in table and 'accuracy' not in table

def lines(text): # 'words => message' in lines
    names, messages = zip(*(line.split(' => ') for line in text.strip().splitlines()))
    return pytest.mark.parametrize('words, message', list(zip(map(shlex.split, names), messages)), ids=names)

@lines('''
--densities 0 => a fraction of the weights in (0, 1]
--densities -0.1 => a fraction of the weights in (0, 1]
--densities -.1,.2 => a fraction of the weights in (0, 1]
--densities 0.1,-0.2 => a fraction of the weights in (0, 1]
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
--per-class 9999 => 9999 training examples of each class were asked for; class '0' has 143
--test-per-class 99 => 99 test examples of each class were asked for; class '0' has 35
--image-size 4 => digits has images of one size
--hidden 0 => must be 1 or more
--batch-size 0 => must be 1 or more
--device abacus => cannot use the device
--frobnicate => unrecognized option --frobnicate
--dat digits => unrecognized option --dat; did you mean --data?
--hiden 20 => did you mean --hidden?
digits => unrecognized word 'digits'
--densities .1 .2 => unrecognized word '.2'
--data => requires an argument
--config => requires an argument
--device '' => it is empty
--data '' => it is empty
--method pheww => did you mean 'phew'
--density 0 => a fraction of the weights in (0, 1]
--seeds 5000000000 => more than any machine holds
--hidden 9000000,9000000 => does not fit into memory
--model none.py:Net => there is no file
--config none.toml => cannot be read as TOML
''')
def test_a_wrong_line_is_refused_in_one_sentence(tmp_path, capsys, words, message):
    assert message in refused(capsys, cli.phew_compare, *words, '--out', tmp_path/'a'/'results')
    assert os.listdir(tmp_path) == []

def test_out_is_not_empty(capsys): assert 'it is empty' in refused(capsys, cli.phew_compare, '--out', '')

def test_a_config_file(tmp_path, capsys):
    "Options from a file; those of the line win; what is wrong in it is refused as on the line."
    file = tmp_path/'c.toml'
    file.write_text('methods = ["dense", "phew"]\ndensities = [0.1]\nseeds = [7]\nhidden = [20]\nepochs = 1\nper_class = 10\nbn = true\n')
    assert cli.phew_compare(['--config', str(file), '--test-per-class', '5', '--dry-run', '--json', '--out', str(tmp_path/'r')]) == 0
    found = json.loads(capsys.readouterr().out)['runs']
    assert [(r['method'], r['density'], r['seed']) for r in found] == [('dense', 1., 7), ('phew', .1, 7)]
    assert cli.phew_compare(['--config', str(file), '--seeds', '2,', '--dry-run', '--json', '--out', str(tmp_path/'r')]) == 0
    assert {r['seed'] for r in json.loads(capsys.readouterr().out)['runs']} == {2}
    file.write_text('hiden = [20]\n')
    assert 'did you mean --hidden?' in refused(capsys, cli.phew_compare, '--config', file)
    assert os.listdir(tmp_path) == ['c.toml']

def test_dry_run_writes_nothing(tmp_path, capsys):
    out = tmp_path/'results'
    assert cli.phew_compare([*fast, '--methods', 'dense,phew', '--densities', '.1,.2', '--seeds', '2', '--dry-run', '--out', str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == '0 of 6 runs are recorded, 6 to do' and not out.exists()

def test_quiet_and_json(tmp_path, capsys):
    words = [*fast, '--methods', 'dense,phew', '--density', '.1', '--seed', '1', '--out', str(tmp_path)]
    assert cli.phew_compare([*words, '--quiet', '--json']) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)['results']
    assert err == '' and [r['method'] for r in rows] == ['dense', 'phew'] and 0 <= rows[0]['accuracy'] <= 1
    assert rows[0]['accuracy_std'] is None

def test_the_last_of_two_wins(tmp_path, capsys):
    words = ['--methods', 'phew', '--densities', '.1', '--seeds', '3', '--seeds', '2', '--dry-run', '--json', '--out', str(tmp_path/'r')]
    assert cli.phew_compare(words) == 0 and len(json.loads(capsys.readouterr().out)['runs']) == 2

def test_places_that_cannot_be_written(tmp_path, capsys):
    (tmp_path/'file').write_text('mine')
    (tmp_path/'full').mkdir(); (tmp_path/'full'/'accuracy.png').mkdir()
    (tmp_path/'loop').symlink_to(tmp_path/'nowhere')
    said = lambda place: refused(capsys, cli.phew_compare, '--out', tmp_path/place)
    assert 'is not a folder' in refused(capsys, cli.phew_compare, '--out', os.devnull)
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

def test_a_failing_run_does_not_lose_the_others(tmp_path, capsys, monkeypatch):
    "Code 1, and the table of what has finished; the next call runs what is missing."
    words = ['--methods', 'dense,magnitude', '--densities', '.1', '--seeds', '1', *fast, '--out', str(tmp_path)]
    from phew_nb import experiments, together
    run = experiments.run
    def run_but_dense(config, *args):
        if config.method == 'dense': raise FloatingPointError('the loss is nan')
        return run(config, *args)
    monkeypatch.setattr(experiments, 'run', run_but_dense)
    monkeypatch.setattr(together, 'run_together', None) # each alone
    code = cli.phew_compare(words)
    monkeypatch.undo()
    out, err = capsys.readouterr()
    assert code == 1 and 'magnitude' in out and 'dense 1 seed 0: the loss is nan' in err and '1 of 2 runs failed' in err
    assert cli.phew_compare(words) == 0 and 'dense' in capsys.readouterr().out

@pytest.mark.skipif(os.name != 'posix', reason='signals of POSIX')
def test_interrupted_and_gone_on_with(tmp_path):
    words = ['--methods', 'random', '--densities', '.1', '--seeds', '40', *fast, '--out', str(tmp_path)]
    process = started(*words)
    while process.poll() is None and len(read_records(tmp_path)) < 2: time.sleep(.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    done = len(read_records(tmp_path))
    assert process.returncode == 130 and out == '' and 'Traceback' not in err
    assert 'goes on' in err
    assert 2 <= done < 40
    assert cli.phew_compare(words) == 0 and len(read_records(tmp_path)) == 40

# the ends that a command may come to

def started(*words, command='phew_compare', line=None, **kwargs):
    "A command, running."
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | kwargs
    if os.name == 'posix': pipes['preexec_fn'] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) # in the background too
    return subprocess.Popen([*(line or python(command)), *map(str, words)], **dict(env=here) | pipes)

def heard(process, signal, when):
    "What a command that gets a signal as soon as something holds says, and its code."
    while not when():
        assert process.poll() is None, process.communicate()
        time.sleep(.005)
    process.send_signal(signal)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err

slow = ['--methods', 'phew', '--densities', '.1', '--seeds', '300', '--bn', *fast] # one run after the other
marks = '''
import os, sys
def mark(): os.mkdir({0!r})
class Import:
    @staticmethod
    def find_spec(name, *_):
        if name == 'phew_nb.cli': mark()
class Word(str):
    def __str__(self): mark(); return self[:]
''' # (each within what the command answers for, so that no signal comes before)
stages = dict(importing='from phew_nb import __main__ as m; sys.meta_path.insert(0, Import); sys.exit(m.phew_compare())',
              reading='from phew_nb import cli; sys.argv[-1] = Word(sys.argv[-1]); sys.exit(cli.phew_compare())',
              running='from phew_nb import cli; sys.exit(cli.phew_compare())')

def signalled(tmp_path, stage, signal):
    "A long comparison that gets a signal at a stage of its life."
    mark, code = tmp_path/'mark', marks.format(str(tmp_path/'mark')) + stages[stage]
    process = started(*slow, '--quiet', '--out', tmp_path/'r', line=[sys.executable, '-W', 'ignore', '-c', code])
    return heard(process, signal, lambda: list(tmp_path.glob('r/records/*.json')) if stage == 'running' else mark.exists())

@pytest.mark.skipif(os.name != 'posix', reason='signals of POSIX')
@pytest.mark.parametrize('stage', stages)
def test_interrupted_anywhere(tmp_path, stage):
    "While it imports, while it prepares, while it runs: one line, and code 130."
    code, out, err = signalled(tmp_path, stage, signal.SIGINT)
    assert code == 130 and out == '' and err.strip().count('\n') == 0 and re.search('interrupted|stopped', err), (code, err)

@pytest.mark.skipif(os.name != 'posix', reason='signals of POSIX')
def test_terminated(tmp_path):
    code, out, err = signalled(tmp_path, 'running', signal.SIGTERM)
    assert code == 143 and out == '' and 'Traceback' not in err and err.strip().count('\n') == 0, (code, err)

@pytest.mark.skipif(os.name != 'posix', reason='pipes of POSIX')
@pytest.mark.parametrize('words', [pytest.param(['--list'], marks=pytest.mark.slow), ['--help']])
def test_a_closed_pipe(words):
    read, write = os.pipe()
    os.close(read)
    process = started(*words, stdout=write)
    os.close(write)
    assert process.communicate(timeout=300)[1] == '' and process.returncode == 141

@pytest.mark.skipif(not Path('/dev/full').exists(), reason='no full device')
def test_a_full_disk_is_said(tmp_path):
    with open('/dev/full', 'w') as full: process = started('--help', stdout=full)
    assert process.communicate(timeout=300)[1] == 'phew_compare: the output cannot be written (No space left on device)\n'
    assert process.returncode == 1

def test_the_table_survives_a_full_disk(tmp_path, capsys, monkeypatch):
    "Figures that cannot be written are a note, and code 1."
    from phew_nb import plots
    def full(*args): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(plots, 'save_figure', full)
    code = cli.phew_compare([*fast, '--methods', 'phew', '--density', '.1', '--seed', '1', '--out', str(tmp_path)])
    out, err = capsys.readouterr()
    assert code == 1 and 'phew' in out and 'No space left' in err and len(read_records(tmp_path)) == 1

def test_a_terminal_that_knows_ascii_alone(tmp_path):
    words = [*fast, '--methods', 'phew', '--density', '.1', '--seeds', 2, '--out', tmp_path]
    env = here | dict(PYTHONIOENCODING='ascii', LC_ALL='C', MPLBACKEND='nonsense')
    run = subprocess.run([*python('phew_compare'), *map(str, words)], capture_output=True, timeout=300, env=env)
    assert run.returncode == 0 and b' +/- ' in run.stdout and run.stdout.isascii() and run.stderr.isascii(), run.stderr[-300:]

def test_called_from_python_it_leaves_the_process_as_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('MPLBACKEND', 'nbagg')
    assert cli.main(['compare', *fast, '--methods', 'phew', '--density', '.1', '--seed', '1', '--out', str(tmp_path)]) == 0
    assert os.environ['MPLBACKEND'] == 'nbagg'

# phew_prune

def test_masks_alone(tmp_path, capsys):
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
    assert cli.phew_prune([*words[1:], str(tmp_path/'again.safetensors'), '--weights', str(init)]) == 0
    assert capsys.readouterr().out == run.stdout and Masks.load(tmp_path/'again.safetensors') == masks

@lines('''
--density 0 => a fraction of the weights in (0, 1]
--density -.5 => a fraction of the weights in (0, 1]
--density nan => a fraction of the weights in (0, 1]
--density 90% => 0.05 for 5%
--model vgg16 => did you mean 'vgg19'
--method magnitud => did you mean 'magnitude'
--method snip => name a data set with --data
--method lottery => trains the network
--method dense => prunes nothing, so there are no masks to write
--data cifar => Known: digits
--method snip --data digits --n-out 3 => leave out --input-size and --n-out
--seed -1 => must be 0 or more
--n-out 0 => must be 1 or more
--input-size 3,32 => takes images
--input-size 3,x,32 => not a whole number
--weights none.safetensors => there is no file of weights
--method '' => it is empty
--width 1e6 => does not fit into memory
--width 1e300 => does not fit into memory
--n-out 999999999999 => does not fit into memory
--methods phew,snip => unknown method 'phew,snip'
--quite => did you mean --quiet?
''')
def test_wrong_lines(tmp_path, capsys, words, message):
    line = ['--model', 'resnet20', '--density', '.1', '--out', tmp_path/'masks.safetensors', *words]
    assert message in refused(capsys, cli.phew_prune, *line)
    assert os.listdir(tmp_path) == []

def test_what_is_needed_is_asked_for(capsys):
    assert 'it needs --model, --densities, --out' in refused(capsys, cli.phew_prune)

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

def test_a_device_is_not_replaced(tmp_path, capsys):
    assert cli.phew_prune(['--model', 'mlp', '--density', '.1', '--out', os.devnull]) == 0
    assert not os.path.isfile(os.devnull) and 'weights kept' in capsys.readouterr().out

def test_files_of_another_kind_stay(tmp_path, capsys):
    words, code = ['--model', 'mlp', '--density', '.1'], tmp_path/'net.py'
    code.write_text('class Net: pass # and much more')
    for option in '--out', '--weights-out':
        assert 'holds no masks or weights' in refused(capsys, cli.phew_prune, *words, '--out', tmp_path/'m', option, code)
    assert 'holds no page' in refused(capsys, cli.phew_report, tmp_path, '--out', code)
    assert code.read_text() == 'class Net: pass # and much more'
    for seed in '01': assert cli.phew_prune([*words, '--seed', seed, '--out', str(tmp_path/'m')]) == 0 # masks give way to masks

def test_one_file_for_two_things(tmp_path, capsys):
    words = ['--model', 'mlp', '--density', '.1']
    assert cli.phew_prune([*words, '--out', str(tmp_path/'m'), '--weights-out', str(tmp_path/'w')]) == 0
    before = (tmp_path/'w').read_bytes(); capsys.readouterr()
    assert 'would be written over' in refused(capsys, cli.phew_prune, *words, '--weights', tmp_path/'w', '--out', tmp_path/'w')
    assert 'one and the same' in refused(capsys, cli.phew_prune, *words, '--out', tmp_path/'z', '--weights-out', tmp_path/'z')
    assert 'one and the same' in refused(capsys, cli.phew_prune, '--model', 'mlp', '--densities', '.1,.2', '--out', tmp_path/'z',
                                         '--weights-out', tmp_path/'z-0.1')
    assert 'it is empty' in refused(capsys, cli.phew_prune, *words, '--out', '')
    assert (tmp_path/'w').read_bytes() == before and sorted(os.listdir(tmp_path)) == ['m', 'w']

own = """
from torch import nn
class Net(nn.Module):
    def __init__(self, n_out=3):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, n_out)
    def forward(self, x): return self.head(self.body(x).relu().mean((2, 3)))
"""

def test_a_network_of_your_own(tmp_path, capsys):
    (tmp_path/'own.py').write_text(own)
    words = ['--model', f"{tmp_path/'own.py'}:Net", '--density', '.5', '--out', str(tmp_path/'m')]
    assert 'say how large an input' in refused(capsys, cli.phew_prune, *words)
    assert cli.phew_prune([*words, '--input-size', '3,9,9', '--n-out', '4', '--json']) == 0
    found = json.loads(capsys.readouterr().out)['masks'][0]
    masks = Masks.load(tmp_path/'m')
    assert {n: tuple(m.shape) for n,m in masks.items()} == {'body.weight': (8, 3, 3, 3), 'head.weight': (4, 8)}
    assert (found['kept'], found['hash']) == (masks.kept, masks.hash()[:12])
    assert 'did you mean' in refused(capsys, cli.phew_prune, *words, '--model', f"{tmp_path/'own.py'}:Nett", '--input-size', '3,9,9')

@pytest.mark.parametrize('method, model', [('phew', 'resnet20'), ('phew_kernel', 'resnet20'), ('phew_squared', 'resnet20'),
                                           ('magnitude', 'resnet20'), ('synflow', 'mlp')])
def test_several_densities_are_those_of_each(tmp_path, capsys, method, model):
    "From one order, as if each had been asked for alone; a smaller one inside a larger one where they are walks."
    words = ['--model', model, *(['--width', '.25'] if model == 'resnet20' else ['--hidden', '30,30']), '--method', method, '--seed', '5']
    assert cli.phew_prune([*words, '--densities', '.1,.3,.02', '--out', str(tmp_path/'m.safetensors')]) == 0
    masks = {d: Masks.load(tmp_path/f'm-{d}.safetensors') for d in (.02, .1, .3)}
    for d,found in masks.items():
        assert cli.phew_prune([*words, '--density', str(d), '--out', str(tmp_path/'one')]) == 0
        assert Masks.load(tmp_path/'one') == found
    if 'phew' in method: assert all(bool((masks[.1][n] <= masks[.3][n]).all()) for n in masks[.1])

def test_prune_dry_run(tmp_path, capsys):
    words = ['--model', 'mlp', '--density', '.1', '--out', str(tmp_path/'new'/'m'), '--dry-run']
    assert cli.phew_prune(words) == 0 and 'weights kept' in capsys.readouterr().out and os.listdir(tmp_path) == []

# phew_sweep

def test_a_method_of_your_own(tmp_path, capsys):
    "Named by its file, in every command."
    (tmp_path/'own.py').write_text("from phew_nb.pruners import prune\ndef small(model, density, input_size):\n"
                                   "    'My own.'\n    return prune(model, 'magnitude', density, input_size)\n")
    name, words = f"{tmp_path/'own.py'}:small", ['--density', '.1', '--quiet', '--json']
    assert cli.phew_compare(['--method', f'magnitude,{name}', '--seed', '1', *fast, *words, '--out', str(tmp_path/'r')]) == 0
    assert len({(r['kept'], r['accuracy']) for r in json.loads(capsys.readouterr().out)['results']}) == 1
    for method in name, 'magnitude':
        assert cli.phew_prune(['--model', 'mlp', '--method', method, *words, '--out', str(tmp_path/method[-5:])]) == 0
    assert len({json.loads(line)['masks'][0]['hash'] for line in capsys.readouterr().out.splitlines()}) == 1
    assert "did you mean 'small'?" in refused(capsys, cli.phew_compare, '--method', name[:-1], '--out', tmp_path/'q')

@pytest.mark.parametrize('words, package', [(['--track', 'wandb'], 'wandb'), (['--engine', 'ray'], 'ray')])
def test_a_package_that_is_missing(tmp_path, capsys, monkeypatch, words, package):
    from phew_nb import sweep
    monkeypatch.setattr(sweep, 'find_spec', lambda name: None)
    assert f'the package {package} is not installed: pip install' in refused(capsys, cli.phew_sweep, grid_file(tmp_path), '--out', tmp_path/'r', *words)
    assert os.listdir(tmp_path) == ['grid.toml']

def test_dry_run_says_what_varies(tmp_path, capsys):
    file = grid_file(tmp_path, 'rewire = ["as pruned", "shuffle"]\nhidden = [[20], [30, 30]]\nseeds = 4\nepochs = 1\n')
    assert cli.phew_sweep([file, '--dry-run', '--out', str(tmp_path/'r')]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ['  seed    0, 1, 2, 3 (4 each)', '  hidden  20, 30-30 (8 each)', '  rewire  as pruned, shuffle (8 each)']
    assert lines[3] == 'phew 0.1 seed 0, hidden 20, rewire as pruned' and lines[-1] == '0 of 16 runs are recorded, 16 to do'
    assert cli.phew_sweep([file, '--dry-run', '--json', '--out', str(tmp_path/'r')]) == 0
    assert {(tuple(r['hidden']), r['rewire']) for r in json.loads(capsys.readouterr().out)['runs']} == {
        ((20,), 'as pruned'), ((20,), 'shuffle'), ((30, 30), 'as pruned'), ((30, 30), 'shuffle')}

def grid_file(folder, text='method = ["dense", "phew"]\ndensity = [0.1]\nseeds = 2\nhidden = [20]\nepochs = 1\nper_class = 10\n'):
    (folder/'grid.toml').write_text(text)
    return str(folder/'grid.toml')

def test_a_sweep(tmp_path, capsys):
    words = [grid_file(tmp_path), '--out', str(tmp_path/'r'), '--quiet']
    assert cli.phew_sweep([*words, '--dry-run']) == 0 and not (tmp_path/'r').exists()
    assert '0 of 4 runs are recorded, 4 to do' in capsys.readouterr().out
    assert cli.phew_sweep([*words, '--shard', '1/2']) == 0 and len(read_records(tmp_path/'r')) == 2
    capsys.readouterr()
    assert cli.phew_sweep([*words, '--json']) == 0 and len(read_records(tmp_path/'r')) == 4
    assert [r['seeds'] for r in json.loads(capsys.readouterr().out)['results']] == [2, 2]

def test_a_sweep_over_two_networks_that_went_well_ends_with_0(tmp_path, capsys):
    "Their figures are drawn by phew_report."
    text = 'hidden = [[20], [30]]\nrecipe = [{ lr = 0.1, epochs = 1 }, { lr = 0.01, epochs = 1 }]\nper_class = 10\n'
    assert cli.phew_sweep([grid_file(tmp_path, text), '--out', str(tmp_path/'r'), '--workers', '0']) == 0
    said = capsys.readouterr()
    assert len(read_records(tmp_path/'r')) == 4 and said.out.count('mlp on digits') == 4
    assert 'several networks or data sets: phew_report draws' in said.err and not list((tmp_path/'r').glob('*.png'))

@lines('''
--engine slurm => unknown engine 'slurm'
--track tensorbord => did you mean 'tensorboard'
--gpus-per-run .5 => goes with --engine ray
--shard 3/2 => 3/2
--workers -1 => must be 0 or more
--device abacus => cannot use the device
''')
def test_wrong_sweeps(tmp_path, capsys, words, message):
    assert message in refused(capsys, cli.phew_sweep, grid_file(tmp_path), '--out', tmp_path/'r', *words)
    assert os.listdir(tmp_path) == ['grid.toml']

@pytest.mark.parametrize('text, message', [
    ('method = ["phew"]\ndensity = [2]\n', 'line 2: density must be in (0, 1]'), ('methd = ["phew"]\n', "line 1: unknown"),
    ('method = ["pheww"]\n', "did you mean 'phew'"), ('', 'is empty'), ('method = [\n', 'grid.toml')])
def test_wrong_grids(tmp_path, capsys, text, message):
    assert message in refused(capsys, cli.phew_sweep, grid_file(tmp_path, text), '--out', tmp_path/'r')
    assert os.listdir(tmp_path) == ['grid.toml']

# phew_report

def test_a_report(tmp_path, capsys):
    assert cli.phew_compare([*fast, '--methods', 'dense,phew', '--density', '.1', '--seed', '1', '--out', str(tmp_path)]) == 0
    capsys.readouterr()
    assert cli.phew_report([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f'{tmp_path/"report.html"}\n' and '<html' in (tmp_path/'report.html').read_text()
    assert cli.phew_report([str(tmp_path), '--json', '--out', str(tmp_path/'p.html')]) == 0
    assert json.loads(capsys.readouterr().out) == dict(written=str(tmp_path/'p.html'))

def test_reports_that_cannot_be(tmp_path, capsys):
    assert 'takes one folder' in refused(capsys, cli.phew_report)
    assert 'takes one folder' in refused(capsys, cli.phew_report, 'a', 'b')
    assert 'there are no results' in refused(capsys, cli.phew_report, tmp_path)
    assert 'unrecognized option --dir' in refused(capsys, cli.phew_report, '--dir', tmp_path)
