"Masks stay at zero whatever trains the model, and come back from files and copies as they were."
import copy, gc, io, os, pickle, subprocess, sys, warnings, weakref

import hypothesis.strategies as st
import pytest, torch
from hypothesis import given, settings
from torch import fx, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phew_nb.masks import Masks, n_kept, unwrapped
from phew_nb.models import mlp
from phew_nb.pruners import prune

def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6*9, 4))

def random_masks(model, density=.3, seed=1):
    gen = torch.Generator().manual_seed(seed)
    weights = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    return Masks({name: torch.rand(p.shape, generator=gen) < density for name, p in weights.items()})

def assert_zero(model, masks):
    params = dict(unwrapped(model).named_parameters())
    for name, mask in masks.items():
        assert (params[name][~mask] == 0).all(), f'{name} has masked weights that are not zero'
        assert params[name][mask].isfinite().all() and (params[name][mask] != 0).any()

def batch(seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(8, 2, 5, 5, generator=gen), torch.randint(4, (8,), generator=gen)

def step(model, opt, seed=0, before_step=None, accumulate=1):
    "One optimizer step; the masked weights must be zero in the forward pass already."
    for i in range(accumulate):
        x, y = batch(seed*accumulate + i)
        nn.functional.cross_entropy(model(x), y).backward()
    if before_step: before_step()
    def closure():
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss
    opt.step(closure if isinstance(opt, torch.optim.LBFGS) else None)
    opt.zero_grad()

O = torch.optim
optimizers = {
    'sgd': lambda p: O.SGD(p, .1),
    'sgd momentum decay': lambda p: O.SGD(p, .1, momentum=.9, weight_decay=.1),
    'sgd nesterov': lambda p: O.SGD(p, .1, momentum=.9, nesterov=True, weight_decay=.1, foreach=False),
    'sgd fused': lambda p: O.SGD(p, .1, momentum=.9, weight_decay=.1, fused=True),
    'sgd maximize': lambda p: O.SGD(p, .01, momentum=.9, maximize=True),
    'adam coupled': lambda p: O.Adam(p, .01, weight_decay=.1),
    'adam amsgrad': lambda p: O.Adam(p, .01, amsgrad=True, foreach=False),
    'adam without eps': lambda p: O.Adam(p, .01, eps=0.),
    'adamw decoupled': lambda p: O.AdamW(p, .01, weight_decay=.5),
    'adamw fused': lambda p: O.AdamW(p, .01, weight_decay=.5, fused=True),
    'adagrad': lambda p: O.Adagrad(p, .01, weight_decay=.1),
    'adadelta': lambda p: O.Adadelta(p, .1, weight_decay=.1),
    'adafactor': lambda p: O.Adafactor(p, .01),
    'adamax': lambda p: O.Adamax(p, .01, weight_decay=.1),
    'asgd': lambda p: O.ASGD(p, .01, weight_decay=.1),
    'nadam': lambda p: O.NAdam(p, .01, weight_decay=.1, decoupled_weight_decay=True),
    'radam': lambda p: O.RAdam(p, .01, weight_decay=.1),
    'rmsprop': lambda p: O.RMSprop(p, .01, momentum=.9, centered=True, weight_decay=.1),
    'rprop': lambda p: O.Rprop(p, .01),
    'lbfgs': lambda p: O.LBFGS(p, .1, max_iter=3),
}

@pytest.mark.parametrize('make', optimizers.values(), ids=optimizers.keys())
def test_every_torch_optimizer(make):
    model = small_net()
    masks = random_masks(model).keep(model)
    opt, start = make(model.parameters()), copy.deepcopy(model.state_dict())
    for i in range(4):
        step(model, opt, i)
        assert_zero(model, masks)
    assert not torch.equal(start['0.weight'], model[0].weight)

@pytest.mark.parametrize('name', ['sgd momentum decay', 'sgd fused', 'adamw decoupled', 'rmsprop'])
def test_momentum_from_before(name):
    "An optimizer that remembers the dense network never shows it, whether it is cleaned or not."
    make = optimizers[name]
    for told in False, True:
        model = small_net()
        opt = make(model.parameters())
        for i in range(3): step(model, opt, i)
        masks = random_masks(model).keep(model, opt if told else None)
        for i in range(3):
            step(model, opt, i)
            assert_zero(model, masks)

def test_lbfgs_forgets_the_dense_network():
    "Its vectors run over all parameters: it starts afresh where masks come, and goes on where they are those it knows."
    model, make = small_net(), optimizers['lbfgs']
    opt = make(model.parameters())
    for i in range(3): step(model, opt, i)
    masks = random_masks(model).keep(model, opt)
    assert not opt.state
    twin = copy.deepcopy(model)
    step(model, opt); step(twin, make(twin.parameters()))
    assert torch.equal(model[0].weight, twin[0].weight)
    masks.keep(model, opt)
    assert len(opt.state[model[0].weight]['old_dirs'])
    dense = small_net()
    before = make(dense.parameters())
    for i in range(3): step(dense, before, i)
    state = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(before.state_dict()); assert not opt.state
    opt.load_state_dict(state); assert len(opt.state[model[0].weight]['old_dirs'])

@pytest.mark.parametrize('dtype', [torch.complex64, torch.complex128])
def test_complex_weights(dtype):
    model = nn.Linear(3, 4, dtype=dtype)
    masks = random_masks(model).keep(model)
    for opt in O.SGD(model.parameters(), .1, momentum=.9), O.LBFGS(model.parameters(), .1, max_iter=3):
        for p in model.parameters(): opt.state[p]['momentum_buffer'] = torch.ones_like(p)
        if isinstance(opt, O.LBFGS): opt.state.clear()
        def closure():
            opt.zero_grad()
            (loss := model(torch.ones(2, 3, dtype=dtype)).abs().square().mean()).backward()
            return loss
        for _ in range(3): opt.step(closure); masks.keep(model, opt); assert_zero(model, masks)
    assert opt.state[model.weight]

def test_momentum_loaded_later():
    dense = small_net()
    before = O.SGD(dense.parameters(), .1, momentum=.9)
    for i in range(3): step(dense, before, i)
    model = small_net()
    opt = O.SGD(model.parameters(), .1, momentum=.9)
    masks = random_masks(model).keep(model, opt)
    opt.load_state_dict(before.state_dict())
    assert (opt.state[model[0].weight]['momentum_buffer'][~masks['0.weight']] == 0).all()
    step(model, opt)
    assert_zero(model, masks)

def test_same_as_multiplying_by_masks_in_the_forward_pass():
    "An independent way to the same weights: weight * mask in each forward pass."
    def two_ways(make, clip):
        ours, theirs = small_net(), small_net()
        masks = random_masks(ours).keep(ours)
        masks.to_torch_prune(theirs)
        pairs = [(ours, make(ours.parameters())), (theirs, make(theirs.parameters()))]
        for i in range(5):
            for model, opt in pairs:
                step(model, opt, i, lambda: clip and nn.utils.clip_grad_norm_(model.parameters(), clip), accumulate=2)
        Masks.from_torch_prune(theirs)
        return ours.state_dict(), theirs.state_dict()
    for make in optimizers['sgd nesterov'], optimizers['adamw decoupled']:
        for clip in None, .1:
            a, b = two_ways(make, clip)
            assert a.keys() == b.keys()
            for name in a: torch.testing.assert_close(a[name], b[name], **({} if clip else dict(rtol=0, atol=0)))

def test_clipping_sees_kept_weights_only():
    model = small_net()
    masks = random_masks(model, .05).keep(model)
    x, y = batch()
    nn.functional.cross_entropy(model(x), y).backward()
    for name, mask in masks.items(): assert (model.get_parameter(name).grad[~mask] == 0).all()

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_amp(dtype):
    model = small_net()
    masks = random_masks(model).keep(model)
    opt = O.SGD(model.parameters(), .1, momentum=.9, weight_decay=.1)
    scaler = torch.amp.GradScaler('cpu', enabled=dtype == torch.float16, init_scale=2.**12)
    for i in range(4):
        x, y = batch(i)
        with torch.autocast('cpu', dtype): loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert_zero(model, masks)

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_other_precisions_and_memory_formats(dtype):
    model = small_net()
    masks = random_masks(model).keep(model)
    model.to(dtype).to(memory_format=torch.channels_last)
    opt = O.AdamW(model.parameters(), .01)
    for i in range(3):
        x, y = batch(i)
        nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
        opt.step()
        assert_zero(model, masks)

def test_deepcopy_trains_by_its_own_optimizer():
    model = small_net()
    masks = random_masks(model).keep(model)
    copies = [copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), pickle.loads(pickle.dumps(model))]
    buffer = io.BytesIO()
    torch.save(model, buffer); buffer.seek(0)
    for twin in [*copies, torch.load(buffer, weights_only=False)]:
        assert Masks.of(twin) == masks
        twin(batch()[0])
        opt = O.SGD(twin.parameters(), .1, momentum=.9, weight_decay=.1)
        for p in twin.parameters(): opt.state[p]['momentum_buffer'] = torch.ones_like(p)
        for i in range(3): step(twin, opt, i)
        assert_zero(twin, masks)
        assert not torch.equal(twin[0].weight, model[0].weight)
    assert_zero(model, masks)

