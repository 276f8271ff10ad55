"Walks on blocks: against exact probabilities, brute-force counts, and on networks of every kind."
import itertools, pickle

import pytest, torch
from torch import nn

from awkward import blocks as kinds
from phew_nb.blocks import Blocks
from phew_nb.graph import TraceError, trace
from phew_nb.masks import Masks
from phew_nb.models import mlp, resnet20, vgg19
from phew_nb.steps import FewVisits, FirstVisits, FirstWalks, Walker, first_visits
from phew_nb.walks import expected_visits, expected_walks, phew, walk_order
from test_walks import check_counts

pytestmark = pytest.mark.filterwarnings('ignore:.*padding', 'ignore:greedy walks', 'ignore:about .* walks')

def mean_of(w, o, i, block):
    "The mean magnitude of the block of a weight, by hand."
    (b, c), w = block, w.detach().abs().double()
    return float(w[o//b*b:o//b*b + b, i//c*c:i//c*c + c].mean())

def taken(ws, block, forward, start, power):
    "{weight: chance that a walk from one unit takes it} in a chain of linear layers."
    out, at = {}, {start: 1.}
    for l in range(len(ws)) if forward else reversed(range(len(ws))):
        after = {}
        for unit, p in at.items():
            ways = [(o, unit) for o in range(len(ws[l]))] if forward else [(unit, i) for i in range(ws[l].shape[1])]
            mass = [mean_of(ws[l], o, i, block)**power for o, i in ways]
            for (o, i), m in zip(ways, mass):
                q = p*m/sum(mass)
                out[l, o, i] = out.get((l, o, i), 0) + q
                to = o if forward else i
                after[to] = after.get(to, 0) + q
        at = after
    return out

@pytest.mark.parametrize('n', [150, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize('sizes, block, power', [((4, 6, 2), (2, 2), 1), ((3, 5, 4, 2), (2, 3), 1), ((5, 3, 3), (2, 2), 2), ((3, 4, 3), (4, 2), 0)])
def test_blocks_are_held_as_often_as_they_should(sizes, block, power, n, walks=4):
    net = mlp(sizes, bias=False, seed=0)
    graph, ws = trace(net, sizes[:1]), [p for p in net.parameters()]
    miss, of = {}, lambda l, o, i: (l, o//block[0], i//block[1])
    for t in range(walks):
        forward, turn = t % 2 == 0, t//2
        count, step = (sizes[0], block[1]) if forward else (sizes[-1], block[0])
        start = sorted(range(count), key=lambda u: u % step)[turn % count] # in strides of a block
        hit = {}
        for (l, o, i), q in taken(ws, block, forward, start, power).items(): hit[of(l, o, i)] = hit.get(of(l, o, i), 0) + q
        for l, w in enumerate(ws):
            for o, i in itertools.product(range(0, len(w), block[0]), range(0, w.shape[1], block[1])):
                miss[of(l, o, i)] = miss.get(of(l, o, i), 1)*(1 - hit.get(of(l, o, i), 0))
    count = dict.fromkeys(miss, 0)
    for seed in range(n):
        visits = FirstVisits(Walker(graph, block=block, power=power))
        visits.extend(walks, seed)
        for l, (name, order) in enumerate(visits.shaped(walks).items()):
            for o, i in itertools.product(range(0, len(order), block[0]), range(0, order.shape[1], block[1])):
                count[of(l, o, i)] += int(order[o, i] >= 0)
    check_counts([(count[b], n, 1 - p) for b, p in miss.items()])

def check_whole(masks, block, usable=None):
    for name, mask in masks.items():
        blocks, can = Blocks(mask, block), torch.ones_like(mask) if usable is None else usable[name]
        kept, size = blocks.sums(mask.int()), blocks.sums(can.int())
        assert ((kept == 0) | (kept == size)).all(), name

@pytest.mark.parametrize('block, kwargs', [((8, 8), {}), ((3, 5), dict(power=0)), ((1, 8), dict(power=2, direction='backward')),
                                           ((3, 5), dict(fork='weight', skips=True)), ((8, 8), dict(law='paths')), ((16, 16), dict(start='seed'))])
def test_whole_blocks_are_kept(block, kwargs):
    graph = trace(resnet20(10, width=.25, seed=0), (3, 16, 16))
    usable = Masks({name: torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) < .8 for name, p in graph.params.items()})
    for masks in None, usable:
        order = walk_order(graph, .2, masks=masks, block=block, seed=1, **kwargs)
        got = order.masks(.2)
        check_whole(got, block, masks)
        assert got == phew(graph, .2, masks=masks, block=block, seed=1, **kwargs) and order.masks(.1) <= got
        steps = max(order.new) # one walk at most is too many
        assert 0 <= got.kept - round(.2*graph.total) < steps <= len(graph.layers)*block[0]*block[1]
        assert masks is None or got <= masks
        assert int(order.new.sum()) == sum(int((o >= 0).sum()) for o in order.order.values())

@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_the_layout_in_memory_makes_no_difference(layout):
    net = vgg19(10, width=.125, seed=0)
    masks = phew(net, .1, (3, 32, 32), block=(4, 4))
    assert phew(net.to(memory_format=layout), .1, (3, 32, 32), block=(4, 4)) == masks
    assert not masks.report(trace(net, (3, 32, 32))).lost # channels are multiples of 4: all on paths

def test_channels_that_divide_lose_nothing():
    graph = trace(resnet20(10, seed=0), (3, 32, 32))
    for density in .2, .5: assert not phew(graph, density, block=(16, 16)).report(graph).lost

@pytest.mark.parametrize('name', sorted(kinds))
def test_every_kind_of_network(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), kinds[name](8, 8), nn.ReLU(), nn.Conv2d(8, 5, 1))
    try: graph = trace(net, (3, 8, 8))
    except (TraceError, TypeError, RuntimeError, ValueError): pytest.skip('it is not of images')
    masks = phew(graph, .4, block=(4, 4))
    check_whole(masks, (4, 4))
    assert masks.kept >= round(.4*graph.total)

def test_the_number_of_walks_is_foretold():
    graph = trace(mlp((64, 96, 96, 32), bias=False, seed=0), (64,))
    for density in .1, .5, .9:
        found = [walk_order(graph, density, block=(8, 8), seed=s).n_walks for s in range(4)]
        assert abs(sum(found)/4 - expected_walks(graph, density, block=(8, 8))) < .15*sum(found)/4 + 1

def test_visits_of_a_coarse_network():
    "Groups of units are visited as often as the units of the network of summed blocks."
    wide = mlp((8, 12, 12, 4), bias=False, seed=0)
    narrow = mlp((2, 3, 3, 1), bias=False, seed=0)
    with torch.no_grad():
        for small, large in zip(narrow.parameters(), wide.parameters()):
            small.copy_(large.abs().view(len(small), 4, -1, 4).sum((1, 3)))
    found = expected_visits(wide, (8,), block=(4, 4)).view(-1, 4)
    torch.testing.assert_close(found, expected_visits(narrow, (2,))[:, None].expand(-1, 4)/4)

def test_zeros_and_scores():
    graph = trace(mlp((8, 8, 8, 4), bias=False, seed=0), (8,))
    scores = {name: torch.zeros_like(p) for name, p in graph.params.items()}
    assert phew(graph, .5, block=(2, 2), scores=scores).density >= .5 # uniformly
    for name, t in scores.items(): t[:2, :2] = 1.
    assert phew(graph, .05, block=(2, 2), scores=scores, direction='forward', kept=None).density >= .05
    with pytest.raises(ValueError, match='NaN or infinite'):
        net = mlp((4, 4), seed=0)
        with torch.no_grad(): net.head.weight[0, 0] = float('nan')
        phew(net, .5, (4,), block=(2, 2))

@pytest.mark.parametrize('kwargs', [{}, dict(granularity='kernel'), dict(block=(4, 4)), dict(power=-1)])
def test_few_visits_are_as_many(kwargs, monkeypatch):
    "Orders that store only the weights that were visited hold the same, and stay what they are when pickled."
    graph = trace(resnet20(10, width=.5, seed=0), (3, 16, 16))
    dense = walk_order(graph, .1, **kwargs)
    monkeypatch.setattr('phew_nb.walks.first_visits', lambda walker, target: FewVisits(walker))
    monkeypatch.setattr('phew_nb.draws.MassTable.large', 1000) # longer partial sums, too
    few = pickle.loads(pickle.dumps(walk_order(graph, .1, **kwargs)))
    assert isinstance(few.order, FirstWalks) and few.masks(.1).hash() == dense.masks(.1).hash() and few.masks(.03) == dense.masks(.03)
    assert all((few.order[name] == order).all() for name, order in dense.order.items()) and (few.new == dense.new).all()

def test_memory_follows_what_is_asked_for():
    big, small = mlp((2**13, 2**13, 16), bias=False, seed=0), mlp((8, 8, 4), bias=False, seed=0)
    walker = Walker(trace(big, (2**13,)))
    assert isinstance(first_visits(walker, walker.graph.total//100), FewVisits)
    assert not isinstance(first_visits(walker, walker.graph.total//2), FewVisits)
    assert not isinstance(first_visits(Walker(trace(small, (8,))), 1), FewVisits)
