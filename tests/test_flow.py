"Flows against every path written down, closed forms, automatic differentiation, and networks too deep for floats."
import math, pickle
from collections import Counter
from fractions import Fraction

import pytest, torch
from hypothesis import given, settings, strategies as st
from torch import nn

import phew_nb.flow as flow_module
from phew_nb.flow import Scaled, exact_count, exact_counts, linearised, path_flow
from phew_nb.graph import Layer, trace
from phew_nb.masks import Masks
from phew_nb.models import mlp
from phew_nb import report # adds `Masks.report` # noqa: F401

# ---- every path of a small graph, one by one, without any of the code that is tested

def links(graph, masks, skips):
    "For each unit the ways on: (next unit, weight's name and place, or None, its value)."
    ways = {unit: [] for unit in range(graph.n_units)}
    for node in graph.nodes:
        if not isinstance(node, Layer):
            for row, child, skip in zip(node.row.tolist(), node.child.tolist(), node.skip.tolist()):
                if skips or not skip: ways[child].append((int(node.dst[row]), None, 1.))
            continue
        values = node.weight()
        masked = masks is not None and node.name in masks
        kept = node.pick(masks[node.name]) if masked else torch.ones_like(values, dtype=torch.bool)
        for g, o, i, k in torch.cartesian_prod(*map(torch.arange, node.size)).tolist():
            if kept[g, o, i, k] and node.src[g, i] >= 0:
                place = int(node.index(*(torch.tensor(n) for n in (g, o, i, k))))
                ways[int(node.src[g, i])].append((int(node.dst[g, o]), (node.name, place), float(values[g, o, i, k])))
    return ways

def all_paths(graph, masks, skips):
    "Every path as its weights, [(name and place, value), ...]."
    ways, ends = links(graph, masks, skips), set(graph.outputs.tolist())
    found, todo = [], [(unit, ()) for unit in graph.inputs.tolist()]
    while todo:
        unit, path = todo.pop()
        if unit in ends: found.append(path)
        for to, weight, value in ways[unit]: todo.append((to, path + ((weight, value),) if weight else path))
    return found

def derivative(path, weight):
    "Of the path's product by one weight."
    times, value = Counter(w for w, _ in path)[weight], dict(path)[weight]
    return times*value**(times - 1)*math.prod(v for w, v in path if w != weight)

# ---- random networks

class Random(nn.Module):
    "Layers, forks, skips, gates, groups, concatenations and shared layers, in an order drawn from a list of kinds."
    def __init__(self, kinds, seed, n=2):
        super().__init__()
        torch.manual_seed(seed)
        self.kinds, self.shared = kinds, nn.Linear(n, n)
        self.stem = nn.Conv1d(n, n, 2)
        self.a = nn.ModuleList(nn.Linear(n, n) for _ in kinds)
        self.b = nn.ModuleList(nn.Linear(n + n*(kind == 'cat'), n) for kind in kinds)
        self.grouped, self.head = nn.Conv1d(n, n, 1, groups=2), nn.Linear(n, 2)

    def forward(self, x):
        x = self.stem(x)[..., 0]
        for kind, a, b in zip(self.kinds, self.a, self.b):
            y = a(x).relu()
            if kind == 'skip': x = x + y
            elif kind == 'fork': x = y + b(x)
            elif kind == 'gate': x = b(x)*y.sigmoid()
            elif kind == 'cat': x = b(torch.cat([x, y], 1))
            elif kind == 'shared': x = self.shared(y)
            elif kind == 'group': x = self.grouped(y[..., None])[..., 0]
            else: x = y
        return self.head(x)

kinds = st.lists(st.sampled_from('plain skip fork gate cat shared group'.split()), min_size=1, max_size=3)
examples = settings(max_examples=60, deadline=None)

def random_masks(graph, density, seed):
    gen = torch.Generator().manual_seed(seed)
    return {name: torch.rand(p.shape, generator=gen) < density for name, p in graph.params.items()}

def close(a, b): return math.isclose(float(a), float(b), rel_tol=1e-9, abs_tol=1e-300)

