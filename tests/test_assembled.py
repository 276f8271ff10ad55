"Weights that a network puts together itself: of several parameters, among zeros, or each at several places."
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest, torch, torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.nn.utils import parametrize

from awkward import Fn
from phew_nb.baselines import px
from phew_nb.flow import path_flow
from phew_nb.graph import TraceError, trace
from phew_nb.linearised import linearised
from phew_nb.metrics import count_paths, list_paths, path_trace
from phew_nb.rewire import widen
from phew_nb.synflow import synflow, synflow_l2
from phew_nb.walks import phew

def parameter(*size): return nn.Parameter(torch.randn(size))

def put_at(where, values):
    new = torch.zeros(6, 6)
    new[where] = values
    return new

places = torch.randperm(36, generator=torch.Generator().manual_seed(1))[:14]
rows, columns = places//6, places % 6
upper = torch.ones(6, 6).triu().bool()
half = dict(w=(3, 6), v=(3, 6))
ways = dict( # name -> (sizes of the parameters, what is made of them)
    rows=(half, lambda s: torch.cat([s.w, s.v])), columns=(dict(w=(6, 2), v=(6, 4)), lambda s: torch.cat([s.w, s.v], 1)),
    mixed=(dict(w=(3, 6), v=(6, 3)), lambda s: torch.cat([s.w, s.v.t()])), stacked=(half, lambda s: torch.stack([s.w, s.v], 1).view(6, 6)),
    blocks=(dict(w=(2, 3), v=(4, 3)), lambda s: torch.block_diag(s.w, s.v)), one_block=(dict(w=(4, 4)), lambda s: F.pad(s.w, (1, 1, 0, 2))),
    filled=(dict(w=(6, 3)), lambda s: put_at((slice(None), slice(0, 6, 2)), s.w)), listed=(dict(w=(14,)), lambda s: put_at((rows, columns), s.w)),
    index_put=(dict(w=(14,)), lambda s: torch.zeros(6, 6).index_put((rows, columns), s.w)), scatter=(dict(w=(14,)), lambda s: torch.zeros(36).scatter(0, places, s.w).view(6, 6)),
    permuted=(dict(w=(6, 6)), lambda s: torch.zeros(6, 6).scatter(1, torch.stack([torch.arange(6).roll(i) for i in range(6)]), s.w)),
    masked_fill=(dict(w=(21,)), lambda s: torch.zeros(6, 6).masked_scatter(upper, s.w)),
    symmetric=(dict(w=(6, 6)), lambda s: s.w.triu() + s.w.triu(1).t()), skew=(dict(w=(6, 6)), lambda s: s.w.triu(1) - s.w.triu(1).t()),
    symmetric_where=(dict(w=(6, 6)), lambda s: torch.where(upper, s.w, s.w.t())), two_triangles=(dict(w=(6, 6), v=(6, 6)), lambda s: s.w.triu() + s.v.tril(-1)),
    padded=(dict(w=(3, 6), v=(2, 6)), lambda s: F.pad(s.w, (0, 0, 0, 3)) + F.pad(s.v, (0, 0, 4, 0))), tile=(dict(w=(3, 2)), lambda s: s.w.repeat(2, 3)),
    circulant=(dict(w=(6,)), lambda s: torch.stack([s.w.roll(i) for i in range(6)])), toeplitz=(dict(w=(11,)), lambda s: s.w.unfold(0, 6, 1)),
    scaled=(half, lambda s: 3*torch.cat([s.w, 2*s.v])/7), masked=(half, lambda s: torch.cat([s.w, s.v])*upper),
    of_parts=(dict(w=(6, 6)), lambda s: torch.cat([s.w[:2].flip(0), torch.zeros(1, 6), s.w[3:]])), selected=(dict(w=(6, 6)), lambda s: s.w.index_select(0, torch.tensor([0, 0, 1, 4, 4, 5]))))

def network(make, sizes):
    torch.manual_seed(0)
    return Fn(lambda s, x: s.o(F.linear(x, make(s)).tanh()), o=nn.Linear(6, 2), **{name: parameter(*size) for name, size in sizes.items()})

def depends(model, make):
    "(36, weights) boolean: which entry of what `make` gives depends on which weight; by derivatives."
    names = [name for name, _ in model.named_parameters() if not name.startswith('o.')]
    def made(*values):
        stand_in = Fn(lambda s: make(s))
        for name, value in zip(names, values): setattr(stand_in, name, value)
        return make(stand_in)
    values = tuple(dict(model.named_parameters())[name].detach() for name in names)
    jacobian = torch.autograd.functional.jacobian(made, values)
    return names, torch.cat([j.reshape(36, -1) for j in jacobian], 1) != 0, made(*values)

