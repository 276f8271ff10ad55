"SynFlow's scores are sums over paths, its counts are exact, its laws hold, and nothing overflows."
import copy, itertools, math, warnings

import hypothesis.strategies as st
import pytest, torch, torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from phew_nb.graph import trace
from phew_nb.linearised import linearised
from phew_nb.masks import Masks
from phew_nb.models import mlp, resnet20, vgg19
from phew_nb.scores import random_pruning, steps_down
from phew_nb.synflow import _by_paths, _ByPixels, _Strengths, synflow, synflow_l2

quiet = pytest.mark.filterwarnings('ignore:the masks cut')

def scores(model, size, power=1, squared=True, spatial=True, skips=False, masks=None, dtype=torch.float64):
    "The scores of the first iteration."
    with torch.no_grad():
        graph = trace(model, size)
        s = _Strengths(graph, masks or {}, power, squared, dtype, 'cpu')
        gradients = (_ByPixels(model, graph, s, power, masks or {}, size) if spatial else _by_paths(graph, s, power, skips))()
        return {name: gradients[name]*s.factors[name].detach() for name in gradients}

def sums(scores): return torch.stack([s.sum() for s in scores.values()])

def assert_proportional(a, b, rtol=1e-9):
    "The same scores but for one factor."
    a, b = (torch.cat([t.reshape(-1) for t in d.values()]) for d in (a, b))
    torch.testing.assert_close(a/a.max(), b.double()/b.max(), rtol=rtol, atol=1e-15)

# --- path by path ------------------------------------------------------------------------------------------------------

def chain_paths(weights, size):
    "Scores of a chain of (out, in) matrices by going through every path: SynFlow, printed L2, squared L2."
    out = [[torch.zeros_like(w) for w in weights] for _ in range(3)]
    for units in itertools.product(*map(range, size)):
        path = [w[b, a] for w, a, b in zip(weights, units, units[1:])]
        product = math.prod(float(w) for w in path)
        for i, w in enumerate(path):
            for sums, term in zip(out, (abs(product), product**2/max(abs(float(w)), 1e-300), product**2)):
                sums[i][units[i+1], units[i]] += term
    return out

@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 99), st.booleans())
def test_chain_path_by_path(size, seed, spatial):
    model = mlp(size, bias=False, seed=seed).double()
    weights = [p.detach() for p in model.parameters()]
    truth = chain_paths(weights, size)
    for (power, squared), want in zip([(1, True), (2, False), (2, True)], truth):
        got = scores(model, (size[0],), power, squared, spatial)
        assert_proportional(got, dict(zip(got, want)))

def conv_truth(model, size, power, squared):
    "Scores of conv, conv, flatten, linear (no padding) by every path through the pixels."
    a, b, c = (p.detach() for p in model.parameters())
    (C, H, W), out = size, [torch.zeros_like(p) for p in (a, b, c)]
    K1, K2 = a.shape[-1], b.shape[-1]
    h1, h2 = H - K1 + 1, H - K1 - K2 + 2
    ranges = (range(C), range(a.shape[0]), range(b.shape[0]), range(c.shape[0]), *[range(K1)]*2, *[range(K2)]*2, *[range(h2)]*2)
    for i, j, k, o, u, v, s, t, y, x in itertools.product(*ranges):
        places = (j, i, u, v), (k, j, s, t), (o, k*h2*h2 + y*h2 + x)
        path = [float(p[at]) for p, at in zip((a, b, c), places)]
        product = abs(math.prod(path))**power
        for total, w, at in zip(out, path, places): total[at] += product if squared else product/abs(w)
    return out

@pytest.mark.parametrize('power,squared', [(1, True), (2, False), (2, True)])
def test_pixels_path_by_path(power, squared):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 2, bias=False), nn.ReLU(), nn.Conv2d(2, 3, 2, bias=False), nn.Flatten(), nn.Linear(12, 2, bias=False)).double()
    got = scores(model, (2, 4, 4), power, squared)
    assert_proportional(got, dict(zip(got, conv_truth(model, (2, 4, 4), power, squared))))

class Residual(nn.Module):
    "x -> c(b(a x) + a x)."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False)
    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(h) + h))

@pytest.mark.parametrize('spatial,skips', [(True, False), (False, True), (False, False)])
def test_residual_path_by_path(spatial, skips):
    torch.manual_seed(1)
    model = Residual().double()
    a, b, c = (p.detach().abs() for p in model.parameters())
    sa, sb, sc = (torch.zeros_like(p) for p in (a, b, c))
    for i, h, j, o in itertools.product(range(2), range(3), range(3), range(2)):
        through = a[h, i]*b[j, h]*c[o, j]
        sa[h, i] += through; sb[j, h] += through; sc[o, j] += through
        if j == h and (spatial or skips):
            sa[h, i] += a[h, i]*c[o, j]; sc[o, j] += a[h, i]*c[o, j]
    assert_proportional(scores(model, (2,), spatial=spatial, skips=skips), dict(zip('abc', (sa, sb, sc))))

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False)
    def forward(self, x): return self.b(torch.relu(self.a(torch.relu(self.a(x)))))

