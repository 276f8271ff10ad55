"What is refused, one row each: the exception, its words, and that models and random states are bit for bit as before."
import random

import numpy as np, pytest, torch
from torch import nn

from phew_nb.all import *
from phew_nb.files import check_file, check_files, check_folder
from phew_nb.keeping import is_kept
from phew_nb.models import mlp
from phew_nb.pruners import prune, pruners

def random_masks(model, density=.4, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return Masks({n: torch.rand(p.shape, generator=gen) < density for n, p in model.named_parameters() if p.ndim > 1})

class Uneven(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(4, 2)
    def forward(self, x): torch.rand(3), np.random.rand(), random.random(); raise KeyError()

class Data: # made once: nothing may change it
    def __init__(self):
        self.uneven = Uneven()
        self.plain, self.held, self.conv = mlp([4, 6, 3], seed=0), mlp([4, 6, 3], seed=1), resnet20(3, width=.25, seed=0).train()
        self.masks, self.others = random_masks(self.plain), random_masks(mlp([4, 7, 3], seed=0))
        random_masks(self.held).keep(self.held)
        self.nan, self.frozen = mlp([4, 6, 3], seed=0), mlp([4, 6, 3], seed=0).requires_grad_(False)
        with torch.no_grad(): self.nan[1][0].weight[0, 0] = float('nan')
        for model in self.plain, self.held: model(torch.ones(2, 4)).sum().backward()
        gen = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(8, 4, generator=gen), torch.randint(3, (8,), generator=gen)
        self.dl, self.graph = [(self.x, self.y)], trace(self.plain, (4,))
        self.floats = {n: m.float() for n, m in self.masks.items()}
        self.digits = digits().subset(5, seed=0, n_test_per_class=5)
        self.dls = data_loaders(self.digits, 8, device='cpu')

def seen(model):
    "Everything about a model that a call could change."
    tensors = [t for p in (*model.parameters(), *model.buffers()) for t in (p, p.grad) if t is not None]
    modules = [(m.training, sorted(vars(m)), sorted(m._parameters), sorted(m._modules), len(m._forward_hooks), len(m._forward_pre_hooks),
                len(m._load_state_dict_post_hooks)) for m in model.modules()]
    masks = Masks.of(model)
    flags = [(p.requires_grad, p.grad is None) for p in model.parameters()]
    return [t.detach().clone().view(-1).view(torch.uint8) for t in tensors], (modules, flags, masks and masks.hash(), is_kept(model))

def states(): return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), torch.is_grad_enabled(), torch.get_default_dtype()

@pytest.fixture(scope='module')
def given(): return Data()

rows = {}
def add(name, call, error, words):
    assert name not in rows, name
    rows[name] = (call, error, words)

# --- masks
add('masks: a list', lambda d: Masks([d.masks]), TypeError, 'must be a dict of parameter name -> boolean tensor, got list')
add('masks: none', lambda d: Masks({}), ValueError, 'there is nothing to prune')
add('masks: a number as name', lambda d: Masks({0: torch.ones(2) > 0}), TypeError, 'by parameter name, got 0')
for kind, bad in dict(float=torch.ones(2), int=torch.ones(2).int(), numpy=np.ones(2, bool), list=[True]).items():
    add(f'masks: {kind}', lambda d, bad=bad: Masks({'a': bad}), TypeError, "mask 'a' must be a boolean tensor")
add('masks: another model, check', lambda d: d.others.check(d.plain), ValueError, 'these masks are of another model')
add('masks: another model, apply', lambda d: d.others.apply(d.plain), ValueError, 'these masks are of another model')
add('masks: another model, keep', lambda d: d.others.keep(d.held), ValueError, 'these masks are of another model')
add('masks: another model, bake', lambda d: d.others.bake(d.plain), ValueError, 'these masks are of another model')
add('masks: another model, to torch', lambda d: d.others.to_torch_prune(d.plain), ValueError, 'these masks are of another model')
add('masks: not pruned by torch', lambda d: Masks.from_torch_prune(d.plain), ValueError, 'not pruned by torch.nn.utils.prune')
add('masks: a class as model', lambda d: d.masks.keep(nn.Linear), TypeError, 'against a model, got type')
add('masks: no such name', lambda d: Masks({'head.weights': torch.ones(3, 6) > 0}).keep(d.plain), ValueError, "no parameter 'head.weights'; its nearest is 'head.weight'")
add('masks: no optimizer', lambda d: d.masks.keep(d.plain, 3), TypeError, 'an optimizer with a method step, got int')
add('masks: a scheduler', lambda d: d.masks.keep(d.plain, torch.optim.lr_scheduler.StepLR(torch.optim.SGD(d.plain.parameters(), .1), 3)),
    TypeError, 'keep takes an optimizer, not the StepLR')
add('masks: an optimizer class', lambda d: d.masks.keep(d.plain, torch.optim.SGD), TypeError, 'got the class SGD')
add('masks: of different tensors', lambda d: d.masks & Masks({'a': torch.ones(2) > 0}), ValueError, "'a' is in one of them only")
add('masks: floats combined', lambda d: d.masks | d.floats, TypeError, 'must be a boolean tensor, got torch.float32; `mask != 0` makes one')
add('masks: no file', lambda d: Masks.load(d.folder/'no'), FileNotFoundError, 'there is no file of masks')
def damaged(d, data): (d.folder/'m').write_bytes(data); return Masks.load(d.folder/'m')
add('masks: an empty file', lambda d: damaged(d, b''), ValueError, 'is not a safetensors file, or is cut off')
add('masks: a file of something else', lambda d: damaged(d, b'{"a": 1}'*9), ValueError, 'is not a safetensors file, or is cut off')
add('masks: no folder to save in', lambda d: d.masks.save(d.folder/'no'/'m'), FileNotFoundError, 'cannot be written (No such file or directory)')
add('masks: a folder as file', lambda d: d.masks.save(d.folder), IsADirectoryError, 'is a folder; name a file')
add('masks: a weight of another shape assigned', lambda d: setattr(d.held.head, 'weight', nn.Parameter(torch.ones(2, 2))), RuntimeError, "'weight' of Linear is held by a mask, but it has now the shape (2, 2)")
# --- files
add('files: a folder', lambda d: check_file(d.folder), IsADirectoryError, 'is a folder; name a file')
add('files: empty name', lambda d: check_file(''), IsADirectoryError, 'is a folder; name a file')
add('files: a long name', lambda d: check_file(d.folder/('n'*300)), OSError, '300 bytes, where 255 are allowed')
add('files: twice', lambda d: check_files([d.folder/'a', d.folder/'a']), FileExistsError, 'one of two files would be lost; name another')
add('files: over what is read', lambda d: check_files([d.folder/'a'], [d.folder/'a']), FileExistsError, 'is read, and would be written over')
add('files: a device as folder', lambda d: check_folder('/dev/null'), NotADirectoryError, "'/dev/null' is not a folder")
# --- how many weights, of every method
how = {'density 95': (dict(density=95), ValueError, 'sparsity of 95%'), 'density 0': (dict(density=0), ValueError, 'must be in (0, 1]'),
       'density nan': (dict(density=float('nan')), ValueError, 'must be in (0, 1]'), 'density text': (dict(density='.5'), TypeError, 'must be a number'),
       'kept 0': (dict(kept=0), ValueError, 'between 1 and'), 'kept 1.5': (dict(kept=1.5), TypeError, 'whole number'),
       'too many kept': (dict(kept=10**6), ValueError, 'between 1 and'), 'both': (dict(density=.5, kept=3), ValueError, 'exactly one'),
       'neither': ({}, ValueError, 'exactly one'), }
for method in pruners:
    if about(method)['trains']: continue
    data = dict(dl=1) if about(method)['data'] else {}
    for name, (kwargs, error, words) in how.items():
        add(f'{method}: {name}', lambda d, m=method, kw=kwargs, data=data: prune(d.plain, m, input_size=(4,), **kw, **{k: d.dl for k in data}), error, words)
# --- prune
add('prune: unknown method', lambda d: prune(d.plain, 'fhew', .5, (4,)), ValueError, "unknown method 'fhew'; did you mean 'phew'?")
add('prune: no data', lambda d: prune(d.plain, 'snip', .5, (4,)), (TypeError, ValueError), 'this method looks at data: give batches')
add('prune: empty data', lambda d: prune(d.plain, 'snip', .5, (4,), dl=[]), ValueError, 'there are no batches in dl')
add('prune: a batch without labels', lambda d: prune(d.plain, 'grasp', .5, (4,), dl=[(d.x,)]), ValueError, 'batch 0 is no pair (x, y)')
add('prune: labels out of range', lambda d: prune(d.plain, 'snip', .5, (4,), dl=[(d.x, d.y + 5)]), ValueError, 'the loss of batch 0: class 7 among the targets of a network with 3 classes')
add('prune: a constant loss', lambda d: prune(d.plain, 'snip', .5, (4,), dl=d.dl, loss=lambda out, y: 3.), TypeError, 'the loss of batch 0 is a float, not a tensor')
add('prune: a loss of NaN', lambda d: prune(d.plain, 'snip', .5, (4,), dl=d.dl, loss=lambda out, y: out.sum()*float('nan')), ValueError, 'the loss of batch 0 is nan')
add('prune: NaN weights, phew', lambda d: prune(d.nan, 'phew', .5, (4,)), ValueError, "'hidden1.linear.weight' hold 1 values that are NaN or infinite")
add('prune: NaN weights, magnitude', lambda d: prune(d.nan, 'magnitude', .5, (4,)), ValueError, "of layer 'hidden1.linear.weight' are not finite")
add('prune: NaN weights, synflow', lambda d: prune(d.nan, 'synflow', .5, (4,)), ValueError, "of layer 'hidden1.linear.weight' are not finite")
add('prune: more than the masks leave', lambda d: prune(d.held, 'magnitude', .9, (4,)), ValueError, 'only 14 weights may be kept, by the masks that the model has')
add('prune: more than the masks leave, phew', lambda d: prune(d.held, 'phew', .9, (4,)), ValueError, 'of 42 weights at most')
add('prune: no input size', lambda d: prune(d.plain, 'phew', .5), TraceError, 'input_size must be a tuple of positive integers without the batch')
add('prune: wrong input size', lambda d: prune(d.plain, 'phew', .5, (5,)), TraceError, 'the model does not run on an example of size (1, 5)')
add('prune: a batch in the input size', lambda d: prune(d.conv, 'phew', .5, (1, 3, 32, 32)), TraceError, 'does not run on an example of size (1, 1, 3, 32, 32)')
add('prune: a class', lambda d: prune(nn.Linear, 'phew', .5, (4,)), TraceError, 'a model must be a torch.nn.Module')
for method in pruners: # (those that look at data refuse the model first)
    data = dict(dl=1) if about(method)['data'] else {}
    add(f'prune: none, {method}', lambda d, m=method, data=data: prune(None, m, .5, (4,), **{k: d.dl for k in data}), TraceError,
        'a model must be a torch.nn.Module, not None')
# --- trace
add('trace: a function', lambda d: trace(lambda x: x, (4,)), TraceError, 'a model must be a torch.nn.Module, not function')
add('trace: none', lambda d: trace(None, (4,)), TraceError, 'torch.nn.Module')
for name, as_given in dict(one=lambda x: x, some=lambda x: (x, x), named=lambda x: dict(x=x)).items():
    add(f'trace: tensors as size, {name}', lambda d, f=as_given: trace(d.plain, f(d.x)), TraceError, 'they go as example=... of phew, prune or trace')
add('trace: text as size', lambda d: trace(d.plain, '4'), TraceError, "not '4'")
add('trace: negative size', lambda d: trace(d.plain, (-4,)), TraceError, 'not (-4,)')
add('trace: unknown layer to keep dense', lambda d: trace(d.plain, (4,), keep_dense=['nothing']), TraceError, "'nothing' fits no parameter of the model")
add('trace: a forward pass that fails', lambda d: trace(d.uneven, (4,)), TraceError, 'KeyError')
# --- walks
add('walks: unknown fork', lambda d: phew(d.plain, .5, (4,), fork='even'), ValueError, "fork must be one of 'uniform', 'weight', not 'even'")
add('walks: unknown direction', lambda d: phew(d.plain, .5, (4,), direction='up'), ValueError, "not 'up'")
add('walks: unknown granularity', lambda d: phew(d.plain, .5, (4,), granularity='block'), ValueError, "not 'block'")
add('walks: power as text', lambda d: phew(d.plain, .5, (4,), power='1'), ValueError, 'power must be a real number')
add('walks: seed as float', lambda d: phew(d.plain, .5, (4,), seed=1.5), TypeError, 'seed must be an integer or a torch.Generator, not 1.5')
add('walks: masks of another model', lambda d: phew(d.plain, .5, (4,), masks=d.others), ValueError, 'these masks are of another model')
add('walks: float masks', lambda d: phew(d.plain, .5, (4,), masks=d.floats), TypeError, 'must be a boolean tensor, got torch.float32')
add('walks: beyond the order', lambda d: walk_order(d.plain, .3, (4,)).masks(.9), ValueError, 'make one with a larger max_density')
add('walks: unknown option', lambda d: phew(d.plain, .5, (4,), forks='even'), TypeError, "'forks'")
# --- measures
for name, f in dict(path_trace=path_trace, count_paths=count_paths, widths=widths, flops=flops, summary=summary,
                    effective_density=effective_density, layer_densities=layer_densities, list_paths=list_paths).items():
    add(f'{name}: masks of another model', lambda d, f=f: f(d.plain, d.others, (4,)), ValueError, 'these masks are of another model')
    add(f'{name}: float masks', lambda d, f=f: f(d.plain, d.floats, (4,)), TypeError, 'must be a boolean tensor')
    add(f'{name}: no size', lambda d, f=f: f(d.plain), TraceError, 'input_size must be a tuple of positive integers')
add('path_trace: unknown by', lambda d: path_trace(d.plain, None, (4,), by='unit'), ValueError, "got 'unit'")
add('path_sum: power 3', lambda d: path_sum(d.plain, None, (4,), power=3), ValueError, 'power must be 0, 1 or 2, got 3')
add('list_paths: too many', lambda d: list_paths(d.plain, None, (4,), most=3), ValueError, '72 paths, more than most=3')
add('compare: unknown how', lambda d: compare(d.masks, d.masks, how='cosine'), ValueError, "got 'cosine'")
add('linearised: masks of another model', lambda d: linearised(d.plain, masks=d.others), ValueError, 'these masks are of another model')
# --- rewire
add('widen: x of 2', lambda d: widen(d.plain, d.masks, 2, (4,)), ValueError, 'x must be between 0')
add('widen: masks of another model', lambda d: widen(d.plain, d.others, .5, (4,)), ValueError, 'these masks are of another model')
add('reinit: unknown how', lambda d: reinit(d.plain, d.masks, how='sparce'), ValueError, "'sparce'")
add('reinit: masks of another model', lambda d: reinit(d.plain, d.others), ValueError, 'these masks are of another model')
add('reinit: unknown init', lambda d: reinit(d.plain, d.masks, init='kaming'), ValueError, "did you mean 'kaiming_normal'?")
# --- scores
add('top_k: too many', lambda d: top_k({'a': torch.ones(3)}, 4), ValueError, 'cannot keep 4 weights of the 3')
add('top_k: NaN', lambda d: top_k({'a': torch.tensor([1., float('nan')])}, 1), ValueError, "of layer 'a' are not finite")
add('top_k: unknown scope', lambda d: top_k({'a': torch.ones(3)}, 1, scope='layers'), ValueError, "unknown scope 'layers'")
# --- export
add('sparse_state: masks of another model', lambda d: sparse_state(d.plain, d.others), ValueError, 'these masks are of another model')
add('sparse_state: float masks', lambda d: sparse_state(d.plain, d.floats), TypeError, 'must be a boolean tensor')
add('compact: no masks', lambda d: compact(d.plain, input_size=(4,)), ValueError, 'compact needs masks')
add('compact: no size', lambda d: compact(d.held), ValueError, 'compact needs the input_size')
add('compact: masks of another model', lambda d: compact(d.plain, d.others, (4,)), ValueError, 'these masks are of another model')
add('compact: wrong size', lambda d: compact(d.held, input_size=(5,)), TraceError, 'does not run on an example of size (2, 5)')
add('export_onnx: a folder', lambda d: export_onnx(d.held, d.folder, (4,)), IsADirectoryError, 'is a folder; name a file')
add('export_onnx: a number as size', lambda d: export_onnx(d.held, d.folder/'x', 4), ValueError, 'got 4')
# --- networks, data
add('mlp: one size', lambda d: mlp([4]), ValueError, 'at least two sizes')
add('mlp: unknown init', lambda d: mlp([4, 3], init='kaming', seed=0), ValueError, "unknown initialisation 'kaming'")
add('resnet20: unknown shortcut', lambda d: resnet20(10, shortcut='padd'), ValueError, "unknown shortcut 'padd'")
add('make_model: unknown', lambda d: make_model('resnet21', (3, 32, 32), 10), ValueError, "did you mean 'resnet20'?")
add('load_data: unknown', lambda d: load_data('cifar11'), ValueError, "did you mean 'cifar10'?")
add('subset: more than there are', lambda d: d.digits.subset(10**6, seed=0), ValueError, 'examples of each class')
add('pruning_batches: none', lambda d: pruning_batches(d.digits, 0, seed=0), ValueError, '0 training examples of each class')
# --- training, experiments
add('sparse_learner: masks of another model', lambda d: sparse_learner(d.dls, d.plain, d.others), ValueError, 'these masks are of another model')
add('sparse_learner: unknown recipe', lambda d: sparse_learner(d.dls, d.plain, d.masks, 'paperr'), ValueError, "unknown recipe 'paperr'")
add('sparse_learner: unknown amp', lambda d: sparse_learner(d.dls, d.plain, d.masks, amp='fp8'), ValueError, "'fp8'")
add('data_loaders: batch size 0', lambda d: data_loaders(d.digits, 0), ValueError, 'must be a whole number, 1 or more, got 0')
add('Config: unknown method', lambda d: Config(method='fhew'), ValueError, "did you mean 'phew'?")
add('Config: unknown field', lambda d: Config(densty=.5), TypeError, "'densty'")
add('Config: density 5', lambda d: Config(density=5), ValueError, 'density must be in (0, 1], got 5')
add('grid: unknown field', lambda d: grid(densty=[.5]), ValueError, "did you mean 'density'?")
add('gmp: more weights than there are', lambda d: prune(d.plain, 'gmp', kept=10**6, input_size=(4,), dl=d.dl), ValueError, 'between 1 and the 42 weights')
add('load_results: no folder', lambda d: load_results(d.folder/'no'), FileNotFoundError, 'there is no records.jsonl')
add('save_figure: no folder', lambda d: save_figure(__import__('matplotlib').figure.Figure(), d.folder/'no'/'x.png'), FileNotFoundError, 'cannot be written (No such file or directory)')

@pytest.mark.parametrize('name', rows)
def test_refused(given, name, tmp_path):
    call, error, words = rows[name]
    d = given
    d.folder = tmp_path
    models = {k: v for k, v in vars(d).items() if isinstance(v, nn.Module)}
    before, random_before = {k: seen(m) for k, m in models.items()}, states()
    with pytest.raises(error) as raised: call(d)
    assert words in str(raised.value), f'{type(raised.value).__name__}: {raised.value}'
    for k, m in models.items():
        (tensors, rest), (now, rest_now) = before[k], seen(m)
        assert rest == rest_now and all(map(torch.equal, tensors, now)) and len(tensors) == len(now), f'{k} was changed'
    for a, b in zip(random_before, states()): assert np.array_equal(np.asarray(a), np.asarray(b)) if not isinstance(a, tuple) else a == b
    assert not list(tmp_path.glob('.*.part'))
