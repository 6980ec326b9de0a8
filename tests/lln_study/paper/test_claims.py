"""The page of claims and the table of README: their numbers are those of rows, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lln.nn import RECOMMENDED
from lln_study.paper.pages.claims import best, claims
from lln_study.paper.tables.arena import AVERAGED
from tests.lln_study.paper.vision_rows import lra, vit, write

RESULTS = Path(__file__).resolve().parents[3] / "results"


def differences(folder: Path) -> dict[tuple[str, str], str]:
    """The cells of the tables by measure and pair."""
    found = {}
    for table in claims(folder).split("\n\n"):
        columns, _, *lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
        for pair, *cells in lines:
            found |= {(name, pair): cell for name, cell in zip(columns[1:], cells, strict=True)}
    return found


def test_errors_are_those_of_seeds_and_examples():
    """One line by hand: three seeds of the ViT, 2,500 images."""
    cell = differences(RESULTS)["ViT on Dogs vs Cats", "LLN+Diag (paper) – softmax"]
    ours, theirs = [0.8416, 0.8376, 0.8356], [0.826, 0.8232, 0.8332]

    def error(runs):
        mean = sum(runs) / 3
        spread = sum((run - mean) ** 2 for run in runs) / 2 / 3
        return mean, math.sqrt(spread + mean * (1 - mean) / 2500)

    (a, da), (b, db) = error(ours), error(theirs)
    assert cell == f"{100 * (a - b):+.1f} ± {100 * math.hypot(da, db):.1f} (3)"


def test_rows_with_other_options_are_claims_of_their_own(tmp_path):
    """The authors' blocks and the recommended setting do not pass for the paper's constants."""
    small, test = {"near": 16}, {"train": 9, "test": 2500}
    rows = [vit("softmax", 0.7), vit("lln_diag", 0.8), vit("lln_diag", 0.9, options=small)]
    for task in AVERAGED:
        for given, accuracy in (({}, 0.6), ({"near": 32}, 0.65), (dict(RECOMMENDED), 0.75)):
            rows.append(lra("lln_diag", task, accuracy, options=given, examples=test))
        rows.append(lra("softmax", task, 0.5, examples=test))
    write(tmp_path, rows)
    said = {key: cell.split(" ±")[0] for key, cell in differences(tmp_path).items()}
    vision, average = "ViT on Dogs vs Cats", "Long Range Arena, average of 4 tasks"
    blocks = "LLN+Diag (blocks of {}) – LLN+Diag (paper)"
    assert said[vision, "LLN+Diag (paper) – softmax"] == "+10.0"
    assert said[vision, blocks.format(16)] == "+10.0"
    assert said[average, "LLN+Diag (paper) – softmax"] == "+10.0"
    assert said[average, blocks.format(32)] == "+5.0"
    assert said[average, "LLN+Diag (recommended) – softmax"] == "+25.0"
    assert "| 70.0 | – | 80.0 |" in best(tmp_path) and "| 50.0 | – | 60.0 |" in best(tmp_path)


@pytest.mark.parametrize("page", [claims, best])
def test_a_fine_tuning_of_one_task_takes_nothing_from_the_others(page, tmp_path):
    for name in ("mlm", "glue"):
        rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
        known = [row for row in rows if row["configuration"]["options"].get("near") != 256]
        write(tmp_path, known, name)
        if name == "glue":
            before = page(tmp_path)
            lonely = next(row for row in known if row["configuration"]["task"] == "sst2")
            lonely = json.loads(json.dumps(lonely))
            lonely["configuration"]["options"] = {"conv": 5}
            write(tmp_path, [*known, lonely | {"digest": "lonely"}], name)
    assert "GLUE" in before
    assert page(tmp_path) == before