def check(model, make, power):
    "The sum over the paths through each weight, written out by the matrix; by the graph and by the linear network."
    names, on, matrix = depends(model, make)
    graph, edges = trace(model, (6,)), (model.o.weight.abs()**power).sum(0)[:, None]*matrix.abs()**power
    assert not (on.sum(1) > 1).any()
    wanted = on.double().t() @ edges.detach().double().flatten()
    found = path_flow(graph, power=power).by_weight()
    sums = [found[name].plain().flatten() if name in found else torch.zeros(p.numel()) for name, p in model.named_parameters() if name in names]
    assert torch.allclose(torch.cat(sums).double(), wanted)
    net = linearised(model, power)
    total, grads = net.gradients(*net.ones((6,)))
    assert torch.allclose(total, edges.sum().double())
    assert torch.allclose(torch.cat([(grads[name]*net.weights[name].detach()).flatten() for name in names]), wanted)
    return graph, on

@pytest.mark.parametrize('sizes, make', ways.values(), ids=ways)
def test_weights_that_are_put_together(sizes, make):
    model = network(make, sizes)
    for power in 1, 2: graph, on = check(model, make, power)
    assert count_paths(graph) == 2*int(on.sum()) == len(list_paths(graph).weights)
    assert set(graph.params) == {*sizes, 'o.weight'}
    masks, before = phew(graph, .5, seed=1), {name: p.detach().clone() for name, p in model.named_parameters()}
    assert not masks.report(graph).lost and 0 <= masks.kept - round(.5*graph.total) < 2 # (a walk keeps two)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

@pytest.mark.parametrize('method', [synflow, synflow_l2])
@pytest.mark.parametrize('sizes, make', ways.values(), ids=ways)
def test_synflow_is_the_same_by_pixels_and_by_paths(sizes, make, method):
    "There is one pixel: both are the same sum."
    model = network(make, sizes)
    assert method(model, .4, (6,), spatial=True, iterations=5) == method(model, .4, (6,), spatial=False, iterations=5)

@pytest.mark.parametrize('sizes, make', ways.values(), ids=ways)
def test_masks_hold_in_what_is_made_of_the_weights(sizes, make):
    "The sum over the paths of a masked network is that of the network whose weights have been set to zero."
    model = network(make, sizes)
    masks = phew(graph := trace(model, (6,)), .5, seed=2)
    masked = [path_flow(graph, masks, power).total for power in (1, 2)]
    masks.apply(model)
    for power, total in zip((1, 2), masked): assert torch.isclose(total.plain(), path_flow(trace(model, (6,)), None, power).total.plain())

@pytest.mark.parametrize('first, then', [(lambda s: s.w.triu(), lambda s: s.w.tril()), (lambda s: s.w.triu() + s.v.tril(-1), lambda s: s.w.tril() + s.v.triu(1)),
                                         (lambda s: F.pad(s.w[:4], (0, 0, 0, 2)), lambda s: torch.cat([s.v[:3], s.w[3:]])), (lambda s: s.w.triu() + s.w.triu(1).t(), lambda s: s.w)])
def test_the_trace_where_a_weight_is_used_twice(first, then):
    "Against the list of all paths; zeros lie elsewhere each time."
    torch.manual_seed(0)
    model = Fn(lambda s, x: s.o(F.linear(s.m(F.linear(x, first(s)).tanh()).tanh(), then(s)).tanh()), w=parameter(6, 6), v=parameter(6, 6), m=nn.Linear(6, 6), o=nn.Linear(6, 2))
    graph = trace(model, (6,))
    assert torch.isclose(path_trace(graph).plain(), (list_paths(graph).jacobian**2).sum())

