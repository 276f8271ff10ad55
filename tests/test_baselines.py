"FORCE, NTK-SAP, Wanda and walks by scores: exact counts, refusals in words, networks left as found, values by a second way."
import copy, math, warnings

import pytest, torch, torch.nn.functional as F
from torch import nn

from phew_nb.baselines import (activation_scores, force, highest_per_row, input_rms, ntk_sap, phew_act, phew_snip, px,
                               px_scores, wanda)
from phew_nb.graph import trace
from phew_nb.masks import Masks
from phew_nb.models import mlp, resnet20
from phew_nb.pruners import prune
from phew_nb.scores import grasp_scores, iter_snip, snip_scores
from phew_nb.synflow import synflow_l2
from phew_nb.walks import phew
from test_scores import (Clips, Zeroes, assert_as_found, assert_same, build, data, described, nasty, refused, snapshot, traced_once,
                         unusual)

few = dict(force=dict(iterations=3), ntk_sap=dict(iterations=3), px=dict(iterations=3))
methods = dict(force=force, ntk_sap=ntk_sap, wanda=wanda, px=px, phew_snip=phew_snip, phew_act=phew_act)

def run(method, model, density=.3, size=(6,), dl=None, **kwargs):
    "By its name, in few steps."
    return prune(model, method, density, size, dl=data() if dl is None else dl, **few.get(method, {}), **kwargs)

