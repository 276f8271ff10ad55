"Scores are right by a second way, and leave the network to the bit as it was, whatever the network and whatever happens."
import copy, inspect, math, random, warnings
from collections import UserDict, deque
from collections.abc import Mapping
from contextlib import nullcontext

import hypothesis.strategies as st
import numpy as np, pytest, torch, torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phew_nb.graph import trace
from phew_nb.masks import Masks
from phew_nb.models import mlp, resnet20, vgg19
from phew_nb.pruners import about, prune, pruners
from phew_nb.scores import (apportion, default_loss, erk, grasp, grasp_scores, iter_snip, kth_largest, magnitude, random_pruning,
                            snip, snip_scores, top_k, uniform_pruning, warned)

# --- networks -----------------------------------------------------------------------------------------------------------

class Shared(nn.Module):
    "One linear layer called twice, and an output layer whose weight is that of another."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.c.weight = self.b.weight
    def forward(self, x): return self.c(torch.tanh(self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))))

class Two(nn.Module):
    "Two outputs."
    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)
    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.one(h), self.two(h)

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)
    def forward(self, x): return self.head(self.rnn(x[:, None].expand(-1, 3, -1))[0][:, -1])

def dropping():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.5), nn.Linear(16, 4))

def normed():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 4))

networks = dict(plain=lambda: mlp([6, 8, 4], bn=True), shared=Shared, recurrent=Recurrent, dropping=dropping)

def build(name, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return networks[name]()

def data(n=20, classes=4, size=6, batch=8, seed=0):
    gen = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, size, generator=gen), torch.randint(classes, (n,), generator=gen)
    return [(x[i:i+batch], y[i:i+batch]) for i in range(0, n, batch)]

methods = [m for m in pruners if not m.startswith('phew') and m not in ('gmp', 'lottery')]
look = dict(snip=snip, iter_snip=lambda *a, **k: iter_snip(*a, iterations=3, **k), grasp=grasp)

def run(method, model, density=.3, size=(6,), dl=None, **kwargs):
    "Prune, few steps where there are many."
    steps = dict(iterations=3) if method in ('iter_snip', 'synflow', 'synflow_l2') else {}
    if method.startswith('synflow') and isinstance(model, Recurrent): steps['spatial'] = False
    return prune(model, method, density, size, dl=data() if dl is None else dl, **steps, **kwargs)

# --- nothing is left behind ---------------------------------------------------------------------------------------------

def bits(t): return t.detach().contiguous().reshape(-1).view(torch.uint8).clone()

def snapshot(model):
    "All of a network that could change, and the global random states."
    modules = list(model.named_modules())
    kinds = '_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_load_state_dict_post_hooks' # (scripted modules have none)
    hooks = [len(vars(m).get(kind, ())) for _, m in modules for kind in kinds]
    params = [(n, id(p), p.data_ptr(), p.dtype, p.requires_grad, p.is_leaf, id(p.grad)) for n, p in model.named_parameters()]
    tensors = {n: bits(t) for n, t in model.state_dict(keep_vars=True).items()}
    grads = {n: bits(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    extra = [(n, b.data_ptr(), b.dtype) for n, b in model.named_buffers()]
    kind, keys, *rest = np.random.get_state()
    states = dict(torch=torch.get_rng_state(), numpy=torch.from_numpy(keys.astype(np.int64)))
    return dict(modes=[m.training for _, m in modules], hooks=hooks, params=params, extra=extra, rest=rest, python=random.getstate(),
                grad_mode=torch.is_grad_enabled(), **{f't {k}': v for k, v in (tensors | states).items()},
                **{f'g {k}': v for k, v in grads.items()})

def assert_same(before, after):
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key]
        assert same, f'{key} has changed'

def unusual(model):
    "A network in an unusual state: mixed modes, gradients, frozen weights, statistics of its own."
    params = list(model.parameters())
    for i, p in enumerate(params): p.grad = torch.full_like(p, float(i)) if i % 2 else None
    params[0].requires_grad_(False)
    for i, m in enumerate(model.modules()): m.training = i % 3 != 1
    for b in model.buffers():
        if b.is_floating_point(): b.add_(.25)
    return model

@pytest.mark.parametrize('method', methods)
@pytest.mark.parametrize('name', networks)
def test_network_is_left_bit_for_bit(method, name):
    if (method, name) == ('grasp', 'recurrent') and torch.cuda.is_available(): pytest.skip('cuDNN')
    model = unusual(build(name))
    before = snapshot(model)
    run(method, model)
    assert_same(before, snapshot(model))

class Remembers(nn.Module):
    "Keeps its last output, and counts its calls in a buffer that it makes anew."
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer('calls', torch.zeros(()))
    def forward(self, x):
        self.calls = self.calls + 1
        self.last = torch.relu(self.a(x))
        return self.b(self.last)

@pytest.mark.parametrize('method', look)
@pytest.mark.parametrize('used', [False, True])
def test_what_a_network_remembers_is_put_back(method, used):
    model = Remembers()
    graph = trace(model, (6,))
    model.__dict__.pop('last', None)
    if used: model(torch.ones(1, 6))
    calls, last = model.calls, model.__dict__.get('last')
    look[method](model, .3, graph, data())
    assert model.calls is calls and model.__dict__.get('last') is last

@pytest.mark.parametrize('method', look)
def test_networks_pruned_by_torch(method):
    from torch.nn.utils import prune as torch_prune
    model = build('plain')
    torch_prune.random_unstructured(model.hidden1.linear, 'weight', .5)
    torch_prune.random_unstructured(model.head, 'weight', .5)
    first, weight = Masks.of(model), model.head.weight
    graph = trace(model, (6,))
    model.head.weight = weight
    masks = look[method](model, .2, graph, data())
    assert masks <= first and model.head.weight is weight and masks.kept == round(.2*graph.total)

@pytest.mark.parametrize('method', look)
def test_left_as_it_was_when_it_fails_half_way(method):
    model, calls = unusual(build('dropping')), []
    def loss(out, y):
        calls.append(1)
        if len(calls) == 3: raise RuntimeError('half way')
        return default_loss(out, y)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match='half way'): run(method, model, loss=loss)
    assert_same(before, snapshot(model))

