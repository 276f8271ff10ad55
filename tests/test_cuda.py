"A GPU gives what the CPU gives. All of it is skipped where there is none."
import copy
from functools import partial

import pytest, torch, torch.nn.functional as F
from fastai.callback.core import Callback, CancelFitException

from phew_nb.data import digits, pruning_batches
from phew_nb.graph import Layer, trace
from phew_nb.masks import Masks
from phew_nb.metrics import count_paths, effective_density, flops, ntk, path_trace, widths
from phew_nb.models import mlp, resnet20, vgg19
from phew_nb.pruners import prune, pruners
from phew_nb.rewire import reinit, shuffle, widen
from phew_nb.walks import phew, walk_order

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
size = 1, 8, 8
data = digits()

def net(device='cpu', width=.5): return resnet20(10, 1, width, seed=0).to(device)

def batches(device='cpu'): return pruning_batches(data, 5, 25, seed=0, device=device)

@pytest.mark.parametrize('make', ['resnet18', 'densenet121', 'mobilenet_v3_small', 'vit_b_32', 'shufflenet_v2_x0_5'])
def test_graph(make):
    "The same units, layers and links."
    import torchvision
    model = torchvision.models.get_model(make).eval()
    here, there = trace(model, (3, 224, 224)), trace(model.cuda(), (3, 224, 224))
    assert (here.n_units, here.total, list(here.params)) == (there.n_units, there.total, list(there.params))
    for a, b in zip(here.nodes, there.nodes):
        names = ('src', 'dst') if isinstance(a, Layer) else ('row', 'child', 'skip')
        assert all(torch.equal(getattr(a, n), getattr(b, n).cpu()) for n in names)

def test_graph_under_autocast():
    model = net('cuda')
    with torch.autocast('cuda', torch.float16): there = trace(model, size)
    assert there.total == trace(model, size).total and there.n_units == trace(model, size).n_units

@pytest.mark.parametrize('kwargs', [{}, dict(power=0), dict(power=-1), dict(power=2), dict(granularity='kernel'), dict(fork='weight'),
                                    dict(skips=True), dict(direction='backward')], ids=str)
def test_walks(kwargs):
    "Random numbers are the same to the bit; sums may differ in the last one, which hardly ever changes a walk."
    here, there = (walk_order(net(device, 1.), .2, size, seed=3, **kwargs) for device in ('cpu', 'cuda'))
    assert abs(here.n_walks - there.n_walks) <= 2
    a, b = here.masks(.1), there.masks(.1).to('cpu')
    assert a.jaccard(b) > .999

def test_walks_of_a_large_network():
    model = vgg19(100, seed=0)
    here = phew(model, .028, (3, 32, 32), seed=1)
    there = phew(model.cuda(), .028, (3, 32, 32), seed=1).to('cpu')
    assert here.jaccard(there) > .999

def test_adversarial_rows():
    "Tiny beside huge, denormals, a single weight that is not zero: no row bleeds into another."
    model = mlp((4, 6, 4), seed=0)
    name, first = next((n, p) for n, p in model.named_parameters() if p.ndim > 1)
    first.data[:, 0], first.data[:, 1], first.data[:, 2] = 1e30, 1e-38, 0.
    first.data[3, 2] = 1e-42
    masks = walk_order(model.cuda(), kept=30, input_size=(4,), seed=0).masks(kept=30)
    assert masks[name][:, 2].nonzero().view(-1).tolist() == [3] and masks[name][:, 1].sum() > 1

