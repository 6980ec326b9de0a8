"""The page of speed: what it says of a busy machine comes from that run."""

from __future__ import annotations

import json

from lln_study.paper.pages.blocks import NOTHING_YET
from lln_study.paper.pages.speed import BLOCKS, serving

ROW = {"device": "a CPU, 2 threads", "torch": "2.13.0", "commit": "0123456789"}


def written(folder, subject, ratios):
    found = [{"op": op, "pass": "fwd", "N": N, "ratio": r} for (op, N), r in ratios.items()]
    content = {"date": "2026-01-02", "ratios": found, "rows": [ROW]}
    (folder / f"{subject}_cpu_2026-01-02.json").write_text(json.dumps(content))


def test_ratios_beside_other_processes_are_those_of_that_run(tmp_path):
    busy = BLOCKS["busy"]
    written(tmp_path, "attention", {("bidirectional", 512): 2.0, ("causal", 512): 0.94})
    assert busy(tmp_path) == NOTHING_YET
    written(tmp_path, "attention-load-2", {("bidirectional", 512): 1.5, ("causal", 1024): 0.94})
    lines = busy(tmp_path).splitlines()
    assert lines[0] == "| N | LLN | causal LLN | recommended, fwd+bwd |"
    assert lines[2:4] == ["| 512 | 1.5× | – | – |", "| 1,024 | – | 0.9× | – |"]
    assert "a CPU, 2 threads" in lines[-1] and "commit 0123456789" in lines[-1]


def test_a_step_of_serving_is_shown_with_its_memory(tmp_path):
    assert serving(tmp_path) == NOTHING_YET
    row = {**ROW, "seats": 8, "tokens": 65_536, "steps": 5, "ours_ms": 12.34, "softmax_ms": 98.76}
    row |= {"ratio": 8.0, "ours_bytes": 2**20, "softmax_bytes": 2**31, "configuration": "a Llama"}
    content = {"date": "2026-01-02", "rows": [row]}
    (tmp_path / "serving_cpu_2026-01-02.json").write_text(json.dumps(content))
    shown = serving(tmp_path)
    assert "| 8 | 65,536 | 12.3 | 98.8 | 8.00× | 1.0 | 2,048.0 |" in shown
    assert "a Llama; a CPU, 2 threads" in shown
