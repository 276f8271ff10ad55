"Networks of other packages by their names."
import sys

import pytest, torch

from phew_nb.models import make_model
from phew_nb.walks import phew

def test_a_network_of_timm_by_its_name():
    pytest.importorskip('timm')
    a, b = (make_model('timm:resnet10t', (1, 64, 64), 7, seed=3) for _ in range(2))
    assert a(torch.zeros(2, 1, 64, 64)).shape == (2, 7) and all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert phew(a, .1, (1, 64, 64)).density < .11
    with pytest.raises(ValueError, match="unknown network of timm 'resnet10x'"): make_model('timm:resnet10x', (3, 64, 64), 7)

def test_timm_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'timm', None)
    with pytest.raises(ValueError, match='pip install timm'): make_model('timm:resnet18', (3, 64, 64), 7)
