"Learners keep masks under every optimizer and callback of fastai, and runs survive being killed."
import contextlib, copy, os, random, signal, socket, traceback, types, warnings
from dataclasses import replace
from functools import partial

import numpy as np, pytest, torch
from torch import nn

warnings.filterwarnings('ignore', '.*torch.jit.script', FutureWarning)
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import load_learner
from fastai.optimizer import SGD, Adam, Lamb, Larc, OptimWrapper, QHAdam, RMSProp, ranger
from fastai.vision.all import (
    Callback, CategoryBlock, CrossEntropyLossFlat, DataBlock, DataLoader, DataLoaders, ImageBlock, ItemGetter, Learner,
    RandomSplitter, ReduceLROnPlateau, Resize, SaveModelCallback, aug_transforms, resnet18, vision_learner)

from phew_nb.checkpoints import Checkpoint
from phew_nb.data import digits
from phew_nb.masks import Masks
from phew_nb.models import mlp, resnet20
from phew_nb.pruners import prune
from phew_nb.training import KeepMasks, KeepTogether, Recipe, Sparse, data_loaders, history, quiet, sparse_learner

torch.set_num_threads(1)
data = digits().subset(20, seed=0, n_test_per_class=10)

def random_masks(model, density=.3, seed=1):
    gen = torch.Generator().manual_seed(seed)
    weights = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    return Masks({name: torch.rand(p.shape, generator=gen) < density for name, p in weights.items()})

def assert_zero(model, masks):
    for name, mask in masks.items():
        weight = model.get_parameter(name)
        assert (weight[~mask] == 0).all() and weight.isfinite().all() and (weight != 0).any()

class LookAtEveryStep(Callback):
    "The masked weights are zero in every forward pass and after every step."
    order = 90
    def __init__(self, masks): self.masks, self.steps = masks, 0
    def before_batch(self): assert_zero(self.model, self.masks)
    def after_batch(self): assert_zero(self.model, self.masks); self.steps += self.training

fastai_optimizers = {
    'sgd': SGD, 'sgd momentum decay': partial(SGD, mom=.9, wd=.1),
    'sgd coupled': partial(SGD, mom=.9, wd=.1, decouple_wd=False),
    'adam': partial(Adam, wd=.1), 'adam coupled': partial(Adam, wd=.1, decouple_wd=False),
    'rmsprop': partial(RMSProp, mom=.9), 'qhadam': QHAdam, 'larc': Larc, 'lamb': partial(Lamb, wd=.1), 'ranger': ranger,
    'torch adamw': partial(OptimWrapper, opt=torch.optim.AdamW),
    'torch sgd': partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)}

@pytest.mark.parametrize('opt_func', fastai_optimizers.values(), ids=fastai_optimizers.keys())
@pytest.mark.parametrize('dense_first', [False, True])
def test_every_fastai_optimizer(opt_func, dense_first):
    "Also with an optimizer that remembers the dense network."
    model = mlp([64, 16, 10], bn=True, seed=0)
    learn = Learner(data_loaders(data, 50, device='cpu'), model, CrossEntropyLossFlat(), opt_func=opt_func, lr=.01)
    masks = random_masks(model)
    with quiet(learn):
        if dense_first: learn.fit(1)
        learn.add_cb(KeepMasks(masks))
        learn.fit(2, cbs=[look := LookAtEveryStep(masks), GradientClip(.5), GradientAccumulation(100)])
    assert look.steps == 8

@pytest.mark.parametrize('options', [{}, dict(amp='bf16'), dict(amp='fp16'), dict(deterministic=True)], ids=str)
def test_convolutions(options):
    model = resnet20(10, n_in=1, width=.5, seed=0)
    masks = random_masks(model, .1)
    dls = data_loaders(data, 100, device='cpu')
    learn = sparse_learner(dls, model, masks, Recipe(epochs=1), cbs=LookAtEveryStep(masks), **options)
    with quiet(learn): learn.fit_recipe()
    assert learn.look_at_every_step.steps == 2 and not torch.are_deterministic_algorithms_enabled()

def test_a_fastai_learner_of_ones_own_with_one_cycle_and_freezing():
    model = mlp([64, 16, 10], seed=0)
    masks = random_masks(model).apply(model)
    learn = Learner(data_loaders(data, 50, device='cpu'), model, CrossEntropyLossFlat(), cbs=KeepMasks)
    with quiet(learn): learn.fit_one_cycle(1, 1e-2, cbs=LookAtEveryStep(masks))

schedules = dict(one_cycle=lambda learn: learn.fit_one_cycle(3, .05), flat_cos=lambda learn: learn.fit_flat_cos(3, .05),
                 sgdr=lambda learn: learn.fit_sgdr(2, 1, .05), tune=lambda learn: learn.fine_tune(2, .05))

