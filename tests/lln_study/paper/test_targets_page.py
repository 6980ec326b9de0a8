"""The page of targets: every bar stands beside the row that it is about, or beside a gap."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from lln.cli.app import app
from lln_study.bench.shapes import gpu_cases
from lln_study.paper.pages import targets

FACTS = {"device": "a GPU", "torch": "2", "commit": "0123456789", "triton": "3"}


def measured(rows) -> list[str]:
    lines = targets.table(rows).splitlines()[2:]
    return [line.strip("| ").split(" | ")[2] for line in lines]


def test_every_bar_has_a_case_of_the_benchmark():
    rows = [
        {**timed.case.row(), "launch": timed.launch, "ms_p50": 0.5, **FACTS}
        for timed in gpu_cases()
    ]
    times, steps = len(targets.TIMES), len(targets.STEPS)
    assert measured(rows) == ["0.5"] * times + ["1.00"] * steps
    failed = [{**row, "ms_p50": None} for row in rows]
    assert measured(failed) == measured([]) == ["–"] * (times + steps)


def test_the_command_prints_the_table_of_the_newest_run(tmp_path):
    shape = {"op": "causal", "impl": "triton", "pass": "fwd+bwd", "H": 12, "D": 64, "B": 128}
    row = {**shape, "N": 512, "dtype": "bfloat16", "launch": "graph", "ms_p50": 0.4567, **FACTS}
    others = [{**row, "launch": "eager"}, {**row, "pass": "fwd"}, {**row, "D": 128}]
    others = [{**other, "ms_p50": 9.0} for other in others]
    content = {"date": "2026-01-02", "rows": [row, *others]}
    (tmp_path / "gpu_a-gpu_2026-01-02.json").write_text(json.dumps(content))
    done = CliRunner().invoke(app, ["bench", "targets", "--results", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "| causal LLN, N = 512, from a graph: ms | ≤ 0.49 | 0.457 |" in done.output
    assert "a GPU, torch 2, commit 0123456789, 2026-01-02" in done.output