@given(kinds, st.integers(0, 99), st.sampled_from([None, .5, .8]), st.booleans(), st.booleans())
@examples
def test_flow_is_the_sum_over_every_path(kinds, seed, density, skips, zeros):
    model = Random(kinds, seed).double()
    graph = trace(model, (2, 2))
    if zeros: model.head.weight.data[0, 0] = 0
    masks = random_masks(graph, density, seed) if density else None
    paths = all_paths(graph, masks, skips)
    assert exact_count(graph, masks, skips) == len(paths)
    for power in 0, 1, 2:
        flow = path_flow(graph, masks, power, skips)
        products = [math.prod(abs(v)**power for _, v in path) for path in paths]
        assert close(flow.total, sum(products)) and close(flow.out[graph.inputs].sum(), sum(products))
        by_weight, by_layer = flow.by_weight(), flow.by_layer()
        for name, param in graph.params.items():
            places = [sum(p*sum(w == (name, place) for w, _ in path) for p, path in zip(products, paths))
                      for place in range(param.numel())]
            got = by_weight[name].plain().as_strided((param.numel(),), (1,))
            assert torch.allclose(got, torch.tensor(places, dtype=torch.float64), rtol=1e-9, atol=0)
            assert close(by_layer[name], sum(places))
            if not sum(products): continue
            shares = flow.shares()[name]*float(flow.total)
            assert torch.allclose(shares, by_weight[name].plain(), rtol=1e-9, atol=0)

@given(kinds, st.integers(0, 99), st.sampled_from([None, .6]), st.booleans(), st.booleans())
@examples
def test_trace_is_the_sum_of_squared_derivatives(kinds, seed, density, skips, zeros):
    model = Random(kinds, seed).double()
    graph = trace(model, (2, 2))
    if zeros: model.stem.weight.data[0, 0, 0] = 0
    masks = random_masks(graph, density, seed) if density else None
    want = Counter()
    for path in all_paths(graph, masks, skips):
        for weight in {w for w, _ in path}: want[weight] += derivative(path, weight)**2
    flow = path_flow(graph, masks, 2, skips)
    assert close(flow.trace(), sum(want.values()))
    by_weight, by_layer = flow.trace_by_weight(), flow.trace_by_layer()
    for name, param in graph.params.items():
        places = torch.tensor([want[name, place] for place in range(param.numel())], dtype=torch.float64)
        assert torch.allclose(by_weight[name].plain().as_strided((param.numel(),), (1,)), places, rtol=1e-9, atol=0)
        assert close(by_layer[name], places.sum())

@given(kinds, st.integers(0, 99), st.sampled_from([1, 2]))
@examples
def test_the_linearised_network_is_the_flow_where_there_are_no_pixels(kinds, seed, power):
    model = Random(kinds, seed).double()
    graph = trace(model, (2, 2))
    flow, x = path_flow(graph, power=power, skips=True), torch.ones(1, 2, 2)
    for balanced in None, graph:
        net = linearised(model, power, graph=balanced)
        value, grads = net.gradients(x)
        assert close(value*2.**net.shift, flow.total)
        shares = flow.shares()
        for name in graph.params:
            assert torch.allclose(net.weights[name]*grads[name]/value, shares[name], rtol=1e-9, atol=0)

@given(kinds, st.integers(0, 99), st.sampled_from([.3, .5]), st.booleans())
@examples
def test_report_counts_what_is_on_no_path(kinds, seed, density, skips):
    graph = trace(Random(kinds, seed), (2, 2))
    masks = Masks(random_masks(graph, density, seed))
    paths = all_paths(graph, masks, skips)
    used = {w for path in paths for w, _ in path}
    report = masks.report(graph, skips)
    for name, mask in masks.items():
        kept = [(name, place) for place, keep in enumerate(mask.as_strided((mask.numel(),), (1,)).tolist()) if keep]
        assert report.lost.get(name, 0) == sum(w not in used for w in kept)
        assert (name in report.empty) == (not kept)
    assert report.connected == bool(paths)

# ---- closed forms

@given(st.lists(st.integers(1, 6), min_size=2, max_size=6))
@examples
def test_dense_mlps(sizes):
    graph = trace(mlp(sizes, bias=False, seed=0), (sizes[0],))
    assert exact_count(graph) == math.prod(sizes)
    assert set(exact_counts(graph).values()) == {math.prod(sizes)}
    for param in graph.params.values(): param.data.fill_(.5)
    depth = len(sizes) - 1
    assert close(path_flow(graph).total, math.prod(sizes)*.5**depth)
    assert close(path_flow(graph, power=2).trace(), math.prod(sizes)*depth*.25**(depth - 1))

