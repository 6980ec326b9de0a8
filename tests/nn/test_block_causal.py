"""causal_block= of the modules: matrices, branches, masks of torch, the zoo, what is recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lln
import lln.hf
from lln.instruments import entropy
from lln.instruments.recording.recorder import attention_calls
from lln.nn import LLNAttention, LLNMultiheadAttention
from lln.nn.rows import row_weights
from lln.onnx import DecodingStep
from lln.ops import reference
from tests.generated import check_generated_code
from tests.helpers import random_qkv

CAUSAL = {"causal": True, "causal_block": 8, "statistics": "fixed"}
CASES = {
    "lln": {},
    "unbiased": {"normalize_keys": True},
    "average": {"diag_block": 8},
    "learned": {"diag_block": 4, "mix": "learned"},
    "maps": {"diag_block": 2, "feature_map": "signs", "center_keys": True},
}
cases = pytest.mark.parametrize("case", CASES)


def make(case: str = "lln", **options) -> LLNAttention:
    given = {**CAUSAL, **CASES[case], **options}
    return LLNAttention(4, 8, num_kv_heads=2, **given).double().eval()


def seen(queries: int, keys: int | None = None, block: int = 8) -> torch.Tensor:
    keys = queries if keys is None else keys
    return reference.visible(queries, keys, is_causal=True, causal_block=block)


@cases
@pytest.mark.parametrize("queries, keys", [(21, 21), (5, 21)])
def test_the_matrix_is_zero_where_the_rule_hides_keys(case, queries, keys):
    core, (q, k, v) = make(case), random_qkv(2, 4, queries, keys, key_heads=2)
    p = core.attention_matrix(q, k)
    assert torch.equal(p > 0, seen(queries, keys).expand_as(p))
    torch.testing.assert_close(p @ v.repeat_interleave(2, 1), core(q, k, v))


@pytest.mark.parametrize("case", ["lln", "unbiased", "average", "learned"])
def test_the_module_is_the_function(case):
    core, (q, k, v) = make(case), random_qkv(2, 4, 30, key_heads=2)
    alpha, beta = core.scales()
    options = {name: x for name, x in CASES[case].items() if name != "mix"}
    expected = lln.attention(
        q, k, v, alpha=alpha, beta=beta, is_causal=True, causal_block=8, **options
    )  # fmt: skip
    torch.testing.assert_close(core(q, k, v), expected)


@cases
def test_rows_are_those_of_the_matrix(case):
    core, (q, k, _) = make(case), random_qkv(2, 4, 30, key_heads=2)
    index = torch.tensor([[0, 7, 13, 29], [3, 8, 19, 20]])
    whole = core.attention_matrix(q, k)
    draw = core.draw(q, k, is_causal=True)
    found = row_weights(core, q, k, index, draw)
    wanted = torch.stack([whole[b][:, index[b]] for b in range(2)])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


@cases
def test_what_is_recorded_is_the_matrix(case):
    core, (q, k, v) = make(case), random_qkv(2, 4, 40, key_heads=2)
    mask = torch.arange(40) < torch.tensor([[40], [29]])
    with attention_calls(core, samples=2) as calls, torch.no_grad():
        core(q, k, v, mask, mask)
    (call,) = calls
    assert call.is_causal and call.causal_block == 8
    if core.local is None:
        expected = core.attention_matrix(q, k, mask, mask)
        for sample, tokens in ((0, 40), (1, 29)):
            matrix = expected[sample, :, :tokens, :tokens]
            torch.testing.assert_close(call.matrix(sample), matrix, rtol=1e-9, atol=1e-12)
            found = call.measured(["entropy"])["entropy"][sample]
            torch.testing.assert_close(found.double(), entropy(matrix), rtol=1e-5, atol=1e-5)
        assert call.lln_share() is None
        return
    p = call.matrix(0)
    assert torch.equal(p > 0, seen(40)[0].expand_as(p))
    share = call.lln_share()
    assert share is not None and ((share > 0) & (share < 1)).all()
    alone = _norms(core, q, k, v, mask)
    torch.testing.assert_close(share, alone, rtol=1e-9, atol=1e-12)


def _norms(core: LLNAttention, q, k, v, mask) -> torch.Tensor:
    """The share of LLN in the output by the reference."""
    draw = core.draw(q, k, key_mask=mask, is_causal=True)
    k = k if draw.center is None else k - draw.center
    far = (q, k) if draw.far is None else draw.far
    linear = reference.block_causal(
        *far, v, alpha=draw.alpha, beta=draw.beta, causal_block=8, key_mask=mask
    )  # fmt: skip
    assert core.local is not None
    local = reference.block_diagonal(
        q, k, v, block=core.local.block, scale=core.local.scale, key_mask=mask
    )
    first, second = ((x * mask[:, None, :, None]).norm(dim=(-2, -1)) for x in (linear, local))
    return first / (first + second)


@pytest.mark.parametrize("case", ["lln", "average"])
def test_later_blocks_change_nothing_conv_included(case):
    core, (q, k, v) = make(case, conv=5), random_qkv(2, 4, 30, key_heads=2)
    others = [torch.cat([x[:, :, :16], torch.randn_like(x[:, :, 16:])], 2) for x in (q, k, v)]
    assert torch.equal(core(q, k, v)[:, :, :16], core(*others)[:, :, :16])


def test_taps_of_conv_stay_causal_inside_a_block():
    core, (q, k, v) = make(conv=3), random_qkv(1, 4, 8, key_heads=2)
    plain = make()
    added = core(q, k, v) - plain(q, k, v)
    later = v.clone()
    later[:, :, 5:] = 0
    again = core(q, k, later) - plain(q, k, later)
    torch.testing.assert_close(added[:, :, :5], again[:, :, :5])


def test_a_dropped_diagonal_leaves_the_linear_branch():
    core, (q, k, v) = make("average").train(), random_qkv(2, 4, 30, key_heads=2)
    core.near_dropout = 1.0
    torch.testing.assert_close(core(q, k, v), make()(q, k, v))
    core.near_dropout = 1e-12
    torch.testing.assert_close(core(q, k, v), make("average")(q, k, v))


def test_dropout_keeps_the_zeros():
    core = make("average", dropout=0.4).train()
    q, k, _ = random_qkv(2, 4, 30, key_heads=2)
    assert (core.attention_matrix(q, k).masked_fill(seen(30), 0) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend):
    core = LLNAttention(2, 8, **CAUSAL, diag_block=4, mix="learned", conv=3)
    inputs = random_qkv(1, 2, 20, dtype=torch.float32)
    check_generated_code(core, *inputs, tolerance=1e-5, backend=backend)


def test_blocks_move_with_padding_and_show_in_the_text():
    core = make()
    assert core.positions_matter
    assert "causal_block=8" in repr(core)
    assert make(causal_block=1).causal_block is None


def multihead(**options) -> LLNMultiheadAttention:
    torch.manual_seed(0)
    given = {"batch_first": True, "causal_block": 4, "statistics": "fixed", **options}
    return LLNMultiheadAttention(16, 2, **given).eval()


def block_mask(tokens: int, block: int) -> torch.Tensor:
    """torch's convention: True is hidden."""
    return ~seen(tokens, block=block)[0, 0]


