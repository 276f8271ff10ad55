"Ways to train, one row each: masked weights are zero after it, and the others have moved."
import copy, io, pickle, types, warnings
from collections import defaultdict

import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phew_nb.masks import Masks, unwrapped

O = torch.optim

def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU()), nn.Linear(12, 3))

def choose(model, density=.3, seed=1):
    gen = torch.Generator().manual_seed(seed)
    weights = {name: p for name, p in unwrapped(model).named_parameters() if p.ndim > 1}
    return Masks({name: torch.rand(p.shape, generator=gen) < density for name, p in weights.items()})

def data(i):
    gen = torch.Generator().manual_seed(i)
    return torch.randn(16, 6, generator=gen), torch.randint(3, (16,), generator=gen)

def loss_of(model, i=0):
    x, y = data(i)
    p = next(model.parameters())
    return F.cross_entropy(model(x.to(p.dtype)), y)

def train(model, opt, steps=4):
    for i in range(steps):
        opt.zero_grad()
        loss_of(model, i).backward()
        opt.step()
    return model

def sgd(model, **kwargs): return O.SGD(model.parameters(), .1, **dict(momentum=.9, weight_decay=1e-2) | kwargs)
def with_past(model, make_opt=sgd, steps=3):
    "An optimizer that remembers the dense network."
    opt = make_opt(model)
    train(model, opt, steps)
    return opt

# Each row is a function of (model, masks) that trains and gives the model that was trained, or several of them.
loops = {}
def row(f): loops[f.__name__.replace('_', ' ')] = f; return f

# --- frozen weights
@row
def frozen_before_keep(model, masks):
    model[0].weight.requires_grad_(False)
    masks.keep(model)
    train(model, sgd(model))
    model[0].weight.requires_grad_(True)
    loss_of(model).backward()
    assert (model[0].weight.grad[~masks['0.weight']] == 0).all()
    return train(model, sgd(model))

@row
def frozen_after_keep_and_back_again(model, masks):
    masks.keep(model)
    for frozen in True, False, True, False:
        model[2].requires_grad_(not frozen)
        train(model, sgd(model), 2)
    return model

@row
def all_frozen_then_kept_then_unfrozen(model, masks):
    model.requires_grad_(False)
    masks.keep(model)
    model.requires_grad_(True)
    loss_of(model).backward()
    for name, mask in masks.items(): assert (model.get_parameter(name).grad[~mask] == 0).all()
    return train(model, sgd(model))

def frozen(model, masks, before):
    if before: model[0].requires_grad_(False)
    masks.keep(model)
    model[0].requires_grad_(False); model[3].requires_grad_(False)
    return model

def copies(model, before):
    "Copies of a model that is frozen in part, unfrozen and trained."
    buffer = io.BytesIO(); torch.save(model, buffer); buffer.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False), copy.copy(model)]
    for twin in twins:
        assert not twin[0].weight.requires_grad and Masks.of(twin) == Masks.of(model)
        train(twin.requires_grad_(True), sgd(twin))
        model[0].requires_grad_(False)
    return twins

@row
def copies_of_a_frozen_model(model, masks): return copies(frozen(model, masks, False), False)
@row
def copies_of_a_model_frozen_before(model, masks): return copies(frozen(model, masks, True), True)

@row
def state_loaded_into_a_frozen_model(model, masks):
    frozen(model, masks, True).load_state_dict(make(5).state_dict())
    assert (model[0].weight[~masks['0.weight']] == 0).all()
    model.load_state_dict(make(6).state_dict(), assign=True)
    assert (model[0].weight[~masks['0.weight']] == 0).all()
    return train(model.requires_grad_(True), sgd(model))

@row
def averages_of_a_frozen_model(model, masks):
    frozen(model, masks, True)
    averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(.9), use_buffers=True)]
    opt = sgd(model)
    for i in range(3):
        train(model, opt, 1)
        for average in averages: average.update_parameters(model)
    for average in averages: train(average.module.requires_grad_(True), sgd(average.module))
    return [average.module for average in averages]

# --- optimizers that PyTorch's hook does not reach
class Lookahead:
    "k steps forward, one step back; no subclass of torch's optimizers."
    def __init__(self, optimizer, k=2, alpha=.5):
        self.optimizer, self.k, self.alpha, self.n = optimizer, k, alpha, 0
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group['params']]
    def zero_grad(self): self.optimizer.zero_grad()
    def step(self):
        self.optimizer.step(); self.n += 1
        if self.n % self.k: return
        params = [p for group in self.optimizer.param_groups for p in group['params']]
        for p, slow in zip(params, self.slow):
            slow.add_(p.data - slow, alpha=self.alpha)
            p.data.copy_(slow)