@pytest.mark.parametrize('schedule', schedules.values(), ids=schedules.keys())
def test_schedules_of_fastai_are_followed_over_several_epochs(schedule):
    "Step by step the rates that a plain learner has."
    def rates(make):
        with quiet(learn := make(data_loaders(data, 50, device='cpu'), mlp([64, 8, 10], seed=0))): schedule(learn)
        return learn.recorder.lrs
    assert rates(sparse_learner) == rates(partial(Learner, loss_func=CrossEntropyLossFlat(), opt_func=SGD))

def test_a_rate_that_is_asked_for_takes_the_place_of_the_recipes():
    def log(ask, **how):
        learn = sparse_learner(data_loaders(data, 50, device='cpu'), mlp([64, 8, 10], seed=0), **how)
        with quiet(learn): ask(learn)
        return learn
    for learn in log(lambda learn: learn.fit(4, .02)), log(lambda learn: learn.fit_recipe(4), lr=.02):
        assert np.allclose([row['lr'] for row in learn.recipe_schedule.log], [.02, .02, .002, .0002], rtol=1e-12)
    two = lambda model: [list(model[:2].parameters()), list(model[2:].parameters())] # groups of parameters
    learn = log(lambda learn: learn.fit(4, slice(.001, .02)), splitter=two)
    assert np.allclose([h['lr'] for h in learn.opt.hypers], [1e-5, 2e-4], rtol=1e-12)

class HalfOnce(Callback):
    "Halves the rate after the first epoch."
    def after_epoch(self):
        if self.epoch == 0: self.opt.set_hyper('lr', self.opt.hypers[-1]['lr']/2)

def test_a_rate_that_was_changed_stays_changed():
    learn = sparse_learner(data_loaders(data, 50, device='cpu'), mlp([64, 8, 10], seed=0), cbs=HalfOnce())
    with quiet(learn): learn.fit_recipe(4)
    assert np.allclose([row['lr'] for row in learn.recipe_schedule.log], [.1, .05, .005, .0005], rtol=1e-12)

def test_export_and_load(tmp_path):
    model = mlp([64, 16, 10], seed=0)
    masks = random_masks(model)
    learn = sparse_learner(data_loaders(data, 50, device='cpu'), model, masks)
    with quiet(learn): learn.fit_recipe(2)
    expected = learn.predict(data.test.x[0])
    learn.path = tmp_path
    learn.export('learner.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        shipped = load_learner(tmp_path/'learner.pkl')
    assert Masks.of(shipped.model) == masks
    for image in data.test.x[0], data.test.x[0].numpy(), data.test.x[0, 0]:
        digit, number, probabilities = shipped.predict(image)
        assert (digit, int(number)) == (expected[0], int(expected[1])) and torch.equal(probabilities, expected[2])

# masks made by the learner

def block_loaders(n=24, tfms=aug_transforms(size=32)):
    "Digits in three colours, augmented, by fastai's own `DataBlock`."
    items = [(x.expand(3, -1, -1).permute(1, 2, 0).numpy(), int(y)) for x, y in zip(data.train.x[:n], data.train.label)]
    block = DataBlock((ImageBlock, CategoryBlock), getters=[ItemGetter(0), ItemGetter(1)], item_tfms=Resize(32),
                      splitter=RandomSplitter(.3, seed=0), batch_tfms=tfms)
    return block.dataloaders(items, bs=8, device='cpu', num_workers=0)

def conv_net(n_out):
    torch.manual_seed(0)
    body = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8, n_out))

@pytest.mark.parametrize('method', ['phew', 'erk', 'snip', 'grasp', 'synflow'])
def test_sparse_prunes_as_the_method_does(method):
    dls = block_loaders(tfms=[])
    learn = Learner(dls, conv_net(dls.c), CrossEntropyLossFlat(), cbs=Sparse(method, .3))
    learn.add_cb(look := LookAtEveryStep(learn.sparse.choose()))
    batches = [tuple(t.as_subclass(torch.Tensor) for t in batch) for batch in loaded(dls)]
    more = dict(dl=batches, loss=CrossEntropyLossFlat()) if method in ('snip', 'grasp') else {}
    assert look.masks == prune(conv_net(dls.c), method, .3, (3, 32, 32), **more)
    assert Masks.of(learn.model) is None
    with quiet(learn): learn.fit(2)
    assert look.steps == 4 and learn.sparse.masks == Masks.of(learn.model) == look.masks