def test_a_pickle_read_by_another_process_is_held(tmp_path):
    "Momentum from before, and a weight that is replaced, are seen where nothing was kept before."
    model = small_net()
    random_masks(model).keep(model)
    torch.save(model, tmp_path/'model')
    code = """import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
model[4].weight = torch.nn.Parameter(torch.ones(4, 54))
opt = torch.optim.SGD(model.parameters(), .1, momentum=.9)
for p in model.parameters(): opt.state[p]['momentum_buffer'] = torch.ones_like(p)
model(torch.ones(8, 2, 5, 5)).square().mean().backward()
opt.step()
from phew_nb.masks import Masks
print([int((model.get_parameter(name)[~mask] != 0).sum()) for name, mask in Masks.of(model).items()])"""
    run = subprocess.run([sys.executable, '-c', code, tmp_path/'model'], capture_output=True, text=True)
    assert run.stdout.strip() == '[0, 0]', run.stderr[-2000:]

def test_a_part_of_the_model_and_a_model_around_it():
    model = small_net()
    masks = random_masks(model).keep(model)
    assert Masks.of(copy.deepcopy(model[0])) == Masks({'weight': masks['0.weight']})
    around = nn.Sequential(model, nn.Linear(4, 2))
    assert Masks.of(around) == Masks({f'0.{name}': mask for name, mask in masks.items()})
    around.load_state_dict({name: torch.ones_like(p) for name, p in around.state_dict().items()})
    assert_zero(model, masks)
    model[0].load_state_dict({name: torch.ones_like(p) for name, p in model[0].state_dict().items()}, assign=True)
    assert_zero(model, masks)
    step(model, O.SGD(model.parameters(), .1))
    assert_zero(model, masks)