class NoInit(O.Optimizer):
    "A subclass of torch's optimizer that never calls its `__init__`."
    def __init__(self, params, lr=.1):
        self.param_groups, self.state, self.defaults = [dict(params=list(params), lr=lr)], defaultdict(dict), {}
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is not None: p.data.add_(p.grad + torch.sign(p.data + 1e-3), alpha=-group['lr'])

class Bare:
    "An optimizer that knows nothing of torch's, with momentum."
    def __init__(self, params): self.params, self.momentum = list(params), {}
    def zero_grad(self):
        for p in self.params: p.grad = None
    def step(self):
        for p in self.params:
            m = self.momentum[p] = .9*self.momentum.get(p, torch.ones_like(p)) + p.grad
            p.data -= .1*m

class Masters:
    "Steps on copies of the weights in full precision, and writes them back."
    def __init__(self, model):
        self.params = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        self.inner = O.SGD(self.masters, .1, momentum=.9)
        self.param_groups = self.inner.param_groups
    def zero_grad(self):
        for p in self.params: p.grad = None
    def step(self):
        for p, master in zip(self.params, self.masters): master.grad = p.grad.float()
        self.inner.step()
        for p, master in zip(self.params, self.masters): p.data.copy_(master.data)

@row
def lookahead(model, masks):
    opt = Lookahead(sgd(model))
    masks.keep(model, opt)
    return train(model, opt, 5)

@row
def subclass_without_init(model, masks):
    opt = NoInit(model.parameters())
    masks.keep(model, opt)
    return train(model, opt)

@row
def no_optimizer_of_torch_at_all(model, masks):
    opt = Bare(model.parameters())
    masks.keep(model, opt)
    masks.keep(model, opt) # once more is no harm
    return train(model, opt)

@row
def master_weights(model, masks):
    opt = Masters(model)
    masks.keep(model, opt)
    return train(model, opt)

@row
def master_weights_in_half_precision(model, masks):
    opt = Masters(model.to(torch.bfloat16))
    masks.keep(model, opt)
    return train(model, opt)

@row
def wrapped_with_a_scheduler(model, masks):
    opt = NoInit(model.parameters())
    opt._optimizer_step_pre_hooks, opt._optimizer_step_post_hooks = {}, {}
    masks.keep(model, opt)
    schedule = O.lr_scheduler.StepLR(sgd(model), 1)
    opt2 = schedule.optimizer
    masks.keep(model, opt2)
    for i in range(3): train(model, opt2, 1); schedule.step()
    return train(model, opt)

@row
def two_optimizers(model, masks):
    a, b = O.SGD(model[0].parameters(), .1, momentum=.9), Lookahead(O.AdamW(model[3].parameters(), .01))
    masks.keep(model, a); masks.keep(model, b)
    both = types.SimpleNamespace(zero_grad=lambda: (a.zero_grad(), b.zero_grad()), step=lambda: (a.step(), b.step()))
    return train(model, both)

@row
def a_copied_optimizer(model, masks):
    opt = Bare(model.parameters())
    masks.keep(model, opt)
    twin, twin_opt = copy.deepcopy((model, opt))
    train(twin, twin_opt)
    return [train(model, opt), twin]

def schedule_free(model, masks, make_opt, pass_it=True):
    pytest.importorskip('schedulefree')
    opt = make_opt(model)
    opt.train(); train(model, opt, 3) # dense, so that its averages hold masked weights
    masks.keep(model, opt)
    train(model, opt, 3)
    for _ in range(2):
        opt.eval(); check(model, masks)
        opt.train(); check(model, masks)
    opt.eval()
    return model

@row
def schedule_free_sgd(model, masks):
    return schedule_free(model, masks, lambda m: __import__('schedulefree').SGDScheduleFree(m.parameters(), .1, momentum=.9))
@row
def schedule_free_adamw(model, masks):
    return schedule_free(model, masks, lambda m: __import__('schedulefree').AdamWScheduleFree(m.parameters(), .01, weight_decay=.1))
