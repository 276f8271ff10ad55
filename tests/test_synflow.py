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
    assert synflow(model, .04, (30,), iterations=20) == synflow(model, .04, (30,), iterations=20, spatial=False)

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

families = '''alexnet vgg11_bn resnet18 resnet50 resnext50_32x4d'''.split()

class Scale(nn.Module):
    "A normalisation that is its weight alone."
    def __init__(self, weight, last):
        super().__init__()
        self.weight, self.last = weight, last
    def forward(self, x): return x*(self.weight if self.last else self.weight.view(-1, 1, 1))

def by_hand(model):
    "A copy of a network with magnitudes for weights, zeros for biases and means, and no activations: it is linear (but for maxima)."
    model = copy.deepcopy(model).double().eval()
    for m in list(model.modules()):
        for name, child in list(m.named_children()):
            if isinstance(child, (nn.ReLU, nn.ReLU6, nn.GELU, nn.Dropout)): setattr(m, name, nn.Identity())
            if isinstance(child, nn.LayerNorm): setattr(m, name, Scale(child.weight, type(child) is nn.LayerNorm))
        if hasattr(m, 'running_mean') and m.running_mean is not None: m.running_mean.zero_()
    with torch.no_grad():
        for name, p in model.named_parameters(): p.abs_() if not name.endswith('bias') else p.zero_()
    return model

@pytest.mark.parametrize('name', families)
def test_the_linearised_network_is_the_real_one_made_linear(name):
    torchvision = pytest.importorskip('torchvision')
    torch.manual_seed(0)
    more = dict(aux_logits=False, init_weights=False) if name in ('googlenet', 'inception_v3') else {}
    if name in ('fcn_resnet50', 'deeplabv3_resnet50'): more = dict(weights_backbone=None)
    model = torchvision.models.get_model(name, weights=None, num_classes=4, **more)
    n = 75 if name == 'inception_v3' else 64 if name in ('alexnet', 'vgg11', 'vgg11_bn') else 32
    size = (3, 16, n, n) if name == 's3d' else (3, 4, n, n) if name in ('r3d_18', 'mc3_18', 'r2plus1d_18') else (3, n, n)
    net, hand = linearised(model), by_hand(model)
    out = hand(torch.ones(1, *size, dtype=torch.float64))
    total, grads = net.gradients(*net.ones(size))
    truth = (out['out'] if isinstance(out, dict) else out).sum()
    truth.backward()
    assert float(total) == pytest.approx(float(truth.detach()), rel=1e-9) and float(total) > 0
    theirs = dict(hand.named_parameters())
    for layer, grad in grads.items():
        if layer in theirs and theirs[layer].ndim > 1: torch.testing.assert_close(grad, theirs[layer].grad, rtol=1e-7, atol=1e-9*float(grad.max()))
