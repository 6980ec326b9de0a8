"""measure_scales: from q and k to alpha and beta."""

from __future__ import annotations

import pytest
import torch

from lln.moments import PAPER, match_moments, measure_scales, score_variance, standard_deviations
from lln.moments.calibration import measure_packed_scales
from tests.helpers import random_qkv

METHODS = ("paper", "variance", "entropy", PAPER)


@pytest.mark.parametrize("normalize_keys", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_is_measuring_and_matching(method, normalize_keys):
    q, k, _ = random_qkv(3, 4, 9, 7, key_heads=2)
    q, k = 1.5 * q + 0.3, k * torch.tensor([0.5, 2.0])[:, None, None]
    masks = {"key_mask": torch.rand(3, 7) > 0.3, "query_mask": torch.rand(3, 9) > 0.3}
    options = {"method": method, "normalize_keys": normalize_keys}
    alpha, beta = measure_scales(q, k, **masks, **options)
    expected = match_moments(*standard_deviations(q, k, **masks), 8, **options)
    assert alpha.shape == (3, 4) and beta.shape == (3, 2)
    torch.testing.assert_close(alpha, expected[0].repeat_interleave(2, dim=1))
    torch.testing.assert_close(beta, expected[1])


def test_the_variance_of_the_scores_is_larger_where_features_go_together():
    profile = torch.linspace(0.1, 3, 16, dtype=torch.float64)
    q, k, _ = (x * profile for x in random_qkv(1, 1, 300, width=16))
    product, _ = measure_scales(q, k, method="entropy")
    options = {"method": "entropy", "score_variance": score_variance(q, k)}
    measured, _ = match_moments(*standard_deviations(q, k), 16, **options)
    assert measured.item() > 1.05 * product.item()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_packed_sequences_are_measured_as_samples_are(method):
    q, k, _ = random_qkv(3, 4, 9, key_heads=2)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k)]
    cu = torch.tensor([0, 9, 18, 27])
    found = measure_packed_scales(*flat, cu, cu, method=method)
    torch.testing.assert_close(found, measure_scales(q, k, method=method))


def test_samples_and_heads_do_not_see_each_other():
    q, k, _ = random_qkv(3, 4, 9, key_heads=2)
    alpha, beta = measure_scales(q, k)
    louder_q, louder_k = q.clone(), k.clone()
    louder_q[1, :2] *= 5
    louder_k[1, 0] *= 5
    louder = measure_scales(louder_q, louder_k)
    changed = torch.zeros(3, 4, dtype=torch.bool)
    changed[1, :2] = True
    assert torch.equal(louder[0] != alpha, changed)
    assert torch.equal(louder[1] != beta, changed[:, ::2])


def test_is_a_constant_of_the_backward_pass():
    q, k, _ = (x.requires_grad_() for x in random_qkv(1, 2, 5))
    assert not any(scale.requires_grad for scale in measure_scales(q, k))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_always_finite(method):
    """Constant inputs, one token, no token, no valid token, large inputs."""
    q, k, _ = (x.float() for x in random_qkv(2, 2, 6))
    none = torch.zeros(2, 6, dtype=torch.bool)
    cases = [
        (torch.ones_like(q), k, {}),
        (torch.zeros_like(q), torch.zeros_like(k), {}),
        (q[:, :, :1], k[:, :, :1], {}),
        (q[:, :, :0], k, {}),
        (q, k[:, :, :0], {}),
        (q, k, {"key_mask": none, "query_mask": none}),
        (1e3 * q, 1e3 * k, {}),
        (1e-6 * q, 1e-6 * k, {}),
    ]
    for case_q, case_k, masks in cases:
        for scale in measure_scales(case_q, case_k, method=method, **masks):
            assert scale.isfinite().all() and (scale >= 0).all()


def test_half_precision_inputs_get_float32_scales():
    q, k, _ = (x.half() for x in random_qkv(1, 2, 6))
    alpha, beta = measure_scales(q, k)
    assert alpha.dtype == beta.dtype == torch.float32


@pytest.mark.slow
def test_compile_keeps_one_graph():
    torch.compiler.reset()

    def scales(q, k, mask):
        return measure_scales(q, k, key_mask=mask, method="entropy")

    compiled = torch.compile(scales, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (9, 12):
        q, k, _ = random_qkv(2, 4, tokens, key_heads=2)
        mask = torch.rand(2, tokens) > 0.3
        torch.testing.assert_close(compiled(q, k, mask), scales(q, k, mask))
