"Across the layers: random networks, methods, densities and seeds; and the same round two hundred times."
import gc, os, tempfile
from copy import deepcopy
from pathlib import Path

import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from phew_nb.graph import trace
from phew_nb.masks import Masks
from phew_nb.models import init_weights, mlp
from phew_nb.pruners import prune
from phew_nb.walks import walk_order

class Residual(nn.Module):
    "Convolutions with identity or projection shortcuts, and a branch beside them."
    def __init__(self, width, blocks, n_out, project):
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)) for _ in range(blocks))
        self.short = nn.ModuleList(nn.Conv2d(width, width, 1) if project else nn.Identity() for _ in range(blocks))
        self.head = nn.Linear(width, n_out)
    def forward(self, x):
        x = self.stem(x).relu()
        for block, short in zip(self.blocks, self.short): x = (block(x) + short(x)).relu()
        return self.head(x.mean((2, 3)))

class Branching(nn.Module):
    "Two ways of different depth whose outputs stand side by side."
    def __init__(self, width, n_out, groups):
        super().__init__()
        self.short = nn.Conv2d(2, width, 1)
        self.long = nn.Sequential(nn.Conv2d(2, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, groups=groups))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(2*width*16, n_out))
    def forward(self, x): return self.head(torch.cat([self.short(x), self.long(x).relu()], 1))

@st.composite
def networks(draw):
    "A small network with its input size."
    kind, seed = draw(st.sampled_from(['mlp', 'conv', 'residual', 'branching'])), draw(st.integers(0, 999))
    width, n_out = 2*draw(st.integers(2, 4)), draw(st.integers(2, 4))
    if kind == 'mlp':
        sizes = [draw(st.integers(2, 9)), *draw(st.lists(st.integers(3, 9), min_size=1, max_size=3)), n_out]
        return mlp(sizes, bn=draw(st.booleans()), seed=seed), (sizes[0],)
    if kind == 'conv':
        make = nn.Sequential(nn.Conv2d(2, width, 3, padding=1, stride=draw(st.integers(1, 2))), nn.ReLU(), nn.MaxPool2d(2),
                             nn.Conv2d(width, width, 1, groups=draw(st.sampled_from([1, 2]))), nn.ReLU(), nn.Flatten(), nn.LazyLinear(n_out))
        make(torch.zeros(1, 2, 4, 4))
    elif kind == 'residual': make = Residual(width, draw(st.integers(1, 3)), n_out, draw(st.booleans()))
    else: make = Branching(width, n_out, draw(st.sampled_from([1, 2])))
    return init_weights(make, seed=seed), (2, 4, 4)

whole_paths = {'phew': {}, 'phew_kernel': dict(granularity='kernel'), 'phew_uniform': dict(power=0), 'phew_squared': dict(power=2)}
counted = ['random', 'erk', 'magnitude', 'synflow', 'snip']

def state(model): return {name: t.clone() for name, t in model.state_dict().items()}

def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

def chosen(model, size, method, density, seed):
    x, rng = torch.randn(4, *size, generator=torch.Generator().manual_seed(0)), torch.get_rng_state()
    before = state(model)
    masks = prune(model, method, density, input_size=size, dl=[(x, torch.tensor([0, 1, 0, 1]))], loss=nn.functional.cross_entropy, seed=seed)
    assert same(before, state(model)) and torch.equal(rng, torch.get_rng_state()) # as they were
    assert not [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) if h]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    return masks

@settings(max_examples=20)
@given(networks(), st.sampled_from([*whole_paths, *counted]), st.floats(.1, .5), st.integers(0, 2**40))
def test_any_method_on_any_network(network, method, density, seed):
    (model, size), device = network, 'cpu'
    graph, masks = trace(model, size), chosen(model, size, method, density, seed)
    wanted = max(1, round(density*graph.total))
    assert masks.total == graph.total and masks == chosen(model, size, method, density, seed)
    if method in counted: assert masks.kept == wanted
    else:
        longest = len(graph.layers)*(9 if method == 'phew_kernel' else 1)
        assert wanted <= masks.kept < wanted + longest # less than one walk more
        report = masks.report(graph)
        live = graph.live(masks)
        for layer in graph.layers: # every kept weight is on a kept path
            kept = layer.pick(masks[layer.name]).any(-1)
            assert (live[layer.dst][:, :, None] & live[layer.src][:, None])[kept].all(), report
        order = walk_order(model, density, size, seed=seed, **whole_paths[method])
        assert order.masks(density) == masks
        smaller = order.masks(density/2)
        assert smaller <= masks and smaller == chosen(model, size, method, density/2, seed)
    check_round(model, masks, torch.randn(2, *size))

def check_round(model, masks, x):
    "Masks in a file are the same bits; applied, they zero the rest and nothing else; undone, the model is as it was."
    with tempfile.TemporaryDirectory() as folder:
        again = Masks.load(masks.save(Path(folder)/'m.safetensors'))
        assert again == masks and again.hash() == masks.hash() and list(again) and set(again) == set(masks)
    before, other = state(model), deepcopy(model)
    masks.apply(other)
    for name, p in other.named_parameters():
        assert torch.equal(p, before[name]*masks[name] if name in masks else before[name])
    assert Masks.of(other) == masks and same(before, state(model))
    Masks.forget(other)
    other.load_state_dict(before)
    assert same(before, state(other)) and Masks.of(other) is None
    assert torch.equal(other.eval()(x), deepcopy(model).eval()(x))

def held():
    "What a process holds: open files, bytes in memory, tensors."
    gc.collect()
    pages = int(Path('/proc/self/statm').read_text().split()[1]) if Path('/proc/self/statm').exists() else 0
    files = len(os.listdir('/proc/self/fd')) if Path('/proc/self/fd').exists() else 0
    return files, pages*os.sysconf('SC_PAGE_SIZE'), sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

def one_round(model, before, folder, seed):
    "Prune, train a step, save, load; and the model as it was."
    masks = prune(model, ('phew', 'erk', 'magnitude')[seed % 3], .2, input_size=(12,), seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    masks.keep(model, optimizer)
    model(torch.randn(8, 12)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    for name, mask in masks.items(): assert not model.get_parameter(name)[~mask].any()
    torch.save(model.state_dict(), folder/'model.pt')
    assert Masks.load(masks.save(folder/'masks.safetensors')) == masks
    Masks.forget(model)
    model.load_state_dict(torch.load(folder/'model.pt')); model.load_state_dict(before)

def test_two_hundred_rounds_leave_nothing_behind(tmp_path):
    model = mlp((12, 20, 20, 4), seed=0)
    before = state(model)
    for seed in range(20): one_round(model, before, tmp_path, seed)
    files, memory, tensors = held()
    for seed in range(20, 200): one_round(model, before, tmp_path, seed)
    more_files, more_memory, more_tensors = held()
    assert more_files <= files and more_tensors <= tensors + 10
    assert more_memory < memory + 30*2**20, f'{(more_memory - memory)/2**20:.0f} MB more'
    assert not [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks) if h]
    assert same(before, state(model)) and len(list(tmp_path.iterdir())) == 2