@pytest.mark.parametrize('spatial', [True, False])
@pytest.mark.parametrize('power', [1, 2])
def test_a_shared_layer_collects_from_both_uses(spatial, power):
    torch.manual_seed(2)
    model = Twice().double()
    a, b = (p.detach().abs()**power for p in model.parameters())
    sa, sb = torch.zeros_like(a), torch.zeros_like(b)
    for i, h, j, o in itertools.product(range(3), range(3), range(3), range(2)):
        through = a[h, i]*a[j, h]*b[o, j]
        sa[h, i] += through; sa[j, h] += through; sb[o, j] += through
    assert_proportional(scores(model, (3,), power, True, spatial), dict(a=sa, b=sb))

# --- laws --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('power', [1, 2])
@pytest.mark.parametrize('spatial', [True, False])
def test_layers_of_a_chain_have_equal_sums_also_when_masked(power, spatial):
    model = vgg19(10, width=.125, seed=0)
    masks = random_pruning(model, .5, (3, 32, 32)).apply(model)
    total = sums(scores(model, (3, 32, 32), power, True, spatial, masks=dict(masks)))
    torch.testing.assert_close(total/total[0], torch.ones_like(total), rtol=1e-11, atol=0)

def test_units_of_a_chain_give_what_they_get():
    model = vgg19(10, width=.125, last_pool='max', seed=0)
    for spatial in (True, False):
        layers = list(scores(model, (3, 32, 32), spatial=spatial).values())
        for a, b in zip(layers, layers[1:]):
            torch.testing.assert_close(a.flatten(1).sum(1), b.transpose(0, 1).flatten(1).sum(1), rtol=1e-10, atol=0)

def test_layers_that_every_path_crosses_hold_the_whole_sum_in_a_residual_network():
    for power in (1, 2):
        got = sums(scores(resnet20(10, seed=0), (3, 32, 32), power))
        assert got[0] == pytest.approx(float(got[-1]), rel=1e-11) and (got <= got[0]*(1 + 1e-11)).all()

def test_the_printed_reading_is_the_conserved_one_over_the_weight():
    model = resnet20(10, width=.5, seed=0)
    printed, conserved = (scores(model, (3, 32, 32), 2, squared) for squared in (False, True))
    params = trace(model, (3, 32, 32)).params
    for name, p in params.items(): torch.testing.assert_close(printed[name]*p.detach().abs(), conserved[name], rtol=1e-6, atol=0)
    total = sums(printed)
    assert total.max() > 1.5*total.min()

def test_average_pooling_is_squared_too():
    "1/k values of an average count 1/k^2 in sums of squares."
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.skip, self.b = nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(1, 2, 2, bias=False), nn.Linear(2, 2, bias=False)
        def forward(self, x): return self.b((F.avg_pool2d(self.a(x), 2) + self.skip(x)).flatten(1))
    torch.manual_seed(0)
    got = scores(Pooled().double(), (1, 2, 2), 2)
    for name, share in (('a.weight', 1/4), ('skip.weight', 1.)): assert got[name].sum() > 0, share
    model = Pooled().double()
    a, s, b = (p.detach()**2 for p in model.parameters())
    want_a = (4/16)*a*b.sum(0).view(2, 1, 1, 1) # four pixels, each with weight (1/4)^2
    want_s = s*b.sum(0).view(2, 1, 1, 1)
    got = scores(model, (1, 2, 2), 2)
    ratio = float(got['skip.weight'].sum()/want_s.sum())
    torch.testing.assert_close(got['a.weight'], want_a*ratio)

# --- masks -------------------------------------------------------------------------------------------------------------

def plain(model, size, k, iterations, power=1, squared=True):
    "SynFlow as it is usually written, with exact counts."
    graph = trace(model, size)
    masks = {n: torch.ones_like(p, dtype=torch.bool) for n, p in graph.params.items()}
    for left in steps_down(graph.total, k, iterations):
        net = copy.deepcopy(model).double().eval()
        params = dict(net.named_parameters())
        with torch.no_grad():
            for n, p in params.items(): p.copy_((p.abs()*masks[n] if n in masks else p.abs())**power)
            for m in net.modules():
                if isinstance(m, nn.modules.batchnorm._BatchNorm): m.running_var.add_(m.eps).pow_(power).sub_(m.eps)
        net(torch.ones(1, *size, dtype=torch.float64)).sum().backward()
        flat = torch.cat([((params[n].grad*params[n])/(1 if squared else params[n].sqrt().clamp(min=1e-300))).detach().flatten() for n in masks])
        keep = torch.zeros(len(flat), dtype=torch.bool)
        keep[flat.sort(descending=True, stable=True)[1][:left]] = True
        masks = {n: part.view_as(masks[n]) for n, part in zip(masks, keep.split([m.numel() for m in masks.values()]))}
    return Masks(masks)

