"""The code of docs/guide/modules.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "modules.md"


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(capsys):
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 7
    names: dict = {}
    for block in blocks:
        exec(compile(block, GUIDE.name, "exec"), names)
    assert names["weights"].shape == (2, 4, 100, 100)
    assert "tensor" in capsys.readouterr().out