def loaded(dls):
    "The batches of the next epoch, which is still the next one afterwards."
    states, order = [torch.get_rng_state(), np.random.get_state(), random.getstate()], dls.train.rng.getstate()
    batches = list(dls.train)
    for put, state in zip((torch.set_rng_state, np.random.set_state, random.setstate), states): put(state)
    dls.train.rng.setstate(order)
    return batches

def test_sparse_moves_no_random_state():
    "The run is that with ready masks, augmentation and order of the data as well."
    weights = []
    for ready in (False, True):
        torch.manual_seed(3); np.random.seed(3); random.seed(3)
        dls = block_loaders()
        model = conv_net(dls.c)
        torch.manual_seed(4)
        own = KeepMasks(prune(model, 'phew', .3, (3, 32, 32))) if ready else Sparse('phew', .3)
        with quiet(learn := Learner(dls, model, CrossEntropyLossFlat(), cbs=own)): learn.fit(2)
        weights.append(model.state_dict())
    for name, t in weights[0].items(): assert torch.equal(t, weights[1][name]), name

def test_sparse_prunes_once_and_travels(tmp_path):
    dls = data_loaders(data, 50, device='cpu')
    learn = Learner(dls, mlp([64, 16, 10], seed=0), CrossEntropyLossFlat(), cbs=Sparse('phew', .3), path=tmp_path)
    with quiet(learn):
        learn.validate()
        masks = Masks.of(learn.model)
        learn.fit(1); learn.fit(1)
    learn.export('learner.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        shipped = load_learner(tmp_path/'learner.pkl')
    assert torch.equal(shipped.predict(data.test.x[0])[2], learn.predict(data.test.x[0])[2])
    assert masks.density == pytest.approx(.3, abs=.05) and Masks.of(shipped.model) == shipped.sparse.masks == masks

def test_sparse_with_a_vision_learner():
    learn = vision_learner(block_loaders(), resnet18, pretrained=False, cbs=Sparse('phew', .05))
    learn.unfreeze()
    with quiet(learn): learn.fit(1)
    assert_zero(learn.model, learn.sparse.masks)
    assert learn.sparse.masks.density == pytest.approx(.05, abs=1e-3)

def test_same_data_whatever_was_looked_at():
    make = lambda: sparse_learner(data_loaders(data, 50, seed=4, device='cpu'), mlp([64, 8, 10], seed=0))
    learners = [make(), make()]
    learners[1].dls.one_batch(); learners[1].validate(); learners[1].dls.show_batch(show=False)
    for learn in learners:
        with quiet(learn): learn.fit_recipe(2)
    for a, b in zip(*(learn.model.parameters() for learn in learners)): assert torch.equal(a, b)

def test_not_finite_says_where():
    dls = data_loaders(data, 50, device='cpu')
    learn = sparse_learner(dls, mlp([64, 8, 10], seed=0), recipe=Recipe(epochs=2, lr=1e30))
    with quiet(learn), pytest.raises(FloatingPointError, match='at epoch 0, batch [12]'): learn.fit_recipe()

# two processes

def train_one_of_two(rank, path, port, agree):
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_PORT=port, MASTER_ADDR='127.0.0.1')
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    import fastai.distributed # adds `distrib_ctx` # noqa: F401
    learn = distributed_learner(seed=1 if agree else rank)
    try:
        with quiet(learn), learn.distrib_ctx(sync_bn=False, cpu=True):
            learn.fit_recipe(checkpoint=path/'run.pt')
            prediction = learn.get_preds()[0]
        result = dict(weights=learn.model.state_dict(), loss=list(history(learn).valid_loss), prediction=prediction)
    except RuntimeError: result = traceback.format_exc()
    torch.save(result, path/f'{rank}.pt')

def distributed_learner(seed=1):
    model, dls = mlp([64, 16, 10], seed=0), data_loaders(data, 40, seed=3, device='cpu')
    return sparse_learner(dls, model, random_masks(model, seed=seed), Recipe(epochs=3, lr=.05))

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def run_two(context, path, agree=True):
    port = free_port()
    both = [context.Process(target=train_one_of_two, args=(rank, path, port, agree)) for rank in (0, 1)]
    for p in both: p.start()
    for p in both: p.join()
    return [torch.load(path/f'{rank}.pt', weights_only=False) for rank in (0, 1)]

def test_two_processes_equal_one(processes, tmp_path):
    pytest.importorskip('accelerate')
    ours, theirs = run_two(processes, tmp_path)
    assert isinstance(ours, dict), ours
    with quiet(one := distributed_learner()):
        one.fit_recipe()
        prediction = one.get_preds()[0]
    assert_zero(one.model, Masks.of(one.model))
    for name, t in one.model.state_dict().items():
        assert torch.equal(ours['weights'][name], theirs['weights'][name])
        torch.testing.assert_close(t, ours['weights'][name])
    torch.testing.assert_close(list(history(one).valid_loss), ours['loss'])
    torch.testing.assert_close(prediction, ours['prediction'])

