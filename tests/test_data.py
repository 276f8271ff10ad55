"Data sets on disk: what is checked, what is cached, and what is said when something is wrong."
import itertools, os, shutil, warnings
from dataclasses import replace
from pathlib import Path

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from phew_nb import arrays as A, data as D

rng = np.random.default_rng(0)
n_images = dict(mnist=(3, 2), cifar10=(3, 2), cifar100=(2, 1), tiny_imagenet=(2, 1))

def save(path, size=(3, 32, 32), quality=95):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 256, (*size[1:], size[0]), np.uint8).squeeze()
    Image.fromarray(pixels).save(path)

def make_mnist(folder):
    for split,n in zip(('training', 'testing'), n_images['mnist']):
        for c in range(10):
            for i in range(n): save(folder/split/str(c)/f'{i}.png', (1, 28, 28))

def make_cifar10(folder):
    for split,n in zip(('train', 'test'), n_images['cifar10']):
        for c in D.sources['cifar10'].classes:
            for i in range(n): save(folder/split/c/f'{i}_{c}.png')
    (folder/'labels.txt').write_text('\n'.join(D.sources['cifar10'].classes))

def make_cifar100(folder):
    for split,n in zip(('train', 'test'), n_images['cifar100']):
        for c in range(100):
            for i in range(n): save(folder/split/f'group-{c//5}'/f'class_{c:02}'/f'thing_s_{i}.png')

def make_tiny_imagenet(folder):
    labels, lines = [f'n{i:08}' for i in range(200)], []
    for i,c in enumerate(labels):
        for k in range(2): save(folder/'train'/c/'images'/f'{c}_{k}.JPEG', (3 if k else 1, 64, 64))
        save(folder/'val'/'images'/f'val_{i}.JPEG', (3, 64, 64))
        lines.append(f'val_{i}.JPEG\t{c}\t0\t0\t9\t9\n')
    (folder/'val'/'val_annotations.txt').write_text(''.join(lines))
    (folder/'wnids.txt').write_text('\n'.join(labels))
    (folder/'words.txt').write_text('\n'.join(f'{c}\tthing {c}, other name' for c in labels))

@pytest.fixture(scope='session')
def originals(tmp_path_factory):
    home = tmp_path_factory.mktemp('home')
    for name in D.sources: globals()[f'make_{name}'](home/'data'/D.sources[name].folder)
    return home

@pytest.fixture
def unpack(originals, tmp_path, monkeypatch):
    "A function that copies a small data set into a fresh FASTAI_HOME and returns its folder."
    monkeypatch.setenv('FASTAI_HOME', str(tmp_path))
    def copy(name):
        folder = D.sources[name].folder
        return Path(shutil.copytree(originals/'data'/folder, tmp_path/'data'/folder))
    return copy

def load(name):
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'not the whole data set')
        return D.image_data(name)

@pytest.mark.parametrize('name', D.sources)
def test_sizes_are_those_at_hand(unpack, name):
    unpack(name)
    with pytest.warns(UserWarning, match='not the whole data set') as warned: data = D.image_data(name)
    n, classes, text = n_images[name], len(data.classes), repr(data)
    assert (len(data.train), len(data.test)) == (n[0]*classes, n[1]*classes)
    assert data.input_size == D.sources[name].size and data.n_out == classes
    assert f'{n[0]*classes:,} training' in text and 'a part of' in text and text in str(warned[0].message)
    assert torch.bincount(data.train.label).tolist() == [n[0]]*classes

def test_pixels_and_labels(unpack):
    folder, data = unpack('tiny_imagenet'), load('tiny_imagenet')
    assert data.classes[7] == 'thing n00000007'
    pixels = np.asarray(Image.open(folder/'val'/'images'/'val_7.JPEG').convert('RGB')).transpose(2, 0, 1)
    assert (data.test.x[data.test.label==7][0].numpy() == pixels).all()
    grey = data.train.x[data.train.label==7][0]
    assert (grey[0] == grey[1]).all()

def test_read_once(unpack, monkeypatch, tmp_path):
    folder, first = unpack('mnist'), load('mnist')
    monkeypatch.setattr(A, 'read_image', lambda *a: pytest.fail('decoded again'))
    again = load('mnist')
    assert torch.equal(first.train.x, again.train.x) and torch.equal(first.test.label, again.test.label)
    assert [f.name for f in (tmp_path/'data'/'phew_nb').iterdir()] == ['mnist.safetensors']
    shutil.rmtree(folder)
    assert torch.equal(load('mnist').train.x, first.train.x)

def test_missing_and_no_network(tmp_path, monkeypatch):
    import fastai.data.external
    def offline(url): raise OSError('no network')
    monkeypatch.setenv('FASTAI_HOME', str(tmp_path))
    monkeypatch.setattr(fastai.data.external, 'untar_data', offline)
    message = 'cifar10 is neither in .*cifar10 nor could it be downloaded .no network'
    with pytest.raises(FileNotFoundError, match=message): load('cifar10')