def test_kernels_count_their_weights():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, (1, 2)), nn.Flatten(), nn.Linear(4*2*1, 5))
    assert exact_count(trace(model, (2, 4, 4))) == 2*9*3*2*4*2*5 # both slots of a channel are ways into the last layer

# ---- any size of number

@pytest.mark.parametrize('value', [1e-30, 1., 1e30])
def test_hundreds_of_layers(value):
    model = mlp([10]*401, bias=False, seed=0)
    for p in model.parameters(): p.data.fill_(value)
    graph = trace(model, (10,))
    value = next(model.parameters())[0, 0].item()
    for power in 0, 1, 2:
        flow = path_flow(graph, power=power)
        want = 401 + 400*power*math.log10(value)
        assert math.isclose(flow.total.log10, want, rel_tol=1e-12, abs_tol=1e-9)
        for name, share in flow.shares().items(): assert torch.allclose(share, torch.full_like(share, 1/100), rtol=1e-9)
    want = 401 + math.log10(400) + 399*2*math.log10(value)
    assert math.isclose(path_flow(graph, power=2).trace().log10, want, rel_tol=1e-12, abs_tol=1e-9)
    assert exact_count(graph) == 10**401

def test_ways_of_very_different_size_in_one_layer():
    "A masked row that reads only the small one of two inputs must not lose it."
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.long = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(40))
            self.last = nn.Linear(2, 2, bias=False)
        def forward(self, x):
            y = x
            for layer in self.long: y = layer(y)
            return self.last(torch.cat([x, y], 1))
    model = Two()
    for p in model.parameters(): p.data.fill_(1e-20)
    graph = trace(model, (1,))
    masks = {'last.weight': torch.tensor([[1, 0], [0, 1]]).bool()}
    flow = path_flow(graph, masks)
    small, big = sorted(flow.into[graph.outputs].log10.tolist())
    assert math.isclose(big, -20, abs_tol=1e-5) and math.isclose(small, -820, abs_tol=1e-3)
    assert math.isclose(flow.gradient()['long.0.weight'].log10.item(), -800, abs_tol=1e-3)

@pytest.mark.parametrize('scale', [1e-300, 1e-160, 1e160, 1e300])
def test_double_precision_weights_at_the_edge(scale):
    model = mlp([2, 3, 2], bias=False, seed=0).double()
    want = {power: path_flow(trace(model, (2,)), power=power).total.log10 for power in (1, 2)}
    for p in model.parameters(): p.data.mul_(scale)
    for power in 1, 2:
        got = path_flow(trace(model, (2,)), power=power).total.log10
        assert math.isclose(got, want[power] + 2*power*math.log10(scale), rel_tol=1e-11)

numbers = st.floats(0, 1e300, allow_subnormal=False)

@given(st.lists(numbers, min_size=1, max_size=5), st.integers(-10**6, 10**6))
def test_scaled_arithmetic(values, e):
    values = [v if v > 1e-290 else 0. for v in values]
    x = Scaled.of(torch.tensor(values, dtype=torch.float64), e)
    exact, back = [Fraction(v) for v in values], Scaled.of(1., -e)
    total, square = x.sum()*back, (x*x)*back*back
    if total > 0: assert math.isclose(total.log10, math.log10(sum(exact)), abs_tol=1e-12, rel_tol=1e-12)
    for got, v in zip(square.log10.tolist(), values):
        want = 2*math.log10(v) if v else -math.inf
        assert got == want or math.isclose(got, want, rel_tol=1e-12, abs_tol=1e-12)
    assert [a < b for a in x for b in x] == [a < b for a in values for b in values]
    assert pickle.loads(pickle.dumps(total)) == total

# ---- other kinds of model

class Tied(nn.Module):
    "One weight used as it is and transposed, on one path."
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 2))
    def forward(self, x): return nn.functional.linear(nn.functional.linear(x, self.w).relu(), self.w.t())

odd = {'tied': (Tied(), (2,)),
       'weight norm': (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)), (3,)),
       'transposed': (nn.Sequential(nn.ConvTranspose1d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(12, 2)), (2, 2)),
       'channels last': (nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.Flatten(),
                                       nn.Linear(3, 2)), (2, 2, 2))}

