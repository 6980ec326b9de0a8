"""Spectrum: theorem 3.3, causal matrices, Arnoldi against LAPACK."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from lln.instruments import (
    CausalMatrixWarning,
    centred_singular_value,
    second_eigenvalue,
    spectral_gap,
)
from lln.instruments.arnoldi import NotConverged, largest_eigenvalue, random_start
from tests.instruments.matrices import biased, cycle, gaussian, identity, previous_token, softmax


def test_two_by_two():
    p = torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=torch.float64)  # λ₂ = trace − 1
    assert second_eigenvalue(p).item() == pytest.approx(0.5)


def test_second_eigenvalue_equals_sorted_eigenvalues():
    p = torch.randn(3, 40, 40, dtype=torch.float64).mul(2).softmax(-1)
    moduli = torch.linalg.eigvals(p).abs().sort(-1, descending=True).values
    assert torch.allclose(second_eigenvalue(p), moduli[:, 1], atol=1e-12)


def test_complex_pair():
    """A lazy walk around a cycle: λ = ½ + ½ exp(2πi/N)."""
    p = (identity(12) + cycle(12)) / 2
    assert second_eigenvalue(p).item() == pytest.approx(math.cos(math.pi / 12))


def test_singular_value_equals_eigenvalue_for_normal_matrices():
    """Theorem 3.3 as an identity: symmetric and circulant matrices are normal."""
    circulant = 0.7 * cycle(9) + 0.2 * cycle(9).T + 0.1 * identity(9)
    symmetric = circulant @ circulant.T
    for p in (circulant, symmetric):
        assert centred_singular_value(p).item() == pytest.approx(second_eigenvalue(p).item())


def test_singular_value_exceeds_eigenvalue_in_general():
    """The counter-example of docs/equations.md: a previous-token head of 16 tokens."""
    p = previous_token(16)
    with pytest.warns(CausalMatrixWarning):
        assert second_eigenvalue(p).item() == 0
    assert centred_singular_value(p).item() == pytest.approx(1.37, abs=5e-3)


def test_causal_matrix_gives_its_diagonal_and_says_so():
    p = torch.randn(10, 10, dtype=torch.float64).tril()
    p = p.masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf).softmax(-1)
    expected = p.diagonal()[1:].max()
    with pytest.warns(CausalMatrixWarning, match="its eigenvalues are its diagonal"):
        gap = spectral_gap(p)
    assert gap.item() == pytest.approx(1 - expected.item())


def test_one_token():
    p = torch.ones(2, 1, 1)
    assert second_eigenvalue(p).tolist() == [0, 0]
    assert centred_singular_value(p).tolist() == [0, 0]


@pytest.fixture
def low_limit(monkeypatch):
    """Matrices of more than 200 tokens count as large."""
    monkeypatch.setattr(sys.modules["lln.instruments.spectral_gap"], "DENSE_LIMIT", 200)


def test_arnoldi_equals_lapack_above_the_dense_limit(low_limit):
    q, k = gaussian(400, 16, temperature=0.7)
    p = softmax(q, k)[0, 0]
    centred = p - p.mean(0)
    eigenvalue = torch.linalg.eigvals(centred).abs().max().item()
    singular = torch.linalg.matrix_norm(centred, ord=2).item()
    assert second_eigenvalue(p).item() == pytest.approx(eigenvalue, abs=1e-6)
    assert centred_singular_value(p).item() == pytest.approx(singular, abs=1e-8)


def test_large_matrices_without_a_spectrum():
    assert second_eigenvalue(identity(1100)).item() == pytest.approx(1)
    equal = biased(torch.rand(1100, dtype=torch.float64).softmax(-1))
    assert second_eigenvalue(equal).item() == 0
    assert centred_singular_value(equal).item() == 0


def test_large_permutation_falls_back_to_lapack(low_limit):
    assert second_eigenvalue(cycle(257)).item() == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_block_arnoldi_equals_lapack(temperature):
    q, k = gaussian(400, 16, temperature)
    p = softmax(q, k)[0, 0]
    centred = p - p.mean(0)
    exact = torch.linalg.eigvals(centred).abs().max().item()
    got = largest_eigenvalue(centred.matmul, q[0, 0], tolerance=1e-7)
    assert got == pytest.approx(exact, abs=1e-7)


def test_block_arnoldi_restarts():
    symmetric = torch.from_numpy(np.random.default_rng(0).standard_normal((500, 500)))
    symmetric = symmetric + symmetric.T
    exact = torch.linalg.eigvalsh(symmetric).abs().max().item()
    got = largest_eigenvalue(symmetric.matmul, random_start(500), tolerance=1e-5, block=16)
    assert got == pytest.approx(exact, rel=1e-8)


def test_block_arnoldi_says_when_it_fails():
    with pytest.raises(NotConverged, match="tolerance=1e-12 after 1 products at N=300"):
        largest_eigenvalue(cycle(300).matmul, random_start(300), tolerance=1e-12, rounds=1)