@pytest.mark.parametrize('method', [m for m in pruners if m not in ('gmp', 'lottery')])
@pytest.mark.filterwarnings('ignore')
def test_methods(method):
    "The same masks but for a few ties of rounding; the network and all random states are left as they were."
    model = net('cuda')
    state, chance = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), torch.cuda.get_rng_state())
    steps = dict(iterations=2) if method == 'iter_snip' else {} # more of its steps make rounding grow into other masks
    there = prune(model, method, .1, size, dl=batches('cuda'), seed=0, **steps)
    here = prune(net(), method, .1, size, dl=batches(), seed=0, **steps)
    assert abs(there.kept - here.kept) <= (0 if 'phew' not in method else 22*9)
    least = .9 if method in ('synflow', 'synflow_l2', 'iter_snip', 'grasp') else .99 # iterations enlarge rounding
    assert here.jaccard(there.to('cpu')) > least
    assert all(torch.equal(v, state[k]) and v.is_cuda for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, chance, (torch.get_rng_state(), torch.cuda.get_rng_state())))

def test_scoring_on_the_cpu_leaves_the_random_state_of_the_gpu():
    torch.rand(3, device='cuda')
    before = torch.cuda.get_rng_state()
    for method in 'snip', 'grasp', 'synflow': prune(net(), method, .1, size, dl=batches())
    assert torch.equal(before, torch.cuda.get_rng_state())

def test_data_on_the_cpu_for_a_network_on_the_gpu():
    model = net('cuda')
    assert prune(model, 'snip', .1, size, dl=batches()) == prune(model, 'snip', .1, size, dl=batches('cuda'))

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model = net('cuda').to(dtype)
    for method in 'phew', 'snip', 'synflow', 'magnitude':
        masks = prune(model, method, .1, size, dl=batches('cuda'))
        assert masks.kept == pytest.approx(masks.total*.1, rel=.02)
    assert next(model.parameters()).dtype == dtype

@pytest.mark.parametrize('skips', [False, True])
def test_measures(skips):
    model, far = net(), net('cuda')
    graph, there = trace(model, size), trace(far, size)
    masks = phew(graph, .1, seed=0)
    for m in masks, masks.to('cuda'):
        assert path_trace(far, m, there, skips).log10 == pytest.approx(path_trace(model, masks, graph, skips).log10, abs=1e-9)
        assert count_paths(there, m, skips=skips) == count_paths(graph, masks, skips=skips)
        assert widths(there, m, skips=skips) == widths(graph, masks, skips=skips)
        assert flops(there, m) == flops(graph, masks)
        assert effective_density(there, m) == effective_density(graph, masks)
    spatial = [path_trace(*args, spatial=True).log10 for args in ((far, masks, there), (model, masks, graph))]
    assert spatial[0] == pytest.approx(spatial[1], abs=1e-6)

def test_kernel_of_tangents():
    model, x = mlp((6, 5, 3), seed=0).double(), torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(ntk(model, x), ntk(copy.deepcopy(model).cuda(), x.cuda()).cpu(), atol=1e-9)

def test_rewiring():
    model = net('cuda')
    masks = prune(model, 'synflow', .2, size)
    wide = widen(model, masks, 1., size, seed=0)
    assert wide.kept == masks.kept and shuffle(masks, seed=0).kept == masks.kept
    assert next(reinit(model, masks, seed=0).parameters()).is_cuda

class StopAfter(Callback):
    "Break a run off after some epochs."
    order = 100
    def __init__(self, epochs): self.epochs = epochs
    def after_epoch(self):
        if self.epoch + 1 == self.epochs: raise CancelFitException

def train(model, masks, opt, scaler=None, dtype=None, steps=10):
    "Steps of training, with a look at the masked weights after each."
    gen = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x, y = torch.randn(32, *size, generator=gen).cuda(), torch.randint(10, (32,), generator=gen).cuda()
        with torch.autocast('cuda', dtype or torch.float16, enabled=dtype is not None): loss = F.cross_entropy(model(x), y)
        opt.zero_grad(set_to_none=True)
        if scaler is None: loss.backward(); opt.step()
        else: scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
        assert all((model.get_parameter(n)[~m.cuda()] == 0).all() for n, m in masks.items())
    assert loss.isfinite()

