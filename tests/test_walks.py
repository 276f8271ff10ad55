"""The walks obey their law: against exact probabilities, a slow second sampler, and a replay of every walk.

Statistical tests compare exact binomial tails with a bound divided by the number of comparisons (Bonferroni): a sampler that
is right fails one test with probability below 1e-5. Seeds are fixed, so a test that passes once always passes. `pytest -m slow`
runs the same tests with ten times the walks.
"""
import copy, itertools, math, random, warnings
from collections import Counter, defaultdict
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np, pytest, torch, torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from scipy.stats import binom, hypergeom
from torch import nn
from torch.nn.utils import parametrizations

import phew_nb.walks as walks_module
from awkward import Program, kinds
from phew_nb.graph import TraceError, trace
from phew_nb.masks import Masks
from phew_nb.models import mlp, resnet20, vgg19
from phew_nb.walks import _Table, _Walker, draw_paths, expected_visits, expected_walks, phew, uniforms, walk_keys, walk_order
from slow_walks import END, Law, Net

inf = math.inf
pytestmark = pytest.mark.filterwarnings('ignore:.*padding', 'ignore:greedy walks', 'ignore:about .* walks')
powers = 1, 0, 2, -1, inf, .5

# --- small networks, each with the net that belongs to it ---------------------------------------------------------------

class Fn(nn.Module):
    "A module from a function of itself and the inputs."
    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items(): setattr(self, name, part)
        self.run = forward
    def forward(self, *xs): return self.run(self, *xs)

L = nn.Linear

class Hand(Net):
    "A net that is written by hand: `net(parameter, units read, groups)` adds a layer and gives its units."
    def __init__(self, params, masks, n):
        super().__init__(range(n))
        self.params, self.masks = params, masks
    def __call__(self, name, units, groups=1):
        return self.conv(name, self.params[name], list(units), groups, None if self.masks is None else self.masks[name])

# each gives the model, the size of its input, and a function that writes its net and gives the outputs

class Hand(Net):
    "A net that is written by hand: `net(parameter, units read, groups)` adds a layer and gives its units."
    def __init__(self, params, masks, n):
        super().__init__(range(n))
        self.params, self.masks = params, masks
    def __call__(self, name, units, groups=1):
        return self.conv(name, self.params[name], list(units), groups, None if self.masks is None else self.masks[name])

# each gives the model, the size of its input, and a function that writes its net and gives the outputs

def chain(sizes):
    def write(net, units):
        for name in net.params: units = net(name, units)
        return units
    return mlp(sizes, bias=False, seed=0), (sizes[0],), write

def six(): return chain((6, 8, 8, 4))
def tiny(): return chain((2, 3, 2))

def convs():
    def run(s, x): return s.b(F.relu(s.a(x))).mean((2, 3))
    def write(net, x): return net('b.weight', net('a.weight', x))
    return Fn(run, a=nn.Conv2d(2, 3, (2, 3), padding=1), b=nn.Conv2d(3, 2, 2)), (2, 4, 4), write

def fork():
    def run(s, x):
        h = F.relu(s.stem(x))
        return s.b(F.relu(s.a(h))) + s.short(h)
    def write(net, x):
        h = net('stem.weight', x)
        return net.join(net('b.weight', net('a.weight', h)), net('short.weight', h))
    return Fn(run, stem=L(2, 2), a=L(2, 3), b=L(3, 2), short=L(2, 2)), (2,), write

def skip():
    def run(s, x):
        h = s.stem(x)
        return s.head(F.relu(h + s.b(F.relu(s.a(h)))))
    def write(net, x):
        h = net('stem.weight', x)
        return net('head.weight', net.join(h, net('b.weight', net('a.weight', h)), skip=0))
    return Fn(run, stem=L(2, 2), a=L(2, 3), b=L(3, 2), head=L(2, 2)), (2,), write