# --- counts --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('density', [.02, .1, .37, .9, 1.])
@pytest.mark.parametrize('method', ['force', 'ntk_sap', 'wanda', 'px'])
def test_counts_are_exact(method, density):
    model, images = resnet20(10, n_in=1, width=.25, seed=0), [(x.view(8, 1, 8, 8), y) for x, y in data(16, 10, 64)]
    graph = trace(model, (1, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        masks = run(method, model, density, graph, images)
    assert masks.kept == round(density*graph.total) and list(masks) == list(graph.params)

@pytest.mark.parametrize('method', methods)
@pytest.mark.parametrize('kept', [1, 2, 7, 40, 79, 80])
def test_numbers_are_exact(method, kept):
    "By walks, less than one walk above, and never a weight that is on no path."
    model = build('plain')
    graph = trace(model, (6,))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        masks = run(method, model, None, graph, kept=kept)
    assert masks.kept == kept if not method.startswith('phew') else kept <= masks.kept < kept + 2

@pytest.mark.parametrize('method', methods)
@pytest.mark.parametrize('kwargs, error, words', [
    (dict(density=0), ValueError, r'density must be in \(0, 1\]'), (dict(density=95), ValueError, 'sparsity of 95% is density=0.05'),
    (dict(density=None), ValueError, 'either density= or kept='), (dict(density=.3, kept=3), ValueError, 'either density= or kept='),
    (dict(density=None, kept=0), ValueError, 'kept must be between 1'), (dict(density=None, kept=81), ValueError, 'kept must be between 1'),
    (dict(density=None, kept=2.5), TypeError, 'whole number'), (dict(density='.3'), TypeError, 'density must be a number'),
    (dict(size=(7,)), Exception, 'does not run on an example'), (dict(size=None), Exception, 'input_size'),
    (dict(size=(0,)), Exception, 'positive integers')])
def test_what_is_asked_for_is_checked(method, kwargs, error, words):
    model = unusual(build('plain'))
    before = snapshot(model)
    with pytest.raises(error, match=words): run(method, model, **dict(density=.3) | kwargs)
    assert_same(before, snapshot(model))

@pytest.mark.parametrize('method, kwargs, error, words', [
    ('force', dict(iterations=0), ValueError, 'iterations must be a whole number'), ('ntk_sap', dict(iterations=1.5), ValueError, 'iterations must'),
    ('ntk_sap', dict(epsilon=0), ValueError, 'epsilon must be above 0'), ('ntk_sap', dict(n=0), ValueError, 'must be 1 or more'),
    ('ntk_sap', dict(samples=0), ValueError, 'must be 1 or more'), ('ntk_sap', dict(init='kaiming'), Exception, 'initialisation'),
    ('phew_snip', dict(seed=1.5), TypeError, 'seed must be an integer'),
    ('phew_act', dict(power='big'), Exception, 'power'), ('phew_snip', dict(fork='both'), ValueError, "fork must be one of"),
    ('wanda', dict(back=True), TypeError, "no argument 'back'"), ('force', dict(power=1), TypeError, "no argument 'power'")])
def test_settings_that_are_refused(method, kwargs, error, words):
    model = unusual(build('plain'))
    before = snapshot(model)
    with pytest.raises(error, match=words): prune(model, method, .3, (6,), **dict(dl=data()) | kwargs)
    assert_same(before, snapshot(model))

@pytest.mark.parametrize('method', ['force', 'wanda', 'px', 'phew_snip', 'phew_act'])
@pytest.mark.parametrize('dl, words', [(None, 'give batches of'), ([], 'there are no batches'), (7, 'dl must be an iterable'),
                                       ([(torch.ones(8, 5), torch.zeros(8).long())], r'the network, on batch 0|on batch 0'),
                                       ([(torch.full((8, 6), math.nan), torch.zeros(8).long())], 'not finite|is nan')])
def test_data_that_are_refused(method, dl, words):
    model = unusual(build('plain'))
    before = snapshot(model)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words): prune(model, method, .3, (6,), dl=dl, **few.get(method, {}))
    assert_same(before, snapshot(model))

@pytest.mark.parametrize('method', ['force', 'phew_snip'])
@pytest.mark.parametrize('what', refused)
def test_losses_that_are_refused(method, what):
    (dl, loss, words), model = refused[what], unusual(build('plain'))
    before = snapshot(model)
    with warnings.catch_warnings(), pytest.raises((ValueError, TypeError, IndexError, RuntimeError, AttributeError), match=words):
        warnings.simplefilter('ignore')
        methods[method](model, .3, (6,), dl, loss)
    assert_same(before, snapshot(model))

@pytest.mark.parametrize('method', methods)
def test_a_graph_alone_does_not_run(method):
    with pytest.raises(TypeError, match='this method runs the network'): run(method, trace(build('plain'), (6,)), size=None)

# --- nothing is left behind ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('ends', ['returns', 'raises'])
@pytest.mark.parametrize('method', methods)
@pytest.mark.parametrize('kind', nasty)
def test_a_network_that_changes_itself_is_left_as_found(kind, method, ends):
    torch.manual_seed(0)
    model = kind()
    size = traced_once(model) if kind in (Clips, Zeroes) else (6,)
    for i, p in enumerate(model.parameters()): p.grad = torch.full_like(p, float(i)) if i % 2 else None
    before, broken = described(model), data() + [(torch.ones(8, 5), torch.zeros(8).long())]
    if ends == 'returns': run(method, model, .3, size)
    elif method == 'ntk_sap':
        with pytest.raises(RuntimeError): run(method, model, .3, size, inputs=(torch.ones(8, 5),))
    else:
        with pytest.raises((RuntimeError, ValueError), match='on batch 3'): run(method, model, .3, size, broken)
    assert_as_found(before, described(model))

@pytest.mark.parametrize('method', methods)
@pytest.mark.parametrize('name', ['plain', 'shared', 'dropping', 'recurrent'])
def test_network_is_left_bit_for_bit(method, name):
    model = unusual(build(name))
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        run(method, model)
    assert_same(before, snapshot(model))

@pytest.mark.parametrize('method', methods)
@pytest.mark.parametrize('around', [torch.no_grad, torch.inference_mode, lambda: torch.autocast('cpu', torch.bfloat16)])
def test_what_is_around_the_call_does_not_matter(method, around):
    model = build('dropping')
    with around(): inside = run(method, model)
    assert inside == run(method, model)

@pytest.mark.parametrize('method', methods)
def test_masked_weights_are_never_kept_again(method):
    model = build('plain')
    first = prune(model, 'phew', .6, (6,), seed=5).keep(model)
    second = run(method, model, .2)
    assert second <= first and Masks.of(model) == first

@pytest.mark.parametrize('method', [m for m in methods if m != 'ntk_sap'])
def test_a_loader_that_shuffles_leaves_the_random_states(method):
    "It draws from them, and may be read more than once."
    x, y = (torch.cat(parts) for parts in zip(*data()))
    dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8, shuffle=True)
    before = torch.get_rng_state()
    run(method, build('plain'), dl=dl)
    assert torch.equal(torch.get_rng_state(), before)

# --- values --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kept', [5, 30, 60])
@pytest.mark.parametrize('signed', [False, True])
def test_force_with_nothing_coming_back_is_iterative_snip(kept, signed):
    model, more = build('dropping'), dict(kept=kept, iterations=5, signed=signed)
    assert force(model, None, (6,), data(), back=False, **more) == iter_snip(model, None, (6,), data(), **more)

def test_force_is_at_a_fixed_point_of_its_own_rule():
    "The last step keeps what is highest of |theta dL/d(theta bar)| at the masks of the step before."
    model = mlp([6, 9, 4], seed=1).double()
    graph, dl = trace(model, (6,)), [(x.double(), y) for x, y in data()]
    n = graph.total
    steps = [round(n*(10/n)**(t/4)) for t in (1, 2, 3)]
    before = force(model, None, graph, dl, kept=steps[-1], iterations=3) if steps == [round(n*(steps[-1]/n)**(t/3)) for t in (1, 2, 3)] else None
    last, theta = force(model, None, graph, dl, kept=10, iterations=4), {k: p.detach() for k, p in graph.params.items()}
    if before is None: pytest.skip('the two schedules are rounded differently')
    weights = {k: (t*before[k]).requires_grad_() for k, t in theta.items()}
    total = dict.fromkeys(theta, 0)
    for x, y in dl:
        grads = torch.autograd.grad(F.cross_entropy(torch.func.functional_call(model, weights, x), y), list(weights.values()))
        for k, g in zip(weights, grads): total[k] = total[k] + g*theta[k]
    flat = torch.cat([t.abs().flatten() for t in total.values()])
    assert torch.equal(torch.cat([m.flatten() for m in last.values()]), flat >= flat.sort(descending=True)[0][9])

