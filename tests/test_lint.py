"No real faults by ruff, and workflows that end."
import shutil, subprocess, sys
from pathlib import Path

import pytest, yaml

root = Path(__file__).resolve().parent.parent

@pytest.mark.skipif(not shutil.which('ruff'), reason='no ruff')
def test_ruff_finds_nothing():
    run = subprocess.run(['ruff', 'check', '--no-cache', 'phew_nb', 'tests', 'tools', 'bench'], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:]

@pytest.mark.parametrize('path', sorted((root/'.github'/'workflows').glob('*.yml')), ids=lambda p: p.stem)
def test_workflows_ask_for_little_and_end(path):
    flow = yaml.safe_load(path.read_text(encoding='utf-8'))
    assert flow['permissions']['contents'] == 'read' and flow['concurrency']['group']
    assert all(0 < job['timeout-minutes'] <= 60 for job in flow['jobs'].values())

def test_every_requirement_has_an_oldest_version():
    run = subprocess.run([sys.executable, root/'tools'/'oldest.py'], capture_output=True, text=True)
    lines = (root/'settings.ini').read_text(encoding='utf-8').splitlines()
    wanted = next(line for line in lines if line.startswith('requirements')).split(' = ')[1].split()
    assert len(run.stdout.split()) == len(wanted)
