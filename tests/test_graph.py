"The path graph against autograd, against brute force, and on networks that are awkward."
import copy, itertools, math, pickle, random, subprocess, sys, warnings
from collections import defaultdict
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest, torch, torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.nn.utils import parametrizations

from awkward import C, Branch, Fn, P, Program, kinds, models, seq
from truth import Behind, compare, layer_ids
from phew_nb.flow import path_flow
from phew_nb.grow import on_paths
from phew_nb.graph import Layer, PathGraph, TraceError, _plain, _run, as_graph, named_tensors, trace
from phew_nb.linearised import linearised
from phew_nb.tracer import Tracer
from phew_nb.masks import Masks
from phew_nb.metrics import count_paths, path_sum, path_trace
from phew_nb.pruners import prune
from phew_nb.rewire import widen
from phew_nb.synflow import synflow, synflow_l2
from phew_nb.walks import phew

root = Path(__file__).resolve().parent.parent

@pytest.fixture(autouse=True)
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

# Every column of every layer reads what autograd says

@pytest.mark.parametrize('name', models)
def test_sources_are_those_of_autograd(name):
    make, *sizes = models[name]
    torch.manual_seed(0)
    graph, n = compare(make(), *sizes)
    assert n > 2

steps = st.lists(st.tuples(st.sampled_from(kinds), st.integers(-1, 5), st.integers(0, 5), st.integers(0, 11)), min_size=1, max_size=6)
programs = st.builds(lambda *args: args, st.integers(1, 4), steps, st.integers(0, 5))

def build(program):
    torch.manual_seed(0)
    return Program(*program)

@settings(max_examples=80, deadline=None, derandomize=True)
@given(programs)
def test_random_networks(program):
    try: graph, n = compare(build(program), (program[0], 4, 4))
    except TraceError as e: assert 'no prunable weights between' in str(e) # a head that reads constants only
    else: check_skips(graph)

def closure(graph):
    "(units, units) boolean: which unit (column) is an ancestor of which (row), link by link."
    behind = torch.zeros(graph.n_units, graph.n_units, dtype=torch.bool)
    def add(unit, parents):
        for p in parents: behind[unit] |= behind[p]; behind[unit, p] = True
    for node in graph.nodes:
        if isinstance(node, Layer):
            for g, o in itertools.product(*map(range, node.dst.shape)): add(node.dst[g, o], [p for p in node.src[g] if p >= 0])
        else:
            for r, c in zip(node.row.tolist(), node.child.tolist()): add(node.dst[r], [c])
    return behind

def check_skips(graph):
    "A link is a skip where its child is an ancestor of another child of the same sum."
    behind = closure(graph)
    for j in graph.junctions:
        if j.kind != 'add' or j.stat: assert not j.skip.any()
        else:
            for r in range(len(j.dst)):
                children = j.child[j.row == r]
                assert torch.equal(j.skip[j.row == r], behind[children][:, children].any(0))
                assert not j.skip[j.row == r].all()

with_skips = 'option a', 'transformer, token', 'mixer', 'stochastic depth'

@pytest.mark.parametrize('name', [*with_skips, 'u-net', 'unrolled', 'many inputs'])
def test_skips_of_known_networks(name):
    make, *sizes = models[name]
    graph = trace(make(), sizes[0] if len(sizes) == 1 else sizes)
    if name != 'transformer, token': check_skips(graph) # (its tokens are absorbed by others)
    assert any(bool(j.skip.any()) for j in graph.junctions) == (name in with_skips)

@pytest.mark.parametrize('name', ['option a', 'transformer, token', 'mixer', 'stochastic depth', 'running sums', 'constants', 'many inputs'])
def test_ancestors_forward_and_back(name):
    make, *sizes = models[name]
    graph = trace(model := make(), sizes[0] if len(sizes) == 1 else sizes)
    with _plain(model): _run(tracer := Tracer(model), graph.example, 1)
    units = tracer.units
    behind = closure(PathGraph(units.nodes, units.n, graph.inputs, graph.outputs, {}, {}))
    made = torch.arange(units.n)[units.made_by(torch.arange(units.n)) > 0]
    assert len(made) == sum(n.dst.numel() for n in units.nodes)
    old, young = (t.flatten() for t in torch.meshgrid(torch.arange(units.n), made, indexing='ij'))
    expected = behind[young, old] | behind[young, units.absorber(old)]
    before = old < young
    for found in (units.is_ancestor, units.is_behind): assert torch.equal(found(old[before], young[before]), expected[before])
    before &= units.absorber(old) != young
    assert torch.equal(units.is_ahead(old[before], young[before]), expected[before])
    assert expected.any() and not expected.all()

small = dict(resnet18=(), mobilenet_v3_small=(), shufflenet_v2_x0_5=(), squeezenet1_1=())

@pytest.mark.parametrize('name', small)
def test_torchvision(name):
    torchvision = pytest.importorskip('torchvision')
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=10)
    for m in model.modules(): # running statistics of a fresh network are those of nothing: keep signals alive
        if isinstance(m, nn.BatchNorm2d): m.running_var.fill_(.1)
    graph, n = compare(model, (3, 48, 48), most=2)
    assert n >= len(graph.layers)

@pytest.mark.parametrize('name', ['lraspp_mobilenet_v3_large', 'deeplabv3_mobilenet_v3_large'])
def test_torchvision_segmentation(name):
    torchvision = pytest.importorskip('torchvision')
    torch.manual_seed(0)
    kwargs = dict(aux_loss=True) if name.startswith('deeplab') else {}
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=3, **kwargs)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d): m.running_var.fill_(.1)
    graph, n = compare(model, (3, 32, 32), most=2)
    assert n >= len(graph.layers) and not graph.left_out and len(graph.outputs) == (6 if kwargs else 3)

# Paths, by brute force

def paths(graph, masks=None, skips=False):
    "All units on a complete path, found by walking every edge and link."
    into = defaultdict(set)
    for node in graph.nodes:
        if isinstance(node, Layer):
            keep = node.pick(masks[node.name]).any(-1) if masks and node.name in masks else torch.ones(node.size[:3]).bool()
            for g, o, i in keep.nonzero().tolist():
                if node.src[g, i] >= 0: into[int(node.dst[g, o])].add(int(node.src[g, i]))
        else:
            for r, c, s in zip(node.row.tolist(), node.child.tolist(), node.skip.tolist()):
                if skips or not s: into[int(node.dst[r])].add(c)
    def spread(start, step):
        seen, todo = set(), list(start)
        while todo:
            u = todo.pop()
            if u not in seen: seen.add(u); todo += step[u]
        return seen
    out = defaultdict(set)
    for u, parents in into.items():
        for p in parents: out[p].add(u)
    return spread(graph.outputs.tolist(), into) & spread(graph.inputs.tolist(), out)

@settings(max_examples=25, deadline=None, derandomize=True)
@given(programs, st.floats(.05, .8), st.booleans())
def test_live_units(program, density, skips):
    try: graph = trace(build(program), (program[0], 4, 4))
    except TraceError: return
    gen = torch.Generator().manual_seed(0)
    masks = {name: torch.rand(p.shape, generator=gen) < density for name, p in graph.params.items()}
    assert set(graph.live(skips=skips).nonzero().flatten().tolist()) == paths(graph, skips=skips)
    assert set(graph.live(masks, skips=skips).nonzero().flatten().tolist()) == paths(graph, masks, skips)

# Weights, and where they lie in their parameter

def check_places(graph):
    for layer in graph.layers:
        grid = torch.meshgrid(*map(torch.arange, layer.size), indexing='ij')
        p = layer.param.detach()
        memory = p.as_strided((p.numel(),), (1,))
        numbers = torch.empty_strided(p.shape, p.stride(), dtype=torch.long)
        numbers.as_strided((p.numel(),), (1,)).copy_(torch.arange(p.numel()))
        at = torch.as_tensor(layer.index(*grid)).expand(layer.size)
        assert torch.equal(layer.pick(numbers), at) and torch.equal(layer.pick(numbers.contiguous()), at)
        if layer.stride is not None: assert torch.equal(memory[at], layer.weight())
        assert layer.weight().shape == layer.size and len(layer.src) == len(layer.dst) == layer.size[0]
        assert layer.src.shape[1] == layer.size[2] and layer.dst.shape[1] == layer.size[1]
        assert int(layer.src.max()) < int(layer.dst.min())

