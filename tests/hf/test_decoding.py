"""One memory, every way of decoding: each answers as the model without any cache."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import lln.hf
import lln.onnx
from lln.hf.cache import use_states
from tests.hf.tiny import make, text

TOKENS, NEW = 27, 9
CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # in float64; rotations are computed in float32
WINDOW = {"near": lln.Near(4, overlap=3)}
SINKS = {"near": lln.Near(4, overlap=3, sinks=2)}
JOINT_WINDOW = {"near": lln.Near(4, overlap=3, joint=True)}
JOINT_SINKS = {"near": lln.Near(4, overlap=3, sinks=2, joint=True)}
NUMBERS = {"mix": [0.05, 0.3, 0.7, 1.0]}
# Every mix, window, map and option at least once, and those that meet in the code together.
CASES = {
    "far alone": {},
    "far alone, normalised": {"normalize_keys": True, "learn_scale": True},
    "far alone, signs, convolved": {"feature_map": "signs", "conv": 3},
    "far alone, kept heads": {"center_keys": True, "heads": [0, 3]},
    "average, block": {"near": 4},
    "average, window, convolved": {**WINDOW, "conv": 5},
    "average, sinks, elu": {**SINKS, "feature_map": "elu"},
    "average, block, kept heads": {"near": 4, "conv": 3, "heads": [1]},
    "learned, block, convolved": {"near": 4, "mix": "learned", "conv": 33},
    "learned, window, normalised": {**WINDOW, "mix": "learned", "normalize_keys": True},
    "a number, block, signs": {"near": 4, "mix": 0.3, "feature_map": "signs"},
    "a number, sinks, centred": {**SINKS, "mix": 0.3, "center_keys": True},
    "numbers, block": {"near": 3, **NUMBERS},
    "numbers, wide window": {"near": lln.Near(3, overlap=8, sinks=1), **NUMBERS},
    "joint, block": {"near": lln.Near(4, joint=True)},
    "joint, block, learned map": {
        "near": lln.Near(4, joint=True), "feature_map": "learned", "slots": 24,
    },
    "joint, block, sinks": {"near": lln.Near(4, sinks=6, joint=True), "learn_scale": True},
    "joint, window": {**JOINT_WINDOW},
    "joint, window, normalised": {**JOINT_WINDOW, "normalize_keys": True, "conv": 5},
    "joint, wide window, hedgehog": {
        "near": lln.Near(3, overlap=8, joint=True), "feature_map": "hedgehog",
    },
    "joint, sinks, centred": {**JOINT_SINKS, "center_keys": True, "heads": [2]},
    "joint, sinks, before rotation": {
        **JOINT_SINKS, "feature_map": "learned", "before_rotation": True,
    },
    "joint, sinks, t2r": {**JOINT_SINKS, "feature_map": "t2r", "center_keys": True},
}  # fmt: skip


@functools.cache
def decoder(name: str):
    """In float64, every head with weights of its own."""
    options = dict(CASES[name])
    heads = options.pop("heads", [])
    model = make("llama", num_hidden_layers=1).double()
    torch.manual_seed(11)
    attention = "lln_diag" if "near" in options else "lln"
    done = lln.hf.replace(model, attention, quiet=True, **options)
    for key, x in model.named_parameters():
        if ".lln." in key:
            x.data.uniform_(-1, 1)
    lln.hf.calibrate(model, [{"input_ids": text(4, 30, seed=5)}])
    done.keep_softmax_heads({0: heads} if heads else {})
    return model


def fresh(model) -> DynamicCache:
    """The cache that ``generate`` makes."""
    cache = DynamicCache(config=model.config)
    use_states(cache, list(model.modules()))
    return cache


def mask_of(kind: str) -> Tensor:
    """None masked; padding on the left; padding and tokens left out in the middle."""
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    if kind != "whole":
        mask[0, :9], mask[2, :2] = False, False
    if kind == "holes":
        mask[0, [12, 13]], mask[1, [1, 5, 16]], mask[2, 3:9] = False, False, False
    return mask


def decode(model, cache, ids: Tensor, mask: Tensor | None, pieces: list[int]) -> Tensor:
    """Logits of the next tokens, so many at a time."""
    found = []
    for piece in pieces:
        start = cache.get_seq_length()
        end = start + piece
        seen = None if mask is None else mask[:, :end].long()
        given = {"attention_mask": seen, "past_key_values": cache}
        found.append(model(ids[:, start:end], **given).logits)
    return torch.cat(found, 1)


PIECES = {
    "one by one": [1] * TOKENS,
    "a prompt, one by one": [11] + [1] * 16,
    "chunks and ones": [6, 1, 1, 4, 5, 1, 1, 1, 1, 1, 2, 1, 1, 1],
}


def from_states(kind: str, pieces: str, model, ids: Tensor) -> None:
    mask = mask_of(kind)
    whole = model(ids, attention_mask=mask.long(), use_cache=False).logits
    given = None if kind == "whole" else mask
    found = decode(model, fresh(model), ids, given, PIECES[pieces])
    torch.testing.assert_close(found[mask], whole[mask], **CLOSE)
    assert found.isfinite().all()


def as_on_a_device(model, ids: Tensor) -> None:
    """The host may not look at positions: every step folds a key."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("cache", "decode.step"):
            patch.setattr(f"lln.hf.{module}.may_look_at", lambda _: False)
        for kind in ("whole", "holes"):
            from_states(kind, "chunks and ones", model, ids)


