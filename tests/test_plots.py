"Figures and tables, from records as users have them."
import itertools, math, re, subprocess, sys
from pathlib import Path

import numpy as np, pandas as pd, pytest

from phew_nb.looks import look, palette
from phew_nb.plots import (as_table, plot_accuracy, plot_curves, plot_trace, plot_widths, results_table, save_figure, tasks)
import tex

def own(methods=('dense', 'phew', 'mine'), densities=(.05, .1), seeds=(0, 1), **more):
    "Records with the four columns that a record needs."
    each = dict.fromkeys((m, 1. if m == 'dense' else d, s) for m,d,s in itertools.product(methods, densities, seeds))
    return [dict(method=m, density=d, seed=s, accuracy=(.5 + d + .01*s)/2, **more) for m,d,s in each]

@pytest.mark.parametrize('as_given', [list, pd.DataFrame, lambda records: pd.DataFrame(records).sample(frac=1, random_state=0)])
def test_four_columns_are_enough(as_given):
    records = as_given(own())
    table = results_table(records, numeric=True)
    assert list(table) == ['method', 'density', 'accuracy', 'accuracy_std', 'seeds'] and len(table) == 5
    assert set(table.seeds) == {2} and np.allclose(2*table.accuracy, .5 + table.density + .005)
    assert np.allclose(table.accuracy_std, .005/math.sqrt(2))
    assert list(results_table(records)) == ['method', 'density', 'accuracy %', 'seeds']
    fig = plot_accuracy(records)
    assert [t.get_text() for t in fig.legends[0].get_texts()] == list(dict.fromkeys(as_table(records).method))

@pytest.mark.parametrize('draw, name', [(plot_trace, 'log10_trace'), (plot_widths, 'widths'), (plot_curves, 'curve')])
def test_a_figure_names_what_it_lacks(draw, name):
    with pytest.raises(ValueError, match=f"none of the records has '{name}'"): draw(own())

@pytest.mark.parametrize('records, words', [
    ([], 'no run has finished'),
    ([{}], "no 'method'"),
    ([dict(method='phew')], "no 'density'"),
    ([dict(method='phew', density=2, accuracy=.5)], 'density is the fraction of weights kept'),
    ([dict(method='phew', density='x', accuracy=.5)], "record 0 has 'x'"),
    ([dict(method='phew', density=.1, accuracy=.5), dict(method='phew', density=.1, accuracy=97)], 'record 1 has')])
def test_records_that_are_none(records, words):
    with pytest.raises(ValueError, match=re.escape(words)): results_table(records)

def test_data_sets_of_one_name_are_never_averaged():
    "Not by their fingerprint, not by the shape of the network, not by the recipe; and options are other lines."
    a, b = own(data='pets', model='net', fingerprint='3fa2'), own(data='pets', model='net', fingerprint='81cc')
    assert list(tasks(as_table(a + b))) == ['net on pets, fingerprint 3fa2', 'net on pets, fingerprint 81cc']
    assert set(results_table(a + b, numeric=True).seeds) == {2} and len(plot_accuracy(a + b).axes) == 2
    unknown = [{k: v for k,v in r.items() if k != 'fingerprint'} for r in a]
    assert len(tasks(as_table(a + unknown))) == 2
    longer = own(settings=dict(recipe=dict(epochs=160))) + own(settings=dict(recipe=dict(epochs=2)))
    assert list(tasks(as_table(longer))) == ['epochs 160', 'epochs 2']
    options = own(settings=dict(options={})) + own(settings=dict(options=dict(power=3)))
    assert 'phew (power 3)' in set(results_table(options).method)

def test_one_data_set_is_one_task():
    "Dense runs have no options and see no pruning set, and belong to the others all the same."
    runs = own(('phew',), settings=dict(options={}, prune_per_class=10, width=1.)) + own(('dense',), settings=dict(width=1.))
    assert len(tasks(as_table(runs))) == 1 and set(results_table(runs).method) == {'phew', 'dense'}

hostile = ['_mine', '$x', r'a$\frac$b', '100%', 'a_b & {c} #1 ~ ^', '<script>alert(1)</script>', 'é±ü', 'new\nline', '\\']

@pytest.mark.parametrize('name', hostile)
def test_names_are_shown_letter_by_letter(tmp_path, name):
    records = own((name, 'phew'), data=name, model=name)
    for suffix in 'png', 'svg': save_figure(plot_accuracy(records), tmp_path/f'x.{suffix}')
    assert len(plot_accuracy(records).legends[0].get_texts()) == 2
    assert name in list(results_table(records).method)

def tex_of(names): return results_table([r for name in names for r in own((name,))]).to_latex(caption='All of them', label='t:all')

def test_latex_has_a_row_a_line_and_no_bare_sign():
    text = tex_of(hostile)
    body = text[text.index(r'\midrule') + 8:text.index(r'\bottomrule')].strip().splitlines()
    assert len(body) == 2*len(hostile) and all(re.fullmatch(r'.*\\\\', row) for row in body)
    for row in body: assert len(re.findall(r'(?<!\\)&', row)) == 3 and not re.search(r'(?<!\\)[%#]', row), row

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
