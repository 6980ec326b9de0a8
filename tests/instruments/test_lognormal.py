"""Log-normal fits: sampled laws, scipy as the oracle, rates of false alarms."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from lln.instruments import fit_lognormal
from lln.instruments.lognormal import _describe
from tests.instruments.matrices import identity, uniform

LILLIEFORS_5 = 0.895  # table 4.8 of D'Agostino and Stephens, Goodness-of-fit techniques, 1986


def sampled(size: int, sigma: float) -> torch.Tensor:
    p = torch.exp(sigma * torch.randn(size, size, dtype=torch.float64))
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0])
def test_recovers_a_sampled_lognormal_matrix(sigma):
    fit = fit_lognormal(sampled(400, sigma))
    assert fit.entries == 400**2
    assert fit.sigma2.item() == pytest.approx(sigma**2, rel=0.02)
    assert fit.mu.item() == pytest.approx(-math.log(400) - sigma**2 / 2, abs=0.01)
    assert abs(fit.skew.item()) < 0.03
    assert fit.kolmogorov_smirnov.item() < 0.005
    assert torch.allclose(fit.normal_quantiles, fit.log_quantiles, atol=0.03 * sigma)


def test_statistics_equal_scipy():
    p = torch.rand(30, 30, dtype=torch.float64).softmax(-1)
    logs = p.log().flatten()
    fit = fit_lognormal(p)
    n = len(logs)
    z = ((logs - logs.mean()) / logs.std()).numpy()
    expected = stats.goodness_of_fit(
        stats.norm, z, statistic="ad", known_params={"loc": 0, "scale": 1}, n_mc_samples=1
    ).statistic
    assert fit.anderson_darling.item() == pytest.approx(expected * (1 + 0.75 / n + 2.25 / n**2))
    assert fit.kolmogorov_smirnov.item() == pytest.approx(stats.kstest(z, "norm").statistic)
    assert fit.skew.item() == pytest.approx(stats.skew(logs.numpy()))


def test_uniform_scores_are_not_lognormal():
    fit = fit_lognormal(torch.rand(100, 100, dtype=torch.float64).softmax(-1))
    assert fit.rejected and fit.lilliefors > LILLIEFORS_5


@pytest.mark.slow
def test_false_alarms_are_five_percent():
    """The critical values suit fitted parameters: ordinary ones would give hardly any alarm."""
    alarms = {"anderson_darling": 0, "lilliefors": 0}
    trials = 2000
    for _ in range(trials):
        sample = torch.randn(100, dtype=torch.float64).exp()
        values = [_describe(sample, None)[i] for i in (3, 4)]
        alarms["anderson_darling"] += int(values[0] > 0.752)
        alarms["lilliefors"] += int(values[1] * (10 - 0.01 + 0.085) > LILLIEFORS_5)
    for name, count in alarms.items():  # ± 3 standard errors of a binomial
        assert abs(count / trials - 0.05) < 3 * math.sqrt(0.05 * 0.95 / trials), (name, count)


def test_sample_of_entries_is_fixed_and_smaller():
    p = sampled(100, 1.0)
    fit = fit_lognormal(p, entries=500)
    again = fit_lognormal(p, entries=500)
    assert fit.entries == 500 and fit.mu == again.mu
    assert fit.sigma2.item() == pytest.approx(1, rel=0.3)
    assert not fit.rejected


def test_equal_entries_have_no_distance():
    fit = fit_lognormal(torch.stack([uniform(7), identity(7)]))
    assert fit.sigma2.tolist() == pytest.approx([0, 0], abs=1e-25)
    assert fit.mu.tolist() == pytest.approx([-math.log(7), 0])
    assert fit.entries.tolist() == [49, 7]
    assert fit.skew.isnan().all() and fit.anderson_darling.isnan().all()
    assert not fit.rejected.any()


def test_leading_dimensions():
    p = torch.randn(2, 3, 8, 8).softmax(-1)
    fit = fit_lognormal(p)
    assert fit.mu.shape == fit.skew.shape == (2, 3)
    assert fit.log_quantiles.shape == fit.normal_quantiles.shape == (2, 3, 199)
    assert fit.mu.dtype == torch.float32
    assert torch.allclose(fit.mu, p.log().mean((-1, -2)), atol=1e-5)


def test_entries_must_be_positive():
    with pytest.raises(ValueError, match="entries=0"):
        fit_lognormal(uniform(3), entries=0)
