"Every run of the tests is the same run: every test begins with the same random states, hypothesis draws the same examples, and one thread computes."
import multiprocessing, os, random
os.environ.setdefault('MPLBACKEND', 'Agg')
os.environ.setdefault('OMP_NUM_THREADS', '1') # of the processes that tests start

import numpy as np, pytest, torch
from hypothesis import register_random, settings

settings.register_profile('same', derandomize=True, deadline=None)
settings.register_profile('explore', deadline=None, max_examples=300) # pytest --hypothesis-profile=explore
settings.load_profile('same')
torch.set_num_threads(1)

class Torch:
    "PyTorch's random numbers, which hypothesis then seeds before every example, as it does Python's and NumPy's."
    seed, getstate, setstate = staticmethod(torch.manual_seed), staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)

register_random(torch_random := Torch()) # hypothesis holds it by a weak reference

def seed():
    for f in (random.seed, np.random.seed, torch.manual_seed): f(0)

@pytest.fixture(autouse=True)
def seeded():
    "A test does not depend on those that ran before it in its process."
    seed()

@pytest.fixture(scope='session')
def processes():
    "Where processes come from: forks of one that has imported what takes long, or new ones where there are none."
    if 'forkserver' not in multiprocessing.get_all_start_methods(): return multiprocessing.get_context('spawn')
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['phew_nb.training', 'phew_nb.data', 'phew_nb.models', 'fastai.distributed'])
    return context

@pytest.fixture(scope='session')
def compiler():
    "Skips a test where torch.compile finds no compiler that works."
    try: torch.compile(lambda t: t.sin() + 1)(torch.zeros(3))
    except Exception as e: pytest.skip(f'no compiler works here: {e}')

def pytest_fixture_setup(fixturedef, request):
    "Nor does what tests share on which of them asks first."
    if fixturedef.scope != 'function': seed()

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    "`pytest -n auto` takes every core that this process may use, hyper-threads too."
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
