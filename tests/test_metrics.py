"Metrics against lists of paths, hooks, finite differences, and what a network really computes."
import math

import pytest, torch
from hypothesis import given, settings, strategies as st
from torch import nn

from phew_nb.flow import linearised
from phew_nb.graph import trace
from phew_nb.masks import Masks
from phew_nb.metrics import (Table, compare, count_paths, data_jacobian, effective_density, flops, layer_densities,
                             list_paths, ntk, path_kernel, path_sum, path_trace, summary, tangents, widths)
from phew_nb.models import mlp, resnet20, vgg19

def random_masks(graph, density, seed):
    gen = torch.Generator().manual_seed(seed)
    return Masks({name: torch.rand(p.shape, generator=gen) < density for name, p in graph.params.items()})

class Net(nn.Module):
    "A convolution, an identity shortcut (or a layer called twice), a projection, a concatenation, groups."
    def __init__(self, shared=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.shared, self.stem, self.a = shared, nn.Conv2d(1, 2, 2, bias=False), nn.Conv2d(2, 2, 1, bias=False)
        self.b = self.a if shared else nn.Conv2d(2, 2, 1, groups=2, bias=False)
        self.c, self.short = nn.Conv2d(2, 2, 2, bias=False), nn.Conv2d(2, 2, 1, stride=2, bias=False)
        self.head = nn.Linear(4, 2, bias=False)
    def forward(self, x):
        x = self.stem(x).relu()
        x = self.a(x).relu() if self.shared else (x + self.a(x)).relu()
        y = self.b(x).relu()
        z = self.c(y) + self.short(x)
        return self.head(torch.cat([z.mean((2, 3)), y.mean((2, 3))], 1).relu())

size, seeds = (1, 3, 3), st.integers(0, 200)
examples = settings(max_examples=15, deadline=None)

@given(seeds, st.booleans(), st.booleans(), st.sampled_from([None, .6]))
@examples
def test_measures_agree_with_the_list_of_paths(seed, shared, skips, density):
    graph = trace(Net(shared, seed), size)
    masks = random_masks(graph, density, seed) if density else None
    paths = list_paths(graph, masks, skips=skips, most=10**5)
    assert count_paths(graph, masks, skips=skips) == len(paths)
    kernel_trace = paths.jacobian.square().sum()
    assert math.isclose(path_trace(graph, masks, skips=skips), kernel_trace, rel_tol=1e-9)
    for power in 1, 2:
        total = paths.products.abs().pow(power).sum()
        assert math.isclose(path_sum(graph, masks, skips=skips, power=power), total, rel_tol=1e-9)
    visited = set().union(*paths.units) if len(paths) else set()
    found = widths(graph, masks, skips=skips)
    first = {}
    for layer in graph.layers: first.setdefault(layer.name, layer)
    for name, layer in first.items(): assert found[name].live == len(visited & set(layer.dst.flatten().tolist()))
    used = {column for weights in paths.weights for column in weights}
    if skips: assert math.isclose(effective_density(graph, masks), len(used)/graph.total)

@given(seeds, st.booleans(), st.sampled_from([None, .7]))
@examples
def test_the_tangent_kernel_factors(seed, shared, density):
    model = Net(shared, seed)
    graph = trace(model, size)
    masks = random_masks(graph, density, seed) if density else None
    x = torch.randn(3, *size, generator=torch.Generator().manual_seed(seed))
    paths = list_paths(model, masks, size)
    J = data_jacobian(model, x, paths, masks)
    Theta = ntk(model, x, masks)
    assert torch.allclose(J @ path_kernel(paths) @ J.T, Theta, rtol=1e-10, atol=1e-13*float(Theta.abs().max() + 1))
    assert torch.allclose(J @ paths.jacobian, tangents(model, x, masks, graph.params), atol=1e-12)

@given(seeds, st.sampled_from([.3, .5]))
@examples
def test_weights_that_are_not_effective_have_no_effect(seed, density):
    model = Net(seed=seed).double()
    graph = trace(model, size)
    masks = random_masks(graph, density, seed)
    masks.apply(model)
    x = torch.randn(4, *size).double()
    before = model(x)
    shares = path_sum(model, masks, graph, power=0, skips=True, by='weight')
    effective = 0
    for name, p in graph.params.items():
        useful = shares[name].m > 0
        effective += int(useful.sum())
        p.data.masked_fill_(~useful, 0)
    assert torch.allclose(model(x), before, atol=1e-12)
    assert math.isclose(effective_density(graph, masks), effective/graph.total)

@pytest.mark.parametrize('sizes', [(3, 4, 2), (2, 5, 5, 3), (1, 1, 1, 1, 1)])
def test_dense_mlps(sizes):
    model = mlp(sizes, bias=False, seed=0)
    graph, depth = trace(model, sizes[:1]), len(sizes) - 1
    for p in graph.params.values(): p.data.fill_(2.)
    n = math.prod(sizes)
    assert count_paths(graph) == n and set(count_paths(graph, by='layer').values()) == {n}
    assert path_trace(graph) == n*depth*4.**(depth - 1)
    assert path_sum(graph) == n*2.**depth and path_sum(graph, power=2) == n*4.**depth
    by_weight = path_trace(graph, by='weight')
    for (i, o), part in zip(zip(sizes, sizes[1:]), by_weight.values()):
        assert torch.allclose(part.plain(), torch.full((o, i), n/(i*o)*4.**(depth - 1)).double())
    assert flops(graph) == graph.total == sum(i*o for i, o in zip(sizes, sizes[1:]))

def test_the_spatial_trace_is_a_sum_of_gradients():
    model = resnet20(10, seed=0)
    masks = random_masks(trace(model, (3, 32, 32)), .3, 0)
    net = linearised(model, 2, masks=masks)
    _, grads = net.gradients(*net.ones((3, 32, 32)))
    want = sum(float((grads[name]*mask).sum()) for name, mask in masks.items())
    assert math.isclose(path_trace(model, masks, (3, 32, 32), spatial=True), want, rel_tol=1e-9)

def test_the_spatial_trace_of_an_mlp_is_the_trace():
    model = mlp((4, 6, 5, 3), bias=False, seed=0)
    masks = random_masks(trace(model, (4,)), .6, 0)
    assert math.isclose(path_trace(model, masks, (4,)), path_trace(model, masks, (4,), spatial=True), rel_tol=1e-9)
    deep = mlp([8]*301, bias=False, seed=0)
    for p in deep.parameters(): p.data.mul_(10) # a trace beyond float64
    plain, spatial = path_trace(deep, input_size=(8,)), path_trace(deep, input_size=(8,), spatial=True)
    assert plain.log10 > 400 and math.isclose(plain.log10, spatial.log10, abs_tol=1e-8)

def test_a_zero_weight_is_a_way():
    "The derivative by a weight of zero is not zero, and no division shows."
    model = mlp((2, 2, 2), bias=False, seed=0)
    model.head.weight.data.zero_()
    graph = trace(model, (2,))
    listed = list_paths(graph)
    assert path_sum(graph) == 0 and count_paths(graph) == 8
    assert math.isclose(path_trace(graph), listed.jacobian.square().sum(), rel_tol=1e-12) and path_trace(graph) > 0

# ---- widths, densities, multiply-adds

def test_flops_by_hooks():
    "Multiply-adds of dense layers, counted by hooks."
    model, counted = resnet20(10, seed=0), []
    def hook(module, args, out):
        per_output = module.weight[0].numel()
        counted.append(out[0].numel()*per_output)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)): module.register_forward_hook(hook)
    graph = trace(model, (3, 32, 32))
    counted.clear()
    model.eval()(torch.zeros(1, 3, 32, 32))
    assert flops(graph) == sum(counted) and sum(flops(graph, by='layer').values()) == sum(counted)