class Convolutions(nn.Module):
    "Grouped, strided, transposed and plain convolutions, and a linear layer on their positions."
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.c, self.d = nn.Conv2d(3, 5, (1, 3), stride=(2, 1), bias=False), nn.Linear(5*6*10, 4)
    def forward(self, x): return self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))).flatten(1))

def test_inputs_of_convolutions_by_differentiation():
    "The sum of squares of the inputs of a weight is the derivative, by it, of the sum of the layer's outputs for squared inputs."
    torch.manual_seed(0)
    model, x, seen = Convolutions().double(), torch.randn(3, 2, 6, 6).double(), {}
    def hook(m, inputs, out): seen[m] = inputs[0].detach(), out.shape
    hooks = [m.register_forward_hook(hook) for m in model.children()]
    model(x)
    for h in hooks: h.remove()
    found = input_rms(model, trace(model, (2, 6, 6)), [x[:1], x[1:]])
    for name, m in model.named_children():
        inputs, shape = seen[m]
        weight = m.weight.detach().clone().requires_grad_()
        squares, = torch.autograd.grad(torch.func.functional_call(m, {'weight': weight, **({'bias': torch.zeros_like(m.bias)} if m.bias is not None else {})}, inputs**2).sum(), weight)
        n = {'a': 3*36, 'b': 3*36, 'c': 3*6*10, 'd': 3}[name]
        torch.testing.assert_close(found[f'{name}.weight'], (squares/n).sqrt())

def test_inputs_of_shared_weights_and_of_recurrent_ones():
    model = build('shared')
    graph, xs = trace(model, (6,)), torch.cat([x for x, y in data()])
    a = torch.tanh(model.a(xs)); b = torch.tanh(model.a(a)); c = torch.tanh(model.b(b))
    found = input_rms(model, graph, data())
    mean = lambda *ts: (torch.cat(ts)**2).mean(0).sqrt().expand(6, 6)
    torch.testing.assert_close(found['a.weight'], mean(xs, a))
    torch.testing.assert_close(found['b.weight'], mean(b, c))
    rnn = build('recurrent')
    found = input_rms(rnn, trace(rnn, (6,)), data())
    torch.testing.assert_close(found['rnn.weight_ih_l0'], (xs**2).mean(0).sqrt().expand(20, 6))

def test_computed_weights_are_refused():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(ValueError, match='cannot be seen'): input_rms(model, trace(model, (6,)), data())

def loop(model, xs, share, renew):
    "Wanda on a chain of linear layers, each scored by what comes from the pruned ones before it, or all at once."
    masks, h = {}, xs
    for i, m in enumerate(m for m in model.modules() if isinstance(m, nn.Linear)):
        score = m.weight.detach().abs()*h.norm(dim=0)
        masks[i] = score >= score.sort(1, descending=True)[0][:, [round(share*score.shape[1]) - 1]]
        h = torch.relu(F.linear(h, m.weight*masks[i] if renew else m.weight, m.bias))
    return list(masks.values())

@pytest.mark.parametrize('renew', [True, False])
@pytest.mark.parametrize('share', [.25, .5, .75])
def test_wanda_against_a_loop(share, renew):
    model = mlp([8, 12, 16, 4], seed=2)
    xs = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    masks = wanda(model, share, (8,), [xs[:10], (xs[10:], None)], renew=renew)
    assert all(torch.equal(m, by_hand) for m, by_hand in zip(masks.values(), loop(model, xs, share, renew), strict=True))

def test_rows_are_alike():
    model, images = resnet20(10, n_in=1, width=.5, seed=0), [torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))]
    graph = trace(model, (1, 8, 8))
    for density in (.1, .33, .5):
        for name, mask in wanda(model, density, graph, images).items():
            n = mask.flatten(1).sum(1)
            assert n.max() - n.min() <= 1 and abs(int(n.sum()) - density*mask.numel()) <= 1

