"Pruning that trains: exact schedules, weights put back to the bit, and a network that is as it was when something fails."
import math, random

import numpy as np, pytest, torch, torch.nn.functional as F
from hypothesis import given, strategies as st

from phew_nb.data import digits
from phew_nb.graph import trace
from phew_nb.iterative import cubic_steps, gradual_magnitude, lottery, ticket_steps
from phew_nb.masks import Masks
from phew_nb.models import mlp, resnet20
from phew_nb.pruners import prune
from phew_nb.scores import random_pruning
from phew_nb.training import Callback, Recipe, data_loaders, quiet, sparse_learner

small = Recipe(epochs=2, batch_size=64, lr=.05)
data = digits().subset(16, 0, 4)

def loaders(batch_size=64): return data_loaders(data, batch_size, device='cpu')
def net(seed=0): return mlp([64, 30, 10], bn=True, seed=seed)
def state(model): return {n: t.clone() for n, t in model.state_dict().items()}
def assert_state(model, want):
    for n, t in model.state_dict().items(): assert torch.equal(t, want[n]), n

class Rates(Callback):
    "Every learning rate that was used, and the epochs."
    order = 99
    def __init__(self): self.rates = []
    def before_batch(self):
        if self.training: self.rates.append((self.epoch, self.opt.hypers[-1]['lr']))

# --- schedules -----------------------------------------------------------------------------------------------------------

@given(st.integers(1, 10**7), st.floats(0, 1), st.integers(1, 60))
def test_cubic_schedule_against_its_closed_form(start, part, n):
    k = round(part*start)
    steps = cubic_steps(start, k, n)
    assert len(steps) == n and steps[-1] == k and sorted(steps, reverse=True) == steps and steps[0] <= start
    s_f = 1 - k/start # Zhu and Gupta: s_t = s_f + (s_i - s_f)(1 - t/n)^3 with s_i = 0
    for t, left in enumerate(steps, 1): assert abs(left - start*(1 - (s_f - s_f*(1 - t/n)**3))) <= .5 + 1e-6*start

@given(st.integers(1, 10**7), st.floats(1e-4, 1), st.floats(.05, .9))
def test_ticket_schedule(start, part, fraction):
    k = max(1, round(part*start))
    steps = ticket_steps(start, k, fraction)
    assert steps[-1] == k and all(b >= math.floor(a*(1 - fraction)) - 1 for a, b in zip([start] + steps, steps))
    assert all(a > b for a, b in zip(steps, steps[1:])) or start == k

# --- gradual magnitude pruning -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('density', [.5, .1, .03])
def test_gmp_counts_and_zeros(density):
    model, rows = net(), []
    graph = trace(model, (64,))
    masks = gradual_magnitude(model, density, graph, loaders(), recipe=small, iterations=4, rows=rows)
    k = round(density*graph.total)
    assert masks.kept == k and [r['kept'] for r in rows] == [graph.total] + cubic_steps(graph.total, k, 4)
    params = dict(model.named_parameters())
    for name, mask in masks.items(): assert (params[name][~mask] == 0).all() and params[name][mask].isfinite().all()
    assert Masks.of(model) == masks

def test_gmp_fine_tunes_at_the_last_rate_for_one_epoch_each():
    rates = Rates()
    recipe = Recipe(epochs=4, batch_size=64, lr=.1, drops=(1/2, 3/4))
    gradual_magnitude(net(), .2, (64,), loaders(), recipe=recipe, iterations=3, cbs=[rates])
    per_epoch = len(loaders().train)
    got = [r for _, r in rates.rates]
    assert got == pytest.approx([.1]*2*per_epoch + [.01]*per_epoch + [.001]*per_epoch + [.001]*3*per_epoch)

def test_gmp_of_a_trained_network_does_not_train_it_densely():
    rows = []
    gradual_magnitude(net(), .2, (64,), loaders(), recipe=small, epochs=0, iterations=3, rows=rows)
    assert len(rows) == 3

def test_gmp_iterations_of_the_paper():
    from phew_nb.iterative import gmp_iterations
    assert gmp_iterations == {'resnet20_cifar10': 5, 'vgg19_cifar100': 10, 'vgg19_tiny_imagenet': 10, 'resnet18_tiny_imagenet': 25}
    rows = []
    gradual_magnitude(net(), .2, (64,), loaders(), recipe=small, epochs=0, rows=rows)
    assert len(rows) == 10

@pytest.mark.parametrize('recipe, steps', [('resnet20_cifar10', 5), ('resnet20_cifar10:code', 5), ('vgg19_cifar100', 10), ('default', 10), (small, 10)])
def test_gmp_steps_of_a_recipe(recipe, steps):
    from phew_nb.iterative import gmp_steps
    assert gmp_steps(recipe) == steps

def test_gmp_prunes_the_smallest_of_what_it_trained():
    "With a rate of zero nothing moves, so the result is plain magnitude pruning of the initial weights."
    from phew_nb.scores import magnitude
    model, frozen = net(), Recipe(epochs=1, batch_size=64, lr=0.)
    assert gradual_magnitude(model, .1, (64,), loaders(), recipe=frozen, iterations=5) == magnitude(net(), .1, (64,))

# --- lottery tickets -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('build,size', [(net, (64,)), (lambda: resnet20(10, n_in=1, width=.25, seed=0), (1, 8, 8))])
def test_ticket_has_the_initial_weights_bit_for_bit(build, size):
    model = build()
    initial = state(model)
    masks = lottery(model, .6, size, loaders(), recipe=small)
    for name, t in model.state_dict().items():
        want = initial[name].masked_fill(~masks[name], 0) if name in masks else initial[name]
        assert torch.equal(t, want), name