@pytest.mark.parametrize('model, size', odd.values(), ids=odd.keys())
def test_odd_layers(model, size):
    graph = trace(model.double(), size)
    paths, want = all_paths(graph, None, False), Counter()
    for path in paths:
        for weight in {w for w, _ in path}: want[weight] += derivative(path, weight)**2
    flow = path_flow(graph, power=2)
    assert exact_count(graph) == len(paths) and close(flow.trace(), sum(want.values()))
    for name, part in flow.trace_by_weight().items():
        flat = part.plain().as_strided((part.m.numel(),), (1,))
        assert all(close(flat[place], want[name, place]) for place in range(len(flat)))

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precisions(dtype):
    model = mlp([3, 4, 2], seed=0).to(dtype)
    flow = path_flow(trace(model, (3,)), power=2)
    same = path_flow(trace(model.double(), (3,)), power=2)
    assert close(flow.total, same.total) and close(flow.trace(), same.trace())

def test_frozen_and_kept_dense():
    model = mlp([3, 4, 4, 2], seed=0).requires_grad_(False)
    graph = trace(model, (3,), keep_dense='head')
    assert 'head.weight' not in graph.params and exact_count(graph) == 3*4*4*2
    assert path_flow(graph, power=2).trace() == path_flow(trace(model, (3,)), power=2).trace()
    assert exact_count(graph, {'head.weight': torch.zeros(2, 4).bool()}) == 0

# ---- the linearised network

def test_averages_are_squared():
    x = torch.rand(1, 2, 7, 6).double()
    for pool in (nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False),
                 nn.AvgPool2d(2, ceil_mode=True), nn.AvgPool2d(2, divisor_override=3), nn.AdaptiveAvgPool2d((3, 4)),
                 nn.AdaptiveAvgPool2d(1)):
        table = torch.autograd.functional.jacobian(lambda x: pool(x).flatten(), x).flatten(1)
        net = linearised(nn.Sequential(pool, nn.Conv2d(2, 2, 1)), 2)
        net.weights['1.weight'].data.copy_(torch.eye(2)[..., None, None])
        assert torch.allclose(net(x).flatten(), table**2 @ (x**2).flatten(), rtol=1e-12)

def test_average_in_one_and_three_dimensions():
    for pool, shape in ((nn.AvgPool1d(2), (1, 1, 5)), (nn.AvgPool1d(3, 2, 1), (1, 1, 6)),
                        (nn.AvgPool3d(2), (1, 1, 4, 4, 4)), (nn.AdaptiveAvgPool1d(2), (1, 1, 5))):
        x = torch.rand(shape).double()
        table = torch.autograd.functional.jacobian(lambda x: pool(x).flatten(), x).flatten(1)
        conv = nn.Conv1d if len(shape) == 3 else nn.Conv3d
        net = linearised(nn.Sequential(pool, conv(1, 1, 1)), 2)
        net.weights['1.weight'].data.fill_(1)
        assert torch.allclose(net(x).flatten(), table**2 @ (x**2).flatten(), rtol=1e-12)

NETS = dict.fromkeys("""alexnet vgg11_bn resnet18 resnext50_32x4d densenet121 mobilenet_v2 mobilenet_v3_small efficientnet_b0
    shufflenet_v2_x0_5 squeezenet1_1 mnasnet0_5 regnet_y_400mf convnext_tiny swin_t swin_v2_t""".split(), 64) | dict(maxvit_t=224)

@pytest.mark.parametrize('name', NETS)
def test_linearised_models_are_homogeneous_and_conserve(name):
    "Doubling the input doubles the output; the weights of the first and the last layer each carry the whole sum."
    import torchvision
    torch.manual_seed(0)
    model, size = getattr(torchvision.models, name)(weights=None), (3, NETS[name], NETS[name])
    graph, before = trace(model, size), {k: v.clone() for k, v in model.state_dict().items()}
    net = linearised(model)
    x = net.ones(size)
    value, grads = net.gradients(*x)
    assert close(net.total(*(2*t for t in x)), 2*value)
    for layer in graph.layers[0], graph.layers[-1]:
        assert close((net.weights[layer.name]*grads[layer.name]).sum(), value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and model.training
    assert all(p.grad is None for p in model.parameters())

def test_attention_is_a_sum_of_its_ways():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = linearised(layer)
    x = torch.rand(1, 3, 8)
    value, grads = net.gradients(x)
    assert close(net.total(2*x), 2*value)
    assert grads['self_attn.in_proj_weight'].any() and grads['linear1.weight'].any()

def test_what_has_no_linear_version_is_refused():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 3)
        def forward(self, x): return torch.fft.rfft(self.fc(x)).abs()
    with pytest.raises(ValueError, match="'aten._fft_r2c.default' has no linear version; use spatial=False"):
        linearised(Spectral())(torch.ones(4, 2))