@pytest.mark.parametrize('seed', range(20))
def test_highest_per_row_by_brute_force(seed):
    gen = torch.Generator().manual_seed(seed)
    values = torch.randn(4, 5, generator=gen).round(decimals=1)
    values[torch.rand(4, 5, generator=gen) < .3] = -math.inf
    limits = (values > -math.inf).sum(1)
    for k in range(int(limits.sum()) + 1):
        mask = highest_per_row(values, k)
        counts = mask.sum(1)
        assert counts.sum() == k and (counts <= limits).all() and not (mask & (values == -math.inf)).any()
        short = counts < limits
        assert not short.any() or counts.max() - counts[short].min() <= 1 # no row has two more than one that has some left
        for row, m in zip(values, mask): assert not m.any() or row[m].min() >= row[~m].max() if (~m).any() else True

@pytest.mark.parametrize('f, scores', [(phew_act, activation_scores), (phew_snip, snip_scores)])
def test_walks_by_scores_are_those_of_a_network_of_scores(f, scores):
    model = resnet20(10, n_in=1, width=.25, seed=0)
    images, graph = [(x.view(8, 1, 8, 8), y) for x, y in data(16, 10, 64)], trace(model, (1, 8, 8))
    other, found = copy.deepcopy(model), scores(model, graph, images)
    for name, p in other.named_parameters(): p.data = found.get(name, p.data)
    for more in (dict(), dict(power=2), dict(granularity='kernel')):
        assert f(model, .1, graph, images, seed=3, **more) == phew(other, .1, (1, 8, 8), seed=3, **more)

def test_scores_from_data_alone():
    model, graph = build('plain'), trace(build('plain'), (6,))
    own = trace(model, (6,))
    for scores in (snip_scores, activation_scores):
        assert all(torch.equal(s, t) for s, t in zip(scores(model, data()).values(), scores(model, own, data()).values(), strict=True))
    a, b = snip_scores(model, data(), F.mse_loss and (lambda out, y: F.cross_entropy(out, y)*2)), snip_scores(model, own, data())
    for name in a: torch.testing.assert_close(a[name], 2*b[name])
    with pytest.raises(ValueError, match='no batches'): snip_scores(model, [])

def test_scaling_a_layer_changes_no_walk_by_activations():
    "Inputs ten times as large scale all scores of a layer."
    model = mlp([6, 8, 4], seed=0)
    once, ten = ([(x*f, y) for x, y in data()] for f in (1, 10))
    a, b = (activation_scores(model, trace(model, (6,)), dl)['hidden1.linear.weight'] for dl in (once, ten))
    torch.testing.assert_close(10*a, b)
    assert phew_act(mlp([6, 4], seed=0), .3, (6,), once, seed=1) == phew_act(mlp([6, 4], seed=0), .3, (6,), ten, seed=1)

# --- PX ------------------------------------------------------------------------------------------------------------------

class Pooled(nn.Module):
    "Convolutions, max and average pooling, a shortcut, and activations of several kinds."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Linear(12, 4)
    def forward(self, x):
        h = F.max_pool2d(torch.relu(self.a(x)), 2)
        h = h + F.gelu(self.b(h))
        return self.c(F.avg_pool2d(h, 2).flatten(1))

def factors(model, x):
    "Of `Pooled`, as functions of weights: how open the data find the paths to each output, how strong they are, and both path by path."
    z = F.conv2d(x, model.a.weight, model.a.bias, padding=1)
    h, places = F.max_pool2d_with_indices(torch.relu(z), 2)
    u = F.conv2d(h, model.b.weight, padding=1)
    on, share = (z > 0).to(z), (F.gelu(u)/u)**2
    def through(x, a, b, c, gates=True):
        s = F.conv2d(x, a, padding=1)
        s = (s*on).flatten(2).gather(2, places.flatten(2)).view_as(h) if gates else F.max_pool2d(s, 2)
        s = s + F.conv2d(s, b, padding=1)*(share if gates else 1)
        return F.avg_pool2d(s, 2).flatten(1) @ c.T
    opened = lambda *w: through(x**2, *map(torch.ones_like, w))
    return opened, lambda *w: through(torch.ones_like(x), *w, gates=False), lambda *w: through(x**2, *w)

@pytest.mark.parametrize('by_path', [False, True])
def test_px_against_gates_by_hand(by_path):
    torch.manual_seed(0)
    model, x = Pooled().double(), torch.randn(5, 1, 8, 8).double()
    with torch.no_grad(): opened, strength, both = factors(model, x)
    squares = {f'{n}.weight': (m.weight.detach()**2).requires_grad_() for n, m in model.named_children()}
    w = list(squares.values())
    product = both(*w).sum() if by_path else (opened(*w)*strength(*w)).sum()
    found = px_scores(model, trace(model, (1, 8, 8)), [((x[:2],), {}), ((x[2:],), {})], by_path=by_path)
    for (name, s), slope in zip(squares.items(), torch.autograd.grad(product, w)): torch.testing.assert_close(found[name], slope*s.detach())

