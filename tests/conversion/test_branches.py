"""One branch alone, and the shares of both, against the formulas."""

from __future__ import annotations

import pytest
import torch

import lln.hf
from lln.conversion.branches import levels_of, only
from lln.conversion.shares import near_shares
from lln.nn import LLNAttention
from lln.ops import reference
from tests.hf.tiny import make, padded, run, text

HEADS, WIDTH, BLOCK, OVERLAP, SINKS, TOKENS = 4, 8, 8, 4, 2, 37
SLOTS = 24
NEAR = lln.Near(BLOCK, overlap=OVERLAP, sinks=SINKS, joint=True)


def core_of(causal: bool, kind: str = "fixed") -> LLNAttention:
    options = {"alpha": 0.7, "beta": 0.9, "gamma": 0.3} if kind == "fixed" else {}
    core = LLNAttention(
        HEADS, WIDTH, num_kv_heads=2, causal=causal, near=NEAR,
        feature_map="learned", slots=SLOTS, statistics=kind,
        learn_scale=True, dtype=torch.float64, **options,
    )  # fmt: skip
    for parameter in core.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return core.eval()


def dense(core: LLNAttention, q, k, v, branch: str):
    """The branch from its N × N weights, normalised alone; rows without far keys take near ones."""
    is_near = reference.near_field(TOKENS, TOKENS, NEAR, is_causal=core.causal)
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    visible = visible.tril() if core.causal else visible
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    exact = (core.scale * q @ keys.mT).masked_fill(~(is_near & visible), -torch.inf)
    near = exact.softmax(-1) @ values
    if branch == "near":
        return near
    q_far, k_far = core.features(q, k)
    alpha, beta = core.scales()
    phi_q = (alpha[:, None, None] * q_far).exp()
    phi_k = (beta[:, None, None] * k_far).exp().repeat_interleave(2, 1)
    weights = phi_q @ phi_k.mT * (visible & ~is_near)
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights @ values / mass.clamp(min=1e-300), near)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("branch", ["near", "far"])
def test_a_branch_alone_is_its_own_attention(branch, causal):
    core = core_of(causal)
    q = 2 * torch.randn(2, HEADS, TOKENS, WIDTH, dtype=torch.float64)
    k, v = 2 * torch.randn(2, 2, 2, TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        both = core(q, k, v)
        with only(core, branch):
            alone = core(q, k, v)
        expected = dense(core, q, k, v, branch)
        torch.testing.assert_close(alone, expected, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(alone, both, rtol=1e-3, atol=1e-3)
        assert torch.equal(core(q, k, v), both)


def test_measured_levels_are_overruled_too():
    core = core_of(False, kind="sample")
    q, k, v = torch.randn(3, 1, HEADS, TOKENS, WIDTH, dtype=torch.float64).unbind()
    k, v = k[:, :2], v[:, :2]
    with torch.no_grad(), only(core, "near"):
        torch.testing.assert_close(core(q, k, v), dense(core, q, k, v, "near"))


def converted(family: str):
    model = make(family)
    options = {"near": lln.Near(4, overlap=2, sinks=1), "statistics": "fixed"}
    lln.hf.replace(model, "lln_nearfar", quiet=True, **options)
    lln.hf.calibrate(model, [{"input_ids": text(4, 40, seed=3)}], method="entropy")
    return model


@pytest.mark.parametrize("branch", ["near", "far"])
def test_generation_follows_with_its_state(branch):
    model, prompt = converted("llama"), text(2, 18)
    greedy = {"max_new_tokens": 12, "do_sample": False}
    both = model.generate(prompt, **greedy)
    with only(model, branch):
        assert all(level.offset for level in levels_of(model))
        alone = model.generate(prompt, **greedy)
        assert torch.equal(alone, model.generate(prompt, **greedy, use_cache=False))
    assert not torch.equal(alone, both)


def test_the_model_is_as_before_after_an_error():
    model, ids = converted("bert"), text()
    before, names = run(model, input_ids=ids), set(model.state_dict())
    with pytest.raises(RuntimeError), only(model, "far"):
        assert set(model.state_dict()) == names
        raise RuntimeError
    assert torch.equal(run(model, input_ids=ids), before)


def test_what_has_no_branches_is_refused():
    wanted = "BertForMaskedLM has no layer with near and far"
    with pytest.raises(ValueError, match=wanted), only(make("bert"), "near"):
        pass
    with pytest.raises(ValueError, match="branch='both' is unknown"), only(make("bert"), "both"):
        pass


def test_shares_are_means_over_real_tokens():
    """However the samples are cut into batches."""
    model = converted("bert")
    batch = padded(text(3, 24), 5, "right")
    batch["attention_mask"][0, 10:] = 0
    rows = near_shares(model, [batch])
    places = [(row["layer"], row["head"]) for row in rows]
    assert places == [(layer, head) for layer in (0, 1) for head in range(4)]
    assert "layer.0." in rows[0]["module"] and "layer.1." in rows[4]["module"]
    assert all(0 < row["near_share"] < 1 for row in rows)
    parts = [{name: x[i : i + 1, : (10, 24, 24)[i]] for name, x in batch.items()} for i in range(3)]
    for row, other in zip(rows, near_shares(model, parts), strict=True):
        assert row["near_share"] == pytest.approx(other["near_share"], rel=1e-5)


def test_shares_are_one_and_zero_for_a_branch_alone():
    model, batch = converted("bert"), {"input_ids": text()}
    for branch, share in (("near", 1), ("far", 0)):
        with only(model, branch):
            assert {row["near_share"] for row in near_shares(model, [batch])} == {share}
    assert near_shares(make("bert"), [batch]) == []