def test_left_as_it_was_when_the_network_fails():
    model = unusual(build('dropping'))
    graph, before = trace(model, (6,)), snapshot(model)
    with pytest.raises(RuntimeError): snip(model, .5, graph, [(torch.zeros(4, 7), torch.zeros(4).long())])
    assert_same(before, snapshot(model))

def test_hooks_of_a_training_run_do_not_fire():
    model, fired = build('plain'), []
    for p in model.parameters():
        p.register_hook(lambda g: fired.append('grad'))
        p.register_post_accumulate_grad_hook(lambda p: fired.append('accumulated'))
    grasp(model, .5, (6,), data())
    assert 'accumulated' not in fired and all(p.grad is None for p in model.parameters())

@pytest.mark.parametrize('method', look)
def test_a_loader_that_draws_random_numbers(method):
    x, y = (torch.cat(part) for part in zip(*data()))
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = build('plain')
    before = snapshot(model)
    first = look[method](model, .3, (6,), loader)
    assert_same(before, snapshot(model))
    torch.manual_seed(123)
    assert first == look[method](model, .3, (6,), loader)

# --- what a network does to itself ----------------------------------------------------------------------------------------

class Body(nn.Module):
    "Two layers; what is nasty is done in `first`, before the first of them."
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    def first(self, x): return x
    def forward(self, x): return self.b(torch.relu(self.norm(self.a(self.first(x)))))

class Caches(Body):
    "A table, a flag and a list that the first forward pass fills."
    def __init__(self):
        super().__init__()
        self.table, self.ready, self.sizes = None, False, []
    def first(self, x):
        if self.table is None: self.table = torch.linspace(.5, 1.5, x.shape[1], dtype=x.dtype, device=x.device)
        self.ready = True
        self.sizes.append(len(x))
        return x*self.table

class CachesLate(Body):
    "An attribute that is not there before the first pass, with the pass's history."
    def first(self, x):
        self.last = self.a(x)
        return x

class Nests(Body):
    "Containers within containers."
    def __init__(self):
        super().__init__()
        self.seen = dict(calls=[0, dict(sizes=[])], kinds=set(), recent=deque(maxlen=3))
    def first(self, x):
        self.seen['calls'][0] += 1
        self.seen['calls'][1]['sizes'].append(tuple(x.shape))
        self.seen['kinds'].add(str(x.dtype)); self.seen['recent'].append(x.detach().sum())
        self.seen.setdefault('new', []).append(1)
        return x

class HooksItself(Body):
    "Registers a hook of a child in its first pass, as attention backbones do."
    def __init__(self):
        super().__init__()
        self.hooked = False
    def first(self, x):
        if not self.hooked: self.a.register_forward_hook(lambda m, i, o: 2*o); self.hooked = True
        return x

class Grows(Body):
    "A parameter, a buffer and a module that the first pass makes."
    def first(self, x):
        if not hasattr(self, 'scale'):
            self.scale = nn.Parameter(torch.ones(6, dtype=x.dtype, device=x.device))
            self.register_buffer('shift', torch.zeros(6, dtype=x.dtype, device=x.device), persistent=False)
            self.extra = nn.Identity()
        return self.extra(x*self.scale + self.shift)

class Counts(Body):
    "Buffers: one changed in place, one made anew."
    def __init__(self):
        super().__init__()
        self.register_buffer('calls', torch.zeros(())); self.register_buffer('mean', torch.zeros(6))
    def first(self, x):
        self.calls += 1
        self.mean = .9*self.mean + .1*x.detach().mean(0)
        return x

class Clips(Body):
    "Writes to its weights through `.data`."
    def first(self, x):
        self.a.weight.data.clamp_(-.05, .05); self.a.bias.data.zero_()
        return x

class Freezes(Body):
    "Changes flags, modes and gradients."
    def first(self, x):
        self.a.bias.requires_grad_(False); self.eval()
        for p in self.parameters(): p.grad = None
        return x

