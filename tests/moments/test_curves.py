"""The shipped table: it is what quadrature gives, at every head size, and it is monotone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lln.moments import tabulate
from lln.moments.curves import METHODS, _clenshaw, _cosines, curve, head_position, shape
from lln.moments.tabulate import column, concentration

ACCURACY = 1e-4  # relative, of the concentration reached
VARIANTS = [(method, normalize) for method in METHODS for normalize in (False, True)]
LOWEST, HIGHEST = 1e-4, 64.0


def targets(known, count: int) -> np.ndarray:
    return np.geomspace(LOWEST, min(HIGHEST, known.top), count)


def errors(method, head_dim, normalize_keys, wanted) -> np.ndarray:
    """Relative error of the concentration reached, recomputed by quadrature."""
    found = curve(method, head_dim, normalize_keys).sigma2(torch.tensor(wanted))
    reached = [
        concentration(sigma2, head_dim, method=method, normalize_keys=normalize_keys)
        for sigma2 in found.tolist()
    ]
    return np.abs(np.array(reached) / wanted - 1)


@pytest.mark.parametrize("head_dim", [4, 80, 512])
@pytest.mark.parametrize(("method", "normalize_keys"), VARIANTS[:3])
def test_table_inverts_quadrature(method, normalize_keys, head_dim):
    wanted = targets(shape(method, head_dim, normalize_keys), 9)
    assert errors(method, head_dim, normalize_keys, wanted).max() < ACCURACY


def test_table_inverts_the_slow_integral():
    for head_dim, wanted in ((4, 0.2), (80, 0.01), (80, 1.0), (500, 0.3)):
        assert errors("entropy", head_dim, True, np.array([wanted])) < ACCURACY


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [2, 3, 16, 24, 32, 64, 96, 128, 192, 256, 768, 1024])
@pytest.mark.parametrize(("method", "normalize_keys"), VARIANTS[:3])
def test_table_inverts_quadrature_everywhere(method, normalize_keys, head_dim):
    wanted = targets(shape(method, head_dim, normalize_keys), 40)
    assert errors(method, head_dim, normalize_keys, wanted).max() < ACCURACY


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [2, 16, 64, 100, 256, 1024])
def test_table_inverts_the_slow_integral_everywhere(head_dim):
    wanted = targets(shape("entropy", head_dim, True), 3)
    assert errors("entropy", head_dim, True, wanted).max() < ACCURACY


@pytest.mark.parametrize(("method", "normalize_keys"), VARIANTS[:3])
def test_table_is_what_its_code_makes(method, normalize_keys):
    """One column anew, at a head size between those of the table."""
    fresh = column(method, 72.0, normalize_keys)
    np.testing.assert_allclose(
        curve(method, 72, normalize_keys).coefficients, fresh, rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("head_dim", [2, 3, 4, 7, 16, 33, 64, 100, 128, 256, 511, 1024])
@pytest.mark.parametrize(("method", "normalize_keys"), VARIANTS)
def test_monotone(method, normalize_keys, head_dim):
    """Through the table, below it and beyond its end, where the tangent takes over."""
    y = torch.logspace(-16, 12, 20_000, dtype=torch.float64)
    sigma2 = curve(method, head_dim, normalize_keys).sigma2(y)
    assert sigma2.isfinite().all()
    assert (sigma2.diff() > 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_more_features_need_more_spread(method):
    """Plain LLN averages over them; also shows that the table does not ripple between its nodes."""
    y = torch.tensor([0.01, 0.25, 1.0], dtype=torch.float64)
    columns = [curve(method, d, False).sigma2(y) for d in range(4, 513)]
    assert (torch.stack(columns).diff(dim=0) > 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_limit_of_small_targets(method):
    for d in (4, 64, 512):
        y = torch.tensor([1e-9], dtype=torch.float64)
        assert curve(method, d, False).sigma2(y).item() == pytest.approx(2 * d * 1e-9, rel=1e-4)
        expected = 2 * d * math.sqrt(1e-9 / (d - 1))
        assert curve(method, d, True).sigma2(y).item() == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(("method", "normalize_keys"), VARIANTS)
def test_single_precision_is_enough(method, normalize_keys):
    y = torch.logspace(-6, 3, 500, dtype=torch.float64)
    found = curve(method, 64, normalize_keys)
    torch.testing.assert_close(found.sigma2(y.float()).double(), found.sigma2(y), rtol=5e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_sums_of_the_polynomial_agree(dtype):
    z = torch.linspace(-1, 1, 301, dtype=torch.float64)
    coefficients = curve("entropy", 64, False).coefficients
    exact = np.polynomial.chebyshev.chebval(z.numpy(), coefficients)
    for evaluate in (_clenshaw, _cosines):
        got = evaluate(coefficients, z.to(dtype)).double()
        tolerance = 64 * torch.finfo(dtype).eps
        np.testing.assert_allclose(got, exact, rtol=0, atol=tolerance)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(_cosines(coefficients, z.to(dtype)).double(), got)


def test_the_end_of_the_table_survives_rounding():
    """z may round to just above 1 there, where arccos is not defined."""
    for head_dim in range(2, 200):
        found = curve("variance", head_dim, False)
        y = torch.tensor([found.shape.top, 2 * found.shape.top])
        assert found.sigma2(y).isfinite().all()


def test_continues_along_the_tangent():
    found = curve("variance", 64, False)
    top = found.shape.top
    y = torch.tensor([0.999, 1.0, 1.001, 2.0, 3.0], dtype=torch.float64) * top
    below, at, above, twice, thrice = found.sigma2(y).tolist()
    assert at - below == pytest.approx(above - at, rel=1e-2)
    assert thrice - twice == pytest.approx(twice - at, rel=1e-9)


def test_target_undoes_position():
    for variant in VARIANTS:
        known = shape(variant[0], 48, variant[1])
        y = torch.tensor(0.7, dtype=torch.float64)
        assert known.target(known.position(y).item()) == pytest.approx(0.7, rel=1e-12)


@pytest.mark.parametrize("head_dim", [1, 1025])
def test_head_sizes_outside_the_table_are_refused(head_dim):
    with pytest.raises(ValueError, match=rf"head_dim={head_dim}.*2 to 1024.*paper.*fit_line"):
        curve("entropy", head_dim, False)


def test_solver_says_when_it_fails():
    assert tabulate.solve(lambda x: x**1.5, 8.0, 1.0) == pytest.approx(4.0, rel=1e-6)
    with pytest.raises(RuntimeError, match=r"value=2\.0"):
        tabulate.solve(lambda x: 1 + x / (1 + x) / 2, 2.0, 1.0)


def test_a_table_has_a_polynomial_in_the_head_size_for_each_coefficient(monkeypatch):
    """Of columns that are a straight line: exactly that line."""
    monkeypatch.setattr(
        tabulate, "column", lambda method, d, normalize_keys: np.array([1.5, 2 * head_position(d)])
    )
    table = np.array(tabulate.tabulate("variance", False))
    assert table.shape == (tabulate.HEAD_SIZES, 2)
    np.testing.assert_allclose(table[:2], [[1.5, 0.0], [0.0, 2.0]], atol=1e-5)
    np.testing.assert_allclose(table[2:], 0, atol=1e-5)