def test_ticket_rewound_to_an_early_epoch():
    first = net()
    learn = sparse_learner(loaders(), first, recipe=small)
    with quiet(learn): learn.fit(1) # the first epoch is the same whatever the length
    early = state(first)
    model, rates = net(), Rates()
    masks = lottery(model, .5, (64,), loaders(), recipe=Recipe(epochs=2, batch_size=64, lr=.05, drops=()), rewind=1, cbs=[rates])
    for name, t in model.state_dict().items():
        want = early[name].masked_fill(~masks[name], 0) if name in masks else early[name]
        assert torch.equal(t, want), name
    epochs = [e for i, (e, _) in enumerate(rates.rates) if i == 0 or e != rates.rates[i-1][0]]
    assert epochs[:2] == [0, 1] and set(epochs[2:]) <= {1}

def test_ticket_prunes_the_smallest_trained_weights_in_its_first_round():
    model, trained = net(), net()
    learn = sparse_learner(loaders(), trained, recipe=small)
    with quiet(learn): learn.fit_recipe()
    masks = lottery(model, .8, (64,), loaders(), recipe=small)
    params = dict(trained.named_parameters())
    kept = torch.cat([params[n].detach().abs()[m] for n, m in masks.items()])
    gone = torch.cat([params[n].detach().abs()[~m] for n, m in masks.items()])
    assert kept.min() >= gone.max()

def test_rounds():
    rows = []
    masks = lottery(net(), .5, (64,), loaders(), recipe=small, rows=rows)
    assert [r['kept'] for r in rows] == [masks.total] + ticket_steps(masks.total, masks.kept)[:-1]

@pytest.mark.parametrize('bad', [dict(rewind=2), dict(rewind=-1), dict(fraction=0), dict(fraction=20), dict(epochs=-1)])
def test_what_makes_no_sense_is_refused(bad):
    model = net()
    before = state(model)
    with pytest.raises(ValueError): lottery(model, .5, (64,), loaders(), recipe=small, **bad)
    assert_state(model, before)

# --- both ----------------------------------------------------------------------------------------------------------------

both = pytest.mark.parametrize('f', [lambda *a, **k: gradual_magnitude(*a, iterations=2, **k), lottery], ids=['gmp', 'lottery'])

@both
def test_repeatable_and_the_global_random_state_is_kept(f):
    torch.manual_seed(5); np.random.seed(5); random.seed(5)
    a, b, dls = net(), net(), loaders()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first = f(a, .5, (64,), dls, recipe=small)
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()
    torch.manual_seed(6)
    assert f(b, .5, (64,), loaders(), recipe=small) == first
    assert_state(b, state(a))

@both
@pytest.mark.parametrize('masked', [None, 'apply', 'keep'])
def test_a_failure_puts_the_network_back(f, masked):
    model, calls = net().train(), []
    if masked: getattr(random_pruning(model, .9, (64,)), masked)(model)
    F.cross_entropy(model(torch.randn(8, 64)), torch.arange(8)).backward()
    before, masks, modes = state(model), Masks.of(model), [m.training for m in model.modules()]
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    def loss(out, y):
        calls.append(1)
        if len(calls) > 9: raise RuntimeError('half way')
        return F.cross_entropy(out, y)
    with pytest.raises(RuntimeError, match='half way'): f(model, .3, (64,), loaders(), recipe=small, loss=loss)
    assert_state(model, before)
    assert Masks.of(model) == masks and [m.training for m in model.modules()] == modes
    for p, (grad, old) in zip(model.parameters(), grads): assert p.grad is grad and torch.equal(grad, old)
    F.cross_entropy(model(torch.randn(8, 64)), torch.arange(8)).backward()
    if masked == 'keep': assert all((p.grad[~masks[n]] == 0).all() for n, p in model.named_parameters() if n in masks)

@both
def test_batches_will_do(f):
    model, gen = net(), torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 64, generator=gen), torch.randint(10, (16,), generator=gen)) for _ in range(3)]
    masks = f(model, .5, (64,), batches, recipe=Recipe(epochs=1, batch_size=16))
    assert masks.kept == round(.5*masks.total)

@both
def test_masked_weights_never_come_back(f):
    model = net()
    first = random_pruning(model, .6, (64,), seed=2).apply(model)
    second = f(model, .3, (64,), loaders(), recipe=small)
    assert second <= first and second.kept == round(.3*first.total)
    with pytest.raises(ValueError, match='may be kept'): f(model, .9, (64,), loaders(), recipe=small)

@both
def test_data_is_needed(f):
    with pytest.raises(ValueError, match='trains the network'): f(net(), .5, (64,))
    with pytest.raises(ValueError, match='no batches'): f(net(), .5, (64,), [])

@both
def test_training_goes_on_from_the_result(f):
    model = net()
    masks = f(model, .3, (64,), loaders(), recipe=small)
    learn = sparse_learner(loaders(), model, recipe=small)
    with quiet(learn): learn.fit_recipe()
    params = dict(model.named_parameters())
    for name, mask in masks.items(): assert (params[name][~mask] == 0).all()

def test_all_of_them_by_name():
    for method in ('gmp', 'lottery'):
        masks = prune(net(), method, .5, (64,), dl=loaders(), recipe=small)
        assert masks.kept == round(.5*masks.total)
    with pytest.raises(ValueError, match='this method trains the network'): prune(net(), 'gmp', .5, (64,))