@quiet
@pytest.mark.parametrize('make,size', [(lambda: mlp([20, 30, 30, 10], seed=0), (20,)), (lambda: mlp([20, 30, 10], bn=True, seed=0), (20,)),
                                       (lambda: vgg19(10, width=.125, last_pool='max', seed=0), (3, 32, 32)),
                                       (lambda: resnet20(10, width=.25, seed=0), (3, 16, 16))])
@pytest.mark.parametrize('density', [.5, .1, .02])
def test_the_same_masks_as_the_plain_way(make, size, density):
    model = make()
    masks = synflow(model, density, size, iterations=30)
    assert masks == plain(model, size, masks.kept, 30)

@quiet
@pytest.mark.parametrize('squared', [False, True])
def test_the_same_masks_as_the_plain_way_for_squares(squared):
    model = mlp([20, 30, 30, 10], bn=True, seed=0)
    masks = synflow_l2(model, .1, (20,), iterations=30, squared=squared)
    assert masks == plain(model, (20,), masks.kept, 30, 2, squared)

@quiet
@pytest.mark.parametrize('f,power', [(synflow, 1), (lambda *a, **k: synflow_l2(*a, squared=True, **k), 2)])
def test_normalisation_counts_as_its_scale(f, power):
    model = mlp([20, 30, 30, 10], bn=True, seed=0)
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in (model.hidden1, model.hidden2):
            layer.norm.weight.normal_(generator=gen)
            layer.norm.running_var.uniform_(.1, 5, generator=gen)
    assert f(model, .2, (20,), iterations=10) == plain(model, (20,), round(.2*1800), 10, power)

@quiet
@pytest.mark.parametrize('f', [synflow, synflow_l2])
@pytest.mark.parametrize('spatial', [True, False])
def test_every_step_has_its_exact_count_and_only_loses(f, spatial):
    model, seen = resnet20(10, width=.5, seed=0), []
    masks = f(model, .03, (3, 16, 16), iterations=12, spatial=spatial, watch=lambda i, m: seen.append((i, m)))
    assert [i for i, _ in seen] == list(range(12)) and seen[-1][1] == masks
    assert [m.kept for _, m in seen] == steps_down(masks.total, masks.kept, 12)
    for (_, a), (_, b) in zip(seen, seen[1:]): assert b <= a

@quiet
@settings(deadline=None, max_examples=25)
@given(st.floats(.001, 1), st.integers(1, 9), st.booleans())
def test_exact_counts_at_any_density(density, iterations, spatial):
    model = mlp([7, 9, 5, 3], seed=0)
    assert synflow(model, density, (7,), iterations=iterations, spatial=spatial).kept == max(1, round(density*(63+45+15)))

@quiet
def test_zero_weights_and_dead_branches_keep_the_count():
    "Where fewer scores are positive than weights are wanted, zeros fill up, the first ones, and no weight comes back."
    model = mlp([6, 8, 4], seed=0)
    with torch.no_grad(): model.head.weight[:, :6] = 0
    seen = []
    masks = synflow(model, .9, (6,), iterations=5, watch=lambda i, m: seen.append(m))
    assert masks.kept == round(.9*80)
    for a, b in zip(seen, seen[1:]): assert b <= a
    with torch.no_grad(): model.head.weight.zero_()
    assert synflow(model, .5, (6,), iterations=5, spatial=False).kept == 40

@quiet
def test_masked_networks():
    model = resnet20(10, width=.25, seed=0)
    first = random_pruning(model, .5, (3, 16, 16), seed=3).apply(model)
    for spatial in (True, False):
        assert synflow(model, .1, (3, 16, 16), iterations=5, spatial=spatial) <= first

@quiet
def test_layers_kept_dense_are_part_of_the_paths():
    model = mlp([5, 6, 4], bias=False, seed=0)
    graph = trace(model, (5,), keep_dense='head')
    masks = synflow(model, .5, graph, iterations=1, spatial=False)
    score = model.hidden1.linear.weight.abs()*model.head.weight.abs().sum(0)[:, None]
    assert list(masks) == ['hidden1.linear.weight'] and (score[masks['hidden1.linear.weight']].min() > score[~masks['hidden1.linear.weight']].max())

