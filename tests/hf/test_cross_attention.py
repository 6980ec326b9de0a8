"""Models with an encoder and a decoder: no target position may see the ones after it."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

import lln
from lln.hf import cores
from tests.hf.tiny import ENDLESS, VOCABULARY, text

SIZES = {
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
}

STORED = [{"statistics": "running"}, {"statistics": "fixed", "alpha": 2.0, "beta": 2.0}]


def bart(attention: str = "sdpa", **lln_options) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=16, max_position_embeddings=64, dropout=0.0,
        pad_token_id=0, decoder_start_token_id=1, **SIZES, **ENDLESS,
    )  # fmt: skip
    config.lln_options = lln_options
    model = hf.BartForConditionalGeneration._from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    return model


def assert_no_future(model: hf.PreTrainedModel) -> None:
    source, target = text(2, 9), text(2, 12, seed=2)
    changed = torch.cat([target[:, :6], text(2, 6, seed=3)], dim=1)
    found = []
    for ids in (target, changed):
        fresh = copy.deepcopy(model)  # running statistics move
        with torch.no_grad():
            found.append(fresh(input_ids=source, decoder_input_ids=ids, use_cache=False).logits)
    assert (found[1] - found[0])[:, 6:].abs().max() > 1e-2
    torch.testing.assert_close(found[1][:, :6], found[0][:, :6])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("options", STORED)
def test_after_replace(options, train):
    model = bart()
    lln.hf.replace(model, "lln", quiet=True, **options)
    ids = text(2, 9)
    model.train()(input_ids=ids, decoder_input_ids=ids)
    assert_no_future(model.train(train))


@pytest.mark.parametrize("options", STORED)
def test_as_a_registered_implementation(options):
    """Cross-attention is LLN as well there; in training it must not measure its queries."""
    lln.hf.register()
    assert_no_future(bart("lln", **options).train())


@pytest.mark.parametrize("attention", ["elu", "performer", "hedgehog"])
def test_features_are_not_calibrated_over_the_queries_of_a_decoder(attention):
    """Equal lengths of source and target are no self-attention."""
    layer = bart().model.decoder.layers[0].encoder_attn
    place = cores.place_of(layer, "layer 0")
    with pytest.raises(ValueError, match=r"calibrate=True cannot serve layer 0, cross-attention"):
        cores.build(attention, place, calibrate=True)
    assert cores.build(attention, place) is not None
