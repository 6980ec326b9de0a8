"""Measured statistics against the plain formulas: masks, groups, precision."""

from __future__ import annotations

import pytest
import torch

from lln.moments import score_variance, standard_deviations
from lln.moments.statistics import packed_standard_deviations
from tests.helpers import random_qkv

NAN = float("nan")


def mask_of(*rows: str) -> torch.Tensor:
    return torch.tensor([[token == "x" for token in row] for row in rows])


def explicit_scores(q, k, scale=None):
    """Every score of a key head with all queries that read it: [Hkv, G·N·M] of one sample."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, dim=1).transpose(-1, -2)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.unflatten(1, (k.shape[1], group)).flatten(2)


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2), (3, 1)])
def test_deviation_is_that_of_all_elements(heads, key_heads):
    q, k, _ = random_qkv(2, heads, 17, 11, key_heads=key_heads)
    q, k = 3 * q + 1, k * torch.arange(1, key_heads + 1)[:, None, None] - 2
    sigma_q, sigma_k = standard_deviations(q, k)
    assert sigma_q.shape == sigma_k.shape == (2, key_heads)
    pooled = q.unflatten(1, (key_heads, -1)).flatten(2)
    torch.testing.assert_close(sigma_q, pooled.std(-1, correction=0))
    torch.testing.assert_close(sigma_k, k.flatten(2).std(-1, correction=0))


@pytest.mark.parametrize("key_heads", [4, 2])
def test_packed_deviations_are_those_of_each_sequence(key_heads):
    q, k, _ = random_qkv(1, 4, 9, 12, key_heads=key_heads)
    masks = {"query_mask": mask_of("xx.xxxx.x"), "key_mask": mask_of("x.xxxxxxx..x")}
    q = q.masked_fill(~masks["query_mask"][:, None, :, None], NAN)
    starts_q, starts_k = [0, 4, 4, 9], [0, 2, 5, 12]
    got = packed_standard_deviations(
        *(x[0].transpose(0, 1) for x in (q, k)),
        *(torch.tensor(starts) for starts in (starts_q, starts_k)),
        **{name: mask[0] for name, mask in masks.items()},
    )
    for s in range(3):
        queries, keys = slice(*starts_q[s : s + 2]), slice(*starts_k[s : s + 2])
        alone = standard_deviations(
            q[:, :, queries],
            k[:, :, keys],
            query_mask=masks["query_mask"][:, queries],
            key_mask=masks["key_mask"][:, keys],
        )
        torch.testing.assert_close((got[0][s], got[1][s]), (alone[0][0], alone[1][0]))


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_score_variance_is_that_of_the_explicit_matrix(heads, key_heads, scale):
    q, k, _ = random_qkv(2, heads, 17, 11, key_heads=key_heads)
    q, k = q @ torch.randn(8, 8).double() + 0.5, k + torch.randn(8).double()  # means, correlation
    explicit = explicit_scores(q, k, scale).var(-1, correction=0)
    torch.testing.assert_close(score_variance(q, k, scale=scale), explicit)


def test_score_variance_contains_the_cross_term():
    """Features that are large in q and k together: eq. (5)'s C_cross is not 0."""
    profile = torch.linspace(0.1, 3, 16, dtype=torch.float64)
    q, k, _ = (x * profile for x in random_qkv(1, 1, 500, width=16))
    sigma_q, sigma_k = standard_deviations(q, k)
    assert score_variance(q, k).item() > 1.3 * (sigma_q * sigma_k).square().item()


def test_score_variance_of_independent_inputs_is_the_product():
    q, k, _ = random_qkv(1, 1, 4000, width=32)
    sigma_q, sigma_k = standard_deviations(q, 2 * k)
    product = (sigma_q * sigma_k).square().item()
    assert score_variance(q, 2 * k).item() == pytest.approx(product, rel=0.03)


@pytest.mark.parametrize("content", [0.0, 1e6, NAN, float("inf")])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_masked_tokens_do_not_count(content, key_heads):
    q, k, _ = random_qkv(2, 4, 6, 5, key_heads=key_heads)
    key_mask, query_mask = mask_of("xx.x.", "..xxx"), mask_of("xxxx..", "x.x.x.")
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    hidden_q = q.masked_fill(~query_mask[:, None, :, None], content)
    hidden_k = k.masked_fill(~key_mask[:, None, :, None], content)
    for function in (lambda *a, **m: torch.stack(standard_deviations(*a, **m)), score_variance):
        got = function(hidden_q, hidden_k, **masks)
        for b in range(2):
            alone = function(q[b : b + 1, :, query_mask[b]], k[b : b + 1, :, key_mask[b]])
            torch.testing.assert_close(got[..., b : b + 1, :], alone)