@pytest.mark.parametrize('name', models)
@pytest.mark.parametrize('form', ['contiguous', 'channels_last', 'half', 'bfloat16'])
def test_every_form_of_a_model(name, form):
    make, *sizes = models[name]
    torch.manual_seed(0)
    model = make()
    plain = trace(model, sizes[0] if len(sizes) == 1 else sizes)
    check_places(plain)
    if form == 'contiguous': return
    torch.manual_seed(0)
    other = make()
    if form == 'channels_last':
        if not any(p.ndim == 4 for p in model.parameters()): return
        other = other.to(memory_format=torch.channels_last)
    elif name == 'sparse matrix': return # (there is no product of sparse matrices in half precision)
    else: other = other.to(getattr(torch, form))
    graph = trace(other, sizes[0] if len(sizes) == 1 else sizes)
    check_places(graph)
    assert same(graph, plain)

def same(a, b):
    "Whether two graphs are equal up to the values and the memory of the weights."
    if len(a.nodes) != len(b.nodes) or a.n_units != b.n_units or a.left_out != b.left_out: return False
    for x, y in zip(a.nodes, b.nodes):
        if type(x) is not type(y) or not torch.equal(x.dst, y.dst): return False
        if isinstance(x, Layer):
            if x.name != y.name or x.size != y.size or not torch.equal(x.src, y.src) or x.positions != y.positions: return False
            ids = [layer_ids(l) for l in (x, y)]
            if not is_permutation(*ids): return False
        elif not all(torch.equal(getattr(x, f), getattr(y, f)) for f in ('row', 'child', 'skip')) or x.kind != y.kind: return False
    return torch.equal(a.outputs, b.outputs)

def is_permutation(a, b):
    "The positions in a kernel may come in another order."
    return torch.equal(a.sort(-1)[0], b.sort(-1)[0])

@pytest.mark.parametrize('wrap', [parametrizations.weight_norm, parametrizations.spectral_norm, torch.nn.utils.weight_norm,
                                  torch.nn.utils.spectral_norm])
@pytest.mark.parametrize('layer', [nn.Linear(4, 3), nn.Linear(1, 3), C(2, 4, groups=2), nn.Conv2d(2, 2, 1)])
@pytest.mark.filterwarnings('ignore')
def test_computed_weights(wrap, layer):
    model = wrap(copy.deepcopy(layer)).eval()
    linear = isinstance(layer, nn.Linear)
    graph = trace(model, (layer.in_features,) if linear else (2, 4, 4))
    found, = graph.layers
    x = torch.randn(1, layer.in_features) if linear else torch.randn(1, 2, 4, 4)
    model(x)
    weight = model.weight.detach()
    torch.testing.assert_close(found.weight().flatten(), weight.flatten(), rtol=1e-4, atol=1e-6)
    assert found.param.shape == weight.shape and len(graph.params) == 1 and not graph.left_out

def test_masked_models():
    make = lambda: seq(C(1, 4), nn.ReLU(), C(4, 4), nn.Flatten(), nn.Linear(64, 2))
    torch.manual_seed(0)
    model = make()
    plain = trace(model, (1, 4, 4))
    masks = Masks({n: torch.rand(p.shape) < .5 for n, p in plain.params.items()})
    for hold in ('apply', 'keep'):
        other = copy.deepcopy(model)
        getattr(masks, hold)(other)
        graph = trace(other, (1, 4, 4))
        assert same(graph, plain) and list(graph.params) == list(masks)
        for layer in graph.layers: assert (layer.weight()[~layer.pick(masks[layer.name])] == 0).all()

@pytest.mark.filterwarnings('ignore')
def test_wrappers_keep_plain_names():
    model = seq(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    plain = trace(model, (3,))
    for wrapped in (nn.DataParallel(model), torch.compile(model), nn.DataParallel(torch.compile(model)), torch.jit.script(model)):
        assert same(trace(wrapped, (3,)), plain)
    assert list(trace(seq(torch.compile(model[0]), model[2]), (3,)).params) == ['0._orig_mod.weight', '1.weight']

# What a trace leaves as it was

class Busy(nn.Module):
    "Changes whatever it can in its forward pass, and fails if told to."
    def __init__(self, fail):
        super().__init__()
        self.a, self.norm, self.out, self.r, self.fail = C(1, 2), nn.BatchNorm2d(2), nn.Linear(2, 2), nn.RNN(2, 2), fail
        self.register_buffer('count', torch.zeros(()))
        self.register_buffer('last', torch.zeros(2))
        self.register_buffer('none', None)
        self.cache = None
    def forward(self, x):
        x.mul_(2)
        self.count += 1
        self.last = self.last + random.random() + float(np.random.rand())
        self.norm.train()
        y = self.norm(self.a(x)) + torch.rand(1)
        self.cache, self.extra = y, torch.randn(2)
        if self.fail: raise RuntimeError('as told')
        return self.r(self.out(y.mean((2, 3))))[0]

@pytest.mark.parametrize('fail', [False, True])
def test_nothing_is_changed(fail):
    torch.manual_seed(0)
    model, x = Busy(fail), torch.randn(2, 1, 4, 4)
    model.norm.eval()
    model.a.weight.requires_grad_(False)
    model.out.weight.grad = torch.ones(2, 2)
    state, kept = copy.deepcopy(model.state_dict()), x.clone()
    buffers, modes = dict(model.named_buffers()), [m.training for m in model.modules()]
    state_of = lambda: (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.backends.mha.get_fastpath_enabled(),
                        F.scaled_dot_product_attention, torch.backends.mkldnn.enabled)
    before = state_of()
    if fail:
        with pytest.raises(TraceError, match='does not run.*as told'): trace(model, example=x)
    else: trace(model, example=x)
    after = state_of()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items()) and torch.equal(x, kept)
    assert all(b is buffers[k] for k, b in model.named_buffers()) and modes == [m.training for m in model.modules()]
    assert model.cache is None and not hasattr(model, 'extra') and model.out.weight.grad.eq(1).all()
    assert [p.requires_grad for p in model.parameters()] == [False] + [True]*9 and torch.is_grad_enabled()

def test_in_any_mode_of_torch():
    model = seq(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    plain = trace(model, (3,))
    with torch.inference_mode():
        assert same(trace(model, (3,)), plain)
        assert same(trace(seq(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), (3,)), plain)
    with torch.no_grad(): assert same(trace(model, (3,)), plain)
    assert same(as_graph(model, (3,)), plain) and as_graph(plain) is plain

class Auto(nn.Module):
    "A forward pass under autocast."
    def __init__(self, *parts):
        super().__init__()
        self.parts = seq(*parts)
    def forward(self, x):
        with torch.autocast('cpu', torch.bfloat16): return self.parts(x)

@pytest.mark.parametrize('run_before', [False, True])
@pytest.mark.parametrize('around', [False, True])
@pytest.mark.parametrize('inside', [False, True])
def test_autocast(run_before, around, inside):
    parts = C(2, 4), nn.BatchNorm2d(4), nn.ReLU(), C(4, 4, groups=2), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(50, 2)
    plain, model = trace(seq(seq(*parts)), (2, 4, 4)), Auto(*parts) if inside else seq(*parts)
    with torch.autocast('cpu', torch.bfloat16, enabled=around):
        if run_before: model(torch.randn(1, 2, 4, 4)) # (which fills the cache of casts)
        before = [f() for f in (torch.is_autocast_cache_enabled, lambda: torch.is_autocast_enabled('cpu'), lambda: torch.get_autocast_dtype('cpu'))]
        graph = trace(model, (2, 4, 4))
        assert before == [torch.is_autocast_cache_enabled(), around, torch.get_autocast_dtype('cpu')]
        with pytest.raises(TraceError): trace(model, (3, 4, 4))
        assert torch.is_autocast_enabled('cpu') == around and torch.is_autocast_cache_enabled()
    for a, b in zip(graph.layers, plain.layers):
        assert a.size == b.size and a.param is b.param and a.stride is not None and torch.equal(a.src, b.src) and torch.equal(a.dst, b.dst)
        assert torch.equal(a.weight(), b.weight()) and is_permutation(layer_ids(a), layer_ids(b)) # in full precision
    assert len(graph.nodes) == len(plain.nodes)

def test_no_compiler_is_loaded():
    code = ("import sys, torch; from phew_nb.graph import trace; trace(torch.nn.Linear(3, 2), (3,)); "
            "print([m for m in ('torch._dynamo', 'fastai', 'pandas') if m in sys.modules])")
    run = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True)
    assert run.stdout.strip() == '[]', run.stdout + run.stderr