steps = [lambda w, v: w.triu() + w.triu(1).t(), lambda w, v: w.triu() + v.tril(-1), lambda w, v: torch.cat([w[:3], v[3:]]), lambda w, v: torch.cat([v[:, 4:], w[:, :4]], 1),
         lambda w, v: torch.block_diag(w[:2, :2], v[2:, 2:]), lambda w, v: F.pad(w[1:5, 1:5], (1, 1, 1, 1)), lambda w, v: put_at((rows, columns), v.flatten()[:14]),
         lambda w, v: torch.where(upper, w, v), lambda w, v: w.flip(0), lambda w, v: w.t(), lambda w, v: w*upper, lambda w, v: w.masked_fill(~upper, 0), lambda w, v: -2*w,
         lambda w, v: w + v, lambda w, v: w.tril(-1) - v.t().triu(), lambda w, v: w.clone().index_put((rows, columns), v.reshape(-1)[:14]), lambda w, v: w.repeat(2, 1)[1:7],
         lambda w, v: w.clone().fill_diagonal_(0), lambda w, v: w.roll(1, 1), lambda w, v: w.t() + w.t()]

@given(st.lists(st.tuples(st.integers(0, len(steps) - 1), st.booleans()), min_size=1, max_size=5), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_random_programs_are_followed_rightly_or_refused(program, seed):
    def make(s):
        w, v = s.w, s.v
        for i, turned in program: w = steps[i](*((v, w) if turned else (w, v)))
        return w
    torch.manual_seed(seed)
    model = network(make, dict(w=(6, 6), v=(6, 6)))
    model.o.weight.data.uniform_(.5, 1)
    try: trace(model, (6,))
    except TraceError: return
    for power in 1, 2: check(model, make, power)

def test_a_part_of_the_rows_of_a_convolution():
    "Kernels of two sizes in one convolution, the small one among zeros; by the explicit sum."
    torch.manual_seed(0)
    model = Fn(lambda s, x: F.conv2d(F.conv2d(x, torch.cat([s.w, F.pad(s.v, (1, 1, 1, 1))]), padding=1).relu(), s.o), w=parameter(4, 3, 3, 3), v=parameter(5, 3, 1, 1), o=parameter(2, 9, 1, 1))
    graph = trace(model, (3, 5, 5))
    assert count_paths(graph) == 3*(4*9 + 5)*2 and {name: layer.size for layer in graph.layers for name in [layer.name]} == dict(w=(1, 4, 3, 9), v=(1, 5, 3, 9), o=(1, 2, 9, 1))
    total = model.o.abs().sum((0, 2, 3)) @ torch.cat([model.w.abs().sum((1, 2, 3)), model.v.abs().sum((1, 2, 3))])
    assert torch.isclose(path_flow(graph, power=1).total.plain(), total.double())
    assert not phew(graph, .3).report(graph).lost

class Symmetric(nn.Module):
    def forward(self, w): return w.triu() + w.triu(1).t()

def test_the_symmetric_layer_of_pytorchs_own_tutorial():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    parametrize.register_parametrization(model[0], 'weight', Symmetric())
    graph = trace(model, (5,))
    assert count_paths(graph) == 25*3
    masks = phew(graph, .5)
    name = next(name for name in masks if 'original' in name)
    assert not masks[name].tril(-1).any() and masks[name].any()
    masks.keep(model)
    assert torch.equal(model[0].weight != 0, masks[name] | masks[name].t())

def frozen(t): return nn.Parameter(t, requires_grad=False)

@pytest.mark.parametrize('first', [True, False])
@pytest.mark.parametrize('then', [lambda w: 2*w, lambda w: w*upper, F.normalize, lambda w: w.clone().index_put((rows, columns), torch.zeros(14))])
def test_trained_rows_beside_frozen_zeros_and_ones_are_weights(first, then):
    "Whichever was registered first."
    parts = dict(m=frozen(torch.ones(2, 6).tril()), w=parameter(4, 6))
    model = Fn(lambda s, x: s.o(F.linear(x, then(torch.cat([s.m, s.w])))), **(parts if first else dict(reversed(parts.items()))), o=nn.Linear(6, 2))
    with pytest.warns(UserWarning, match="'m' is frozen"): graph = trace(model, (6,))
    assert set(graph.params) == {'m', 'w', 'o.weight'}
    assert torch.isclose(path_flow(graph, power=1).total.plain(), (model.o.weight.abs() @ then(torch.cat([model.m, model.w])).abs()).sum().double())

scaled = dict(half=lambda m: m*.5, turned=lambda m: (m/9).t(), by_rows=lambda m: m/m.sum(1, keepdim=True), expanded=lambda m: m.expand(6, 6)*1., cast=lambda m: m.half().float())

@pytest.mark.parametrize('f', scaled.values(), ids=scaled)
def test_a_frozen_matrix_that_is_scaled_is_a_layer(f):
    "It meets no other weights: an average, say, that does not train."
    model = Fn(lambda s, x: s.o(F.linear(x, f(s.m)).tanh()), m=frozen(torch.ones(6, 6).triu()), o=nn.Linear(6, 2))
    with pytest.warns(UserWarning, match="'m' is frozen"): graph = trace(model, (6,))
    assert set(graph.params) == {'m', 'o.weight'}
    assert torch.isclose(path_flow(graph, power=1).total.plain(), (model.o.weight.abs() @ f(model.m)).sum().double())

def test_synflow_by_paths_where_gains_start_at_zero():
    "As in networks without normalisation: their weights count as they would with gains of one."
    torch.manual_seed(0)
    gained, plain = (Fn(lambda s, x, f=f: F.linear(F.linear(x, f(s)).relu(), s.o), w=parameter(6, 6), g=nn.Parameter(torch.zeros(6, 1)), o=parameter(2, 6))
                     for f in (lambda s: s.w*s.g, lambda s: s.w))
    plain.load_state_dict(gained.state_dict())
    assert synflow(gained, .4, (6,), spatial=False) == synflow(plain, .4, (6,), spatial=False)

def test_px_knows_masks_that_are_parameters():
    torch.manual_seed(0)
    w, o, x = parameter(6, 6), parameter(2, 6), torch.randn(8, 6)
    as_buffer = Fn(lambda s, x: F.linear(F.linear(x, s.w*upper).relu(), s.o), w=w, o=o)
    as_parameter = Fn(lambda s, x: F.linear(F.linear(x, s.w*s.m).relu(), s.o), w=w, o=o, m=frozen(upper.float()))
    for more in dict(gates=False), dict(gates=True), dict(by_path=True):
        one, two = (px(model, .4, trace(model, (6,)), dl=[x], iterations=4, **more) for model in (as_buffer, as_parameter))
        assert one == two and one['w'].any() and not (one['w'] & ~upper).any()

def test_px_leaves_out_what_the_network_writes_zeros_over():
    torch.manual_seed(0)
    def cut(s):
        s.w.data.mul_(upper)
        return s.w
    written, product = (Fn(lambda s, x, f=f: F.linear(F.linear(x, f(s)).relu(), s.o), w=parameter(6, 6), o=parameter(2, 6)) for f in (cut, lambda s: s.w*upper))
    product.load_state_dict(written.state_dict())
    one, two = (px(model, .3, trace(model, (6,)), dl=[torch.ones(8, 6)], gates=False, iterations=4) for model in (written, product))
    assert one == two

@pytest.mark.parametrize('make', [lambda t: F.pad(t, (0, 0, 1, 0)), lambda t: torch.cat([torch.zeros(2, 3), t])])
def test_tables_with_a_row_of_zeros_have_inputs_of_their_own(make):
    model = Fn(lambda s, x, y: F.linear(F.embedding(x, make(s.a)).mean(1) + F.embedding(y, make(s.b)).mean(1), s.o), a=parameter(5, 3), b=parameter(8, 3), o=parameter(2, 3))
    graph = trace(model, example=(torch.arange(5)[None], torch.arange(8)[None]))
    assert count_paths(graph) == (5 + 8)*3*2 and len(graph.inputs) == len(make(model.a)) + len(make(model.b))
    same = Fn(lambda s, x, y: F.linear(F.embedding(x, make(s.a)).mean(1) + F.embedding(y, make(s.a)).mean(1), s.o), a=parameter(5, 3), o=parameter(2, 3))
    assert len(trace(same, example=(torch.arange(5)[None],)*2).inputs) == len(make(same.a))

@pytest.mark.parametrize('sizes, make', ways.values(), ids=ways)
def test_masks_are_widened(sizes, make):
    graph = trace(network(make, sizes), (6,))
    masks = phew(graph, .5)
    assert widen(graph, masks, .5).kept == masks.kept

zeros = dict(accumulated=(lambda s: s.w + torch.zeros(6, 6).index_put((torch.arange(6),)*2, s.d, accumulate=True), 6), product=(lambda s: s.w + s.d*s.d.t(), (6, 6)),
             added=(lambda s: s.w + torch.zeros(36).scatter_add(0, torch.arange(6), s.d).view(6, 6), 6), rows=(lambda s: torch.cat([s.w[:5], (s.d*s.d.roll(1))[None]]), 6))

@pytest.mark.parametrize('make, n', zeros.values(), ids=zeros)
def test_zeros_that_train_are_no_constants(make, n):
    "Several weights, or none that can be told, stand behind them."
    model = Fn(lambda s, x: s.o(F.linear(x, make(s))), w=parameter(6, 6), d=nn.Parameter(torch.zeros(n)), o=nn.Linear(6, 2))
    with pytest.raises(TraceError, match='cannot be followed to one'): trace(model, (6,))

constants = dict(where=lambda s: torch.where(upper, s.w, .5), where_ones=lambda s: torch.where(upper, s.w, torch.ones(6, 6)), where_frozen=lambda s: torch.where(upper, s.w, s.m), filled=lambda s: s.w.masked_fill(upper, -2.),
                 unit=lambda s: s.w.tril(-1) + torch.eye(6), antisymmetric=lambda s: s.w.triu(1) - s.w.triu(1).t() - .01*torch.eye(6), padded=lambda s: torch.cat([s.w[:5], torch.ones(1, 6)]),
                 rows=lambda s: torch.stack([s.w[0], torch.zeros(6), s.w[1], torch.full((6,), 2.), s.w[2], s.w[3]]), in_place=lambda s: s.w.tril(-1).add_(torch.eye(6)))

@pytest.mark.parametrize('make', constants.values(), ids=constants)
def test_constants_among_weights_are_no_weights(make):
    "They let pass what a constant matrix would: a way around the weights."
    torch.manual_seed(0)
    model = Fn(lambda s, x: s.o(F.linear(x, make(s)).tanh()), o=nn.Linear(6, 2), w=parameter(6, 6), m=frozen(torch.ones(6, 6)))
    on = torch.autograd.functional.jacobian(lambda w: make(SimpleNamespace(w=w, m=model.m)), model.w.detach()).view(36, 36) != 0
    matrix, graph = make(model), trace(model, (6,))
    alone = ~on.any(1).view(6, 6).any(1) # rows of constants alone: no way around, but the way
    assert count_paths(graph) == 2*int(on.sum() + (matrix[alone] != 0).sum()) and graph.layers[0].name == 'w'
    edges = model.o.weight.abs().sum(0)[:, None]*matrix.abs()
    assert torch.allclose(path_flow(graph).by_weight()['w'].plain().flatten(), (on.double().t() @ edges.detach().double().flatten()))
    net = linearised(model)
    total, grads = net.gradients(*net.ones((6,)))
    assert torch.isclose(total, edges.sum().double()) and torch.allclose((grads['w']*net.weights['w'].detach()).flatten(), on.double().t() @ edges.detach().double().flatten())
    assert not (phew(graph, .4)['w'].flatten() & ~on.any(0)).any()

def test_a_causal_softmax_of_weights_along_positions():
    "What it fills with minus infinity is zero in the end."
    model = Fn(lambda s, x: F.linear(s.w.masked_fill(~upper, -torch.inf).softmax(-1) @ x, s.o), w=parameter(6, 6), o=parameter(2, 3))
    graph = trace(model, example=torch.randn(1, 6, 3))
    assert count_paths(graph) == 3*21*2 and not phew(graph, .5)['w'].tril(-1).any()

def test_a_row_without_weights_of_a_causal_softmax():
    below = torch.ones(5, 5).tril(-1).bool()
    model = Fn(lambda s, x: s.o(s.w.masked_fill(~below, -1e9).softmax(-1) @ s.i(x)), w=parameter(5, 5), i=nn.Linear(3, 4), o=nn.Linear(4, 2))
    graph = trace(model, example=torch.randn(1, 5, 3))
    assert count_paths(graph) == 3*4*10*2 and not phew(graph, .3)['w'].triu().any()

def test_a_frozen_matrix_with_a_scale_that_trains_is_a_layer():
    for size in (1,), (6, 1):
        model = Fn(lambda s, x: s.o(F.linear(x, s.m*s.a)), m=frozen((torch.rand(6, 6) > .5).float()), a=parameter(*size), o=nn.Linear(6, 2))
        with pytest.warns(UserWarning, match="'m' is frozen"): assert set(trace(model, (6,)).params) == {'m', 'o.weight'}

def test_weight_norm_of_a_frozen_direction():
    "The magnitudes follow the direction, not the length."
    layer = nn.utils.weight_norm(nn.Linear(6, 6))
    layer.weight_v.data.copy_(torch.eye(6)); layer.weight_v.requires_grad_(False)
    net = linearised(nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 2)))
    total, grads = net.gradients(torch.ones(1, 6))
    assert torch.isclose((grads['0.weight_v']*net.weights['0.weight_v'].detach()).sum(), total) and not grads['0.weight_g'].any()

