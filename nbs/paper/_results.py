"""Records of training, as the paper notebooks compare them: the same seeds side by side, and nothing is said below the 5% value of
Student's t (`phew_nb.paired`), nor below three seeds.

    runs = Runs('../../results/transformation', 'experiments/transformation.toml')
    runs.state                                           # '13 of 504 runs of the grid'
    runs.of('mse', method='phew', density=.05)           # {seed: value}
    paired(runs.of(...), runs.of(...))                   # of phew_nb.paired: n, mean and standard error of the difference

Of mixed cases a statement 'holds under conditions' where it holds in half of them or more, and 'fails' below (see `most`).
"""
import math

import numpy as np
from phew_nb.config import run_name
from phew_nb.paired import apart, reach
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

def most(cases):
    "A verdict on truth values: in all cases, in half of them or more, in fewer; undecided where there are none."
    cases = list(cases)
    return OPEN if not cases else HOLDS if all(cases) else DEPENDS if 2*sum(cases) >= len(cases) else FAILS

def decided(signs):
    "A verdict on signs: those that are zero say nothing."
    said = [v > 0 for v in signs if v]
    return DEPENDS if most(said) == HOLDS and len(said) < len(signs) else most(said)

def reduced(verdict):
    "The verdict of runs that do not have the paper's size."
    return DEPENDS if verdict == HOLDS else verdict

def ahead(differences):
    "A verdict on 'a is above b', of paired differences."
    return decided([apart(d) for d in differences])

def alike(differences, margin=.02, both=False):
    """A verdict on 'a is no worse than b' (with `both`, nor better): a difference is none where its 95% confidence interval lies
    within the margin, and one where the interval leaves out zero; what is neither says nothing."""
    def sign(d):
        low, high = d[1] - reach(d), d[1] + reach(d)
        if low > -margin and (high < margin or not both): return 1
        return -1 if high < 0 or both and low > 0 else 0
    return decided([sign(d) for d in differences])

def written(values, percent=True, digits=1):
    "Mean ± standard deviation of a dict of seeds, and their number."
    v = np.array(list(values.values()))*(100 if percent else 1)
    if not len(v): return '-'
    unit = '%' if percent else ''
    return f'{v.mean():.{digits}f}{unit}' + (f' ± {v.std(ddof=1):.{digits}f}' if len(v) > 1 else '') + f' (n={len(v)})'

def points(difference, scale=100, digits=1, count=True):
    "A paired difference as text, with its standard error where there is one, and whether it is apart from none."
    n, mean, error = difference
    if not n: return 'not run'
    notes = [f'n={n}']*count + ['not apart']*(n > 2 and not apart(difference))
    text = f'{scale*mean:+.{digits}f}' + (f' ± {scale*error:.{digits}f}' if math.isfinite(error) else '')
    return text + (f" ({', '.join(notes)})" if notes else '')