# each: data set, what goes wrong, what the message must name
def remove(path): path.unlink()
def cut(path): os.truncate(path, path.stat().st_size//2)
def remove_folder(path): shutil.rmtree(path)
def add_image(path): save(path, (3, 32, 32))
def into_the_next(path):
    target = path.parent.parent/'dog'/path.name
    path.rename(target)

@pytest.mark.parametrize('name, wrong, path, message', [
    ('mnist', cut, 'training/3/0.png', 'training/3/0.png is damaged'),
    ('cifar10', add_image, 'train/zebra/1.png', "train has a foreign class 'zebra'"),
    ('cifar10', into_the_next, 'train/cat/0_cat.png', 'train/dog/0_cat.png does not belong there'),
    ('cifar10', add_image, 'train/cat/77.png', "train has 4 images of class 'cat' instead of 3"),
    ('cifar10', cut, 'test/cat/1_cat.png', 'test/cat/1_cat.png is damaged'),
    ('cifar100', remove_folder, 'test/group-3/class_15', "test has no class 'class_15'"),
    ('cifar100', add_image, 'train/group-3/class_zz/a.png', "test has no class 'class_zz'"),
    ('cifar100', add_image, 'train/group-4/class_15/b.png', "class_15/b.png is in another group than the rest"),
    ('cifar100', add_image, 'train/group-3/class_15/b.png', "train has 3 images of class 'class_15' instead of 2"),
    ('tiny_imagenet', remove, 'val/images/val_4.JPEG', 'val/images/val_4.JPEG is missing'),
    ('tiny_imagenet', add_image, 'val/images/val_999.JPEG', 'val/images/val_999.JPEG is not in val_annotations.txt'),
    ('tiny_imagenet', remove, 'val/val_annotations.txt', 'val_annotations.txt'),
    ('tiny_imagenet', remove, 'wnids.txt', 'wnids.txt'),
    ('tiny_imagenet', remove, 'train/n00000003/images/n00000003_1.JPEG', "1 images of class 'n00000003' instead of 2"),
    ('tiny_imagenet', add_image, 'train/n00000003/images/n00000004_7.JPEG', 'n00000004_7.JPEG does not belong there'),
])
def test_what_is_wrong_is_named(unpack, tmp_path, name, wrong, path, message):
    folder = unpack(name)
    wrong(folder/path)
    with pytest.raises((ValueError, FileNotFoundError), match=message): load(name)
    assert not (tmp_path/'data'/'phew_nb').exists()

def test_training_and_test_images_exchanged(unpack, monkeypatch):
    from dataclasses import replace
    monkeypatch.setitem(D.sources, 'cifar10', replace(D.sources['cifar10'], full=(3, 2)))
    folder = unpack('cifar10')
    (folder/'train').rename(folder/'x'), (folder/'test').rename(folder/'train'), (folder/'x').rename(folder/'test')
    with pytest.raises(ValueError, match="test has 3 images of class 'airplane' instead of 2"): load('cifar10')

def test_truncated_files_even_where_pillow_is_told_to_accept_them(unpack, monkeypatch):
    from PIL import ImageFile
    monkeypatch.setattr(ImageFile, 'LOAD_TRUNCATED_IMAGES', True)
    cut(unpack('mnist')/'training'/'3'/'0.png')
    with pytest.raises(ValueError, match='0.png is damaged'): load('mnist')
    assert ImageFile.LOAD_TRUNCATED_IMAGES

digits = D.digits()

@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 60), size=st.integers(1, 70), epoch=st.integers(0, 5), seed=st.integers(-2**63, 2**64))
def test_an_epoch_is_every_example_once(n, size, epoch, seed):
    data = digits.subset(n, 0)
    batches = D.Batches(data, batch_size=size, shuffle=True, seed=seed)
    got = list(batches.epoch(epoch))
    assert len(got) == len(batches) and all(len(y) == size for _,y in got[:-1])
    x, y = map(torch.cat, zip(*got))
    key = lambda x, y: sorted(zip(x.flatten(1).tolist(), y.tolist()))
    assert key(x, y) == key(*next(iter(D.Batches(data, batch_size=10*n))))

@settings(max_examples=30, deadline=None)
@given(pad=st.integers(0, 5), h=st.integers(1, 7), w=st.integers(1, 7), n=st.integers(1, 5), data=st.data())
def test_crop_flip_pixel_by_pixel(pad, h, w, n, data):
    draw = lambda top: torch.tensor([data.draw(st.integers(0, top)) for _ in range(n)])
    x, top, left, flip = torch.randint(0, 256, (n, 2, h, w)).byte(), draw(2*pad), draw(2*pad), draw(1).bool()
    got = D.crop_flip(x, pad, top, left, flip)
    for i in range(n):
        for r in range(h):
            for c in range(w):
                row, col = r + int(top[i]) - pad, (w-1-c if flip[i] else c) + int(left[i]) - pad
                inside = 0 <= row < h and 0 <= col < w
                assert got[i, :, r, c].tolist() == (x[i, :, row, col].tolist() if inside else [0, 0])

@settings(max_examples=20, deadline=None)
@given(few=st.integers(1, 139), more=st.integers(0, 60), seed=st.integers(0, 2**64 - 1))
def test_subsets_are_balanced_and_nested(few, more, seed):
    small, large = digits.subset(few, seed), digits.subset(min(139, few + more), seed)
    assert torch.bincount(small.train.label).tolist() == [few]*10
    rows = lambda d: {x.numpy().tobytes() + bytes([y]) for x,y in zip(d.train.x, d.train.label)}
    assert rows(small) <= rows(large)

def unpacked(name): return (D.data_folder()/D.sources[name].folder).is_dir()