def test_two_processes_must_agree_on_the_masks(processes, tmp_path):
    pytest.importorskip('accelerate')
    for said in run_two(processes, tmp_path, agree=False): assert 'ranks [1] have other masks than rank 0' in said

# killed by SIGKILL, three times

def make_learner():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(.2), *mlp([64, 16, 10], bn=True, seed=0))
    dls = data_loaders(replace(data, augments={'code': (1, True)}), 20, 'code', seed=3, device='cpu')
    return sparse_learner(dls, model, random_masks(model), Recipe(epochs=6, lr=.05))

class Report(Callback):
    "Says where the run is, and waits for leave to go on."
    order = 99
    def __init__(self, say): self.say = say
    def before_batch(self):
        if self.training: self.say((self.epoch, self.iter))

def train_in_a_process(path, pipe):
    torch.set_num_threads(1)
    def say(where):
        pipe.send(where)
        pipe.recv()
    learn = make_learner()
    move = os.replace
    os.replace = lambda *args: (say('a checkpoint is written but not in place'), move(*args))
    with quiet(learn): learn.fit_recipe(checkpoint=path, cbs=Report(say))
    pipe.send({name: t.numpy() for name, t in learn.model.state_dict().items()})

def run_until(context, path, stop):
    "A process that trains; killed at a place, or with the weights it ends with."
    here, there = context.Pipe()
    process = context.Process(target=train_in_a_process, args=(str(path), there))
    process.start()
    while not isinstance(where := here.recv(), dict) and where != stop: here.send('go on')
    if not isinstance(where, dict): os.kill(process.pid, signal.SIGKILL)
    process.join()
    return where, process.exitcode

@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='no SIGKILL on this system')
def test_killed_three_times(processes, tmp_path):
    "The run ends with the undisturbed run's weights, to the last bit."
    for stop in (1, 7), 'a checkpoint is written but not in place', (4, 3):
        assert run_until(processes, tmp_path/'run.pt', stop) == (stop, -signal.SIGKILL)
    weights, code = run_until(processes, tmp_path/'run.pt', 'never')
    undisturbed = make_learner()
    with quiet(undisturbed): undisturbed.fit_recipe()
    assert code == 0
    for name, t in undisturbed.model.state_dict().items(): assert (t.numpy() == weights[name]).all(), name

def test_resume_restores_the_record(tmp_path):
    with quiet(whole := make_learner()): whole.fit_recipe()
    with quiet(part := make_learner()), pytest.raises(RuntimeError):
        part.fit_recipe(checkpoint=tmp_path/'run.pt', every=2, cbs=StopAt(5))
    with quiet(rest := make_learner()): rest.fit_recipe(checkpoint=tmp_path/'run.pt', every=2)
    assert rest.first_epoch == 4
    assert history(rest).equals(history(whole))
    assert [float(v) for v in rest.recorder.losses] == [float(v) for v in whole.recorder.losses]
    with quiet(rest): rest.fit_recipe(checkpoint=tmp_path/'run.pt')
    assert rest.first_epoch == 6 and history(rest).equals(history(whole))

class StopAt(Callback):
    def __init__(self, at): self.at = at
    def before_train(self):
        if self.epoch == self.at: raise RuntimeError('stopped')

class Still(ReduceLROnPlateau):
    "Finds nothing better, ever: with a patience of two the rate is reduced after every second epoch."
    def __init__(self): super().__init__(patience=2, min_delta=100., factor=2.)

def test_trackers_go_on(tmp_path):
    "A reduced rate and a patience half used up are those of the undisturbed run, and so are the weights."
    def train(name, *cbs):
        learn = make_learner()
        learn.path = tmp_path/name
        with quiet(learn), contextlib.redirect_stdout(None):
            learn.fit_recipe(cbs=[Still(), SaveModelCallback(), *cbs])
        return learn
    whole, file = train('whole'), Checkpoint(tmp_path/'run.pt')
    with pytest.raises(RuntimeError): train('part', file, StopAt(2))
    rest = train('part', Checkpoint(tmp_path/'run.pt'))
    rates = [row['lr'] for row in whole.recipe_schedule.log]
    assert rest.first_epoch == 2 and rates[:4] == [.05, .05, .05, .005/2]
    assert [row['lr'] for row in rest.recipe_schedule.log] == rates
    for name, t in whole.model.state_dict().items(): assert torch.equal(t, rest.model.state_dict()[name]), name