@row
def schedule_free_around_another(model, masks):
    return schedule_free(model, masks, lambda m: __import__('schedulefree').ScheduleFreeWrapper(O.SGD(m.parameters(), .1), momentum=.9))

@row
def accelerated(model, masks):
    accelerate = pytest.importorskip('accelerate')
    accelerator = accelerate.Accelerator(cpu=True)
    model, opt = accelerator.prepare(model, with_past(model))
    masks.keep(model, opt)
    for i in range(3):
        opt.zero_grad()
        accelerator.backward(loss_of(model, i))
        accelerator.clip_grad_norm_(model.parameters(), 1.)
        opt.step()
    return model

@row
def trainer_of_hugging_face(model, masks):
    transformers = pytest.importorskip('transformers')
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.net = model
        def forward(self, x, labels): return dict(loss=F.cross_entropy(self.net(x), labels))
    class Keep(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs): masks.keep(model.net, optimizer)
    rows = [dict(x=x, labels=y) for x, y in zip(*data(0))]
    args = transformers.TrainingArguments(output_dir=str(folder), max_steps=3, per_device_train_batch_size=8, use_cpu=True,
                                          report_to=[], save_strategy='no', logging_strategy='no', disable_tqdm=True)
    transformers.Trainer(Net(), args, train_dataset=rows, callbacks=[Keep()]).train()
    return model

# --- weights that are replaced
@row
def assigned(model, masks):
    masks.keep(model)
    model[0].weight = nn.Parameter(torch.ones(12, 6))
    assert (model[0].weight[~masks['0.weight']] == 0).all()
    loss_of(model).backward()
    assert (model[0].weight.grad[~masks['0.weight']] == 0).all()
    return train(model, sgd(model))

@row
def put_into_the_dict_of_parameters(model, masks):
    masks.keep(model)
    model[0]._parameters['weight'] = nn.Parameter(torch.randn(12, 6))
    return train(model, sgd(model), 1)

def converted(model, masks, switch):
    masks.keep(model)
    switch(True)
    try: model.double()
    finally: switch(False)
    assert model[0].weight.dtype == torch.float64
    return train(model, sgd(model), 1)

@row
def converted_by_overwriting(model, masks): return converted(model, masks, torch.__future__.set_overwrite_module_params_on_conversion)
@row
def converted_by_swapping(model, masks): return converted(model, masks, torch.__future__.set_swap_module_params_on_conversion)

@row
def overwritten_with_momentum(model, masks):
    "Rezero sees the new weights, and the optimizer's memory of the old gradient is cleaned."
    masks.keep(model)
    model[0]._parameters['weight'] = nn.Parameter(torch.randn(12, 6))
    Masks.rezero(model)
    assert (model[0].weight[~masks['0.weight']] == 0).all()
    return train(model, sgd(model))

@row
def deleted_and_set_again(model, masks):
    masks.keep(model)
    w = model[0].weight
    del model[0].weight
    model[0].weight = nn.Parameter(w.detach() + 1)
    return train(model, sgd(model))

@row
def quantisation_aware(model, masks):
    "It makes layers anew around the weights, and writes them into the dicts of modules."
    quantization = pytest.importorskip('torch.ao.quantization')
    masks.keep(model)
    model.qconfig = quantization.get_default_qat_qconfig('fbgemm')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        copied = quantization.prepare_qat(model)
        quantization.prepare_qat(model, inplace=True)
    assert type(model[0]) is not nn.Linear and Masks.of(model) == Masks.of(copied) == masks
    for m in model, copied:
        opt = sgd(m)
        for p in m.parameters(): opt.state[p]['momentum_buffer'] = torch.ones_like(p)
        train(m, opt)
    return [model, copied]

@row
def a_layer_around_a_held_weight_that_is_gone_again(model, masks):
    masks.keep(model)
    for _ in range(2): nn.Linear(6, 12).weight = model[0].weight
    return train(model, sgd(model))

@row
def with_a_weight_that_another_network_lets_go(model, masks):
    masks.keep(model)
    other = make()
    other[0].weight = model[0].weight
    Masks.forget(other)
    return train(model, sgd(model))

@row
def kept_anew_where_a_weight_is_shared_since(model, masks):
    choose(model, seed=5).keep(model)
    model[2].add_module('other', nn.Linear(12, 3))
    model[2].other.weight = model[3].weight
    del model[2].other.bias
    masks.keep(model)
    assert all((_own == masks['3.weight']).all() for _own in (Masks.of(model[2].other)['weight'], Masks.of(model[3])['weight']))
    model[2].other = nn.Identity()
    return train(model, sgd(model))