@pytest.mark.parametrize('name', D.sources)
def test_real_images(name):
    if not unpacked(name): pytest.skip(f'{name} is not unpacked in {D.data_folder()}')
    data, known = load(name), dict(mnist=([.1307], [.3081]), cifar10=([.4914, .4822, .4465], [.2470, .2435, .2616]),
                                   cifar100=([.5071, .4865, .4409], [.2673, .2564, .2762]),
                                   tiny_imagenet=([.4802, .4481, .3975], [.2770, .2691, .2821]))[name]
    tolerance = .003 if (len(data.train), len(data.test)) == data.full else .02
    for ours,theirs in zip((data.mean, data.std), known): assert (ours - torch.tensor(theirs)).abs().max() < tolerance
    if name != 'mnist': return
    assert torch.bincount(data.test.label).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert len(D.load_data('mnist_transform').train) == 10_000

# data and networks of one's own

def picture(i, size=(8, 8)): return Image.fromarray(np.random.default_rng(i).integers(0, 256, (*size, 3), np.uint8))
def pictures(n, size=(8, 8)): return [(picture(i, size), f'c{i % 3}') for i in range(n)]

def test_hugging_face_and_torch_datasets_give_the_same_data():
    datasets = pytest.importorskip('datasets')
    images, labels = zip(*pictures(15))
    numbers = [int(c[1]) for c in labels]
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=['c0', 'c1', 'c2']))
    split = datasets.Dataset.from_dict(dict(image=list(images), label=numbers), features=features)
    theirs = D.as_data(datasets.DatasetDict(train=split, test=split))
    ours = D.Data.from_dataset(pictures(15), pictures(15))
    assert theirs.fingerprint == ours.fingerprint and theirs.classes == ['c0', 'c1', 'c2']
    array = np.stack([np.asarray(i) for i in images]).transpose(0, 3, 1, 2)
    pair = array, torch.tensor(numbers)
    assert torch.equal(D.as_data((pair, pair)).train.x, ours.train.x)
    whole = torch.utils.data.TensorDataset(torch.from_numpy(array)/255, torch.tensor(numbers)) # as ToTensor has them
    assert torch.equal(D.as_data((whole, whole)).train.x, ours.train.x)

def test_fastai_loaders(tmp_path):
    from fastai.vision.all import ImageDataLoaders, Resize
    for i,(image, c) in enumerate(pictures(30, (9, 12))):
        (tmp_path/c).mkdir(exist_ok=True); image.save(tmp_path/c/f'{i}.png')
    dls = ImageDataLoaders.from_folder(tmp_path, valid_pct=.2, seed=0, item_tfms=Resize(8), bs=4, num_workers=0)
    data = D.as_data(dls, 'mine')
    assert data.classes == ['c0', 'c1', 'c2'] and data.input_size == (3, 8, 8) and (len(data.train), len(data.test)) == (24, 6)

def test_a_run_with_a_network_and_data_of_ones_own(tmp_path, monkeypatch):
    from phew_nb.experiments import Config, run, run_name
    for i,(image, c) in enumerate(pictures(30)):
        (tmp_path/'photos'/c).mkdir(parents=True, exist_ok=True); image.save(tmp_path/'photos'/c/f'{i}.png')
    (tmp_path/'mine.py').write_text('''
from torch import nn
from phew_nb.data import Data
def Net(n_out, n_in): return nn.Sequential(nn.Conv2d(n_in, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8*36, n_out))
def make(): return Data.from_folder('photos')
''')
    monkeypatch.chdir(tmp_path)
    here, made = (Config(data, 'mine.py:Net', 'phew', .3, epochs=1) for data in ('photos', 'mine.py:make'))
    a, b = run(here), run(made)
    assert a['fingerprint'] == b['fingerprint'] and a['loss'] == b['loss'] and run_name(here) != run_name(made)
    assert a['settings']['init'] == 'auto' and 'hidden' not in a['settings'] and 'image_size' not in a['settings']
    small = run(Config('photos', 'mine.py:Net', 'random', .3, epochs=1, image_size=8))
    assert small['fingerprint'] == a['fingerprint']
    picture(99).save(tmp_path/'photos'/'c0'/'99.png')
    from phew_nb import experiments
    experiments._load.cache_clear() # as in another process
    assert run(here)['fingerprint'] != a['fingerprint']

def test_a_network_of_ones_own_has_its_own_defaults(tmp_path, monkeypatch):
    "Of the settings that the networks here have, too; what is given is passed on, and is part of a run's name."
    from phew_nb.config import Config, run_name, settings
    from phew_nb.experiments import config_model
    (tmp_path/'mine.py').write_text('''
import numpy as np
from torch import nn
def Net(width=32, hidden=64, bn=True, init='mine'):
    net = nn.Flatten(); net.made_with = width, hidden, bn, init
    return net
def Usual(hidden, width=1, bn=False): return Net(width, hidden, bn)
def Seeded(seed=None): return One(seed)
def One(width=1):
    net = nn.Flatten(); net.made_with = width
    return net
def Odd(width=np.arange(3)): return One(width)
''')
    monkeypatch.chdir(tmp_path)
    def made(**how): return config_model(Config(**how), (1, 8, 8), 10).made_with
    own = Config(model='mine.py:Net')
    assert made(model='mine.py:Net') == (32, 64, True, 'mine') and settings(own)['init'] == 'auto'
    assert not {'hidden', 'bn', 'width'} & settings(own).keys()
    assert made(model='mine.py:Net', width=1, hidden=(5,), bn=False, init='normal') == (1, (5,), False, 'normal')
    assert len({run_name(Config(model='mine.py:Net', **how)) for how in ({}, dict(width=1), dict(bn=False))}) == 3
    one, two = (Config(model='mine.py:One', width=width) for width in (None, 2))
    assert config_model(one, (1, 8, 8), 10).made_with == 1 and run_name(one) != run_name(two) == run_name(replace(two, width=2.))
    assert isinstance(config_model(two, (1, 8, 8), 10).made_with, int) and 'array' in repr(made(model='mine.py:Odd'))
    a, b, c = (made(model='mine.py:Seeded', seed=seed) for seed in (0, 0, 1))
    assert isinstance(a, int) and a == b != c
    usual, (width, hidden, bn, init) = Config(model='mine.py:Usual'), made(model='mine.py:Usual')
    assert (hidden, width, bn) == ((100, 100), 1, False) and (usual.hidden, usual.width, usual.bn) == ((100, 100), None, False)

