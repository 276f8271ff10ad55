"What leaves computes the same."
import warnings
from copy import deepcopy

import pytest, torch, torchvision
from torch import nn
from torch.torch_version import TorchVersion

from phew_nb.export import compact, dense_state, export_onnx, sparse_state
from phew_nb.graph import trace
from phew_nb.masks import Masks
from phew_nb.models import mlp, resnet20
from phew_nb.pruners import prune
from phew_nb.walks import phew

try: import onnx, onnxscript # noqa: F401
except ImportError: onnx = None

def as_trained(model, seed=0):
    "Biases, shifts and statistics as training leaves them."
    gen = torch.Generator().manual_seed(seed)
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            for t in (m.weight, m.bias, m.running_mean): t.data += .3*torch.randn(t.shape, generator=gen)
        elif getattr(m, 'bias', None) is not None: m.bias.data += .3*torch.randn(m.bias.shape, generator=gen)
    return model.eval()

def bottleneck(model, share=.5, density=.5, seed=0):
    "Random masks that leave rows and columns empty."
    gen = torch.Generator().manual_seed(seed)
    def mask(p):
        rows, columns = (torch.rand(n, generator=gen) < share**.5 for n in p.shape[:2])
        tail = [1]*(p.ndim - 2)
        keep = rows.view(-1, 1, *tail) & (columns.view(1, -1, *tail) if p.shape[1] > 3 else True)
        return keep & (torch.rand(p.shape, generator=gen) < density)
    return Masks({name: mask(p) for name, p in model.named_parameters() if p.ndim > 1})

def n_weights(model): return sum(p.numel() for p in model.parameters() if p.ndim > 1)

class Gate(nn.Module):
    "A block with a gate on its channels, then a concatenation."
    def __init__(self):
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)
        self.other = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.last = nn.Sequential(nn.BatchNorm2d(12), nn.PReLU(12), nn.Conv2d(12, 5, 3, padding='same'), nn.ReLU(),
                                  nn.Flatten(), nn.Linear(320, 3))
    def forward(self, x):
        y = self.conv(x).relu()
        y = y*self.gate(y.mean((2, 3))).sigmoid()[:, :, None, None]
        return self.last(torch.cat([y, self.other(x)], 1))

def reflecting():
    conv = lambda n_in: nn.Conv2d(n_in, 8, 3, padding=1, padding_mode='reflect')
    return nn.Sequential(conv(3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), conv(8), nn.GELU(),
                         nn.Conv2d(8, 4, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 2))

networks = {
    'mlp': (lambda: mlp([20, 30, 30, 5], bn=True), (20,)),
    'mlp without bias': (lambda: mlp([20, 30, 30, 5], bias=False), (20,)),
    'resnet20': (lambda: resnet20(10), (3, 16, 16)),
    'resnet20 pad': (lambda: resnet20(10, shortcut='pad'), (3, 16, 16)),
    'gate': (Gate, (3, 8, 8)),
    'reflecting': (reflecting, (3, 16, 16)),
    'resnet50': (lambda: torchvision.models.resnet50(num_classes=10), (3, 64, 64)),
    'mobilenet_v2': (lambda: torchvision.models.mobilenet_v2(num_classes=10), (3, 64, 64)),
    'densenet': (lambda: torchvision.models.DenseNet(8, (2, 2), 16, num_classes=10), (3, 64, 64)),
}

@pytest.mark.parametrize('name', networks)
@pytest.mark.parametrize('share', [.8, .3])
def test_compact_computes_the_same(name, share):
    make, size = networks[name]
    torch.manual_seed(0)
    model = as_trained(make())
    masks = bottleneck(model, share)
    before = deepcopy(model.state_dict())
    small = compact(model, masks, size)
    assert n_weights(small) < n_weights(model) or (name, share) == ('gate', .8)
    for key, value in model.state_dict().items(): assert torch.equal(value, before[key])
    masks.apply(model)
    x = torch.randn(3, *size)
    with torch.no_grad(): a, b = small(x), model(x)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4*float(b.abs().max()))

