"""causal_block= of LLNAttention: matrices, branches, what is recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lln
import lln.hf
from lln.instruments.recording.recorder import attention_calls
from lln.nn import LLNAttention
from lln.onnx import DecodingStep
from lln.ops import reference
from tests.generated import check_generated_code
from tests.helpers import random_qkv

CAUSAL = {"causal": True, "causal_block": 8, "statistics": "fixed"}
CASES = {
    "lln": {},
    "unbiased": {"normalize_keys": True},
    "average": {"near": 8},
    "learned": {"near": 4, "mix": "learned"},
    "maps": {"near": 2, "feature_map": "signs", "center_keys": True},
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
def test_what_cannot_be_measured_is_not_a_number(case):
    core, (q, k, v) = make(case), random_qkv(2, 4, 40, key_heads=2)
    with attention_calls(core, samples=2) as calls, torch.no_grad():
        core(q, k, v)
    (call,) = calls
    assert call.measured(["entropy"])["entropy"].isnan().all()
    assert call.lln_share() is None
    with pytest.raises(ValueError, match="its blocks are causal"):
        call.matrix(0)


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


def test_dropout_keeps_the_zeros():
    core = make("average", dropout=0.4).train()
    q, k, _ = random_qkv(2, 4, 30, key_heads=2)
    assert (core.attention_matrix(q, k).masked_fill(seen(30), 0) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend):
    core = LLNAttention(2, 8, **CAUSAL, near=4, mix="learned", conv=3)
    inputs = random_qkv(1, 2, 20, dtype=torch.float32)
    check_generated_code(core, *inputs, tolerance=1e-5, backend=backend)


def test_blocks_move_with_padding_and_show_in_the_text():
    core = make()
    assert core.positions_matter
    assert "causal_block=8" in repr(core)
    assert make(causal_block=1).causal_block is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"causal": False}, "causal_block=8 is of causal attention"),
        ({"statistics": "sample"}, "statistics"),
        ({"near": 3}, "causal_block=8 is not a multiple of the blocks of near, 3"),
        ({"near": lln.Near(8, sinks=1)}, "overlap=0, sinks=1 of near is not possible"),
        ({"near": lln.Near(8, overlap=1)}, "overlap=1, sinks=0 of near is not possible"),
        ({"near": lln.Near(8, joint=True)}, "one normaliser for both branches is not possible"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLNAttention(2, 8, **{**CAUSAL, **options})


def test_more_refusals():
    with pytest.raises(ValueError, match="causal_block=8 decodes whole blocks"):
        DecodingStep(make())
    with pytest.raises(TypeError, match="causal_block= is not an option"):
        lln.hf.replace(nn.Linear(2, 2), "lln", causal_block=8)