token_file = '''
import torch
from torch import nn
class Reader(nn.Module):
    def __init__(self, n_out, heads=1):
        super().__init__()
        self.embed, self.place, self.heads = nn.Embedding(30, 8), nn.Parameter(torch.zeros(6, 8)), heads
        self.body, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0., batch_first=True), nn.Linear(8, n_out)
    def forward(self, x):
        out = self.head(self.body(self.embed(x) + self.place).mean(1))
        return out if self.heads == 1 else (out,)*self.heads
def TwoHeads(n_out): return Reader(n_out, 2)
def Words(n_out): return nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, n_out))
def make():
    x = torch.randint(30, (60, 6), generator=torch.Generator().manual_seed(0))
    return (x[:40], x[:40, 0] % 3), (x[40:], x[40:, 0] % 3)
def odd_words():
    train, test = make()
    test[0][0, 0] = 30
    return train, test
def next_words(): return [(x, x) for x in make()[0][0]], None
'''

@pytest.fixture
def tokens(tmp_path, monkeypatch):
    (tmp_path/'mine.py').write_text(token_file)
    monkeypatch.chdir(tmp_path)
    return D.load_data('mine.py:make')

def test_whole_numbers_in_a_row_are_tokens(tokens):
    "They reach the network as they are; other numbers in a row are brought to mean 0 and deviation 1."
    assert repr(tokens) == 'mine.py:make: 40 training and 20 test sequences of 6 tokens, 3 classes'
    x, y = next(iter(D.Batches(tokens, batch_size=40)))
    assert torch.equal(x, tokens.train.x) and x.dtype == torch.int64 and torch.equal(y, x[:, 0] % 3)
    floats = D.as_data(tuple((split.x.double(), split.label) for split in (tokens.train, tokens.test)))
    assert repr(floats).startswith('own: 40 training and 20 test examples of 6 numbers')
    x, _ = next(iter(D.Batches(floats, batch_size=40)))
    assert x.mean(0).abs().max() < 1e-5 and (x.std(0, correction=0) - 1).abs().max() < 1e-5
    theirs = [dict(attention_mask=[1]*6, input_ids=x.tolist(), label=c) for x,c in zip(tokens.train.x, tokens.train.label)]
    assert torch.equal(D.as_data((theirs, theirs)).train.x, tokens.train.x)

@pytest.mark.parametrize('method', ['dense', 'phew', 'synflow', 'snip', 'ntk_sap', 'wanda', 'gmp'])
def test_a_run_with_tokens(tokens, method):
    from phew_nb.experiments import Config, run
    record = run(Config('mine.py:make', 'mine.py:Reader', method, 1 if method == 'dense' else .5, epochs=1))
    assert record['total'] == 30*8 + 3*8*8 + 8*8 + 2*8*16 + 8*3 == 776 and record['kept'] >= record['total']//2 and record['accuracy'] > 0

def test_networks_and_data_that_a_run_cannot_take_are_refused(tokens):
    from phew_nb.experiments import Config, run
    for model, data, said in (('mine.py:TwoHeads', 'mine.py:make', r'gives a tuple for a batch of 2, and a run needs a tensor \(2, 3\)'),
                              ('mine.py:Words', 'mine.py:make', r'gives a tensor \(2, 6, 3\) for a batch of 2'),
                              ('mlp', 'mine.py:make', 'mlp computes with numbers, and mine.py:make holds tokens'),
                              ('mine.py:Reader', 'mine.py:next_words', 'example 0 has 6 targets, and a class is one number')):
        with pytest.raises(ValueError, match=said): run(Config(data, model, 'phew', .5, epochs=1))
    with pytest.raises(ValueError, match=r'fails on examples of mine.py:odd_words \(its tokens go from 0 to 30\): IndexError'):
        run(Config('mine.py:odd_words', 'mine.py:Reader', 'phew', .5, epochs=1))
    for example, label, said in ((3, 0, 'example 0 is a single value'), (['a', 'word'], 0, 'example 0 is of the kind'),
                                 (torch.arange(3), None, 'example 0 has no class')):
        with pytest.raises(ValueError, match=said): D.Data.from_dataset([(example, label)]*10)
    with pytest.raises(ValueError, match='example 0 has none of image, .*, but a, b, label'):
        D.Data.from_dataset([dict(a=torch.arange(3), b=torch.arange(3), label=0)])
    with pytest.raises(ValueError, match='pad or cut all to one length'):
        D.Data.from_dataset([(torch.arange(n), 0) for n in (3, 4)])

@pytest.mark.parametrize('more', [['--input-size', '6'], ['--data', 'mine.py:make'], ['--data', 'mine.py:make', '--method', 'snip']])
def test_phew_prune_takes_networks_of_ones_own_that_read_tokens(tokens, more):
    from phew_nb.cli import phew_prune
    from phew_nb.masks import Masks
    assert phew_prune(['--model', 'mine.py:Reader', '--density', '0.5', '--out', 'masks.st', *more]) == 0
    masks = Masks.load('masks.st')
    assert 0 <= masks.kept - masks.total//2 < 8 # a walk takes up to seven