def test_zeros_stay_zeros_in_every_second_column_along_positions():
    model = Fn(lambda s, x: F.linear(s.w.tril()[:, ::2] @ x, s.o), w=parameter(4, 8), o=parameter(2, 3))
    assert count_paths(trace(model, example=torch.randn(1, 4, 3))) == 3*int(torch.ones(4, 8).tril()[:, ::2].sum())*2

def test_two_weights_in_one_entry_are_refused():
    for make in lambda s: s.w + s.v, lambda s: s.w + s.w.t(), lambda s: s.w*s.v, lambda s: torch.cat([s.w[:3] + s.v[:3], s.w[3:]]):
        with pytest.raises(TraceError, match='cannot be followed to one'): trace(network(make, dict(w=(6, 6), v=(6, 6))), (6,))

# what cannot be followed to one parameter may be left dense: then it is a constant

square = dict(w=(6, 6), v=(6, 6))
mixed_up = dict( # name -> (sizes of the parameters, what is made of them)
    sum=(square, lambda s: s.w + s.v), low_rank_more=(square | dict(a=(6, 2), b=(2, 6)), lambda s: s.w + s.a @ s.b - s.v),
    rotation=(dict(w=(6, 6)), lambda s: torch.matrix_exp(s.w - s.w.t())), qr=(dict(w=(6, 6)), lambda s: torch.linalg.qr(s.w)[0]),
    mean=(square, lambda s: torch.stack([s.w, s.v]).mean(0)), sorted=(dict(w=(6, 6)), lambda s: s.w.cumsum(1)))

