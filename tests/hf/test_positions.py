"""Padding on the left of models with rotary positions changes nothing for the real tokens."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

import lln.hf
from tests.hf.test_families import CONSTANTS, GROUPED, WINDOWS, model_of
from tests.hf.tiny import TEXT, make, padded, run, text

pytestmark = pytest.mark.filterwarnings("ignore")  # of configurations made so small
TOKENS, PADDING = 10, 6
ENCODERS = {
    "eurobert": GROUPED,
    "nomic_bert": TEXT,
    "modernbert": WINDOWS["modernbert"],
    "esm": {**TEXT, "mask_token_id": 3, "position_embedding_type": "rotary"},
}
DECODERS = {
    "llama": GROUPED,
    "gpt_neox": TEXT,
    "phi3": GROUPED,
    "olmo2": GROUPED,
    "gemma3_text": WINDOWS["gemma3_text"],
}


def ready(family: str, **options):
    """A model whose layers without a window attend by LLN+Diag."""
    known = {**ENCODERS, **DECODERS}[family]
    model = model_of(family, known)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() == 2 else 1)
    lln.hf.replace(model, "lln_diag", layers="global", near=4, quiet=True, **options)
    return model


def assert_padding_changes_nothing(model, side: str, **fixed) -> None:
    ids = text(2, TOKENS)
    batch = padded(ids, PADDING, side)
    real = batch["attention_mask"].bool()
    alone, got = run(model, input_ids=ids, **fixed), run(model, **batch, **fixed)
    torch.testing.assert_close(got[real].view_as(alone), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_padding_changes_nothing(family, side):
    assert_padding_changes_nothing(ready(family, **CONSTANTS), side)


def test_statistics_of_a_sample_do_not_see_the_padding_either():
    assert_padding_changes_nothing(ready("nomic_bert"), "left")


def test_positions_of_the_caller_are_left_alone():
    model, batch = ready("llama", **CONSTANTS), padded(text(2, TOKENS), PADDING, "left")
    place = (torch.arange(TOKENS + PADDING) - PADDING).clamp(min=0).expand(2, -1)
    assert torch.equal(run(model, **batch, position_ids=place), run(model, **batch))
    assert not torch.allclose(run(model, **batch, position_ids=place + 7), run(model, **batch))


def test_arguments_by_place_and_embeddings():
    model, batch = ready("llama", **CONSTANTS), padded(text(2, TOKENS), PADDING, "left")
    ids, mask = batch.values()
    expected = run(model, **batch)
    with torch.no_grad():
        assert torch.equal(model(ids, mask)[0], expected)
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embedded, attention_mask=mask)[0], expected)


def test_a_head_around_the_model_and_masks_with_an_axis_of_queries():
    model = make("llama", head="AutoModelForSequenceClassification", num_labels=3)
    lln.hf.replace(model, "lln", quiet=True, **CONSTANTS)
    ids = text(2, TOKENS)
    alone, got = run(model, input_ids=ids), run(model, **padded(ids, PADDING, "left"))
    torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)
    encoder, batch = ready("nomic_bert", **CONSTANTS), padded(ids, PADDING, "left")
    wide = {**batch, "attention_mask": batch["attention_mask"].bool()[:, None, None]}
    assert torch.equal(run(encoder, **wide), run(encoder, **batch))


def test_a_cache_that_is_filled_step_by_step():
    """forward outside of generate: padded prompt, then tokens, none with positions."""
    model, ids = ready("llama", **CONSTANTS), text(2, TOKENS)
    batch = padded(ids, PADDING, "left")
    expected = run(model, input_ids=ids)
    cache, parts = hf.DynamicCache(config=model.config), []
    for end in (PADDING + 4, *range(PADDING + 5, PADDING + TOKENS + 1)):
        step = batch["input_ids"][:, cache.get_seq_length() : end]
        mask = batch["attention_mask"][:, :end]
        parts.append(run(model, input_ids=step, attention_mask=mask, past_key_values=cache))
    got = torch.cat(parts, 1)[:, PADDING:]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_undo_takes_the_positions_back_and_copies_keep_theirs():
    model = ready("llama", **CONSTANTS)
    twin = copy.deepcopy(model)
    model._lln_replacements.current[0]()
    assert not model._forward_pre_hooks and twin._forward_pre_hooks
    assert_padding_changes_nothing(twin, "left")
    twin._lln_replacements.current[0]()
    assert not twin._forward_pre_hooks


def test_softmax_beside_lln_is_what_it_was():
    """Layer 0 keeps softmax: rotated by other positions its output is the same."""
    model, batch = make("llama"), padded(text(2, TOKENS), PADDING, "left")
    real = batch["attention_mask"].bool()
    before = model(**batch, output_hidden_states=True).hidden_states[1][real]
    lln.hf.replace(model, "lln", layers=[1], quiet=True, **CONSTANTS)
    after = model(**batch, output_hidden_states=True).hidden_states[1][real]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["eurobert", "nomic_bert", "modernbert"])
def test_by_name_what_cannot_be_counted_is_refused(family):
    lln.hf.register()
    options = {**ENCODERS[family], "global_attn_every_n_layers": 1}
    if family != "modernbert":
        options.pop("global_attn_every_n_layers")
    model = model_of(family, options, attn_implementation="lln")
    ids = text(2, TOKENS)
    assert_padding_changes_nothing(model, "right")
    batch = padded(ids, PADDING, "left")
    with pytest.raises(ValueError, match=r"layer 0 .*padded on the left: .*lln.hf.replace"):
        run(model, **batch)
    if family == "modernbert":  # its layers are not told
        return
    place = (torch.arange(TOKENS + PADDING) - PADDING).clamp(min=0).expand(2, -1)
    got = run(model, **batch, position_ids=place)[:, PADDING:]
    torch.testing.assert_close(got, run(model, input_ids=ids), rtol=1e-4, atol=1e-4)


def test_softmax_of_the_zoo_needs_no_positions():
    model = make("llama")
    expected = run(model, **padded(text(2, TOKENS), PADDING, "left"))[:, PADDING:]
    model.set_attn_implementation("softmax")
    got = run(model, **padded(text(2, TOKENS), PADDING, "left"))[:, PADDING:]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_rotary_layers_of_a_model_that_takes_no_positions_are_named():
    config = hf.MoonshineConfig(
        hidden_size=32,
        intermediate_size=48,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        vocab_size=99,
    )
    encoder = hf.MoonshineModel(config).eval().encoder
    lln.hf.replace(encoder, "lln", quiet=True)
    layer = encoder.layers[0].self_attn
    x, mask = torch.randn(1, 8, 32), torch.arange(8)[None] >= 3
    positions = encoder.rotary_emb(x, torch.arange(8)[None])
    with pytest.raises(ValueError, match=r"layer 0 .*padded on the left: .*pad on the right"):
        layer(x, attention_mask=mask, position_embeddings=positions)
