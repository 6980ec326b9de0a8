"""The three dropouts: what each drops, what it keeps, and when it acts."""

from __future__ import annotations

import pytest
import torch

from lln.nn import LLNAttention, LLNMultiheadAttention
from tests.nn.inputs import embeddings, qkv


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("near", [None, 4])
def test_dropout_keeps_the_expectation(causal, near):
    q, k, v = qkv(1, 2, 8, 4)
    core = LLNAttention(2, 4, statistics="fixed", causal=causal, near=near, dropout=0.4)
    torch.manual_seed(0)
    copies = 4000
    many = core(*(x.expand(copies, -1, -1, -1) for x in (q, k, v)))
    exact = core.eval()(q, k, v)[0]
    error = (many.mean(0) - exact).abs() / (many.std(0) / copies**0.5 + 1e-6)
    assert many.std(0).min() > 0
    assert error.max() < 5  # standard errors, 64 entries


def test_dropout_drops_whole_slots_of_a_query():
    """One feature per head leaves one slot: each row is either zero or scaled by 1/(1 − p)."""
    q, k, v = qkv(1, 2, 50, 1)
    core = LLNAttention(2, 1, statistics="fixed", dropout=0.5)
    torch.manual_seed(0)
    out, exact = core(q, k, v), core.eval()(q, k, v)
    dropped = (out == 0).all(-1)
    torch.testing.assert_close(out[~dropped], 2 * exact[~dropped])
    assert 20 < dropped.sum() < 80


def test_nothing_is_dropped_in_evaluation():
    q, k, v = qkv(2, 2, 9, 4)
    core = LLNAttention(2, 4, near=4, dropout=0.5).eval()
    torch.testing.assert_close(core(q, k, v), LLNAttention(2, 4, near=4)(q, k, v))


def test_seed_decides_what_is_dropped():
    q, k, v = qkv(8, 2, 9, 4)
    core = LLNAttention(2, 4, near=4, dropout=0.5)

    def draw(seed):
        torch.manual_seed(seed)
        return core(q, k, v)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_dropout_of_everything_is_zero():
    q, k, v = qkv(2, 2, 9, 4)
    assert (LLNAttention(2, 4, near=4, dropout=1.0)(q, k, v) == 0).all()


def test_returned_weights_carry_the_dropout_of_the_output():
    x = embeddings(2, 9, 8)
    layer = LLNMultiheadAttention(8, 2, dropout=0.3, batch_first=True, near=4)
    torch.manual_seed(0)
    out, weights = layer(x, x, x, average_attn_weights=False)
    torch.manual_seed(0)
    alone, nothing = layer(x, x, x, need_weights=False)
    assert nothing is None
    torch.testing.assert_close(out, alone)
    values = x @ layer.in_proj_weight[16:].T
    heads = weights @ values.unflatten(-1, (2, 4)).transpose(1, 2)
    torch.testing.assert_close(layer.out_proj(heads.transpose(1, 2).flatten(2)), out)


def test_torch_attribute_changes_the_dropout():
    x = embeddings(2, 9, 8)
    layer = LLNMultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    layer.dropout = 0.0
    torch.testing.assert_close(layer(x, x, x)[0], layer.eval()(x, x, x)[0])
