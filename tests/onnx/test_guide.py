"""The code of docs/guide/export.md runs as printed; AOTInductor has its own test.

The blocks are marked ``py``, so that tests/test_docs.py leaves them out: they write files.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "export.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:# The axis name")
def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    names: dict = {}
    for block in blocks[:-1]:
        exec(compile(block, GUIDE.name, "exec"), names)
    assert "aoti" in blocks[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"core.onnx", "step.onnx"}