def test_averaged_models():
    model = small_net()
    masks = random_masks(model).keep(model)
    averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(.9))]
    opt = O.AdamW(model.parameters(), .01)
    for i in range(4):
        step(model, opt, i)
        for average in averages: average.update_parameters(model)
    for average in averages: assert_zero(average.module, masks)

def test_masks_that_tighten():
    "Iterative pruning: each call to keep replaces the masks before."
    model = small_net()
    opt = O.SGD(model.parameters(), .1, momentum=.9)
    for density in .8, .5, .2:
        masks = random_masks(model, density).keep(model, opt)
        step(model, opt)
        assert_zero(model, masks)
        assert Masks.of(model) == masks

@pytest.mark.parametrize('before', [True, False])
def test_compile(before):
    model = small_net()
    masks = random_masks(model)
    if before: masks.keep(model)
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    if not before:
        compiled(batch()[0])
        masks.keep(compiled)
    opt = O.SGD(compiled.parameters(), .1, momentum=.9, weight_decay=.1)
    for i in range(3):
        step(compiled, opt, i)
        assert_zero(model, masks)
    assert Masks.of(compiled) == masks

def test_compiled_optimizer_step():
    model = small_net()
    masks = random_masks(model).keep(model)
    opt = O.SGD(model.parameters(), .1, momentum=.9, weight_decay=.1)
    for p in model.parameters(): opt.state[p]['momentum_buffer'] = torch.ones_like(p)
    compiled = torch.compile(lambda: opt.step(), backend='aot_eager')
    for i in range(3):
        x, y = batch(i)
        nn.functional.cross_entropy(model(x), y).backward()
        compiled()
        assert_zero(model, masks)