def test_flops_of_masks():
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3*9, 2))
    masks = Masks({'0.weight': torch.zeros(3, 2, 2, 2).bool(), '3.weight': torch.ones(2, 27).bool()})
    masks['0.weight'][0, 0, 0, :] = True
    masks['0.weight'][2, 1, 1, 1] = True
    assert flops(model, masks, (2, 4, 4)) == 3*9 + 54 and flops(model, masks, (2, 4, 4), 'kernel') == 2*4*9 + 54
    assert flops(model, masks, (2, 4, 4), by='layer') == {'0.weight': 27, '3.weight': 54}

def test_widths_and_densities():
    graph = trace(mlp((2, 3, 2), bias=False, seed=0), (2,))
    masks = {'hidden1.linear.weight': torch.tensor([[1, 0], [0, 0], [0, 1]]).bool()}
    assert list(widths(graph, masks).values()) == [(3, 2, 2), (2, 2, 2)]
    masks['head.weight'] = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    assert list(widths(graph, masks).values()) == [(3, 2, 1), (2, 1, 1)]
    assert layer_densities(graph, masks) == {'hidden1.linear.weight': 1/3, 'head.weight': 1/3}
    assert effective_density(graph, masks) == 2/12

measures = [path_trace, path_sum, count_paths, widths, effective_density, flops, layer_densities, summary, list_paths]