def test_recurrent_layers():
    "A cell by hand, in sums: of the gates all four, of the state before."
    lstm = nn.LSTM(2, 3).double()
    w, u = lstm.weight_ih_l0.detach().abs(), lstm.weight_hh_l0.detach().abs()
    h, c, outs = torch.zeros(1, 3).double(), None, []
    for x in torch.ones(4, 1, 2).double():
        i, f, g, o = (x @ w.T + h @ u.T).chunk(4, 1)
        c = i + g + (0 if c is None else f + c) # (the first state is a constant of zeros, which scales its gate)
        h = o + c
        outs.append(h)
    torch.testing.assert_close(linearised(lstm)(torch.ones(4, 1, 2))[0].detach(), torch.stack(outs))

def test_masks_are_taken_from_the_model():
    model = mlp([3, 4, 2], seed=0)
    graph = trace(model, (3,))
    masks = Masks(random_masks(graph, .5, 1))
    given_masks = linearised(model, masks=masks).total(torch.ones(1, 3))
    masks.apply(model)
    assert close(linearised(model).total(torch.ones(1, 3)), given_masks)
    assert close(given_masks, path_flow(graph, masks).total)
    with pytest.raises(ValueError, match='of another model'): linearised(model, masks={'x': torch.ones(2).bool()})

class Unrolled(torch.nn.Module):
    "A recurrent cell that runs by hand; without biases, and with what lets every path pass."
    def __init__(self, steps, hidden):
        super().__init__()
        self.steps, linear = steps, lambda *size: torch.nn.Linear(*size, bias=False, dtype=torch.float64)
        self.read, self.cell, self.out = linear(2, hidden), linear(hidden, hidden), linear(hidden, 2)
    def forward(self, x):
        h = self.read(x[:, 0])
        for t in range(1, self.steps): h = torch.tanh(self.read(x[:, t]) + self.cell(h))
        return self.out(h)

def products(read, cell, out, steps):
    "The product of each path: from an input of a step, by the hidden units of it and of all later ones, to an output."
    found, ways = [], read.T
    for _ in range(steps):
        found.append((ways[..., None]*out.T).flatten())
        ways = ways[..., None]*cell.T
    return torch.cat(found)

@pytest.mark.parametrize('columns', [None, 1, 4])
def test_a_cell_that_runs_many_times_has_the_trace_of_all_its_paths(columns, monkeypatch):
    "Against the derivatives of all products; however many units are followed at a time."
    torch.manual_seed(0)
    model = Unrolled(4, 3)
    graph = trace(model, (4, 2))
    if columns: monkeypatch.setattr(flow_module, '_at_once', columns*graph.n_units)
    weights = tuple(p.detach() for p in (model.read.weight, model.cell.weight, model.out.weight))
    slopes = torch.autograd.functional.jacobian(lambda *w: products(*w, 4), weights, vectorize=True)
    parts = path_flow(graph, power=2).trace_by_weight()
    for name, slope in zip(('read.weight', 'cell.weight', 'out.weight'), slopes):
        torch.testing.assert_close(parts[name].plain(), slope.square().sum(0), rtol=1e-12, atol=0)

def test_uses_of_a_weight_are_followed_together(monkeypatch):
    "The nodes that are passed grow as the uses do, and not as their pairs."
    passed, carry = [], flow_module.carry
    def counted(nodes, *args, **kwargs):
        passed[-1] += len(nodes)
        return carry(nodes, *args, **kwargs)
    monkeypatch.setattr(flow_module, 'carry', counted)
    for steps in 10, 20:
        passed.append(0)
        path_flow(trace(Unrolled(steps, 3), (steps, 2)), power=2).trace()
    assert passed[1] < 2.5*passed[0]
