"""What a run says: lines where the output is no terminal, a bar where it is one."""

from __future__ import annotations

import io
import types

import pytest
from rich.console import Console

from lln.report import progress
from lln_study.train.loop import train
from tests.lln_study.train.toy import Toy, toy_config


def test_output_to_a_file_has_a_line_every_half_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Toy):
        def batch(self, step, rows):
            now[0] += 8
            return super().batch(step, rows)

    config = toy_config(eval_every=0)
    lines = progress.shown("toy")
    assert type(lines) is progress.Lines
    train(Slow(config), config, None, progress=lines)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(", ")[0] for line in said[:-1]] == [
        *("toy: step 4 of 12", "toy: step 8 of 12", "toy: step 12 of 12"),
    ]
    assert ", loss " in said[1] and said[-1].startswith("toy: step 12: loss ")


def test_a_terminal_has_a_bar():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    config = toy_config()
    train(Toy(config), config, None, progress=progress.Bar("toy", console))
    assert "toy: step 12: loss " in screen.getvalue() and "/12" in screen.getvalue()


def test_a_finished_run_says_so_and_one_that_is_continued(tmp_path, capsys):
    config = toy_config()
    train(Toy(config), config, tmp_path, tensorboard=False)
    train(Toy(config), config, tmp_path, progress=progress.Lines("toy"), tensorboard=False)
    assert capsys.readouterr().out == (
        "toy: finished before, with step 12; nothing is left to train\n"
    )
    (tmp_path / "checkpoints" / "step-00000012" / "state.json").unlink()
    with pytest.warns(UserWarning, match="looking for an older one"):
        train(Toy(config), config, tmp_path, progress=progress.Lines("toy"), tensorboard=False)
    assert capsys.readouterr().out.startswith("toy: continues after step ")
