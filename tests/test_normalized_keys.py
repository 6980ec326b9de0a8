"""normalize_keys=True is the definition with log_softmax_l(β k) for β k, wherever it is chosen."""

from __future__ import annotations

import math

import pytest
import torch

import lln
from lln.nn import LLNAttention
from lln.ops import reference
from lln.ops.linear.normalized_keys import normalized_keys
from tests.helpers import LENGTHS, assert_matches, random_qkv, random_scales, run_with_grads

HALF = (torch.bfloat16, torch.float16)
LOCAL = {"near": lln.Near(16, scale=0.4)}
JOINT = {"near": lln.Near(16, scale=0.4, joint=True), "gamma": 0.7}
FORMS = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "causal blocks": {"is_causal": True, "causal_block": 16},
    "blocks": LOCAL,
    "causal, blocks": {**LOCAL, "is_causal": True},
    "windows": {"near": lln.Near(16, overlap=5, sinks=2, scale=0.4), "mix": 0.3},
    "joint": JOINT,
    "causal, joint": {
        **JOINT,
        "near": lln.Near(16, sinks=1, scale=0.4, joint=True),
        "is_causal": True,
    },
}


def oracle(q, k, v, alpha, beta, *, key_mask, form, rounded=False, **far):
    """The definitions of :mod:`lln.ops.reference` on features that are written out here.

    ``rounded``: to the dtype of k, as features of keys are.
    """
    given = far.get("k_features", k)
    hidden = given if key_mask is None else given.masked_fill(~key_mask[:, None, :, None], 0)
    wide = hidden.to(beta.dtype) * beta[..., None, None]
    k_far = wide - wide.logsumexp(-1, keepdim=True) + math.log(given.shape[-1])
    k_far = k_far.to(k.dtype) if rounded else k_far
    options = {"alpha": alpha, "beta": torch.ones_like(beta), "key_mask": key_mask}
    causal = FORMS[form].get("is_causal", False)
    q_far, near = far.get("q_features", q), FORMS[form].get("near")
    if near is None:
        op = reference.causal if causal else reference.bidirectional
        if block := FORMS[form].get("causal_block"):
            return reference.block_causal(q_far, k_far, v, causal_block=block, **options)
        return op(q_far, k_far, v, **options)
    options |= {"q_far": q_far, "k_far": k_far, "is_causal": causal, **near.options}
    if near.joint:
        return reference.near_far(q, k, v, gamma=torch.full_like(alpha, 0.7), **options)
    mix = torch.full_like(alpha[0], FORMS[form]["mix"]) if "mix" in FORMS[form] else None
    return reference.lln_diag(q, k, v, mix=mix, **options)


def paired(tensors: dict) -> dict:
    """Tensors with the features, if there are any, as the function takes them."""
    names = ("q_features", "k_features")
    rest = {name: x for name, x in tensors.items() if name not in names}
    pair = tuple(tensors[name] for name in names if name in tensors)
    return {**rest, "features": pair or None}


def compare(form, tensors, dtype, key_mask, impl="eager") -> None:
    wide = torch.promote_types(dtype, torch.float32)
    rounded = {n: x.to(wide if n in ("alpha", "beta") else dtype) for n, x in tensors.items()}
    options = {"key_mask": key_mask, "form": form}
    d_out = torch.randn_like(oracle(**tensors, **options)).to(dtype)
    exact_in = {name: x.double() for name, x in rounded.items()}
    exact = run_with_grads(lambda **t: oracle(**t, **options), exact_in, d_out.double())
    plain = run_with_grads(lambda **t: oracle(**t, **options), rounded, d_out)
    # Gradients of the scales are float32, and show that the features were rounded.
    with_features = run_with_grads(lambda **t: oracle(**t, **options, rounded=True), rounded, d_out)
    plain |= {name: with_features[name] for name in ("d_alpha", "d_beta")}
    got = run_with_grads(
        lambda **t: lln.attention(
            **paired(t), key_mask=key_mask, **FORMS[form], normalize_keys=True, impl=impl
        ),
        rounded,
        d_out,
    )
    for name in exact:
        assert_matches(name, got[name], plain[name], exact[name], factor=4)


