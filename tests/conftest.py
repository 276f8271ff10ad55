"Every run of the tests is the same run: hypothesis draws the same examples, and one thread computes."
import os
os.environ.setdefault('MPLBACKEND', 'Agg')
os.environ.setdefault('OMP_NUM_THREADS', '1') # of the processes that tests start

import torch
from hypothesis import settings

settings.register_profile('same', derandomize=True, deadline=None)
settings.register_profile('explore', deadline=None, max_examples=300) # pytest --hypothesis-profile=explore
settings.load_profile('same')
torch.set_num_threads(1)

def pytest_xdist_auto_num_workers(config):
    "`pytest -n auto` takes every core that this process may use, hyper-threads too."
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