def test_data_parallel():
    model = small_net()
    masks = random_masks(model).keep(nn.DataParallel(model))
    assert Masks.of(nn.DataParallel(model)) == masks
    replica = model._replicate_for_data_parallel()
    assert not list(replica.parameters(recurse=False))
    x, y = (t.to(next(model.parameters()).device) for t in batch()) # (it moves the model where there is a GPU)
    opt = O.SGD(model.parameters(), .1)
    nn.functional.cross_entropy(nn.DataParallel(model)(x), y).backward(); opt.step()
    assert_zero(model, masks)

def test_state_dict_is_plain():
    model, plain = small_net(), small_net()
    random_masks(model).keep(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    assert Masks.of(plain) is None
    assert {n for n, _ in model.named_buffers()} == {n for n, _ in plain.named_buffers()}

def test_autograd_grad_is_left_alone():
    "Only `backward` into a parameter's `.grad` is masked: scores may ask for any gradient."
    model = small_net()
    masks = random_masks(model).keep(model)
    x, y = batch()
    grad, = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model[0].weight)
    assert (grad[~masks['0.weight']] != 0).any()
    nn.functional.cross_entropy(model(x), y).backward(create_graph=True)
    assert (model[0].weight.grad[~masks['0.weight']] == 0).all()

class Product(nn.Module):
    "Its weight is its own, and no layer's."
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
    def forward(self, x): return x @ self.weight

def test_a_network_of_fx_is_held_and_so_are_its_copies():
    model = fx.symbolic_trace(Product())
    masks = Masks({'weight': torch.eye(2, 3).bool()}).keep(model)
    twin = copy.deepcopy(model) # as torch.fx copies: the hooks of a network, its weights, and none of what else it holds
    assert Masks.of(model) == Masks.of(twin) == masks
    twin.load_state_dict({'weight': 2*torch.ones(2, 3)})
    assert torch.equal(twin.weight, 2*torch.eye(2, 3)) and torch.equal(model.weight, torch.eye(2, 3))

def test_release_bake_and_no_leak():
    model = small_net()
    masks = random_masks(model).keep(model)
    twin = copy.deepcopy(model)
    weights = [weakref.ref(m.weight) for net in (model, twin) for m in (net[0], net[4])]
    masks.bake(model)
    assert Masks.of(model) is None and Masks.of(twin) == masks
    assert all(not m._load_state_dict_post_hooks for m in model.modules())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    step(model, O.SGD(model.parameters(), .1))
    assert (model[0].weight[~masks['0.weight']] != 0).any()
    del twin, model
    gc.collect()
    assert [w() for w in weights] == [None]*4

def test_bad_masks_leave_the_model_alone():
    model = small_net()
    before = copy.deepcopy(model.state_dict())
    masks = random_masks(model)
    wrong = Masks({**masks, '4.weight': torch.zeros(4, 3, dtype=torch.bool)})
    for call in wrong.apply, wrong.keep, wrong.bake, wrong.to_torch_prune:
        with pytest.raises(ValueError, match='another model'): call(model)
    assert Masks.of(model) is None
    for name, value in model.state_dict().items(): assert torch.equal(value, before[name])

@settings(max_examples=50, deadline=None)
@given(st.data())
def test_files_and_algebra(data):
    name = st.text(min_size=1, max_size=8).filter(lambda s: s != '__metadata__' and s.isprintable())
    shapes = data.draw(st.dictionaries(name, st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=4))
    gen = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    a, b = (Masks({n: torch.rand(s, generator=gen) < .5 for n, s in shapes.items()}) for _ in range(2))
    path = test_files_and_algebra.folder/'masks'
    assert Masks.load(a.save(path)) == a and Masks.load(path).hash() == a.hash()
    assert ~(a & b) == ~a | ~b and (a ^ b) == (a | b) & ~(a & b) and (a & b) <= a <= (a | b)
    assert a.kept + b.kept == (a & b).kept + (a | b).kept
    assert 0 <= a.jaccard(b) <= a.overlap(b) <= 1

@pytest.fixture(autouse=True)
def folder(tmp_path): test_files_and_algebra.folder = tmp_path