@row
def with_a_functional_call_between(model, masks):
    "Parameters of another model, for one forward pass, are left alone."
    masks.keep(model)
    other = make(7)
    before = copy.deepcopy(other.state_dict())
    torch.func.functional_call(model, dict(other.named_parameters()), data(0)[0])
    train(model, sgd(model))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), other.state_dict().values()) if a.ndim > 1)
    return model

# --- fastai, low-rank adapters
@row
def fastai_freezes_and_unfreezes(model, masks):
    import fastai.callback.progress, fastai.callback.schedule # give learners no_bar and fine_tune # noqa: F401
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    batches = [data(i) for i in range(2)]
    def items(): return DataLoader(list(zip(*map(torch.cat, zip(*batches)))), bs=16, num_workers=0)
    learn = Learner(DataLoaders(items(), items()), model, F.cross_entropy, splitter=lambda m: [list(m[:2].parameters()), list(m[2:].parameters())])
    masks.keep(model)
    with learn.no_bar(), learn.no_logging():
        learn.freeze(); learn.fit(1, .1); learn.unfreeze(); learn.fit(1, .1)
        learn.fine_tune(1, .01)
    learn.model = copy.deepcopy(learn.model)
    return [model, learn.model]

@row
def low_rank_adapters(model, masks):
    peft = pytest.importorskip('peft')
    masks.keep(model)
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=['0', '3'], r=2))
    train(lora, O.AdamW([p for p in lora.parameters() if p.requires_grad], .05))
    for name, mask in masks.items(): assert (lora_weight(lora, name)[~mask] == 0).all()
    with pytest.warns(UserWarning, match='an adapter that was merged'): merged = lora.merge_and_unload()
    assert (merged[0].weight[~masks['0.weight']] != 0).any()
    Masks.rezero(merged)
    return merged

def lora_weight(lora, name):
    params = dict(lora.named_parameters())
    return next(p for n, p in params.items() if n.replace('base_layer.', '').endswith(f'model.{name}'))

# --- wrappers
@row
def data_parallel(model, masks):
    wrapped = nn.DataParallel(model)
    masks.keep(wrapped)
    train(wrapped, sgd(wrapped))
    return model.cpu()

@row
def compiled_layer_by_layer(model, masks):
    model[0] = torch.compile(model[0], backend='eager')
    model[2] = torch.compile(model[2], backend='eager')
    masks.keep(model)
    train(model, sgd(model))
    assert Masks.of(model).check(make()) == masks and masks.check(model) == Masks.of(model)
    for name, mask in Masks.of(model).items(): assert (model.get_parameter(name)[~mask] == 0).all()
    return nn.Sequential(model[0]._orig_mod, nn.ReLU(), model[2]._orig_mod, model[3])

@row
def an_average_of_compiled_and_parallel(model, masks):
    average = AveragedModel(nn.DataParallel(model))
    masks.keep(average)
    assert Masks.of(average) == masks and Masks({f'module.module.{n}': m for n, m in masks.items()}).check(model) == masks
    return train(unwrapped(average), sgd(average))

@row
def activation_checkpoints(model, masks):
    from torch.utils.checkpoint import checkpoint
    masks.keep(model)
    wrapped = types.SimpleNamespace(parameters=model.parameters)
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.net = model
        def forward(self, x): return self.net[3](checkpoint(self.net[2], F.relu(self.net[0](x)), use_reentrant=False))
    train(Net(), sgd(model))
    return model

@row
def gradients_accumulated_by_hand(model, masks):
    "No optimizer at all: only the gradients are masked, and the weights stay where they are."
    masks.keep(model)
    for i in range(4):
        model.zero_grad()
        loss_of(model, i).backward()
        with torch.no_grad():
            for p in model.parameters(): p -= .1*p.grad
    return model

@row
def steps_in_the_backward_pass(model, masks):
    opts = {p: O.SGD([p], .1, momentum=.9) for p in model.parameters()}
    def step(p): opts[p].step(); opts[p].zero_grad()
    for p in model.parameters(): p.register_post_accumulate_grad_hook(step)
    masks.keep(model)
    for i in range(3): loss_of(model, i).backward()
    return model

