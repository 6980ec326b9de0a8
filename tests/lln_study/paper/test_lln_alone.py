"""The page of LLN alone: its numbers are those of rows, and what is missing is what has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lln_study.paper.pages import lln_alone
from lln_study.paper.pages.blocks import NOTHING_YET
from lln_study.paper.results import read, read_curves
from lln_study.sweep import plan

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "results"


def asked() -> list[dict]:
    return plan.expand(plan.read(ROOT / "sweeps" / "lln_alone.json"))


def row(**changes) -> dict:
    """A pre-training of the large size; changes are of its configuration."""
    own = {**lln_alone.LARGE, "attention": "softmax", "options": {}, "positions": "sinusoid"}
    own |= {
        "corpus": "wiki2015",
        "learning_rate": 7e-4,
        "heads": 8,
        "batch_size": 32,
        "warmup": 500,
    }
    own |= changes
    return {
        "subject": "mlm", "mechanism": own["attention"], "digest": json.dumps(own), "seed": 0,
        "configuration": own, "loss": 2.5, "seconds": 120.0,
    }  # fmt: skip


def write(folder: Path, rows: list[dict]) -> None:
    (folder / "mlm.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def test_every_run_without_a_row_is_missing_and_no_other(tmp_path):
    write(tmp_path, [row()])
    lines = lln_alone.missing(tmp_path).splitlines()
    assert len(lines) == 2 + len(asked()) + 1  # the head, and the sum
    assert lines[-1] == f"| together |  | {2 * len(asked())} |"
    write(
        tmp_path, [row(), row(attention="lln", learning_rate=0.0014), row(attention="lln", heads=2)]
    )
    shorter = lln_alone.missing(tmp_path).splitlines()
    gone = set(lines[2:-1]) - set(shorter)
    assert gone == {"| LLN | learning_rate = 0.0014 | 2 |", "| LLN | heads = 2 | 2 |"}
    fields = [{k: v for k, v in spec.items() if k not in lln_alone.MANNER} for spec in asked()]
    write(tmp_path, [row(), *(row(**spec) for spec in fields)])
    assert lln_alone.missing(tmp_path).startswith("Nothing: every run")


def test_a_run_of_the_sweep_with_a_row_is_shown_with_its_loss(tmp_path):
    about = {"device": "GPU", "torch": "2", "commit": "abc", "date": "2026-01-01"}
    others = {"tokens": 250_000_000, "diverged": False, **about}
    fewer = row(attention="lln", steps=61200, batch_size=8, warmup=2000)
    write(tmp_path, [row() | others])
    assert lln_alone.varied(tmp_path) == NOTHING_YET
    write(tmp_path, [row() | others, fewer | others | {"loss": 6.25}])
    said = lln_alone.varied(tmp_path)
    assert "| LLN | batch_size = 8, steps = 61200, warmup = 2000 | 6.25 |" in said
    assert said.count("| LLN |") == 1
    assert "steps = 61200" in lln_alone.missing(tmp_path)  # softmax beside it


def test_the_study_compares_with_softmax_of_the_same_heads(tmp_path):
    folder = tmp_path / lln_alone.SMALL
    folder.mkdir()
    rows = []
    for attention, heads, losses in (
        ("softmax", 2, (3.0, 3.1, 3.2)),
        ("softmax", 1, (2.0, 2.1, 2.2)),
        ("lln", 2, (3.4, 3.5, 3.6)),
        ("lln", 1, (2.05, 2.1, 2.15)),
        ("lln_diag", 2, (3.0, 3.0, 3.0)),
    ):
        for seed, loss in enumerate(losses):
            one = row(attention=attention, heads=heads, layers=2, vocabulary=300)
            about = {
                "seed": seed,
                "loss": loss,
                "tokens": 6e5,
                "parameters": 9,
                "date": "2026-11-17",
            }
            rows.append({**one, **about, "device": "a CPU", "torch": "2", "commit": "c"})
    write(folder, rows)
    said = lln_alone.small(tmp_path)
    assert "| LLN | 3.500 ± 0.058 | +0.400 | behind, 3 seeds | 9 |" in said
    assert "| LLN, 1 head | 2.100 ± 0.029 | +0.000 | level, 3 seeds | 9 |" in said
    assert "| Softmax | 3.100 ± 0.058 |  |  | 9 |" in said
    assert "30 minutes for all runs" in said


def test_the_screen_names_what_was_changed_and_what_diverged(tmp_path):
    about = {"tokens": 49e6, "steps": 3000, "date": "2026-11-17", "device": "GPU", "torch": "2"}

    def short(loss, diverged=False, **changes):
        return {**row(**changes), **about, "commit": "c", "loss": loss, "diverged": diverged}

    (tmp_path / lln_alone.SCREEN).mkdir()
    write(tmp_path / lln_alone.SCREEN, [short(4.2), short(9.0, attention="lln_diag")])
    assert lln_alone.screen(tmp_path) == NOTHING_YET
    rows = [
        short(4.2),
        short(9.0, attention="lln_diag"),
        short(6.4, attention="lln"),
        short(6.6, attention="lln", learning_rate=0.0014),
        short(6.3, attention="lln", heads=2, precision="fp32"),
        short(9.7, diverged=True, attention="lln", options={"conv": 33}),
    ]
    write(tmp_path / lln_alone.SCREEN, rows)
    lines = lln_alone.screen(tmp_path).splitlines()[2:-2]
    assert lines == [
        "| Softmax | 4.20 |",
        "| LLN | 6.40 |",
        "| LLN, learning rate = 0.0014 | 6.60 |",
        "| LLN, heads = 2, precision = fp32 | 6.30 |",
        "| LLN (conv 33) | diverged |",
    ]


def test_sentences_have_the_numbers_of_the_curves():
    said = lln_alone.known(RESULTS)
    curve = next(
        line
        for line in read_curves(RESULTS)
        if line["mechanism"] == "lln" and line["configuration"]["width"] == 512
    )
    last = [one for one in curve["rows"] if one.get("kind") == "eval"][-1]
    assert f"After {last['step']:,} updates LLN alone has {last['loss']:.2f} nats" in said


def test_what_is_shown_of_the_large_ones_has_its_row():
    rows = read(RESULTS, "mlm")
    ends = {f"{one['loss']:.2f}" for one in rows}
    for line in lln_alone.large(RESULTS).splitlines()[2:]:
        if line.startswith("|"):
            assert line.split("|")[-2].strip() in ends


@pytest.mark.parametrize("panel", lln_alone.figure(RESULTS), ids=lambda panel: panel.title)
def test_curves_can_be_told_apart(panel):
    assert 1 < len(panel.curves) <= 6 and all(curve.x for curve in panel.curves)
