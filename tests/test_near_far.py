"""lln.attention with one normaliser, windows and features: what users call."""

from __future__ import annotations

import pytest
import torch

import lln
from lln.moments.levels import match_level
from lln.ops import reference
from tests.helpers import random_qkv

JOINT = {"near": lln.Near(16, overlap=5, sinks=2, joint=True)}
APART = {"near": lln.Near(16, overlap=5, sinks=2)}
SCALES = {"alpha": 1.7, "beta": 1.4}


def definition(q, k, v, gamma, *, is_causal=False, key_mask=None, features=None):
    q_far, k_far = (q, k) if features is None else features
    scales = {name: torch.full((q.shape[0], 1), x, dtype=q.dtype) for name, x in SCALES.items()}
    return reference.near_far(
        q, k, v, q_far=q_far, k_far=k_far, gamma=gamma, block=16, overlap=5, sinks=2,
        scale=q.shape[-1] ** -0.5, is_causal=is_causal, key_mask=key_mask,
        alpha=scales["alpha"].expand(-1, q.shape[1]), beta=scales["beta"].expand(-1, k.shape[1]),
    )  # fmt: skip


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(), (4,), (2, 4)], ids=str)
def test_a_given_level(shape, is_causal, impl):
    q, k, v = random_qkv(2, 4, 50, key_heads=2)
    mask = torch.rand(2, 50) > 0.2
    gamma = torch.randn(shape, dtype=torch.float64)
    options = {"is_causal": is_causal, "key_mask": mask}
    out = lln.attention(q, k, v, gamma=gamma, **JOINT, **SCALES, **options, impl=impl)
    torch.testing.assert_close(out, definition(q, k, v, gamma.expand(2, 4), **options))


def test_a_level_is_measured_where_none_is_given():
    q, k, v = random_qkv(2, 4, 50, key_heads=2)
    mask, real = torch.rand(2, 50) > 0.2, torch.rand(2, 50) > 0.2
    q, k = q.masked_fill(~real[:, None, :, None], torch.nan), k * 2
    measured = lln.attention(q, k, v, key_mask=mask, query_mask=real, **JOINT)
    alpha, beta = lln.moments.measure_scales(q, k, key_mask=mask, query_mask=real)
    window = {**JOINT, "key_mask": mask, "query_mask": real}
    gamma = match_level(q, k, alpha=alpha, beta=beta, **window)
    scales = {"alpha": alpha, "beta": beta, "gamma": gamma}
    expected = lln.attention(q, k, v, key_mask=mask, **scales, **JOINT)
    rows = real[:, None, :, None].expand_as(expected)
    torch.testing.assert_close(measured[rows], expected[rows])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries, keys", [(30, 30), (30, 40), (40, 30)])
def test_the_level_is_the_formula(queries, keys, is_causal):
    """Near keys get softmax's share on average, by all pairs."""
    q, k, _ = random_qkv(2, 4, queries, keys, key_heads=2)
    valid, real = torch.rand(2, keys) > 0.3, torch.rand(2, queries).argsort(1) < 20
    k = k.masked_fill(~valid[:, None, :, None], torch.nan)
    alpha, beta = torch.rand(2, 4).double() + 1, torch.rand(2, 2).double() + 1
    window = lln.Near(8, overlap=3, sinks=2)
    masks = {"key_mask": valid, "is_causal": is_causal}
    level = match_level(
        q, k, alpha=alpha, beta=beta, near=window, **masks, query_mask=real, rows=20
    )
    seen = reference.visible(queries, keys, **masks)
    near = reference.near_field(queries, keys, window, **masks)
    k = k.nan_to_num()
    linear = reference.lln_scores(q, k, alpha=alpha, beta=beta) + level[..., None, None]
    exact = reference.softmax_scores(q, k, scale=8**-0.5)
    counted = (seen & ~near).any(-1) & real[:, None]
    shares = []
    for scores in (exact, torch.where(near, exact, linear)):
        p = reference.normalize_rows(scores, seen)
        shares.append(((p * near).sum(-1) * counted).sum(-1))
    torch.testing.assert_close(*shares, rtol=1e-5, atol=1e-5)


def test_padding_does_not_change_the_level():
    """Queries are sampled among those that count, so their number of neighbours is the same."""
    q, k, _ = random_qkv(1, 2, 100)
    scales = {"alpha": torch.ones(1, 2), "beta": torch.ones(1, 2), "near": 16}
    alone = match_level(q, k, **scales)
    mask = torch.arange(140)[None] < 100
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 40), value=9.0) for x in (q, k)]
    found = match_level(*padded, **scales, key_mask=mask, query_mask=mask)
    torch.testing.assert_close(found, alone)