def test_classes_that_are_numbers():
    "They are named by their values, whole or not, and none is taken for the place of another."
    for values in ([1., 2., 3.], [3, 1, 2], [.5, 1., 1.5], [False, True]):
        data = D.Data.from_dataset([(torch.rand(4), v) for v in values*5], [(torch.rand(4), v) for v in values])
        assert [data.classes[i] for i in data.test.label] == list(map(str, values))
    by_place = D.Data.from_dataset([(torch.rand(4), i) for i in range(3)]*5, classes=list(np.array([3, 5, 7])))
    assert by_place.train.label.tolist()[:3] == [0, 1, 2] and by_place.classes == ['3', '5', '7'] # as fastai's vocab has them

def test_examples_that_do_not_fit_are_mapped_from_disk(monkeypatch):
    there = D.Data.from_dataset(pictures(15))
    monkeypatch.setattr(D, 'free_memory', lambda: 1000)
    with pytest.warns(UserWarning, match='read from disk, batch by batch'): mapped = D.Data.from_dataset(pictures(15))
    assert mapped.fingerprint == there.fingerprint

def made(train, test=None, **kwargs): return D.Data.from_dataset([(x, i % 2) for i,x in enumerate(train)], test and [(x, i % 2) for i,x in enumerate(test)], **kwargs)
def grey(*numbers): return [torch.full((1, 2, 2), float(n)) for n in numbers]

@pytest.mark.parametrize('train, test', [((0, 1), (0, .3)), ((.3, .7), (0, 1)), ((0, .2), (.2, .21)), ((0, 1), (0, 7))])
def test_both_splits_are_on_one_scale(train, test):
    "Exact fractions are bytes only where those of the other split are, too."
    data = made(grey(*train), grey(*test))
    assert data.train.x.dtype == data.test.x.dtype == torch.float32
    assert data.train.x[:, 0, 0, 0].tolist() == torch.tensor(train).tolist() and data.test.x[:, 0, 0, 0].tolist() == torch.tensor(test).tolist()
    both = made(grey(0, 1), grey(.2, 1))
    assert both.train.x.dtype == torch.uint8 and both.test.x.unique().tolist() == [51, 255]

def test_bytes_and_fractions_are_not_mixed():
    "On which scale they are together is not known."
    exact, zeros = grey(0, 1), [torch.zeros(1, 2, 2, dtype=t) for t in (torch.uint8, torch.bool)]
    whole = [torch.full((1, 2, 2), 200), torch.zeros(1, 2, 2).long()]
    for train, test in (zeros[:1]*2, exact), (exact, zeros[:1]*2), (zeros[:1]*2, zeros[1:]*2), (whole, exact), (exact, whole):
        with pytest.raises(ValueError, match='own: test examples have .* numbers, training examples .* all as bytes or all as fractions'): made(train, test)
    with pytest.raises(ValueError, match='own, training: example 1 has float32 numbers, those before it uint8'): made([zeros[0], *exact], exact)

def test_the_first_example_does_not_decide_for_all():
    rows = [[1, 2], [3, 4], [.5, 2.5], [5, 6]]
    assert made(rows, rows).train.x.tolist() == rows and not made(rows, rows).is_tokens
    images = [np.full((1, 2, 2), n, t) for n,t in ((200, np.uint8), (300, np.int16), (-1, np.int64), (2**31, np.uint32))]
    assert made(images, images).train.x[:, 0, 0, 0].tolist() == [200, 300, -1, 2**31]
    for kind in (np.uint16, np.int8, np.uint32, '>i4'):
        tokens = made([np.array([1, 2, 3], kind)]*2, [torch.tensor([1, 2, 40000])]*2)
        assert tokens.is_tokens and tokens.test.x.dtype == torch.int64 and tokens.test.x[0, 2] == 40000
    assert made([np.array([.1, .2], '>f4')]*2, [[.1, .2]]*2).train.x.dtype == torch.float32

def test_images_of_more_than_eight_bits(tmp_path):
    "What an image of bytes has becomes the same, whatever its depth; between bytes they are fractions."
    bytes_ = rng.integers(0, 256, (4, 6, 6), np.uint8)
    plain = made([Image.fromarray(b) for b in bytes_], [Image.fromarray(bytes_[0])]*2)
    wide = bytes_.astype(np.uint16)*257
    for c in 'ab': (tmp_path/c).mkdir()
    for mode, images in (('I;16', [Image.fromarray(w) for w in wide]), ('I', [Image.fromarray(w.astype(np.int32)) for w in wide]),
                         ('I;16B', [Image.frombytes('I;16B', (6, 6), w.astype('>u2').tobytes()) for w in wide]),
                         ('F', [Image.fromarray(b.astype(np.float32)/255) for b in bytes_])):
        assert images[0].mode == mode and made(images, images[:1]*2).fingerprint == plain.fingerprint
    deep = [Image.fromarray(rng.integers(0, 2**16, (6, 6), np.uint16)) for _ in range(10)]
    for i,image in enumerate(deep): image.save(tmp_path/'ab'[i % 2]/f'{i}.png')
    data = D.Data.from_folder(tmp_path)
    assert data.input_size == (1, 6, 6) and data.train.x.unique().numel() > 200 and 0 <= data.train.x.min() < .1 < .9 < data.train.x.max() <= 1
    assert D.Data.from_folder(tmp_path, size=3).input_size == (1, 3, 3)
    Image.fromarray(bytes_[0]).save(tmp_path/'b'/'last.png')
    with pytest.raises(ValueError, match='example 10 has uint8 numbers, those before it float32.*images of 16 or 32 bits are fractions'): D.Data.from_folder(tmp_path)

