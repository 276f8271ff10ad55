"What training a sparse network costs, as ratios within one run: `python bench/training.py [--quick]`."
import argparse, gc, subprocess, sys, tempfile, time, warnings
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

warnings.filterwarnings('ignore')
from phew_nb.data import Arrays, Batches, Data, channel_stats
from phew_nb.masks import Masks
from phew_nb.models import resnet20, vgg19

models = dict(resnet20=resnet20, vgg19=vgg19)

def images(n, size=32, seed=0):
    "A data set of random images, as CIFAR-10 has them."
    gen = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=gen)
    arrays = Arrays(x, torch.arange(n) % 10)
    augments = {'paper': (0, True), 'code': (4, True)}
    return Data('random', arrays, arrays[:256], [str(c) for c in range(10)], *channel_stats(x), augments=augments)

def random_masks(model, density=.05):
    gen = torch.Generator().manual_seed(0)
    return Masks({n: torch.rand(p.shape, generator=gen) < density for n, p in model.named_parameters() if p.ndim > 1})

def prepared(name, kind):
    "A network (dense, with masks kept, or with weight * mask in each forward pass) and its optimizer."
    model = models[name](10, seed=0).to(memory_format=torch.channels_last)
    if kind == 'kept': random_masks(model).keep(model)
    if kind == 'multiplied': random_masks(model).to_torch_prune(model)
    return model, torch.optim.SGD(model.parameters(), .01, momentum=.9, weight_decay=1e-4)

def step(model, opt, x, y):
    "Seconds of one training step."
    start = time.perf_counter()
    cross_entropy(model(x), y).backward()
    opt.step(); opt.zero_grad()
    return time.perf_counter() - start

def ratios(times, base):
    "Each shortest time over the base's shortest; rounds alternate, and the first one, of warming up, does not count."
    return {k: min(v[1:])/min(times[base][1:]) for k, v in times.items()}

def bench_steps(name, batch, n):
    "A step with masks over a dense one: alternating, after one round to warm up."
    runs = {kind: prepared(name, kind) for kind in ('dense', 'kept', 'multiplied')}
    x, y = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last), torch.randint(10, (batch,))
    times = {kind: [] for kind in runs}
    for _ in range(n + 1):
        for kind, run in runs.items(): times[kind].append(step(*run, x, y))
    found = ratios(times, 'dense')
    yield f'{name}, batch {batch}: dense step', f'{min(times["dense"][1:])*1e3:.0f} ms', ''
    yield f'{name}: a step with masks kept over the dense step', f'{found["kept"]:.3f}', 'under 1.02'
    guards = guard_time(*runs['kept'])/min(times['dense'][1:])
    yield f'{name}: the guards alone over the dense step', f'{guards:.4f}', 'under 0.02'
    yield f'{name}: with weight * mask in the forward pass instead', f'{found["multiplied"]:.3f}', ''

def guard_time(model, opt):
    "Seconds that guards take in a step: once for gradients, once for weights."
    from phew_nb import keeping as m
    guarded = [p for p in model.parameters() if id(p) in m._guards]
    for p in guarded: p.grad = torch.zeros_like(p)
    def once():
        start = time.perf_counter()
        for p in guarded: m._after_backward(p)
        m._after_step(opt, (), {})
        return time.perf_counter() - start
    return min(once() for _ in range(10))

def plain_epoch(model, data, batch, seed=0):
    "A hand-written loop: shuffle, index, flip, normalise, step."
    opt = torch.optim.SGD(model.parameters(), .01, momentum=.9, weight_decay=1e-4)
    mean, std = (t.view(1, 3, 1, 1) for t in (data.mean, data.std))
    gen, start, total = torch.Generator().manual_seed(seed), time.perf_counter(), 0.
    order = torch.randperm(len(data.train), generator=gen)
    model.train()
    for i in order.split(batch):
        x = data.train.x[i]
        flip = torch.rand(len(i), generator=gen) < .5
        x = (torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x).float()/255 - mean)/std
        loss = cross_entropy(model(x), data.train.label[i])
        loss.backward(); opt.step(); opt.zero_grad()
        total += loss.item()
    return time.perf_counter() - start

