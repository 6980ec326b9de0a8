"""The page of speed: what it says of a busy machine comes from two runs."""

from __future__ import annotations

import json

from lln.study.paper.pages.blocks import NOTHING_YET
from lln.study.paper.pages.speed import busy

ROW = {"device": "a CPU, 2 threads", "torch": "2.13.0", "commit": "0123456789"}


def written(folder, subject, ratios):
    found = [{"op": op, "pass": "fwd", "N": N, "ratio": r} for (op, N), r in ratios.items()]
    content = {"date": "2026-01-02", "ratios": found, "rows": [ROW]}
    (folder / f"{subject}_cpu_2026-01-02.json").write_text(json.dumps(content))


def test_ratios_with_and_without_load_stand_side_by_side(tmp_path):
    assert busy(tmp_path) == NOTHING_YET
    written(tmp_path, "attention", {("bidirectional", 512): 2.0, ("causal", 512): 0.94})
    assert busy(tmp_path) == NOTHING_YET
    written(tmp_path, "attention-load-2", {("bidirectional", 512): 1.5})
    lines = busy(tmp_path).splitlines()
    cells = dict(zip(*(line.strip("|").split("|") for line in (lines[0], lines[2])), strict=True))
    cells = {name.strip(): cell.strip() for name, cell in cells.items()}
    assert (cells["LLN, alone"], cells["LLN, beside 2"]) == ("2.0×", "1.5×")
    assert (cells["causal LLN, alone"], cells["causal LLN, beside 2"]) == ("0.9×", "–")
    assert "a CPU, 2 threads" in lines[-1] and "commit 0123456789" in lines[-1]
