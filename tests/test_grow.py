"Masks that grow: exact counts, RigL against a dense loop, runs that go on, mixed precision, two processes."
import os, socket, warnings

import pytest, torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import cross_entropy

warnings.filterwarnings('ignore', '.*torch.jit.script', FutureWarning)
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import Adam, Lamb
from fastai.vision.all import Callback

from phew_nb.data import digits
from phew_nb.graph import trace
from phew_nb.grow import Grow, cosine_frac, dense_gradients, grow, growers, regrow, regrow_walks
from phew_nb.masks import Masks
from phew_nb.models import mlp, resnet20
from phew_nb.training import Recipe, Sparse, data_loaders, quiet, sparse_learner
from phew_nb.walks import phew

torch.set_num_threads(1)
data = digits().subset(20, seed=0, n_test_per_class=10)
counts = lambda masks: {name: int(mask.sum()) for name, mask in masks.items()}

def assert_zero(model, masks):
    for name, mask in masks.items(): assert (model.get_parameter(name)[~mask] == 0).all()

def random_masks(model, density, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return Masks({n: torch.rand(p.shape, generator=gen) < density for n, p in model.named_parameters() if p.ndim > 1})

def random_scores(model, seed=0): # not the numbers that the weights were drawn from
    gen = torch.Generator().manual_seed(seed + 1000)
    return {n: torch.randn(p.shape, generator=gen) for n, p in model.named_parameters() if p.ndim > 1}

# --- the pure functions ----------------------------------------------------------------------------------------------

@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_regrow_against_sorting_by_hand(density, frac, seed):
    model = mlp([5, 7, 3], seed=seed)
    masks, scores = random_masks(model, density, seed), random_scores(model, seed)
    new = regrow(model, masks, frac, scores)
    assert counts(new) == counts(masks)
    for name, mask in masks.items():
        weight, old = model.get_parameter(name).detach().abs().flatten().tolist(), mask.flatten().tolist()
        kept, free = [i for i, b in enumerate(old) if b], [i for i, b in enumerate(old) if not b]
        n = min(round(frac*len(kept)), len(free))
        gone = sorted(kept, key=lambda i: weight[i])[:n]
        come = sorted(free, key=lambda i: -scores[name].abs().flatten()[i])[:n]
        assert set(new[name].flatten().nonzero()[:, 0].tolist()) == set(kept) - set(gone) | set(come)

@settings(max_examples=25)
@given(st.floats(.05, .9), st.floats(0, 1), st.integers(0, 99))
def test_walks_leave_nothing_off_a_path(density, frac, seed):
    model = mlp([6, 9, 9, 4], seed=seed)
    graph = trace(model, (6,))
    masks = phew(graph, density, seed=seed)
    new = regrow_walks(model, masks, frac, random_scores(model, seed), seed, graph)
    assert new.kept == masks.kept and not new.report(graph).lost

def test_walks_on_convolutions_with_skips():
    model = resnet20(10, n_in=1, width=.25, seed=0)
    graph = trace(model, (1, 8, 8))
    masks, before = phew(graph, .1), {n: t.clone() for n, t in model.state_dict().items()}
    new = regrow_walks(model, masks, .3, random_scores(model), 0, graph)
    assert new.kept == masks.kept and new != masks and not new.report(graph).lost
    for name, t in model.state_dict().items(): assert torch.equal(t, before[name])

def test_random_growth_is_uniform():
    "Each of 30 free places comes equally often: 400 draws of 3, within five standard deviations."
    model = mlp([10, 4], seed=0)
    name = next(n for n, p in model.named_parameters() if p.ndim > 1)
    masks = Masks({name: torch.arange(40).view(4, 10) < 10})
    times = sum((regrow(model, masks, .3, seed=s)[name] & ~masks[name]).int() for s in range(400))[1:]
    assert times.sum() == 1200 and (times - 40).abs().max() < 5*(400*.1*.9)**.5

def test_random_growth_knows_nothing_of_weights_from_the_same_seed():
    "Weights drawn from [0, 1) by one seed, and by the same what comes: their mean is 1/2 within five standard deviations."
    layer = torch.nn.Linear(50, 40, bias=False)
    layer.weight.data = torch.rand(40, 50, generator=torch.Generator().manual_seed(0))
    masks = Masks({'weight': (torch.arange(2000) % 5 == 0).view(40, 50)})
    come = regrow(layer, masks, .5, seed=0)['weight'] & ~masks['weight']
    assert come.sum() == 200 and (layer.weight[come].mean() - .5).abs() < 5*(1/12/200)**.5

# --- against a loop without guards -----------------------------------------------------------------------------------

def dense_rigl(model, masks, batches, every, lr=.1, momentum=.9):
    "RigL by explicit masks: dense gradients of `weight * mask`, momentum by hand, twenty lines."
    params, masks = dict(model.named_parameters()), {n: m.clone() for n, m in masks.items()}
    memory = {n: torch.zeros_like(p) for n, p in params.items()}
    for p, m in ((params[n], m) for n, m in masks.items()): p.data *= m
    for step, (x, y) in enumerate(batches, 1):
        grads = dict(zip(params, torch.autograd.grad(cross_entropy(model(x), y), list(params.values()))))
        for name, p in params.items():
            mask = masks.get(name, torch.ones_like(p, dtype=torch.bool))
            if step % every == 0 and name in masks:
                n = min(round(cosine_frac((step - 1)/len(batches))*int(mask.sum())), int((~mask).sum()))
                drop = p.data.abs().masked_fill(~mask, float('inf')).flatten().argsort(stable=True)[:n]
                come = grads[name].abs().masked_fill(mask, -1).flatten().argsort(descending=True, stable=True)[:n]
                masks[name] = mask.flatten().index_fill(0, drop, False).index_fill(0, come, True).view_as(mask)
                memory[name] *= masks[name] & mask
                p.data *= masks[name] & mask
            elif step % every:
                memory[name] = momentum*memory[name] + grads[name]*mask
                p.data -= lr*memory[name]
    return masks

def test_rigl_equals_a_dense_loop():
    gen = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 12, generator=gen), torch.randint(4, (16,), generator=gen)) for _ in range(60)]
    ours, theirs = (mlp([12, 20, 20, 4], bn=True, seed=0) for _ in range(2))
    masks = random_masks(ours, .2)
    opt = torch.optim.SGD(ours.parameters(), .1, momentum=.9)
    masks.keep(ours, opt)
    for step, (x, y) in enumerate(batches, 1):
        loss = cross_entropy(ours(x), y)
        if step % 5 == 0: grow(ours, opt, loss, frac=cosine_frac((step - 1)/60))
        else: loss.backward(); opt.step()
        opt.zero_grad()
    theirs_masks = dense_rigl(theirs, masks, batches, 5)
    assert Masks(theirs_masks) == Masks.of(ours) != masks
    for a, b in zip(ours.parameters(), theirs.parameters()): torch.testing.assert_close(a, b)