@pytest.mark.parametrize('make, size', [(lambda: mlp([6, 8, 8, 4], bn=True, seed=0), (6,)), (Pooled, (1, 8, 8)),
                                        (lambda: resnet20(10, n_in=1, width=.25, seed=0), (1, 8, 8))])
def test_px_without_data_is_synflow_l2(make, size):
    torch.manual_seed(0)
    model, ones = make(), [(torch.ones(1, *size), torch.zeros(1))]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for density in (.1, .5):
            masks = synflow_l2(model, density, size, iterations=4, squared=True, square_means=False)
            assert px(model, density, size, ones, iterations=4, gates=False) == masks

def test_px_of_a_network_without_gates_knows_the_data_only_by_what_outputs_have_lost():
    "A linear network opens all paths: the data's factor is alike for all outputs until some have lost weights."
    model, x = mlp([6, 8, 4], activation=nn.Identity, bias=False, seed=0).double(), torch.randn(9, 6, generator=torch.Generator().manual_seed(0)).double()
    graph, names = trace(model, (6,)), ('hidden1.linear.weight', 'head.weight')
    whole, data = px_scores(model, graph, [((x,), {})], gates=False), float((x**2).sum())
    for name, s in px_scores(model, graph, [((x,), {})]).items(): torch.testing.assert_close(s, whole[name]/9*data*8) # eight paths from each input
    masks = {'head.weight': torch.arange(32).view(4, 8) % 3 > 0}
    A, B = ((model.get_parameter(name).detach()**2) for name in names)
    B, left = B*masks['head.weight'], masks['head.weight'].sum(1).double()
    torch.testing.assert_close(px_scores(model, graph, [((x,), {})], masks)['head.weight'], data*left[:, None]*B*A.sum(1))

def test_px_of_a_masked_network_has_gates_of_the_masked_network():
    model, x = mlp([6, 9, 4], seed=1), data()[0][0]
    graph = trace(model, (6,))
    masks = prune(graph, 'random', .5, seed=3)
    other = copy.deepcopy(model)
    masks.apply(other)
    a, b = px_scores(model, graph, [((x,), {})], masks), px_scores(other, trace(other, (6,)), [((x,), {})])
    for name in a: torch.testing.assert_close(a[name], b[name])
    assert all((s[~masks[name]] == 0).all() for name, s in a.items())

# --- NTK-SAP -------------------------------------------------------------------------------------------------------------

def test_change_of_outputs_is_the_trace_of_the_kernel():
    "With moves along single weights, the squared change adds up to the trace that `ntk` gives; so does its derivative."
    from phew_nb.baselines import change_gradients
    from phew_nb.metrics import ntk
    from phew_nb.scores import scoring
    model, eps = mlp([3, 4, 2], activation=nn.Tanh, bias=False, seed=1).double(), 1e-4
    graph, x = trace(model, (3,)), torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    theta = {name: p.detach().clone() for name, p in graph.params.items()}
    def exact(weights):
        "The trace of the kernel of the network with these weights, a mean over examples."
        copied = copy.deepcopy(model)
        for name, p in copied.named_parameters(): p.data = weights[name]
        return ntk(copied, x).trace()/len(x)
    with scoring(model, graph) as params:
        total, slope = 0, {name: torch.zeros_like(t) for name, t in theta.items()}
        for name, t in theta.items():
            for i in range(t.numel()):
                for sign in (1, -1): # odd terms cancel
                    moved = {k: w.clone() for k, w in theta.items()}
                    moved[name].view(-1)[i] += sign*eps
                    change, left, right = change_gradients(model, params, theta, moved, (x,))
                    total = total + change/2
                    for k, a, b in zip(theta, left, right): slope[k] += (a + b)/2 # the derivative where all are moved together
        total, slope = total/eps**2, {k: s/eps**2 for k, s in slope.items()}
    assert float(total) == pytest.approx(float(exact(theta)), rel=1e-6)
    for name, at in (('hidden1.linear.weight', (2, 1)), ('head.weight', (1, 3))):
        up, down = ({k: w.clone() for k, w in theta.items()} for _ in range(2))
        up[name][at] += 1e-4; down[name][at] -= 1e-4
        assert float(slope[name][at]) == pytest.approx(float(exact(up) - exact(down))/2e-4, rel=1e-4)

