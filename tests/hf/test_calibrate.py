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


NEAR = {"near": lln.Near(4, overlap=3, sinks=1)}
DIFFERENT = {
    "lln_diag": {"near": 4},
    "lln_nearfar": NEAR,
    "lln_nearfar with centred keys": {**NEAR, "center_keys": True},
    "lln_nearfar with hedgehog": {**NEAR, "feature_map": "hedgehog"},
    "lln_diag with hedgehog": {"near": 4, "feature_map": "hedgehog"},
}
KINDS = [("lln_diag", other) for other in DIFFERENT if other != "lln_diag"]


@pytest.mark.parametrize("kinds", [*KINDS, *(pair[::-1] for pair in KINDS)], ids=" then ".join)
def test_layers_that_need_different_passes(kinds):
    """Each gets the constants that it gets in a model where all layers are of its kind."""
    found = {}
    for names in (kinds, kinds[:1] * 2, kinds[1:] * 2):
        model = make("llama")
        for layer, name in enumerate(names):
            options = {**DIFFERENT[name], "layers": [layer], "quiet": True}
            lln.hf.replace(model, name.split()[0], **options)
        lln.hf.calibrate(model, [{"input_ids": text(3, 20)}, {"input_ids": text(2, 30, seed=3)}])
        found[names] = [layer.self_attn.lln.state_dict() for layer in model.model.layers]
    for layer, name in enumerate(kinds):
        torch.testing.assert_close(found[kinds][layer], found[(name, name)][layer])


@pytest.mark.parametrize("kinds", KINDS, ids=" then ".join)
def test_layers_that_need_different_passes_may_see_lln(kinds):
    model = make("llama")
    for layer, name in enumerate(kinds):
        options = {**DIFFERENT[name], "layers": [layer], "quiet": True}
        lln.hf.replace(model, name.split()[0], **options)
    lln.hf.calibrate(model, [{"input_ids": text()}], activations="lln")
    assert run(model, input_ids=text()).isfinite().all()


def test_encoders_that_measure_every_sample_take_the_method():
    """README's order, with replace's defaults: there is nothing to store."""
    model, other = make("bert"), make("bert")
    lln.hf.replace(model, "lln_diag", quiet=True, near=4)
    before = run(model, input_ids=text())
    assert lln.hf.calibrate(model, [{"input_ids": text()}]) is model
    assert torch.equal(run(model, input_ids=text()), before)
    lln.hf.calibrate(model, [{"input_ids": text()}], method="entropy")
    lln.hf.replace(other, "lln_diag", quiet=True, near=4, method="entropy")
    assert torch.equal(run(model, input_ids=text()), run(other, input_ids=text()))
    assert model.config.lln == other.config.lln


def test_constants_of_a_decoder_beside_an_encoder_that_measures_every_sample():
    """Measured with softmax in all LLN layers, those that store nothing among them."""
    batch, found = {"input_ids": text(), "decoder_input_ids": text(3, 12, seed=4)}, []
    for statistics in ({}, {"statistics": "fixed"}):
        model = make("bart", head="AutoModel")
        lln.hf.replace(model, "lln", quiet=True, **statistics)
        lln.hf.calibrate(model, [batch])
        found.append([layer.self_attn.lln.scales() for layer in model.decoder.layers])
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore")  # of configurations made so small
@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_convert_takes_models_with_an_encoder_and_a_decoder(family):
    model = make(family, head="AutoModel")
    batch = {"decoder_input_ids": text(2, 12)}
    if family == "whisper":
        batch["input_features"] = torch.randn(2, 16, 64)
    else:
        batch["input_ids"] = text(2, 20)
    done = lln.hf.convert(model, [batch] * 2, transfer_steps=2, recover_steps=0)
    assert len(done.errors["transfer"]) == 4
    assert run(model, **batch).isfinite().all()
