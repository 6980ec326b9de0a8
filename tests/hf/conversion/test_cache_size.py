"""A cache of the size that was asked for: what is promised is what the real one holds."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import lln.hf
from lln.hf import CacheShare
from lln.hf.conversion.cache_size import (
    cache_bytes,
    cache_share,
    filled_cache,
    linear_bytes,
    read,
)
from tests.hf.conversion.planted import planted
from tests.hf.tiny import make, text

OPTIONS = {"near": lln.Near(8, sinks=2, joint=True), "slots": 16}
CONTEXT = 300


def data(model, count: int = 2):
    size = model.config.vocab_size
    return [{"input_ids": torch.randint(1, size, (1, 40))} for _ in range(count)]


def bytes_after(model, tokens: int) -> int:
    ids = torch.randint(1, model.config.vocab_size, (1, tokens))
    with torch.no_grad():
        return cache_bytes(filled_cache(model, ids, 64).layers)


def softmax_bytes(model, tokens: int) -> int:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        read(model, torch.ones(1, tokens, dtype=torch.long), cache)
    return cache_bytes(cache.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.35, 0.6, 0.8, 1.0])
def test_the_cache_keeps_what_was_promised(share, dtype):
    model = planted().to(dtype)
    whole = softmax_bytes(model, CONTEXT)
    asked = CacheShare(share, CONTEXT)
    done = lln.hf.convert(
        model, data(model), options=OPTIONS, transfer_steps=1, recover_steps=0, keep=asked,
        keep_by="error",
    )  # fmt: skip
    kept = sum(map(len, done.kept_key_heads.values()))
    assert kept == {0.35: 1, 0.6: 2, 0.8: 2, 1.0: 3}[share]
    found, one_more = bytes_after(model, CONTEXT), whole / done.key_heads
    assert found <= share * whole
    told = cache_share(model, key_heads=done.key_heads, kept=kept, context=CONTEXT)
    assert told == pytest.approx(found / whole, rel=1e-3)
    if not done.kept:  # a whole layer has no states any more, and leaves more room
        assert found + one_more > share * whole


def test_what_does_not_fit_is_said_before_anything_is_learned():
    model, seen = planted(), []
    said = r"of 0\.01 .*CacheShare, --memory\) .*alone keeps, 0\..* after 300 tokens; give"
    with pytest.raises(ValueError, match=said):
        lln.hf.convert(
            model, data(model), options=OPTIONS, keep=CacheShare(0.01, CONTEXT),
            progress=lambda *said: seen.append(said),
        )  # fmt: skip
    narrow = make("llama", max_position_embeddings=24)
    with pytest.raises(ValueError, match=r"length=24 has no room.*keep_by=\"error\""):
        lln.hf.convert(
            narrow, [{"input_ids": text(1, 20)}], options=OPTIONS, keep=1,
            progress=lambda *said: seen.append(said),
        )  # fmt: skip
    assert not seen


def test_a_model_without_states_has_no_smaller_cache():
    with pytest.raises(ValueError, match="BertModel has no cache that its attention makes smaller"):
        model = make("bert", head="AutoModel")
        lln.hf.convert(
            model, [{"input_ids": text(2, 30)}], options={"near": 8}, keep=CacheShare(0.5, 100)
        )
    with pytest.raises(ValueError, match="LlamaForCausalLM has no cache"):
        model = make("llama")
        lln.hf.convert(
            model, [{"input_ids": text(2, 30)}], attention="hedgehog", keep=CacheShare(0.5, 100)
        )


def test_memory_does_not_grow_but_for_kept_heads():
    model = planted()
    lln.hf.replace(model, "lln_nearfar", quiet=True, feature_map="learned", **OPTIONS)
    lln.hf.calibrate(model, data(model))
    assert linear_bytes(model) == bytes_after(model, 2) == bytes_after(model, 200)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ((0, 8), "share=0 is not in"), ((1.5, 8), "share=1.5"), ((0.5, 0), "context=0 is not"),
        ((0.5, 10.0), "context=10.0 is not a positive number"),
    ],
)  # fmt: skip
def test_a_share_is_of_some_context(given, match):
    with pytest.raises(ValueError, match=match):
        CacheShare(*given)
