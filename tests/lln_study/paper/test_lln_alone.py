"""The page of LLN alone: its numbers are those of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lln_study.paper.pages import lln_alone
from lln_study.paper.pages.blocks import NOTHING_YET
from lln_study.paper.results import read

RESULTS = Path(__file__).resolve().parents[3] / "results"


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


def test_the_study_has_the_mean_and_standard_error_of_its_seeds(tmp_path):
    folder = tmp_path / lln_alone.SMALL
    folder.mkdir()
    about = {"parameters": 9, "date": "2026-11-17", "device": "a CPU", "torch": "2", "commit": "c"}
    losses = {("softmax", 2): (3.0, 3.1, 3.2), ("lln", 2): (3.4, 3.6), ("lln", 1): (2.1,)}
    rows = [
        {**row(attention=attention, heads=heads), **about, "seed": seed, "loss": loss}
        for (attention, heads), own in losses.items()
        for seed, loss in enumerate(own)
    ]
    write(folder, rows)
    assert lln_alone.small(tmp_path).splitlines()[2:-2] == [
        "| Softmax | 2 | 3.100 ± 0.058 | 3 | 9 |",
        "| LLN | 2 | 3.500 ± 0.100 | 2 | 9 |",
        "| LLN | 1 | 2.100 | 1 | 9 |",
    ]


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


def test_what_is_shown_of_the_large_ones_has_its_row():
    rows = read(RESULTS, "mlm")
    ends = {f"{one['loss']:.2f}" for one in rows}
    for line in lln_alone.large(RESULTS).splitlines()[2:]:
        if line.startswith("|"):
            assert line.split("|")[-2].strip() in ends


@pytest.mark.parametrize("panel", lln_alone.figure(RESULTS), ids=lambda panel: panel.title)
def test_curves_can_be_told_apart(panel):
    assert 1 < len(panel.curves) <= 6 and all(curve.x for curve in panel.curves)
