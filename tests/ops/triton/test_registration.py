"""What torch.library promises: fake tensors, gradients and torch.compile agree with the kernels."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from torch.utils._pytree import tree_leaves

import lln.ops
from lln.ops import triton as kernels
from lln.ops.common import registration
from lln.protocols import Call

Q, K, ALPHA, BETA = (2, 2, 20, 16), (2, 1, 20, 16), (2, 2), (2, 1)


def tensors(device, *shapes):
    return [torch.randn(shape, device=device).requires_grad_() for shape in shapes]


def arguments(name: str, device: str) -> tuple:
    q, k, v, alpha, beta = tensors(device, Q, K, K, ALPHA, BETA)
    log_mass, mean = tensors(device, (2, 1, 16), (2, 1, 16, 16))
    mask = torch.rand(2, 20, device=device) > 0.3
    sinks = torch.tensor([[0, 3], [1, 99]], device=device)
    cu = torch.tensor([0, 5, 20], device=device)
    packed = [x[0].transpose(0, 1).detach().requires_grad_() for x in (q, k, v)]
    step = [x[:, :, :1].detach() for x in (q, k, v)]
    return {
        "bidirectional": (*(x.detach() for x in (q, k, v, alpha, beta)), mask),
        "lln_diag": (
            *(x.detach() for x in (q, k, v, alpha, beta)), None, mask, 16, 0, 0.2,
            torch.randn(1, 5, device=device),
        ),
        "bidirectional_train": (q, k, v, alpha, beta, mask),
        "summarize": (k, v, beta, mask),
        "read": (q, log_mass, mean, alpha),
        "lln_diag_train": (
            q, k, v, alpha, beta, None, mask, 16, 0, 0.2, *tensors(device, (1, 5)),
        ),
        "block_diagonal": (q, k, v, mask, 16, 0.2, True),
        "causal": (q, k, v, alpha, beta, log_mass, mean, mask),
        "causal_average": (q, k, v, alpha, beta, mask, 16, 0.2),
        "near": (q, k, v, sinks, mask, 16, 0, 0.2, True),
        "near_far": (
            q, k, v, None, *tensors(device, K), alpha, beta, *tensors(device, ALPHA), sinks, mask,
            mask, 16, 16, 0.2, False,
        ),
        "varlen": (*packed, alpha, beta, cu, cu, None),
        "decode": (*step, *(x.detach() for x in (log_mass, mean, alpha, beta)), None),
        "standard_deviations": (q.detach(), k.detach(), mask, None),
        "match": (
            *(torch.rand(2, 3, device=device) for _ in range(2)), None, [1e-4, 1e-16, 1e30],
            [0.2, -0.5], [0.0, 0.0], False,
        ),
        "measure": (
            q.detach(), k.detach(), mask, None, [1e-4, 1e-16, 1e30], [0.2, -0.5], [0.0, 0.0], False,
        ),
    }[name]  # fmt: skip


OPS = (
    *("bidirectional_train", "summarize", "read", "lln_diag_train", "block_diagonal"),
    *(
        "near",
        "near_far",
        "causal",
        "causal_average",
        "varlen",
        "decode",
        "standard_deviations",
        "match",
    ),
    "measure",
    "bidirectional",
    "lln_diag",
)
INFERENCE = ("decode", "standard_deviations", "match", "measure", "bidirectional", "lln_diag")


def operator(name: str) -> torch._ops.OpOverload:
    """Registered where its module is imported, which happens at the first use."""
    for module in pkgutil.walk_packages(lln.ops.__path__, "lln.ops."):
        if ".kernels." in module.name:
            importlib.import_module(module.name)
    return getattr(torch.ops.lln, name).default


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, device):
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator(name), arguments(name, device), test_utils=utilities)


@pytest.mark.parametrize("name", OPS)
def test_fake_results_look_like_real_ones(name, device):
    """opcheck is content with a fake that returns None."""
    given = arguments(name, device)
    fake = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in given]
    real, found = (tree_leaves(operator(name)(*x)) for x in (given, fake))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in real]


@pytest.mark.parametrize("name", [name for name in OPS if name not in INFERENCE])
def test_gradients_of_fake_tensors_have_the_shapes_of_what_they_are_of(name):
    """torch compares them."""
    given = [
        x.detach().to("meta").requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in arguments(name, "cpu")
    ]
    wanted = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.requires_grad]
    out = tree_leaves(operator(name)(*given))[0]
    for leaf, found in zip(wanted, torch.autograd.grad(out.sum(), wanted), strict=True):
        assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)


def test_every_operator_is_checked():
    operator(OPS[0])  # imports all
    defined = {name.removeprefix("lln::") for name in registration._LIBRARY._op_defs}
    forward = {name for name in defined if not name.endswith(("_backward", "_eager"))}
    assert forward == {*OPS, "convolution"}  # that one in test_convolution.py


@pytest.mark.parametrize("name", ["bidirectional", "causal", "lln_diag"])
def test_compile_keeps_the_op_whole(name, device):
    inputs = tensors(device, Q, K, K, ALPHA, BETA)
    options = {"block": 16, "scale": 0.2} if name == "lln_diag" else {}
    op = getattr(kernels, name)

    def attend(q, k, v, alpha, beta):
        return op(q, k, v, alpha=alpha, beta=beta, **options).tanh()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected, got = attend(*inputs), compiled(*inputs)
    torch.testing.assert_close(got, expected)
    gradients = (torch.autograd.grad(x.sum(), inputs) for x in (expected, got))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, one)


def call(op: str, *, dtype=torch.float16, width=64, needs=(), queries=4, **options) -> Call:
    x = torch.empty(1, 1, 4, width, dtype=dtype, device="meta")
    return Call(op, x[:, :, :queries], x, x, frozenset(needs), **options)


def test_refusals_say_why(monkeypatch):
    assert "CUDA" in kernels.refuses(call("bidirectional"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.refuses(call("bidirectional")) is None
    assert "float64" in kernels.refuses(call("bidirectional", dtype=torch.float64))
    assert "dropout" in kernels.refuses(call("bidirectional", needs=["dropout"]))
    assert "D=40" in kernels.refuses(call("bidirectional", width=40))
    assert "shared memory" in kernels.refuses(call("causal", width=256))
    assert "shared memory" in kernels.refuses(call("causal", width=128, dtype=torch.float32))
    assert kernels.refuses(call("causal", width=128)) is None
    assert kernels.refuses(call("lln_diag", needs=["learned_mix"])) is None
    assert "not causal" in kernels.refuses(call("varlen", is_causal=True))
    assert "diagonal branch" in kernels.refuses(call("varlen", block=16))
    assert kernels.refuses(call("varlen")) is None


@pytest.mark.parametrize("width", [16, 32, 48, 64, 80, 96, 128, 256])
def test_widths_of_heads_that_the_kernels_take(width, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.refuses(call("bidirectional", width=width)) is None
    assert f"D={width + 1}" in kernels.refuses(call("bidirectional", width=width + 1))


def test_what_kernels_do_not_know_is_refused_by_them_too():
    q, k, v, alpha, beta, cu = (*tensors("cpu", Q, K, K, ALPHA, BETA), torch.tensor([0, 20]))
    scales, drop = {"alpha": alpha, "beta": beta}, torch.ones(Q)
    for op in (kernels.bidirectional, kernels.causal):
        with pytest.raises(ValueError, match="slot_dropout is not supported"):
            op(q, k, v, **scales, slot_dropout=drop)
    with pytest.raises(ValueError, match="slot_dropout is not supported"):
        kernels.read(q, torch.zeros(BETA), torch.zeros(K), alpha=alpha, slot_dropout=drop)
    blocks = {"block": 16, "scale": 0.2}
    for op, given in ((kernels.lln_diag, scales), (kernels.block_diagonal, {})):
        with pytest.raises(ValueError, match="dropout is not supported"):
            op(q, k, v, **given, **blocks, probability_dropout=drop)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    for options in ({"is_causal": True}, blocks):
        with pytest.raises(ValueError, match="is_causal and block are not supported"):
            kernels.varlen(*packed, cu, cu, **scales, **options)
    with pytest.raises(AttributeError, match="has no op 'softmax'; it has bidirectional"):
        kernels.softmax  # noqa: B018


def step(d=16, e=16, slots=16, **changes):
    """What a step of decoding is asked about: one query of three heads."""
    q, v, k = (torch.empty(1, 3, 1, width) for width in (d, e, slots))
    memory = {"mean": torch.empty(1, 3, slots, e), "log_mass": torch.empty(1, 3, slots)}
    return kernels.refuses_next_token(q, v, k, {**memory, **changes})


def test_refusals_of_a_step_of_decoding_say_why(monkeypatch):
    assert "CUDA" in step()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert step() is step(d=256) is step(e=128, slots=256) is None
    assert "states must be float32" in step(mean=torch.empty(1, 3, 16, 16).double())
    for sizes in ({"d": 512}, {"e": 256, "slots": 256}, {"e": 1024, "slots": 64}):
        assert "more than a program of a step holds" in step(**sizes)
    assert "not contiguous" in step(log_mass=torch.empty(1, 16, 3).mT)


@pytest.mark.parametrize("op", ["lln_diag", "block_diagonal"])
def test_refusals_of_blocks_say_why(op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.refuses(call(op, block=1000)) is None
    assert kernels.refuses(call(op, block=128, width=96)) is None
    assert "blocks of 128" in kernels.refuses(call(op, block=128, width=256))
    assert "blocks of 64" in kernels.refuses(call(op, block=64, dtype=torch.float32))
    assert kernels.refuses(call(op, block=32, dtype=torch.float32)) is None
    assert "blocks of 16" in kernels.refuses(call(op, block=16, dtype=torch.float32, width=128))
    assert "3 queries of 4 keys" in kernels.refuses(call(op, block=32, queries=3))


def test_refusals_of_windows_say_why(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    window = {"block": 128, "overlap": 64, "needs": ["windows"]}
    assert kernels.refuses(call("lln_diag", **window)) is None
    assert "overlap=64" in kernels.refuses(call("lln_diag", **window, is_causal=True))
    assert "overlap=64" in kernels.refuses(call("lln_diag", **window, dtype=torch.float32))
    assert "sinks" in kernels.refuses(call("lln_diag", **window, sinks=4))


def test_refusal_of_causal_blocks_names_the_causal_kernel(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    wide = call("lln_diag", dtype=torch.float32, width=128, block=16, is_causal=True)
    assert "causal kernels" in kernels.refuses(wide)
    assert "no kernel" in kernels.refuses(call("recurrent"))
