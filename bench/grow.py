"Static masks and masks that grow: `python bench/grow.py digits|cifar10`; each run is a line of `results/grow.csv`."
import argparse, csv, time, warnings
from pathlib import Path

import torch

warnings.filterwarnings('ignore')
from phew_nb.data import digits, load_data
from phew_nb.graph import trace
from phew_nb.grow import Grow
from phew_nb.masks import Masks
from phew_nb.metrics import flops
from phew_nb.models import mlp, resnet20
from phew_nb.pruners import prune
from phew_nb.training import Recipe, data_loaders, quiet, sparse_learner

def tenth(): return load_data('cifar10').subset(500, seed=0, n_test_per_class=100)

tasks = dict( # data, network, size of an input, density, recipe, steps from one update to the next, augmentation
    digits=(digits, lambda seed: mlp([64, 100, 100, 10], seed=seed), (64,), .02, Recipe(20, 64, lr=.1), 20, None),
    cifar10=(tenth, lambda seed: resnet20(10, width=.5, seed=seed), (3, 32, 32), .05, Recipe(4, 128, lr=.1), 20, 'paper'))

def run(name, start, method, seed):
    "One row: accuracy after the last epoch, and what it took."
    make_data, make, size, density, recipe, every, augment = tasks[name]
    began, model, data = time.time(), make(seed), make_data()
    graph = trace(model, size)
    masks = prune(graph, start, density, seed=seed)
    grow = [] if method == 'static' else [Grow(method, every=every, seed=seed)]
    dls = data_loaders(data, recipe.batch_size, augment, seed=seed, device='cpu')
    learn = sparse_learner(dls, model, masks, recipe, cbs=grow)
    with quiet(learn): learn.fit_recipe()
    last, end = learn.epoch_record.rows[-1], Masks.of(model)
    lost = sum(end.report(trace(model, size)).lost.values())
    return dict(data=name, images=len(data.train), start=start, method=method, density=density, seed=seed,
                epochs=recipe.epochs, every=every, kept=end.kept, accuracy=last['accuracy'], loss=last['valid_loss'],
                multiply_adds=flops(trace(model, size), end), off_path=lost, seconds=round(time.time() - began))

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('data', choices=tasks)
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--starts', nargs='+', default=['phew', 'erk'])
    parser.add_argument('--methods', nargs='+', default=['static', 'set', 'rigl', 'walks'])
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(__file__).resolve().parent.parent/'results'/'grow.csv'
    rows = csv.DictReader(open(path)) if path.exists() else []
    done = [tuple(r[k] for k in ('data', 'start', 'method', 'seed')) for r in rows]
    for seed in range(args.seeds):
        for start in args.starts:
            for method in args.methods:
                if (args.data, start, method, str(seed)) in done: continue
                row = run(args.data, start, method, seed)
                new = not path.exists()
                with open(path, 'a', newline='') as f:
                    writer = csv.DictWriter(f, row, lineterminator='\n')
                    if new: writer.writeheader()
                    writer.writerow(row)
                print(row, flush=True)

if __name__ == '__main__': main()