class Zeroes(Body):
    "Zeroes its gradients in place."
    def first(self, x):
        for p in self.parameters():
            if p.grad is not None: p.grad.zero_()
        return x

class Draws(Body):
    "Draws random numbers of every kind."
    def first(self, x): return x + 1e-3*(torch.rand(()) + np.random.rand() + random.random()).item()

class Hides(Body):
    "A module that is no child: in a list."
    def __init__(self):
        super().__init__()
        self.hidden = [Counts()]
    def first(self, x): return self.hidden[0].first(x)

class Replaces(Body):
    "Gives a child another weight object of the same values."
    def first(self, x):
        self.b.bias = nn.Parameter(self.b.bias.detach().clone())
        return x

nasty = [Caches, CachesLate, Nests, HooksItself, Grows, Counts, Clips, Freezes, Zeroes, Draws, Hides, Replaces]

def described(model):
    "Every value within a network, by where it is; the objects are held, so that no number of one is used again."
    found, held = {}, []
    def put(where, x):
        held.append(x)
        new = id(x) not in seen
        seen.add(id(x))
        if x is None or isinstance(x, (bool, int, float, str, bytes, torch.dtype, torch.device)): found[where] = repr(x)
        else: found[where] = type(x).__name__, id(x)
        if not new: return
        if isinstance(x, torch.Tensor):
            found[where + ' tensor'] = x.data_ptr(), x.dtype, x.shape, x.stride(), x.requires_grad, x.is_leaf
            found[where + ' values'] = bits(x)
            if x.is_leaf: put(where + '.grad', x.grad)
        elif isinstance(x, Mapping):
            found[where + ' keys'] = list(map(repr, x))
            for k, v in list(x.items()): put(f'{where}[{k!r}]', v)
        elif isinstance(x, (list, tuple, deque)):
            found[where + ' length'] = len(x)
            for i, v in enumerate(x): put(f'{where}[{i}]', v)
        elif isinstance(x, (set, frozenset)): found[where + ' items'] = sorted(map(repr, x))
        elif isinstance(x, nn.Module): put(where + '.__dict__', vars(x))
    seen = set()
    put('model', model)
    kind, keys, *rest = np.random.get_state()
    found |= {'torch random': torch.get_rng_state(), 'numpy random': torch.from_numpy(keys.astype(np.int64)), 'numpy rest': rest,
              'python random': random.getstate(), 'grad mode': torch.is_grad_enabled(), 'held': held}
    if torch.cuda.is_available(): found['cuda random'] = torch.cuda.get_rng_state()
    return found

def assert_as_found(before, after):
    before, after = ({k: v for k, v in d.items() if k != 'held'} for d in (before, after))
    assert before.keys() == after.keys(), f'came or went: {sorted(before.keys() ^ after.keys())[:5]}'
    assert_same(before, after)

def traced_once(model):
    "The graph of a network that writes to its weights, which have their values again."
    old = [p.detach().clone() for p in model.parameters()]
    graph = trace(model, (6,))
    for p, values in zip(model.parameters(), old): p.data.copy_(values)
    return graph

def failing(at):
    "A loss that raises when it is called for the `at`-th time."
    calls = []
    def loss(out, y):
        calls.append(1)
        if len(calls) == at: raise RuntimeError('half way')
        return default_loss(out, y)
    return loss

@pytest.mark.parametrize('ends', ['returns', 'raises'])
@pytest.mark.parametrize('used', [False, True])
@pytest.mark.parametrize('method', look)
@pytest.mark.parametrize('kind', nasty)
def test_a_network_that_changes_itself_is_left_as_found(kind, method, used, ends):
    torch.manual_seed(0)
    model = kind()
    if used: model(data()[0][0])
    size = traced_once(model) if kind in (Clips, Zeroes) else (6,)
    for i, p in enumerate(model.parameters()): p.grad = torch.full_like(p, float(i)) if i % 2 else None
    before = described(model)
    if ends == 'returns': look[method](model, .3, size, data())
    else:
        with pytest.raises(RuntimeError, match='half way'): look[method](model, .3, size, data(), loss=failing(2))
    assert_as_found(before, described(model))
    assert model(data()[0][0]).dtype == torch.float32 # and it still runs

# --- callers, precisions, devices ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('method', look)
@pytest.mark.parametrize('around', [torch.no_grad, torch.inference_mode, lambda: torch.autocast('cpu', torch.bfloat16)])
def test_what_is_around_the_call_does_not_matter(method, around):
    model = build('dropping')
    with around(): inside = run(method, model)
    assert inside == run(method, model)

@pytest.mark.parametrize('method', methods)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(method, dtype):
    half = build('plain').to(dtype)
    before = snapshot(half)
    masks = run(method, half)
    assert_same(before, snapshot(half))
    assert masks == run(method, copy.deepcopy(half).float())