def test_dense_gradients_are_those_of_the_network_without_guards():
    guarded, plain = mlp([5, 6, 3], seed=0), mlp([5, 6, 3], seed=0)
    masks = random_masks(guarded, .4).keep(guarded)
    masks.bake(plain)
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    loss = cross_entropy(guarded(x), y)
    found = dense_gradients(guarded, loss)
    cross_entropy(plain(x), y).backward()
    for name, g in found.items(): assert torch.equal(g, plain.get_parameter(name).grad) and (g[~masks[name]] != 0).any()
    loss.backward() # the graph is still there
    for name, mask in masks.items(): assert (guarded.get_parameter(name).grad[~mask] == 0).all()

# --- learners --------------------------------------------------------------------------------------------------------

class Look(Callback):
    "Counts are exact and masked weights zero after every step; new ones are zero right after an update."
    order = 90
    def before_fit(self): self.old, self.changed = Masks.of(self.model), 0
    def after_batch(self):
        if not self.training: return
        new = Masks.of(self.model)
        assert_zero(self.model, new)
        if new == self.old: return
        assert new.kept == self.old.kept
        for name, mask in new.items(): assert (self.model.get_parameter(name)[mask & ~self.old[name]] == 0).all()
        self.old, self.changed = new, self.changed + 1

def learner(method='rigl', model=None, more=(), masks=None, epochs=4, bs=20, **kwargs):
    model = mlp([64, 16, 10], bn=True, seed=0) if model is None else model
    dls = data_loaders(data, bs, seed=3, device='cpu')
    masks = phew(model, .3, (64,)) if masks is None else masks
    own = [Grow(method, every=7), *more]
    return sparse_learner(dls, model, masks, Recipe(epochs=epochs, lr=.05), cbs=own, **kwargs)

def fit(learn, **kwargs):
    with quiet(learn): learn.fit_recipe(**kwargs)
    return learn

@pytest.mark.parametrize('method', ['set', 'rigl', 'walks'])
@pytest.mark.parametrize('options', [{}, dict(amp='fp16'), dict(amp='bf16'), dict(opt_func=Adam), dict(opt_func=Lamb)],
                         ids=['plain', 'fp16', 'bf16', 'adam', 'lamb'])