@pytest.mark.parametrize('schedule', [lambda learn, cbs: learn.fit_one_cycle(3, .05, cbs=cbs),
    lambda learn, cbs: learn.fit_flat_cos(3, .05, cbs=cbs)])
def test_a_run_by_a_schedule_of_fastai_goes_on_where_it_was_broken_off(schedule, tmp_path):
    def run(*cbs):
        dls = data_loaders(data, 50, device='cpu', seed=0)
        with quiet(learn := sparse_learner(dls, mlp([64, 8, 10], seed=0))): schedule(learn, cbs)
        return learn
    whole = run()
    with pytest.raises(RuntimeError): run(Checkpoint(tmp_path/'run.pt'), StopAt(2))
    rest = run(Checkpoint(tmp_path/'run.pt'))
    assert rest.recorder.lrs == whole.recorder.lrs
    for a, b in zip(whole.model.parameters(), rest.model.parameters()): assert torch.equal(a, b)

def test_a_search_for_a_rate_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    searched, plain = make_learner(), make_learner()
    with quiet(searched): searched.lr_find(show_plot=False, num_it=30)
    torch.manual_seed(7)
    for learn in searched, plain:
        torch.manual_seed(7)
        with quiet(learn): learn.fit_recipe(2)
    for name, t in plain.model.state_dict().items(): assert torch.equal(t, searched.model.state_dict()[name]), name
    assert not list(tmp_path.iterdir())

def test_a_search_that_diverges_ends(tmp_path):
    learn = make_learner()
    with quiet(learn): learn.lr_find(show_plot=False, start_lr=1e-3, end_lr=1e30, num_it=60, stop_div=False)
    assert_zero(learn.model, Masks.of(learn.model))

@pytest.mark.parametrize('compile', [False, True])
def test_dense_weights_that_are_loaded_before_training_are_masked(tmp_path, compile, monkeypatch):
    monkeypatch.setattr('phew_nb.training._can_compile', lambda device: True)
    dls, dense, model = make_learner().dls, mlp([64, 16, 10], seed=3), mlp([64, 16, 10], seed=0)
    masks = random_masks(model)
    learn = sparse_learner(dls, model, masks, compile=compile)
    torch.save(dense.state_dict(), tmp_path/'dense.pth')
    learn.load(tmp_path/'dense', with_opt=False)
    assert_zero(model, masks)
    assert torch.equal(model.get_parameter(name := next(iter(masks)))[masks[name]], dense.get_parameter(name)[masks[name]])
    model.load_state_dict(dense.state_dict())
    assert_zero(model, masks)

def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    learn = make_learner()
    with quiet(learn): learn.fit_recipe(1, checkpoint=tmp_path/'run.pt')
    before = (tmp_path/'run.pt').read_bytes()
    def refused(learn, word, epochs=1):
        with quiet(learn), pytest.raises(ValueError, match=f'of another run: its {word} was'):
            learn.fit_recipe(epochs, checkpoint=tmp_path/'run.pt')
    changed = [make_learner() for _ in range(2)]
    changed[0].recipe = Recipe(epochs=6, lr=.1)
    changed[1].keep_masks.masks = random_masks(learn.model, .1)
    refused(changed[0], 'recipe'); refused(changed[1], 'masks'); refused(learn, 'epochs', 2)
    assert (tmp_path/'run.pt').read_bytes() == before
    torch.save({'model': 1}, tmp_path/'other.pt')
    with quiet(learn), pytest.raises(ValueError, match='is not a checkpoint'):
        learn.fit_recipe(1, checkpoint=tmp_path/'other.pt')

# compiled

def test_compiled_equals_eager(compiler):
    "The same weights, up to rounding; masked ones zero after every step; the masks are guarded afterwards."
    nets = []
    for options in dict(), dict(compile=True):
        model = mlp([64, 16, 10], seed=0)
        masks = random_masks(model)
        learn = sparse_learner(data_loaders(data, 50, device='cpu'), model, masks, Recipe(epochs=2, lr=.05),
                               cbs=LookAtEveryStep(masks), **options)
        with quiet(learn): learn.fit_recipe()
        assert learn.look_at_every_step.steps == 8
        nets.append(model)
    assert nets[1]._compiled_call_impl is not None
    for a, b in zip(*(net.parameters() for net in nets)): torch.testing.assert_close(a, b)
    nets[1](data.train.x[:5].flatten(1).float()).sum().backward()
    for name, mask in masks.items(): assert (nets[1].get_parameter(name).grad[~mask] == 0).all()