def draw(length: int, width: int = 16) -> dict[str, torch.Tensor]:
    q, k, v = random_qkv(2, 4, length, width=width, value_width=12, key_heads=2)
    alpha, beta = random_scales(2, 4, 2)
    return {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_the_definition(form, length):
    compare(form, draw(length), torch.float64, torch.rand(2, length) > 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("form", FORMS)
def test_precision(form, dtype):
    compare(form, draw(100), dtype, torch.rand(2, 100) > 0.3)


@pytest.mark.parametrize("form", ["blocks", "joint"])
def test_features_of_your_own_are_normalised(form):
    given = draw(40)
    given["q_features"] = torch.randn(2, 4, 40, 16, dtype=torch.float64)
    given["k_features"] = torch.randn(2, 2, 40, 16, dtype=torch.float64)
    compare(form, given, torch.float64, None)
    features = given["q_features"], given["k_features"]
    scales = {"alpha": given["alpha"], "beta": given["beta"], "normalize_keys": True}
    alone = lln.attention(given["q"], given["k"], given["v"], features=features, **scales)
    same = lln.attention(*features, given["v"], **scales)
    torch.testing.assert_close(alone, same)


def test_each_key_has_features_of_mean_one_and_what_is_masked_does_not_count():
    k, beta = torch.randn(2, 3, 9, 8), torch.rand(2, 3)
    mask = torch.rand(2, 9) > 0.4
    dirty = k.masked_fill(~mask[:, None, :, None], torch.nan).requires_grad_()
    beta.requires_grad_()
    features = normalized_keys(dirty, beta, mask)
    torch.testing.assert_close(features.exp().mean(-1), torch.ones(2, 3, 9))
    for gradient in torch.autograd.grad(features.square().sum(), (dirty, beta)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_keeps_its_bits(dtype):
    k = (2 * torch.randn(1, 1, 500, 64)).to(dtype)
    beta = torch.ones(1, 1)
    error = (normalized_keys(k, beta).double() - normalized_keys(k.double(), beta)).abs().mean()
    plain = torch.log_softmax(k.double(), -1)
    assert error < 0.7 * (plain.to(dtype).double() - plain).abs().mean()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"near": 8}])
def test_packed_sequences_take_their_own_beta(options):
    q, k, v = (torch.randn(50, 2, 8, dtype=torch.float64) for _ in range(3))
    alpha, beta = random_scales(3, 2, 2)
    mask, cu = torch.rand(50) > 0.3, torch.tensor([0, 20, 20, 50])
    options = {**options, "normalize_keys": True}
    out = lln.attention_varlen(q, k, v, cu, alpha=alpha, beta=beta, key_mask=mask, **options)
    for s, part in ((0, slice(0, 20)), (2, slice(20, 50))):
        one = (x[part].transpose(0, 1)[None] for x in (q, k, v))
        own = {"alpha": alpha[s : s + 1], "beta": beta[s : s + 1], "key_mask": mask[None, part]}
        expected = lln.attention(*one, **own, **options)[0].transpose(0, 1)
        torch.testing.assert_close(out[part], expected)


@pytest.mark.parametrize("dtype", HALF)
def test_a_module_is_the_function(dtype):
    q, k, v = random_qkv(2, 4, 40, key_heads=2, dtype=torch.float32)
    core = LLNAttention(4, 8, num_kv_heads=2, normalize_keys=True, near=16)
    with torch.autocast("cpu", dtype):
        out = core(q, k, v)
        expected = lln.attention(q, k, v, normalize_keys=True, near=16)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("impl", [None, "reference"])
def test_a_learned_beta_gets_its_gradient(impl):
    q, k, v = random_qkv(1, 2, 12)
    beta = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)

    def attend(beta):
        return lln.attention(q, k, v, alpha=1.5, beta=beta, normalize_keys=True, impl=impl)

    assert torch.autograd.gradcheck(attend, beta)