def learner_epoch(learn):
    "Our epoch, without validation: what `fit_recipe` does."
    start = time.perf_counter()
    with quiet(learn): learn.fit_recipe(1)
    return time.perf_counter() - start

def bench_epoch(n_batches, rounds, batch=128):
    "Our epoch over a hand-written loop on the same arrays."
    global quiet
    from phew_nb.training import Recipe, data_loaders, quiet, sparse_learner
    data = images(n_batches*batch)
    dls = data_loaders(data, batch, 'paper', device='cpu')
    learn = sparse_learner(dls, resnet20(10, seed=0), recipe=Recipe(lr=.01), metrics=[])
    learn._do_epoch_validate = lambda *a, **k: None
    model = resnet20(10, seed=0).to(memory_format=torch.channels_last)
    times = dict(plain=[], ours=[])
    for _ in range(rounds + 1):
        times['plain'].append(plain_epoch(model, data, batch))
        times['ours'].append(learner_epoch(learn))
    yield 'ResNet20: our epoch over a plain loop', f'{ratios(times, "plain")["ours"]:.3f}', 'under 1.05'

def small_learner():
    "A learner of the digits perceptron with masks, and one batch."
    from phew_nb.data import digits
    from phew_nb.models import mlp
    from phew_nb.training import data_loaders, sparse_learner
    model, dls = mlp([64, 100, 100, 10], seed=0), data_loaders(digits(), 64, device='cpu')
    return sparse_learner(dls, model, random_masks(model).keep(model), metrics=[]), dls.one_batch()

def events_time(learn, loss, n=200):
    "Seconds of processor time that the callbacks of a learner take in a step."
    learn.training, learn.loss, learn.iter, learn.epoch = True, loss, 0, 0
    events = [f'{when}_{what}' for what in ('backward', 'step', 'batch') for when in ('before', 'after')]
    events += ['after_pred', 'after_loss']
    def once():
        start = time.process_time()
        for _ in range(n):
            for event in events: learn(event)
        return (time.process_time() - start)/n
    return min(once() for _ in range(5))

def bench_callbacks(n):
    "What our callbacks add to a step of the digits perceptron, over that step in a plain loop with masks."
    learn, (x, y) = small_learner()
    learn.create_opt()
    theirs = [cb for cb in learn.cbs if type(cb).__module__.startswith('fastai')]
    opt = torch.optim.SGD(learn.model.parameters(), .1, momentum=.9, weight_decay=1e-4)
    plain = min(step(learn.model, opt, x, y) for _ in range(50*n))
    loss = learn.loss_func(learn.model(x), y).detach()
    learn.remove_cbs(theirs)
    ours = events_time(learn, loss)
    learn.remove_cbs(list(learn.cbs))
    ours -= events_time(learn, loss)
    yield 'digits perceptron: a step in a plain loop with masks', f'{plain*1e3:.2f} ms', ''
    yield '    our callbacks in a step', f'{ours*1e3:.3f} ms', 'under 0.1 ms'
    yield '    our callbacks over the plain step', f'{ours/plain:.3f}', 'under 0.15'

def bench_loader(n, rounds, batch=128):
    "Images a second: ours from memory, torchvision's from files with two workers."
    from PIL import Image
    from torch.utils.data import DataLoader
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder
    data = images(n)
    ours = Batches(data, batch_size=batch, shuffle=True, augment='code', seed=0)
    with tempfile.TemporaryDirectory() as folder:
        for c in range(10): (Path(folder)/str(c)).mkdir()
        for i, x in enumerate(data.train.x.movedim(1, 3)):
            Image.fromarray(x.numpy()).save(Path(folder)/str(i % 10)/f'{i}.png')
        tfms = T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(data.mean, data.std)
        files = ImageFolder(folder, T.Compose(tfms))
        theirs = DataLoader(files, batch, shuffle=True, num_workers=2, persistent_workers=True)
        rates = dict(ours=[], theirs=[])
        for _ in range(rounds + 1):
            for name, loader in dict(ours=ours, theirs=theirs).items():
                start = time.perf_counter()
                n_seen = sum(len(x) for x, _ in loader)
                rates[name].append(n_seen/(time.perf_counter() - start))
        del theirs
    ours, theirs = (max(r[1:]) for r in rates.values())
    yield 'images a second, crop, flip, normalise: ours', f'{ours:,.0f}', ''
    yield '    torchvision ImageFolder, DataLoader, 2 workers', f'{theirs:,.0f}', ''
    yield '    ours over theirs', f'{ours/theirs:.1f}', 'above 8'

