"""Records of training, as the paper notebooks compare them: the same seeds side by side, two standard errors before anything is said.

    runs = Runs('../../results/transformation', 'experiments/transformation.toml')
    runs.state                                           # '13 of 504 runs of the grid'
    runs.of('mse', method='phew', density=.05)           # {seed: value}
    paired(a, b)                                         # n, mean and standard error of a - b over the seeds of both
"""
import math
from collections import Counter

import numpy as np
from phew_nb.config import run_name
from phew_nb.store import read_records
from phew_nb.sweep import read_grid
from _claims import VERDICTS
from _runs import root

HOLDS, DEPENDS, FAILS, OPEN = VERDICTS

def flat(record):
    "A record with its settings beside its measures; lists as tuples."
    both = dict(rewire='as pruned', reinit='as drawn', init='kaiming_normal') | record.get('settings', {}) | record
    return {k: tuple(v) if isinstance(v, list) else v for k, v in both.items()}

class Runs:
    "The records of a folder, and how many of a grid they are."
    def __init__(self, folder, grid=None):
        self.records = [flat(r) for r in read_records(folder)]
        self.wanted = {run_name(c) for c in read_grid(root/grid)} if grid else set()

    @property
    def state(self):
        "How many runs of the grid are there, in words."
        done = len(self.wanted & {r['run'] for r in self.records})
        return f'{done} of {len(self.wanted)} runs of the grid' + ' (partial)'*(done < len(self.wanted))

    def of(self, measure, **what):
        "seed -> value of a measure (a name, or a function of the record), for the runs that have these settings."
        value = measure if callable(measure) else lambda r: r[measure]
        return {r['seed']: value(r) for r in sorted(self.records, key=lambda r: r['seed'])
                if all(r.get(k) == v for k, v in what.items())}

    def values(self, setting): return sorted({r[setting] for r in self.records if r['method'] != 'dense' or setting != 'density'}, reverse=True)

def paired(a, b):
    "Number of common seeds, mean difference a - b and its standard error (infinite below three seeds)."
    d = np.array([a[s] - b[s] for s in a if s in b])
    return len(d), float(d.mean()) if len(d) else math.nan, float(d.std(ddof=1)/len(d)**.5) if len(d) > 2 else math.inf

def apart(difference):
    "1 or -1 where a paired difference is more than two standard errors from zero, else 0."
    n, mean, error = difference
    return int(np.sign(mean))*(abs(mean) > 2*error) if n else 0

def ahead(differences):
    "A verdict on 'a is above b', of paired differences: only those that are apart say something."
    said = Counter(map(apart, differences))
    if not said[1] and not said[-1]: return OPEN
    if not said[-1]: return HOLDS if not said[0] else DEPENDS
    return FAILS if not said[1] else DEPENDS

def alike(differences):
    "A verdict on 'a is no worse than b': it fails where a is below b by more than two standard errors."
    enough = [d for d in differences if d[0] > 2]
    if not enough: return OPEN
    below = sum(apart(d) < 0 for d in enough)
    return HOLDS if not below else FAILS if below == len(enough) else DEPENDS

def written(values, percent=True, digits=1):
    "Mean ± standard deviation of a dict of seeds, and their number."
    v = np.array(list(values.values()))*(100 if percent else 1)
    if not len(v): return '-'
    unit = '%' if percent else ''
    return f'{v.mean():.{digits}f}{unit}' + (f' ± {v.std(ddof=1):.{digits}f}' if len(v) > 1 else '') + f' (n={len(v)})'

def points(difference, scale=100, digits=1):
    "A paired difference as text, with its standard error where there is one."
    n, mean, error = difference
    if not n: return 'not run'
    return f'{scale*mean:+.{digits}f}' + (f' ± {scale*error:.{digits}f}' if math.isfinite(error) else '') + f' (n={n})'
