"A journey: a network and a folder of images of one's own, six methods, four densities, three seeds, interrupted twice."
import math, os, signal, subprocess, sys, time
from pathlib import Path

import numpy as np, pytest
from PIL import Image

from phew_nb.config import run_name
from phew_nb.store import read_records
from phew_nb.sweep import plan, read_grid, sweep
import tex

network = '''
import torch
from torch import nn

class Attention(nn.Module):
    "Self-attention over the positions of a feature map."
    def __init__(self, n):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(n, n) for _ in range(4))
    def forward(self, x):
        seq = x.flatten(2).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(self.q(seq), self.k(seq), self.v(seq))
        return x + self.out(seen).transpose(1, 2).view_as(x)

class Block(nn.Module):
    "Two convolutions beside a shortcut."
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Conv2d(n, n, 3, padding=1), nn.Conv2d(n, n, 3, padding=1)
    def forward(self, x): return torch.relu(x + self.b(torch.relu(self.a(x))))

class Net(nn.Module):
    def __init__(self, n_out, n_in=3, n=8):
        super().__init__()
        self.stem, self.block, self.attention = nn.Conv2d(n_in, n, 3, 2, 1), Block(n), Attention(n)
        self.head = nn.Linear(n, n_out)
    def forward(self, x): return self.head(self.attention(self.block(torch.relu(self.stem(x)))).mean((2, 3)))
'''

wanted = '''
data = "shapes"
model = "net.py:Net"
image_size = 12
epochs = 2
seeds = 3
densities = [0.1, 0.2, 0.4, 0.6]
methods = ["phew", "random", "magnitude", "snip", "synflow", "uniform"]
recipe = { lr = 0.02, batch_size = 16, drops = [] }
'''

go = '''
import warnings; warnings.simplefilter('ignore')
from phew_nb.sweep import read_grid, sweep
sweep(read_grid('grid.toml'), 'results', progress=False, device='cpu')
'''

def draw(kind, i):
    "A picture of a square or a cross, somewhere, of some size."
    rng = np.random.default_rng([kind, i])
    image = rng.integers(0, 60, (14, 18, 3), np.uint8)
    r, c = rng.integers(3, 11), rng.integers(3, 15)
    if kind: image[r-1:r+2, c-3:c+4] = image[r-3:r+4, c-1:c+2] = 200
    else: image[r-2:r+3, c-2:c+3] = 200
    return Image.fromarray(image)

def n_records(): return len(list(Path('results').glob('records/*.json')))

def begin(until):
    "Start the sweep, and stop it when there are so many records."
    process = subprocess.Popen([sys.executable, 'go.py'], stderr=subprocess.PIPE, text=True, env=os.environ | dict(
        PYTHONPATH=str(Path(__file__).resolve().parent.parent)))
    while process.poll() is None and n_records() < until: time.sleep(.05)
    return process

@pytest.mark.slow
def test_journey(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind,name in enumerate(['square', 'cross']):
        for split,n in dict(train=24, test=8).items():
            (folder := Path('shapes')/split/name).mkdir(parents=True)
            for i in range(n): draw(kind, i + 100*(split == 'test')).save(folder/f'{i}.png')
    for name,text in {'net.py': network, 'grid.toml': wanted, 'go.py': go}.items(): Path(name).write_text(text)
    configs = read_grid('grid.toml')
    assert len(configs) == 6*4*3 == len(plan(configs, 'results').missing)
    process = begin(10)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1]
    assert 'of 72 runs are recorded in results' in said and 'the same call goes on' in said
    first = {p.name: p.read_bytes() for p in Path('results/records').iterdir()}
    process = begin(len(first) + 10)
    process.kill(); process.wait()
    assert 10 <= len(first) < n_records() < 72
    records = sweep(configs, 'results', progress=False, device='cpu')
    assert [r['run'] for r in records] == [run_name(c) for c in configs]
    assert all(Path(f'results/records/{name}').read_bytes() == text for name,text in first.items())
    assert len({r['fingerprint'] for r in read_records('results')}) == 1
    assert all(r['kept'] >= round(r['density']*r['total']) and math.isfinite(r['loss']) for r in records)
    from phew_nb.plots import results_table
    table = results_table('results')
    assert len(table) == 24 and set(table['seeds']) == {3}
    tex.check(table.to_latex(caption='Shapes', label='t:shapes'), tmp_path)
    assert table.to_latex().count('\\\\\n') == 1 + len(table)
    from phew_nb.reports import write_report
    assert write_report('results').read_text().count('<h2>') == 1