def bench_compact(n, batch=128, width=1.):
    "A step of a SynFlow VGG19 at density 0.028, compact over masked."
    from phew_nb.export import compact
    from phew_nb.synflow import synflow
    model = vgg19(100, width=width, seed=0).to(memory_format=torch.channels_last)
    synflow(model, .028, (3, 32, 32), iterations=30).keep(model)
    small = compact(model, input_size=(3, 32, 32)).to(memory_format=torch.channels_last)
    Masks.of(small).keep(small)
    count = lambda m: sum(p.numel() for p in m.parameters() if p.ndim > 1)
    x, y = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last), torch.randint(100, (batch,))
    runs = {k: (m, torch.optim.SGD(m.parameters(), .01)) for k, m in dict(masked=model, compact=small).items()}
    times = {k: [] for k in runs}
    for _ in range(n + 1):
        for kind, run in runs.items(): times[kind].append(step(*run, x, y))
    yield 'SynFlow VGG19 at 0.028: weights stored, compact over masked', f'{count(small)/count(model):.3f}', 'report'
    yield '    step time, compact over masked', f'{ratios(times, "masked")["compact"]:.3f}', 'report'

def peak_memory(kind, steps=4, batch=128):
    "Peak memory of a process that trains ResNet20, in MB."
    code = ("import torch, sys; sys.path.insert(0, 'bench'); import measure, training as b; torch.manual_seed(0); "
            f"run = b.prepared('resnet20', {kind!r}); "
            f"x, y = torch.randn({batch}, 3, 32, 32), torch.arange({batch}) % 10; "
            f"[b.step(*run, x, y) for _ in range({steps})]; "
            "print(measure.peak()/2**20)")
    return float(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                                cwd=Path(__file__).resolve().parent.parent).stdout)

def bench_memory():
    "Memory of training a ResNet20 at density 0.05 over the dense one."
    peaks = {kind: peak_memory(kind) for kind in ('dense', 'kept')}
    model, _ = prepared('resnet20', 'kept')
    yield 'ResNet20 at 0.05: peak memory of training over dense', f'{peaks["kept"]/peaks["dense"]:.3f}', 'report'
    share = 5*Masks.of(model).total/2**20/peaks['dense'] # a byte a weight for its mask, four for its guard
    yield '    masks and guards, as a share of the dense peak', f'{share:.4f}', 'report'

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--quick', action='store_true', help='fewer rounds and smaller batches: a look, not a result')
    parser.add_argument('--threads', type=int, default=2, help='threads of PyTorch')
    parser.add_argument('--only', help='part of the name of the benchmarks to run')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    n = 3 if args.quick else 12
    batch, n_batches, n_images = (32, 4, 640) if args.quick else (128, 20, 5120)
    parts = dict(steps_resnet20=lambda: bench_steps('resnet20', 128, n),
                 steps_vgg19=lambda: bench_steps('vgg19', batch, n),
                 callbacks=lambda: bench_callbacks(n), epoch=lambda: bench_epoch(n_batches, 4),
                 loader=lambda: bench_loader(n_images, 3),
                 compact=lambda: bench_compact(n, batch), memory=bench_memory)
    print('| what | measured | to reach |\n|---|---|---|')
    for name, part in parts.items():
        if args.only and args.only not in name: continue
        try:
            for row in part(): print('| ' + ' | '.join(row) + ' |', flush=True)
        except ModuleNotFoundError as e: print(f'| {name} | left out: {e} | |', flush=True)
        gc.collect()

if __name__ == '__main__': main()