def two_skips():
    def run(s, x):
        h = s.stem(x)
        h = h + s.a(h)
        return s.head(h + s.b(h))
    def write(net, x):
        h = net('stem.weight', x)
        h = net.join(h, net('a.weight', h), skip=0)
        return net('head.weight', net.join(h, net('b.weight', h), skip=0))
    return Fn(run, stem=L(2, 2), a=L(2, 2), b=L(2, 2), head=L(2, 1)), (2,), write

def grouped():
    def run(s, x): return s.c(s.b(s.a(x))).amax((2, 3))
    def write(net, x): return net('c.weight', net('b.weight', net('a.weight', x, 2), 4))
    return Fn(run, a=nn.Conv2d(4, 4, (1, 2), groups=2), b=nn.Conv2d(4, 8, (2, 1), groups=4), c=nn.Conv2d(8, 2, 1)), (4, 3, 3), write

def dense_block():
    def run(s, x):
        a = F.relu(s.a(x))
        return s.c(torch.cat([a, x, s.b(torch.cat([x, a], 1))], 1)).sum(-1)
    def write(net, x):
        a = net('a.weight', x)
        return net('c.weight', [*a, *x, *net('b.weight', [*x, *a])])
    return Fn(run, a=nn.Conv1d(2, 2, 3, padding=1), b=nn.Conv1d(4, 1, 1), c=nn.Conv1d(5, 2, 1)), (2, 3), write

def flat():
    def run(s, x): return s.b(F.relu(s.a(x)).flatten(1))
    def write(net, x):
        a, b = net('a.weight', x)
        return net('b.weight', [a, a, a, b, b, b])
    return Fn(run, a=nn.Conv2d(1, 2, (1, 2)), b=L(6, 2)), (1, 1, 4), write

def shared():
    def run(s, x): return s.b(F.relu(s.a(F.relu(s.a(x)))))
    def write(net, x): return net('b.weight', net('a.weight', net('a.weight', x)))
    return Fn(run, a=L(3, 3), b=L(3, 2)), (3,), write

def gate():
    def run(s, x):
        h = s.a(x)
        return s.b(h*s.g(h).sigmoid())
    def write(net, x):
        h = net('a.weight', x)
        return net('b.weight', net.join(h, net('g.weight', h)))
    return Fn(run, a=L(2, 3), g=L(3, 3), b=L(3, 2)), (2,), write

def outputs():
    def run(s, x):
        h = s.body(x)
        return {'one': s.one(h), 'two': s.two(h), 'hidden': h}
    def write(net, x):
        h = net('body.weight', x)
        return [*h, *net('one.weight', h), *net('two.weight', h)]
    return Fn(run, body=L(3, 3), one=L(3, 2), two=L(3, 1)), (3,), write

networks = {f.__name__: f for f in (six, convs, fork, skip, two_skips, grouped, dense_block, flat, shared, gate, outputs)}
with_skips = 'skip', 'two_skips'

def zeroed(model, kind, seed=0):
    "Weights that make rows awkward."
    rng, ps = random.Random(seed), [p for p in model.parameters() if p.ndim > 1]
    with torch.no_grad():
        for n, p in enumerate(ps):
            some = torch.tensor([rng.random() < .3 for _ in range(p.numel())]).view(p.shape)
            if kind == 'some': p[some] = 0
            if kind == 'rows': p[0] = 0; p[:, -1] = 0
            if kind == 'layers' and n in (1, len(ps) - 1): p.zero_()
            if kind == 'tiny': p[some] *= 1e-6
            if kind == 'equal': p.fill_(.5)
    return model

def build(name, kind='plain', masks=False):
    "A network, its graph, its net written by hand, and masks (or None)."
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, size, write = (networks | dict(tiny=tiny))[name]()
    graph = trace(zeroed(model, kind), size)
    masks = some_masks(graph) if masks else None
    net = Hand({n: p for n, p in model.named_parameters() if p.ndim > 1}, masks, size[0])
    net.outputs = list(write(net, net.inputs))
    return model, graph, net, masks

