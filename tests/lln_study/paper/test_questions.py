"""The page of questions: its tables are what the rows say, and the rows can be measured again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lln_study.paper.figures import activations, questions
from lln_study.paper.pages import formulas as page
from lln_study.paper.pages.blocks import rewrite

ROOT = Path(__file__).resolve().parents[3]
TINY = activations.Setting(
    tokens=16, width=16, heads=2, layers=2, batch=2, steps=3, sequences=2, learning_rate=1e-2
)


def test_without_rows_the_blocks_say_so(tmp_path):
    text = "<!-- measured: shape -->\nold\n<!-- end -->"
    assert "No rows" in rewrite(text, tmp_path, page.BLOCKS)


def test_rows_fit_their_table(monkeypatch):
    monkeypatch.setattr(questions, "DRAWS", 2)
    rows = list(questions.scale_rows())
    lines = page.scale(rows).splitlines()
    assert len(lines) == len(rows) + 2
    assert len({line.count(" | ") for line in lines}) == 1


def test_gradient_of_the_scale_table_is_that_of_the_formula():
    """Softmax row: compare with finite differences of the definition."""
    from lln_study.paper.figures.inputs import gaussian

    q, k = gaussian(6, 4, seed=0)
    got = questions._gradient(q, k, None, 0)
    generator = torch.Generator().manual_seed(1000)
    v, g = (torch.randn(q.shape, generator=generator, dtype=q.dtype) for _ in range(2))

    def value(x):
        return (((x @ k.transpose(-1, -2) / 2).softmax(-1) @ v) * g).sum()

    numeric = torch.zeros_like(q)
    for index in range(q.numel()):
        step = torch.zeros(q.numel(), dtype=q.dtype)
        step[index] = 1e-6
        step = step.reshape(q.shape)
        numeric.view(-1)[index] = (value(q + step) - value(q - step)) / 2e-6
    assert got == pytest.approx(numeric.norm().item(), rel=1e-6)


def test_near_targets_stay_in_their_block():
    target = questions._shuffled_within_blocks(130, 64)
    assert torch.equal(target.sort().values, torch.arange(130))
    assert torch.equal(target // 64, torch.arange(130) // 64)


def test_activations_before_and_after_training():
    rows = list(activations.activation_rows(TINY))
    assert [(row["step"], row["layer"]) for row in rows] == [(0, 0), (0, 1), (3, 0), (3, 1)]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert row["entropy"] <= 4 and row["row_variance"] <= row["score_variance"] * 1.0001


def test_rotary_positions_are_relative():
    x = torch.randn(1, 1, 1, 8).expand(1, 1, 10, 8)
    y = torch.randn(1, 1, 1, 8).expand(1, 1, 10, 8)
    scores = (activations.rotate(x) @ activations.rotate(y).transpose(-1, -2))[0, 0]
    for offset in (-3, 0, 4):
        diagonal = scores.diagonal(offset)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