def test_the_level_of_nothing_is_zero():
    q, k, _ = random_qkv(2, 2, 5)
    scales = {"alpha": torch.ones(2, 2), "beta": torch.ones(2, 2), "near": 2}
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    assert (match_level(q, k, key_mask=nothing, **scales) == 0).all()
    assert (match_level(q, k, query_mask=nothing, **scales) == 0).all()
    assert (match_level(q, k, **{**scales, "near": 5}) == 0).all()


@pytest.mark.parametrize("pull", [0.3, 1.0, 2.0])
def test_neighbours_that_attract_each_other_keep_the_mass_that_softmax_gives_them(pull):
    """Scores of a variance in the hundreds, as trained models have them."""
    drift = pull * torch.randn(1, 2, 512, 64).cumsum(2) / 8
    q, k = torch.randn(1, 2, 512, 64) + drift, torch.randn(1, 2, 512, 64) + drift
    eye = torch.eye(512).expand(1, 2, 512, 512)
    p = lln.attention(q, k, eye, method="entropy", near=lln.Near(128, joint=True))
    soft = torch.softmax(q @ k.transpose(-1, -2) / 8, dim=-1)
    near = reference.near_field(512, 512, lln.Near(128))
    shares = [(x * near).sum(-1).mean().item() for x in (p, soft)]
    assert abs(shares[0] - shares[1]) < 0.04


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("temperature, bits", [(0.5, 0.4), (1.0, 0.1), (2.0, 0.1)])
def test_on_gaussians_rows_are_as_concentrated_as_those_of_softmax(width, temperature, bits):
    q, k = (temperature**-0.5 * torch.randn(2, 2, 512, width) for _ in range(2))
    eye = torch.eye(512).expand(2, 2, 512, 512)
    p = lln.attention(q, k, eye, method="entropy", near=lln.Near(128, joint=True))
    soft = torch.softmax(q @ k.transpose(-1, -2) * width**-0.5, dim=-1)
    near = reference.near_field(512, 512, lln.Near(128))
    entropies = [-(x * x.clamp(min=1e-30).log2()).sum(-1).mean().item() for x in (p, soft)]
    assert abs(entropies[0] - entropies[1]) < bits
    shares = [(x * near).sum(-1).mean().item() for x in (p, soft)]
    assert abs(shares[0] - shares[1]) < 0.02


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [JOINT, {**APART, "mix": 0.3}, APART], ids=str)
def test_packed_is_one_by_one(options, is_causal):
    lengths, keys = [7, 40, 33, 1], [7, 40, 20, 5]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0) for x in (lengths, keys))
    q = torch.randn(sum(lengths), 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(sum(keys), 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.rand(sum(keys)) > 0.2
    scales = {}
    if is_causal:
        scales = {**SCALES, **({"gamma": -1.0} if options is JOINT else {})}
    options = {**options, "is_causal": is_causal}
    out = lln.attention_varlen(q, k, v, cu_q, cu_k, key_mask=mask, **options, **scales)
    alone = []
    for s in range(4):
        one, other = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        dense = (x.transpose(0, 1)[None] for x in (q[one], k[other], v[other]))
        single = lln.attention(*dense, key_mask=mask[None, other], **options, **scales)
        alone.append(single[0].transpose(0, 1))
    torch.testing.assert_close(out, torch.cat(alone))
    d_out = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), d_out)
    torch.testing.assert_close(found, torch.autograd.grad(torch.cat(alone), (q, k, v), d_out))


