"""calibrate: constants from a model's activations."""

from __future__ import annotations

import pytest
import torch

import lln
import lln.hf
from tests.hf.tiny import make, padded, run, text


def heads(model, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of the first layer of a tiny GPT-2."""
    block = model.transformer.h[0]
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states[0]
        q, k, _ = block.attn.c_attn(block.ln_1(states)).split(32, dim=2)
    return tuple(x.unflatten(-1, (4, 8)).transpose(1, 2) for x in (q, k))


@pytest.mark.parametrize("method", ["paper", "variance", "entropy"])
def test_constants_are_those_of_the_activations(method):
    model, batch = make("gpt2"), padded(text(3, 12), 4, "right")
    q, k = heads(model, batch)
    mask = batch["attention_mask"].bool()
    lln.hf.replace(model, "lln", quiet=True)
    lln.hf.calibrate(model, [batch], method=method)
    sigma_q, sigma_k = lln.moments.standard_deviations(q, k, key_mask=mask, query_mask=mask)
    deviations = (sigma.square().mean(0).sqrt() for sigma in (sigma_q, sigma_k))
    expected = lln.match_moments(*deviations, 8, method=method)
    for got, wanted in zip(model.transformer.h[0].attn.lln.scales(), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_batches_are_weighted_by_their_tokens():
    """Two batches of different size give what one batch of all samples gives."""
    ids = text(5, 12)
    scales = []
    for batches in ([ids], [ids[:1], ids[1:]]):
        model = make("gpt2")
        lln.hf.replace(model, "lln", quiet=True)
        lln.hf.calibrate(model, ({"input_ids": batch} for batch in batches))
        scales.append(model.transformer.h[1].attn.lln.scales())
    torch.testing.assert_close(*scales)


def test_deeper_layers_may_see_softmax_or_lln():
    ids = text(5, 20)
    scales = {}
    for activations in ("softmax", "lln"):
        model = make("gpt2")
        lln.hf.replace(model, "lln", quiet=True)
        lln.hf.calibrate(model, [{"input_ids": ids}], activations=activations)
        scales[activations] = [block.attn.lln.scales()[0] for block in model.transformer.h]
    first, second = zip(*scales.values(), strict=True)
    torch.testing.assert_close(*first)
    assert not torch.allclose(*second)


def test_calibration_leaves_mode_weights_and_random_state_alone():
    model = make("gpt2").train()
    lln.hf.replace(model, "lln_diag", quiet=True)
    model.transformer.h[0].eval()
    weights = [parameter.clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    lln.hf.calibrate(model, [{"input_ids": text()}])
    assert model.training and not model.transformer.h[0].training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, weights, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("statistics", ["fixed", "running"])
def test_encoders_too(statistics):
    model = make("roberta")
    lln.hf.replace(model, "lln", statistics=statistics, quiet=True)
    with pytest.raises(ValueError, match=r"layer 0 .*has no calibrated alpha and beta"):
        run(model, input_ids=text())
    lln.hf.calibrate(model, [padded(text(), 3, "right")])
    before = run(model, input_ids=text())
    assert before.isfinite().all()
    lln.hf.calibrate(model, [padded(text(), 3, "right")], method="entropy")
    assert not torch.allclose(run(model, input_ids=text()), before)


def test_what_calibrate_refuses():
    model = make("gpt2")
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no LLN layer yet"):
        lln.hf.calibrate(model, [])
    undo = lln.hf.replace(model, "lln", quiet=True)
    with pytest.raises(ValueError, match="batches is empty"):
        lln.hf.calibrate(model, [])
    with pytest.raises(ValueError, match="activations='both'"):
        lln.hf.calibrate(model, [], activations="both")
    nothing = {"input_ids": text(), "attention_mask": torch.zeros(3, 20, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"layer 0 .*saw no valid token"):
        lln.hf.calibrate(model, [nothing])
    with pytest.raises(ValueError, match="has no calibrated"):
        run(model, input_ids=text())
    undo()
    encoder = make("roberta")
    lln.hf.replace(encoder, "lln", quiet=True)
    with pytest.raises(ValueError, match=r"measures every sample anew.*statistics='fixed'"):
        lln.hf.calibrate(encoder, [{"input_ids": text()}])