def labelled(*labels, **attributes):
    "A dataset of rows with these labels, and with attributes."
    class Rows(list): pass
    rows = Rows((torch.tensor([float(i), 1.]), label) for i,label in enumerate(labels))
    vars(rows).update(attributes)
    return rows

class Feature:
    def __init__(self, names=None): self.names = names

@pytest.mark.parametrize('attributes, names', [
    (dict(features={'speaker': Feature(['x', 'y', 'z']), 'label': Feature(['cat', 'dog', 'cow'])}), ['cat', 'dog', 'cow']),
    (dict(features={'speaker': Feature(['x', 'y', 'z']), 'label': Feature()}), ['0', '1', '2']),
    (dict(features=torch.rand(3, 2)), ['0', '1', '2']), (dict(features=['width', 'height']), ['0', '1', '2']), (dict(features=5), ['0', '1', '2']),
    (dict(vocab=['the', 'a', 'of', 'word']), ['0', '1', '2']), (dict(classes=3), ['0', '1', '2']), (dict(classes='cat'), ['0', '1', '2']),
    (dict(classes=np.array(['cat', 'dog', 'cow'])), ['cat', 'dog', 'cow']), (dict(classes={'dog': 1, 'cow': 2, 'cat': 0}), ['cat', 'dog', 'cow']),
    (dict(classes={1: 'dog', 2: 'cow', 0: 'cat'}), ['cat', 'dog', 'cow']), (dict(classes=['cat', 'dog']), ['0', '1', '2']),
    (dict(classes=torch.arange(3)), ['0', '1', '2']), (dict(classes=[['a'], ['b'], ['c']]), ['0', '1', '2']),
    (dict(classes=[]), ['0', '1', '2']), (dict(classes=None, features=None), ['0', '1', '2']),
])
def test_the_names_of_classes_are_those_that_fit(attributes, names):
    data = D.as_data((labelled(*[0, 1, 2]*5, **attributes), labelled(2, 0)))
    assert data.classes == names and data.train.label.tolist() == [0, 1, 2]*5 and data.test.label.tolist() == [2, 0]

def test_names_that_belong_to_numbers():
    rows, numbers = labelled(*[7, 3]*5), {'dog': 7, 'cat': 3}
    for classes in numbers, {v: k for k,v in numbers.items()}:
        data = D.Data.from_dataset(rows, classes=classes)
        assert data.classes == ['cat', 'dog'] and data.train.label.tolist() == [1, 0]*4
    for classes in 3, 'cat', [], {'cat': 'dog'}:
        with pytest.raises(TypeError, match='own: classes are names in the order of their numbers, or a dictionary .name: number.; got'): D.Data.from_dataset(rows, classes=classes)
    with pytest.raises(ValueError, match="own, training: example 0 is of class 7, and the classes are"): D.Data.from_dataset(rows, classes=['cat', 'dog'])
    unlabelled = labelled(*[0, 1]*5, -1, features={'label': Feature(['cat', 'dog'])})
    with pytest.raises(ValueError, match='own, training: example 10 is of class -1'): D.Data.from_dataset(unlabelled)

def test_the_words_of_a_text_are_no_classes():
    from types import SimpleNamespace
    items, same = [(torch.arange(4), 0), (torch.arange(4), 1)]*3, SimpleNamespace(after_item=lambda item: item)
    dls = SimpleNamespace(train_ds=items, valid_ds=items, valid=same, vocab=[['the', 'a', 'of'], ['bad', 'good']])
    assert D.as_data(dls).classes == ['bad', 'good']
    dls.vocab = None
    assert D.as_data(dls).classes == ['0', '1']

@pytest.mark.parametrize('labels, said', [
    ([0, 1, float('nan')], 'own, training: example 2 has no class, but nan: leave it out'), ([0, 1, {}], 'example 2 has no class, but {}'),
    ([1]*6, 'all training examples are of class 1; a network learns to tell two or more apart'),
    (['a', 1]*5, r'the classes are of several kinds \(int, str\): give all as words, or all as numbers'),
    ([i/7 for i in range(20)], '20 training examples have 20 different targets, as 2.71.*, and a run classifies. For other tasks: images as targets'),
    ([float(i % 30) for i in range(99)], '99 training examples have 30 different targets, as 29, and a run classifies'),
    ([0, [[1], [2, 3]]], 'example 1 has 2 targets, and a class is one number or one word .of a row with a single one, its place'),
    (['a', 'b', 'c'], 'own: there is one example of each class: give a test set')])
def test_labels_that_are_no_classes(labels, said):
    with pytest.raises(ValueError, match=said): D.Data.from_dataset(labelled(*labels))

def test_targets_that_training_lacks():
    with pytest.raises(ValueError, match='own, test: example 1 is of class 4.81, and the classes are 0.5, 1.5. For other tasks'):
        D.Data.from_dataset(labelled(*[.5, 1.5]*6), labelled(.5, 4.81))

def test_arrays_whose_lengths_differ():
    x, y = np.zeros((4, 3), np.float32), np.array([0, 1, 0])
    with pytest.raises(ValueError, match='own, test: there are 4 examples and 3 classes'): D.as_data(((x[:3], y), (x, y)))
    with pytest.raises(ValueError, match='own, training: there are 4 examples and 3 classes'): D.as_data(((x, [0, 1, 0]), None))

