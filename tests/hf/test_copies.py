"""Copies of caches and models, and caches of models with several decoders: nothing is forgotten."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import transformers as hf
from torch import Tensor

import lln.hf
from lln.hf import StateLayer
from tests.hf.test_generate import names, ready
from tests.hf.tiny import ENDLESS, TEXT, VOCABULARY, make, run, text

PROMPT, MORE = 9, 5


@torch.no_grad()
def read(model, ids: Tensor):
    """The cache that ``generate`` has after these tokens and one more."""
    out = model.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    assert all(isinstance(layer, StateLayer) for layer in out.past_key_values.layers)
    return out.sequences[:, :-1], out.past_key_values


def decode(model, cache, ids: Tensor) -> Tensor:
    """Logits of these tokens, one at a time."""
    return torch.cat([run(model, input_ids=x, past_key_values=cache) for x in ids.split(1, 1)], 1)


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


def through_torch(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch}
copies = pytest.mark.parametrize("way", COPIES)


@copies
@names
def test_a_copied_cache_goes_on_alone(name, way):
    """One prompt, two continuations: the copy knows the past, and the original stays as it was."""
    model = ready("llama", name)
    seen, cache = read(model, text(2, PROMPT))
    twin = COPIES[way](cache)
    for past, more in ((twin, text(2, MORE, seed=8)), (cache, text(2, MORE, seed=9))):
        expected = run(model, input_ids=torch.cat([seen, more], 1), use_cache=False)
        got = decode(model, past, more)
        torch.testing.assert_close(got, expected[:, -MORE:], rtol=1e-3, atol=1e-4)


@copies
def test_a_copied_model_goes_on_from_a_cache_and_makes_its_own(way):
    model = ready("llama", "lln_diag")
    seen, cache = read(model, text(2, PROMPT))
    twin = COPIES[way](model)
    more = text(2, MORE, seed=8)
    expected = run(model, input_ids=torch.cat([seen, more], 1), use_cache=False)[:, -MORE:]
    got = decode(twin, copy.deepcopy(cache), more)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(decode(model, cache, more), got)
    assert torch.equal(read(twin, text(2, PROMPT))[0], seen)


CHOICES = {
    "reorder_cache": (torch.tensor([2, 0, 0]), lambda x: x[torch.tensor([2, 0, 0])]),
    "batch_select_indices": (torch.tensor([1, 2]), lambda x: x[torch.tensor([1, 2])]),
    "batch_repeat_interleave": (2, lambda x: x.repeat_interleave(2, 0)),
}


@pytest.mark.parametrize("choice", CHOICES)
@names
def test_samples_of_a_cache_are_chosen(name, choice):
    argument, same = CHOICES[choice]
    model = ready("llama", name)
    seen, cache = read(model, text(3, PROMPT))
    getattr(cache, choice)(argument)
    more = same(text(3, MORE, seed=8))
    expected = run(model, input_ids=torch.cat([same(seen), more], 1), use_cache=False)
    got = decode(model, cache, more)
    torch.testing.assert_close(got, expected[:, -MORE:], rtol=1e-3, atol=1e-4)


def test_a_cache_that_was_reset_starts_again():
    model = ready("llama", "lln_diag with conv")
    _, cache = read(model, text(2, PROMPT))
    cache.reset()
    ids = text(2, MORE)
    expected = run(model, input_ids=ids, use_cache=False)
    torch.testing.assert_close(decode(model, cache, ids), expected, rtol=1e-3, atol=1e-4)


def test_a_state_hands_out_no_keys():
    """As transformers copies a cache by its keys: nothing would come along."""
    _, cache = read(ready("llama", "lln"), text(1, PROMPT))
    with pytest.raises(AttributeError, match=r"holds a state, which has no keys; .*deepcopy"):
        hf.DynamicCache(cache)


def test_tokens_that_no_attention_read_are_named():
    """As after an interrupted call; the cache has counted tokens that its state lacks."""
    model = ready("llama", "lln")
    _, cache = read(model, text(1, PROMPT))
    cache.layers[0].update(*torch.randn(2, 1, 2, 1, 8))
    with pytest.raises(RuntimeError, match=r"not read by the attention.*Start again with a new"):
        run(model, input_ids=text(1, 1), past_key_values=cache)
    assert run(model, input_ids=text(1, 4)).isfinite().all()


def test_softmax_does_not_read_a_state():
    """The layers of a model were undone in the middle of a conversation."""
    model = make("llama")
    undo = lln.hf.replace(model, "lln", layers=[0], alpha=2.0, beta=2.0, quiet=True)
    lln.hf.replace(model, "lln", layers=[1], alpha=2.0, beta=2.0, quiet=True)
    _, cache = read(model, text(1, PROMPT))
    undo()
    with pytest.raises(ValueError, match=r"holds a state of earlier tokens, which only causal LLN"):
        run(model, input_ids=text(1, 1), past_key_values=cache)


TINY_CODEC = {
    "model_type": "mimi",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "num_filters": 4,
    "codebook_size": 8,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "num_quantizers": 3,
    "upsample_groups": 16,
}


def csm(depth_layers: int):
    """Speech from a backbone and a depth decoder, whose layers are both counted from 0."""
    shared = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "num_codebooks": 3}
    depth = {**shared, "num_hidden_layers": depth_layers, "backbone_hidden_size": 32}
    config = hf.CsmConfig(
        **{**shared, "text_vocab_size": VOCABULARY, "codebook_pad_token_id": 0},
        depth_decoder_config={key: x for key, x in depth.items() if key != "pad_token_id"},
        codec_config=TINY_CODEC,
        codebook_eos_token_id=VOCABULARY + 1,
        **ENDLESS,
    )
    torch.manual_seed(0)
    model = hf.CsmForConditionalGeneration(config).eval()
    for parameter in model.backbone_model.parameters():
        parameter.data.mul_(4 if parameter.dim() == 2 else 1)
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of configurations made so small
@pytest.mark.parametrize("depth_layers", [1, 2, 3])
def test_decoders_whose_layers_have_the_same_numbers(depth_layers):
    """A backbone in states of LLN, with a depth decoder of LLN or softmax beside it."""
    for layers in (range(2 + depth_layers), [0, 1]):
        model = csm(depth_layers)
        lln.hf.replace(model, "lln", layers=layers, alpha=2.0, beta=2.0, quiet=True)
        _, logits, cache = speak(model)
        assert sum(isinstance(layer, StateLayer) for layer in cache.layers) == 2
        everything = hf.DynamicCache(config=model.config)
        _, expected, _ = speak(model, past_key_values=everything)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def speak(model, **arguments):
    out = model.generate(
        input_ids=text(2, PROMPT),
        max_new_tokens=4,
        do_sample=False,
        depth_decoder_do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **arguments,
    )
    return out.sequences, torch.stack(out.logits), out.past_key_values
