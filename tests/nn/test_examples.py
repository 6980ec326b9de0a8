"""The scripts in examples/ that show the modules do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, **arguments):
    return runpy.run_path(str(EXAMPLES / name))["main"](**arguments)


@pytest.mark.slow
def test_encoder_layer_learns_the_lookup(capsys):
    assert run("encoder_layer.py", steps=90) > 0.9
    assert "accuracy" in capsys.readouterr().out


def test_causal_decoder_agrees_with_itself():
    assert run("causal_decoder.py", steps=20) < 1e-4


def test_replace_softmax_keeps_the_concentration():
    rows = run("replace_softmax.py")
    entropy = {name: row[0] for name, row in rows.items()}
    assert entropy["uniform"] == pytest.approx(8)
    assert entropy["entropy"] == pytest.approx(entropy["softmax"], abs=0.2)
    assert entropy["softmax"] < 6


@pytest.mark.slow
def test_a_table_is_classified_and_drawn(tmp_path, capsys):
    figure = tmp_path / "figure.svg"
    right = run("classify_a_table.py", steps=3, figure=str(figure))
    assert len(right["LLN"]) == 5 and right["k-NN"][-1] > 0.9
    assert "284 rows, LLN" in capsys.readouterr().out and "<svg" in figure.read_text()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_stay_short(path):
    assert len(path.read_text().splitlines()) < 70
