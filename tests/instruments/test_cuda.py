"""The instruments on a CUDA device give the numbers of the CPU."""

from __future__ import annotations

import pytest
import torch

from lln.instruments import MEASURES, entropy, fit_lognormal, measure, spectral_gap
from tests.instruments.matrices import gaussian, softmax

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [100, 1200])
@pytest.mark.parametrize("kernel", ["softmax", "lln", "relu_linear"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_measure(tokens, kernel, is_causal):
    q, k = gaussian(tokens, 16, heads=2)
    scales = {"alpha": 2.0, "beta": 2.0} if kernel == "lln" else {}
    key_mask = torch.arange(tokens)[None] < tokens - 7
    options = {"kernel": kernel, "is_causal": is_causal, **scales}
    expected = measure(q, k, key_mask=key_mask, **options)
    found = measure(q.cuda(), k.cuda(), key_mask=key_mask.cuda(), **options)
    for name in MEASURES:
        got = getattr(found, name)
        assert got.is_cuda
        assert torch.allclose(got.cpu(), getattr(expected, name), atol=5e-5, equal_nan=True), name


def test_measures_of_a_matrix():
    p = softmax(*gaussian(64, 8, heads=3))
    for function in (entropy, spectral_gap, lambda p: fit_lognormal(p).skew):
        assert torch.allclose(function(p.cuda()).cpu(), function(p))