# Recurrent networks

class ByHand(nn.Module):
    "An LSTM in elementary operations."
    def __init__(self, lstm, out):
        super().__init__()
        self.r, self.out = lstm, out
    def forward(self, x): # (b, features, time)
        i, h, c, hs = F.linear(x.transpose(1, 2), self.r.weight_ih_l0, self.r.bias_ih_l0), torch.zeros(1, 4), torch.zeros(1, 4), []
        for t in range(x.shape[2]):
            gates = i[:, t] + F.linear(h, self.r.weight_hh_l0, self.r.bias_hh_l0)
            a, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid()*c + a.sigmoid()*g.tanh()
            h = o.sigmoid()*c.tanh()
            hs.append(h)
        return self.out(torch.stack(hs, 1).mean(1))

class Module(nn.Module):
    def __init__(self, rnn, out):
        super().__init__()
        self.r, self.out = rnn, out
    def forward(self, x): return self.out(self.r(x.transpose(1, 2))[0].mean(1))

def test_lstm_is_its_elementary_operations():
    lstm, out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)
    a, b = trace(Module(lstm, out), (3, 3)), trace(ByHand(lstm, out), (3, 3))
    sets = [[(l.name, [[sorted(behind[u]) for u in row] for row in l.src.tolist()]) for l in g.layers]
            for g in (a, b) for behind in [Behind(g)]]
    rename = {int(u): int(v) for x, y in zip(a.layers, b.layers) for u, v in zip(x.dst.flatten(), y.dst.flatten())}
    assert [(n, [[sorted(rename.get(u, u) for u in s) for s in row] for row in rows]) for n, rows in sets[0]] == sets[1]

@pytest.mark.parametrize('rnn', [nn.RNN(3, 4, batch_first=True), nn.GRU(3, 4, 2, batch_first=True), nn.LSTM(3, 4, batch_first=True, proj_size=2),
                                 nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)])
def test_recurrent_modules(rnn):
    width = (getattr(rnn, 'proj_size', 0) or 4)*(1 + rnn.bidirectional)
    graph = trace(Module(rnn, nn.Linear(width, 2)), (3, 3))
    weights = {f'r.{n}' for n, p in rnn.named_parameters() if p.ndim > 1}
    assert graph.params.keys() == weights | {'out.weight'} and not graph.left_out
    assert graph.live().nonzero().numel() and len(graph.outputs) == 2

def test_long_recurrence_is_fast_enough():
    graph = trace(Module(nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)), (2, 200))
    assert len(graph.layers) == 201

# Embeddings are layers on one-hot inputs

@pytest.mark.parametrize('model', [
    seq(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2)), seq(nn.EmbeddingBag(10, 4), nn.Linear(4, 2)),
    Fn(lambda s, x: s.o(s.w[x].mean(1)), w=P(10, 4), o=nn.Linear(4, 2)),
    Fn(lambda s, x: s.o(s.w.index_select(0, x[0]).mean(0, True)), w=P(10, 4), o=nn.Linear(4, 2))])
def test_embeddings(model):
    graph = trace(model, example=torch.tensor([[1, 2, 3]]))
    table = graph.layers[0]
    assert table.size == (1, 4, 10, 1) and torch.equal(table.src[0], graph.inputs) and len(graph.inputs) == 10
    assert torch.equal(table.weight()[0, ..., 0], table.param.detach().t()) and len(graph.params) == 2

def test_language_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(10, 4), nn.Embedding(3, 4)
            self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        def forward(self, x): return self.layer(self.words(x) + self.places(torch.arange(3))) @ self.words.weight.T
    graph = trace(Model(), example=torch.tensor([[1, 2, 3]]))
    assert [l.name for l in graph.layers].count('words.weight') == 2 and len(graph.inputs) == len(graph.outputs) == 10
    assert graph.left_out == {'places.weight': 'reads nothing that depends on the input'}
    assert graph.total == sum(p.numel() for p in graph.params.values()) == 10*4 + 12*4 + 4*4 + 2*24

# What counts, and what is left out

class Slope(nn.Module):
    "A physics-informed network: the derivative of one in its inputs, and an end that only the network itself would reach."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.vain = nn.Linear(2, 4), nn.Linear(4, 1), nn.Linear(4, 3)
    def forward(self, x):
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            h = torch.tanh(self.a(x))
            self.vain(h)
            return torch.autograd.grad(self.b(h).sum(), x, create_graph=True)[0]

def test_weights_of_a_derivative_are_not_said_to_do_nothing():
    torch.manual_seed(0)
    model, x = Slope(), torch.randn(3, 2)
    does = {name: torch.autograd.grad(model(x).sum(), p, allow_unused=True)[0] is not None for name, p in model.named_parameters()}
    left = trace(model, (2,)).left_out
    assert does['b.weight'] and 'constants, as in a derivative' in left['b.weight']
    assert not does['vain.weight'] and left['vain.weight'] == 'the output does not depend on it'

def test_left_out():
    graph = trace(models['auxiliary heads'][0](), (1, 4, 4))
    assert graph.left_out == {'aux.weight': 'it is not run on this example', 'vain.weight': 'the output does not depend on it'}
    assert graph.params.keys() == {'a.weight', 'out.weight'} and graph.total == 9*2 + 4
    (name, why), = trace(Branch(), (3,)).left_out.items()
    assert name in ('a.weight', 'b.weight') and why == 'it is not run on this example'

def test_inputs():
    graph = trace(models['many inputs'][0](), ((1, 4, 4), (3,)))
    assert graph.inputs.tolist() == [0, 1, 2, 3] and len(graph.example) == 2
    add = Fn(lambda s, xs: s.o(xs['a'] + xs['b']), o=nn.Linear(3, 2))
    graph = trace(add, example=({'a': torch.randn(1, 3), 'b': torch.randn(1, 3)},))
    assert len(graph.inputs) == 6 and sorted(graph.junctions[0].child.tolist()) == list(range(6))
    x = torch.randn(1, 3)
    assert len(trace(Fn(lambda s, a, b: s.o(a + b), o=nn.Linear(3, 2)), example=(x, x)).inputs) == 6
    assert trace(nn.Linear(3, 2), example=torch.randn(3)).inputs.tolist() == [0, 1, 2]
    tokens = seq(nn.Linear(4, 3), nn.Linear(3, 2))
    assert [l.size for l in trace(tokens, (5, 4), channel_dim=-1).layers] == [(1, 3, 4, 1), (1, 2, 3, 1)]
    model, x = models['transformer, token'][0](), torch.randn(4, 1, 4, 4)
    assert same(trace(model, example=x), trace(model, (1, 4, 4)))

# Shapes of the graph that the notebook promises