def test_compact_can_be_trained_on():
    model = as_trained(resnet20(10, seed=0)).train()
    small = compact(model, bottleneck(model), (3, 16, 16))
    assert small.training
    masks = Masks.of(small).keep(small)
    opt = torch.optim.SGD(small.parameters(), .1, momentum=.9)
    for _ in range(2):
        nn.functional.cross_entropy(small(torch.randn(4, 3, 16, 16)), torch.arange(4)).backward()
        opt.step(); opt.zero_grad()
    for name, mask in masks.items(): assert (small.get_parameter(name)[~mask] == 0).all()

def test_what_cannot_be_cut_stays_or_is_refused():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(4, 2)
        def forward(self, x): return self.b(self.a(x).view(-1, 2, 4).sum(1))
    model = Split()
    rows = torch.arange(8).view(8, 1).expand(8, 6)
    masks = Masks({'a.weight': rows % 4 > 0, 'b.weight': torch.ones(2, 4, dtype=torch.bool)})
    with pytest.raises(ValueError, match='cannot be made compact'): compact(model, masks, (6,))
    normed = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    masks = Masks({'0.weight': rows > 3, '2.weight': torch.ones(2, 8, dtype=torch.bool)})
    assert n_weights(compact(normed, masks, (6,))) == n_weights(normed)
    with pytest.raises(ValueError, match='needs masks'): compact(normed, input_size=(6,))
    with pytest.raises(ValueError, match='another model'): compact(model, masks, (6,))

def test_a_frozen_network_leaves_like_any_other(tmp_path):
    for before in True, False:
        model = as_trained(mlp([20, 30, 30, 5], seed=0))
        masks = bottleneck(model)
        if before: model.requires_grad_(False)
        masks.keep(model)
        model.requires_grad_(False)
        state = torch.random.get_rng_state()
        small = compact(model, input_size=(20,))
        assert not any(p.requires_grad for p in small.parameters())
        x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(small(x), model(x))
        again = mlp([20, 30, 30, 5], seed=1)
        again.load_state_dict(dense_state(sparse_state(model, packed=True)))
        torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
        if before and onnx: export_onnx(model, tmp_path/'net.onnx', (20,))
        assert torch.equal(state, torch.random.get_rng_state()) and Masks.of(model) == masks

def test_sparse_state(tmp_path):
    model = resnet20(10, seed=0)
    bottleneck(model).keep(model)
    torch.save(sparse_state(model), tmp_path/'state.pt')
    again = resnet20(10, seed=1)
    again.load_state_dict(dense_state(torch.load(tmp_path/'state.pt', weights_only=True)))
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values()): assert torch.equal(a, b), name

@pytest.mark.parametrize('sparse', [False, True])
def test_onnx(tmp_path, sparse):
    onnxruntime = pytest.importorskip('onnxruntime')
    script = TorchVersion(pytest.importorskip('onnxscript').__version__)
    if torch.__version__ < (2, 7) and script >= (0, 3): pytest.skip('the exporter of PyTorch 2.6 needs onnxscript<0.3 and protobuf<6')
    model = as_trained(resnet20(10, seed=0)).train()
    bottleneck(model, .3, .3).keep(model)
    path = export_onnx(model, tmp_path/'net.onnx', (3, 32, 32), sparse=sparse)
    assert model.training and Masks.of(model) is not None
    session = onnxruntime.InferenceSession(path.read_bytes())
    for n in 1, 4:
        x = torch.randn(n, 3, 32, 32)
        with torch.no_grad(): y = model.eval()(x)
        torch.testing.assert_close(torch.tensor(session.run(None, {'input': x.numpy()})[0]), y, rtol=1e-3, atol=1e-4)
        model.train()
    assert path.stat().st_size < (500_000 if sparse else 1_300_000)

class Tokens(nn.Module):
    "Reads token numbers."
    def __init__(self):
        super().__init__()
        self.emb, self.first, self.second, self.head = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
    def forward(self, ids): return self.head(self.second(self.first(self.emb(ids)).relu()).relu().mean(1))

def tokens(n=2): return torch.randint(50, (n, 7))