@pytest.mark.parametrize('number', [float('nan'), float('inf')])
def test_inputs_that_are_not_finite(number):
    with pytest.raises(ValueError, match='own, test: example 1 has numbers that are not finite'): made(grey(1, 2), grey(1, number))

def test_small_classes_have_a_test_example():
    labels = [0]*10 + [1]*5 + [2]*4 + [3]*2 + [4]
    with pytest.warns(UserWarning, match="own: there is one example, for training, and none to test of each of the classes '4'"):
        data = D.Data.from_dataset(labelled(*labels))
    assert torch.bincount(data.test.label).tolist() == [2, 1, 1, 1] and torch.bincount(data.train.label).tolist() == [8, 4, 3, 1, 1]

def test_empty_examples():
    with pytest.raises(ValueError, match='example 0 is empty'): D.Data.from_dataset([([], 0)])

def folders(path, *names):
    for name in names:
        for i,c in enumerate('ab'*2): save(path/name/c/f'{i}.png', (1, 4, 4))

@pytest.mark.parametrize('train, test', [('training', 'testing'), ('Train', 'Test'), ('train', 'validation'), ('TRAIN', 'Val'), ('train', 'valid')])
def test_folders_of_splits(tmp_path, train, test):
    folders(tmp_path, train, test)
    data = D.Data.from_folder(tmp_path)
    assert data.classes == ['a', 'b'] and (len(data.train), len(data.test)) == (4, 4)

def test_which_split_is_taken(tmp_path):
    folders(tmp_path, 'train', 'valid', 'test', 'more')
    save(tmp_path/'test'/'a'/'9.png', (1, 4, 4))
    with pytest.warns(UserWarning, match="'train', 'test' are taken, 'more', 'valid' left out"): assert len(D.Data.from_folder(tmp_path).test) == 5
    rows = labelled(*[0, 1]*5)
    with pytest.warns(UserWarning, match="own: 'Train', 'test' are taken, 'validation' left out"):
        assert len(D.as_data(dict(validation=rows[:2], Train=rows, test=rows[:4])).test) == 4
    assert len(D.as_data(dict(train=rows)).test) == 2

@pytest.mark.parametrize('names, said', [
    (('test', 'valid'), "has 'test', 'valid', and of 'train' one is wanted"), (('a', 'b', 'test'), "has 'test', and of 'train' one is wanted"),
    (('train', 'training', 'test'), "has 'train', 'training', and of 'train' one is wanted"), (('Train', 'b'), "has a folder 'Train', and no 'test' or 'valid'"),
    (('all/training', 'all/testing'), "'all' is no class, since it holds 'test"), (('a/train', 'a/test', 'b/train', 'b/test'), "'a' is no class, since it holds 'test'")])
def test_splits_are_not_read_as_classes(tmp_path, names, said):
    folders(tmp_path, *names)
    with pytest.raises(ValueError, match=said): D.Data.from_folder(tmp_path)

def test_grey_and_colour_images(tmp_path):
    "The grey ones get three equal channels, whichever come first, in either split."
    color, gray = [picture(i) for i in range(4)], [picture(i).convert('L') for i in range(4, 8)]
    said = 'own, training: some images are grey and some in colour; the grey ones get three equal channels'
    for images in color + gray, gray + color, [i for pair in zip(gray, color) for i in pair]:
        with pytest.warns(UserWarning, match=said): data = made(images, images)
        for i,image in enumerate(images): assert (data.train.x[i].numpy() == np.asarray(image.convert('RGB')).transpose(2, 0, 1)).all()
    for train, test in (gray, color), (color, gray):
        with pytest.warns(UserWarning, match='own: some images are grey'): data = made(train, test)
        assert data.input_size == (3, 8, 8) and torch.equal(data.test.x, made(color + test, test).test.x)
    with pytest.raises(ValueError, match='give a size'): made([*gray, picture(1, (5, 5))])

class Unsized(torch.utils.data.Dataset):
    def __getitem__(self, i): return torch.rand(3), i % 2

class Stream(torch.utils.data.IterableDataset):
    def __len__(self): return 4
    def __iter__(self): yield from labelled(0, 1, 0, 1)

def test_what_is_no_dataset():
    import pandas as pd
    rows = labelled(*[0, 1]*5)
    loader, table = torch.utils.data.DataLoader(rows), pd.DataFrame(dict(a=[.5]*10, b=[1.]*10, c=[0, 1]*5))
    for found, said in ((loader, 'own, training is a DataLoader: give its dataset, loader.dataset'), (Unsized(), r'is a Unsized: give list\(...\) of it'),
                        (Stream(), r'is a Stream: give list\(...\) of it'), (iter(rows), r'is a list_iterator: give list\(...\) of it'),
                        (table, r'is a DataFrame: give \(X, y\), examples and classes'), (np.zeros((4, 3)), r'is a ndarray: give \(X, y\)'),
                        (dict(x=[1], y=[1]), 'is a dict: give pairs')):
        with pytest.raises(TypeError, match=said): D.Data.from_dataset(found)
    with pytest.raises(TypeError, match='own, test is a DataLoader'): D.as_data((rows, loader))
    columns = table[['a', 'b']], table.c
    for found, said in ((columns, r'own gives \(X, y\), and not \(train, test\)'), ((torch.rand(4, 3), [0, 1, 0, 1]), r'own gives \(X, y\)'),
                        ((rows, rows, rows), 'own gives a tuple of 3; it takes a Data'), (loader, r'own gives a DataLoader; .* of one dataset \(dataset, None\)')):
        with pytest.raises(TypeError, match=said): D.as_data(found)
    shuffled = columns[0], columns[1].sample(frac=1, random_state=0)
    data = D.as_data((shuffled, columns))
    assert data.train.x.shape == (10, 2) and data.train.label.tolist() == shuffled[1].tolist() and data.test.label.tolist() == [0, 1]*5