def between(make, sizes):
    torch.manual_seed(0)
    return Fn(lambda s, x: s.o(F.linear(s.i(x).tanh(), make(s)).tanh()), i=nn.Linear(4, 6), o=nn.Linear(6, 2),
              **{name: parameter(*size) for name, size in sizes.items()})

@pytest.mark.parametrize('name', mixed_up)
def test_weights_of_several_parameters_are_a_constant_where_all_are_kept_dense(name):
    sizes, make = mixed_up[name]
    model = between(make, sizes)
    with pytest.raises(TraceError, match='cannot be followed to one.*keep_dense='): trace(model, (4,))
    if len(sizes) > 1:
        with pytest.raises(TraceError, match='cannot be followed to one'): trace(model, (4,), keep_dense='w')
    graph = trace(model, (4,), keep_dense=[*sizes])
    assert [*graph.params] == ['i.weight', 'o.weight'] and {*sizes} <= graph.left_out.keys()
    masks = phew(graph, .5)
    squares = [(masks[f'{n}.weight']*getattr(model, n).weight**2).detach().requires_grad_() for n in 'io']
    flow = (squares[1] @ make(model).detach()**2 @ squares[0]).sum()
    by_hand = sum((g*masks[f'{n}.weight']).sum() for n, g in zip('io', torch.autograd.grad(flow, squares)))
    assert path_trace(model, masks, graph, spatial=True).plain() == pytest.approx(by_hand.item(), rel=1e-5)
    for method in synflow, synflow_l2: assert method(model, .5, graph).kept == 18
    masks.keep(model, opt := torch.optim.SGD(model.parameters(), .1, momentum=.9))
    for _ in range(3): model(torch.randn(8, 4)).square().sum().backward(); opt.step(); opt.zero_grad()
    assert all((getattr(model, n).weight[~masks[f'{n}.weight']] == 0).all() for n in 'io')

def test_pytorchs_orthogonal_weights_may_be_left_dense():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.utils.parametrizations.orthogonal(nn.Conv2d(8, 8, 3, padding=1)), nn.ReLU(), nn.Flatten(), nn.Linear(8*16, 4))
    with pytest.raises(TraceError, match="module '2' is computed .* keep_dense="): trace(model, (3, 6, 6))
    graph = trace(model, (3, 6, 6), keep_dense='2')
    assert [*graph.params] == ['0.weight', '5.weight']
    assert 'kept dense' in graph.left_out['2.parametrizations.weight.original']
    assert phew(graph, .2).kept >= round(.2*graph.total) and trace(model, (3, 6, 6), only=['0', '5']).total == graph.total