class Keywords(nn.Module):
    "Calls its layers by keyword."
    def __init__(self): super().__init__(); self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)
    def forward(self, x): return self.second(input=self.first(input=x).relu())

def test_what_is_not_cut_keeps_its_masks():
    for model, inputs in (Keywords(), (6,)), (Tokens(), None):
        graph = trace(model, inputs, example=None if inputs else tokens())
        masks = prune(model, 'synflow', .2, graph, seed=0).keep(model)
        small = compact(model, input_size=graph)
        left = Masks.of(small)
        assert left.keys() == masks.keys()
        for name, mask in left.items():
            assert mask.shape == small.get_parameter(name).shape and (small.get_parameter(name)[~mask] == 0).all()
            if mask.shape == masks[name].shape: assert (mask | ~masks[name]).all()

def pruned_bert(density):
    "A tiny BERT with random weights, an example, and synflow's masks."
    transformers = pytest.importorskip('transformers')
    config = transformers.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=64, max_position_embeddings=16)
    model = transformers.BertForSequenceClassification(config).eval()
    example = dict(input_ids=tokens(), attention_mask=torch.ones(2, 7, dtype=torch.long))
    graph = trace(model, example=example)
    prune(model, 'synflow', density, graph, seed=0).keep(model)
    return model, example, graph

def test_a_network_of_tokens_is_made_compact():
    model = as_trained(Tokens())
    graph = trace(model, example=tokens())
    prune(model, 'synflow', .05, graph, seed=0).keep(model)
    for kwargs in dict(input_size=graph), dict(example=tokens()), dict(example={'ids': tokens(1)}), dict(example=(tokens(3),)):
        small, x = compact(model, **kwargs), tokens(20)
        assert n_weights(small) < n_weights(model)
        torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match='give token numbers|give an `example`'): compact(model, input_size=(8,))
    with pytest.raises(ValueError, match='compact needs the input_size'): compact(model, input_size=model)

@pytest.mark.filterwarnings('ignore:the masks cut the network')
@pytest.mark.parametrize('density', [.02, .3])
def test_a_bert_is_made_compact(density):
    model, example, graph = pruned_bert(density)
    for kwargs in dict(input_size=graph), dict(example=example):
        small, x = compact(model, **kwargs), dict(input_ids=tokens(20))
        assert n_weights(small) < n_weights(model)
        torch.testing.assert_close(small(**x).logits, model(**x).logits, rtol=1e-4, atol=1e-6)

def onnx_agrees(path, model, inputs, pick=lambda y: y):
    "Does ONNX compute the same, whatever the batch size?"
    session = pytest.importorskip('onnxruntime').InferenceSession(path.read_bytes())
    assert {i.name for i in session.get_inputs()} == inputs.keys() and all(i.shape[0] == 'batch' for i in session.get_inputs())
    for n in 1, 5:
        x = {name: torch.cat([t]*n)[:n].flip(0) for name, t in inputs.items()}
        with torch.no_grad(): y = pick(model(*x.values()))
        got = session.run(None, {name: t.numpy() for name, t in x.items()})
        torch.testing.assert_close(torch.tensor(got[0]), y, rtol=1e-3, atol=1e-5)

@pytest.mark.skipif(onnx is None or torch.__version__ < (2, 7), reason='needs onnx and PyTorch 2.7')
def test_a_network_of_tokens_leaves_as_onnx(tmp_path):
    model = as_trained(Tokens())
    for size, example, name in (trace(model, example=tokens()), None, 'input'), (None, tokens(1), 'input'), (None, {'ids': tokens(1)}, 'ids'):
        onnx_agrees(export_onnx(model, tmp_path/'net.onnx', size, example=example), model, {name: tokens()})

@pytest.mark.filterwarnings('ignore:the masks cut the network')
@pytest.mark.skipif(onnx is None or torch.__version__ < (2, 7), reason='needs onnx and PyTorch 2.7')
def test_a_bert_leaves_as_onnx(tmp_path):
    model, example, graph = pruned_bert(.3)
    onnx_agrees(export_onnx(model, tmp_path/'net.onnx', graph), model, example, lambda y: y.logits)