def test_masks_kept_together_are_those_kept_one_by_one():
    nets = []
    for keep in KeepMasks, KeepTogether:
        model = mlp([64, 16, 10], bn=True, seed=0)
        masks = random_masks(model)
        learn = Learner(data_loaders(data, 50, device='cpu'), model, CrossEntropyLossFlat(), cbs=keep(masks), lr=.01)
        with quiet(learn): learn.fit(2, cbs=[LookAtEveryStep(masks), GradientClip(.5)])
        nets.append(model.state_dict())
    for name, t in nets[0].items(): assert torch.equal(t, nets[1][name]), name

def test_an_infinite_gradient_of_a_masked_weight_stays_away():
    "Two inputs of 1e30, one behind a mask, whose gradient overflows; the other's weight is trained."
    for keep in KeepMasks, KeepTogether:
        model = nn.Linear(2, 1, bias=False)
        model.weight.data.fill_(1.)
        loader = lambda: DataLoader([(torch.tensor([1e30, 1e-30]), torch.zeros(1))]*3)
        masks = Masks({'weight': torch.tensor([[False, True]])})
        learn = Learner(DataLoaders(loader(), loader()), model, lambda out, y: 1e30*out.sum(), lr=.25,
                        cbs=[keep(masks), LookAtEveryStep(masks)],
                        opt_func=partial(OptimWrapper, opt=torch.optim.SGD, momentum=.5))
        with quiet(learn): learn.fit(1)
        torch.testing.assert_close(model.weight.data, torch.tensor([[0., 1 - .25*(1 + 1.5 + 1.75)]])) # by hand

def test_without_a_compiler_a_warning_says_so(monkeypatch):
    def broken(*args, **kwargs): raise RuntimeError('no C++ compiler')
    monkeypatch.setattr(torch, 'compile', broken)
    with pytest.warns(UserWarning, match='does not work here: no C..'):
        learn = sparse_learner(data_loaders(data, 50, device='cpu'), mlp([64, 8, 10], seed=0), compile=True)
    with quiet(learn): learn.fit_recipe(1)

# frozen

@pytest.mark.parametrize('first', ['frozen', 'free'])
def test_fine_tune_freezes_and_unfreezes(first):
    learn = vision_learner(block_loaders(16), resnet18, pretrained=False, cbs=Sparse('phew', .01))
    if first == 'free': learn.unfreeze()
    with quiet(learn): learn.fit(1)
    masks = learn.sparse.masks
    with quiet(learn): learn.fine_tune(1, cbs=LookAtEveryStep(masks))
    assert_zero(learn.model, masks)
    assert all(p.requires_grad for p in learn.model.parameters()) and Masks.of(learn.model) == masks

# loaders that know less than those of fastai's own datasets

torch.manual_seed(5)
some_x, some_y = torch.randn(64, 12), torch.randint(4, (64,))
class Knows(list): n_inp = 1 # a dataset that says how many inputs its items have

def small_net(): return mlp([12, 20, 20, 4], seed=0)
def torch_loaders(*parts, shuffle=False):
    return DataLoaders(*(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*parts), 16, shuffle) for _ in range(2)))
def item_loaders(items): return DataLoaders(*(DataLoader(items, bs=16, num_workers=0) for _ in range(2)))

batches_of_16 = list(zip(some_x.split(16), some_y.split(16)))
plain_loaders = {
    'torch': lambda: torch_loaders(some_x, some_y), 'torch, shuffled': lambda: torch_loaders(some_x, some_y, shuffle=True),
    'a list of items': lambda: item_loaders(list(zip(some_x, some_y))),
    'items that say n_inp': lambda: item_loaders(Knows(zip(some_x, some_y))),
    'a tensor dataset': lambda: item_loaders(torch.utils.data.TensorDataset(some_x, some_y)),
    'lists of batches': lambda: DataLoaders(batches_of_16, batches_of_16)}

def is_shuffled(dl): return isinstance(getattr(dl, 'sampler', None), torch.utils.data.RandomSampler)
class SeedBeforeMasks(Callback):
    "The order of the batches that masks are chosen by is known."
    order = KeepMasks.order - 1
    def before_fit(self): torch.manual_seed(5)

@pytest.mark.parametrize('make', plain_loaders.values(), ids=plain_loaders.keys())
@pytest.mark.parametrize('method', ['phew', 'snip', 'iter_snip', 'grasp', 'wanda', 'px', 'ntk_sap', 'phew_act'])
def test_sparse_on_plain_loaders(make, method):
    learn = Learner(make(), small_net(), nn.functional.cross_entropy, cbs=[SeedBeforeMasks(), Sparse(method, .2)])
    with quiet(learn): learn.fit(1, 1e-2)
    torch.manual_seed(5)
    batches = list(torch_loaders(some_x, some_y, shuffle=True).train) if is_shuffled(learn.dls.train) else batches_of_16
    assert is_shuffled(learn.dls.train) != torch.equal(batches[0][0], some_x[:16])
    more = dict(dl=batches) if method not in ('phew', 'ntk_sap') else {}
    assert_zero(learn.model, learn.sparse.masks)
    assert learn.sparse.masks == prune(small_net(), method, .2, (12,), **more)

