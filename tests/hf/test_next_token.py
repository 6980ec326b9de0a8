"""One more token of every sample: the short way answers as the general one does."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import lln.hf
from lln.hf import next_token
from lln.hf.cache import use_states
from lln.hf.replace import attention_modules
from tests.hf.tiny import make, text


def given(tokens, *, padded):
    """What a model is called with: two samples, one of them padded on the left, one with holes."""
    ids, mask = text(2, tokens), torch.ones(2, tokens, dtype=torch.long)
    if padded:
        mask[0, :3] = 0
        mask[1, [2, 19, 40]] = 0  # seen by the prompt, inside a block, at its start
    return ids, mask


@pytest.mark.parametrize(
    ("before", "padded", "changes"),
    [
        *((before, True, changes) for before in (False, True) for changes in ({"sinks": 2}, {})),
        (False, True, {"sinks": 0, "diag_overlap": 0}),
        (False, False, {"sinks": 2}),
        (True, False, {}),
        (False, False, {"sinks": 0, "diag_overlap": 0}),
    ],
)
def test_the_short_way_is_taken_and_agrees_with_the_general_one(
    before, padded, changes, monkeypatch
):
    """Over the ends of blocks, before and after keys have left the window."""
    options = {"diag_block": 8, "diag_overlap": 8, "sinks": 3, "feature_map": "learned", **changes}
    model = make("llama").double()
    lln.hf.replace(model, "lln_nearfar", quiet=True, before_rotation=before, **options)
    ids, mask = given(44, padded=padded)
    lln.hf.calibrate(model, [{"input_ids": ids}])
    taken, attend_next, serves = [], next_token.attend_next, next_token.serves

    def counted(core, window, state, counts, *args):
        taken.append(list(counts))
        return attend_next(core, window, state, counts, *args)

    monkeypatch.setattr(next_token, "attend_next", counted)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        short = DynamicCache(config=model.config)
        use_states(short, list(attention_modules(model).values()))
        model(ids[:, :7], attention_mask=mask[:, :7], past_key_values=short)
        general = copy.deepcopy(short)
        for place in range(7, 44):
            one = {"input_ids": ids[:, place : place + 1], "attention_mask": mask[:, : place + 1]}
            quick = model(**one, past_key_values=short).logits[:, 0]
            with monkeypatch.context() as patch:
                patch.setattr(next_token, "serves", lambda *_: False)
                slow = model(**one, past_key_values=general).logits[:, 0]
            assert next_token.serves is serves
            torch.testing.assert_close(quick, slow, rtol=1e-9, atol=1e-10)
            real = mask[:, place] > 0
            torch.testing.assert_close(quick[real], whole[real, place], rtol=1e-6, atol=1e-7)
    assert len(taken) == 2 * 37  # of both layers, in one of the two streams
    assert taken[-1] == ([40, 43] if padded else [43, 43])
    for one, other in zip(short.layers, general.layers, strict=True):
        assert torch.equal(one.window.count, other.window.count)
        assert torch.equal(one.window.valid, other.window.valid)
        torch.testing.assert_close(one.state.log_mass, other.state.log_mass)
    aside = [copy.copy(layer) for layer in short.layers]
    kept = [layer.window.k.clone() for layer in aside]
    with torch.no_grad():
        model(ids[:, :1], past_key_values=short)
    assert all(torch.equal(x.window.k, y) for x, y in zip(aside, kept, strict=True))


def test_gradients_and_tensors_of_inference_take_the_general_way():
    """Neither may be written in place."""
    model = make("llama").requires_grad_(False)
    lln.hf.replace(model, "lln_nearfar", quiet=True, diag_block=8, feature_map="learned")
    ids = text(1, 12)
    lln.hf.calibrate(model, [{"input_ids": ids}])
    cache = DynamicCache(config=model.config)
    use_states(cache, list(attention_modules(model).values()))
    with torch.inference_mode():
        model(ids[:, :5], past_key_values=cache)
    with torch.no_grad():
        for place in range(5, 12):
            found = model(ids[:, place : place + 1], past_key_values=cache).logits[:, 0]
            torch.testing.assert_close(found, model(ids).logits[:, place], rtol=1e-4, atol=1e-5)
    cache = DynamicCache(config=model.config)
    use_states(cache, list(attention_modules(model).values()))
    found = [model(ids[:, :5], past_key_values=cache).logits]
    found += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(5, 12)]
    maps = [x for name, x in model.named_parameters() if "features" in name]
    loss = torch.cat(found, 1).square().sum()
    whole = model(ids, use_cache=False).logits.square().sum()
    wanted = torch.autograd.grad(whole, maps, allow_unused=True)
    for one, other in zip(torch.autograd.grad(loss, maps, allow_unused=True), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_sample_without_its_sinks_or_any_token_takes_the_general_way_until_it_has_them():
    """Three sinks: the second sample has one real token in the prompt, the other none."""
    model = make("llama").double()
    options = {"diag_block": 8, "sinks": 3, "feature_map": "learned"}
    lln.hf.replace(model, "lln_nearfar", quiet=True, **options)
    ids, mask = text(2, 30), torch.ones(2, 30, dtype=torch.long)
    lln.hf.calibrate(model, [{"input_ids": ids}])
    mask[0, :7], mask[1, :5] = 0, 0
    cache = DynamicCache(config=model.config)
    use_states(cache, list(attention_modules(model).values()))
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        model(ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache)
        for place in range(6, 30):
            one = {"input_ids": ids[:, place : place + 1], "attention_mask": mask[:, : place + 1]}
            found = model(**one, past_key_values=cache).logits[:, 0]
            real = mask[:, place] > 0
            torch.testing.assert_close(found[real], whole[real, place], rtol=1e-6, atol=1e-7)
            assert (cache.layers[0].counts is not None) == (
                place >= 10 and (place + 1 - 7) % 8 > 0 and (place + 1 - 5) % 8 > 0
            )


def test_chosen_samples_go_on_from_their_own_places():
    """As beams do, whose order changes between tokens."""
    model = make("llama").double()
    lln.hf.replace(model, "lln_nearfar", quiet=True, diag_block=8, feature_map="learned")
    ids, mask = given(44, padded=True)
    lln.hf.calibrate(model, [{"input_ids": ids}])
    order = torch.tensor([1, 0, 0])
    cache = DynamicCache(config=model.config)
    use_states(cache, list(attention_modules(model).values()))
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        model(ids[:, :10], attention_mask=mask[:, :10], past_key_values=cache)
        for place in range(10, 44):
            if place == 21:
                cache.reorder_cache(order)
                ids, mask, whole = ids[order], mask[order], whole[order]
            one = {"input_ids": ids[:, place : place + 1], "attention_mask": mask[:, : place + 1]}
            found = model(**one, past_key_values=cache).logits[:, 0]
            real = mask[:, place] > 0
            torch.testing.assert_close(found[real], whole[real, place], rtol=1e-6, atol=1e-7)
