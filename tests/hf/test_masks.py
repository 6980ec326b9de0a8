"""What linear attention cannot serve is refused in the layer's call, not while masks are built."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import lln.hf
from tests.hf.tiny import ENDLESS, TEXT, make, padded, run, text

CONSTANTS = {"statistics": "fixed", "alpha": 2.0, "beta": 2.0, "quiet": True}


def sliding(layer_types: list[str]):
    config = hf.Qwen2Config(
        **TEXT,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=layer_types,
        **ENDLESS,
    )
    torch.manual_seed(0)
    return hf.Qwen2ForCausalLM(config).eval()


def test_a_sliding_window_is_refused_in_its_layer():
    model = sliding(["full_attention", "sliding_attention"])
    lln.hf.replace(model, "lln", **CONSTANTS)
    with pytest.raises(
        ValueError, match=r"layer 1 \(model.layers.1.self_attn\).*mask per query-key"
    ):
        model(text())


def test_a_sliding_window_beside_lln_stays_a_sliding_window():
    """Layer 1 keeps its window of softmax: its output is unchanged given the same input."""
    model = sliding(["full_attention", "sliding_attention"])
    plain = sliding(["full_attention", "sliding_attention"])
    lln.hf.replace(model, "lln", layers=[0], **CONSTANTS)
    batch = padded(text(2, 20), 3, "right")
    inputs, outputs = [], []
    for network in (model, plain):
        layer = network.model.layers[1]
        layer.register_forward_hook(
            lambda _, args, out: (inputs.append(args[0]), outputs.append(out))[1]
        )
    with torch.no_grad():
        model(**batch)
        plain.model.layers[0].register_forward_hook(lambda *_: inputs[0])
        plain(**batch)
    torch.testing.assert_close(outputs[1], outputs[0])
    ids = text(2, 9)
    greedy = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **greedy, use_cache=False)
    assert torch.equal(model.generate(ids, **greedy), expected)


def test_a_window_in_the_call_is_refused_without_a_mask():
    model = make("llama")
    lln.hf.replace(model, "lln", **CONSTANTS)
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 5, 32)
    position = model.model.rotary_emb(x, torch.arange(5)[None])
    with pytest.raises(ValueError, match=r"layer 0 .*a sliding window, sliding_window=4"):
        layer(x, position, sliding_window=4)


def test_a_4d_mask_is_refused():
    model = make("llama")
    lln.hf.replace(model, "lln", **CONSTANTS)
    with pytest.raises(ValueError, match=r"attention_mask \[2, 1, 6, 6\]"):
        model(text(2, 6), attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool).tril())


@pytest.mark.parametrize("kind", ["bool", "added", "added in half precision"])
def test_a_4d_mask_that_all_queries_share_is_padding(kind):
    """As LayoutLM makes it; what it is worth shows against the 2-D mask of the same model."""
    model = make("roberta")
    lln.hf.replace(model, "lln_diag", near=4, quiet=True)
    batch = padded(text(2, 12), 5, "right")
    expected = model(**batch).logits
    keys = batch["attention_mask"].bool()[:, None, None, :]
    dtype = torch.float16 if "half" in kind else torch.float32
    added = torch.zeros(keys.shape, dtype=dtype).masked_fill(~keys, torch.finfo(dtype).min)
    wide = {**batch, "attention_mask": keys if kind == "bool" else added}
    assert model(**wide).logits.equal(expected)
    with pytest.raises(ValueError, match="mask per query-key pair"):
        model(**{**batch, "attention_mask": torch.where(keys, 0.0, -3.0)})
    decoder = make("llama")
    lln.hf.replace(decoder, "lln", **CONSTANTS)
    with pytest.raises(ValueError, match="mask per query-key pair"):
        decoder(text(2, 6), attention_mask=torch.ones(2, 1, 1, 6, dtype=torch.bool))


def test_only_layers_that_see_everything():
    model = sliding(["full_attention", "sliding_attention"])
    done = lln.hf.replace(model, "lln", layers="global", **CONSTANTS)
    assert done.layers == [0] and model(text()).logits.isfinite().all()
    done()
    with pytest.raises(ValueError, match=r'layers="global": all 2 .*sliding_attention'):
        lln.hf.replace(sliding(["sliding_attention"] * 2), "lln", layers="global", **CONSTANTS)
    assert lln.hf.replace(make("llama"), "lln", layers="global", **CONSTANTS).layers == [0, 1]
    with pytest.raises(ValueError, match="layers='local' is unknown; pass numbers, \"global\""):
        lln.hf.replace(make("llama"), "lln", layers="local", **CONSTANTS)


def test_a_static_cache_is_refused():
    model = make("llama")
    lln.hf.replace(model, "lln", **CONSTANTS)
    cache = hf.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="static cache"):
        model(text(2, 6), past_key_values=cache)


def test_no_token_sees_the_future():
    for family in ("gpt2", "llama"):
        model = make(family)
        lln.hf.replace(model, "lln_diag", near=4, **CONSTANTS)
        ids, other = text(2, 12), text(2, 12)
        other[:, 7:] = text(2, 5, seed=9)
        assert not torch.equal(ids, other)
        past, changed = (run(model, input_ids=x) for x in (ids, other))
        assert torch.equal(past[:, :7], changed[:, :7])
        assert not torch.equal(past[:, 7:], changed[:, 7:])


def test_a_bidirectional_decoder_is_bidirectional():
    """config.is_causal=False makes transformers ask for an open mask; the mask decides."""
    model = make("llama", is_causal=False)
    lln.hf.replace(model, "lln", **CONSTANTS)
    for batch in ({"input_ids": text(2, 9)}, padded(text(2, 9), 2, "right")):
        other = {**batch, "input_ids": batch["input_ids"].clone()}
        other["input_ids"][:, 8] = 5
        first, second = run(model, **batch), run(model, **other)
        assert not torch.allclose(first[:, 0], second[:, 0])