def test_counts_and_zeros(method, options):
    look = Look()
    learn = fit(learner(method, more=[look], **options))
    assert look.changed == len(learn.grow.rows) == 4 and learn.keep_masks.masks == Masks.of(learn.model)
    assert [row['step'] for row in learn.grow.rows] == [7, 14, 21, 28]
    first = phew(mlp([64, 16, 10], bn=True, seed=0), .3, (64,))
    if method != 'walks': assert counts(learn.keep_masks.masks) == counts(first)

def bf16(): return torch.autocast('cpu', torch.bfloat16)

def dense_gradients_by_hand(model, x, y):
    "Of a plain copy whose masked weights are ordinary zeros, in mixed precision too."
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with bf16(): loss = cross_entropy(torch.func.functional_call(mlp([64, 16, 10], bn=True, seed=0), weights, x), y)
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))

def test_a_loop_in_bfloat16_grows_by_the_gradients_that_a_dense_network_has():
    "Masks hold after every step and are exact after every update; masked weights' gradients are those of a plain copy."
    model = mlp([64, 16, 10], bn=True, seed=0)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    first = masks = phew(model, .3, (64,)).keep(model, opt)
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 32, 64, generator=gen), torch.randint(10, (12, 32), generator=gen)
    for step in range(12):
        by_hand = dense_gradients_by_hand(model, x[step], y[step])
        with bf16(): loss = cross_entropy(model(x[step]), y[step])
        found = dense_gradients(model, loss)
        for name, g in found.items():
            assert g.dtype == torch.float32 and g[~masks[name]].abs().max() > 0
            torch.testing.assert_close(g, by_hand[name], rtol=1e-6, atol=1e-8)
        if step % 4 == 3:
            expected = regrow(model, masks, .3, {name: by_hand[name] for name in masks})
            masks = grow(model, opt, loss, frac=.3)
            assert masks == expected == Masks.of(model) and counts(masks) == counts(first)
        else: loss.backward(); opt.step()
        opt.zero_grad()
        assert_zero(model, masks)
    assert masks != first

def test_convolutions_by_walks():
    model = resnet20(10, n_in=1, width=.25, seed=0)
    learn = fit(learner('walks', model, [look := Look()], phew(model, .1, (1, 8, 8)), epochs=1))
    assert look.changed == 1 and not Masks.of(model).report(trace(model, (1, 8, 8))).lost

def test_sparse_then_grow():
    dls = data_loaders(data, 20, device='cpu')
    learn = sparse_learner(dls, mlp([64, 16, 10], seed=0), cbs=[Sparse('phew', .2), Grow('rigl', every=5)])
    fit(learn, epochs=2)
    assert learn.sparse.masks == Masks.of(learn.model) and len(learn.grow.rows) == 3
    last = Masks.of(learn.model)
    with quiet(learn): learn.validate()
    assert Masks.of(learn.model) == last

@pytest.mark.parametrize('method', growers)
def test_what_is_kept_dense_stays_so(method):
    "Masks leave the last layer out: it trains dense, and the others grow, each weight of walks on a path."
    model, dls = mlp([64, 16, 12, 10], seed=0), data_loaders(data, 20, device='cpu')
    dense = [*trace(model, (64,)).params][-1]
    graph = trace(model, (64,), keep_dense=dense)
    grows = Grow(method, every=5, density=.2 if method == 'granet' else None)
    learn = fit(sparse_learner(dls, model, cbs=[Sparse('phew', .3, keep_dense=dense), grows]), epochs=2)
    last, weight = Masks.of(model), model.get_parameter(dense)
    assert last.keys() == graph.params.keys() and len(grows.rows) >= 3 and (weight != 0).all()
    assert_zero(model, last)
    assert sum(row['new'] for row in grows.rows) > 0 and learn.sparse.masks == last
    if method == 'walks': assert not last.report(graph).lost

def test_walks_where_the_graph_keeps_a_layer_dense():
    model = mlp([6, 9, 9, 4], seed=0)
    first, second, third = trace(model, (6,)).params
    graph = trace(model, (6,), keep_dense=second)
    masks = phew(graph, .3)
    new = regrow_walks(model, masks, .3, {n: s for n, s in random_scores(model).items() if n != second}, 0, graph)
    assert new.keys() == {first, third} and new.kept == masks.kept and new != masks and not new.report(graph).lost

