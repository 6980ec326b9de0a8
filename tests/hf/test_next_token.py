"""One more token of a stream without padding: the short way answers as the general one does."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import lln.hf
from lln.hf.cache import StateLayer, use_states
from lln.hf.replace import attention_modules
from tests.hf.tiny import make, text


@pytest.mark.parametrize("changes", [{"sinks": 2}, {"sinks": 0, "diag_overlap": 0}, {}])
@pytest.mark.parametrize("before", [False, True])
def test_the_short_way_is_taken_and_agrees_with_the_general_one(before, changes, monkeypatch):
    """Over the ends of blocks, before and after keys have left the window."""
    options = {"diag_block": 8, "diag_overlap": 8, "sinks": 3, "feature_map": "learned", **changes}
    model = make("llama").double()
    lln.hf.replace(model, "lln_nearfar", quiet=True, before_rotation=before, **options)
    ids = text(2, 60)
    lln.hf.calibrate(model, [{"input_ids": ids}])
    taken, next_token = [], StateLayer._next

    def counted(self, *args):
        taken.append(self.tokens)
        return next_token(self, *args)

    monkeypatch.setattr(StateLayer, "_next", counted)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        short = DynamicCache(config=model.config)
        use_states(short, list(attention_modules(model).values()))
        model(ids[:, :5], past_key_values=short)
        general = copy.deepcopy(short)
        for layer in general.layers:
            layer.padded = True
        for place in range(5, 60):
            one = ids[:, place : place + 1]
            quick = model(one, past_key_values=short).logits[:, 0]
            slow = model(one, past_key_values=general).logits[:, 0]
            torch.testing.assert_close(quick, slow, rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(quick, whole[:, place], rtol=1e-6, atol=1e-7)
    assert len(taken) == 2 * 55  # of both layers, in one of the two streams
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