# --- range and precision -----------------------------------------------------------------------------------------------

@quiet
@pytest.mark.parametrize('f', [synflow, synflow_l2])
def test_a_network_too_deep_for_float64(f):
    model = mlp([40]*500, bias=False, init='normal', seed=0)
    kwargs = [{}, dict(squared=True)] if f is synflow_l2 else [{}]
    for more in kwargs: assert f(model, .2, (40,), iterations=2, **more) == f(model, .2, (40,), iterations=2, spatial=False, **more)

@quiet
def test_a_network_whose_sum_underflows():
    model = mlp([10]*500, bias=False, seed=0)
    with torch.no_grad():
        for p in model.parameters(): p.mul_(.01)
    assert synflow(model, .5, (10,), iterations=2) == synflow(model, .5, (10,), iterations=2, spatial=False)

@quiet
def test_a_sum_that_falls_out_of_the_range_on_the_way():
    "A chain of 300 layers loses hundreds of digits from step to step."
    model = mlp([30]*300, bias=False, seed=0)
    assert synflow(model, .04, (30,), iterations=6) == synflow(model, .04, (30,), iterations=6, spatial=False)

@quiet
@pytest.mark.parametrize('name', ['resnet18', 'resnet50', 'densenet121', 'mobilenet_v3_small', 'efficientnet_b0'])
def test_a_network_for_large_images_fed_small_ones(name):
    "Feature maps shrink to one pixel; no layer's scores may vanish."
    torchvision = pytest.importorskip('torchvision')
    model = torchvision.models.get_model(name, num_classes=10)
    for power in (1, 2):
        for layer, s in scores(model, (3, 32, 32), power).items(): assert s.isfinite().all() and (s > 0).any(), layer
    if name == 'resnet18': assert synflow(model, .05, (3, 32, 32), iterations=3).kept == round(.05*trace(model, (3, 32, 32)).total)

def test_weights_that_are_not_finite_are_named():
    model = mlp([4, 5, 3])
    model.head.weight.data[0, 1] = math.nan
    for spatial in (True, False):
        with pytest.raises(ValueError, match=r"weights of layer 'head.weight' are not finite, the first at \(0, 1\)"):
            synflow(model, .5, (4,), spatial=spatial)

@quiet
def test_half_and_single_precision():
    model = resnet20(10, width=.25, seed=0)
    half = copy.deepcopy(model).half()
    assert synflow(half, .1, (3, 16, 16), iterations=5) == synflow(copy.deepcopy(half).float(), .1, (3, 16, 16), iterations=5)
    assert synflow(model, .1, (3, 16, 16), iterations=5, dtype=torch.float32).kept == round(.1*trace(model, (3, 16, 16)).total)

