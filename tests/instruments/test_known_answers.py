"""Every measure on matrices whose answer is known on paper."""

from __future__ import annotations

import math

import pytest
import torch

from lln import instruments
from tests.instruments.matrices import biased, cycle, identity, uniform

SIZE = 8
ROW = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)  # 1.75 bits, Σ p² = 11/32

ANSWERS = {
    "entropy": {"uniform": 3, "identity": 0, "cycle": 0, "biased": 1.75},
    "renyi2_entropy": {"uniform": 3, "identity": 0, "cycle": 0, "biased": math.log2(32 / 11)},
    "effective_tokens": {"uniform": 8, "identity": 1, "cycle": 1, "biased": 32 / 11},
    "row_variance": {
        "uniform": 0,
        "identity": (1 - 1 / 8) / 8,
        "cycle": (1 - 1 / 8) / 8,
        "biased": 11 / 32 / 4 - 1 / 16,
    },
    "column_bias": {"uniform": 0, "identity": 0, "cycle": 0, "biased": 0.25},
    "mutual_information": {"uniform": 0, "identity": 3, "cycle": 3, "biased": 0},
    "second_eigenvalue": {"uniform": 0, "identity": 1, "cycle": 1, "biased": 0},
    "spectral_gap": {"uniform": 1, "identity": 0, "cycle": 0, "biased": 1},
    "centred_singular_value": {"uniform": 0, "identity": 1, "cycle": 1, "biased": 0},
    "log_variance": {"uniform": 0, "identity": 0, "cycle": 0, "biased": math.log(2) ** 2 * 11 / 16},
}
MATRICES = {
    "uniform": uniform(SIZE),
    "identity": identity(SIZE),
    "cycle": cycle(SIZE),
    "biased": biased(ROW),
}
CASES = [(measure, matrix) for measure in ANSWERS for matrix in MATRICES]


@pytest.mark.parametrize(("measure", "matrix"), CASES)
def test_measure_of_a_known_matrix(measure, matrix):
    got = getattr(instruments, measure)(MATRICES[matrix])
    assert got.shape == ()
    assert got.item() == pytest.approx(ANSWERS[measure][matrix], abs=1e-12)


@pytest.mark.parametrize("measure", ANSWERS)
def test_leading_dimensions_and_float32(measure):
    batch = torch.stack([uniform(4), identity(4), biased(ROW)]).reshape(3, 1, 4, 4)
    function = getattr(instruments, measure)
    got = function(batch.float())
    assert got.shape == (3, 1) and got.dtype == torch.float32
    one_by_one = torch.stack([function(p) for p in batch.flatten(0, 1)]).reshape(3, 1)
    assert torch.allclose(got.double(), one_by_one, atol=1e-6)


@pytest.mark.parametrize("measure", ["entropy", "column_bias", "mutual_information"])
def test_measures_of_cross_attention(measure):
    p = torch.rand(5, 9, dtype=torch.float64).softmax(-1)
    by_hand = {
        "entropy": -(p * p.log2()).sum(-1).mean(),
        "column_bias": math.log2(9) + (p.mean(0) * p.mean(0).log2()).sum(),
        "mutual_information": (p * (p / p.mean(0)).log2()).sum(-1).mean(),
    }
    got = getattr(instruments, measure)(p)
    assert got.item() == pytest.approx(by_hand[measure].item(), abs=1e-12)


def test_bits_split_into_entropy_bias_and_information():
    p = torch.randn(3, 16, 16, dtype=torch.float64).softmax(-1)
    parts = instruments.entropy(p) + instruments.column_bias(p) + instruments.mutual_information(p)
    assert torch.allclose(parts, torch.full_like(parts, 4.0))


def test_log_variance_pools_rows_on_request():
    p = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    within = instruments.log_variance(p)
    pooled = instruments.log_variance(p, within_rows=False)
    assert within.item() == pytest.approx((math.log(3) / 2) ** 2 / 2)
    assert pooled.item() == pytest.approx(p.log().var(correction=0).item())


def test_log_variance_leaves_out_masked_pairs():
    p = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    assert instruments.log_variance(p).item() == pytest.approx((math.log(3) / 2) ** 2 / 2)


def test_half_precision_is_measured_in_float32():
    p = torch.randn(32, 32).softmax(-1)
    got = instruments.entropy(p.bfloat16())
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(instruments.entropy(p).item(), abs=0.02)
