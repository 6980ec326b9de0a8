"""The tutorial: its notebook is its page, and runs from the first cell to the last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lln_study.paper.pages import notebook

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = ROOT / notebook.PAGE, ROOT / notebook.NOTEBOOK
MOST_WORDS, LIMIT = 900, 1800  # seconds, which only a hang reaches

RUN = """
import json, sys
names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1], encoding="utf-8"))["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
print("losses", names["before"], names["after"])
"""


def test_the_notebook_is_that_of_the_page():
    made = notebook.notebook(PAGE.read_text(encoding="utf-8"))
    assert NOTEBOOK.read_text(encoding="utf-8") == made, "run `make pages`"


def test_links_of_the_notebook_lead_somewhere():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    words = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    targets = [part.partition(")")[0].partition("#")[0] for part in words.split("](")[1:]]
    assert targets and all((NOTEBOOK.parent / target).exists() for target in targets), targets


def test_the_notebook_stores_no_output():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)


def test_the_page_stays_short():
    assert len(PAGE.read_text(encoding="utf-8").split()) <= MOST_WORDS


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    """In a process and a folder of its own, with one thread: a busy machine has no second."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = map(float, done.stdout.splitlines()[-1].split()[1:])
    assert before < 2.6 and abs(after - before) < 1e-3  # the frequencies of letters alone give 3.3
    written = {path.name for path in (tmp_path / "runs" / "tutorial").iterdir()}
    assert {"watched.svg", "model", "model.onnx"} <= written