def test_layers_may_have_names_that_look_like_patterns():
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    for name, layer in (('flat', torch.nn.Flatten()), ('a[0]', torch.nn.Linear(64, 20)), ('act', torch.nn.ReLU()), ('b*', torch.nn.Linear(20, 10))): model.add_module(name, layer)
    learn = fit(learner('walks', model, epochs=1))
    assert learn.grow.rows and Masks.of(model).kept <= round(.3*1480) + 4

def test_gradients_are_accumulated():
    "Four small batches to a step give the scores that one large batch does."
    def scores(bs, more=()):
        learn, found = learner(model=mlp([64, 16, 10], seed=0), more=more, bs=bs, epochs=1), []
        learn.grow.every, learn.grow.update = 2, lambda grads: found.append(grads)
        fit(learn)
        return found[0]
    small, large = scores(10, [GradientAccumulation(40)]), scores(40)
    for name, g in large.items(): torch.testing.assert_close(small[name], g)

def test_a_search_for_a_rate_grows_nothing():
    learn = learner()
    before = Masks.of(learn.model)
    with quiet(learn): learn.lr_find(show_plot=False, num_it=30)
    assert Masks.of(learn.model) == learn.keep_masks.masks == before

class StopAt(Callback):
    def __init__(self, at): self.at = at
    def before_batch(self):
        if self.training and (self.epoch, self.iter) == self.at: raise RuntimeError('stopped')

@pytest.mark.parametrize('method', sorted(growers.keys() - {'granet'}))
def test_resume_to_the_bit_across_an_update(method, tmp_path):
    whole = fit(learner(method))
    with quiet(part := learner(method)), pytest.raises(RuntimeError):
        part.fit_recipe(checkpoint=tmp_path/'run.pt', cbs=StopAt((2, 6)))
    rest = fit(learner(method), checkpoint=tmp_path/'run.pt')
    assert rest.first_epoch == 2 and rest.grow.rows == whole.grow.rows and Masks.of(rest.model) == Masks.of(whole.model)
    for name, t in whole.model.state_dict().items(): assert torch.equal(t, rest.model.state_dict()[name]), name

@pytest.mark.parametrize('bad', [float('nan'), float('inf'), -float('inf')])
@pytest.mark.parametrize('method', growers)
def test_what_is_not_finite_is_refused_by_its_name(method, bad):
    "Kept weights or scores; nothing is changed."
    model = mlp([8, 6, 4], seed=0)
    masks = random_masks(model, .5)
    masks.keep(model)
    more = dict(graph=trace(model, (8,))) if method == 'walks' else {}
    scores = {name: torch.ones(mask.shape) for name, mask in masks.items()}
    name, mask = next(iter(masks.items()))
    place = tuple(mask.nonzero()[0].tolist())
    weight = model.get_parameter(name).data
    def refused(scores):
        before = {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(ValueError, match=name): grow(model, method=method, scores=scores, **more)
        assert Masks.of(model) == masks
        for key, t in model.state_dict().items(): assert torch.equal(t.nan_to_num(7.), before[key].nan_to_num(7.))
    if method != 'set':
        wrong = {key: t.clone() for key, t in scores.items()}
        wrong[name][place] = bad
        refused(wrong)
    good, weight[place] = weight[place].clone(), bad
    refused(scores)
    weight[place] = good
    assert grow(model, method=method, scores=scores, **more).kept == masks.kept

# --- two processes ---------------------------------------------------------------------------------------------------

def train_one_of_two(rank, path, port):
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_PORT=port, MASTER_ADDR='127.0.0.1')
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    import fastai.distributed # adds `distrib_ctx` # noqa: F401
    learn = learner('walks', mlp([64, 16, 10], seed=0), masks=phew(mlp([64, 16, 10], seed=0), .3, (64,)))
    with quiet(learn), learn.distrib_ctx(sync_bn=False, cpu=True): learn.fit_recipe()
    result = dict(weights=learn.model.state_dict(), masks=dict(Masks.of(learn.model)), rows=learn.grow.rows)
    torch.save(result, path/f'{rank}.pt')

def test_two_processes_choose_alike(processes, tmp_path):
    pytest.importorskip('accelerate')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    both = [processes.Process(target=train_one_of_two, args=(rank, tmp_path, port)) for rank in (0, 1)]
    for p in both: p.start()
    for p in both: p.join()
    ours, theirs = (torch.load(tmp_path/f'{rank}.pt') for rank in (0, 1))
    first = phew(mlp([64, 16, 10], seed=0), .3, (64,))
    assert Masks(ours['masks']) == Masks(theirs['masks']) != first and len(ours['rows']) == 4
    for name, t in ours['weights'].items(): assert torch.equal(t, theirs['weights'][name])