def test_half_precision_does_not_underflow():
    "Gradients of 1e-9, which float16 does not have."
    net = nn.Sequential(nn.Linear(4, 3, bias=False)).half()
    batch = [(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1]))]
    scores = snip_scores(net, trace(net, (4,)), batch, loss=lambda out, y: 1e-9*F.cross_entropy(out, y))['0.weight']
    assert scores.dtype == torch.float32 and (scores > 0).all()

def test_double_precision_stays_double():
    net = build('plain').double()
    assert all(s.dtype == torch.float64 for s in snip_scores(net, trace(net, (6,)), data()).values())

@pytest.mark.parametrize('method', look)
def test_half_precision_with_gradients_of_its_own(method):
    model = unusual(build('plain')).half()
    for p in model.parameters(): p.grad = torch.full_like(p, 2.)
    before = snapshot(model)
    run(method, model)
    assert_same(before, snapshot(model))

def test_scores_that_are_not_finite_name_their_layer():
    model = build('plain')
    with pytest.raises(ValueError, match="scores of layer 'hidden1.linear.weight' are not finite"):
        snip(model, .3, (6,), data(), loss=lambda out, y: (out*0).sum().sqrt())
    model.head.weight.data[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"scores of layer 'head.weight' are not finite, the first at \(1, 2\)"): magnitude(model, .3, (6,))

@pytest.mark.parametrize('method', look)
def test_frozen_weights_are_scored_like_others(method):
    model = build('plain')
    free = run(method, model)
    for p in model.parameters(): p.requires_grad_(False)
    assert run(method, model) == free

def test_data_in_all_forms():
    model, batches = build('plain'), data()
    expected = iter_snip(model, .3, (6,), batches, iterations=3)
    x, y = (torch.cat(part) for part in zip(*batches))
    forms = [tuple(batches), (b for b in batches), map(list, batches), DataLoader(TensorDataset(x, y), batch_size=8),
             [(x.double(), y) for x, y in batches], [((x,), y.int()) for x, y in batches]]
    for dl in forms: assert iter_snip(model, .3, (6,), dl, iterations=3) == expected

