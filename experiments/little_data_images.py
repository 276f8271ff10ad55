"""What a little data adds to PHEW, on images: `python experiments/little_data_images.py [--seeds 5] [--tuned 1] [--images 250] [--epochs 10] [--amp bf16]`.

ResNet20 on 2,500 images of CIFAR-10 (`--images` of each class), density .05: PHEW, walks by |w g| and by
|w| times the input, SNIP and SynFlow. With the first `--tuned` seeds every method tries the same learning rates; with the others it has the
rate that was best in those on 1,000 other training images. The 10,000 test images choose nothing.
Each run is a line of results/little_data_images.csv; lines that are there already are not computed again."""
import argparse, csv, time, warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

warnings.filterwarnings('ignore')
from phew_nb.data import load_data, pruning_batches
from phew_nb.graph import trace
from phew_nb.models import resnet20
from phew_nb.pruners import prune
from phew_nb.training import Recipe, data_loaders, quiet, sparse_learner

out = Path(__file__).resolve().parent.parent/'results'/'little_data_images.csv'
methods, rates = ('phew', 'phew_snip', 'phew_act', 'snip', 'synflow'), (.03, .1, .3)

def load(n_train=250, n_held=100):
    "CIFAR-10 with a part of its training images, and others of them held out, as many of each class."
    data = load_data('cifar10')
    small = data.subset(n_train + n_held, seed=0)
    places = [(small.train.label == c).nonzero()[:, 0] for c in range(len(data.classes))]
    train, held = (small.train[torch.cat([p[part] for p in places])] for part in (slice(n_train), slice(n_train, None)))
    return replace(small, train=train, test=held), data.test

@torch.no_grad()
def accuracy(model, data, part):
    "The fraction right of a part of the data, computed as in training."
    model.eval()
    normal = lambda x: (x.float()/255 - data.mean.view(-1, 1, 1))/data.std.view(-1, 1, 1)
    right = [(model(normal(part.x[i])).argmax(1) == part.label[i]).sum() for i in torch.arange(len(part.label)).split(500)]
    return float(sum(right)/len(part.label))

def run(data, test, method, lr, seed, epochs, width, amp):
    "One row."
    began, model = time.time(), resnet20(10, width=width, seed=seed)
    graph = trace(model, (3, 32, 32))
    masks = prune(model, method, .05, graph, dl=pruning_batches(data, seed=seed), seed=seed)
    learn = sparse_learner(data_loaders(data, 128, 'paper', seed=seed, device='cpu'), model, masks, Recipe(epochs, 128, lr=lr), amp=amp or None)
    with quiet(learn): learn.fit_recipe()
    return dict(method=method, lr=lr, seed=seed, epochs=epochs, width=width, images=len(data.train), amp=amp, kept=masks.kept,
                held_out=round(accuracy(model, data, data.test), 4), test=round(accuracy(model, data, test), 4), seconds=round(time.time() - began))

def best_rate(rows, method, tuned):
    "The learning rate with the highest mean accuracy on the images held out, with the first `tuned` seeds."
    of = lambda lr: [float(r['held_out']) for r in rows if r['method'] == method and float(r['lr']) == lr and int(r['seed']) < tuned]
    return max(rates, key=lambda lr: sum(of(lr))/len(of(lr)))

def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(seeds=5, tuned=1, epochs=10, width=1., images=250, amp='').items(): ask.add_argument(f'--{name}', type=type(value), default=value)
    args = ask.parse_args()
    (data, test), rows = load(args.images), list(csv.DictReader(out.open())) if out.exists() else []
    for seed, method in product(range(args.seeds), methods):
        same = [r for r in rows if (int(r['epochs']), float(r['width']), int(r['images']), r['amp']) == (args.epochs, args.width, len(data.train), args.amp)]
        for lr in rates if seed < args.tuned else [best_rate(same, method, args.tuned)]:
            if (method, lr, seed) in {(r['method'], float(r['lr']), int(r['seed'])) for r in same}: continue
            row, new = run(data, test, method, lr, seed, args.epochs, args.width, args.amp), not out.exists()
            rows.append(row)
            with out.open('a', newline='') as f:
                writer = csv.DictWriter(f, row, lineterminator='\n')
                if new: writer.writeheader()
                writer.writerow(row)
            print(row, flush=True)

if __name__ == '__main__': main()
