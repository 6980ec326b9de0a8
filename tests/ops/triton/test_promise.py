"""``impl`` is a promise: what was asked for runs, or the call is refused; `which` tells before."""

from __future__ import annotations

import itertools

import pytest
import torch

import lln
from lln import moments
from lln.nn import LLNAttention
from lln.ops import dispatch, eager, reference
from lln.ops import triton as kernels
from lln.ops.taps.convolution import convolve_tokens
from lln.ops.window import mixed
from lln.protocols import HALF

OPS = ("bidirectional", "causal", "lln_diag", "block_diagonal", "summarize", "read", "varlen")
HELPERS = ("standard_deviations", "match", "measure", "convolution", "decode")


@pytest.fixture
def ran(monkeypatch) -> set[str]:
    """The implementations whose ops were called, however they were reached."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    called: set[str] = set()

    def spy(module, op, name):
        original = getattr(module, op)

        def noted(*args, **options):
            called.add(name)
            return original(*args, **options)

        monkeypatch.setattr(module, op, noted)

    for op in OPS:
        spy(kernels, op, "triton")
        spy(eager, op, "eager")
        spy(reference, op, "reference")
    for op in HELPERS:
        spy(kernels, op, "triton")
    spy(mixed, "lln_diag", "mixed")
    return called


def tensors(device, *, queries=20, keys=20, width=16, dtype=torch.float32):
    make = {"device": device, "dtype": dtype}
    q = torch.randn(2, 2, queries, width, **make)
    return q, torch.randn(2, 1, keys, width, **make), torch.randn(2, 1, keys, width, **make)


def packed(device, *, width=16, dtype=torch.float32):
    q, k, v = tensors(device, width=width, dtype=dtype)
    cu = torch.tensor([0, 7, 20], device=device)
    return *(x[0].transpose(0, 1).contiguous() for x in (q, k, v)), cu


SCALES = {"alpha": 2.0, "beta": 2.0}
ALONE = {"triton": {"triton"}, "eager": {"eager"}, "reference": {"reference"}}
ALONE["mixed"] = {"mixed", "triton", "eager"}
OPTIONS = [
    {},
    {"is_causal": True},
    {"near": 16},
    {"near": 48},
    {"near": 16, "is_causal": True},
    {"near": 48, "is_causal": True},
]


@pytest.mark.parametrize("impl", [None, "triton", "mixed", "eager", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("queries, width", [(20, 16), (12, 16), (20, 24)])
def test_what_which_says_runs_alone(impl, options, queries, width, ran, device):
    given = tensors(device, queries=queries, width=width)
    try:
        said = lln.which(*given, **options, impl=impl)
    except ValueError as refusal:
        with pytest.raises(ValueError) as other:
            lln.attention(*given, **SCALES, **options, impl=impl)
        assert str(other.value) == str(refusal)
        return
    assert impl in (None, said)
    ran.clear()
    lln.attention(*given, **SCALES, **options, impl=impl)
    assert said in ran and ran <= ALONE[said]


@pytest.mark.parametrize("impl", [None, "triton", "eager", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_which_says_runs_alone_packed(impl, options, ran, device):
    *given, cu = packed(device)
    try:
        said = lln.which(*given, **options, impl=impl)
    except ValueError as refusal:
        assert impl == "triton" and "packed" in str(refusal)
        with pytest.raises(ValueError, match="packed"):
            lln.attention_varlen(*given, cu, **SCALES, **options, impl=impl)
        return
    assert impl in (None, said)
    ran.clear()
    lln.attention_varlen(*given, cu, **SCALES, **options, impl=impl)
    assert said in ran and ran <= ALONE[said]


def test_every_implementation_of_packed_sequences_agrees(device):
    *given, cu = packed(device)
    mask = torch.rand(20, device=device) > 0.3
    for options in OPTIONS:
        expected, got = (
            lln.attention_varlen(*given, cu, **SCALES, **options, key_mask=mask, impl=impl)
            for impl in ("reference", "eager")
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["triton", "eager"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_stream_is_run_by_what_was_asked(impl, tokens, ran, device):
    state = None
    for _ in range(2):
        given = tensors(device, queries=tokens, keys=tokens)
        ran.clear()
        _, state = lln.prefill(*given, state, **SCALES, impl=impl)
        assert ran == {impl}
        ran.clear()
        state = state.merge(lln.summarize(*given[1:], beta=2.0, impl=impl))
        lln.read(given[0], state, alpha=2.0, impl=impl)
        assert ran == {impl}


def test_the_reference_streams_token_by_token_and_refuses_more(ran, device):
    given = tensors(device, queries=6, keys=6, dtype=torch.float64)
    whole = lln.attention(*given, **SCALES, is_causal=True, impl="reference")
    ran.clear()
    state, rows = None, []
    for i in range(6):
        token = (x[:, :, i : i + 1] for x in given)
        row, state = lln.prefill(*token, state, **SCALES, impl="reference")
        rows.append(row)
    assert ran == {"reference"}
    torch.testing.assert_close(torch.cat(rows, 2), whole)
    with pytest.raises(ValueError, match="does not know state"):
        lln.prefill(*given, state, **SCALES, impl="reference")


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_statistics_and_convolution_launch_nothing_either(impl, ran, device):
    q, k, v = tensors(device)
    lln.attention(q, k, v, impl=impl)
    *given, cu = packed(device)
    lln.attention_varlen(*given, cu, impl=impl)
    moments.measure_scales(q, k, impl=impl)
    convolve_tokens(v, torch.ones(1, 3, device=device), impl=impl)
    assert "triton" not in ran
    lln.attention(q, k, v, impl="triton")
    assert "triton" in ran


@pytest.mark.parametrize("statistics", ["sample", "running", "fixed"])
@pytest.mark.parametrize("impl", [None, "eager", "triton"])
def test_a_module_runs_by_what_was_asked(impl, statistics, ran, device):
    q, k, v = tensors(device)
    options = {"statistics": statistics, "conv": 3, "near": 16, "impl": impl}
    core = LLNAttention(2, 16, num_kv_heads=1, device=device, **options)
    if statistics != "sample":
        core.calibrate_(q, k)
    core.train()(q, k, v)
    core.eval()(q, k, v)
    assert ran == {impl or "triton"}


def test_which_sees_what_autocast_will_make(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v = tensors("cpu", width=128)
    assert lln.which(q, k, v, is_causal=True) == "eager"
    with torch.autocast("cpu", torch.bfloat16):
        assert lln.which(q, k, v, is_causal=True) == "triton"


def test_which_knows_that_dropout_is_not_fused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v = tensors("cpu")
    assert lln.which(q, k, v) == "triton"
    assert lln.which(q, k, v, dropout=0.1) == "eager"
    with pytest.raises(ValueError, match="dropout"):
        lln.which(q, k, v, dropout=0.1, impl="triton")


def test_one_table_of_refusals_for_every_shape(monkeypatch):
    """No combination is accepted by the table and then refused, or run elsewhere, further down."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    shapes = itertools.product((16, 64, 96, 128, 256), (*HALF, torch.float32), (16, 32, 64, 256))
    for (width, dtype, block), is_causal in itertools.product(shapes, (False, True)):
        x = torch.empty(1, 1, 4, width, dtype=dtype, device="meta")
        said = lln.which(x, x, x, near=block, is_causal=is_causal)
        single = dtype is torch.float32
        fits = width <= 64 and block <= 32 if single else width <= 128
        causal = width <= (64 if dtype is torch.float32 else 128)
        expected = "triton" if fits else "mixed"
        assert said == ("eager" if is_causal and not causal else expected), (width, dtype, block)


def test_every_implementation_has_every_op_it_does_not_refuse():
    x = torch.empty(1, 1, 4, 16)
    for op, (name, module) in itertools.product(OPS, dispatch.IMPLEMENTATIONS.items()):
        refused = module.refuses(dispatch.Call(op, x, x, x)) is not None
        assert refused or callable(getattr(module, op)), (name, op)
