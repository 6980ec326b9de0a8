"""torch's decoder layer with LLN in both places: no target position may see the ones after it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lln
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


@pytest.mark.parametrize("tokens", [7, 5], ids=["fewer keys", "as many keys"])
@pytest.mark.parametrize("statistics", STORED)
@pytest.mark.parametrize("train", [True, False])
def test_the_future_of_the_target_changes_nothing(statistics, train, tokens):
    layer = decoder_layer(statistics=statistics)
    x = embeddings(2, tokens, 8)
    decode(layer, 2 * x)  # running statistics that are not those of the start
    layer.train(train)
    twin = copy.deepcopy(layer)
    changed = torch.cat([x[:, :4], x[:, 4:] + 5 * embeddings(2, tokens - 4, 8, seed=2)], dim=1)
    out = decode(layer, x)
    assert (decode(copy.deepcopy(twin), changed)[:, 4:] - out[:, 4:]).abs().max() > 0.1
    torch.testing.assert_close(decode(twin, changed)[:, :4], out[:, :4])


@pytest.mark.parametrize("tokens", [7, 5], ids=["fewer keys", "as many keys"])
def test_cross_attention_that_would_measure_its_queries_is_refused(tokens):
    x = embeddings(2, tokens, 8)
    with pytest.raises(ValueError, match=r"cannot serve cross-attention.*running.*fixed"):
        decode(decoder_layer(), x)
    for stored in STORED:
        assert decode(decoder_layer(statistics=stored), x).isfinite().all()


def test_a_core_refuses_to_measure_queries_of_other_tokens():
    q, k, v = qkv(2, 2, 6, 4, keys=9)
    core = LLNAttention(2, 4)
    for attend in (lambda: core(q, k, v), lambda: core.attention_matrix(q, k)):
        with pytest.raises(ValueError, match=r"cannot serve cross-attention.*running.*fixed"):
            attend()
    measured = LLNAttention(2, 4, statistics="fixed").calibrate_(q, k)
    alpha, beta = measured.scales()
    torch.testing.assert_close(measured(q, k, v), lln.attention(q, k, v, alpha=alpha, beta=beta))


def test_a_core_takes_other_queries_by_the_statistics_of_earlier_batches():
    ordered = LLNAttention(2, 4, statistics="running")
    q, k, v = qkv(2, 2, 6, 4, keys=9)
    loud = torch.cat([q[:, :, :3], 9 * q[:, :, 3:]], dim=2)
    start = LLNAttention(2, 4, statistics="fixed")(q, k, v)  # sigma = 1, as before any batch
    torch.testing.assert_close(ordered(loud, k, v)[:, :, :3], start[:, :, :3])
    assert ordered.statistics.batches == 1
    assert (ordered(loud, k, v) - start)[:, :, :3].abs().max() > 1e-2  # of the batch before


def test_decoder_layer_trains_and_ignores_padded_memory():
    layer = decoder_layer(statistics="running")
    target, ignore = embeddings(2, 7, 8), ~padding([5, 2], 5)
    decode(layer, target, memory_key_padding_mask=ignore).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    layer.eval()
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    memory = embeddings(2, 5, 8, seed=1)
    junk = memory.masked_fill(ignore[..., None], 1e3)
    arguments = {"tgt_mask": mask, "tgt_is_causal": True, "memory_key_padding_mask": ignore}
    torch.testing.assert_close(layer(target, junk, **arguments), layer(target, memory, **arguments))