def some_masks(graph, keep=.7, seed=1):
    rng = random.Random(seed)
    return Masks({n: torch.tensor([rng.random() < keep for _ in range(p.numel())]).view(p.shape) for n, p in graph.params.items()})

# --- the law of one walk ------------------------------------------------------------------------------------------------

def check_counts(cells, bound=1e-5):
    "`cells` are (count, out of, probability)."
    k, n, p = np.array(cells, dtype=float).T
    assert not k[p == 0].any(), 'seen, though impossible'
    p = p.clip(0, 1)
    tail = np.minimum(binom.cdf(k, n, p), binom.sf(k - 1, n, p))*2
    worst = tail.argmin()
    assert tail[worst]*len(cells) > bound, f'{cells[worst]} (count, of, probability) has probability {tail[worst]:.1e}'

def path_cells(walker, law, n, direction='both', seed=3):
    "(count, out of, probability) for every start and path of `n` walks, which must start where their turn is."
    gen, layers = torch.Generator().manual_seed(1), [i for i, node in enumerate(walker.graph.nodes) if hasattr(node, 'src')]
    mine = [i for i, node in enumerate(law.net.nodes) if node[0] == 'layer']
    codes = {a: torch.randint(-2**62, 2**62, walker.graph.nodes[b].size, generator=gen) for a, b in zip(mine, layers, strict=True)}
    sums, theirs = torch.zeros(n, dtype=torch.long), dict(zip(layers, mine))
    for i, walks, *where in walker.visits(0, n, seed): sums.index_add_(0, walks, codes[theirs[i]][tuple(where)])
    def code(path): return (sum(int(codes[i][tuple(at)]) for i, *at in path) + 2**63) % 2**64 - 2**63
    seen = defaultdict(Counter)
    for t, s in enumerate(sums.tolist()): seen[law.start(t, direction)][s] += 1
    for start, count in seen.items():
        paths = Counter()
        for path, p in law.paths(*start).items(): paths[code(path)] += p
        assert abs(sum(paths.values()) - 1) < 1e-9
        yield from ((count[c], sum(count.values()), paths.get(c, 0.)) for c in paths.keys() | count.keys())

def check_law(name, n, kind='plain', masks=False, powers=powers):
    _, graph, net, masks = build(name, kind, masks)
    for power, fork, skips in itertools.product(powers, ('uniform', 'weight'), (False, True)):
        if skips and name not in with_skips: continue
        walker, law = _Walker(graph, masks, power, fork, skips), Law(net, power, fork, skips)
        check_counts(list(path_cells(walker, law, n)))

sizes = pytest.mark.parametrize('n', [4000, pytest.param(100_000, marks=pytest.mark.slow)])

@sizes
@pytest.mark.parametrize('name', networks)
def test_every_path_has_its_probability(name, n): check_law(name, n)