@pytest.mark.skipif(onnx is None, reason='needs onnx')
def test_what_onnx_cannot_hold_is_refused_in_a_sentence(tmp_path):
    class Fork(nn.Module):
        def __init__(self): super().__init__(); self.linear = nn.Linear(4, 4)
        def forward(self, x): return self.linear(x) if float(x.sum()) > 0 else x
    with pytest.raises(RuntimeError, match='cannot write this network as ONNX') as e: export_onnx(Fork(), tmp_path/'net.onnx', (4,))
    assert e.value.__cause__ is not None and '\n' not in str(e.value)
    with pytest.raises(ValueError, match='does not run .* give an `example`'): export_onnx(Tokens(), tmp_path/'net.onnx', (8,))
    assert not list(tmp_path.iterdir())

@pytest.mark.parametrize('packed', [False, True])
def test_a_tied_weight_is_sparse_under_each_name(packed):
    made = lambda: [net := nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), setattr(net[2], 'weight', net[0].weight)][0]
    net, again, masks = made(), made(), Masks({'0.weight': torch.arange(36).view(6, 6) % 3 == 0})
    state = sparse_state(net, masks, packed=packed)
    assert state['0.weight'].layout == state['2.weight'].layout and state['2.weight.kept' if packed else '2.weight'].numel() < 37
    again.load_state_dict(dense_state(state))
    assert torch.equal(again[0].weight, net[0].weight*masks['0.weight'])

def test_a_sparse_buffer_leaves_as_it_is():
    net = nn.Sequential(nn.Linear(6, 6))
    net.register_buffer('mix', torch.eye(6).to_sparse())
    state = sparse_state(net, Masks({'0.weight': torch.eye(6) > 0}))
    assert state['mix'] is net.mix or torch.equal(state['mix'].to_dense(), torch.eye(6))

def test_a_damaged_state_is_refused():
    net = nn.Sequential(nn.Linear(6, 6))
    state = sparse_state(net, Masks({'0.weight': torch.arange(36).view(6, 6) % 3 == 0}), packed=True)
    without = lambda name: {k: v for k, v in state.items() if k != name}
    for damaged in (without('0.weight.kept'), without('0.weight.shape'), state | {'0.weight.kept': state['0.weight.kept'][:2]},
                    state | {'0.weight': state['0.weight'][:3]}):
        with pytest.raises(ValueError, match="the state is damaged: .*'0.weight'"): dense_state(damaged)
    assert dense_state({'_extra_state': dict(a=1)}) == {'_extra_state': dict(a=1)}

def test_a_dead_channel_that_nobody_reads_needs_no_carrier():
    "A convolution with padding and a bias before it: what is constant and read by nothing is cut, and divides nothing."
    net = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
    nn.init.constant_(net[0].bias, .5)
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in net.named_parameters() if p.ndim > 1}
    masks['0.weight'][1] = False; masks['2.weight'][:, 1] = False
    assert compact(net, Masks(masks), (3, 8, 8))[0].out_channels == 1

@pytest.mark.parametrize('method', ['synflow', 'phew', 'magnitude', 'random'])
def test_small_networks_with_biases_and_padding_are_made_compact(method):
    for seed in range(4):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 10, 3, padding=1), nn.ReLU(),
                            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 10))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            for density in .03, .1: compact(net, prune(net, method, density, (3, 16, 16), seed=seed), (3, 16, 16)) # compares outputs

class Symmetric(nn.Module):
    def forward(self, w): return w.triu() + w.triu(1).t()

@pytest.mark.parametrize('how', ['weight_norm', 'spectral_norm', 'symmetric'])
def test_compact_goes_around_layers_that_compute_their_weights(how):
    "Units that they read or make stay; dead units elsewhere go."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    if how == 'symmetric': nn.utils.parametrize.register_parametrization(model[4], 'weight', Symmetric())
    else: getattr(nn.utils.parametrizations, how)(model[4])
    masks = phew(model.eval(), .4, (6,))
    masks['2.weight'][:, 5:] = False
    masks.apply(model)
    small = compact(model, masks, (6,))
    assert [layer.out_features for layer in small[::2]] == [5, 8, 8, 2]
    assert torch.allclose(small(x := torch.randn(9, 6)), model(x), atol=1e-6)

