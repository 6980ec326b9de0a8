"""What a terminal shows: every number whole, whatever its width."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import lln
from lln.cli.tables import IN_A_PIPE, column_groups, column_widths
from lln_study.paper.tables import table as tables

pytestmark = pytest.mark.slow  # the tables of the study

ROOT = Path(__file__).resolve().parents[2]


def in_terminal(columns: int, *arguments: str) -> list[str]:
    """The lines that the command prints into a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lln.cli", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        while piece := _read(ours):
            said += piece
    os.close(ours)
    assert process.returncode == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said.decode("utf-8"))
    return plain.replace("\r", "").split("\n")


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("number", ["1", "pretraining"])
def test_no_number_is_shortened(number, columns):
    lines = in_terminal(columns, "table", number)
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines if "│" in line)
    shown = [cell.strip() for line in lines for cell in re.split("[│┃]", line)]
    for each in tables.make(number, ROOT / "results"):
        for line in each.lines:
            for cell in line[1:]:
                assert cell in shown, f"{cell!r} of {each.title}"


def in_a_pipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    return subprocess.run(
        [sys.executable, "-m", "lln.cli", *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_conversion_in_a_pipe_is_narrow_and_has_its_best_rows_first():
    best, every = (in_a_pipe(ROOT, "table", "conversion", *more).stdout for more in ([], ["--all"]))
    for said in (best, every):
        assert max(map(len, said.splitlines())) <= IN_A_PIPE
    assert "more lines with --all" in best and "more lines with --all" not in every
    assert len(best) < len(every)
    (widest, *_) = sorted(tables.make("conversion", ROOT / "results"), key=lambda x: -len(x.lines))
    agreements = [record["agreement"] for record in widest.records]
    assert agreements == sorted(agreements, reverse=True)


def test_a_table_outside_a_clone_says_where_the_rows_are_to_come_from(tmp_path):
    done = in_a_pipe(tmp_path, "table", "1")
    assert done.returncode == 1 and "pass --results with the folder of the rows" in done.stderr


def test_the_list_of_mechanisms_fits_a_terminal():
    lines = in_terminal(80, "list")
    assert max(map(len, lines)) <= 80 and len(lines) < 3 * len(lln.list_mechanisms())
    assert any(line.startswith("transnormer_t1 ") for line in lines)


def test_columns_that_do_not_fit_stand_below_with_the_labels_again():
    columns = ["model", "loss on validation", "accuracy"]
    lines = [["a name that goes on and on and on and on", "2.3281234", "62.8 ± 0.1"]]
    widths = column_widths(columns, lines, 60)
    assert widths == [20, 10, 10]
    assert list(column_groups(widths, 60)) == [[0, 1, 2]]
    assert list(column_groups(widths, 40)) == [[0, 1], [0, 2]]
    assert list(column_groups(widths, 10)) == [[0, 1], [0, 2]]