@pytest.mark.parametrize('make', plain_loaders.values(), ids=plain_loaders.keys())
@pytest.mark.parametrize('amp', [None, 'bf16', 'fp16'])
def test_a_recipe_on_plain_loaders(make, amp, tmp_path):
    model = small_net()
    masks = prune(model, 'phew', .2, (12,))
    learn = sparse_learner(make(), model, masks, Recipe(epochs=2, lr=.01), amp=amp, cbs=LookAtEveryStep(masks))
    with quiet(learn):
        learn.fit_recipe(checkpoint=tmp_path/'run.pt')
        learn.lr_find(show_plot=False, num_it=6)
    assert learn.look_at_every_step.steps >= 8 and len(history(learn)) == 2

def test_a_plain_run_goes_on_where_it_was_broken_off(tmp_path):
    make = lambda: sparse_learner(torch_loaders(some_x, some_y, shuffle=True), small_net(), recipe=Recipe(epochs=3))
    torch.manual_seed(1)
    with quiet(whole := make()): whole.fit_recipe()
    torch.manual_seed(1)
    with quiet(broken := make()), pytest.raises(RuntimeError, match='stopped'):
        broken.fit_recipe(checkpoint=tmp_path/'run.pt', cbs=StopAt(1))
    with quiet(again := make()): again.fit_recipe(checkpoint=tmp_path/'run.pt')
    for a, b in zip(whole.model.parameters(), again.model.parameters()): assert torch.equal(a, b)

@pytest.mark.parametrize('device', ['cpu', torch.device('cpu')], ids=repr)
def test_amp_where_the_loaders_name_a_device(device):
    dls = DataLoaders(*(DataLoader(Knows(zip(some_x, some_y)), bs=16, num_workers=0) for _ in range(2)), device=device)
    learn, seen = sparse_learner(dls, model := small_net(), amp='bf16'), set()
    before, layer = copy.deepcopy(model.state_dict()), [m for m in model.modules() if isinstance(m, nn.Linear)][0]
    layer.register_forward_hook(lambda m, x, out: seen.add(out.dtype))
    with quiet(learn): learn.fit_recipe(1)
    assert seen == {torch.bfloat16} and all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    assert all((p != before[name]).any() for name, p in model.named_parameters())

def test_a_loader_moved_to_another_card_serves_there(monkeypatch):
    "(The batches are stand-ins: no card is needed.)"
    made = lambda *args: types.SimpleNamespace(x=types.SimpleNamespace(device=args[6]))
    monkeypatch.setattr('phew_nb.training.Batches', made)
    dl = data_loaders(data, 20, device='cpu').train
    for name in 'cuda:0', 'cuda:1', 'cpu', 'cuda:1':
        dl.device = torch.device(name)
        first = dl.batches
        assert first.x.device == torch.device(name) and dl.batches is first

class Heads(nn.Module):
    "Two outputs for one input, or for two, or for one in a dict."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = nn.Sequential(nn.Linear(12, 20), nn.ReLU()), nn.Linear(20, 4), nn.Linear(20, 4)
    def forward(self, x, more=0.):
        x = self.body(x['x'] if isinstance(x, dict) else x) + more
        return self.a(x), self.b(x)

def both(out, a, b=None): return nn.functional.cross_entropy(out[0], a) + nn.functional.cross_entropy(out[1], a if b is None else b)
with_data = ['snip', 'grasp', 'wanda', 'px', 'phew_snip']

@pytest.mark.parametrize('method', ['phew', 'synflow', *with_data])
def test_sparse_with_several_targets(method):
    learn = Learner(item_loaders(Knows(zip(some_x, some_y, some_y.flip(0)))), Heads(), both, cbs=Sparse(method, .2))
    with quiet(learn): learn.fit(1, 1e-2)
    batches = list(zip(some_x.split(16), zip(some_y.split(16), some_y.flip(0).split(16))))
    more = dict(dl=batches, loss=lambda out, y: both(out, *y)) if method in with_data else {}
    assert learn.sparse.masks == prune(Heads(), method, .2, (12,), **more)

@pytest.mark.parametrize('method', ['phew', *with_data])
def test_sparse_with_several_inputs(method):
    more = torch.randn(64, 20)
    learn = Learner(item_loaders(list(zip(some_x, more, some_y))), Heads(), both, cbs=Sparse(method, .2))
    with quiet(learn): learn.fit(1, 1e-2)
    assert_zero(learn.model, learn.sparse.masks)