def branchy(groups): # a grouped convolution between others
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=groups), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(),
                         nn.Conv2d(6, 2, 1))

class Squeezed(nn.Module):
    "A number for each example, made from the numbers of their classes."
    def __init__(self): super().__init__(); self.table, self.hidden, self.last = nn.Embedding(5, 6), nn.Linear(6, 12), nn.Linear(12, 1)
    def forward(self, i): return self.last(self.hidden(self.table(i)).relu()).squeeze(-1)

class Sampled(nn.Module):
    "Draws in the middle, as a variational autoencoder does."
    def __init__(self): super().__init__(); self.hidden, self.mean, self.last = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(3, 2)
    def forward(self, x): return self.last((z := self.mean(self.hidden(x).relu())) + torch.randn_like(z))

@pytest.mark.parametrize('make, name, example', [(lambda: branchy(4), '4.weight', torch.linspace(-1, 1, 216).view(2, 3, 6, 6)),
    (Squeezed, 'hidden.weight', torch.tensor([1, 2, 4])), (Sampled, 'hidden.weight', torch.linspace(-1, 1, 20).view(5, 4))])
def test_grouped_layers_single_numbers_and_draws_keep_no_network_from_being_made_compact(make, name, example):
    torch.manual_seed(0)
    model = as_trained(make())
    masks = Masks.dense({name: p for name, p in model.named_parameters() if p.ndim > 1})
    masks[name][1::2] = False # every other of its units is dead
    small = compact(model, masks, example=example)
    assert small.get_parameter(name).shape[0] == model.get_parameter(name).shape[0]//2
    masks.apply(model)
    outs = []
    for net in model, small: torch.manual_seed(1); outs.append(net(example))
    assert torch.allclose(*outs, atol=1e-6)

@pytest.mark.parametrize('times', [1, 2]) # channels made of each by the second depthwise convolution
def test_depthwise_layers_of_which_one_channel_stays_are_made_compact(times):
    torch.manual_seed(0)
    model = as_trained(nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.ReLU(),
                                     nn.Conv2d(6, 6*times, 3, groups=6), nn.ReLU(), nn.Conv2d(6*times, 4, 1)))
    masks = Masks.dense({name: p for name, p in model.named_parameters() if p.ndim > 1})
    for name in '0.weight', '1.weight', '3.weight': masks[name][:] = False
    masks['0.weight'][2] = masks['1.weight'][2] = masks['3.weight'][2*times:3*times] = True
    masks['5.weight'][:, :2*times] = masks['5.weight'][:, 3*times:] = False
    small = compact(model, masks, (3, 6, 6))
    masks.apply(model)
    assert [len(small[i].weight) for i in (0, 1, 3)] == [1, 1, times]
    assert torch.allclose(small(x := torch.randn(5, 3, 6, 6)), model(x), atol=1e-6)

class Shared(nn.Module):
    "Two layers of one weight, behind one that can be cut."
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.third.weight
    def forward(self, x): return self.last(self.third(self.second(self.first(x).relu()).relu()).relu())

def test_a_weight_of_two_layers_stays_one_and_masked():
    torch.manual_seed(0)
    model = Shared()
    masks = Masks.dense({name: p for name, p in model.named_parameters() if p.ndim > 1})
    masks['first.weight'][:3] = False
    masks['third.weight'][:2] = False # two rows, that `second` could lose behind one layer, and not behind the other
    masks.keep(model)
    small = compact(model, example=torch.randn(3, 4))
    assert small.last.weight is small.third.weight and small.first.out_features == 5
    opt = torch.optim.SGD(small.parameters(), .1)
    small(torch.randn(3, 4)).square().sum().backward()
    opt.step()
    assert (small.last.weight[:2] == 0).all() and (small.last.weight[2:] != 0).any()