@pytest.mark.parametrize('method', look)
def test_arrays_dicts_and_keywords(method):
    class Named(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body
        def forward(self, x, labels=None, scale=1.):
            out = self.body(x*scale)
            return out if labels is None else dict(loss=F.cross_entropy(out, labels), logits=out)
    model, batches = Named(build('plain')), data()
    graph = trace(model, (6,))
    expected = look[method](model, .3, graph, batches, **({} if method != 'grasp' else dict(temperature=1)))
    more = {} if method != 'grasp' else dict(temperature=1)
    arrays = [(x.double().numpy(), y.numpy()) for x, y in batches]
    keyword = [(dict(x=x, scale=1.), y) for x, y in batches]
    whole = [UserDict(x=x, labels=y) for x, y in batches]
    assert look[method](model, .3, graph, arrays, **more) == expected == look[method](model, .3, graph, keyword, **more)
    assert look[method](model, .3, graph, whole, loss=lambda out, batch: out['loss'], **more) == expected

def test_temperature_of_arrays():
    model, batches = build('plain'), data()
    assert grasp(model, .3, (6,), [(x.numpy(), y.numpy()) for x, y in batches]) == grasp(model, .3, (6,), batches)

def block():
    "fastai's `DataLoaders` of a `DataBlock`, its training batches in order."
    from fastai.data.block import CategoryBlock, DataBlock, TransformBlock
    from fastai.data.transforms import IndexSplitter
    x, y = (torch.cat(part) for part in zip(*data()))
    made = DataBlock(blocks=(TransformBlock, CategoryBlock), get_x=lambda i: x[i % 20], get_y=lambda i: int(y[i % 20]),
                     splitter=IndexSplitter(range(20, 25)))
    return made.dataloaders(range(25), bs=8, shuffle=False, drop_last=False, num_workers=0)

@pytest.mark.parametrize('method', look)
def test_data_of_fastai(method):
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as Loader
    x, y = (torch.cat(part) for part in zip(*data()))
    model, dl, dls = build('plain'), Loader(list(zip(x, y)), bs=8), block()
    expected = look[method](model, .3, (6,), data())
    for given in (dl, DataLoaders(dl, Loader(list(zip(x, y)), bs=2)), dls, dls.train):
        assert look[method](model, .3, (6,), given) == expected
    random.seed(0); before = snapshot(model)
    look[method](model, .3, (6,), dls)
    assert_same(before, snapshot(model))

x, y = data()[0]
refused = { # what -> (batches, loss, words)
    'a class too many': ([(x, y), (x, y + 1)], None, 'the loss of batch 1: class 4 among the targets of a network with 4 classes, 0 to 3'),
    'a class below zero': ([(x, y - 2)], None, 'the loss of batch 0: class -'),
    'a class too many, for a loss of ones own': ([(x, y), (x, y + 1)], F.cross_entropy, 'the loss of batch 1: Target 4 is out of bounds'),
    'too few targets': ([(x, y), (x, y), (x, y[:3])], None, r'the loss of batch 2: outputs of size \(8, 4\) for classes of size \(3,\)'),
    'real targets of another size': ([(x, torch.ones(8))], None, r'the loss of batch 0: outputs of size \(8, 4\) for targets of size \(8,\)'),
    'targets in a list': ([(x, ['a']*8)], None, 'the loss of batch 0: the targets are a list'),
    'inputs of another size': ([(x, y), (x[:, :5], y)], None, r'the network, on batch 1 with inputs of size \(8, 5\)'),
    'a keyword that there is not': ([(dict(z=x), y)], None, 'the network, on batch 0 .* unexpected keyword'),
    'one example': ([(x, y), (x[:1], y[:1])], None, r'the network, on batch 1 .* Give batches of two examples or more, or batch_stats=False'),
    'no examples': ([(x[:0], y[:0])], None, 'batch 0'),
    'a dict': ([(x, y), dict(x=x, y=y)], None, 'batch 1 is a dict: give a loss='),
    'inputs alone': ([x], None, r'batch 0 is no pair \(x, y\): it is a Tensor of 8'),
    'a tuple of one': ([(x, y), (x,)], None, r'batch 1 is no pair \(x, y\): it is a tuple of 1'),
    'None': ([None], None, 'batch 0 is no pair'),
    'an array of objects': ([(np.array([{}]*8), y)], None, 'batch 0: '),
    'nothing': ([], None, 'there are no batches in dl'),
    'NaN among the inputs': ([(x, y), (x*math.nan, y)], None, 'the loss of batch 1 is nan: such values are among the inputs already'),
    'infinity among the inputs': ([(x/0, y)], None, 'the loss of batch 0 is nan: such values are among the inputs already'),
    'NaN among the targets': ([(x, torch.full((8, 4), math.nan))], None, 'the loss of batch 0 is nan: such values are among the targets already'),
    'a loss that is NaN': ([(x, y)], lambda out, y: out.sum()*math.nan, 'the loss of batch 0 is nan: inputs, targets and outputs are finite'),
    'a loss that is infinite': ([(x, y)], lambda out, y: out.sum()/0, 'the loss of batch 0 is -?inf'),
    'no loss': ([(x, y)], lambda out, y: None, 'the loss of batch 0 is None, not a tensor'),
    'a float': ([(x, y)], lambda out, y: F.cross_entropy(out, y).item(), 'the loss of batch 0 is a float, not a tensor'),
    'a constant': ([(x, y)], lambda out, y: torch.ones(()), 'the loss of batch 0 is a constant'),
    'a detached loss': ([(x, y)], lambda out, y: F.cross_entropy(out, y).detach(), 'the loss of batch 0 is a constant'),
    'a loss of no influence': ([(x, y)], lambda out, y: 0*F.cross_entropy(out, y), 'every score is zero'),
    'a loss for each example': ([(x, y)], lambda out, y: F.cross_entropy(out, y, reduction='none'), r'not of size \(8,\): take its mean'),
    'a loss that fails': ([(x, y)], lambda out, y: out.nonsense, "the loss of batch 0: 'Tensor' object has no attribute 'nonsense'"),
    'a number': (7, None, r'dl must be an iterable of batches \(x, y\), not a int'),
    'a data set': (TensorDataset(x, y), None, 'dl is a dataset of examples'),
    'no data': (None, None, 'give batches of'),
}

@pytest.mark.parametrize('method', look)
@pytest.mark.parametrize('what', refused)
def test_data_and_losses_that_are_refused(what, method):
    (dl, loss, words), model = refused[what], unusual(build('plain'))
    before = snapshot(model)
    with warnings.catch_warnings(), pytest.raises((ValueError, TypeError, IndexError, RuntimeError, AttributeError), match=words):
        warnings.simplefilter('ignore')
        look[method](model, .3, (6,), dl, loss)
    assert_same(before, snapshot(model))

def test_errors_of_a_kind_of_their_own_keep_it_and_name_the_batch():
    class Broken(Exception): pass
    def loss(out, y): raise Broken('no')
    with pytest.raises(Broken, match='no') as caught: snip(build('plain'), .3, (6,), data(), loss=loss)
    assert caught.value.__notes__ == ['(in the loss of batch 0)']

@pytest.mark.filterwarnings('ignore:.*deprecated')
@pytest.mark.parametrize('method', look)
def test_scripted_and_traced_networks(method):
    plain = build('dropping')
    scripted, traced = torch.jit.script(build('dropping')), torch.jit.trace(build('dropping').eval(), torch.ones(2, 6))
    before = snapshot(scripted), snapshot(traced)
    assert look[method](scripted, .3, (6,), data()) == look[method](plain, .3, (6,), data())
    with pytest.raises(ValueError, match='torch.jit.trace has fixed the mode'): look[method](traced, .3, (6,), data())
    running = look[method](plain, .3, (6,), data(), batch_stats=False)
    for model in (scripted, traced): assert look[method](model, .3, (6,), data(), batch_stats=False) == running
    for old, model in zip(before, (scripted, traced)): assert_same(old, snapshot(model))

@pytest.mark.filterwarnings('ignore:.*deprecated')
def test_traced_networks_without_normalisation():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    traced = torch.jit.trace(model, torch.ones(2, 6))
    masks = snip(traced, .3, (6,), data())
    assert masks == snip(model, .3, (6,), data())
    before = [p.clone() for p in traced.parameters()]
    for put in masks.apply, masks.keep:
        with pytest.raises(ValueError, match='a network of torch.jit cannot remember masks'): put(traced)
    assert all(map(torch.equal, before, traced.parameters()))

@pytest.mark.parametrize('method', ['phew', 'synflow', 'snip', 'grasp', 'magnitude', 'ntk_sap', 'phew_act'])
def test_a_program_of_torch_export_is_pruned_like_its_network(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).eval()
    program = torch.export.export(model, (data()[0][0],), dynamic_shapes=({0: torch.export.Dim('n')},)).module()
    takes = inspect.signature(pruners[method]).parameters
    how = dict(dl=data()) if 'dl' in takes else {}
    if 'batch_stats' in takes:
        with pytest.raises(ValueError, match='torch.export has fixed the mode'): pruners[method](program, .3, (6,), **how)
        how |= dict(batch_stats=False)
    assert pruners[method](program, .3, (6,), **how).hash() == pruners[method](model, .3, (6,), **how).hash()

@pytest.mark.parametrize('method', look)
def test_networks_made_in_inference_mode(method):
    with torch.inference_mode(): made = build('plain')
    before = [(bits(p), p.requires_grad) for p in made.parameters()]
    for around in (nullcontext, torch.inference_mode):
        with around(), pytest.raises(ValueError, match="'hidden1.linear.weight' was made under torch.inference_mode()"):
            look[method](made, .3, (6,), data())
    assert all(torch.equal(bits(p), old) and p.requires_grad == flag for p, (old, flag) in zip(made.parameters(), before))
    assert look[method](copy.deepcopy(made), .3, (6,), data()) == look[method](build('plain'), .3, (6,), data())

def test_matrix_products_are_in_full_precision():
    model, before = build('plain'), torch.get_float32_matmul_precision()
    exact = snip(model, .3, (6,), data())
    try:
        torch.set_float32_matmul_precision('medium')
        assert snip(model, .3, (6,), data()) == exact and torch.get_float32_matmul_precision() == 'medium'
    finally: torch.set_float32_matmul_precision(before)

def test_compiled_and_wrapped_networks():
    model = build('plain')
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend='eager')):
        assert snip(wrapped, .3, trace(model, (6,)), data()) == snip(model, .3, (6,), data())