@row
def sharpness_aware(model, masks):
    "Two passes a step: the first climbs, the second goes down from where it started."
    opt = with_past(model)
    masks.keep(model, opt)
    for i in range(3):
        loss_of(model, i).backward()
        up = [.05*p.grad/(p.grad.norm() + 1e-9) for p in model.parameters()]
        with torch.no_grad():
            for p, e in zip(model.parameters(), up): p += e
        opt.zero_grad(); loss_of(model, i).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), up): p -= e
        opt.step(); opt.zero_grad()
    return model

# --- the table, walked
def check(model, masks):
    params = dict(unwrapped(model).named_parameters())
    for name, mask in masks.items():
        assert (params[name][~mask] == 0).all(), f'{name}: {int((params[name][~mask] != 0).sum())} masked weights are not zero'
        assert params[name].isfinite().all() and (params[name][mask] != 0).any()

@pytest.fixture(autouse=True)
def a_folder(tmp_path):
    global folder
    folder = tmp_path

@pytest.mark.parametrize('loop', loops.values(), ids=loops.keys())
def test_masked_weights_are_zero_after(loop):
    model = make()
    masks = choose(model)
    start = copy.deepcopy(model.state_dict())
    for trained in (lambda out: out if isinstance(out, list) else [out])(loop(model, masks)):
        check(trained, masks)
        after = dict(unwrapped(trained).named_parameters())
        assert not torch.equal(after['3.weight'].double(), masks['3.weight']*start['3.weight'].double())

# --- what cannot be held is refused, and what is lost is said
def test_a_weight_that_is_gone_or_of_another_shape_is_refused():
    def after_keep(change, where):
        model = make()
        choose(model).keep(model)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match=where):
            change(model)
            train(model, sgd(model), 1)
        return model, before
    model, before = after_keep(lambda m: setattr(m[0], 'weight', nn.Parameter(torch.ones(3, 6))), r"'weight' of Linear .* shape \(3, 6\)")
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    Masks.forget(model)
    model, _ = after_keep(lambda m: nn.utils.parametrizations.weight_norm(m[0]), 'no parameter of the layer any more')
    Masks.forget(model); train(model, sgd(model), 1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        model, _ = after_keep(lambda m: nn.utils.weight_norm(m[0]), 'no parameter of the layer any more')
    with pytest.raises(RuntimeError, match='no parameter of the layer'): Masks.rezero(model)
    del model; train(other := make(), sgd(other), 1) # a model that nobody has does not trouble another

def test_states_of_other_masks_are_said():
    model, dense, other = make(), make(3), make(4)
    masks = choose(model).keep(model)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model.load_state_dict(dense.state_dict()); check(model, masks)
        model.load_state_dict(model.state_dict()); check(model, masks)
        model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True); check(model, masks)
    choose(other, seed=9).keep(other)
    with pytest.warns(UserWarning, match='masked already, by other masks'): model.load_state_dict(other.state_dict())
    check(model, masks)

def with_weights_of(old):
    new = nn.Linear(12, 3)
    new.load_state_dict(old.state_dict())
    return new

def with_weight_itself(old):
    new = nn.Linear(12, 3)
    new.weight = old.weight
    return new

@pytest.mark.parametrize('make_new,dense', [
    (lambda old: nn.Linear(12, 3), True), (lambda old: nn.Linear(12, 5), True),
    (lambda old: nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)), True),
    (lambda old: with_weights_of(old), True), (lambda old: with_weight_itself(old), False), (copy.deepcopy, False), (lambda old: nn.Sequential(old, nn.Dropout(.1)), False), (lambda old: nn.Identity(), False),
    (lambda old: nn.Linear(12, 3).requires_grad_(False), False)])