@sizes
@pytest.mark.parametrize('kind', ['some', 'rows', 'layers', 'tiny', 'equal'])
@pytest.mark.parametrize('name', networks)
def test_zeros_and_ties(name, kind, n): check_law(name, n // 4, kind, powers=(1, -1, inf, 2 if kind == 'rows' else 0))

@sizes
@pytest.mark.parametrize('name', networks)
def test_masked_weights(name, n): check_law(name, n // 2, masks=True)

@pytest.mark.parametrize('direction', ['forward', 'backward'])
@pytest.mark.parametrize('name', ['fork', 'outputs', 'flat'])
def test_one_direction(name, direction):
    _, graph, net, _ = build(name)
    check_counts(list(path_cells(_Walker(graph, direction=direction), Law(net), 4000, direction)))

def test_starts_go_round():
    model, graph, net, _ = build('outputs')
    law = Law(net)
    for direction in 'both', 'forward', 'backward':
        for t, path in enumerate(draw_paths(graph, 40, seed=5, direction=direction)):
            turn = t // 2 if direction == 'both' else t
            if direction == 'forward' or direction == 'both' and t % 2 == 0: assert path[0][0] == graph.inputs[turn % 3]
            else: assert path[-1][1] == graph.outputs[turn % 6]
            start, forward = law.start(t, direction)
            assert (net.inputs if forward else net.outputs).index(start) == turn % (3 if forward else 6)

def test_dead_units_are_never_started_from():
    model = mlp((4, 5, 3), bias=False, seed=0)
    masks = Masks.dense({n: p for n, p in model.named_parameters()})
    first, last = masks
    masks[first][:, 1], masks[last][2] = False, False
    graph = trace(model, (4,))
    starts = [path[0][0] if t % 2 == 0 else path[-1][1] for t, path in enumerate(draw_paths(graph, 12, masks=masks))]
    forward, back = itertools.cycle((0, 2, 3)), itertools.cycle(graph.outputs[:2].tolist())
    assert starts == [next(back if t % 2 else forward) for t in range(12)]

@pytest.mark.parametrize('name', networks)
def test_visits_are_exact(name):
    "`expected_visits` (lemma 3) and the chance of every weight, to the last digits."
    for kind, masks in (('plain', False), ('rows', False), ('plain', True)):
        _, graph, _, masks = build(name, kind, masks)
        for power, fork in itertools.product(powers, ('uniform', 'weight')): check_visits(graph, masks, power, fork, name in with_skips)

def check_visits(graph, masks, power, fork, skips):
    law, walker = Law(Net.of(graph, masks), power, fork, skips), _Walker(graph, masks, power, fork, skips)
    for side in walker.sides:
        units, rates = side.visit_rates()
        starts = law.starts(side.forward)
        weights, at = defaultdict(float), defaultdict(float)
        for start in starts:
            w, u = law.visits(start, side.forward)
            for k, p in w.items(): weights[k] += p/len(starts)
            for k, p in u.items(): at[k] += p/len(starts)
        expected = torch.tensor([at[u] for u in range(graph.n_units)], dtype=torch.double)
        torch.testing.assert_close(units, expected, rtol=1e-9, atol=1e-12)
        for i, w in side.weights.items():
            G, O, I, K = w.layer.size
            g, o, c, k = (t.reshape(-1) for t in torch.meshgrid(*map(torch.arange, (G, O, I, K)), indexing='ij'))
            expected = torch.tensor([weights[i, *at] for at in itertools.product(range(G), range(O), range(I), range(K))])
            torch.testing.assert_close(side.chance_of(i, rates[i], g, o, c, k).float(), expected, rtol=1e-5, atol=1e-9)
            assert torch.equal(side.possible(i, rates[i]).reshape(-1), expected > 0)

@pytest.mark.parametrize('power', [1, -1])
def test_visits_counted(power):
    "Lemma 3 in numbers: visits of 40,000 walks to the units of a convolutional network, against their expectation."
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 20, 3, groups=2), nn.Flatten(), L(20*16, 10))
    zeroed(model, 'some')
    graph, n, count = trace(model, (3, 8, 8)), 40_000, Counter()
    for path in draw_paths(graph, n, seed=1, power=power): count.update([path[0][0], *(step[1] for step in path)])
    visits = expected_visits(graph, power=power)
    for layer in graph.layers: assert abs(float(visits[layer.dst].sum()) - 1) < 1e-9 # every walk crosses every layer once
    check_counts([(count[u], n, float(visits[u])) for u in range(graph.n_units)])

# --- the law of pruning -------------------------------------------------------------------------------------------------

runs = pytest.mark.parametrize('n', [250, pytest.param(20_000, marks=pytest.mark.slow)])

def kept_counts(graph, n, **kwargs):
    "How often each weight is kept by `n` runs with different seeds."
    count = Counter()
    for seed in range(n):
        masks = phew(graph, seed=seed, **kwargs)
        count.update((name, i) for name, m in masks.items() for i in m.view(-1).nonzero().view(-1).tolist())
    return count