@quiet
def test_biases_statistics_and_dropout_do_not_matter():
    model = mlp([8, 9, 9, 4], bn=True, seed=0)
    before = synflow(model, .3, (8,), iterations=5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if 'bias' in name: p.uniform_(-1, 1)
        for name, b in model.named_buffers():
            if 'mean' in name: b.uniform_(-1, 1)
    model.hidden1.add_module('drop', nn.Dropout(.5))
    assert synflow(model.train(), .3, (8,), iterations=5) == before

@quiet
@pytest.mark.parametrize('around', [torch.no_grad, torch.inference_mode, lambda: torch.autocast('cpu', torch.bfloat16)])
def test_what_is_around_the_call_does_not_matter(around):
    model = resnet20(10, width=.25, seed=0)
    with around(): inside = [synflow(model, .1, (3, 16, 16), iterations=3, spatial=spatial) for spatial in (True, False)]
    assert inside == [synflow(model, .1, (3, 16, 16), iterations=3, spatial=spatial) for spatial in (True, False)]

@quiet
def test_layout_does_not_matter():
    a = resnet20(10, width=.25, seed=0)
    b = copy.deepcopy(a).to(memory_format=torch.channels_last)
    for spatial in (True, False):
        assert synflow(a, .1, (3, 16, 16), iterations=3, spatial=spatial) == synflow(b, .1, (3, 16, 16), iterations=3, spatial=spatial)

def test_errors():
    model = mlp([4, 5, 3])
    graph = trace(model, (4,))
    with pytest.raises(TypeError, match='runs the network'): synflow(graph, .5)
    with pytest.raises(ValueError, match='1 or more'): synflow(model, .5, (4,), iterations=0)
    assert synflow(graph, .5, spatial=False).kept == synflow(model, .5, (4,)).kept

# --- reports -----------------------------------------------------------------------------------------------------------

def test_an_emptied_layer_is_reported():
    "A projection shortcut that SynFlow empties: a warning with numbers, from the caller's line."
    model = resnet20(10, seed=0)
    with pytest.warns(UserWarning, match=r'empty layer.*stage3.0.shortcut.conv.weight') as caught:
        masks = synflow(model, .05, (3, 32, 32), iterations=10)
    assert caught[0].filename == __file__
    assert masks.report(trace(model, (3, 32, 32))).empty == ['stage3.0.shortcut.conv.weight']

def test_a_chain_keeps_all_its_layers():
    model = vgg19(10, width=.125, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for f in (synflow, synflow_l2): assert min(f(model, .01, (3, 32, 32), iterations=100).widths.values()) > 0

# --- the linearised network, against the real one made linear by hand ----------------------------------------------------
# What is not linear is a module of its own below, so that a copy can have it replaced: activations by nothing, a norm by its
# scale, a product of two signals by their sum. Then automatic differentiation of the copy is the truth.

class Scale(nn.Module):
    "A normalisation that is its weight alone."
    def __init__(self, norm):
        super().__init__()
        self.weight, self.last = norm.weight, type(norm) is nn.LayerNorm
    def forward(self, x): return x*(self.weight if self.last else self.weight.view(-1, *[1]*(x.ndim - 2)))

class Gate(nn.Module):
    def forward(self, a, b): return a*b
class Sum(nn.Module):
    def forward(self, a, b): return a + b
class Product(nn.Module):
    "A matrix product of two signals, scaled."
    def __init__(self, scale=1.): super().__init__(); self.scale = scale
    def forward(self, a, b): return a @ b*self.scale
class Outer(nn.Module):
    "Its linear version: a path takes one of the two sides."
    def __init__(self, scale): super().__init__(); self.scale = scale
    def forward(self, a, b): return (a.sum(-1, keepdim=True) + b.sum(-2, keepdim=True))*self.scale

gone = nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.Hardswish, nn.Dropout

def replaced(m, power):
    "What stands for a module in the linear copy."
    if isinstance(m, gone): return nn.Identity()
    if isinstance(m, Gate): return Sum()
    if isinstance(m, Product): return Outer(m.scale**power)
    if isinstance(m, (nn.LayerNorm, nn.GroupNorm)): return Scale(m)

def by_hand(model, power=1):
    "A copy of a network with magnitudes for weights, zeros for biases and means, and no activations: it is linear (but for maxima)."
    model = copy.deepcopy(model).double().eval()
    for m in list(model.modules()):
        for name, child in list(m.named_children()):
            if (new := replaced(child, power)) is not None: setattr(m, name, new)
    with torch.no_grad():
        for name, p in model.named_parameters(): p.abs_().pow_(power) if not name.endswith(('bias', 'pos')) else p.zero_()
        for name, b in model.named_buffers():
            if name.endswith('running_mean'): b.zero_()
            elif name.endswith('running_var'): b.add_(1e-5).pow_(power).sub_(1e-5)
            elif b.is_floating_point(): b.abs_().pow_(power)
    return model

def assert_the_same(model, x, power=1, forward=None):
    "Sum and gradients of the linearised network are those of the copy."
    net, hand = linearised(model, power, square_means=False), by_hand(model, power)
    out = (forward or hand)(*([hand] if forward else []), x.double() if x.is_floating_point() else x)
    truth = (out['out'] if isinstance(out, dict) else out).sum()
    truth.backward()
    total, grads = net.gradients(x)
    assert float(total) == pytest.approx(float(truth.detach()), rel=1e-9) and float(total) > 0
    theirs = {name: p.grad for name, p in hand.named_parameters() if p.grad is not None and not name.endswith(('bias', 'pos'))}
    assert theirs.keys() >= {name for name, grad in grads.items() if grad.any() and not name.endswith(('bias', 'pos'))}
    for name, grad in theirs.items(): torch.testing.assert_close(grads[name], grad, rtol=1e-7, atol=1e-9*float(grad.abs().max()))

def unit(n, m, k=3, **kwargs): return nn.Sequential(nn.Conv2d(n, m, k, padding=k//2, **kwargs), nn.BatchNorm2d(m), nn.ReLU())
def head(n, classes=3): return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, classes))
class Add(nn.Module):
    "A branch beside a shortcut."
    def __init__(self, branch, shortcut=None): super().__init__(); self.branch, self.shortcut = branch, shortcut or nn.Identity()
    def forward(self, x): return self.branch(x) + self.shortcut(x)
class Cat(nn.Module):
    def __init__(self, *branches): super().__init__(); self.branches = nn.ModuleList(branches)
    def forward(self, x): return torch.cat([f(x) for f in self.branches], 1)
class Excite(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.squeeze, self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(n, 2, 1), nn.SiLU(), nn.Conv2d(2, n, 1), nn.Sigmoid()), Gate()
    def forward(self, x): return self.gate(x, self.squeeze(x))
class Shuffle(nn.Module):
    "Half of the channels go through, then both halves are shuffled."
    def __init__(self, n): super().__init__(); self.branch = nn.Sequential(unit(n//2, n//2, 1), unit(n//2, n//2, groups=n//2))
    def forward(self, x):
        a, b = x.chunk(2, 1)
        x = torch.cat([a, self.branch(b)], 1)
        return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep, self.up, self.out = unit(2, 4), unit(4, 6), nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(8, 2, 1)
    def forward(self, x):
        x = self.down(x)
        return self.out(torch.cat([x, self.up(self.deep(F.max_pool2d(x, 2)))], 1))
class Pyramid(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b, self.side, self.out = unit(2, 4), unit(4, 4), nn.Conv2d(4, 4, 1), unit(4, 3)
    def forward(self, x):
        a = self.a(x)
        return self.out(F.interpolate(self.b(F.max_pool2d(a, 2)), scale_factor=2.) + self.side(a))
class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.ModuleList(nn.Sequential(nn.Conv1d(3, 3, 2, dilation=d), nn.Tanh()) for d in (1, 2))
        self.gates = nn.ModuleList(nn.Sequential(nn.Conv1d(3, 3, 2, dilation=d), nn.Sigmoid()) for d in (1, 2))
        self.gate, self.out = Gate(), nn.Conv1d(3, 2, 1)
    def forward(self, x):
        for f, g in zip(self.filters, self.gates): x = self.gate(f(x), g(x)) + x[..., -f(x).shape[-1]:]
        return self.out(x)
class ConvNext(nn.Module):
    "A block of ConvNeXt: depthwise, channels last, a scale for each channel."
    def __init__(self, n=4):
        super().__init__()
        self.deep, self.norm, self.gamma = nn.Conv2d(n, n, 5, padding=2, groups=n), nn.LayerNorm(n), nn.Parameter(torch.rand(n))
        self.mlp = nn.Sequential(nn.Linear(n, 2*n), nn.GELU(), nn.Linear(2*n, n))
    def forward(self, x): return x + (self.gamma*self.mlp(self.norm(self.deep(x).permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
class Mixer(nn.Module):
    def __init__(self, tokens=4, n=3):
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.LayerNorm(n), nn.Identity()) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(tokens, 6), nn.GELU(), nn.Linear(6, tokens))
        self.channels = nn.Sequential(nn.Linear(n, 6), nn.GELU(), nn.Linear(6, n))
    def forward(self, x):
        x = x + self.tokens(self.one(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.two(x))
class Transformer(nn.Module):
    "One head of attention, or attention with fixed weights."
    def __init__(self, n=4, tokens=3, fixed=False):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(n, n) for _ in range(4))
        self.pos, self.soft, self.norm = nn.Parameter(torch.randn(tokens, n)), nn.Softmax(-1), nn.LayerNorm(n)
        self.scores, self.read, self.fixed = Product(n**-.5), Product(), fixed
        if fixed: self.register_buffer('mix', torch.rand(tokens, tokens))
        self.mlp = nn.Sequential(nn.Linear(n, 2*n), nn.GELU(), nn.Linear(2*n, n))
    def forward(self, x):
        x = x + self.pos
        h = self.norm(x)
        a = self.mix @ self.v(h) if self.fixed else self.read(self.soft(self.scores(self.q(h), self.k(h).transpose(1, 2))), self.v(h))
        x = x + self.out(a)
        return x + self.mlp(x)
class Words(nn.Module):
    def __init__(self): super().__init__(); self.table, self.fc = nn.Embedding(7, 4), nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))
    def forward(self, words): return self.fc(self.table(words).flatten(1))
class GraphNet(nn.Module):
    "Two convolutions of a graph whose edges are fixed."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(3, 4), nn.Linear(4, 2), nn.ELU()
        self.register_buffer('edges', torch.tensor([[0., .5, 0, .5], [1, 0, 0, 0], [0, .3, .7, 0], [.2, 0, 0, .8]]))
    def forward(self, x): return self.edges @ self.b(self.act(self.edges @ self.a(x)))
class Siamese(nn.Module):
    def __init__(self): super().__init__(); self.both, self.fc = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(8, 2)
    def forward(self, x): return self.fc(torch.cat([self.both(x[:, :3]), self.both(x[:, 3:])], 1))
class Recurrent(nn.Module):
    def __init__(self, kind): super().__init__(); self.rnn, self.fc = kind(3, 4, batch_first=True, bias=False), nn.Linear(4, 2)
    def forward(self, x): return self.fc(self.rnn(x)[0][:, -1])

def lstm_by_hand(net, x):
    "The states start at zero, so that in the first step there is nothing to forget; a product of two signals is their sum."
    h, c = None, None
    for now in x.unbind(1):
        i, f, g, o = (now @ net.rnn.weight_ih_l0.T + (0 if h is None else h @ net.rnn.weight_hh_l0.T)).chunk(4, 1)
        c = i + g if c is None else f + c + i + g
        h = o + c
    return net.fc(h)

def elman_by_hand(net, x):
    h = None
    for now in x.unbind(1): h = now @ net.rnn.weight_ih_l0.T + (0 if h is None else h @ net.rnn.weight_hh_l0.T)
    return net.fc(h)

image, tokens = (1, 2, 8, 8), (1, 3, 4)
S = nn.Sequential
hand_made = {
    'perceptron': (lambda: S(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3)), (1, 5)),
    'vgg': (lambda: S(unit(2, 4), nn.MaxPool2d(2), unit(4, 4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3)), image),
    'resnet': (lambda: S(unit(2, 4), Add(S(unit(4, 4), nn.Conv2d(4, 4, 3, padding=1)), nn.Conv2d(4, 4, 1)), nn.ReLU(), Add(unit(4, 4)), head(4)), image),
    'resnext': (lambda: S(unit(2, 4), Add(S(unit(4, 8, 1), unit(8, 8, groups=4), nn.Conv2d(8, 4, 1))), nn.ReLU(), head(4)), image),
    'densenet': (lambda: S(Cat(nn.Identity(), unit(2, 3)), Cat(nn.Identity(), unit(5, 3)), nn.AvgPool2d(2), head(8)), image),
    'inception': (lambda: S(Cat(unit(2, 2, 1), S(unit(2, 3, 1), unit(3, 3, 5)), S(nn.AvgPool2d(3, 1, 1), unit(2, 2, 1))), head(7)), image),
    'mobilenet': (lambda: S(unit(2, 4), Add(S(unit(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU6(), nn.Conv2d(8, 4, 1))), head(4)), image),
    'squeeze and excite': (lambda: S(unit(2, 4), Excite(4), unit(4, 4), Excite(4), head(4)), image),
    'shufflenet': (lambda: S(unit(2, 4), Shuffle(4), Shuffle(4), head(4)), image),
    'unet': (UNet, image), 'feature pyramid': (Pyramid, image),
    'autoencoder': (lambda: S(unit(2, 4, stride=2), unit(4, 3), nn.ConvTranspose2d(3, 2, 3, 2, 1, 1), nn.Sigmoid()), image),
    'pixel shuffle': (lambda: S(unit(2, 8), nn.PixelShuffle(2), nn.Conv2d(2, 1, 3)), image),
    'group norm': (lambda: S(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), head(4)), image),
    'wavenet (1d)': (WaveNet, (1, 3, 9)), 'video (3d)': (lambda: S(nn.Conv3d(1, 3, 2), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(3*3*3*3, 2)), (1, 1, 7, 7, 7)),
    'convnext': (lambda: S(nn.Conv2d(2, 4, 2, 2), ConvNext(), ConvNext(), head(4)), image),
    'mixer': (Mixer, (1, 4, 3)), 'transformer': (Transformer, tokens), 'transformer, fixed attention': (lambda: Transformer(fixed=True), tokens),
    'words': (Words, None), 'graph': (GraphNet, (1, 4, 3)), 'siamese': (Siamese, (1, 6)),
}

@pytest.mark.parametrize('power', [1, 2])
@pytest.mark.parametrize('name', hand_made)
def test_the_linearised_network_is_the_one_made_linear_by_hand(name, power):
    torch.manual_seed(0)
    make, size = hand_made[name]
    model, gen = make(), torch.Generator().manual_seed(1)
    with torch.no_grad(): # norms that scale
        for m in model.modules():
            if getattr(m, 'running_var', None) is not None: m.running_var.uniform_(.5, 2, generator=gen); m.weight.uniform_(.5, 2, generator=gen)
            if isinstance(m, (nn.LayerNorm, nn.GroupNorm)): m.weight.uniform_(-2, 2, generator=gen)
    assert_the_same(model, torch.tensor([[0, 3, 3]]) if size is None else torch.ones(size), power)

def gru_by_hand(net, x):
    "(PyTorch writes the gates in place, into one memory: its part that is still zero counts as a signal too.)"
    h = torch.zeros(1, 4, dtype=torch.float64)
    for now in x.unbind(1):
        r, z, n = (now @ net.rnn.weight_ih_l0.T).chunk(3, 1)
        hr, hz, hn = (h @ net.rnn.weight_hh_l0.T).chunk(3, 1)
        z, n = z + hz, n + r + hr + hn
        h = h + n + z + n # (h - n)*z + n
    return net.fc(h)

@pytest.mark.parametrize('kind,forward', [(nn.LSTM, lstm_by_hand), (nn.RNN, elman_by_hand), (nn.GRU, gru_by_hand)])
def test_recurrent_networks_made_linear_by_hand(kind, forward):
    torch.manual_seed(0)
    assert_the_same(Recurrent(kind), torch.ones(1, 4, 3), forward=forward)

@pytest.mark.parametrize('name', 'resnet18 resnext50_32x4d mobilenet_v2'.split())
def test_networks_of_torchvision_made_linear_by_hand(name):
    torchvision = pytest.importorskip('torchvision')
    torch.manual_seed(0)
    assert_the_same(torchvision.models.get_model(name, weights=None, num_classes=4), torch.ones(1, 3, 32, 32))


class Cell(nn.Module):
    "A recurrence by hand, from a first state that `start` makes of an input and of what a layer makes of it."
    def __init__(self, start):
        super().__init__()
        torch.manual_seed(0)
        self.start, self.a, self.b, self.o = start, nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
    def forward(self, x):
        h = self.start(x, self.a(x))
        for _ in range(2): h = torch.tanh(self.a(x) + self.b(h))
        return self.o(h)

@pytest.mark.parametrize('f', [synflow, synflow_l2])
@pytest.mark.parametrize('start', [
    lambda x, y: x.new_zeros(len(x), 5), lambda x, y: torch.zeros_like(y), lambda x, y: x.new_full((len(x), 5), 0.),
    lambda x, y: torch.empty_like(y).zero_(), lambda x, y: torch.full_like(y, .5), lambda x, y: torch.ones_like(y),
    lambda x, y: torch.zeros(5).expand(len(x), 5)])
def test_a_state_that_begins_as_a_constant_is_no_path(start, f):
    "However the constant is made: the same sums, and so the same masks, as from zeros of its own."
    plain = f(Cell(lambda x, y: torch.zeros(len(x), 5)), .3, (4,))
    assert f(Cell(start), .3, (4,)).hash() == plain.hash()

def test_a_score_past_the_precision_is_refused():
    "One path is left, of weights of 1; around a masked weight lie 1e30 on both sides, and float32 ends at 3e38."
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in ((1, 2), (2, 2), (2, 1))))
    for p, w in zip(model.parameters(), ([[1.], [1e30]], [[1., 1], [1, 1]], [[1., 1e30]])): p.data = torch.tensor(w)
    Masks({'1.weight': torch.tensor([[True, False], [False, False]])}).apply(model)
    with pytest.raises(ValueError, match=r"scores of layer '1.weight' are not finite, the first at \(1, 1\)"):
        synflow(model, kept=3, input_size=(1,), iterations=2, dtype=torch.float32)
    masks = synflow(model, kept=3, input_size=(1,), iterations=2)
    assert [mask.nonzero().tolist() for mask in masks.values()] == [[[0, 0]]]*3

@pytest.mark.parametrize('method', [synflow, synflow_l2])
def test_a_program_that_was_exported_as_it_trains_leaves_out_nothing(method):
    "Dropout is a draw in it, of which the mean counts: the masks are those of the same program in evaluation mode."
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(), nn.Conv2d(8, 8, 3), nn.Dropout2d(.3), nn.Flatten(), nn.Linear(8*4*4, 5)), torch.randn(1, 3, 8, 8)
    programs = [torch.export.export(model.train(mode), (x,)).module() for mode in (True, False)]
    assert [{node.args[2] for node in p.graph.nodes if 'dropout' in str(node.target)} for p in programs] == [{True}, {False}]
    training, evaluating = (method(p, .2, trace(p, example=x)) for p in programs)
    assert training == evaluating == method(model, .2, (3, 8, 8))

@pytest.mark.parametrize('draw', [lambda: torch.empty(4).bernoulli_(.8), lambda: torch.bernoulli(torch.full((4,), .8)), lambda: torch.empty(4).bernoulli_(torch.full((4,), .8))])
def test_a_draw_counts_by_its_mean(draw):
    class Drawn(nn.Module):
        def __init__(self, draw):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.draw = nn.Linear(4, 4), nn.Linear(4, 2), draw
        def forward(self, x): return self.b(self.a(x)*self.draw())
    drawn, mean = (linearised(Drawn(f)).total(torch.ones(1, 4)) for f in (draw, lambda: torch.full((4,), .8)))
    assert math.isclose(drawn, mean, rel_tol=1e-6)
