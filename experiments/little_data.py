"""What a little data adds to PHEW: accuracies of five methods at low densities, on digits and on 5,000 images of MNIST.

`python experiments/little_data.py` writes results/little_data.csv, a row for each data set, method, number of weights, learning rate
and seed; rows that are there already are not computed again."""
import csv, math
from pathlib import Path

import torch, torch.nn.functional as F

from phew_nb.data import digits, image_data
from phew_nb.graph import trace
from phew_nb.models import mlp
from phew_nb.pruners import prune

out = Path(__file__).resolve().parent.parent/'results'/'little_data.csv'
methods = 'phew', 'phew_snip', 'phew_act', 'snip', 'synflow'
rates, seeds, epochs = (.03, .1, .3, 1.), range(5), 12
fields = 'data inputs method density kept lr seed held_out test'.split()

def parts(x, y, sizes):
    "Disjoint parts of the examples, each with as many of every class as `sizes` says."
    gen, taken = torch.Generator().manual_seed(0), {c: 0 for c in range(10)}
    places = {c: (y == c).nonzero()[:, 0] for c in range(10)}
    places = {c: p[torch.randperm(len(p), generator=gen)] for c, p in places.items()}
    for n in sizes:
        pick = torch.cat([p[taken[c]:taken[c] + n] for c, p in places.items()])
        taken = {c: k + n for c, k in taken.items()}
        yield x[pick], y[pick]

def load(name):
    "Training, held-out and test examples, flat, and with zero mean and unit deviation over all pixels."
    data = digits() if name == 'digits' else image_data('mnist')
    flat = lambda a: ((a.x.float()/255).flatten(1) - data.mean)/data.std
    (train, held), test = parts(flat(data.train), data.train.label, (110, 30) if name == 'digits' else (500, 200)), data.test
    return train, held, (flat(test), test.label)

def without_dead(sets):
    "The same without the pixels that are equal in all training images."
    alive = sets[0][0].std(0) > 0
    return [(x[:, alive], y) for x, y in sets]

def pruning_data(train):
    "Ten images of each class, in one batch."
    return [next(parts(*train, (10,)))]

def train_all(weights, masks, lrs, sets, seed=0):
    "Train many masked perceptrons at once; the fractions right on the held-out and test examples, for each."
    (x, y), *others = sets
    params = [(w.clone().requires_grad_(), torch.zeros(w.shape[0], 1, w.shape[1], requires_grad=True)) for w in weights]
    flat = [p for pair in params for p in pair]
    opt, gen = torch.optim.SGD(flat, lr=1., momentum=.9), torch.Generator().manual_seed(seed)
    batch_size = 50 if len(x) < 2000 else 100
    steps, done = epochs*math.ceil(len(x)/batch_size), 0
    def run(x):
        h = x.expand(len(lrs), -1, -1)
        for i, ((w, b), mask) in enumerate(zip(params, masks)):
            h = torch.baddbmm(b, F.relu(h) if i else h, (w*mask).transpose(1, 2))
        return h
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=gen).split(batch_size):
            loss = F.cross_entropy(run(x[batch]).transpose(1, 2), y[batch].expand(len(lrs), -1), reduction='none').mean(1)
            opt.zero_grad(); loss.sum().backward()
            scale = lrs*(1 + math.cos(math.pi*done/steps))/2
            for p in flat: p.grad *= scale.view(-1, 1, 1)
            opt.step(); done += 1
    with torch.no_grad(): return [(run(x).argmax(2) == y).double().mean(1) for x, y in others]

def cell(name, inputs, sets, method, density, kept, rates):
    "All seeds of a method at a number of weights, at some learning rates."
    sizes, models, masks = [sets[0][0].shape[1], 100, 100, 10], [], []
    for seed in seeds:
        models.append(mlp(sizes, seed=seed))
        graph = trace(models[-1], (sizes[0],))
        masks.append(prune(models[-1], method, None, graph, dl=pruning_data(sets[0]), seed=seed, kept=kept))
    names, lrs = list(masks[0]), torch.tensor(rates).repeat_interleave(len(seeds))
    stack = lambda tensors: torch.stack([t for _ in rates for t in tensors])
    weights = [stack([m.get_parameter(n).detach() for m in models]) for n in names]
    held, test = train_all(weights, [stack([m[n] for m in masks]) for n in names], lrs, sets)
    for i, lr in enumerate(lrs.tolist()):
        seed = i % len(seeds)
        yield dict(data=name, inputs=inputs, method=method, density=density, kept=masks[seed].kept, lr=round(lr, 4), seed=seed,
                   held_out=round(float(held[i]), 4), test=round(float(test[i]), 4))

def main():
    done = {(r['data'], r['inputs'], r['method'], r['density'], r['lr']) for r in csv.DictReader(out.open())} if out.exists() else set()
    if not out.exists(): out.write_text(','.join(fields) + '\n')
    for name, densities in dict(digits=(.02, .05), mnist_5000=(.01, .02)).items():
        sets = load(name.split('_')[0])
        total = 100*(sets[0][0].shape[1] + 100 + 10)
        for inputs, data in {'all': sets, 'without dead pixels': without_dead(sets)}.items():
            for density in densities if inputs == 'all' else densities[:1]:
                for method in methods:
                    left = [lr for lr in rates if (name, inputs, method, str(density), str(lr)) not in done]
                    if not left: continue
                    rows = list(cell(name, inputs, data, method, density, round(density*total), left))
                    with out.open('a', newline='') as f: csv.DictWriter(f, fields, lineterminator='\n').writerows(rows)
                    for lr in left:
                        of = lambda part: sum(r[part] for r in rows if r['lr'] == lr)/len(seeds)
                        print(f'{name:10} {inputs:20} {density:6} {method:10} lr {lr:<5} held out {of("held_out"):.3f} test {of("test"):.3f}', flush=True)

if __name__ == '__main__': main()