@pytest.mark.parametrize("which", ["key_mask", "query_mask"])
def test_one_mask_is_never_guessed_from_the_other(which):
    q, k, _ = random_qkv(1, 1, 6, 6)
    mask = mask_of("xxx...")
    sigma_q, sigma_k = standard_deviations(q, k, **{which: mask})
    all_q, all_k = standard_deviations(q, k)
    if which == "key_mask":
        assert torch.equal(sigma_q, all_q) and not torch.equal(sigma_k, all_k)
    else:
        assert torch.equal(sigma_k, all_k) and not torch.equal(sigma_q, all_q)


def test_nothing_to_measure_is_zero():
    q, k, _ = random_qkv(2, 2, 5)
    nothing = mask_of(".....", "xxxxx")
    sigma_q, sigma_k = standard_deviations(q, k, key_mask=nothing, query_mask=nothing)
    for sigma in (sigma_q, sigma_k):
        assert (sigma[0] == 0).all() and (sigma[1] > 0).all()
    variance = score_variance(q, k, key_mask=nothing)
    assert (variance[0] == 0).all() and (variance[1] > 0).all()
    empty = q[:, :, :0]
    assert (standard_deviations(empty, k)[0] == 0).all()
    assert (standard_deviations(q, empty)[1] == 0).all()
    assert (score_variance(q, empty) == 0).all()


def test_one_token_is_measured_over_its_features():
    q, k, _ = random_qkv(1, 1, 1)
    sigma_q, _ = standard_deviations(q, k)
    torch.testing.assert_close(sigma_q, q.flatten(2).std(-1, correction=0))
    assert score_variance(q, k).item() == 0


def test_nan_stays_in_its_sample_and_head():
    q, k, _ = random_qkv(2, 4, 5, key_heads=2)
    q[0, 1, 2, 3] = NAN  # in the group of key head 0
    sigma_q, sigma_k = standard_deviations(q, k)
    assert sigma_q.isnan().tolist() == [[True, False], [False, False]]
    assert sigma_k.isfinite().all()
    assert score_variance(q, k).isnan().tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4])
def test_a_large_mean_costs_no_digits(mean):
    exact_q, exact_k, _ = (x.float() + mean for x in random_qkv(1, 2, 5000, width=64))
    sigma = torch.stack(standard_deviations(exact_q, exact_k)).double()
    expected = torch.stack(standard_deviations(exact_q.double(), exact_k.double()))
    assert sigma.sub(expected).abs().max() / expected.min() < 2e-6
    variance = score_variance(exact_q, exact_k).double()
    expected = score_variance(exact_q.double(), exact_k.double())
    torch.testing.assert_close(variance, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_accumulates_in_float32_or_wider(dtype):
    q, k, _ = (x.to(dtype) for x in random_qkv(1, 2, 3000, width=16))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    got = [*standard_deviations(q, k), score_variance(q, k)]
    exact = [*standard_deviations(q.double(), k.double()), score_variance(q.double(), k.double())]
    for x, y in zip(got, exact, strict=True):
        assert x.dtype == wide
        torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=0)


def test_autocast_changes_nothing():
    q, k, _ = (x.float() for x in random_qkv(1, 2, 300, width=16))
    plain = [*standard_deviations(q, k), score_variance(q, k)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = [*standard_deviations(q, k), score_variance(q, k)]
    for x, y in zip(plain, inside, strict=True):
        assert y.dtype == torch.float32 and torch.equal(x, y)


def test_constants_of_the_backward_pass():
    q, k, _ = (x.requires_grad_() for x in random_qkv(1, 1, 5))
    assert not any(x.requires_grad for x in (*standard_deviations(q, k), score_variance(q, k)))


def test_layout_does_not_matter():
    q, k, _ = random_qkv(2, 4, 9, key_heads=2)
    other_q, other_k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    torch.testing.assert_close(standard_deviations(other_q, other_k), standard_deviations(q, k))
    torch.testing.assert_close(score_variance(other_q, other_k), score_variance(q, k))


Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)
BAD = {
    "rank": ((Q[0], K), {}, ValueError, r"q has shape \[4, 5, 8\]"),
    "width": ((Q, K[..., :4]), {}, ValueError, "q has width 8 but the keys have 4"),
    "heads": ((Q[:, :3], K), {}, ValueError, "3 heads.*2 key heads"),
    "batch": ((Q[:1], K), {}, ValueError, "batch size 1, k has 2"),
    "dtype": ((Q, K.double()), {}, TypeError, "float32 but k is torch.float64"),
    "float mask": ((Q, K), {"key_mask": torch.ones(2, 7)}, TypeError, "key_mask.*bool"),
    "mask shape": ((Q, K), {"query_mask": mask_of("xxxxxxx")}, ValueError, r"\[2, 5\]"),
}


@pytest.mark.parametrize("function", [standard_deviations, score_variance])
@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_is_explained(case, function):
    args, options, error, message = BAD[case]
    with pytest.raises(error, match=message):
        function(*args, **options)
