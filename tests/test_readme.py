"The README's code runs when it is pasted, in order, in an empty folder."
import os, re, subprocess, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent

def test_the_code_of_the_readme_runs_where_nothing_is(tmp_path):
    blocks = re.findall(r'^```python\n(.*?)^```$', (root/'README.md').read_text(encoding='utf-8'), re.M | re.S)
    assert len(blocks) > 1
    env = dict(os.environ, PYTHONPATH=str(root), MPLBACKEND='Agg')
    ran = subprocess.run([sys.executable, '-c', '\n'.join(blocks)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not list(tmp_path.iterdir())
