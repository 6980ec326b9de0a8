"""Moment matching in one launch: the numbers of the formulas in float64, NaN in its entry alone."""

from __future__ import annotations

import pytest
import torch

from lln import moments
from lln.moments import calibration, matching
from lln.moments.line import MomentFit
from tests.helpers import relative_error

METHODS = [
    ("paper", False),
    (MomentFit(0.2, -0.5, "a test"), False),
    ("variance", False),
    ("entropy", False),
    ("variance", True),
    ("entropy", True),
]


@pytest.fixture(autouse=True)
def launches(monkeypatch, device):
    """What the kernel was asked; without a GPU the dispatch is told of the interpreter."""
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    seen = []
    one_launch = matching._match_in_one_launch

    def spy(*given):
        seen.append(given)
        return one_launch(*given)

    monkeypatch.setattr(matching, "_match_in_one_launch", spy)
    return seen


def deviations(device, shape=(5, 31)):
    """From nearly constant to far beyond the top of every curve."""
    powers = torch.linspace(-5, 1.2, shape[0] * shape[1], dtype=torch.float64).view(shape)
    sigma_q = 10**powers
    return sigma_q.to(device), (1.5 * sigma_q.flip(0)).to(device)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("method, normalize_keys", METHODS)
@pytest.mark.parametrize("given", [False, True])
def test_numbers_are_those_of_float64(launches, method, normalize_keys, head_dim, given, device):
    sigma_q, sigma_k = deviations(device)
    target = 0.7 * (sigma_q * sigma_k) ** 2 + 1e-3 if given else None
    options = {"method": method, "normalize_keys": normalize_keys}
    exact = moments.match_moments(sigma_q, sigma_k, head_dim, score_variance=target, **options)
    assert not launches  # float64 is left to the formulas
    sigmas = sigma_q.float(), sigma_k.float()
    target = None if target is None else target.float()
    got = moments.match_moments(*sigmas, head_dim, score_variance=target, **options)
    assert len(launches) == 1
    for x, y in zip(got, exact, strict=True):
        assert x.dtype == torch.float32 and x.shape == y.shape
        assert ((x.double() - y) / y).abs().max() < 2e-5


@pytest.mark.parametrize("method", ["paper", "entropy"])
def test_nan_stays_in_its_entry_and_zero_is_finite(method, device):
    sigma = torch.tensor([1.0, float("nan"), 0.0, float("inf")], device=device)
    one = torch.ones(4, device=device)
    alpha, beta = moments.match_moments(sigma, one, 64, method=method)
    assert alpha.isnan().tolist()[:3] == [False, True, False]
    assert beta.isnan().tolist()[:3] == [False, True, False]
    assert alpha[:1].isfinite().all() and alpha[2:3].isfinite().all()


def test_what_the_kernel_cannot_take_goes_to_the_formulas(launches, device):
    sigma = torch.rand(4, 3, device=device) + 0.5
    expected = moments.match_moments(sigma.double(), sigma.double(), 64)[0]
    slopes = sigma.clone().requires_grad_()
    moments.match_moments(slopes, sigma, 64)[0].sum().backward()
    assert slopes.grad is not None
    for sigma_q, sigma_k in ((sigma, 1.0), (sigma.T, sigma.T), (sigma, sigma[:1])):
        moments.match_moments(sigma_q, sigma_k, 64)
    assert not launches
    got = moments.match_moments(sigma, sigma, 64)[0]
    assert len(launches) == 1
    assert relative_error(got, expected) < 1e-6


def test_transforms_of_functions_go_to_the_formulas(launches, device):
    sigma = torch.rand(4, 3, device=device) + 0.5

    def alpha(x):
        return moments.match_moments(x, x, 64, method="entropy")[0]

    mapped = torch.vmap(alpha)(sigma)
    slopes = torch.func.jacrev(alpha)(sigma[0])
    assert not launches
    torch.testing.assert_close(mapped, alpha(sigma), rtol=2e-5, atol=0)
    assert slopes.shape == (3, 3)


def test_no_heads_need_no_launch(device):
    alpha, beta = moments.match_moments(*(torch.empty(0, 3, device=device),) * 2, 64)
    assert alpha.shape == beta.shape == (0, 3)


@pytest.mark.parametrize("method, normalize_keys", METHODS[:4])
def test_measuring_and_matching_in_two_launches_changes_no_bit(
    method, normalize_keys, launches, device, monkeypatch
):
    """Beside the same in three, with masks, head groups, and a sample without a valid token."""
    q, k = torch.randn(3, 4, 40, 16, device=device), 2 * torch.randn(3, 2, 70, 16, device=device)
    masks = {
        "key_mask": torch.rand(3, 70, device=device) > 0.4,
        "query_mask": torch.rand(3, 40, device=device) > 0.4,
    }
    masks["key_mask"][1] = masks["query_mask"][1] = False
    options = {"method": method, "normalize_keys": normalize_keys}
    for given in (masks, {}):
        found = moments.measure_scales(q, k, **given, **options)
        assert not launches
        with monkeypatch.context() as patch:
            patch.setattr(calibration, "in_two_launches", lambda *_: False)
            expected = moments.measure_scales(q, k, **given, **options)
        assert len(launches) == 1
        for x, y in zip(found, expected, strict=True):
            assert x.equal(y) and x.isfinite().all()
        launches.clear()


def test_where_nothing_is_measured(device):
    for q, k in (
        (torch.empty(2, 4, 0, 16), torch.empty(2, 2, 0, 16)),
        (torch.empty(0, 4, 3, 16),) * 2,
    ):
        alpha, beta = moments.measure_scales(q.to(device), k.to(device))
        assert alpha.shape == q.shape[:2] and beta.shape == k.shape[:2]
        assert alpha.isfinite().all() and beta.isfinite().all()