@given(st.integers(1, 10**9), st.floats(0, 1, exclude_min=True))
def test_n_kept(total, density):
    assert 1 <= n_kept(total, density) <= total
    assert abs(n_kept(total, density) - density*total) <= max(.5, 1 - density*total)

@pytest.mark.parametrize('kept', [2.5, 2., True, '2'])
def test_a_number_of_weights_is_whole(kept):
    with pytest.raises(TypeError, match='whole number of weights.*use density='): n_kept(10, kept=kept)

@pytest.mark.parametrize('name', [3, '', None])
def test_masks_go_by_parameter_name(name):
    with pytest.raises(TypeError, match='masks go by parameter name'): Masks({name: torch.ones(2).bool()})

def test_a_crash_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    masks = random_masks(small_net())
    path = masks.save(tmp_path/'m')
    monkeypatch.setattr(os, 'replace', lambda *args: (_ for _ in ()).throw(OSError('disk full')))
    with pytest.raises(OSError, match='disk full'): (~masks).save(path)
    assert Masks.load(path) == masks and [p.name for p in tmp_path.iterdir()] == ['m']

@pytest.mark.parametrize('method', ['random', 'magnitude', 'synflow', 'phew'])
def test_pruned_once_more(method):
    "A network that remembers its masks has no choice left at their density, and is told so."
    model = mlp([6, 12, 12, 3], seed=0)
    first = prune(model, method, .5, (6,)).apply(model)
    with pytest.warns(UserWarning, match='the same masks come back'): again = prune(model, method, .5, (6,), seed=1)
    assert again.jaccard(first) > .9
    with pytest.raises(ValueError): prune(model, method, .8, (6,))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert prune(model, method, .2, (6,)) <= first
        Masks.forget(model)
        assert prune(mlp([6, 12, 12, 3], seed=1), method, .8, (6,)).kept > first.kept

def test_import_is_light():
    code = "import sys, phew_nb.masks; print([m for m in ('fastai', 'pandas', 'torch._dynamo') if m in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'

def test_masks_of_the_hub(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip('huggingface_hub')
    masks = Masks({'a.weight': torch.rand(5, 7) > .5})
    folder, asked = masks.save_pretrained(tmp_path/'made', method='phew', seed=3), []
    assert Masks.from_pretrained(folder) == masks and '| method | phew |' in (folder/'README.md').read_text()
    def download(**kwargs): asked.append(kwargs); return str(folder/kwargs['filename'])
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', download)
    assert Masks.from_pretrained('someone/masks', revision='v1') == masks
    assert asked == [dict(repo_id='someone/masks', filename='masks.safetensors', revision='v1')]
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    with pytest.raises(ImportError, match='needs huggingface_hub'): Masks.from_pretrained('someone/masks')

def halves(net, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return {name: torch.rand(p.shape, generator=gen) < .5 for name, p in net.named_parameters() if p.ndim > 1}

def tied():
    net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False))
    net[1].weight = net[0].weight
    return net

def test_a_tied_model_that_loads_a_dense_state_is_masked_at_once():
    net = tied()
    masks = Masks(halves(net)).keep(net)
    net.load_state_dict(tied().state_dict())
    assert not net[0].weight[~masks['0.weight']].any() and list(Masks.of(net)) == ['0.weight']
    again = Masks({'0.weight': ~masks['0.weight']}).keep(net)
    net.load_state_dict(tied().state_dict())
    assert not net[1].weight[~again['0.weight']].any() and Masks.of(net) == again
    Masks.forget(net)
    assert Masks.of(net) is None and not any(m._load_state_dict_post_hooks for m in net.modules())

def test_two_models_hold_a_weight_to_one_mask():
    a, b = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2))
    b[0].weight = a[0].weight
    Masks(halves(a)).keep(a)
    with pytest.raises(ValueError, match="'0.weight' is a weight of another model, too"): Masks(halves(b, 1)).keep(b)
    Masks.forget(a)
    assert not Masks(halves(b, 1)).keep(b).density == 1 and Masks.of(a) is None

class Two(nn.Module):
    "A layer that masks hold beside one that they do not."
    def __init__(self):
        super().__init__()
        self.a, self.d = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x): return self.a(x) + self.d(x)

