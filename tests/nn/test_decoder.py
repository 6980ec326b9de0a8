"""torch's decoder layer with LLN in both places: no target position may see the ones after it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lln.nn import LLNAttention, LLNMultiheadAttention
from tests.nn.inputs import embeddings, padding, qkv

STORED = ["running", "fixed"]


def decoder_layer(**cross) -> nn.TransformerDecoderLayer:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layer.self_attn = LLNMultiheadAttention(8, 2, batch_first=True, statistics="running")
    layer.multihead_attn = LLNMultiheadAttention(8, 2, batch_first=True, **cross)
    return layer


def decode(layer: nn.Module, target: torch.Tensor, **arguments) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
    memory = embeddings(2, 5, 8, seed=1)
    return layer(target, memory, tgt_mask=mask, tgt_is_causal=True, **arguments)


@pytest.mark.parametrize("target", ["product", "measured"])
@pytest.mark.parametrize("statistics", STORED)
@pytest.mark.parametrize("train", [True, False])
def test_the_future_of_the_target_changes_nothing(statistics, train, target):
    layer = decoder_layer(statistics=statistics, target=target, causal_queries=True)
    x = embeddings(2, 7, 8)
    decode(layer, 2 * x)  # running statistics that are not those of the start
    layer.train(train)
    twin = copy.deepcopy(layer)
    changed = torch.cat([x[:, :4], x[:, 4:] + 5 * embeddings(2, 3, 8, seed=2)], dim=1)
    out = decode(layer, x)
    assert (decode(copy.deepcopy(twin), changed)[:, 4:] - out[:, 4:]).abs().max() > 0.1
    torch.testing.assert_close(decode(twin, changed)[:, :4], out[:, :4])


def test_cross_attention_that_would_measure_its_queries_must_be_told():
    x = embeddings(2, 7, 8)
    with pytest.raises(ValueError, match=r"query is not key.*causal_queries=True.*running.*fixed"):
        decode(decoder_layer(), x)
    layer = decoder_layer(statistics="running")
    with pytest.raises(ValueError, match="causal_queries=False if all queries may"):
        decode(layer, x)
    assert decode(layer.eval(), x).isfinite().all()  # the averages: nothing is measured
    assert decode(decoder_layer(statistics="fixed"), x).isfinite().all()
    assert decode(decoder_layer(causal_queries=False), x).isfinite().all()


@pytest.mark.parametrize("make", [LLNAttention, LLNMultiheadAttention])
def test_queries_in_order_need_stored_statistics(make):
    with pytest.raises(ValueError, match=r"leak the future.*running.*fixed"):
        make(2, 2, causal_queries=True)


def test_a_core_takes_ordered_queries_by_the_statistics_of_earlier_batches():
    ordered = LLNAttention(2, 4, statistics="running", causal_queries=True)
    q, k, v = qkv(2, 2, 6, 4, keys=9)
    loud = torch.cat([q[:, :, :3], 9 * q[:, :, 3:]], dim=2)
    start = LLNAttention(2, 4, statistics="fixed")(q, k, v)  # sigma = 1, as before any batch
    torch.testing.assert_close(ordered(loud, k, v)[:, :, :3], start[:, :, :3])
    assert ordered.statistics.batches == 1
    measured = LLNAttention(2, 4, statistics="running")(loud, k, v)
    assert (measured - start)[:, :, :3].abs().max() > 1e-2
    assert "causal_queries=True" in repr(ordered)


def test_decoder_layer_trains_and_ignores_padded_memory():
    layer = decoder_layer(statistics="running", causal_queries=True)
    target, ignore = embeddings(2, 7, 8), ~padding([5, 2], 5)
    decode(layer, target, memory_key_padding_mask=ignore).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    layer.eval()
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    memory = embeddings(2, 5, 8, seed=1)
    junk = memory.masked_fill(ignore[..., None], 1e3)
    arguments = {"tgt_mask": mask, "tgt_is_causal": True, "memory_key_padding_mask": ignore}
    torch.testing.assert_close(layer(target, junk, **arguments), layer(target, memory, **arguments))