def from_all_keys(model, ids: Tensor) -> None:
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    found = decode(model, cache, ids, None, PIECES["a prompt, one by one"])
    torch.testing.assert_close(found, whole, **CLOSE)


def masked_later(model, ids: Tensor) -> None:
    """No token of the prompt is masked, some of those after it are."""
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, 10], mask[1, 12:14] = False, False
    whole = model(ids, attention_mask=mask.long(), use_cache=False).logits
    for pieces in ([9, 1, 1, 1, 1, 1], [9, 1, 4]):
        cache = fresh(model)
        found = decode(model, cache, ids, mask, [*pieces, *[1] * 9, 4])
        torch.testing.assert_close(found[mask], whole[mask], **CLOSE)


def beams(model, ids: Tensor) -> None:
    mask = mask_of("padded")[:, :12]
    options = {
        "attention_mask": mask.long(), "max_new_tokens": NEW, "num_beams": 3, "do_sample": False,
        "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    found = model.generate(ids[:, :12], **options)
    wanted = model.generate(ids[:, :12], **options, use_cache=False)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), **CLOSE)


def chosen(model, ids: Tensor) -> None:
    """Samples change places in the middle of a block; copies go on alone."""
    order, mask = torch.tensor([2, 0, 0]), mask_of("holes")
    whole = model(ids, attention_mask=mask.long(), use_cache=False).logits
    cache = fresh(model)
    decode(model, cache, ids, mask, [10, 1, 1, 1])
    twin = copy.deepcopy(cache)
    aside = [copy.copy(layer) for layer in cache.layers]
    cache.reorder_cache(order)
    for past, which in ((cache, order), (twin, torch.arange(3))):
        found = decode(model, past, ids[which], mask[which], [1] * 14)
        real = mask[which, 13:]
        torch.testing.assert_close(found[real], whole[which, 13:][real], **CLOSE)
    twin.layers = aside
    found = decode(model, twin, ids, mask, [1] * 14)
    torch.testing.assert_close(found[mask[:, 13:]], whole[:, 13:][mask[:, 13:]], **CLOSE)


def seats(model, ids: Tensor) -> None:
    """Three streams, two seats."""
    prompts = [row[:length] for row, length in zip(ids, (1, 9, 17), strict=True)]
    engine = lln.hf.Engine(model, 2, max_length=17 + NEW)
    streams = engine.generate(prompts, max_new_tokens=NEW)
    for stream, prompt in zip(streams, prompts, strict=True):
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        wanted = model.generate(prompt[None], **options, use_cache=False)[0]
        assert stream.tokens == wanted[len(prompt) :].tolist()


def by_decoder_step(model, ids: Tensor) -> None:
    """As the graph of lln.onnx does it, in torch."""
    whole = model(ids, use_cache=False).logits
    step = lln.onnx.DecoderStep(model, max_length=TOKENS)
    state = step.empty(len(ids))
    for place in range(TOKENS):
        logits, *state = step(ids[:, place], torch.full((len(ids),), place), *state)
        torch.testing.assert_close(logits, whole[:, place], **CLOSE)


WAYS = {
    **{f"{kind}, {pieces}": functools.partial(from_states, kind, pieces)
       for kind, pieces in [
           ("whole", "one by one"),
           ("whole", "chunks and ones"),
           ("padded", "a prompt, one by one"),
           ("holes", "one by one"),
           ("holes", "chunks and ones"),
       ]},
    "as on a device": as_on_a_device,
    "all keys": from_all_keys,
    "masked later": masked_later,
    "beams": beams,
    "chosen samples": chosen,
    "seats": seats,
    "decoder step": by_decoder_step,
}  # fmt: skip


# Keys that were rotated in earlier calls cannot be rotated back: refused.
REFUSED = {("joint, sinks, before rotation", "all keys")}


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in CASES for way in WAYS if (name, way) not in REFUSED],
)
@torch.no_grad()
def test_every_way_of_decoding_answers_as_no_cache_does(name, way):
    """Over the ends of blocks, before and after keys have left the window."""
    WAYS[way](decoder(name), text(3, TOKENS))


def test_tensors_of_inference_are_not_written_outside_of_it():
    model, ids = decoder("joint, sinks, t2r"), text(3, TOKENS)
    cache = fresh(model)
    with torch.inference_mode():
        decode(model, cache, ids, None, [5, 1])
    with torch.no_grad():
        found = decode(model, cache, ids, None, [1] * 21)
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, whole[:, 6:], **CLOSE)


@pytest.mark.parametrize("name", ["learned, window, normalised", "joint, sinks, t2r"])
def test_gradients_flow_through_a_stream(name):
    """Read in pieces and one by one, they are those of one pass."""
    model, ids = decoder(name), text(3, 14)
    learned = [x for key, x in model.named_parameters() if ".lln." in key]
    loss = decode(model, fresh(model), ids, None, [5, 1, 1, 1, 4, 1, 1]).square().sum()
    wanted = torch.autograd.grad(model(ids, use_cache=False).logits.square().sum(), learned)
    for one, other in zip(torch.autograd.grad(loss, learned), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_token_after_a_pass_with_gradients_leaves_its_tensors_alone():
    """They are needed for the backward pass."""
    model, ids = decoder("joint, sinks, t2r"), text(3, 14)
    cache = fresh(model)
    loss = decode(model, cache, ids, None, [5, 4]).square().sum()
    with torch.no_grad():
        found = decode(model, cache, ids, None, [1] * 5)
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, whole[:, 9:], **CLOSE)
    loss.backward()
    model.zero_grad()