def test_ntk_sap_normalises_both_runs_by_the_statistics_before_the_move():
    "A second way, for one sample: functional calls with the statistics put in by hand, and the masks differentiated."
    from phew_nb.baselines import ntk_sap_scores
    from phew_nb.models import draw_weights
    from phew_nb.scores import scoring
    model = mlp([5, 6, 6, 3], bn=True, seed=0)
    graph, x = trace(model, (5,)), torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    masks = {name: torch.rand(p.shape, generator=torch.Generator().manual_seed(1)) < .7 for name, p in graph.params.items()}
    with scoring(model, graph) as params: found = ntk_sap_scores(model, graph, params, masks, torch.Generator().manual_seed(2), (x,), samples=1)
    gen, m = torch.Generator().manual_seed(2), {name: mask.float().requires_grad_() for name, mask in masks.items()}
    theta = {name: draw_weights(p.data, 'kaiming_normal', gen) for name, p in graph.params.items()}
    moved = {name: t + .01*torch.randn(t.shape, generator=gen) for name, t in theta.items()}
    still, stats = copy.deepcopy(model).train(), {}
    for norm in still.modules():
        if isinstance(norm, nn.BatchNorm1d): norm.momentum = 1.
    with torch.no_grad(): torch.func.functional_call(still, {k: masks[k]*t for k, t in theta.items()}, x)
    a, b = (torch.func.functional_call(still.eval(), {k: m[k]*t for k, t in w.items()}, x) for w in (theta, moved))
    slopes = torch.autograd.grad(((a - b)**2).sum()/len(x), list(m.values()))
    for (name, s), slope in zip(found.items(), slopes, strict=True): torch.testing.assert_close(s, slope.abs()/1e-4, rtol=2e-3, atol=1e-4)

def test_ntk_sap_looks_at_no_data_and_no_weights():
    a, b = mlp([6, 8, 4], seed=0), mlp([6, 8, 4], seed=1)
    assert ntk_sap(a, .3, (6,), iterations=3) == ntk_sap(b, .3, (6,), iterations=3) == prune(a, 'ntk_sap', .3, (6,), dl=data(), iterations=3)
    assert ntk_sap(a, .3, (6,), iterations=3, init=None) != ntk_sap(b, .3, (6,), iterations=3, init=None)

def test_ntk_sap_of_token_numbers_needs_inputs():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 3)
        def forward(self, ids): return self.head(torch.relu(self.embed(ids)))
    model, ids = Tokens(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    graph = trace(model, example=(ids[:1],))
    with pytest.raises(ValueError, match='draws normal inputs'): ntk_sap(model, .5, graph)
    assert ntk_sap(model, .5, graph, inputs=(ids,), iterations=3).kept == round(.5*graph.total)

class Vector(nn.Module):
    "The last weights are a vector."
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Parameter(torch.ones(4))
    def forward(self, x): return self.first(x) @ self.last

def test_the_inputs_of_a_vector_of_weights():
    torch.manual_seed(0)
    model, x = Vector(), torch.randn(5, 3)
    rms = input_rms(model, trace(model, (3,)), [x])
    assert torch.allclose(rms['last'], model.first(x).detach().square().mean(0).sqrt())
    assert torch.allclose(rms['first.weight'], x.square().mean(0).sqrt().expand(4, 3))

class Experts(nn.Module):
    "Einsums that need their weights in another order, and so copy them; a second copy is overwritten."
    def __init__(self): super().__init__(); self.w, self.v = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(3, 5, 2))
    def forward(self, x):
        h = torch.einsum('bd,edh->beh', x, self.w).tanh()
        return torch.einsum('beh,eho->bo', h, self.v) + x[:, :2] @ self.v.clone().zero_()[0, :2]

def test_inputs_of_weights_that_einsum_copies():
    torch.manual_seed(0)
    model, xs = Experts(), torch.randn(2, 6, 4)
    rms = input_rms(model, trace(model, (4,)), list(xs))
    h = torch.einsum('bd,edh->beh', xs.flatten(0, 1), model.w).tanh().detach()
    torch.testing.assert_close(rms['w'], xs.square().mean((0, 1)).sqrt()[None, :, None].expand(3, 4, 5))
    torch.testing.assert_close(rms['v'], h.square().mean(0).sqrt()[..., None].expand(3, 5, 2))
    assert run('wanda', model, .5, (4,), [xs[0]]).kept == 45

def test_ntk_sap_of_a_vector_of_weights():
    torch.manual_seed(0)
    masks = ntk_sap(model := Vector(), .5, (3,), iterations=2)
    assert masks.kept == 8 and masks['last'].any() and torch.equal(model.last, torch.ones(4))

class Sampled(nn.Module):
    "Draws in its forward pass."
    def __init__(self): super().__init__(); self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)
    def forward(self, x): return self.last((z := self.first(x).tanh()) + .1*torch.randn_like(z))

@pytest.mark.parametrize('method', ['px', 'snip', 'force', 'wanda', 'ntk_sap', 'synflow', 'phew_act'])
def test_a_network_that_draws_leaves_the_random_states(method):
    torch.manual_seed(0)
    model, before = Sampled(), torch.get_rng_state()
    masks = run(method, model)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert run(method, model) == masks

def test_px_says_so_where_the_data_open_no_path():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(model[0].bias, -100)
    with pytest.raises(OverflowError, match='the data open none of them'): px(model, .5, (3,), [torch.ones(5, 3)])

