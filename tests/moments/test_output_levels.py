"""The level of far keys by which the output is closest, against whole matrices in float64."""

from __future__ import annotations

import pytest
import torch

import lln
import lln.hf
from lln.moments import match_output_level
from lln.moments.levels import solve_share
from lln.moments.output_levels import FARTHEST, STEP, OutputTerms, output_terms
from tests.helpers import random_qkv
from tests.hf.tiny import make, padded, text

WINDOW = {"near": lln.Near(8, overlap=3, sinks=1)}
JOINT = {"near": lln.Near(8, overlap=3, sinks=1, joint=True)}
TOKENS = 40


def inputs(samples=2):
    q, k, v = random_qkv(samples, 4, TOKENS, width=8, key_heads=2, dtype=torch.float64)
    scales = {
        "alpha": torch.full((samples, 4), 1.3, dtype=torch.float64),
        "beta": torch.full((samples, 2), 1.1, dtype=torch.float64),
    }
    return 2 * q, k, v, scales


def errors(q, k, v, gamma, mask=None, **options):
    """Squared error of the output of each head, by the operator itself, at all real queries."""
    near_far = lln.attention(q, k, v, gamma=gamma, key_mask=mask, **JOINT, **options)
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    seen = seen.tril() if options.get("is_causal") else seen
    seen = seen[None, None] if mask is None else seen & mask[:, None, None]
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT / 8**0.5).masked_fill(~seen, -1e9)
    difference = (near_far - scores.softmax(-1) @ v).square().sum(-1)
    if mask is not None:
        difference = difference.masked_fill(~mask[:, None], 0)
    return difference.sum((0, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_no_other_level_is_closer(causal, masked):
    q, k, v, scales = inputs()
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [31]]) if masked else None
    options = {"is_causal": causal, **scales}
    seen = {"key_mask": mask, "query_mask": mask}
    # as many rows as tokens: each is looked at once
    gamma = match_output_level(q, k, v, **WINDOW, **options, **seen, rows=TOKENS)
    if masked:  # what stands at padding does not matter
        k, v = (x.masked_fill(~mask[:, None, :, None], float("nan")) for x in (k, v))
        again = match_output_level(q, k, v, **WINDOW, **options, **seen, rows=TOKENS)
        torch.testing.assert_close(again, gamma, rtol=0, atol=0)
        k, v = k.nan_to_num(), v.nan_to_num()
    found = errors(q, k, v, gamma, mask, **options)
    for offset in (-4.0, -1.0, -3 * STEP, 3 * STEP, 1.0, 4.0):
        other = errors(q, k, v, gamma + offset, mask, **options)
        within = (gamma + offset - _matched(q, k, v, options, seen)).abs() <= FARTHEST
        assert (found <= other + 1e-9)[within].all() or masked, offset
        # with padding evenly spaced queries meet some twice, so that only the sum is certain
        assert found.sum() <= other.sum() * 1.02


def _matched(q, k, v, options, seen):
    """The level around which is sought."""
    terms = output_terms(q, k, v, **WINDOW, **options, **seen, rows=TOKENS)
    logs = (x[None] for x in (terms.near, terms.far, terms.linear))
    return solve_share(*logs, (terms.counted & terms.far.isfinite())[None])[0]


def terms_of(slope: float, square: float) -> OutputTerms:
    """Two queries to which far keys are worth sigmoid(0.5) = 0.6225 of the whole in softmax."""
    return OutputTerms(
        near=torch.tensor([[0.0, 1.0]]), far=torch.tensor([[0.5, 1.5]]),
        linear=torch.tensor([[-2.0, -1.0]]), slope=torch.full((1, 2), slope),
        square=torch.full((1, 2), square), counted=torch.ones(1, 2, dtype=torch.bool),
    )  # fmt: skip


def test_far_keys_that_tell_the_truth_keep_their_share():
    """f is softmax's answer from far keys, so that n − s = −0.6225 (f − n); γ = far − linear."""
    assert terms_of(-0.6225, 1.0).level().item() == pytest.approx(2.5, abs=STEP)


def test_far_keys_that_mislead_get_less():
    """n, f and softmax's answer from far keys are orthogonal, of norm 1: half of the share."""
    wanted = torch.logit(torch.tensor(0.6225 / 2)) + 2
    assert terms_of(-0.6225, 2.0).level().item() == pytest.approx(wanted.item(), abs=STEP)


def test_a_far_branch_that_only_harms_keeps_a_gradient():
    assert terms_of(1.0, 1.0).level().item() == pytest.approx(2.5 - FARTHEST, abs=STEP)


def test_batches_together_are_one():
    q, k, v, scales = inputs(4)
    options = {**WINDOW, "rows": TOKENS}
    whole = match_output_level(q, k, v, **scales, **options)
    parts = [
        output_terms(q[i], k[i], v[i], **{n: x[i] for n, x in scales.items()}, **options)
        for i in (slice(0, 1), slice(1, 4), slice(4, 4))
    ]
    torch.testing.assert_close(OutputTerms.join(parts).to_cpu().level(), whole)


def test_nothing_far_gives_zero():
    q, k, v, scales = inputs()
    assert match_output_level(q, k, v, **scales, near=64).eq(0).all()
    empty = (x[:, :, :0] for x in (q, k, v))
    assert match_output_level(*empty, **scales, near=8).eq(0).all()


@pytest.mark.parametrize("family", ["roberta", "llama"])
def test_calibrated_models_are_closer_than_with_matched_shares(family):
    batches = [padded(text(3, 40), 6, "right"), {"input_ids": text(2, 40)}]
    found = {}
    for level in ("share", "output"):
        model = make(family, max_position_embeddings=64)
        for layer in model.modules():  # larger scores than a fresh model has
            if isinstance(layer, torch.nn.Linear):
                layer.weight.data.mul_(8)
        lln.hf.replace(
            model,
            "lln_nearfar",
            quiet=True,
            statistics="fixed",
            near=8,
            feature_map="learned",
        )
        lln.hf.calibrate(model, batches, level=level)
        rows = lln.hf.transfer(model, batches, learning_rate=0)
        found[level] = sum(row["error"] for row in rows)
    assert found["output"] < found["share"]


def test_another_word_for_the_level_is_refused():
    with pytest.raises(ValueError, match="level='mean' is unknown; choose 'output' or 'share'"):
        lln.hf.calibrate(make("gpt2"), [], level="mean")