@pytest.mark.parametrize('example, said', [
    ((torch.rand(1, 3, 4, 4), torch.tensor([1])), 'own, training: example 1 looks like a batch of 1: give the examples one by one'),
    ((torch.rand(5, 3, 4, 4), torch.zeros(5)), 'looks like a batch of 5'), ((torch.rand(1, 3), torch.tensor([1])), r'example 1 has the shape \(1, 1, 3\)'),
    (((torch.rand(3), torch.rand(3)), 1), 'example 1 has 2 inputs, and a run gives a network one'), ((dict(ids=[1], mask=[1]), 1), 'example 1 has 2 inputs'),
    (([[1, 2], [3]], 1), 'example 1 cannot be made an array'), ((torch.rand(3, device='meta'), 1), 'example 1 cannot be made an array'), (torch.rand(3, 4), 'example 1 is a Tensor, and no pair'), (5, 'example 1 is a int, and no pair'),
    (('word',), 'example 1 is a tuple, and no pair')])
def test_what_is_no_example(example, said):
    with pytest.raises(ValueError, match=said): D.Data.from_dataset([(torch.rand(3), 0), example, (torch.rand(3), 1)])

def test_examples_of_any_kind_of_tensor():
    x = torch.tensor([[1., 0., .25]]).repeat(4, 1)
    for kind in (x.bfloat16(), x.clone().requires_grad_(), x.to_sparse(), x.half(), x.double()):
        data = made([row.to_dense().view(1, 1, 3) if i % 2 else row.view(1, 1, 3) if not row.is_sparse else row.to_dense().view(1, 1, 3).to_sparse()
                     for i,row in enumerate(kind)], [*x.view(4, 1, 1, 3)])
        assert torch.equal(data.train.x.flatten(1), x)
    assert D.Data.from_dataset([(row, torch.tensor([i % 2])) for i,row in enumerate(x)]*5).classes == ['0', '1']

@pytest.mark.parametrize('size', [0, -1, (8, 8), 2.5, True, '8'])
def test_sizes_are_whole_numbers(size):
    with pytest.raises(ValueError, match='own, training: size is how many pixels the side of a square has'): D.Data.from_dataset(pictures(10), size=size)

def test_a_size_that_would_change_nothing():
    with pytest.raises(ValueError, match='example 0 is no PIL image, and only those are cut to a size .2.'): made([torch.rand(1, 4, 4)]*4, size=2)
    assert made([torch.rand(1, 4, 4)]*4, size=4).input_size == (1, 4, 4)
    with pytest.raises(ValueError, match='mine is a Data already, and its images are not cut to a size .4.'): D.as_data(digits, 'mine', 4)

def test_links_that_lead_nowhere(tmp_path):
    folders(tmp_path/'data', '.')
    (tmp_path/'data'/'a'/'again').symlink_to(tmp_path/'data'/'a')
    with pytest.raises(ValueError, match="'again' cannot be read .* a link that leads nowhere or back"): D.Data.from_folder(tmp_path/'data')
    (tmp_path/'data'/'a'/'again').unlink()
    (tmp_path/'data'/'a'/'gone.png').symlink_to(tmp_path/'gone.png')
    with pytest.raises(ValueError, match="'gone.png' cannot be read"): D.Data.from_folder(tmp_path/'data')

def test_a_dataset_that_fails_says_where():
    class Fails(list):
        def __getitem__(self, i): return super().__getitem__(i) if i < 3 else {}['key']
    rows = labelled(*[0, 1]*5)
    with pytest.raises(ValueError, match="own, test: example 3 cannot be read: KeyError: 'key'") as failed: D.as_data((rows, Fails(rows)))
    assert isinstance(failed.value.__cause__, KeyError)

@pytest.mark.parametrize('shape', [(1, 50), (1, 6, 5, 5)], ids=['sound of one channel', 'volumes of one channel'])
def test_one_channel_and_a_row_with_one_label_are_no_batch(shape):
    data = D.Data.from_dataset(torch.utils.data.TensorDataset(torch.randn(20, *shape), (torch.arange(20) % 2)[:, None]))
    assert data.train.x.shape[-len(shape) + 1:] == shape[1:] and data.classes == ['0', '1']

@pytest.mark.parametrize('names', [('invalid', 'valid'), ('pass', 'test'), ('bus', 'car', 'train')])
def test_classes_that_are_called_as_splits_are(tmp_path, names):
    for name, i in itertools.product(names, range(6)):
        (tmp_path/name).mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), 40*i, np.uint8)).save(tmp_path/name/f'{i}.png')
    assert D.Data.from_folder(tmp_path).classes == list(names)

def test_tables_of_numbers_of_several_kinds():
    pd = pytest.importorskip('pandas')
    table = pd.get_dummies(pd.DataFrame(dict(age=np.random.default_rng(0).random(20), city=['x', 'y']*10)))
    assert D.Data.from_dataset((table, pd.Series(list('ab')*10))).train.x.shape == (16, 3)
    with pytest.raises(ValueError, match='example 0 is of the kind object'):
        D.Data.from_dataset((table.assign(city='x'), pd.Series(list('ab')*10)))