def test_a_number_is_the_weight_of_lln():
    q, k, v = random_qkv(2, 3, 40)
    linear = lln.attention(q, k, v, **SCALES)
    local = lln.attention(q, k, v, near=16, mix=0.0, **SCALES)
    weight = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    for impl in ("eager", "reference"):
        out = lln.attention(q, k, v, near=16, mix=weight, **SCALES, impl=impl)
        expected = torch.lerp(local, linear, weight[:, None, None])
        torch.testing.assert_close(out, expected)
        out = lln.attention(q, k, v, near=16, mix=0.3, **SCALES, impl=impl)
        torch.testing.assert_close(out, torch.lerp(local, linear, 0.3), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_features_of_ones_own(is_causal):
    q, k, v = random_qkv(2, 4, 50, key_heads=2)
    far = torch.randn(2, 4, 50, 24).double(), torch.randn(2, 2, 50, 24).double()
    features = {"features": far, "is_causal": is_causal}
    alone = lln.attention(q, k, v, **features, **SCALES)
    op = {"is_causal": is_causal, **SCALES}
    torch.testing.assert_close(alone, lln.attention(*far, v, **op))
    gamma = torch.zeros(2, 4).double()
    out = lln.attention(q, k, v, gamma=gamma, **features, **JOINT, **SCALES)
    expected = definition(q, k, v, gamma, features=far, is_causal=is_causal)
    torch.testing.assert_close(out, expected)
    if not is_causal:
        ones = torch.ones(2, 4).double()
        scales = {"alpha": SCALES["alpha"] * ones, "beta": SCALES["beta"] * ones[:, :2]}
        gamma = match_level(q, k, q_far=far[0], k_far=far[1], **JOINT, **scales)
        measured = lln.attention(q, k, v, **features, **JOINT, **SCALES)
        torch.testing.assert_close(
            measured, lln.attention(q, k, v, gamma=gamma, **features, **JOINT, **SCALES)
        )


Q, K, V = random_qkv(2, 4, 20, key_heads=2, dtype=torch.float32)
WRONG = {
    "gamma of an average": ({"near": 4, "gamma": 1.0}, "gamma=1.0.*joint=True"),
    "mix of no block": ({"mix": 0.3}, "mix=0.3.*give near"),
    "mix of one normaliser": ({**JOINT, "mix": 0.3}, "mix=0.3 would be ignored"),
    "an unknown mix": ({"near": 4, "mix": "learned"}, "mix='learned'.*'average', a number"),
    "a weight above 1": ({"near": 4, "mix": 1.5}, r"mix=1.5 is not in \[0, 1\]"),
    "weights of other heads": ({"near": 4, "mix": torch.ones(3)}, r"mix has shape \[3\]"),
    "a negative overlap": ({"near": {"block": 4, "overlap": -1}}, "overlap=-1"),
    "negative sinks": ({"near": {"block": 4, "sinks": -1}}, "sinks=-1"),
    "an infinite level": ({**JOINT, "gamma": float("inf")}, "gamma=inf must be finite"),
    "a level that is no number": (
        {**JOINT, "gamma": torch.full((4,), torch.nan)},
        "gamma=.*nan.* must be finite",
    ),
    "a level of other heads": ({**JOINT, "gamma": torch.ones(3)}, r"gamma has shape \[3\]"),
    "a causal level": ({**JOINT, **SCALES, "is_causal": True}, "need gamma.*future leak"),
    "features without scales": ({"features": (Q, K)}, "need alpha and beta"),
    "features of other tokens": (
        {"features": (Q[:, :, :3], K), **SCALES},
        r"features\[0\] has shape \[2, 4, 3, 8\]",
    ),
    "features of unlike width": (
        {"features": (Q[..., :3], K), **SCALES},
        "features of q have 3 slots, of k 8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named(name):
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        lln.attention(Q, K, V, **options)
    if "features" not in options:
        packed = (x[0].transpose(0, 1) for x in (Q, K, V))
        with pytest.raises(ValueError, match=message):
            lln.attention_varlen(*packed, torch.tensor([0, 20]), **options)


def test_which_knows_the_new_forms():
    assert lln.which(Q, K, V, **JOINT) == "eager"
    assert lln.which(Q, K, V, near=lln.Near(4, overlap=2), impl="reference") == "reference"
    with pytest.raises(ValueError, match=r"triton.*cannot run here"):
        lln.which(Q, K, V, **JOINT, impl="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    q, k, v = (x.to(dtype) for x in random_qkv(2, 2, 60))
    gamma = torch.zeros(2, 2).double()
    exact = definition(q.double(), k.double(), v.double(), gamma)
    out = lln.attention(q, k, v, gamma=0.0, **JOINT, **SCALES)
    assert out.dtype == dtype
    assert (out - exact).abs().max() <= 1.01 * (exact.to(dtype) - exact).abs().max() + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision_are_rounded_once(dtype):
    """Those of keys in several windows are sums."""
    near = {**SCALES, "near": lln.Near(4, overlap=6), "mix": 0.0}
    half = [x.to(dtype).requires_grad_() for x in random_qkv(2, 2, 60)]
    wide = [x.detach().double().requires_grad_() for x in half]
    d_out = torch.randn(2, 2, 60, 8).to(dtype)
    found = torch.autograd.grad(lln.attention(*half, **near), half, d_out)
    exact = torch.autograd.grad(lln.attention(*wide, **near), wide, d_out.double())
    for one, other in zip(found, exact, strict=True):
        assert (one - other).abs().max() <= 1.01 * (other.to(dtype) - other).abs().max() + 1e-5
