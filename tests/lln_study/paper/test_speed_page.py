"""The page of speed: cells stand at their length, steps of serving beside their memory."""

from __future__ import annotations

import json

from lln_study.paper.pages.blocks import NOTHING_YET
from lln_study.paper.pages.speed import by_length, of_ops, serving

ROW = {"device": "a CPU, 2 threads", "torch": "2.13.0", "commit": "0123456789"}


def test_only_the_lengths_that_are_asked_for_are_lines():
    columns = {"a": {512: "1", 1024: "2"}, "b": {1024: "3", 4096: "4"}}
    assert by_length(columns).splitlines()[2:] == [
        "| 512 | 1 | – |",
        "| 1,024 | 2 | 3 |",
        "| 4,096 | – | 4 |",
    ]
    assert by_length(columns, [128, 1024]).splitlines()[2:] == ["| 1,024 | 2 | 3 |"]


def test_a_step_of_serving_is_shown_with_its_memory(tmp_path):
    assert serving(tmp_path) == NOTHING_YET
    row = {**ROW, "seats": 8, "tokens": 65_536, "steps": 5, "ours_ms": 12.34, "softmax_ms": 98.76}
    row |= {"ratio": 8.0, "ours_bytes": 2**20, "softmax_bytes": 2**31, "configuration": "a Llama"}
    content = {"date": "2026-01-02", "rows": [row]}
    (tmp_path / "serving_cpu_2026-01-02.json").write_text(json.dumps(content))
    shown = serving(tmp_path)
    assert "| 8 | 65,536 | 12.3 | 98.8 | 8.00× | 1.0 | 2,048.0 |" in shown
    assert "a Llama; a CPU, 2 threads" in shown
    kept = [row, {**row, "kept_key_heads": 5, "ours_ms": 20.0, "ours_bytes": 2**22}]
    (tmp_path / "serving-kept_gpu_2026-01-02.json").write_text(
        json.dumps({**content, "rows": kept})
    )
    line = "| 8 × 65,536 | 98.8 / 2,048 | 12.3 / 1 | 20 / 4 |"
    assert line in serving(tmp_path) and shown in serving(tmp_path)


def test_the_time_of_an_op_is_that_of_our_kernel_from_a_graph_at_one_size():
    row = {"op": "near_far", "impl": "triton", "pass": "fwd+bwd", "launch": "graph", "D": 64}
    row |= {"dtype": "bfloat16", "N": 4096, "B": 16, "ms_p50": 1.2912}
    others = [{"impl": "eager"}, {"pass": "fwd"}, {"launch": "eager"}, {"N": 512}, {"B": 1}]
    rows = [row, *({**row, **other, "ms_p50": 9.0} for other in others)]
    assert of_ops(rows) == {"near_far": "1.29"}
