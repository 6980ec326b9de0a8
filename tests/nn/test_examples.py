"""The scripts in examples/ that show the modules do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, **arguments):
    return runpy.run_path(str(EXAMPLES / name))["main"](**arguments)


def test_encoder_layer_learns_the_lookup(capsys):
    assert run("encoder_layer.py") > 0.9
    assert "accuracy" in capsys.readouterr().out


def test_causal_decoder_agrees_with_itself():
    assert run("causal_decoder.py", steps=20) < 1e-4


def test_replace_softmax_keeps_the_output_close():
    errors = run("replace_softmax.py")
    assert 0 < max(errors.values()) < 0.5


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_stay_short(path):
    assert len(path.read_text().splitlines()) < 70