@pytest.mark.parametrize('method', ['phew', *with_data])
def test_sparse_with_inputs_in_a_dict(method):
    dls = [item_loaders(items) for items in ([({'x': x}, y) for x, y in zip(some_x, some_y)], list(zip(some_x, some_y)))]
    learners = [Learner(d, Heads(), both, cbs=Sparse(method, .2)) for d in dls]
    for learn in learners:
        with quiet(learn): learn.fit(1, 1e-2)
    assert learners[0].sparse.masks == learners[1].sparse.masks

def test_sparse_refuses_batches_that_are_no_pairs():
    learn = Learner(item_loaders([{'x': x, 'y': y} for x, y in zip(some_x, some_y)]), Heads(), both, cbs=Sparse('phew', .2))
    with quiet(learn), pytest.raises(TypeError, match='is a dict, and a learner needs inputs and targets'): learn.fit(1)

@pytest.mark.parametrize('names, word', [
    (dict(foo=1), "'phew' has no argument 'foo'"), (dict(sparsity=.8), '1 - sparsity'),
    (dict(input_size=(12,)), "'input_size' from the learner"), (dict(model=None), "'model' from the learner")], ids=str)
def test_sparse_checks_names_when_it_is_made(names, word):
    with pytest.raises(TypeError, match=word): Sparse('phew', .2, **names)
    Sparse('snip', .2, signed=True, dl=[], loss=None, seed=3)

# runs that cannot go well

@pytest.mark.parametrize('size, where', [(199, 'the last batch of epoch 0 .batch 1, counted'), (1, 'a batch of epoch 0 .batch 0, counted')])
def test_batch_normalisation_of_one_example_says_what_to_do(size, where):
    dls = data_loaders(replace(data, train=data.train[:200]), size, device='cpu')
    learn = sparse_learner(dls, mlp([64, 8, 10], bn=True, seed=0))
    with quiet(learn), pytest.raises(ValueError, match=where + f'.*take another batch size than {size}'): learn.fit_recipe(1)

class Spoil(Callback):
    "Makes a weight infinite at the end of the training of an epoch."
    order = -1
    def after_train(self):
        if self.epoch == 1: self.model.get_parameter('hidden1.linear.weight').data[0, 0] = torch.inf

def test_an_epoch_that_ends_with_what_is_not_finite_says_so(tmp_path):
    dls = data_loaders(data, 500, device='cpu') # a single batch: its loss is finite, and what its step makes is not
    learn = sparse_learner(dls, mlp([64, 8, 10], seed=0), recipe=Recipe(epochs=1, lr=1e30))
    with quiet(learn), pytest.raises(FloatingPointError, match='validation loss is nan after epoch 0 .*lower learning rate'):
        learn.fit_recipe(checkpoint=tmp_path/'run.pt')
    assert not (tmp_path/'run.pt').exists()
    with quiet(learn): learn.validate() # (no run)
    learn = sparse_learner(dls, mlp([64, 8, 10], seed=0), recipe=Recipe(epochs=3, lr=.01), cbs=Spoil)
    with quiet(learn), pytest.raises(FloatingPointError, match="'hidden1.linear.weight' is not finite after epoch 1"): learn.fit_recipe()
    assert len(history(learn)) == 1

@pytest.mark.parametrize('wrong, word', [
    (lambda dls, net: (net, dls), 'here they are swapped'), (lambda dls, net: (data, net), 'data_loaders.data. makes them'),
    (lambda dls, net: (dls.train, net), 'DataLoaders.train, valid.'), (lambda dls, net: (dls, dls), 'the second is a DataLoaders')])
def test_arguments_of_the_learner_in_wrong_places(wrong, word):
    with pytest.raises(TypeError, match=word): sparse_learner(*wrong(data_loaders(data, 50, device='cpu'), small_net()))

def test_sparse_gradients_where_all_weights_are_kept_at_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(16, 2))
    x, y = torch.randint(20, (64, 2)), torch.randint(2, (64,))
    masks = Masks({'0.weight': torch.rand(20, 8) < .5, '2.weight': torch.rand(2, 16) < .5})
    masks.keep(model)
    dls = DataLoaders(*[DataLoader([*zip(x, y)], batch_size=16)]*2)
    learn = Learner(dls, model, nn.CrossEntropyLoss(), opt_func=partial(OptimWrapper, opt=torch.optim.SGD), lr=.1, cbs=KeepTogether())
    with quiet(learn): learn.fit(1)
    assert (model[0].weight[~masks['0.weight']] == 0).all() and (model[0].weight != 0).any()