def places(graph): return [(name, i) for name, p in graph.params.items() for i in range(p.numel())]

@runs
@pytest.mark.parametrize('name, density, kwargs', [('tiny', .5, {}), ('tiny', .6, dict(power=2, direction='forward')),
    ('fork', .4, dict(fork='weight')), ('skip', .4, dict(skips=True)), ('flat', .5, dict(power=-1)), ('shared', .5, {}),
    ('gate', .3, dict(direction='backward')), ('outputs', .4, dict(power=.5)), ('dense_block', .3, dict(granularity='kernel'))])
def test_weights_are_kept_as_often_as_they_should(name, density, kwargs, n):
    "Against exact probabilities: the set of weights held is a Markov chain, followed over all sets until it stops."
    _, graph, net, _ = build(name)
    own = {k: v for k, v in kwargs.items() if k in ('direction', 'granularity')}
    law = Law(net, **{k: v for k, v in kwargs.items() if k not in own})
    exact, _ = law.inclusion(round(density*graph.total), **own, rest=1e-6)
    count = kept_counts(graph, n, density=density, **kwargs)
    check_counts([(count[p], n, exact.get(p, 0.)) for p in places(graph)])

@pytest.mark.parametrize('n', [2000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize('name, density', [('six', .3), ('convs', .4)])
def test_frequencies_against_a_slow_simulation(name, density, n):
    "6-8-8-4 and two convolutions: as many runs of both samplers. Given how often both together keep a weight, the share of one is hypergeometric."
    _, graph, net, _ = build(name)
    law, rng, slow, target = Law(net), random.Random(0), Counter(), round(density*graph.total)
    for _ in range(n): slow.update(law.prune(target, rng)[0])
    fast = kept_counts(graph, n, density=density)
    k, total = np.array([(fast[p], fast[p] + slow[p]) for p in places(graph)]).T
    tail = np.minimum(hypergeom.cdf(k, 2*n, total, n), hypergeom.sf(k - 1, 2*n, total, n))*2
    assert tail.min()*len(k) > 1e-5

@runs
@pytest.mark.parametrize('name', ['six', 'convs'])
def test_first_walks_against_exact_probabilities(name, n):
    "What the first 12 and the first 20 walks hold, whatever the number of walks drawn."
    _, graph, net, _ = build(name)
    law, count = Law(net), {12: Counter(), 20: Counter()}
    for seed in range(n):
        order = walk_order(graph, .5, seed=seed)
        for walks in count:
            count[walks].update((name, i) for name, o in order.order.items()
                                for i in ((o >= 0) & (o < walks)).view(-1).nonzero().view(-1).tolist())
    for walks, c in count.items():
        exact = law.after(walks)
        check_counts([(c[p], n, exact.get(p, 0.)) for p in places(graph)])

# --- stopping, seeds, order ---------------------------------------------------------------------------------------------

def memory_places(masks, graph):
    "{(parameter, place in its memory)} of kept weights."
    out = set()
    for name, p in graph.params.items():
        flat = torch.zeros(p.numel(), dtype=torch.bool)
        flat.as_strided(p.shape, p.stride()).copy_(masks[name])
        out |= {(name, i) for i in flat.nonzero().view(-1).tolist()}
    return out

def replay(graph, target, seed, granularity='weight', masks=None, **kwargs):
    "Prune by taking one walk after the other: the places held, the walks taken, and what was held before the last."
    held, walk, before = set(), 0, set()
    kernels = defaultdict(dict)
    if granularity == 'kernel':
        for layer in graph.layers:
            ok = layer.pick(masks[layer.name] if masks is not None else torch.ones(layer.param.shape, dtype=torch.bool))
            for g, o, i in itertools.product(*map(range, layer.size[:3])):
                whole = [layer.index(g, o, i, k) for k in range(layer.size[3])]
                kept = {(layer.name, int(at)) for k, at in enumerate(whole) if ok[g, o, i, k]}
                for at in whole: kernels[layer.name].setdefault(int(at), set()).update(kept)
    def conserved(name, at): return {(name, at)} if granularity == 'weight' else kernels[name][at]
    while len(held) < target:
        before = set(held)
        for path in one_walk(graph, walk, seed, masks, **kwargs): held |= conserved(*path) if path[0] in graph.params else set()
        walk += 1
    return held, walk, before

def one_walk(graph, t, seed, masks, **kwargs):
    walker = _Walker(graph, masks, **kwargs)
    for i, _, g, o, c, k in walker.visits(t, 1, seed):
        layer = graph.nodes[i]
        yield layer.name, int(layer.index(g, o, c, k))

choices = [{}, dict(power=-1), dict(power=0, fork='weight'), dict(power=2, direction='backward'), dict(direction='forward'),
           dict(granularity='kernel'), dict(granularity='kernel', power=-1)]

@pytest.mark.parametrize('kwargs', choices)
@pytest.mark.parametrize('name', ['convs', 'fork', 'grouped', 'shared', 'outputs'])
def test_smallest_number_of_whole_walks(name, kwargs):
    _, graph, _, masks = build(name, masks=True)
    if graph.live(masks).sum() == 0: masks = None
    most = sum(int(m.sum()) for m in walks_module._reachable(_Walker(graph, masks, **kwargs)).values())
    for target in {1, most // 4 + 1, most // 2 + 1, 3*most // 4 + 1}:
        held, n, before = replay(graph, target, 7, masks=masks, **kwargs)
        order = walk_order(graph, kept=most - 1, seed=7, masks=masks, **kwargs)
        assert order.walks(kept=target) == n and len(before) < target <= len(held)
        for got in order.masks(kept=target), phew(graph, kept=target, seed=7, masks=masks, **kwargs):
            assert memory_places(got, graph) == held and got.kept == len(held)

def is_within(a, b): return all(bool((a[n] <= b[n]).all()) for n in a)

@pytest.mark.parametrize('kwargs', [{}, dict(granularity='kernel'), dict(power=2, skips=True, fork='weight')])
def test_nested_and_the_same_from_one_order(kwargs):
    graph = trace(resnet20(10, width=.5, seed=0), (3, 32, 32))
    order, last = walk_order(graph, .512, seed=3, **kwargs), None
    longest = len(graph.layers)*(1 if 'granularity' not in kwargs else 9)
    for k in range(18, 2, -1):
        masks = order.masks(.8**k)
        assert masks.total == graph.total and 0 <= masks.kept - round(.8**k*graph.total) < longest
        assert last is None or is_within(last, masks)
        last = masks
        if k in (18, 10, 3): assert masks == phew(graph, .8**k, seed=3, **kwargs)
    for name, o in order.order.items():
        assert o.dtype == torch.int32 and o.shape == graph.params[name].shape and -1 <= int(o.min()) and int(o.max()) < order.n_walks
    assert int(order.new.sum()) == sum(int((o >= 0).sum()) for o in order.order.values())
    first = torch.cat([o[o >= 0] for o in order.order.values()])
    assert torch.equal(torch.bincount(first.long(), minlength=order.n_walks), order.new)

def test_batches_and_threads_change_nothing(monkeypatch):
    model = resnet20(10, width=.5, seed=0)
    graph, rng = trace(model, (3, 32, 32)), random.Random(0)
    for kwargs in {}, dict(granularity='kernel'), dict(power=-1), dict(fork='weight', skips=True):
        expected = walk_order(graph, .1, seed=1, **kwargs)
        for batch in lambda *a: 1 + rng.randrange(40), lambda *a: 5000:
            with monkeypatch.context() as m:
                m.setattr(walks_module, '_batch', batch)
                assert_same_order(walk_order(graph, .1, seed=1, **kwargs), expected)
    expected, threads = walk_order(trace(vgg19(10, width=.5, seed=0), (3, 32, 32)), .05, seed=1), torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert_same_order(walk_order(trace(vgg19(10, width=.5, seed=0), (3, 32, 32)), .05, seed=1), expected)
    finally: torch.set_num_threads(threads)

def assert_same_order(a, b):
    assert torch.equal(a.new, b.new) and all(torch.equal(a.order[n], b.order[n]) for n in b.order)

def states():
    return torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

def test_global_random_state_is_neither_read_nor_changed():
    model, before = resnet20(10, width=.25, seed=0), states()
    masks = phew(model, .1, (3, 32, 32), seed=4)
    walk_order(model, .3, (3, 32, 32)), expected_walks(model, .3, (3, 32, 32)), expected_visits(model, (3, 32, 32))
    after = states()
    assert torch.equal(before[0], after[0]) and (before[1] == after[1]).all() and before[2] == after[2]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert phew(model, .1, (3, 32, 32), seed=4) == masks

def test_seeds():
    graph = trace(mlp((20, 30, 10), seed=0), (20,))
    a = phew(graph, .2, seed=5)
    assert a == phew(graph, .2, seed=5) == phew(graph, .2, seed=np.int64(5)) and a != phew(graph, .2, seed=6)
    assert len({phew(graph, .2, seed=s) for s in (0, 1, -1, 2**31, 2**63, 2**64 - 3)}) == 6
    gen = lambda: torch.Generator().manual_seed(5)
    g = gen()
    assert phew(graph, .2, seed=g) == phew(graph, .2, seed=gen()) != phew(graph, .2, seed=g)
    for seed in None, 1.5, '1', True, [1]:
        with pytest.raises(TypeError, match='seed must be an integer'): phew(graph, .2, seed=seed)
    model, size = copy.deepcopy(graph), None # a graph copies
    assert phew(model, .2, seed=5) == a

def by_formula(model):
    "Weights that no library draws."
    rng = random.Random(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1: p.copy_(torch.tensor([rng.random() + rng.random() - 1 for _ in range(p.numel())]).view(p.shape))
    return model

stored = {
    'mlp': (lambda: mlp((20, 30, 10)), (20,), .1, {}, '4a4e64762880c650'),
    'mlp, bias and bn': (lambda: mlp((20, 30, 30, 10), bn=True), (20,), .2, dict(power=2), '4e57c6a069eb8a73'),
    'resnet20': (lambda: resnet20(10), (3, 32, 32), .05, {}, '08250fd639a07819'),
    'resnet20, inverse': (lambda: resnet20(10), (3, 32, 32), .05, dict(power=-1), 'd46e7e5668976921'),
    'resnet20, skips': (lambda: resnet20(10), (3, 32, 32), .05, dict(skips=True, fork='weight'), '56ff628395517996'),
    'resnet20, kernels': (lambda: resnet20(10), (3, 32, 32), .05, dict(granularity='kernel'), 'f17a5b66acef6c6c'),
    'resnet20, uniform, backward': (lambda: resnet20(10), (3, 32, 32), .05, dict(power=0, direction='backward'), '3730e15fc6e4b859'),
    'vgg19': (lambda: vgg19(100, width=.25), (3, 32, 32), .028, {}, 'a313645c7bc8f40f'),
    'convs': (lambda: convs()[0], (2, 4, 4), .5, dict(power=.5), '6bb4417fb2311006'),
    'dense block': (lambda: dense_block()[0], (2, 3), .5, {}, '18e219cbf09d82fc'),
    'slots': (lambda: flat()[0], (1, 1, 4), .5, {}, '771474c83829b299'),
}

@pytest.mark.parametrize('name', stored)
def test_masks_stay_what_they_were(name):
    "Masks of a seed are a promise: if this fails, the change log must say so."
    model, size, density, kwargs, expected = stored[name]
    assert phew(by_formula(model()), density, size, seed=1, **kwargs).hash()[:16] == expected