def test_attention_convention():
    "Output channel d of a head: value channel d, merged with the queries and keys of the head."
    def attend(s, x): return s.a(x := x.transpose(1, 2), x, x, need_weights=False)[0]
    model = Fn(attend, a=nn.MultiheadAttention(4, 2, batch_first=True))
    graph = trace(model, (4, 3))
    qkv, out = graph.layers
    behind, rows = Behind(graph), qkv.dst[0].tolist()
    for d in range(4):
        head = slice(d//2*2, d//2*2 + 2)
        assert behind[int(out.src[0, d])] == {*rows[0:4][head], *rows[4:8][head], rows[8 + d]}
    assert {j.kind for j in graph.junctions} == {'mul'}

def by_hand(q, k, v, attn_mask=None):
    scores = q @ k.transpose(-1, -2)/2
    return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ v

class Attention(nn.Module):
    "Attention on tensors of so many dimensions, with a bias from the input if told so."
    def __init__(self, attention, ndim, biased):
        super().__init__()
        self.attention, self.ndim, self.biased = attention, ndim, biased
        self.q, self.k, self.v, self.bias, self.out = (nn.Linear(4, 4) for _ in range(5))
    def forward(self, x): # (1, 4, 4)
        x = x.transpose(1, 2)
        q, k, v = (f(x).unflatten(2, (2, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        tensors = [q, k, v] + ([self.bias(x)[:, None].expand(1, 2, 4, 4)] if self.biased else [])
        if self.ndim < 4: tensors = [t[0] for t in tensors]
        if self.ndim < 3: tensors = [t[0] for t in tensors]
        return self.out(self.attention()(*tensors).reshape(-1, 4, 2).repeat(1, 1, 2))

@pytest.mark.parametrize('backend', [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize('ndim', [2, 3, 4])
@pytest.mark.parametrize('biased', [False, True])
def test_attention_is_one_operation(backend, ndim, biased):
    "Whichever kernel runs, the graph is that of the formula written by hand."
    plain = trace(Attention(lambda: by_hand, ndim, biased), (4, 4))
    with sdpa_kernel([backend, SDPBackend.MATH]):
        graph = trace(Attention(lambda: F.scaled_dot_product_attention, ndim, biased), (4, 4))
        assert same(graph, plain) and ('bias.weight' in graph.params) == biased
        kernel = trace(Attention(lambda: attention, ndim, biased), (4, 4)) # the function under another name
        assert same(kernel, plain)

@pytest.mark.parametrize('backend', [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_learned_queries(backend):
    with sdpa_kernel([backend, SDPBackend.MATH]):
        graph = trace(models['constants'][0](), (3, 5))
        attend = lambda s, x: s.a(s.q, x := x.transpose(1, 2), x, need_weights=False)[0]
        pooled = trace(Fn(attend, a=nn.MultiheadAttention(4, 2, batch_first=True), q=P(1, 1, 4)), (4, 3))
    assert [l.name for l in graph.layers] == ['a.weight', 'out.weight']
    assert len(pooled.layers) == 2 and {j.kind for j in pooled.junctions} == {'mul'} and not pooled.left_out

inplace = {f.__name__: f for f in (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.Mish, nn.Hardtanh, nn.Hardsigmoid,
                                   nn.Hardswish, nn.RReLU, nn.Dropout, nn.AlphaDropout)}

@pytest.mark.parametrize('name', [*inplace, 'Threshold', 'gelu_', 'abs_', 'tanh_', 'sigmoid_', 'clamp_'])
def test_activations_in_place(name):
    if name in inplace: f, g = inplace[name](inplace=True), inplace[name]()
    elif name == 'Threshold': f, g = nn.Threshold(.1, 0., inplace=True), nn.Threshold(.1, 0.)
    elif name == 'gelu_': f, g = torch.ops.aten.gelu_, F.gelu
    else:
        args = (0, 1) if name == 'clamp_' else ()
        f, g = lambda x: getattr(x, name)(*args), lambda x: getattr(x, name[:-1])(*args)
    a, b = (trace(Fn(lambda s, x: s.b(h(s.a(x))), a=linear(3, 4), b=linear(4, 2)), (3,)) for h in (f, g))
    plain = trace(seq(linear(3, 4), linear(4, 2)), (3,))
    for graph in (a, b): assert [l.src.tolist() for l in graph.layers] == [l.src.tolist() for l in plain.layers] and not graph.junctions

def test_deep_networks():
    class Deep(nn.Module):
        "Residual layers on tokens, of which one is unlike the others."
        def __init__(self, n):
            super().__init__()
            self.layers, self.token, self.out = nn.ModuleList(nn.Linear(2, 2) for _ in range(n)), P(1, 1, 2), nn.Linear(2, 2)
        def forward(self, x):
            x = torch.cat([self.token, x.transpose(1, 2)], 1)
            for layer in self.layers: x = x + layer(x)
            return self.out(x[:, 0])
    graph = trace(Deep(150), (2, 3))
    assert len(graph.layers) == 151 and graph.live().any() and graph.live(skips=True).sum() >= graph.live().sum()
    wide = Fn(lambda s, x: s.o(sum(a(x) for a in s.a)), a=nn.ModuleList(nn.Linear(2, 2) for _ in range(40)), o=nn.Linear(2, 2))
    total, = trace(wide, (2,)).junctions
    assert len(total.child) == 80 and not total.skip.any()

# Refusals say what, where, and what to do

class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(4, 4), nn.Linear(3, 2)
    def forward(self, x):
        x = self.a(x)
        return self.out(torch.fft.rfft(x).abs())

linear = lambda n=3, m=2: nn.Linear(n, m)
refused = {
    'fft': (Spectral, (4,), ['aten._fft_r2c.default', 'test_graph.py:', 'express it by convolutions']),
    'inside a module': (lambda: seq(nn.Identity(), seq(Spectral())), (4,), ["module '1.0'", '_fft_r2c']),
    'complex': (lambda: Fn(lambda s, x: s.o(torch.view_as_real(torch.view_as_complex(x.view(1, 2, 2))*1j).flatten(1)), o=linear(4)),
                (4,), ['aten.mul.Tensor', 'complex']),
    'bilinear': (lambda: Fn(lambda s, x: s.b(x, x), b=nn.Bilinear(3, 3, 2)), (3,), ["module 'b'", 'bilinear', 'write it as']),
    'orthogonal': (lambda: parametrizations.orthogonal(linear(3, 3)), (3,), ['cannot be followed to one', 'use a parameter itself']),
    'low rank': (lambda: Fn(lambda s, x: F.linear(x, s.w + s.b @ s.a), w=P(3, 3), a=P(1, 3), b=P(3, 1)), (3,), ['cannot be followed']),
    'two parameters': (lambda: Fn(lambda s, x: F.linear(x, s.w + s.a), w=P(3, 3), a=P(3, 3)), (3,), ['cannot be followed']),
    'inverse': (lambda: Fn(lambda s, x: s.o(torch.linalg.inv(torch.eye(3) + x.T @ x)), o=linear()), (3,), ['linalg_inv']),
    'quantised': (lambda: torch.ao.quantization.quantize_dynamic(seq(linear(3, 4), linear(4))), (3,), ['quantized', "module '0'"]),
    'sparse activations': (lambda: Fn(lambda s, x: torch.sparse.mm(x.to_sparse(), s.w), w=P(3, 2)), (3,), ['_to_sparse', 'strided']),
    'columns of a table': (lambda: Fn(lambda s, x: s.o(s.w.gather(1, x.argsort(1)[:, :2].expand(3, 2)).sum(1)[None]), w=P(3, 4), o=linear()),
                           (4,), ['aten.gather.default', 'places that depend on the input']),
    'pooled units': (lambda: seq(linear(3, 4900), nn.Unflatten(1, (1, 70, 70)), nn.MaxPool2d(2), nn.Flatten(), linear(1225)), (3,),
                     ['max_pool2d', '4900 positions of a channel are different units']),
    'forward fails': (lambda: Fn(lambda s, x: 1/0, o=linear()), (3,), ['does not run', '(1, 3)', 'division by zero']),
    'wrong size': (linear, (4,), ['does not run', '(1, 4)', 'input_size']),
    'batch in the size': (lambda: C(3, 2), (1, 3, 8, 8), ['does not run', 'without the batch']),
    'no size': (linear, None, ['input_size', '(3, 32, 32)']), 'zero size': (linear, (0,), ['input_size']),
    'a number': (linear, 3, ['input_size']), 'text': (linear, '3', ['input_size']), 'fraction': (linear, (3.,), ['input_size']),
    'no weights': (nn.ReLU, (3,), ['no prunable weights']), 'normalisation only': (lambda: nn.BatchNorm1d(3), (3,), ['no prunable weights']),
    'nothing': (nn.Sequential, (3,), ['no prunable weights']), 'width zero': (lambda: seq(linear(3, 0), linear(0, 2)), (3,), ['no prunable']),
    'numpy': (lambda: Fn(lambda s, x: torch.from_numpy(s.a(x).numpy()), a=linear()), (3,), ['no prunable weights', 'NumPy']),
    'lazy': (lambda: seq(nn.LazyLinear(3), linear()), (3,), ["'0.weight'", 'run the model once']),
    'no values': (lambda: nn.Linear(3, 2, device='meta'), (3,), ["'weight'", 'meta']),
    'a function': (lambda: torch.relu, (3,), ['torch.nn.Module']),
}

@pytest.mark.parametrize('name', refused)
@pytest.mark.filterwarnings('ignore')
def test_refused(name):
    make, size, words = refused[name]
    model = make()
    with pytest.raises(TraceError) as e: trace(model, size)
    for word in words: assert word in str(e.value)

def test_integers_and_empty_batches():
    with pytest.raises(TraceError, match='integers: give an `example`'):
        trace(Fn(lambda s, x: s.o(x.float()), o=linear()), example=torch.tensor([[1, 2, 3]]))
    with pytest.raises(TraceError, match='no prunable weights'): trace(linear(), example=torch.zeros(0, 3))
    with pytest.raises(TraceError, match='no prunable weights: .*kept dense'): trace(linear(), (3,), keep_dense='*')

# Pictures

def test_table_and_plots():
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    graph = trace(models['option a'][0](), (2, 4, 4))
    lines = repr(graph).splitlines()
    assert lines[0].split()[:2] == ['layer', 'weights'] and len(lines) == 2 + len(graph.nodes)
    assert f'{graph.total:,} weights in 4 parameters' in lines[-1]
    masks = {n: torch.rand(p.shape) < .5 for n, p in graph.params.items()}
    for most in (0, 200): assert graph.plot(masks, most=most) is not None
    ax = plt.subplots()[1]
    assert graph.plot(ax=ax) is ax
    plt.close('all')

def chooser(forward):
    class Chooser(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(8, 50), nn.Linear(50, 3)
        def forward(self, x): return self.c(forward(self.a(x)))
    torch.manual_seed(0)
    return Chooser()

def clipped(h): h[h < 0] = 0; return h
def some(h): out = torch.zeros_like(h); out[h > 0] = h[h > 0]; return out
def without_least(h): return h.scatter(-1, h.argmin(-1, keepdim=True), 0.)
def sparse_code(h): v, i = h.topk(4, -1); return torch.zeros_like(h).scatter(-1, i, v)
def shuffled(h): return h[:, torch.randperm(50)]

def test_places_that_the_data_tells(recwarn):
    "What was there may stay; a graph of what one example chose comes with a warning."
    for forward in clipped, without_least, torch.relu: assert count_paths(trace(chooser(forward), (8,))) == 8*50*3
    graph = trace(chooser(sparse_code), (8,))
    assert graph.live()[:8].all() and graph.total == 550 and not [w for w in recwarn if 'chooses' in str(w.message)]
    with pytest.warns(UserWarning, match="the data chooses among units"): trace(chooser(some), (8,))

def test_a_scripted_module_keeps_its_mode():
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 5), nn.Dropout(.5), nn.Linear(5, 2))).train()
    assert trace(model, (4,)).total == 30 and model.training and model[1].training

def test_random_numbers_of_the_model_do_not_change_its_graph():
    a, b = (torch.manual_seed(seed) and trace(chooser(shuffled), (8,)) for seed in (0, 5))
    assert all(torch.equal(x.src, y.src) for x, y in zip(a.layers, b.layers))

# Ends of paths, inputs, and what is said of them

class Decoder(nn.Module):
    "Returns its answer, the keys and values that led to it, and a hidden state."
    def __init__(self):
        super().__init__()
        self.k, self.v, self.head, self.aux = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
    def forward(self, x, loss=False):
        k, v = self.k(x), self.v(x)
        h = (k*v).relu()
        out = dict(logits=self.head(h), past=((k, v),), hidden=h, aux=self.aux(h))
        return dict(loss=out['logits'].sum(), **out) if loss else out

def test_what_leads_on_to_another_output_is_no_end():
    with pytest.warns(UserWarning, match=r"do not end in the output 'past.0.0' \(and 2 more outputs\): it leads on to 'aux'"):
        graph = trace(model := Decoder(), (3,))
    assert graph.ends == ['logits', 'aux'] and len(graph.outputs) == 4 and not graph.left_out
    assert "no end of paths: hidden (leads on to 'aux')" in repr(graph)

@pytest.mark.parametrize('outputs,ends', [('all', ['logits', 'past.0.0', 'past.0.1', 'hidden', 'aux']), ('logits', ['logits']), (0, ['logits']),
                                          ('past', ['past.0.0', 'past.0.1']), (-1, ['aux']), (('logits', 'hidden'), ['logits', 'hidden']),
                                          (lambda out: out['logits'][:, :1], [''])])
def test_outputs_may_be_chosen(outputs, ends):
    graph = trace(Decoder(), (3,), outputs=outputs)
    assert graph.ends == ends and len(graph.outputs) == (1 if ends == [''] else sum(2 if e in ('logits', 'aux') else 4 for e in ends))

@pytest.mark.filterwarnings('ignore')
def test_ends_of_other_kinds():
    graph = trace(Decoder(), example=(torch.randn(1, 3), True))
    assert graph.ends == ['logits', 'aux'] and graph.no_ends['loss'] == 'one number, made from other outputs'
    assert len(trace(nn.LSTM(3, 4), example=torch.randn(5, 1, 3)).ends) > 1 # a recurrent module run bare keeps its own
    for bad in ('nothing', 7):
        with pytest.raises(TraceError, match='returns'): trace(Decoder(), (3,), outputs=bad)

def test_products_of_parameters_are_constants():
    model = Fn(lambda s, x: s.o(s.q(x) @ s.r(s.pos).mT), q=linear(4, 4), r=linear(4, 4), o=linear(5, 2), pos=P(5, 4))
    graph = trace(model, (3, 4), channel_dim=-1)
    assert list(graph.params) == ['q.weight', 'o.weight'] and graph.left_out.keys() == {'r.weight'}

def test_packed_sequences():
    def forward(s, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
        return s.o(nn.utils.rnn.pad_packed_sequence(s.l(packed)[0], batch_first=True)[0][:, 0])
    model = Fn(forward, l=nn.LSTM(3, 4, batch_first=True), o=linear(4, 2))
    graph = trace(model, example=torch.randn(2, 3, 3), channel_dim=-1)
    assert {'l.weight_ih_l0', 'o.weight'} <= graph.params.keys() and graph.live()[graph.inputs].all()

# The tape

def exact(tape, example, model):
    "What a tape gives when it is played as it was recorded."
    tensors = dict(parameter=dict(model.named_parameters()), buffer=dict(model.named_buffers()), input=list(example))
    source = lambda kind, key: key if kind == 'constant' else tensors[kind][key]
    with torch.no_grad(): return tape.play(source, lambda step, args, kwargs: step(*args, **kwargs))

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', [n for n in models if n not in ('stochastic depth',)])
def test_a_tape_played_again_gives_the_same_outputs(name):
    make, *sizes = models[name]
    torch.manual_seed(0)
    model = make().eval()
    graph = trace(model, sizes[0] if len(sizes) == 1 else sizes, outputs='all')
    torch.manual_seed(0)
    with torch.no_grad(): out = dict(named_tensors(model(*[x.clone() for x in graph.example])))
    again = exact(graph.tape, [x.clone() for x in graph.example], model)
    for key, n in graph.tape.outputs.items(): torch.testing.assert_close(again[n], out[key], rtol=1e-4, atol=1e-6)

def test_a_tape_holds_no_tensor_of_the_network():
    graph = trace(models['option a'][0](), (2, 4, 4))
    assert {kind for kind, _ in graph.tape.sources.values()} <= {'input', 'parameter', 'buffer'}
    other = pickle.loads(pickle.dumps(graph.tape))
    assert [s.name for s in copy.deepcopy(other).steps] == [s.name for s in graph.tape.steps]

# --- places that the data tells, distances -----------------------------------------------------------------------------

class ByDegree(nn.Module):
    "Neighbours of two kinds, made by two layers, added up where the edges say."
    def __init__(self): super().__init__(); self.a, self.b, self.out = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 1)
    def forward(self, x, edges):
        h = torch.cat([self.a(x[:2]), self.b(x[2:])])
        return self.out(x.new_zeros(4, 3).index_add(0, edges[1], h[edges[0]]))

def test_what_is_added_up_where_the_data_says_may_be_any():
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    graph = trace(ByDegree(), example=(torch.randn(4, 2), edges))
    assert [layer.name for layer in graph.layers] == ['a.weight', 'b.weight', 'out.weight']
    assert sorted(graph.junctions[-1].child.tolist()) == sorted(torch.cat([layer.dst[0] for layer in graph.layers[:2]]).tolist())
    class Fixed(ByDegree): # the same places, whatever the data: then each row has its own units, which is not followed
        def forward(self, x): return super().forward(x, edges)
    with pytest.raises(TraceError, match='adds up different units at fixed places'): trace(Fixed(), example=torch.randn(4, 2))

class CodeBook(nn.Module):
    "A vector quantisation that lets gradients straight through."
    def __init__(self): super().__init__(); self.a, self.codes, self.b = nn.Linear(3, 2), nn.Embedding(5, 2), nn.Linear(2, 1)
    def forward(self, x):
        z = self.a(x)
        chosen = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        return self.b(z + (chosen - z).detach())

def test_a_code_book():
    with pytest.warns(UserWarning, match='distances to a parameter are taken in test_graph'): graph = trace(CodeBook(), (3,))
    assert set(graph.params) == {'a.weight', 'codes.weight', 'b.weight'}
    assert float(path_flow(graph, power=1).total) > 0 and phew(graph, .5).report(graph).lost == {}

# Where units lie in an input

class Across(nn.Module):
    "Two inputs, of images and of tokens."
    def __init__(self): super().__init__(); self.c, self.l, self.o = nn.Conv1d(3, 8, 3), nn.Linear(6, 8), nn.Linear(16, 3)
    def forward(self, x, y): return self.o(torch.cat([self.c(x).relu().mean(2), self.l(y).relu().mean(1)], 1))

in_the_last = {
    'tokens': (lambda: Fn(lambda s, x: s.o(F.silu(s.b(F.silu(s.a(x))))).mean(1), a=linear(6, 6), b=linear(6, 6), o=linear(6, 2)), (5, 6)),
    'positions added, normalised': (lambda: Fn(lambda s, x: s.o(s.e(s.n(x + s.p))).mean(1), p=P(5, 6), n=nn.LayerNorm(6), o=linear(6, 2),
                                               e=nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)), (5, 6)),
    'recurrent': (lambda: Fn(lambda s, x: s.o(s.l(x)[0][:, -1]), l=nn.LSTM(6, 8, batch_first=True), o=linear(8, 3)), (5, 6)),
    'convolution of what is turned': (lambda: Fn(lambda s, x: s.o(s.c(x.mT).relu().mean(2)), c=nn.Conv1d(6, 8, 3), o=linear(8, 2)), (5, 6)),
    'channels last': (lambda: Fn(lambda s, x: s.o(s.c(x.permute(0, 3, 1, 2)).relu().mean((2, 3))), c=nn.Conv2d(3, 8, 3), o=linear(8, 2)), (9, 10, 3))}

@pytest.mark.parametrize('name', in_the_last)
def test_units_lie_where_the_first_layer_reads(name):
    make, size = in_the_last[name]
    model = make().eval()
    graph = trace(model, size)
    assert same(graph, trace(model, size, channel_dim=-1)) and len(graph.inputs) == size[-1]
    assert len(trace(model, size, channel_dim=1).inputs) == size[0]

@pytest.mark.parametrize('name', ['tokens', 'convolution of what is turned', 'channels last'])
def test_walks_over_tokens_are_whole(name):
    "By autograd: whatever is kept has a derivative, where all weights are positive."
    make, size = in_the_last[name]
    model = make().double()
    for p in model.parameters(): p.data = p.abs()
    masks = phew(model, .2, size)
    masks.apply(model)
    model(torch.ones(1, *size, dtype=torch.double)).sum().backward()
    assert all((dict(model.named_parameters())[n].grad[m] > 0).all() for n, m in masks.items())

def test_units_stay_in_the_first_dimension():
    mixer = Fn(lambda s, x: s.o(s.t(s.p(x).flatten(2)).relu().mean(2)), p=nn.Conv2d(3, 8, 4, 4), t=linear(16, 16), o=linear(8, 3))
    patches = Fn(lambda s, x: s.o(s.a(x.unfold(2, 7, 7).unfold(3, 7, 7).reshape(len(x), 16, 49)).relu().mean(1)), a=linear(49, 8), o=linear(8, 3))
    for model, size in ((mixer, (3, 16, 16)), (patches, (1, 28, 28))):
        graph = trace(model, size)
        assert same(graph, trace(model, size, channel_dim=1)) and len(graph.inputs) == size[0]
    graph = trace(Across(), ((3, 9), (5, 6))) # each input by what reads it
    assert len(graph.inputs) == 3 + 6 and [l.size for l in graph.layers] == [(1, 8, 3, 3), (1, 8, 6, 1), (1, 3, 16, 1)]

def test_a_second_pass_starts_from_the_model_as_it_was():
    def forward(s, x):
        s.seen.append(len(s.seen))
        return s.o(s.a(x).relu()).mean(1)
    model = Fn(forward, a=linear(6, 6), o=linear(6, 2))
    model.seen = []
    trace(model, (5, 6))
    assert model.seen == []

def test_factors_of_a_product_are_said_to_be_left_out():
    model = Fn(lambda s, x: s.o(F.linear(x, s.u @ s.v).relu()), u=P(6, 2), v=P(2, 6), o=linear(6, 2))
    with pytest.warns(UserWarning, match="'u', 'v' are multiplied with each other"): graph = trace(model, (6,))
    assert list(graph.params) == ['o.weight'] and graph.left_out.keys() == {'u', 'v'}

class Masked(nn.Module):
    "A layer whose weights a constant multiplies, by zero above the diagonal and on it."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.l, self.o = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer('m', torch.tril(torch.ones(6, 6), -1))
    def forward(self, x): return self.o(torch.tanh(F.linear(x, self.l.weight*self.m, self.l.bias)))

def test_weights_that_a_constant_zeroes_are_no_paths():
    "By counting: each output is reached over each of the 15 weights below the diagonal."
    graph = trace(model := Masked(), (6,))
    assert count_paths(graph) == 15*2 and not graph.live()[graph.inputs[-1]]
    masks = phew(graph, .4)
    assert not (masks['l.weight'] & (model.m == 0)).any() and not sum(masks.report(graph).lost.values())
    with pytest.raises(ValueError, match='25 of 48 weights at most'): phew(graph, .6)
    every = Masks.dense(graph.params)
    assert every.report(graph).lost == {'l.weight': 21, 'o.weight': 2} and count_paths(graph, every) == 30

def _in_place(change):
    "A layer whose weights the network itself changes before it uses them."
    def weight(s):
        with torch.no_grad(): change(s, s.l.weight)
        return s.l.weight
    return weight

def _on_a_copy(change):
    def weight(s):
        change(s, w := s.l.weight.clone())
        return w
    return weight

def _set_to_zero(s, w): w[s.m == 0] = 0
def _anew(s, w):
    before = w.clone()
    w.zero_().copy_(before)
    w.tril_(-1)
def _row_by_row(s, w):
    for i in range(6): w[i, i:] = 0
changes = dict(product=lambda s, w: w.mul_(s.m), places=_set_to_zero, triangle=lambda s, w: w.tril_(-1), slices=_row_by_row,
               fill=lambda s, w: w.masked_fill_(s.m == 0, 0), copied=lambda s, w: w.copy_(w.tril(-1)),
               twice=lambda s, w: w.mul_(s.m).mul_(2).div_(2), anew=_anew)
cuts = {f'{how.__name__[1:]}, {name}': how(f) for how in (_in_place, _on_a_copy) for name, f in changes.items()} | dict(
    triangle=lambda s: s.l.weight.tril(-1), places=lambda s: s.l.weight.index_put((s.m == 0,), torch.tensor(0.)),
    rows=lambda s: torch.stack([s.l.weight[i]*s.m[i] for i in range(6)]), turned=lambda s: (s.l.weight*s.m).flip(0).flip(0),
    where=lambda s: torch.where(s.m == 0, 0., s.l.weight), scaled=lambda s: 2*s.l.weight.tril(-1)/2)

def _hold(model, how, mask):
    "Give a model a mask: as a buffer, or as a parameter that does not train."
    if how == 'buffer': model.register_buffer('m', mask)
    else: model.m = nn.Parameter(mask.bool() if how == 'truth values' else mask, requires_grad=False)

@pytest.mark.parametrize('held', ['buffer', 'parameter', 'truth values'])
@pytest.mark.parametrize('cut', cuts.values(), ids=cuts)
def test_zeros_written_over_weights_are_no_paths(cut, held):
    "However they come there: as in a plain network whose masks leave these weights out."
    model = Fn(lambda s, x: s.o(F.linear(x, cut(s), s.l.bias).tanh()), l=linear(6, 6), o=linear(6, 2))
    _hold(model, held, torch.tril(torch.ones(6, 6), -1))
    plain = nn.Sequential(model.l, nn.Tanh(), model.o)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    graph, below = trace(model, (6,)), Masks({'0.weight': model.m.bool(), '2.weight': torch.ones(2, 6, dtype=torch.bool)})
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(graph.layers[0].shut[0, ..., 0], model.m == 0) and count_paths(graph) == 30
    for spatial in True, False:
        traces = path_trace(model, input_size=graph, spatial=spatial), path_trace(plain, below, (6,), spatial=spatial)
        assert math.isclose(*(t.log10 for t in traces), abs_tol=1e-9)
        for method in synflow, synflow_l2: # (kept: all through which there is a path)
            found = method(model, kept=15 + 10, input_size=graph, spatial=spatial)
            assert not (found['l.weight'] & (model.m == 0)).any() and found['o.weight'][:, 1:].all()
    found = phew(graph, .4)
    assert not (found['l.weight'] & (model.m == 0)).any() and not sum(found.report(graph).lost.values())

def _zero_rows(w, m):
    w = w.clone()
    w[1:3] = 0
    return w
def _copied_over(w, m):
    out = torch.ones_like(w)
    out.copy_(w)
    return out
changed = [lambda w, m: w*m, lambda w, m: w.tril(1), lambda w, m: w.triu(-1), lambda w, m: w.masked_fill(m == 0, 0.), lambda w, m: w.T,
           lambda w, m: w.flip(0), lambda w, m: w.roll(1, 1), lambda w, m: 3*w, lambda w, m: w.double().float(), lambda w, m: w.exp(), _zero_rows,
           lambda w, m: torch.where(m == 0, 0., w), lambda w, m: torch.index_put(w, (m == 0,), torch.tensor(0.)), _copied_over, lambda w, m: w.clone().fill_diagonal_(0),
           lambda w, m: torch.cat([w[2:], w[:2]]), lambda w, m: w.index_fill(1, torch.tensor([0, 3]), 0.), lambda w, m: w.clone().mul_(m), lambda w, m: w.neg()]

@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=5), st.integers(0, 2**16))
def test_which_weight_is_behind_each_entry_and_where_none_is(steps, seed):
    "By autograd: an entry of what is used depends on the weight that stands behind it, or where it is a zero on none."
    gen = torch.Generator().manual_seed(seed)
    m = (torch.rand(4, 4, generator=gen) < .7).float()
    def used(w):
        for i in steps: w = changed[i](w, m)
        return w
    model = Fn(lambda s, x: F.linear(x, used(s.l.weight)), l=linear(4, 4))
    depends = torch.autograd.functional.jacobian(used, model.l.weight.detach()).view(16, 16) != 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        layer, = trace(model, (4,)).layers
    at_zero, high = used(torch.zeros(4, 4)).reshape(16)[depends.any(1)].abs(), layer.weight().max() # what masks would leave
    if high.isfinite(): assert any('is no zero where it is used' in str(w.message) for w in said) == (at_zero > 1e-6*high).any()
    assert not (depends.sum(1) > 1).any()
    for row, place in zip(depends, layer.places().flatten(), strict=True):
        assert row.nonzero().flatten().tolist() in ([], [int(place)])
    none = torch.zeros(layer.size, dtype=torch.bool) if layer.shut is None else layer.shut
    assert torch.equal(none, (layer.weight() == 0) & ~depends.any(1).view(layer.size)) # (exp of a zero is no zero)

@pytest.mark.parametrize('f', [F.softplus, torch.sigmoid, lambda w: w - w.mean(1, keepdim=True), lambda w: w.softmax(1), lambda w: w + 1])
def test_weights_that_a_mask_does_not_take_away_are_said(f):
    model = Fn(lambda s, x: s.o(F.linear(x, f(s.l.weight))), l=linear(6, 6), o=linear(6, 2))
    with pytest.warns(UserWarning, match="a zero in 'l.weight' is no zero where it is used"): masks = phew(model, .3, (6,))
    masks.apply(model)
    assert (f(model.l.weight)[~masks['l.weight']] != 0).any()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        trace(model, (6,), keep_dense='l')

def masked(f, **more):
    "A network whose first layer's weights are what `f` makes of them, and a mask below the diagonal."
    model = Fn(lambda s, x: s.o(F.linear(x, f(s), s.l.bias).tanh()), l=linear(6, 6), o=linear(6, 2), **more)
    model.register_buffer('m', torch.tril(torch.ones(6, 6), -1))
    return model

def gain(): return nn.Parameter(torch.ones(6, 1))
after = dict(gain=(lambda s: s.l.weight*s.m*s.g, dict(g=gain())), normalised=(lambda s: F.normalize(s.l.weight*s.m), {}),
             weight_norm=(lambda s: s.g*(s.l.weight*s.m)/(s.l.weight*s.m).norm(dim=1, keepdim=True), dict(g=gain())),
             rounded=(lambda s: (w := s.l.weight*s.m) + ((w*9).round()/9 - w).detach(), {}),
             zeros_like=(lambda s: torch.where(s.m > 0, s.l.weight, torch.zeros_like(s.l.weight)), {}),
             new_zeros=(lambda s: torch.where(s.m > 0, s.l.weight, s.l.weight.new_zeros(())), {}))

@pytest.mark.parametrize('f, more', after.values(), ids=after)
def test_zeros_stay_zeros_whatever_they_are_multiplied_with(f, more):
    graph = trace(model := masked(f, **more), (6,))
    assert torch.equal(graph.layers[0].shut[0, ..., 0], model.m == 0) and count_paths(graph) == 30

@pytest.mark.parametrize('in_place', [False, True])
def test_zeros_are_seen_where_the_weights_are_zero_already(in_place):
    "After a forward pass, or masks, the graph is the same."
    how = _in_place(lambda s, w: w.mul_(s.m)) if in_place else lambda s: s.l.weight*s.m
    graph = trace(model := masked(how), (6,))
    phew(graph, .3, seed=0).apply(model)
    model(torch.randn(2, 6))
    assert torch.equal(trace(model, (6,)).layers[0].shut, graph.layers[0].shut) and count_paths(trace(model, (6,))) == 30

def _also(change):
    def weight(s):
        with torch.no_grad(): change(s, s.l.weight.mul_(s.m))
        return s.l.weight
    return weight

def test_what_is_written_over_zeros_opens_them():
    delta = nn.Parameter(torch.ones(6, 6))
    for how in (_also(lambda s, w: w.sub_(w.mean())), _also(lambda s, w: w.add_(s.d)), lambda s: s.l.weight*s.m - (s.l.weight*s.m).mean()):
        graph = trace(masked(how, d=delta), (6,))
        assert graph.layers[0].shut is None and count_paths(graph) == 72

@pytest.mark.parametrize('change', [lambda s, w: w.renorm_(2, 0, .3), lambda s, w: w.copy_(w @ torch.eye(6)), lambda s, w: w.add_(s.d), lambda s, w: w.mul_(2),
                                    lambda s, w: torch._foreach_mul_([w], [s.m + 1]), lambda s, w: torch.view_as_complex(w.data.view(6, 3, 2)).mul_(2),
                                    lambda s, w: w.copy_(s.d), lambda s, w: w.data.view(torch.int32).bitwise_and_(-1)])
def test_what_else_a_network_writes_into_its_weights_is_not_followed(change):
    "Both readings take the weights as they are found."
    model = masked(_in_place(change), d=nn.Parameter(torch.rand(6, 6)))
    plain, graph = nn.Sequential(model.l, nn.Tanh(), model.o), trace(model, (6,))
    for spatial in True, False:
        assert math.isclose(path_trace(model, input_size=graph, spatial=spatial).log10, path_trace(plain, input_size=(6,)).log10, abs_tol=1e-9)
    assert [m.int().tolist() for m in synflow(model, .4, graph).values()] == [m.int().tolist() for m in synflow(plain, .4, (6,)).values()]

def test_a_table_that_renormalises_its_rows_is_read_as_it_is():
    ids = torch.arange(7)[None]
    model = nn.Sequential(nn.Embedding(7, 4, max_norm=.5), linear(4, 3))
    table = model[0].weight.detach().abs()
    total, _ = linearised(model, 1, traced=trace(model, example=ids)).gradients(ids)
    assert math.isclose(total, float((table.double() @ model[1].weight.detach().double().abs().T).sum()), rel_tol=1e-6)

def test_a_mask_each_for_a_stack_of_one_weight():
    ms = (torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0)) < .5).float()
    def one_by_one(s, x): return s.o(sum(F.linear(x[:, i], s.l.weight*s.ms[i]) for i in range(4)))
    def stacked(s, x): return s.o(torch.einsum('bti,toi->bto', x, torch.stack([s.l.weight*s.ms[i] for i in range(4)]))).sum(1)
    def expanded(s, x): return s.o(torch.bmm(x.transpose(0, 1), (s.l.weight.expand(4, 6, 6)*s.ms).mT).transpose(0, 1)).sum(1)
    def paths(f):
        model = Fn(f, l=nn.Linear(6, 6, bias=False), o=linear(6, 2))
        model.register_buffer('ms', ms)
        return count_paths(trace(model, (4, 6), channel_dim=2))
    assert paths(one_by_one) == paths(stacked) == paths(expanded) == int(ms.sum())*2

def test_weights_that_get_another_memory_in_the_pass_are_put_back():
    def moved(s):
        s.l.weight.data.mul_(s.m)
        s.l.weight.data = s.l.weight.data*2
        return s.l.weight
    before = (model := masked(moved)).l.weight.detach().clone()
    assert count_paths(trace(model, (6,))) == 30 and torch.equal(model.l.weight, before)

def _write_one(s):
    w = s.l.weight.clone()
    w[s.m == 0] = 1
    return w

def test_what_a_weights_own_value_decides_is_no_constant():
    def small(w):
        w = w.clone()
        w[w.abs() < .2] = 0
        return w
    for f in (torch.relu, lambda w: w.clamp(min=0), lambda w: (w*9).round()/9, lambda w: F.hardshrink(w, .2), small, lambda w: w*(w > 0),
              lambda w: torch.where(w > 0, w, 0.), lambda w: w*(w.abs() > .2).float()):
        model = Fn(lambda s, x: s.o(F.linear(x, f(s.l.weight)).relu()), l=linear(4, 4), o=linear(4, 2))
        assert all(layer.shut is None for layer in trace(model, (4,)).layers)
    model = Fn(lambda s, x: s.o(F.linear(x, _write_one(s))), l=linear(6, 6), o=linear(6, 2))
    model.register_buffer('m', torch.tril(torch.ones(6, 6), -1))
    graph = trace(model, (6,)) # ones are no weights
    assert count_paths(graph) == 2*15 + 2*6 and not (phew(graph, .3)['l.weight'] & (model.m == 0)).any()
    def ones(w):
        w = w.clone()
        w[w.abs() < .2] = 1
        return w
    model.run = lambda s, x: s.o(F.linear(x, ones(s.l.weight)))
    with pytest.raises(TraceError, match='cannot be followed to one'): trace(model, (6,))

def test_weights_are_not_moved_or_grown_where_a_constant_zeroes_them():
    graph = trace(model := masked(lambda s: s.l.weight*s.m), (6,))
    masks, shut = phew(graph, .3), model.m == 0
    assert not any((widen(graph, masks, x, seed=seed)['l.weight'] & shut).any() for x in (0., .5, 1.) for seed in range(20))
    assert torch.equal(on_paths(graph, Masks.dense(graph.params))['l.weight'], ~shut)

@pytest.mark.parametrize('masks', [False, True])
def test_whole_kernels_have_no_weights_that_a_constant_zeroes(masks):
    "As autoregressive networks of images have them: only the first 4 of 9 positions come before the pixel."
    model = Fn(lambda s, x: s.o(F.conv2d(x, s.c.weight*s.m, padding=1).relu()), c=nn.Conv2d(3, 5, 3, bias=False), o=nn.Conv2d(5, 2, 1))
    model.register_buffer('m', (torch.arange(9) < 4).view(3, 3).float())
    graph = trace(model, (3, 6, 6))
    kept = Masks.dense(graph.params)
    if masks: kept['c.weight'][..., 0, 0] = False
    found = phew(graph, .28, granularity='kernel', masks=kept if masks else None)['c.weight'].flatten(2)
    assert not found[..., 4:].any() and set(found.sum(2).view(-1).tolist()) <= {0, 4 - masks} and found.any()

@pytest.mark.parametrize('held', ['parameter', 'truth values'])
def test_what_is_made_of_a_mask_is_a_constant(held):
    "As from a buffer; but a mask that the network makes of its weights depends on them."
    made = [lambda s: s.l.weight*(1 - (1 - s.m.float())), lambda s: (s.l.weight.t()*s.m.t()).t(), lambda s: s.l.weight*torch.cat([s.m[:2], s.m[2:]]),
            lambda s: torch.where(s.m.bool(), s.l.weight, 0.), lambda s: s.l.weight.masked_fill(s.m < .5, 0), lambda s: s.l.weight*s.m.clone().detach()]
    for f in made:
        model = Fn(lambda s, x: s.o(F.linear(x, f(s), s.l.bias).tanh()), l=linear(6, 6), o=linear(6, 2))
        _hold(model, held, torch.tril(torch.ones(6, 6), -1))
        graph = trace(model, (6,))
        assert torch.equal(graph.layers[0].shut[0, ..., 0], model.m == 0) and 'm' not in graph.params
    def written(s):
        s.m.copy_(s.l.weight > 0)
        return torch.where(s.m.bool(), s.l.weight, 0.)
    model = Fn(lambda s, x: s.o(F.linear(x, written(s)).tanh()), l=linear(6, 6), o=linear(6, 2))
    _hold(model, held, torch.ones(6, 6))
    assert trace(model, (6,)).layers[0].shut is None

def test_a_frozen_matrix_of_zeros_and_ones_that_inputs_meet_is_a_layer():
    fixed = nn.Parameter(torch.eye(6).roll(1, 0), requires_grad=False)
    model = Fn(lambda s, x: s.o(F.linear(x, s.m.clone()).tanh()), m=fixed, o=linear(6, 2))
    with pytest.warns(UserWarning, match="'m' is frozen"): graph = trace(model, (6,))
    assert set(graph.params) == {'m', 'o.weight'} and count_paths(graph) == 72

def test_a_gain_of_zero_is_no_constant():
    "It may grow: the weights that it multiplies are drawn from."
    model = Fn(lambda s, x: s.o(F.linear(x, s.l.weight*s.g).relu()), l=linear(4, 4), g=nn.Parameter(torch.zeros(1)), o=linear(4, 2))
    assert all(layer.shut is None for layer in trace(model, (4,)).layers)

def test_a_weight_that_another_stands_in_for_is_the_networks_own():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)
        def forward(self, x):
            weights = dict(weight=2*self.first.weight)
            return self.second(torch.func.functional_call(self.first, weights, (x,)).relu())
    model = Doubled()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        graph = trace(model, (4,))
    assert [*graph.params] == ['first.weight', 'second.weight']
    assert all(p is model.get_parameter(name) for name, p in graph.params.items())