def test_multihead_takes_it_in_causal_calls():
    layer, x = multihead(), torch.randn(2, 10, 16)
    out, weights = layer(x, x, x, is_causal=True)
    assert torch.equal(weights > 0, seen(10, block=4)[0].expand_as(weights))
    mask = block_mask(10, 4)
    assert torch.equal(layer(x, x, x, is_causal=True, attn_mask=mask)[0], out)
    added = torch.zeros(10, 10).masked_fill(mask, -torch.inf)
    assert torch.equal(layer(x, x, x, is_causal=True, attn_mask=added)[0], out)
    assert (layer(x, x, x)[1] > 0).all()


def test_a_mask_that_says_something_else_is_refused():
    layer, x = multihead(), torch.randn(2, 10, 16)
    triangle = nn.Transformer.generate_square_subsequent_mask(10)
    with pytest.raises(ValueError, match="causal_block=4, but attn_mask is not the mask of such"):
        layer(x, x, x, is_causal=True, attn_mask=triangle)


def test_encoder_layers_of_torch():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    layer.self_attn = multihead()
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 10, 16)
    out = encoder(x, mask=block_mask(10, 4), is_causal=True)
    later = torch.cat([x[:, :8], torch.randn(2, 2, 16)], 1)
    assert torch.equal(encoder(later, mask=block_mask(10, 4), is_causal=True)[:, :8], out[:, :8])


@pytest.mark.parametrize(
    "name, options",
    [
        ("softmax", {"impl": "sdpa"}),
        ("softmax", {"impl": "matrix"}),
        ("lln", {"statistics": "fixed"}),
        ("lln_diag", {"statistics": "fixed", "diag_block": 4}),
    ],
)
def test_the_zoo_has_the_same_mask_for_softmax(name, options):
    blocks = {"causal": True, "causal_block": 8}
    layer = lln.create(name, dim=16, num_heads=2, max_length=64, **blocks, **options)
    x = torch.randn(2, 21, 16)
    p = layer.attention_matrix(x)
    assert torch.equal(p > 0, seen(21).expand_as(p))
    mask = torch.arange(21) < torch.tensor([[21], [13]])
    p = layer.attention_matrix(x, mask)[:, :, :13]
    assert torch.equal(p > 0, (seen(21) & mask[:, None, None])[:, :, :13].expand_as(p))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"causal": False}, "causal_block=8 is of causal attention"),
        ({"statistics": "sample"}, "statistics"),
        ({"diag_block": 3}, "causal_block=8 is not a multiple of diag_block=3"),
        ({"diag_block": 8, "sinks": 1}, "diag_overlap=0, sinks=1 is not possible"),
        ({"diag_block": 8, "diag_overlap": 1}, "diag_overlap=1, sinks=0 is not possible"),
        ({"diag_block": 8, "mix": "joint"}, "mix='joint' is not possible"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLNAttention(2, 8, **{**CAUSAL, **options})


def test_more_refusals():
    with pytest.raises(ValueError, match="causal_block=8 is of causal attention"):
        lln.create("softmax", dim=16, num_heads=2, max_length=64, causal_block=8)
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match="causal_block=4 counts positions"):
            multihead(**{option: True})
    with pytest.raises(ValueError, match="causal_block=8 decodes whole blocks"):
        DecodingStep(make())
    with pytest.raises(ValueError, match="causal_block= is not possible in Hugging Face models"):
        lln.hf.replace(nn.Linear(2, 2), "lln", causal_block=8)
