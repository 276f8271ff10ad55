"Types: pyright finds nothing new, and sees what `@patch` adds to classes."
import importlib.util, shutil, subprocess, sys
from pathlib import Path

import pytest

root = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location('stubs', root/'tools'/'stubs.py')
stubs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stubs)
needs_pyright = pytest.mark.skipif(not shutil.which('pyright'), reason='no pyright')

@needs_pyright
def test_pyright_finds_nothing_new():
    found = stubs.check()
    assert not found, '\n'.join(found)

program = '''
from phew_nb.masks import Masks
def use(masks: Masks) -> tuple[int, float, str, Masks]:
    reveal_type(masks.kept); masks.nothing
    return masks.kept, masks.density, masks.hash(), masks.load('m.safetensors')
'''

@needs_pyright
def test_a_users_pyright_sees_added_methods(tmp_path):
    shutil.copytree(root/'phew_nb', tmp_path/'phew_nb', ignore=shutil.ignore_patterns('__pycache__'))
    stubs.write(tmp_path/'phew_nb')
    (tmp_path/'use.py').write_text(program)
    run = subprocess.run(['pyright', '--pythonpath', sys.executable, 'use.py'], cwd=tmp_path, capture_output=True, text=True)
    assert 'Type of "masks.kept" is "int"' in run.stdout and '1 error' in run.stdout and 'nothing' in run.stdout, run.stdout