optimizers = dict(sgd=partial(torch.optim.SGD, lr=.1, momentum=.9, weight_decay=.1), adamw=partial(torch.optim.AdamW, weight_decay=.1),
                  fused=partial(torch.optim.AdamW, fused=True), capturable=partial(torch.optim.Adam, capturable=True),
                  foreach=partial(torch.optim.SGD, lr=.1, momentum=.9, foreach=True))

@pytest.mark.parametrize('opt', optimizers)
@pytest.mark.parametrize('dtype', [None, torch.float16, torch.bfloat16], ids=str)
def test_masked_weights_stay_zero(opt, dtype):
    model = net('cuda')
    masks = phew(model, .1, size, seed=0)
    masks.apply(model)
    opt = optimizers[opt](model.parameters())
    masks.keep(model, opt)
    train(model, masks, opt, torch.amp.GradScaler('cuda') if dtype == torch.float16 else None, dtype)

def test_moved_to_the_gpu_after_masking():
    model = net()
    masks = phew(model, .1, size, seed=0)
    masks.apply(model)
    model.cuda()
    opt = torch.optim.SGD(model.parameters(), .1, momentum=.9)
    masks.keep(model, opt)
    train(model, masks, opt)

def test_training_on_a_compiled_step():
    model = mlp((64, 32, 10), seed=0).cuda()
    masks = phew(model, .2, (64,), seed=0)
    masks.apply(model)
    opt, fast = torch.optim.SGD(model.parameters(), .1), torch.compile(model)
    masks.keep(model, opt)
    x, y = torch.randn(32, 64, device='cuda'), torch.randint(10, (32,), device='cuda')
    for _ in range(3):
        opt.zero_grad(); F.cross_entropy(fast(x), y).backward(); opt.step()
    assert all((model.get_parameter(n)[~m.cuda()] == 0).all() for n, m in masks.items())

@pytest.mark.parametrize('amp', [None, 'fp16', 'bf16'])
def test_learner(amp, tmp_path):
    "Broken off and resumed it ends with the same weights, to the bit."
    from phew_nb.training import Recipe, data_loaders, quiet, sparse_learner
    small, ends = data.subset(20, seed=0, n_test_per_class=10), []
    for stops in (3,), (2, 3):
        for epochs in stops:
            model = net('cuda')
            masks = phew(model, .2, size, seed=0)
            learn = sparse_learner(data_loaders(small, 50, device='cuda'), model, masks, Recipe(epochs=3), amp=amp)
            learn.deterministic = True
            stop = [] if epochs == 3 else [StopAfter(epochs)]
            with quiet(learn): learn.fit_recipe(checkpoint=tmp_path/f'{len(stops)}.pt', cbs=stop)
        assert next(learn.model.parameters()).is_cuda and len(learn.epoch_record.rows) == 3
        assert all((learn.model.get_parameter(n)[~m.cuda()] == 0).all() for n, m in masks.items())
        ends.append(learn.model.state_dict())
    assert all(torch.equal(v, ends[1][k]) for k, v in ends[0].items())

@pytest.mark.parametrize('method', ['dense', 'phew', 'snip', 'gmp', 'lottery'])
def test_a_run(method):
    from phew_nb.experiments import Config, run
    record = run(Config('digits', 'resnet20', method, .2, epochs=1, per_class=10, width=.25,
                        options=dict(iterations=2) if method == 'gmp' else {}), device='cuda')
    assert record['device'] == 'cuda' and 0 <= record['accuracy'] <= 1

def test_files(tmp_path):
    model = net('cuda')
    masks = phew(model, .1, size, seed=0)
    masks.save(tmp_path/'masks.safetensors')
    again = Masks.load(tmp_path/'masks.safetensors')
    again.apply(model)
    assert again == masks.to('cpu') and Masks.of(model) == again

def test_compact():
    from phew_nb.export import compact
    model = net('cuda').eval()
    masks = prune(model, 'synflow', .1, size)
    masks.apply(model)
    x = torch.randn(4, *size, device='cuda')
    small = compact(model, input_size=size)
    with torch.no_grad(): assert torch.allclose(small(x), model(x), atol=1e-4)