# --- several outputs, tied weights, several inputs -------------------------------------------------------------------------

def test_several_outputs():
    model = Two()
    with pytest.raises(TypeError, match='which of its outputs'): snip(model, .5, (6,), data())
    graph, first = trace(model, (6,)), lambda out, y: F.cross_entropy(out[0], y)
    for f in (snip, grasp):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            assert f(model, .5, graph, data(), loss=first).kept == round(.5*graph.total)
    scores = snip_scores(model, graph, data(), loss=first)
    assert (scores['two.weight'] == 0).all() and (scores['one.weight'] > 0).any()
    with pytest.warns(UserWarning, match='two.weight'): snip(model, .2, graph, data(), loss=first)

def test_several_inputs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(3, 4)
        def forward(self, x, z): return self.a(x) + self.b(z)
    model, dl = Sum(), [(x, x[:, :3], y) for x, y in data()]
    pairs = [((x, z), y) for x, z, y in dl]
    assert snip(model, .5, ((6,), (3,)), dl) == snip(model, .5, ((6,), (3,)), pairs)

@pytest.mark.parametrize('method', look)
def test_tied_weights_count_once(method):
    model = Shared()
    graph = trace(model, (6,))
    masks = run(method, model, .25, graph, data(classes=6))
    assert masks.kept == round(.25*graph.total) and graph.total == 72
    masks.check(model)

def test_snip_of_a_shared_weight_by_finite_differences():
    model, eps = Shared().double(), 1e-5
    graph, batch = trace(model, (6,)), [(x.double(), y) for x, y in data(8, 6)]
    scores = snip_scores(model, graph, batch)
    def loss_with(name, at, factor):
        with torch.no_grad():
            p = dict(model.named_parameters())[name]
            old = p[at].clone(); p[at] *= factor
            value = default_loss(model(batch[0][0]), batch[0][1]).item()
            p[at] = old
        return value
    for name in graph.params:
        for at in ((0, 0), (3, 2), (5, 5)):
            change = (loss_with(name, at, 1 + eps) - loss_with(name, at, 1 - eps))/(2*eps)
            assert scores[name][at].item() == pytest.approx(abs(change), rel=1e-5, abs=1e-10)

# --- GraSP ---------------------------------------------------------------------------------------------------------------