def test_activation_scores_normalise_by_the_batch_and_inputs_by_running_statistics():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), 5 + 2*torch.randn(50, 3)
    graph, w = trace(model, (3,)), model[1].weight.detach().abs()
    assert torch.allclose(activation_scores(model, graph, [x])['1.weight'], w, rtol=1e-4) # of mean 0 and variance 1
    assert torch.allclose(input_rms(model, graph, [x])['1.weight'], x.square().mean(0).sqrt().expand(2, 3), rtol=1e-4)

class OfTwoTypes(nn.Module):
    "A layer in bfloat16 between inputs and outputs in float32."
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8).bfloat16(), nn.Linear(8, 3)
    def forward(self, x): return self.b(self.a(x.bfloat16()).relu().float())

class Fixed(nn.Module):
    "Weights, a matrix that is none, and weights that are a product."
    def __init__(self):
        super().__init__()
        self.register_buffer('r', torch.randn(6, 16))
        self.a, self.b = nn.Linear(6, 6), nn.Linear(16, 3)
        self.u, self.v = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(4, 16))
    def forward(self, x): return self.b((self.a(x) @ self.r).relu() @ (self.u @ self.v))

@pytest.mark.parametrize('method', ['snip', 'iter_snip', 'grasp', 'phew', 'synflow', 'magnitude', *methods])
@pytest.mark.parametrize('kind', [OfTwoTypes, Fixed])
def test_a_network_of_two_types_or_with_fixed_matrices(kind, method):
    torch.manual_seed(0)
    net = kind()
    before, masks = snapshot(net), prune(net, method, .5, input_size=(6,), dl=data(classes=3), **few.get(method, {}))
    assert_as_found(before, snapshot(net))
    assert 0 <= masks.kept - round(.5*masks.total) <= 3*('phew' in method) # by less than a walk

class Complex(nn.Sequential):
    def __init__(self): super().__init__(*(nn.Linear(*sizes, dtype=torch.complex64) for sizes in ((6, 8), (8, 3))))
    def forward(self, x): return super().forward(x.to(torch.complex64)).abs()

def test_complex_weights_are_refused_by_name():
    net = Complex()
    for method in ('snip', 'grasp', 'synflow', 'px', 'wanda', 'phew', 'phew_snip', 'phew_act'):
        with pytest.raises(ValueError, match="'0.weight' are complex numbers"): prune(net, method, .5, input_size=(6,), dl=data(classes=3))
    for method in ('random', 'uniform', 'erk', 'magnitude'): assert prune(net, method, .5, input_size=(6,)).kept == 36

# --- weights that a constant zero closes ---------------------------------------------------------------------------------

class Tied(nn.Module):
    "The same weights behind one mask and behind another, or written to under a third."
    def __init__(self, *masks, writes=False):
        super().__init__()
        self.l, self.o, self.masks, self.writes = nn.Linear(6, 6), nn.Linear(6, 3), masks, writes
        for p in self.parameters(): nn.init.uniform_(p, generator=torch.Generator().manual_seed(p.numel())) # no rectifier closes
    def forward(self, x):
        if self.writes: self.l.weight.data *= self.masks[0]
        for m in self.masks: x = F.linear(x, self.l.weight if self.writes else self.l.weight*m, self.l.bias).relu()
        return self.o(x)

lower = torch.ones(6, 6).tril(-1)
def opened(model, n=20):
    "Weights that ever get a gradient."
    model, found = copy.deepcopy(model), torch.zeros(6, 6, dtype=torch.bool)
    for _ in range(n):
        for p in model.parameters(): nn.init.uniform_(p) # nothing is cut by a rectifier
        found |= torch.autograd.grad(model(torch.rand(9, 6)).sum(), model.l.weight)[0] != 0
    return found

blind = [Tied(lower), Tied(lower, writes=True), Tied(lower, torch.eye(6)), Tied(lower.t(), lower)]

@pytest.mark.parametrize('method, model', [(method, model) for model in blind for method in [
    'random', 'uniform', 'erk', 'magnitude', 'snip', 'iter_snip', 'grasp', 'synflow', 'synflow_l2', *methods]
    if model.writes or method not in ('wanda', 'phew_act')]) # which refuse computed weights
