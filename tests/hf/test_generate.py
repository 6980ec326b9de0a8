"""generate() after replace and calibrate: the constant-size state equals the run without cache."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import lln.hf
from lln.hf import StateLayer
from tests.hf.tiny import DECODERS, make, padded, text

PROMPT, NEW = 9, 7
MECHANISMS = {
    "lln": {},
    "lln_diag": {"near": 4},
    "lln_diag with conv": {"near": 4, "conv": 5},
    "lln_diag with windows": {"near": lln.Near(4, overlap=3, sinks=2)},
    "lln_nearfar": {"near": lln.Near(4, overlap=5, sinks=2)},
}
names = pytest.mark.parametrize("name", MECHANISMS)
# How a family calls the cache and what a mechanism keeps there do not depend on each other.
OTHERS = [family for family in DECODERS if family != "llama"]
families_and_names = pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in MECHANISMS), *((family, "lln_nearfar") for family in OTHERS)],
)


def ready(family: str, name: str, **options):
    model = make(family)
    torch.manual_seed(11)  # of the filters
    lln.hf.replace(model, name.split()[0], quiet=True, **{**MECHANISMS[name], **options})
    return lln.hf.calibrate(model, [{"input_ids": text(4, 30, seed=5)}], method="entropy")


def generate(model, **arguments):
    """Tokens, and the logits they were chosen from."""
    torch.manual_seed(3)
    out = model.generate(
        **arguments,
        max_new_tokens=NEW,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits), out.past_key_values


def ragged() -> dict[str, torch.Tensor]:
    """Prompts of 14, 9 and 3 tokens, padded on the left."""
    ids = text(3, 14)
    lengths = torch.tensor([[14], [9], [3]])
    return {"input_ids": ids, "attention_mask": (torch.arange(14) >= 14 - lengths).long()}


WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beam": {"do_sample": False, "num_beams": 3},
    "beam_sampling": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
}


@pytest.mark.parametrize(
    ("family", "name", "way"),
    [
        *(("llama", name, way) for name in MECHANISMS for way in ("greedy", "beam")),
        *((family, "lln_nearfar", "greedy") for family in OTHERS),
        *((family, "lln_diag with conv", "beam") for family in OTHERS),
        ("gpt2", "lln", "sampling"),
        ("llama", "lln_diag", "sampling"),
        ("llama", "lln_diag with windows", "beam_sampling"),
    ],
)
def test_state_equals_no_cache(family, name, way):
    model = ready(family, name)
    tokens, logits, cache = generate(model, **ragged(), **WAYS[way])
    assert all(isinstance(layer, StateLayer) for layer in cache.layers)
    expected, expected_logits, _ = generate(model, **ragged(), **WAYS[way], use_cache=False)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-4)


@families_and_names
def test_a_dynamic_cache_of_the_user_is_right_too(family, name):
    model = ready(family, name)
    cache = hf.DynamicCache(config=model.config)
    tokens, logits, used = generate(model, **ragged(), do_sample=False, past_key_values=cache)
    assert used is cache and not any(isinstance(layer, StateLayer) for layer in cache.layers)
    expected, expected_logits, _ = generate(model, **ragged(), do_sample=False, use_cache=False)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-4)


@families_and_names
def test_left_padding_changes_nothing(family, name):
    model, ids = ready(family, name), text(2, PROMPT)
    _, alone, _ = generate(model, input_ids=ids, do_sample=False)
    _, logits, _ = generate(model, **padded(ids, 5, "left"), do_sample=False)
    torch.testing.assert_close(logits, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *((name, 3) for name in MECHANISMS),
        *((name, chunk) for name in ("lln_diag with conv", "lln_nearfar") for chunk in (1, 8)),
    ],
)
def test_a_prompt_may_be_read_in_pieces(name, chunk):
    model = ready("llama", name)
    _, whole, _ = generate(model, **ragged(), do_sample=False)
    _, logits, cache = generate(model, **ragged(), do_sample=False, prefill_chunk_size=chunk)
    assert isinstance(cache.layers[0], StateLayer)
    torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-4)


JOINT = lln.Near(4, joint=True)


@pytest.mark.parametrize(
    "options",
    [
        *({"mix": "learned"}, {"normalize_keys": True}, {"learn_scale": True}, {"conv": 33}),
        {"near": JOINT, "learn_scale": True},
        {
            "near": lln.Near(4, sinks=1, joint=True),
            "feature_map": "learned",
            "slots": 24,
            "center_keys": True,
        },
        {
            "near": lln.Near(4, overlap=9),
            "feature_map": "signs",
            "center_keys": True,
            "sharpness": 0.6,
        },
        *({"near": JOINT, "feature_map": "hedgehog"}, {"feature_map": "elu"}),
        {"near": JOINT, "feature_map": "t2r", "center_keys": True, "learn_scale": True},
    ],
    ids=str,
)
def test_options_hold_while_decoding(options):
    model = ready("llama", "lln_diag", **options)
    for label, parameter in model.named_parameters():
        if ".lln." in label:
            parameter.data.uniform_(-1, 1)
    _, logits, _ = generate(model, **ragged(), do_sample=False)
    _, expected, _ = generate(model, **ragged(), do_sample=False, use_cache=False)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_layers_of_softmax_beside_states():
    model = make("llama")
    lln.hf.replace(model, "lln_diag", layers=[1], near=4, quiet=True)
    lln.hf.calibrate(model, [{"input_ids": text(4, 30, seed=5)}])
    _, logits, cache = generate(model, **ragged(), do_sample=False)
    assert [isinstance(layer, StateLayer) for layer in cache.layers] == [False, True]
    _, expected, _ = generate(model, **ragged(), do_sample=False, use_cache=False)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


@names
def test_the_state_does_not_grow(name):
    """Bytes held after 5 and after 30 tokens are the same."""
    model = ready("llama", name)

    def held(tokens: int) -> int:
        out = model.generate(
            text(1, 3), max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True
        )
        layer = out.past_key_values.layers[0]
        return sum(x.untyped_storage().nbytes() for x in layer.memory.tensors.values())

    assert held(30) == held(5) > 0


def test_a_conversation_goes_on_from_its_state():
    """A second call continues where the first stopped."""
    model, ids = ready("llama", "lln_diag"), text(1, PROMPT)
    options = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True}
    first = model.generate(ids, **options)
    more = torch.cat([first.sequences, text(1, 3, seed=8)], 1)
    second = model.generate(more, **options, past_key_values=first.past_key_values)
    assert torch.equal(second.sequences, model.generate(more, **options).sequences)


def test_half_precision():
    model = ready("llama", "lln_diag").to(torch.bfloat16)
    _, logits, _ = generate(model, **ragged(), do_sample=False)
    assert logits.isfinite().all()


def test_assisted_decoding_keeps_all_keys():
    model = ready("llama", "lln_diag")
    ids = text(1, PROMPT)
    expected = model.generate(ids, do_sample=False, max_new_tokens=6)
    assistant = make("llama")
    got = model.generate(ids, do_sample=False, max_new_tokens=6, assistant_model=assistant)
    assert torch.equal(got, expected)


def test_a_state_cannot_take_tokens_back():
    model = ready("llama", "lln")
    _, _, cache = generate(model, **ragged(), do_sample=False)
    with pytest.raises(ValueError, match=r"cannot forget its last 2 tokens.*DynamicCache"):
        cache.crop(-2)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_uncalibrated_models_are_named():
    model = make("llama")
    lln.hf.replace(model, "lln_diag", quiet=True)
    message = r"layer 0 \(model.layers.0.self_attn\) of LlamaForCausalLM has no calibrated"
    with pytest.raises(ValueError, match=message):
        model.generate(text(), max_new_tokens=2)
