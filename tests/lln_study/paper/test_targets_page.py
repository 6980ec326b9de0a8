"""The page of targets: a bar that is missed is said to be missed, and a gap to be a gap."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lln.cli.app import app
from lln_study.bench.shapes import EAGER, GRAPH, HOST, gpu_cases
from lln_study.paper.pages import targets
from lln_study.paper.pages.blocks import NOTHING_YET

FACTS = {"device": "a GPU", "torch": "2", "commit": "0123456789", "triton": "3"}
FAST = {"cudnn": 10.0, "sdpa": 10.0, "fla": 1.0}  # ms of a rival, with which every bar is met


def made(timed, **change):
    """The row of a case that meets every bar."""
    case = timed.case
    ms = FAST.get(case.impl, 0.3 if case.op == "lln_diag_causal" else 0.5)
    row = {**case.row(), "launch": timed.launch, "ms_p50": ms, "floor_share": 0.9, "error": ""}
    return {**row, "others_busy": 0.1, "loop_ms": 0.5, **FACTS, **change}


@pytest.fixture(scope="module")
def good():
    rows = [made(timed) for timed in gpu_cases()]
    fla = [made(timed) for timed in gpu_cases(ops=["causal"]) if timed.case.impl == "triton"]
    return rows + [{**row, "impl": "fla", "ms_p50": 1.0} for row in fla]


def verdicts(rows):
    return {target.words: target.verdict for target in targets.targets(rows)}


def changed(rows, condition, **change):
    return [{**row, **change} if condition(row) else row for row in rows]


def of(op, launch=GRAPH, **wanted):
    def condition(row):
        found = row["op"] == op and row["launch"] == launch and row["impl"] not in FAST
        return found and all(row[key] == value for key, value in wanted.items())

    return condition


def test_all_are_met_by_rows_that_meet_them(good):
    good = changed(good, of("lln_diag_causal", **{"pass": "fwd"}), ms_p50=0.39)
    assert set(verdicts(good).values()) == {"met"} and len(verdicts(good)) == 14


@pytest.mark.parametrize(
    ("condition", "change", "words"),
    [
        (of("bidirectional", EAGER, N=512, B=128), {"ms_p50": 0.91}, "LLN called from Python"),
        (of("bidirectional", EAGER, N=8192, B=1), {"ms_p50": 10.0}, "batch 1"),
        (of("bidirectional", N=2048, B=32), {"floor_share": 0.79}, "LLN: share"),
        (of("measured", HOST, N=512), {"ms_p50": 0.561}, "what measuring"),
        (of("lln_diag", N=512), {"floor_share": 0.67}, "LLN+Diag, blocks of 64"),
        (of("lln_diag_128", N=16_384), {"floor_share": 0.49}, "LLN+Diag, blocks of 128"),
        (of("lln_diag_overlap", N=4096), {"floor_share": 0.27}, "blocks of 128 that overlap"),
        (of("near_far", N=512, D=64), {"ms_p50": 0.7}, "near and far"),
        (of("recommended", N=512), {"ms_p50": 0.7}, "the recommended setting"),
        (of("near_far_overlap", N=512), {"ms_p50": 0.7}, "near and far"),
        (of("causal", N=4096, D=64), {"ms_p50": 1.31}, "causal LLN, fwd+bwd"),
        (of("causal", N=16_384), {"ms_p50": 0.66}, "causal LLN, fwd+bwd"),
        (of("lln_diag_causal", N=4096, D=64), {"ms_p50": 1.21}, "causal LLN+Diag"),
        (of("causal", D=128), {"floor_share": 0.19}, "heads of 128"),
        (of("decode", N=65_536), {"ms_p50": 0.6}, "one step of decoding"),
        (of("decode", EAGER, B=64, N=8192), {"ms_p50": 10.5}, "one step of decoding"),
        (of("roberta_step", EAGER, N=4096), {"ms_p50": 8.4}, "training step"),
    ],
)
def test_a_bar_that_is_missed_is_said_to_be_missed(good, condition, change, words):
    worse = changed(good, condition, **change)
    assert worse != good
    missed = [name for name, verdict in verdicts(worse).items() if verdict == "**missed**"]
    assert len(missed) == 1 and missed[0].startswith(words)


def test_rows_that_are_missing_or_failed_are_not_counted_as_met(good):
    only = changed(good, lambda row: row["op"] != "causal", ms_p50=None, floor_share=None)
    found = verdicts([row for row in only if row["N"] != 16_384])
    assert found.pop("causal LLN, fwd+bwd") == "met where measured"
    wide = "heads of 128, 32,768 tokens, N = 4,096: share of the memory floor"
    assert found.pop(wide) == "met where measured"
    assert set(found.values()) == {"not measured"}


def test_without_fla_the_bar_is_the_one_of_the_time_it_was_set(good):
    alone = [row for row in good if row["impl"] != "fla"]
    causal = next(t for t in targets.targets(alone) if t.words == "causal LLN, fwd+bwd")
    assert causal.verdict == "**missed**" and "an earlier run" in causal.bar  # 0.5 > 0.49
    assert "0.5 ms (N = 512), where at most 0.49 ms was wanted" in causal.sentence()


def test_the_page_shows_numbers_bars_and_a_disturbed_host(good, tmp_path):
    assert targets.gpu_targets(tmp_path) == NOTHING_YET
    rows = changed(good, of("roberta_step", EAGER, N=512), ms_p50=12.5)
    rows = [row for row in rows if row["op"] != "decode"]
    content = {"date": "2026-01-02", "rows": rows}
    path = tmp_path / "gpu_a-gpu_2026-01-02.json"
    path.write_text(json.dumps(content))
    done = CliRunner().invoke(app, ["bench", "targets", "--results", str(tmp_path)])
    assert done.exit_code == 0 and done.output.strip() == targets.gpu_targets(tmp_path).strip()
    line = next(x for x in done.output.splitlines() if x.startswith("| training step"))
    assert "N = 512: **0.80×**" in line and line.endswith("| **missed** |")
    assert "0.80× (N = 512), where at least 1.00× was wanted" in done.output
    assert "1 missed, 1 not measured" in done.output
    assert "- Not measured: one step of decoding" in done.output
    assert "disturbed" not in done.output and "a GPU, torch 2, commit 0123456789" in done.output
    rows[3] = {**rows[3], "launch": EAGER, "loop_ms": 0.8}
    path.write_text(json.dumps({**content, "rows": rows}))
    assert "The host was disturbed" in targets.gpu_targets(tmp_path)