class Neighbours(nn.Module):
    "A graph network: sums over neighbours by a sparse matrix."
    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = linear(3, 6), linear(6, 2), how
        self.register_buffer('near', (torch.eye(5) + torch.eye(5).roll(1, 0)).to_sparse())
    def forward(self, x, near=None): return self.b(self.how(self.near if near is None else near, self.a(x)))

@pytest.mark.parametrize('how', [torch.sparse.mm, torch.spmm, torch.matmul])
def test_a_sparse_matrix_in_a_buffer_is_a_constant_and_as_an_input_is_refused(how):
    torch.manual_seed(0)
    model, x = Neighbours(how), torch.ones(5, 3)
    graph = trace(model, example=x)
    for p in model.parameters(): p.data = p.data.abs() if p.ndim > 1 else torch.zeros_like(p)
    ones = path_sum(graph)
    assert graph.total == 30 and float(ones) == pytest.approx((model.b.weight @ model.a.weight).sum().item(), rel=1e-6)
    for method in 'synflow', 'wanda', 'snip': # each entry of the product is a sum over two neighbours
        assert prune(model, method, .5, graph, dl=[(x, torch.zeros(5, 2))]).kept == 15
    with pytest.raises(TraceError, match='input 1 is a sparse tensor'): trace(model, example=(x, model.near))