@pytest.mark.parametrize('measure', measures)
def test_every_measure_takes_all_forms_and_refuses_other_masks(measure):
    model = mlp((3, 4, 2), seed=0)
    graph = trace(model, (3,))
    masks = random_masks(graph, .5, 0)
    text = lambda result: str(getattr(result, 'weights', result))
    want = text(measure(graph, masks))
    forms = [(model, masks, (3,)), (model, masks, graph), (graph, dict(masks))]
    assert all(text(measure(*form)) == want for form in forms)
    masks.apply(model)
    assert text(measure(model, input_size=(3,))) == want
    for name in 'other.weight', 'head.weight':
        with pytest.raises(ValueError, match='masks are of another model'): measure(graph, {name: torch.ones(2).bool()})

@pytest.mark.parametrize('layer', ['hidden1.linear.weight', 'head.weight'])
def test_an_empty_layer_gives_zero_paths(layer):
    model = mlp((3, 4, 2), bias=False, seed=0)
    masks = Masks.dense(trace(model, (3,)).params)
    masks[layer].fill_(False)
    assert count_paths(model, masks, (3,)) == 0 and path_trace(model, masks, (3,)).log10 == -math.inf
    assert path_trace(model, masks, (3,), spatial=True) == 0 and effective_density(model, masks, (3,)) == 0
    assert all(w.live == 0 for w in widths(model, masks, (3,)).values())
    assert len(list_paths(model, masks, (3,))) == 0 and path_kernel(model, masks, (3,)).shape == (0, 0)
    assert '-inf' in repr(summary(model, masks, (3,)))

def test_tables():
    table = Table(('name', 'n'), [('a', 10**6), ('b', 1e-9), ('c', 10**40)], 'title')
    assert repr(table).splitlines()[0] == 'title' and '1,000,000' in repr(table) and '10^40.0' in repr(table)
    assert '<td>1.00e-09</td>' in table._repr_html_()

def test_compare():
    graph = trace(mlp((3, 4, 2), seed=0), (3,))
    a, b = random_masks(graph, .5, 0), random_masks(graph, .5, 1)
    table = compare(a, b)
    assert table.rows[0][2] == 1 and table.rows[0][3] == a.jaccard(b)
    assert compare({'a': a, 'b': b}, how='overlap').rows[1][2] == b.overlap(a)
    with pytest.raises(ValueError, match='different tensors'): compare(a, Masks({'x': torch.ones(2).bool()}))
    with pytest.raises(ValueError, match="'jaccard' or 'overlap'"): compare(a, b, how='cosine')

# ---- the tangent kernel

def test_ntk_is_left_alone_and_matches_finite_differences():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).double().train()
    before, x = {k: v.clone() for k, v in model.state_dict().items()}, torch.randn(4, 3).double()
    J, step = tangents(model, x), 1e-6
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model.eval()
    start, columns = model(x).flatten(), []
    for p in model.parameters():
        for i in range(p.numel()):
            old = p.data.view(-1)[i].item()
            p.data.view(-1)[i] = old + step
            columns.append((model(x).flatten() - start)/step)
            p.data.view(-1)[i] = old
    assert torch.allclose(J, torch.stack(columns, 1), atol=1e-4)

def test_refusals():
    small, refused = mlp((10, 10, 10)), lambda text: pytest.raises(ValueError, match=text)
    with refused('paths, more than most=10,000; take a smaller network'): list_paths(vgg19(10), input_size=(3, 32, 32))
    with refused('1,000 paths, more than most=999'): path_kernel(small, input_size=(10,), most=999)
    with refused('not the sum over its paths'): data_jacobian(nn.Linear(2, 2), torch.randn(3, 2))
