"The reference: every public name says what it is, what it takes and gives, and is used in a notebook; `help` tells all of it."
import importlib, inspect, json, re, subprocess, sys
from pathlib import Path

import pytest
from fastcore.docments import docments

root = Path(__file__).resolve().parent.parent
notebooks = sorted((root/'nbs').glob('[0-9][0-9]_*.ipynb'))
skip = 'self', 'cls', 'return'
# where arguments are called alike in every row of a table, and the head of the notebook says what they are
alike = '11_numbers', '12_units', '13_rules', '14_operations', '15_tape', '16_computed', '17_tracer'

def cells(path): return [''.join(c['source']) for c in json.loads(path.read_text(encoding='utf-8'))['cells']]

exported = [s for p in notebooks for s in cells(p) if s.startswith('#| export')]

def words(texts): return set(re.findall(r'\w+', '\n'.join(texts)))

def shown():
    "All names beside the exported code: in cells of notebooks, and in tests."
    texts = [s for p in (root/'nbs').rglob('[!._]*.ipynb') for s in cells(p) if not s.startswith('#| export')]
    return words(texts) | words(p.read_text(encoding='utf-8') for p in (root/'tests').glob('*.py') if p.name != 'test_api.py')

def asked_for(name):
    "Does exported code use a name, beyond its definition? A helper shows its use there."
    return sum(len(re.findall(rf'\b{name}\b', s)) for s in exported) > 1

def public(path):
    "(name, function or class) that a notebook's module defines and hands out."
    module = importlib.import_module(f'phew_nb.{path.stem[3:]}')
    for name in module.__all__:
        it = getattr(module, name)
        if (inspect.isfunction(it) or inspect.isclass(it)) and it.__module__ == module.__name__: yield name, it

def undocumented(f):
    "The arguments of a function that no comment is on."
    source = inspect.getsource(f)
    rest = {name for name in inspect.signature(f).parameters if re.search(rf'\*{name}\b.*# ', source)} # (missed by docments)
    return [name for name, said in docments(f).items() if not said and name not in skip and name not in rest]

@pytest.mark.parametrize('path', notebooks, ids=lambda p: p.stem)
def test_every_public_name_has_its_docstring(path):
    without = [name for name, it in public(path) if not (inspect.getdoc(it) or '').split('\n')[0].strip() or
               (inspect.isclass(it) and it.__doc__.startswith(f'{name}('))]
    assert not without, f'no docstring: {", ".join(without)}'

@pytest.mark.parametrize('path', [p for p in notebooks if p.stem not in alike], ids=lambda p: p.stem)
def test_every_public_argument_has_its_comment(path):
    found = {name: undocumented(it) for name, it in public(path) if inspect.isfunction(it)}
    few = {name: args for name, args in found.items() if args}
    assert not few, f'arguments without a comment: {few}'

def test_every_public_name_is_shown_or_used():
    seen = shown()
    unused = [f'{path.stem}: {name}' for path in notebooks for name, _ in public(path) if name not in seen and not asked_for(name)]
    assert not unused, unused

def test_help_tells_what_the_notebook_tells():
    code = 'from phew_nb.walks import phew; from phew_nb.masks import Masks; help(phew); help(Masks.load); help(Masks.save)'
    said = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True).stdout
    for words in ('power: float', 'drawn by |w|^power', 'out of reach', 'file written by `save`', 'nothing half-written left'):
        assert words in said, words

def test_no_signature_shows_an_address_or_a_table():
    for path in notebooks:
        for name, it in public(path):
            try: text = str(inspect.signature(it))
            except (TypeError, ValueError): continue
            assert 'object at 0x' not in text and len(re.sub(r'-> .*', '', text)) < 900, f'{name}{text}'

# what version 0.1.0 offered (less `phew_pruning` and the parsers of its commands)
first = """
cli: known usual_sizes name_list number whole several seeds check_folder check_file at_the_door notes compare_configs show_results phew_compare
    load_weights pruned phew_prune
data: no_augments sources datasets Arrays Data channel_stats digits Source data_folder source_folder list_files labelled_files class_names read_image
    decode fingerprint checksum write_cache read_cache image_data rotate_shear transform_images transformation load_data crop_flip Batches
    pruning_batches
experiments: purposes methods need_training need_data records_file stream auto_recipe Config settings run_name config_data config_model config_size
    loss_of config_loaders config_batches config_masks measures both_measures train threads run append_line read_records grid report_failure sweep
    load_results
export: sparse_state dense_state export_onnx compact
flow: Scaled check_masks Flow path_flow exact_count exact_counts Report linearised
graph: like Layer Junction TraceError PathGraph trace as_graph
iterative: gmp_iterations all_pruners StartAt Remember cubic_steps gradual_magnitude ticket_steps lottery
masks: n_kept Masks unwrapped write_bytes
metrics: path_trace path_sum count_paths Width widths layer_densities effective_density flops Table summary compare Paths list_paths path_kernel
    tangents ntk data_jacobian
models: inits models as_generator look_up fans draw_weights init_weights initialized mlp vgg19 PadShortcut ResBlock resnet resnet20 resnet18
    make_model layer_weights
plots: palette column look style styled panels as_table over_seeds tasks plot_accuracy plot_trace unit_means plot_widths power10 results_table
    save_figure
pruners: pruners prune
rewire: reinits shuffle survivors widen kept_fan_in reinit
scores: kth_largest highest apportion top_k plot_scores random_scores random_pruning uniform_pruning erk_counts erk magnitude_scores magnitude scoring
    default_loss snip_scores snip steps_down iter_snip grasp_scores grasp
synflow: synflow synflow_l2
training: recipes optimizers Recipe as_code find_recipe opt_func ArraySet ArrayDL data_loaders RecipeSchedule check_ranks KeepMasks StopIfNotFinite
    EpochRecord quiet history SparseLearner deterministic ShardDL Shards Amp sparse_learner Checkpoint
walks: uniforms walk_keys draw_paths expected_walks expected_visits WalkOrder walk_order phew
"""

@pytest.mark.parametrize('line', first.replace('\n    ', ' ').strip().splitlines(), ids=lambda line: line.split(':')[0])
def test_names_of_the_first_version_are_where_they_were(line):
    module, names = line.split(': ')
    there = importlib.import_module(f'phew_nb.{module}')
    assert [n for n in names.split() if not hasattr(there, n)] == []
