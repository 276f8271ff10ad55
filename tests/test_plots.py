"Figures and tables, from records as users have them."
import itertools, subprocess, sys
from pathlib import Path

import pytest

from phew_nb.looks import look, palette
from phew_nb.plots import (plot_accuracy, results_table, save_figure)
import tex

def own(methods=('dense', 'phew', 'mine'), densities=(.05, .1), seeds=(0, 1), **more):
    "Records with the four columns that a record needs."
    each = dict.fromkeys((m, 1. if m == 'dense' else d, s) for m,d,s in itertools.product(methods, densities, seeds))
    return [dict(method=m, density=d, seed=s, accuracy=(.5 + d + .01*s)/2, **more) for m,d,s in each]

hostile = ['_mine', '$x', r'a$\frac$b', '100%', 'a_b & {c} #1 ~ ^', '<script>alert(1)</script>', 'é±ü', 'new\nline', '\\']

def tex_of(names): return results_table([r for name in names for r in own((name,))]).to_latex(caption='All of them', label='t:all')

def test_latex_compiles(tmp_path): tex.check(tex_of(hostile), tmp_path)

def test_the_table_of_the_first_command_compiles(tmp_path):
    tex.check(results_table(Path(__file__).parent.parent/'results'/'digits').to_latex(), tmp_path)

row = r'\begin{tabular}{lr} a & b \\ c & 1\% \\ \end{tabular}'
@pytest.mark.parametrize('old, new, words', [('c & 1', 'c & 1 & 2', '2 columns'), ('c & 1', 'c & $1', 'dollar'), (r'\%', '%', 'bare %'),
                                             (r'\end{tabular}', r'\end{table}', 'environments'), ('c & 1', 'c & {1', 'braces'), ('', '', '')])
def test_what_is_wrong_with_a_table_is_seen_without_latex(old, new, words):
    found = ' '.join(tex.faults(row.replace(old, new) if old else row))
    assert words in found if words else not found

def test_files_are_what_their_ending_says(tmp_path):
    fig = plot_accuracy(own())
    for name,start in ('a.png', b'\x89PNG'), ('a.pdf', b'%PDF'), ('a.svg', b'<?xml'):
        assert save_figure(fig, tmp_path/name).read_bytes().startswith(start)
    for name in 'a.jpg', 'a':
        with pytest.raises(ValueError, match='.png, .pdf or .svg'): save_figure(fig, tmp_path/name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['a.pdf', 'a.png', 'a.svg']

def test_every_method_has_a_look_of_its_own():
    from phew_nb.iterative import all_pruners
    looks = {name: tuple(look(name).values()) for name in {*palette, *all_pruners}}
    assert len(set(looks.values())) == len(looks)

def test_looks_need_no_matplotlib():
    code = "import sys, phew_nb.looks; phew_nb.looks.look('phew'); print([m for m in ('matplotlib', 'numpy', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'