def test_a_dense_layer_in_place_of_one_that_is_held_is_said(make_new, dense):
    model = make()
    choose(model).keep(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        model[3] = make_new(model[3])
    assert [str(w.message)[:55] for w in said] == dense*["'3' of Sequential takes the place of a layer that masks"]

@pytest.mark.parametrize('part', ['0', '2', '2.0'])
@pytest.mark.parametrize('alive', [False, True])
def test_a_dense_layer_put_into_the_dict_of_modules_is_said_at_the_next_step(part, alive):
    model = make()
    choose(model).keep(model)
    path, _, name = part.rpartition('.')
    parent, old = model.get_submodule(path), model.get_submodule(part)
    parent._modules[name] = make()[int(part[0])] if path == '' else nn.Linear(12, 12)
    if not alive: del old
    opt = sgd(model)
    with pytest.warns(UserWarning, match=f"'{name}' of Sequential takes the place of a layer") as said: train(model, opt)
    assert len(said) == 1

def test_layers_put_into_the_dict_of_modules_are_not_said_where_masks_hold_them():
    model = make()
    masks = choose(model).keep(model)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model._modules['3'] = nn.Sequential(model[3], nn.Dropout(.1))
        model[2]._modules['0'] = copy.deepcopy(model[2][0])
        del model._modules['1']
        train(model, sgd(model))
        assert (model.get_parameter('2.0.weight')[~masks['2.0.weight']] == 0).all()
        Masks.forget(model)
        model._modules['0'] = nn.Linear(6, 12)
        train(model, sgd(model))

def test_a_weight_of_two_masks_is_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
    masks = choose(model).keep(model)
    with pytest.raises(RuntimeError, match='the weight of another layer, which another mask holds'): model[2].weight = model[0].weight
    train(model, sgd(model)); check(model, masks)
    model[2]._parameters['weight'] = model[0].weight
    with pytest.raises(RuntimeError, match='which another mask holds'): train(model, sgd(model))

def test_layers_that_change_places_are_not_said():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    masks = choose(model).keep(model)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model[0], model[2] = model[2], model[0]
    train(model, sgd(model))
    assert all((layer.weight[~masks[name]] == 0).all() for layer, name in ((model[2], '0.weight'), (model[0], '2.weight')))

def test_a_new_part_with_dense_layers_is_said_once():
    model = nn.Sequential(make(), nn.ReLU())
    choose(model).keep(model)
    with pytest.warns(UserWarning, match='the place of 3 layers') as said: model[0] = make(1)
    assert len(said) == 1

def test_a_convolution_fused_with_its_normalisation_is_not_said():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    masks = choose(model).keep(model)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model[0] = nn.utils.fuse_conv_bn_eval(*model)
    assert (model[0].weight[~masks['0.weight']] == 0).all()

def test_what_is_no_optimizer_is_refused():
    model = make()
    before = copy.deepcopy(model.state_dict())
    class Slots:
        __slots__ = ()
        def step(self): pass
    for bad, words in (3, 'a method step, got int'), (O.SGD, 'got the class SGD'), ([], 'got list'), (Slots(), 'after each of its steps'):
        with pytest.raises(TypeError, match=words): choose(model).keep(model, bad)
    assert Masks.of(model) is None and all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))

# --- several processes: each case runs on all of them, on the CPU, and says what it has against itself
spread = {}
def case(f): spread[f.__name__.replace('_', ' ')] = f; return f

def whole(p): return p.full_tensor() if hasattr(p, 'full_tensor') else p
def check_spread(model, masks):
    params = {n: whole(p) for n, p in unwrapped(model).named_parameters()}
    for name, mask in masks.items():
        assert (params[name][~mask] == 0).all() and (params[name][mask] != 0).all(), name
    assert Masks.of(model) == masks

def steps(model, masks, opt, n=3, **kwargs):
    for i in range(n): train(model, opt, 1); check_spread(model, masks)

def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard
    fully_shard(model[2]); fully_shard(model)
    return model

@case
def keep_then_fully_shard(rank, world):
    model = make()
    masks = choose(model).keep(model)
    steps(fully_sharded(model), masks, sgd(model))

@case
def fully_shard_then_keep(rank, world):
    model = fully_sharded(make())
    masks = choose(make()).keep(model)
    opt = O.AdamW(model.parameters(), .01, weight_decay=.1)
    steps(model, masks, opt)
    loss_of(model).backward()
    for name, mask in masks.items(): assert (whole(model.get_parameter(name).grad)[~mask] == 0).all()

@case
def fully_shard_with_momentum_of_the_dense(rank, world):
    model = fully_sharded(make())
    opt = with_past(model)
    masks = choose(make())
    masks.keep(model, opt)
    for name, mask in masks.items(): assert (whole(opt.state[model.get_parameter(name)]['momentum_buffer'])[~mask] == 0).all()
    steps(model, masks, opt)

@case
def fully_shard_same_as_alone(rank, world):
    "Sharded and kept, the same weights come out as on one process."
    alone, model = make(), make()
    for net in alone, model: choose(make()).keep(net)
    fully_sharded(model)
    for net in alone, model:
        net[2][1] = nn.Identity() # batch statistics would be those of a part
        steps(net, choose(make()), sgd(net, momentum=0.))
    for a, b in zip(alone.parameters(), model.parameters()): torch.testing.assert_close(whole(b), a)

