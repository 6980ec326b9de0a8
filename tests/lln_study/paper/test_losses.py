"""The tables of pre-trainings: their numbers are those of rows, and no two runs share a cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lln_study.paper.figures import lln_alone
from lln_study.paper.pages import losses
from lln_study.paper.pages.blocks import NOTHING_YET

RESULTS = Path(__file__).resolve().parents[3] / "results"
ABOUT = {"device": "GPU", "torch": "2", "commit": "abc", "date": "2026-01-01"}


def row(attention: str, loss: float, seed: int = 0, diverged=False, options=None, **changes):
    """A pre-training of the usual setting; changes are of its configuration."""
    own = {**lln_alone.USUAL, **lln_alone.LONG, "options": options or {}, **changes}
    digest = json.dumps([attention, own])
    facts = {"seed": seed, "loss": loss, "diverged": diverged, "digest": digest, **ABOUT}
    return {"subject": "mlm", "mechanism": attention, "configuration": own, **facts}


def shown(block, folder: Path, rows: list[dict], name: str = "") -> list[str]:
    """The lines of a block, its head without the rule."""
    (folder / name).mkdir(exist_ok=True)
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (folder / name / "mlm.jsonl").write_text(text)
    head, _, *lines = block(folder).splitlines()[:-2]
    return [head, *lines]


def test_the_study_has_the_mean_and_standard_error_of_its_seeds(tmp_path):
    found = {("softmax", 2): (3.0, 3.1, 3.2), ("lln", 2): (3.4, 3.6), ("lln", 1): (2.1,)}
    rows = [
        row(attention, loss, seed, heads=heads)
        for (attention, heads), own in found.items()
        for seed, loss in enumerate(own)
    ]
    assert shown(losses.on_cpu, tmp_path, rows, losses.CPU) == [
        "| loss | no conv |",
        "| Softmax | 3.100 ± 0.058 |",
        "| LLN | 3.500 ± 0.100 |",
        "| LLN, heads = 1 | 2.100 |",
    ]


def test_the_screen_names_what_was_changed_and_what_diverged(tmp_path):
    rows = [
        row("softmax", 4.2),
        row("lln_diag", 9.0),
        row("lln", 6.4),
        row("lln", 6.6, learning_rate=0.0014),
        row("lln", 6.3, heads=2, precision="fp32"),
        row("lln", 9.7, diverged=True, options={"conv": 33}),
    ]
    assert shown(losses.BLOCKS["lln_alone_screen"], tmp_path, rows, losses.SCREEN) == [
        "| loss | no conv | conv 33 |",
        "| Softmax | 4.200 | – |",
        "| LLN | 6.400 | diverged |",
        "| LLN, learning rate = 0.0014 | 6.600 | – |",
        "| LLN, heads = 2, precision = fp32 | 6.300 | – |",
    ]


def test_mechanisms_that_differ_in_an_option_are_lines_of_their_own(tmp_path):
    rows = [
        row("lln", 5.0, options={"feature_map": "learned"}),
        row("lln", 6.0),
        row("softmax", 9.0, positions="normal"),
        row("lln_diag", 8.0),
    ]
    assert shown(losses.screen, tmp_path, rows, losses.SCREEN) == [
        "| loss | no conv |",
        "| Softmax, positions = normal | 9.000 |",
        "| LLN | 6.000 |",
        "| LLN (feature_map=learned) | 5.000 |",
    ]


def test_nothing_is_shown_without_rows(tmp_path):
    assert all(block(tmp_path) == NOTHING_YET for block in losses.BLOCKS.values())


@pytest.mark.parametrize("panel", lln_alone.panels(RESULTS), ids=lambda panel: panel.title)
def test_curves_can_be_told_apart(panel):
    assert 1 < len(panel.curves) <= 6 and all(curve.x for curve in panel.curves)