@pytest.mark.parametrize('move', [lambda net: net.__delitem__(0), lambda net: net.pop(1), lambda net: net.insert(0, nn.Linear(8, 8)),
                                  lambda net: [net.__setitem__(i, m) for i, m in enumerate([net[1], net[0], net[2]])]])
def test_what_only_moved_is_not_said_to_be_dense(move):
    net = nn.Sequential(Two(), Two(), Two())
    Masks({f'{i}.a.weight': torch.eye(8) > 0 for i in range(3)}).keep(net)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        move(net)
        net(torch.ones(2, 8)).sum().backward()
        torch.optim.SGD(net.parameters(), .1).step()
    with pytest.warns(UserWarning, match='takes the place of a layer that masks held'): net[1] = Two()

# --- weights that go by another name for a while, or get another shape in place
def three(): torch.manual_seed(0); return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 4))

def learn(model, steps=2, n=12):
    opt = O.SGD(model.parameters(), .1, momentum=.9, weight_decay=.01)
    for i in range(steps):
        gen = torch.Generator().manual_seed(i)
        opt.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(32, n, generator=gen)), torch.randint(4, (32,), generator=gen)).backward()
        opt.step()
    return model

def renamed(layer, off):
    "As someone may do by hand: the same parameter, by another name."
    if off: layer.weight = layer._parameters.pop('mine'); return
    layer.register_parameter('mine', layer._parameters.pop('weight'))
    layer.weight = layer.mine.data

P, parametrizations = nn.utils.prune, nn.utils.parametrizations
def unparametrized(m): nn.utils.parametrize.remove_parametrizations(m, 'weight')
for_a_while = {
    'identity of torch': (lambda m: P.identity(m, 'weight'), lambda m: P.remove(m, 'weight'), 'weight_orig'),
    'mask of torch, twice': (lambda m: [P.custom_from_mask(m, 'weight', torch.ones(m.weight.shape)) for _ in range(2)],
                             lambda m: P.remove(m, 'weight'), 'weight_orig'),
    'old spectral norm': (nn.utils.spectral_norm, nn.utils.remove_spectral_norm, 'weight_orig'),
    'by hand': (lambda m: renamed(m, False), lambda m: renamed(m, True), 'mine'),
    'old weight norm': (nn.utils.weight_norm, nn.utils.remove_weight_norm, None),
    'weight norm': (parametrizations.weight_norm, unparametrized, None),
    'spectral norm': (parametrizations.spectral_norm, unparametrized, None),
    'orthogonal': (parametrizations.orthogonal, unparametrized, None)}

@pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore:something was added')
@pytest.mark.parametrize('copied', [False, True])
@pytest.mark.parametrize('at', [0, 2, 4])
@pytest.mark.parametrize('way', for_a_while)
def test_a_weight_that_was_another_for_a_while_is_held_as_before(way, at, copied):
    on, off, name = for_a_while[way]
    model = three()
    masks = random_masks(model).keep(model)
    on(model[at])
    if name is not None:
        assert list(Masks.of(model)) == [n if n != f'{at}.weight' else f'{at}.{name}' for n in masks]
        if way != 'by hand': assert_zero(learn(model), Masks.of(model)) # (whose forward pass would not know of it)
    elif copied: model = pickle.loads(pickle.dumps(model)) if 'old' in way else copy.deepcopy(model)
    off(model[at])
    assert Masks.of(model) == masks
    assert_zero(learn(model), masks)
    Masks.of(model).keep(model)
    assert prune(model, 'phew', .1, input_size=(12,)) <= masks

@pytest.mark.filterwarnings('ignore::FutureWarning')
@pytest.mark.parametrize('on, off, own', [
    (lambda m: P.random_unstructured(m, 'weight', .1), lambda m: P.remove(m, 'weight'), 'weight_orig'),
    (nn.utils.spectral_norm, nn.utils.remove_spectral_norm, 'weight_orig'),
    (nn.utils.weight_norm, nn.utils.remove_weight_norm, 'weight_v'),
    (parametrizations.weight_norm, unparametrized, 'parametrizations.weight.original1'),
    (parametrizations.spectral_norm, unparametrized, 'parametrizations.weight.original')])
