"""The Hugging Face scripts in examples/ do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, **arguments):
    return runpy.run_path(str(EXAMPLES / name))["main"](**arguments)


@pytest.mark.slow
def test_encoder(capsys):
    losses = run("huggingface_encoder.py", steps=20)
    assert losses["lln_diag"] < 4 and losses["softmax"] < 4  # chance is ln 65 = 4.17
    assert "loaded model equal: True" in capsys.readouterr().out


@pytest.mark.slow
def test_decoder(capsys):
    losses = run("huggingface_decoder.py", steps=20)
    assert losses["fine-tuned"] < losses["replaced"] < 4.5
    assert "equal to generation without cache: True" in capsys.readouterr().out


@pytest.mark.slow
def test_convert(capsys):
    losses = run("huggingface_convert.py", steps=20, more=5)
    assert list(losses) == ["softmax", "replaced", "transferred", "fine-tuned"]
    assert all(loss < 4 for loss in losses.values())  # chance is ln 26 = 3.26
    assert capsys.readouterr().out.count("error of the output") == 2


@pytest.mark.slow
def test_serve(capsys):
    run("serve.py", seats=2, lengths=(8, 16), steps=2)
    said = capsys.readouterr().out
    assert said.count("length: ") == 4 and "2 seats, 6.1 MiB for streams of any length" in said
    rows = [line.split("|") for line in said.splitlines()[-2:]]
    assert [int(row[0]) for row in rows] == [8, 16]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])
