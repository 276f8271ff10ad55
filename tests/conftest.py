"Every run of the tests is the same run: hypothesis draws the same examples, and one thread computes."
import os
os.environ.setdefault('MPLBACKEND', 'Agg')

import torch
from hypothesis import settings

settings.register_profile('same', derandomize=True, deadline=None)
settings.register_profile('explore', deadline=None, max_examples=300) # pytest --hypothesis-profile=explore
settings.load_profile('same')
torch.set_num_threads(1)