def explicit(model, graph, x, y, temperature):
    "Gradient and Hessian of all weights, in full."
    sizes = {n: p.shape for n, p in graph.params.items()}
    def loss(theta):
        parts = theta.split([math.prod(s) for s in sizes.values()])
        weights = {n: t.view(s) for t, (n, s) in zip(parts, sizes.items())}
        return default_loss(torch.func.functional_call(model, weights, x)/temperature, y)
    theta = torch.cat([p.detach().reshape(-1) for p in graph.params.values()])
    return torch.func.grad(loss)(theta), torch.func.hessian(loss)(theta), theta

@pytest.mark.parametrize('temperature', [None, 1, 5.])
@pytest.mark.parametrize('regression', [False, True])
def test_grasp_against_the_explicit_hessian(temperature, regression):
    model = mlp([6, 5, 4, 4], activation=nn.Tanh, seed=3).double()
    graph, dl = trace(model, (6,)), [(x.double(), y) for x, y in data()]
    if regression: dl = [(x, F.one_hot(y, 4).double()) for x, y in dl]
    x, y = (torch.cat(part) for part in zip(*dl))
    g, H, theta = explicit(model, graph, x, y, temperature or (1 if regression else 200))
    scores = torch.cat([s.reshape(-1) for s in grasp_scores(model, graph, dl, temperature=temperature).values()])
    torch.testing.assert_close(scores, H@g*theta, rtol=1e-9, atol=1e-14)

def test_grasp_of_a_masked_network_leaves_out_what_is_masked():
    model = mlp([6, 5, 4], activation=nn.Tanh, seed=3).double()
    graph, dl = trace(model, (6,)), [(x.double(), y) for x, y in data()]
    masks = random_pruning(model, .6, (6,)).apply(model)
    g, H, theta = explicit(model, graph, *(torch.cat(part) for part in zip(*dl)), 200)
    keep = torch.cat([m.reshape(-1) for m in masks.values()])
    scores = torch.cat([s.reshape(-1) for s in grasp_scores(model, graph, dl).values()])
    torch.testing.assert_close(scores, H@(g*keep)*theta, rtol=1e-9, atol=1e-14)

@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 19), max_size=4, unique=True))
def test_grasp_does_not_depend_on_the_split(cuts):
    model = mlp([6, 5, 4], activation=nn.Tanh, seed=3).double()
    graph, (x, y) = trace(model, (6,)), (torch.cat(part) for part in zip(*data()))
    edges = [0, *sorted(cuts), 20]
    split = [(x[a:b].double(), y[a:b]) for a, b in zip(edges, edges[1:])]
    whole = grasp_scores(model, graph, [(x.double(), y)])
    for name, s in grasp_scores(model, graph, split).items(): torch.testing.assert_close(s, whole[name], rtol=1e-8, atol=1e-16)

def test_grasp_with_attention():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.att, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 4)
        def forward(self, x): return self.head(self.att(*[x[:, None].expand(-1, 3, -1)]*3, need_weights=False)[0].mean(1))
    assert grasp(Attend(), .5, (6,), data()).kept > 0

def test_running_statistics_only_where_asked():
    model = build('plain')
    model.hidden1.norm.running_var.fill_(9.)
    a, b = (snip(model, .3, (6,), data(), batch_stats=stats) for stats in (True, False))
    model.hidden1.norm.running_var.fill_(1.)
    assert snip(model, .3, (6,), data()) == a and snip(model, .3, (6,), data(), batch_stats=False) != b

# --- masked networks -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('method', methods)
def test_masked_weights_are_never_kept_again(method):
    model = build('plain')
    first = random_pruning(model, .5, (6,), seed=5).keep(model)
    second = run(method, model, .2)
    assert second <= first and second.kept == round(.2*first.total) and Masks.of(model) == first
    with pytest.raises(ValueError, match='may be kept'): run(method, model, .6)

def test_masks_still_hold_in_training_after_scoring():
    model = build('plain').half()
    masks = random_pruning(model, .5, (6,)).keep(model)
    grasp(model, .2, (6,), data())
    opt = torch.optim.SGD(model.parameters(), .1, momentum=.9)
    for x, y in data():
        F.cross_entropy(model(x.half()), y).backward()
        opt.step()
    params = dict(model.named_parameters())
    for name, mask in masks.items(): assert (params[name][~mask] == 0).all() and (params[name].grad[~mask] == 0).all()

def test_layers_kept_dense_are_no_part_of_it():
    model = build('plain')
    graph = trace(model, (6,), keep_dense='head')
    for method in methods: assert list(run(method, model, .3, graph)) == ['hidden1.linear.weight']

# --- counts ----------------------------------------------------------------------------------------------------------------

@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.sampled_from([-2., 0., 0., .5, 1., 3.]), min_size=1, max_size=40), min_size=1, max_size=5), st.data())
def test_top_k_is_a_stable_sort(layers, draw):
    scores = {str(i): torch.tensor(s) for i, s in enumerate(layers)}
    flat = torch.cat(list(scores.values()))
    k = draw.draw(st.integers(1, len(flat)))
    kept = torch.cat(list(top_k(scores, k).values()))
    assert kept.nonzero()[:, 0].tolist() == flat.sort(descending=True, stable=True)[1][:k].sort()[0].tolist()
    by_layer = top_k(scores, k, 'layer')
    assert by_layer.kept == k
    for name, mask in by_layer.items(): assert mask.sum() == top_k({name: scores[name]}, int(mask.sum()))[name].sum() if mask.any() else True