def test_masks_of_a_computed_weight_stay_with_it_when_it_is_plain_again(on, off, own):
    model = three()
    on(model[0])
    mask = random_masks(model)[f'0.{own}'] | (torch.arange(12) == 0) # (no row is empty)
    Masks({f'0.{own}': mask}).keep(model)
    off(model[0])
    assert Masks.of(model) == Masks({'0.weight': mask})
    assert_zero(learn(model), Masks.of(model))

@pytest.mark.filterwarnings('ignore::FutureWarning')
def test_a_copy_that_failed_half_way_does_not_trouble_others():
    model = three()
    random_masks(model).keep(model)
    nn.utils.weight_norm(model[0])
    with pytest.raises(RuntimeError, match='deepcopy protocol') as failed: copy.deepcopy(model)
    learn(three())
    assert failed.tb is not None # (which holds what was made of the copy)

def test_a_mask_does_not_go_to_another_weight_of_a_like_name():
    model = three()
    model[0].extra, model[0].extra_v = (nn.Parameter(torch.randn(20, 12)) for _ in range(2))
    Masks({'0.extra_v': torch.rand(20, 12) < .5}).keep(model)
    del model[0].extra_v
    with pytest.raises(RuntimeError, match="'extra_v' of Linear .* no parameter of the layer any more"): learn(model)
    assert list(Masks.of(model)) == ['0.extra_v'] and (model[0].extra != 0).all()

def test_what_torch_prunes_of_a_kept_model_is_pruned_of_what_is_kept():
    for held in True, False:
        model = three()
        masks = random_masks(model)
        (masks.keep if held else masks.apply)(model)
        P.random_unstructured(model[0], 'weight', .5)
        theirs = Masks({'0.weight': model[0].weight_mask != 0})
        both = theirs & {'0.weight': masks['0.weight']}
        assert Masks.of(model)['0.weight_orig'].equal(both['0.weight']) and Masks.of(model).total == masks.total
        assert Masks.from_torch_prune(model) == both
        assert Masks.of(model) == Masks({**masks, **both})
        if held: assert_zero(learn(model), Masks.of(model))

shapes = {
    'backward': lambda m: m(torch.randn(4, 14)).sum().backward(),
    'step': lambda m: O.SGD(m.parameters(), .1).step(),
    'rezero': Masks.rezero,
    'load': lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()))}

@pytest.mark.parametrize('way', shapes)
def test_another_shape_in_place_is_refused_by_its_sentence(way):
    model = three()
    random_masks(model).keep(model)
    model[0].weight.data = torch.randn(20, 14)
    model[0] = model[0] # to put it to its place is no matter
    for m in model, copy.deepcopy(model):
        with pytest.raises(RuntimeError, match=r"'weight' of Linear is held by a mask, but it has now the shape \(20, 14\)"): shapes[way](m)
        Masks.forget(m)
        learn(m, n=14)

def test_an_optimizer_that_loads_a_state_of_another_shape_says_so_at_its_step():
    model = three()
    opt = O.SGD(model.parameters(), .1, momentum=.9)
    random_masks(model).keep(model, opt)
    model(torch.randn(4, 12)).sum().backward(); opt.step(); opt.zero_grad()
    state = opt.state_dict()
    model[0].weight.data = torch.randn(20, 14)
    state['state'][0]['momentum_buffer'] = torch.randn(20, 14)
    opt.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'the shape \(20, 14\)'): opt.step()
    other = three()
    learn(other) # that is no matter of another network

def test_a_compact_network_is_held_where_the_other_is():
    from phew_nb.export import compact
    from phew_nb.keeping import is_kept
    for given in False, True:
        model = three()
        masks = prune(model, 'synflow', .05, input_size=(12,)).keep(model)
        small = compact(model, masks if given else None, input_size=(12,))
        assert is_kept(model) and is_kept(small) and small[2].weight.numel() < 400
        assert_zero(learn(small), Masks.of(small))
        Masks.release(model)
        assert not is_kept(compact(model, input_size=(12,)))
    first = Masks({'0.weight': masks['0.weight']}).keep(model)
    small = compact(model, input_size=(12,))
    assert [is_kept(m) for m in (small[0], small[2], small[4])] == [True, False, False]
    assert Masks.of(small).keys() == masks.keys() and first.keys() == {'0.weight'}
