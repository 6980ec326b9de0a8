"""conv=: the values of neighbouring tokens beside LLN's branches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

import lln
import lln.hf
from lln.nn import LLNAttention, LLNMultiheadAttention
from tests.hf.tiny import make, padded, text
from tests.nn.inputs import embeddings, padding, qkv


def made(**options):
    core = LLNAttention(4, 8, num_kv_heads=2, conv=5, **options)
    assert core.conv_weight is not None and core.conv_weight.shape == (2, 5)
    return core


def test_it_starts_as_torch_draws_it_and_learns():
    q, k, v = qkv(2, 4, 9, 8, kv_heads=2)
    core, plain = made(near=4), LLNAttention(4, 8, num_kv_heads=2, near=4)
    assert 0 < core.conv_weight.abs().max() <= 5**-0.5
    core(q, k, v).square().sum().backward()
    assert core.conv_weight.grad.abs().min() > 0
    torch.nn.init.zeros_(core.conv_weight)
    assert core(q, k, v).equal(plain(q, k, v))


@pytest.mark.parametrize("options", [{}, {"near": 4, "mix": "learned"}])
def test_it_is_added_to_the_branches(options):
    q, k, v = qkv(2, 4, 9, 8, kv_heads=2, dtype=torch.float64)
    key_mask = padding([9, 4], 9)
    core = made(**options).double()
    torch.nn.init.zeros_(core.conv_weight)
    before = core(q, k, v, key_mask, key_mask)
    torch.nn.init.normal_(core.conv_weight)
    seen = v * key_mask[:, None, :, None]
    near = F.conv2d(seen, core.conv_weight[:, None, :, None], padding=(2, 0), groups=2)
    expected = before + near.repeat_interleave(2, dim=1)
    torch.testing.assert_close(core(q, k, v, key_mask, key_mask), expected)
    weights = core.attention_matrix(q, k, key_mask, key_mask)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, dim=1), expected)


def test_what_padding_holds_changes_nothing():
    q, k, v = qkv(2, 4, 9, 8, kv_heads=2)
    key_mask = padding([9, 4], 9)
    core = made()
    torch.nn.init.normal_(core.conv_weight)
    wild = [x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (k, v)]
    quiet = [x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (k, v)]
    assert core(q, *wild, key_mask).equal(core(q, *quiet, key_mask))


def test_what_it_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="conv=4 must be an odd width"):
        LLNAttention(4, 8, conv=4)
    with pytest.raises(ValueError, match="conv=-1 must be an odd width"):
        LLNAttention(4, 8, conv=-1)
    with pytest.raises(ValueError, match="conv=-1 must be a width"):
        LLNAttention(4, 8, conv=-1, causal=True, statistics="running")
    q, k, v = qkv(2, 4, 9, 8, keys=7)
    with pytest.raises(ValueError, match="9 queries of 7 keys"):
        LLNAttention(4, 8, conv=3, statistics="fixed")(q, k, v)
    with pytest.raises(ValueError, match="7 queries of 9 keys"):
        LLNAttention(4, 8, conv=3, statistics="fixed")(*qkv(2, 4, 7, 8, keys=9))
    with pytest.raises(ValueError, match="9 queries of 7 keys"):
        LLNAttention(4, 8, conv=3, causal=True, statistics="running")(q, k, v)
    with pytest.raises(ValueError, match="conv=3 counts positions"):
        LLNMultiheadAttention(32, 4, conv=3, add_bias_kv=True)


@pytest.mark.parametrize("taps", [1, 4, 5])
@pytest.mark.parametrize("options", [{}, {"near": 4, "mix": "learned"}])
def test_causal_attention_looks_at_tokens_before(options, taps):
    q, k, v = qkv(2, 4, 9, 8, kv_heads=2, dtype=torch.float64)
    key_mask = padding([9, 7], 9)
    stored = {"causal": True, "statistics": "running", **options}
    core = LLNAttention(4, 8, num_kv_heads=2, conv=taps, **stored).double().eval()
    torch.nn.init.zeros_(core.conv_weight)
    before = core(q, k, v, key_mask)
    torch.nn.init.normal_(core.conv_weight)
    near, seen = torch.zeros_like(v), v * key_mask[:, None, :, None]
    for n in range(9):
        for t in range(taps):
            if (m := n - (taps - 1) + t) >= 0:
                near[:, :, n] += core.conv_weight.detach()[:, t, None] * seen[:, :, m]
    expected = before + near.repeat_interleave(2, dim=1)
    torch.testing.assert_close(core(q, k, v, key_mask), expected)
    weights = core.attention_matrix(q, k, key_mask)
    assert weights.triu(1).abs().max() == 0
    torch.testing.assert_close(weights @ v.repeat_interleave(2, dim=1), expected)
    if not options:
        torch.testing.assert_close(core(q[:, :, -3:], k, v, key_mask), expected[:, :, -3:])


def test_a_layer_is_causal_where_it_is_asked_to_be():
    layer = LLNMultiheadAttention(32, 4, batch_first=True, conv=3, statistics="running").eval()
    x = embeddings(2, 9, 32)
    mask = {"is_causal": True, "attn_mask": torch.ones(9, 9).triu(1).bool()}
    whole, _ = layer(x, x, x, **mask)
    other = torch.cat([x[:, :5], embeddings(2, 9, 32)[:, 5:].flip(1)], 1)
    changed, _ = layer(other, other, other, **mask)
    torch.testing.assert_close(changed[:, :5], whole[:, :5])
    assert not changed[:, 5:].allclose(whole[:, 5:])
    assert not layer(x, x, x)[0].allclose(whole)


def test_everything_that_has_options_takes_it():
    x = embeddings(2, 9, 32)
    layer = lln.create("lln_diag", dim=32, num_heads=4, max_length=16, near=4, conv=3)
    assert layer(x).shape == x.shape and "conv=3" in repr(layer)
    model = make("roberta")
    before = model(**padded(text(), 4, "right")).logits
    lln.hf.replace(model, "lln", quiet=True)
    plain = model(**padded(text(), 4, "right")).logits
    other = make("roberta")
    lln.hf.replace(other, "lln", quiet=True, conv=3)
    weights = [p for name, p in other.named_parameters() if name.endswith("conv_weight")]
    assert len(weights) == other.config.num_hidden_layers
    assert not other(**padded(text(), 4, "right")).logits.equal(plain)
    for weight in weights:
        torch.nn.init.zeros_(weight)
    assert other(**padded(text(), 4, "right")).logits.equal(plain) and not plain.equal(before)


@pytest.mark.parametrize("name", ["lln_diag", "softmax"])
def test_a_model_that_was_loaded_starts_without_it(name, tmp_path):
    model = make("roberta")
    model.save_pretrained(tmp_path / "trained")
    trained = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "trained")
    for each in (model, trained):
        lln.hf.replace(each, name, quiet=True, conv=3)
    filters = [
        [p for label, p in each.named_parameters() if label.endswith("conv_weight")]
        for each in (model, trained)
    ]
    assert all(p.any() for p in filters[0]) and not any(p.any() for p in filters[1])
    torch.nn.init.ones_(filters[1][0])
    trained.save_pretrained(tmp_path / "tuned")
    again = lln.hf.load(tmp_path / "tuned", transformers.AutoModelForMaskedLM)
    kept = [p for label, p in again.named_parameters() if label.endswith("conv_weight")]
    assert kept[0].equal(filters[1][0]) and kept[1].equal(filters[1][1])


def test_padding_on_either_side_gives_the_same():
    model = make("roberta")
    lln.hf.replace(model, "lln", quiet=True, conv=3)
    for name, parameter in model.named_parameters():
        if name.endswith("conv_weight"):
            torch.nn.init.normal_(parameter)
    alone = model(**padded(text(), 0, "right")).logits
    longer = model(**padded(text(), 4, "right")).logits
    torch.testing.assert_close(longer[:, : alone.shape[1]], alone)


@pytest.mark.slow
def test_it_compiles_and_copies():
    q, k, v = qkv(2, 2, 40, 8)
    core = LLNAttention(2, 8, conv=33, near=8)
    torch.nn.init.normal_(core.conv_weight)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(core), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), core(q, k, v))
