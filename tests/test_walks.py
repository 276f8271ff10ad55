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
