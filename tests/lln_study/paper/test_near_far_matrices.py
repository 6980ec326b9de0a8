"""Matrices of a model's heads: the four forms, a row for each head, and the picture."""

from __future__ import annotations

import json

import pytest
import torch

import lln
from lln import moments
from lln.inspect.model import CannotInspect
from lln_study.paper.figures.near_far_matrices import TITLES, forms, main
from tests.inspect.test_inspect import TEXT, save
from tests.instruments import models


def test_the_forms_are_those_of_the_library():
    q, k = torch.randn(2, 1, 3, 40, 16, dtype=torch.float64).unbind()
    eye = torch.eye(40, dtype=torch.float64).expand(1, 3, 40, 40)
    alpha, beta = moments.measure_scales(q, k, method="entropy")
    blocks = {"alpha": alpha, "beta": beta, "near": 8}
    expected = {
        "softmax": torch.nn.functional.scaled_dot_product_attention(q, k, eye),
        "LLN": lln.attention(q, k, eye, alpha=alpha, beta=beta),
        "LLN+Diag": lln.attention(q, k, eye, **blocks),
        "near and far": lln.attention(q, k, eye, **{**blocks, "near": lln.Near(8, joint=True)}),
    }
    found = forms(q, k, block=8)
    assert tuple(expected) == TITLES
    for title, matrix in zip(TITLES, found, strict=True):
        torch.testing.assert_close(matrix, expected[title][0], rtol=1e-6, atol=1e-9)


def test_rows_and_picture(tmp_path, capsys):
    folder = save("roberta", tmp_path / "roberta")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    words = [str(folder), "--text", str(text), "--tokens", "24", "--block", "8", "--heads", "1.0"]
    main([*words, "--results", str(tmp_path / "out"), "--name", "tiny"])
    (table,) = (tmp_path / "out").glob("near-far-matrices_*.json")
    assert f"{table} and .svg" in capsys.readouterr().out
    rows = json.loads(table.read_text())["rows"]
    config = models.config("roberta")
    assert len(rows) == 4 * config.num_hidden_layers * config.num_attention_heads
    for softmax, linear, average, joint in zip(*(rows[n::4] for n in range(4)), strict=True):
        assert [r["form"] for r in (softmax, linear, average, joint)] == list(TITLES)
        assert softmax["distance"] == 0 < joint["distance"] < 1
        assert average["near_share"] == pytest.approx((1 + linear["near_share"]) / 2)
        assert abs(joint["near_share"] - softmax["near_share"]) < 0.02
        assert (softmax["model"], softmax["tokens"], softmax["block"]) == ("tiny", 24, 8)
    drawn = table.with_suffix(".svg").read_text()
    assert drawn.count("data:image/png") >= 4
    for word in (*TITLES, "layer 1, head 0", "of the mass elsewhere", "weight of a key"):
        assert word in drawn


def test_what_cannot_be_drawn_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    options = ["--text", str(text), "--tokens", "24", "--results", str(tmp_path / "out")]
    with pytest.raises(CannotInspect, match=r"--heads 9\.0 is not there: the model has"):
        main([str(save("roberta", tmp_path / "roberta")), "--heads", "9.0", *options])
    with pytest.raises(CannotInspect, match="no plain bidirectional softmax attention"):
        main([str(save("gpt2", tmp_path / "gpt2")), *options])
