"Networks of other packages by their names."
import sys

import pytest, torch

from phew_nb import cli
from phew_nb.config import Config
from phew_nb.experiments import read_records, run, stream
from phew_nb.graph import trace
from phew_nb.libraries import maker_of, token_example
from phew_nb.masks import Masks
from phew_nb.models import make_model
from phew_nb.walks import phew

def test_a_network_of_timm_by_its_name(tmp_path):
    pytest.importorskip('timm')
    a, b = (make_model('timm:resnet10t', (1, 64, 64), 7, seed=3) for _ in range(2))
    assert a(torch.zeros(2, 1, 64, 64)).shape == (2, 7) and all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert phew(a, .1, (1, 64, 64)).density < .11
    with pytest.raises(ValueError, match="unknown network of timm 'resnet10x'"): make_model('timm:resnet10x', (3, 64, 64), 7)
    words = ['--model', 'timm:resnet10t', '--density', '.1', '--input-size', '1,64,64', '--n-out', '7']
    assert cli.phew_prune([*words, '--out', str(tmp_path/'m')]) == 0 and Masks.load(tmp_path/'m').keys() <= dict(a.named_parameters()).keys()

@pytest.mark.parametrize('name, package', [('timm:resnet18', 'timm'), ('hf:bert', 'transformers')])
def test_a_library_is_asked_for_where_it_is_missing(monkeypatch, name, package):
    maker_of.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f'pip install {package}'): make_model(name, (3, 64, 64), 7)

sizes = 'hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48'
text, image = f'hf:bert,{sizes},vocab_size=60', f'hf:vit,{sizes},patch_size=4'
few = '--hidden 20 --epochs 1 --per-class 10 --test-per-class 5'.split()

def refused(capsys, command, *words):
    with pytest.raises(SystemExit): command([*map(str, words)])
    return capsys.readouterr().err

def test_a_network_that_reads_tokens(tmp_path, capsys):
    "Masks of a kind of transformers, at the weights of the seed, by the names that its own class gives them."
    hf = pytest.importorskip('transformers')
    words = ['--model', text, '--densities', '.1,.3', '--seed', '4']
    assert cli.phew_prune([*words, '--out', str(tmp_path/'m.st'), '--weights-out', str(tmp_path/'w.st')]) == 0
    model = make_model(text, (8,), 10, seed=0)
    masks = [Masks.load(tmp_path/f'm-{d}.st') for d in (.1, .3)]
    cli.load_weights(model, tmp_path/'w.st')
    for d,found in zip((.1, .3), masks):
        assert found == phew(trace(model, example=token_example(text)), d, seed=stream(4, 'masks')) and round(d*found.total) <= found.kept
    assert set(masks[0]) <= set(dict(hf.BertForMaskedLM(model.config).named_parameters()))
    capsys.readouterr()
    for more, said in ((['--data', 'digits'], 'leave out --data'), (['--input-size', '3,8,8'], '--input-size 16'), (['--method', 'snip'], 'looks at data')):
        assert said in refused(capsys, cli.phew_prune, *words, '--out', tmp_path/'n.st', *more)
    assert 'reads tokens, and digits holds numbers' in refused(capsys, cli.phew_compare, '--model', text, '--out', tmp_path/'r')
    assert not (tmp_path/'n.st').exists() and not (tmp_path/'r').exists()

def test_a_network_of_transformers_is_compared(tmp_path):
    "In a comparison and in a run, with the digits as images; alike from the same seed."
    pytest.importorskip('transformers')
    words = ['--model', image, '--methods', 'phew,snip', '--density', '.3', '--seed', '1', *few, '--out', str(tmp_path)]
    assert cli.phew_compare(words) == 0
    again = run(Config(model=image, method='phew', density=.3, epochs=1, per_class=10, test_per_class=5))
    first = next(r for r in read_records(tmp_path) if r['method'] == 'phew')
    assert all(first[k] == again[k] for k in ('run', 'masks', 'loss')) and again['kept'] >= round(.3*again['total'])
