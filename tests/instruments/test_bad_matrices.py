"""A matrix that is no attention matrix is refused, with its fault and a remedy."""

from __future__ import annotations

import pytest
import torch

from lln import instruments
from tests.instruments.matrices import uniform

MEASURES = (
    "entropy",
    "renyi2_entropy",
    "effective_tokens",
    "row_variance",
    "log_variance",
    "column_bias",
    "mutual_information",
    "second_eigenvalue",
    "spectral_gap",
    "centred_singular_value",
    "fit_lognormal",
)


def with_nan():
    p = uniform(4)
    p[2, 1] = torch.nan
    return p


BAD = {
    "not_normalised": (2 * uniform(4), "sums to 2.*divide each row by its sum"),
    "negative": (torch.tensor([[1.5, -0.5], [0.5, 0.5]]), "negative entry .-0.5.*softmax"),
    "nan": (with_nan(), r"p\[2, 1\] = nan; every entry must be finite"),
    "masked_row": (torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "sums to 0.*leave out rows"),
    "empty": (torch.ones(0, 4), "non-empty"),
    "vector": (torch.ones(4) / 4, r"shape \(4,\)"),
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("fault", BAD)
def test_bad_matrix(measure, fault):
    p, message = BAD[fault]
    with pytest.raises(ValueError, match=message):
        getattr(instruments, measure)(p)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("p", [torch.ones(2, 2, dtype=torch.int64), [[1.0]], None])
def test_not_a_floating_tensor(measure, p):
    with pytest.raises(TypeError, match="floating-point tensor"):
        getattr(instruments, measure)(p)


@pytest.mark.parametrize("measure", ["second_eigenvalue", "spectral_gap"])
def test_eigenvalues_need_a_square_matrix(measure):
    with pytest.raises(ValueError, match=r"as many keys as queries.*centred_singular_value"):
        getattr(instruments, measure)(torch.full((2, 4), 0.25))


def test_rounding_of_each_dtype_is_accepted():
    scores = torch.randn(64, 512)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert instruments.entropy(scores.to(dtype).softmax(-1)).isfinite()