def test_no_method_spends_weights_that_a_constant_closes(method, model):
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        dl = [(torch.rand(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3)]
        masks = run(method, model, .3, dl=dl)
        masks.apply(model)
        again = run(method, model, .15, dl=dl)
    assert not (masks['l.weight'] & ~opened(model)).any() and not (again['l.weight'] & ~masks['l.weight']).any()
    if not method.startswith('phew'): assert masks.kept == round(.3*54) and again.kept == round(.15*54)

@pytest.mark.parametrize('method', ['snip', 'grasp', 'wanda', 'px', 'phew_act', 'phew_snip', 'force'])
def test_one_batch_is_no_list_of_batches(method):
    x, y = torch.rand(8, 6), torch.arange(8) % 3
    for dl in x, (x, y):
        with pytest.raises(TypeError, match=r'looks like one batch: give a list of batches, such as \[\(x, y\)\]'): run(method, build('plain'), dl=dl)

@pytest.mark.parametrize('layer', [nn.Identity, lambda: nn.LSTM(4, 4, batch_first=True)], ids=['linear', 'recurrent'])
@pytest.mark.parametrize('score', [input_rms, grasp_scores, snip_scores])
def test_scores_run_on_exact_kernels(layer, score):
    "Whatever is switched off for some layers, cuDNN stays deterministic and in full precision."
    seen, flags = [], lambda: [getattr(torch.backends.cudnn, name) for name in ('benchmark', 'deterministic', 'allow_tf32')]
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.a, self.b = layer(), nn.Linear(4, 3)
        def forward(self, x):
            seen.append(flags())
            x = self.a(x)
            return self.b((x[0] if isinstance(x, tuple) else x)[:, -1])
    torch.manual_seed(0)
    model, batch, before = Net(), (torch.randn(6, 5, 4), torch.arange(6) % 3), flags()
    graph = trace(model, (5, 4))
    seen.clear()
    score(model, graph, [batch])
    assert seen and all(now == [False, True, False] for now in seen) and flags() == before

@pytest.mark.parametrize('old', [False, True])
@pytest.mark.parametrize('method', ['iter_snip', 'force', 'px', 'ntk_sap'])
def test_rows_that_weight_norm_cannot_divide_are_named_on_the_way(method, old):
    "A step's masks leave a row empty, with which the next step would compute 0/0."
    make = torch.nn.utils.weight_norm if old else torch.nn.utils.parametrizations.weight_norm
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', FutureWarning)
        model = nn.Sequential(make(nn.Linear(6, 16)), nn.ReLU(), make(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 4))
    before = snapshot(model)
    with pytest.raises(ValueError, match='weight_norm divides .* empty: the network would compute 0/0'):
        prune(model, method, .02, (6,), dl=data())
    assert_same(snapshot(model), before)

class Nodes(nn.Module):
    "A graph network of seven nodes."
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
        self.register_buffer('edges', torch.ones(7, 7))
    def forward(self, x): return self.b(torch.relu(self.edges @ self.a(x)))

def test_ntk_sap_says_how_to_give_inputs_that_are_no_hundred_rows():
    torch.manual_seed(0)
    model, x = Nodes(), torch.randn(7, 5)
    graph = trace(model, example=x)
    with pytest.raises(RuntimeError, match=r'on 100 rows of normal numbers \(inputs= gives others\): .*cannot be multiplied'):
        ntk_sap(model, .3, graph)
    assert ntk_sap(model, .3, graph, inputs=(x,)).kept == round(.3*graph.total)

class Bags(nn.Module):
    "Bags of words; of padding alone a bag is empty."
    def __init__(self, mode, weighed):
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(9, 4, mode=mode, padding_idx=0), nn.Linear(4, 3)
        self.shares = torch.tensor([.5, 1., 2., 1., -3.]) if weighed else None
    def bag(self, x): return self.words(x, per_sample_weights=None if self.shares is None else self.shares.expand(x.shape))
    def forward(self, x): return self.out(self.bag(x))

@pytest.mark.parametrize('mode, weighed', [('sum', False), ('sum', True), ('mean', False), ('max', False)])
def test_what_words_in_bags_are_multiplied_with(mode, weighed):
    "Against the matrix product that a bag is: of the numbers by which words are in it, in each column."
    torch.manual_seed(0)
    model, x = Bags(mode, weighed), torch.randint(9, (12, 5))
    x[3], x[4] = 0, torch.tensor([7, 7, 7, 0, 2])
    with torch.no_grad(): table = model.words.weight.clone()
    numbers = torch.zeros(12, 9, 4)
    for bag, words in zip(numbers, x.tolist()):
        kept = [(w, s) for w, s in zip(words, model.shares.tolist() if weighed else [1.]*5) if w]
        for w, s in kept if mode != 'max' else []: bag[w] += s/(len(kept) if mode == 'mean' else 1)
        for column in range(4) if mode == 'max' and kept else []:
            bag[max(kept, key=lambda k: table[k[0], column])[0], column] = 1
    assert torch.allclose((numbers*table).sum(1), model.bag(x))
    graph = trace(model, example=x[:1])
    rms = input_rms(model, graph, [x[:7], x[7:]])['words.weight']
    torch.testing.assert_close(rms, numbers.square().mean(0).sqrt())
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert wanda(model, .4, graph, dl=[x]).kept == round(.4*graph.total)