@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.integers(0, 5), st.floats(0, 1))
def test_kth_largest_is_exact(seed, kind, where):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(150_000, generator=gen)
    x = [x, x.round(), x.abs()**9, x.sort()[0], torch.where(x > 1.5, x, 0.), torch.where(x > 0, -math.inf, x)][kind]
    k = 1 + int(where*(len(x) - 1))
    assert kth_largest(list(x.split(40_000)), k) == x.sort(descending=True)[0][k-1]

def test_more_scores_than_float32_can_count():
    scores = {'a': torch.zeros(2**24 + 5), 'b': torch.ones(2**24 + 7)}
    for k in (2**24 + 1, 2**24 + 7, 2**24 + 8, 2**25 + 1): assert top_k(scores, k).kept == k

@pytest.mark.parametrize('method', ['random', 'uniform', 'erk', 'magnitude'])
@pytest.mark.parametrize('density', [.001, .01, .1, .5, .9, .999, 1.])
def test_every_density_is_met_exactly(method, density):
    graph = trace(resnet20(10, width=.5, seed=0), (3, 32, 32))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert prune(graph, method, density).kept == round(density*graph.total)

def test_erk_never_empties_a_layer_while_there_is_a_weight_for_each():
    graph = trace(vgg19(10, width=.25, seed=0), (3, 32, 32))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert min(erk(graph, kept=len(graph.params)).layer_density().values()) > 0

def test_uniform_is_uniform():
    graph = trace(vgg19(10, width=.25, seed=0), (3, 32, 32))
    for name, part in uniform_pruning(graph, .1).layer_density().items():
        assert abs(part - .1)*graph.params[name].numel() <= 1

def test_random_is_uniform_over_all_weights():
    "Kept counts of a layer are within five standard deviations of their hypergeometric mean."
    graph = trace(resnet20(10, width=.5, seed=0), (3, 32, 32))
    masks, N = random_pruning(graph, .1, seed=7), graph.total
    for name, mask in masks.items():
        n, k = mask.numel(), masks.kept
        std = math.sqrt(n*k/N*(1 - k/N)*(N - n)/(N - 1))
        assert abs(int(mask.sum()) - n*k/N) < 5*std

def test_seeds():
    graph = trace(mlp([20, 30, 10]), (20,))
    assert random_pruning(graph, .2, seed=1) == random_pruning(graph, .2, seed=1) != random_pruning(graph, .2, seed=2)
    drawn = [random_pruning(graph, .2, seed=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert drawn[0] == drawn[1]

def test_masks_do_not_depend_on_memory_layout():
    a, b = resnet20(10, width=.25, seed=0), resnet20(10, width=.25, seed=0).to(memory_format=torch.channels_last)
    assert magnitude(a, .2, (3, 32, 32)) == magnitude(b, .2, (3, 32, 32))
    assert random_pruning(a, .2, (3, 32, 32)) == random_pruning(b, .2, (3, 32, 32))

def test_apportion_errors():
    with pytest.raises(ValueError, match='do not fit'): apportion(5, dict(a=1.), dict(a=4))

class Around(nn.Module):
    "A layer beside an identity shortcut, and one output."
    def __init__(self):
        super().__init__()
        self.stem, self.beside, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, x):
        h = torch.relu(self.stem(x))
        return self.head(h + torch.relu(self.beside(h)))

def test_a_layer_that_is_lost_beside_a_shortcut_is_said_and_a_single_row_is_not():
    graph = trace(Around(), (4,))
    dense = Masks.dense(graph.params)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert warned(dense, graph) is dense
    with pytest.warns(UserWarning, match='beside'): warned(Masks({**dense, 'beside.weight': torch.zeros(4, 4).bool()}), graph)

# --- a network that remembers masks ------------------------------------------------------------------------------------

@pytest.mark.filterwarnings('ignore:the masks cut', 'ignore:greedy')
@pytest.mark.parametrize('method', [m for m in pruners if m not in ('gmp', 'lottery')])
def test_every_method_says_that_masks_leave_no_choice(method):
    "Another seed gives the old masks: said at the caller's line; and more than the masks leave is refused."
    model, dl = mlp([6, 12, 12, 4], seed=0), data()
    given = dict(dl=dl) if about(method)['data'] else {}
    first = prune(model, method, .5, (6,), **given).apply(model)
    with pytest.warns(UserWarning, match='the model remembers masks') as caught: again = prune(model, method, .5, (6,), seed=1, **given)
    mine = [w for w in caught if 'remembers' in str(w.message)]
    assert mine and all(w.filename == __file__ for w in mine) and again.jaccard(first) > .9
    with pytest.raises(ValueError): prune(model, method, .8, (6,), **given)
    Masks.forget(model)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', 'the model remembers')
        prune(mlp([6, 12, 12, 4], seed=0), method, .8, (6,), seed=1, **given)
