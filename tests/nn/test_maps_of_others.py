"""Feature maps of other papers for the far keys: Hedgehog, T2R, ELU."""

from __future__ import annotations

import copy

import pytest
import torch

import lln
from lln.baselines.base import Layer
from lln.baselines.elu import Elu
from lln.baselines.hedgehog import Hedgehog
from lln.moments import match_level
from lln.nn import LLNAttention
from lln.nn.feature_maps import LEAST_FEATURE
from tests.helpers import assert_matches

JOINT = {"near": lln.Near(8, joint=True)}
KINDS = ("hedgehog", "t2r", "elu")


def inputs(dtype=torch.float64, *, kv_heads: int = 4, tokens: int = 40):
    torch.manual_seed(0)
    q = torch.randn(2, 4, tokens, 8, dtype=dtype)
    k, v = (torch.randn(2, kv_heads, tokens, 8, dtype=dtype) for _ in range(2))
    return q, k, v, torch.arange(tokens) < torch.tensor([[tokens], [tokens - 9]])


def disturbed(core: LLNAttention) -> LLNAttention:
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return core


def features(kind: str, core: LLNAttention, q, k):
    """φ(q) and φ(k) as the zoo computes them; T2R, which it has not, by its formula."""
    if kind == "t2r":
        maps = core.features
        pairs = ((q, maps.q_map, maps.bias), (k, maps.k_map, maps.k_bias))
        return [(x @ w + b[:, None]).relu() + LEAST_FEATURE for x, w, b in pairs]
    layer = Layer(dim=32, num_heads=4, max_length=64)
    theirs = {"hedgehog": Hedgehog, "elu": Elu}[kind](layer).double()
    if kind == "hedgehog":
        theirs.query_map.data = core.features.q_map.data.mT.clone()
        theirs.key_map.data = core.features.k_map.data.mT.clone()
    return theirs.features(q, k, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_far_weights_are_products_of_the_zoos_features(kind, causal):
    q, k, _, mask = inputs()
    options = {"statistics": "fixed", "gamma": -0.4, "causal": causal}
    core = disturbed(LLNAttention(4, 8, feature_map=kind, **options, **JOINT, dtype=q.dtype))
    phi_q, phi_k = features(kind, core, q, k)
    exact = torch.exp(q @ k.mT * 8**-0.5)
    far = torch.exp(torch.tensor(-0.4, dtype=torch.float64)) * (phi_q @ phi_k.mT)
    blocks = torch.arange(40) // 8
    weights = torch.where(blocks[:, None] == blocks, exact, far) * mask[:, None, None]
    if causal:
        weights = weights.tril()
    expected = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(core.attention_matrix(q, k, mask), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_alone_they_are_the_linear_attention_of_the_zoo(kind):
    q, k, v, _ = inputs()
    core = disturbed(LLNAttention(4, 8, feature_map=kind, dtype=q.dtype))
    phi_q, phi_k = features(kind, core, q, k)
    p = phi_q @ phi_k.mT
    torch.testing.assert_close(core(q, k, v), p / p.sum(-1, keepdim=True) @ v)


@pytest.mark.parametrize("statistics", ["sample", "running", "fixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_stay_one_and_the_level_is_measured(kind, statistics):
    q, k, v, mask = inputs(kv_heads=2)
    q, k = 3 * q, 2 * k
    options = {"statistics": statistics, "center_keys": True, "method": "entropy"}
    core = LLNAttention(4, 8, num_kv_heads=2, feature_map=kind, dtype=q.dtype, **options, **JOINT)
    if statistics != "sample":
        core.calibrate_(q, k, mask, mask)
    core(q, k, v, mask, mask)
    draw = core.eval().draw(q, k, key_mask=mask, query_mask=mask)
    assert draw.alpha.eq(1).all() and draw.beta.eq(1).all()
    centred = k - draw.center
    q_far, k_far = core.far_inputs(q, centred, draw.beta)
    measured = match_level(
        q, centred, q_far=q_far, k_far=k_far, alpha=draw.alpha, beta=draw.beta, near=8,
        key_mask=mask, query_mask=mask,
    )  # fmt: skip
    if statistics != "sample":
        measured = measured.mean(0).expand(2, -1)
    torch.testing.assert_close(draw.gamma, measured, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_before_the_first_batch_the_level_is_that_of_unit_gaussians(kind):
    torch.manual_seed(0)
    core = LLNAttention(4, 64, near=lln.Near(128, joint=True), feature_map=kind, statistics="fixed")
    q, k = torch.randn(2, 4, 512, 64), torch.randn(2, 4, 512, 64)
    ones = torch.ones(2, 4)
    q_far, k_far = core.far_inputs(q, k, ones)
    measured = match_level(q, k, q_far=q_far, k_far=k_far, alpha=ones, beta=ones, near=128)
    assert (core.level.stored.value - measured).abs().max() < 0.3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_all_that_is_learned_gets_a_gradient(kind, causal):
    q, k, v, mask = inputs()
    options = {"learn_scale": True, "statistics": "fixed", "causal": causal}
    core = disturbed(LLNAttention(4, 8, feature_map=kind, dtype=q.dtype, **options, **JOINT))
    names = {"hedgehog": {"q_map", "k_map"}, "t2r": {"q_map", "k_map", "bias", "k_bias"}}
    learned = {"level.shift", *(f"features.{name}" for name in names.get(kind, ()))}
    assert {name for name, _ in core.named_parameters()} == learned
    core(q, k, v, mask, mask).square().sum().backward()
    for name, parameter in core.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_formula(kind):
    q, k, v, _ = inputs(tokens=12)
    core = disturbed(LLNAttention(4, 8, feature_map=kind, dtype=q.dtype))
    for x in (q, k):
        x.requires_grad_(True)
    direction = torch.randn_like(v)

    def gradients(out):
        return torch.autograd.grad((out * direction).sum(), [q, k, *core.parameters()])

    if kind == "hedgehog":  # the zoo's core holds copies of the maps
        spines = [
            torch.cat([torch.softmax(x @ w, -1), torch.softmax(-x @ w, -1)], -1)
            for x, w in ((q, core.features.q_map), (k, core.features.k_map))
        ]
    else:
        spines = features(kind, core, q, k)
    p = spines[0] @ spines[1].mT
    expected = gradients(p / p.sum(-1, keepdim=True) @ v)
    for ours, theirs in zip(gradients(core(q, k, v)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loud_inputs_stay_finite(kind, dtype):
    q, k, v, mask = (x.to(dtype) if x.is_floating_point() else x for x in inputs())
    core = LLNAttention(4, 8, feature_map=kind, learn_scale=True, dtype=dtype, **JOINT)
    out = core(50 * q, 50 * k, v, mask, mask)
    out.float().square().sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in core.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_that_of_the_features(kind):
    """In float32 as good as the plain formula in float32."""
    q, k, v, _ = inputs()
    core = disturbed(LLNAttention(4, 8, feature_map=kind, dtype=q.dtype))
    exact = core(q, k, v)
    phi = features(kind, core, q, k)
    p = phi[0].float() @ phi[1].float().mT
    plain = p / p.sum(-1, keepdim=True) @ v.float()
    got = core.float()(q.float(), k.float(), v.float())
    assert_matches(kind, got, plain, exact, factor=8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("statistics", ["running", "fixed"])
def test_state_dicts_and_no_device(kind, statistics):
    options = {"feature_map": kind, "statistics": statistics, "learn_scale": True, **JOINT}
    here = LLNAttention(4, 8, **options)
    there = LLNAttention(4, 8, **options, device="meta").to_empty(device="cpu")
    there.reset_parameters()
    for name, tensor in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[name], tensor)
    there.load_state_dict(copy.deepcopy(disturbed(here)).state_dict())
    q, k, v, mask = inputs(torch.float32)
    torch.testing.assert_close(there.eval()(q, k, v, mask), here.eval()(q, k, v, mask))


WRONG = {
    "slots of hedgehog": ({"feature_map": "hedgehog", "slots": 24}, "2 head_dim = 16"),
    "slots of elu": ({"feature_map": "elu", "slots": 16}, "slots=16 does not fit.*head_dim = 8"),
    "slots of t2r": ({"feature_map": "t2r", "slots": -1}, "a positive number"),
    "sharpness": ({"feature_map": "t2r", "sharpness": 0.6}, "sharpness= has no meaning.*leave it"),
    "alpha": (
        {"feature_map": "elu", "statistics": "fixed", "alpha": 2.0, "beta": 2.0},
        "alpha= has no meaning for feature_map='elu'",
    ),
    "nothing to learn": ({"feature_map": "elu", "learn_scale": True}, "learn_scale=True.*joint"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named(name):
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        LLNAttention(4, 8, **options)


def test_slots_follow_the_map():
    slots = {kind: LLNAttention(4, 8, feature_map=kind).slots for kind in KINDS}
    assert slots == {"hedgehog": 16, "t2r": 16, "elu": 8}
    assert LLNAttention(4, 8, feature_map="t2r", slots=5).slots == 5
    assert "hedgehog" in lln.describe("lln_nearfar").note