@case
def fully_shard_gathered_is_refused(rank, world):
    model = fully_sharded(make())
    model.set_reshard_after_backward(False)
    opt = sgd(model)
    train(model, opt, 1)
    with pytest.raises(ValueError, match=r'call model.reshard\(\)'): choose(make()).keep(model)
    model = make()
    masks = choose(model).keep(model)
    fully_sharded(model).set_reshard_after_backward(False)
    with pytest.raises(RuntimeError, match=r'call model.reshard\(\) before the step'): train(model, sgd(model), 1)
    Masks.forget(model)

@case
def fully_shard_kept_then_left_gathered(rank, world):
    model = fully_sharded(make())
    masks = choose(make()).keep(model)
    model.set_reshard_after_backward(False)
    train(model, sgd(model))
    model.reshard()
    check_spread(model, masks)

def in_parallel(model, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    plan = {'0': ColwiseParallel(output_layouts=Replicate()), '3': RowwiseParallel(input_layouts=Replicate())}
    return parallelize_module(model, init_device_mesh('cpu', (world,)), plan)

@case
def keep_then_tensor_parallel(rank, world):
    model = make()
    masks = choose(model).keep(model)
    steps(in_parallel(model, world), masks, sgd(model, foreach=False))

@case
def tensor_parallel_then_keep(rank, world):
    model = in_parallel(make(), world)
    masks = choose(make()).keep(model)
    steps(model, masks, sgd(model, foreach=False))

@case
def flat_weights_of_fsdp_are_refused(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel
    for original in True, False:
        model = make()
        choose(model).keep(model)
        with pytest.raises(ValueError, match='use fully_shard'):
            FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device('cpu'))
        wrapped = FullyShardedDataParallel(make(), use_orig_params=original, device_id=torch.device('cpu'))
        for call in choose(make()).keep, choose(make()).apply:
            with pytest.raises(ValueError, match='use fully_shard'): call(wrapped)

def data_parallel_of(rank, differ, before, plain=False):
    model = make()
    masks = choose(model, seed=1 + differ*rank)
    if before: masks.keep(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    if not before: masks.keep(model if plain else wrapped)
    return wrapped, masks

@case
def distributed_data_parallel(rank, world):
    for before, plain in (True, False), (False, False), (False, True):
        model, masks = data_parallel_of(rank, False, before, plain)
        steps(model, masks, sgd(model))

@case
def masks_that_differ_by_rank_are_refused(rank, world):
    for before, plain in (True, False), (False, False), (False, True):
        model, masks = data_parallel_of(rank, True, before, plain)
        with pytest.raises(RuntimeError, match=f'hold other masks than rank {rank}'): train(model, sgd(model), 1)

def a_process(rank, world, port, names, queue):
    "Runs cases one after the other; tells what was wrong with each, or ''."
    import os, traceback
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    torch.distributed.init_process_group('gloo')
    for name in names:
        try: spread[name](rank, world); wrong = ''
        except BaseException: wrong = traceback.format_exc()
        queue.put((name, wrong))
        if wrong: break # the others may be waiting for this one
    else: torch.distributed.barrier() # nobody leaves while another still hears from it
    torch.distributed.destroy_process_group()

def free_port():
    import socket
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]

def run_spread(context, world, names):
    "What each case had against itself, on any of the processes."
    found = {}
    queue, port = context.Queue(), free_port()
    started = [context.Process(target=a_process, args=(rank, world, port, names, queue), daemon=True) for rank in range(world)]
    for p in started: p.start()
    try:
        for _ in range(world*len(names)):
            name, wrong = queue.get(timeout=120)
            found[name] = found.get(name, '') + wrong
            if wrong: break
    finally:
        for p in started: p.terminate() if any(found.values()) else p.join(30)
    return found

@pytest.fixture(scope='module')
def two_processes(processes): return run_spread(processes, 2, list(spread))

@pytest.mark.parametrize('name', spread)
def test_on_two_processes(two_processes, name):
    assert two_processes.get(name, 'an earlier case failed') == ''

@pytest.mark.slow
def test_on_four_processes(processes): assert not any(run_spread(processes, 4, list(spread)).values())
