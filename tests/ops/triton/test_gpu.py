"""The full matrix on a GPU: dtypes, widths, lengths, determinism, compile, graphs, strides."""

from __future__ import annotations

import pytest
import torch

import lln
from lln.ops import eager, reference
from lln.ops import triton as kernels
from lln.ops.dispatch import choose
from lln.ops.triton import WIDTHS
from lln.protocols import Call
from tests.helpers import ADVERSARIAL, LENGTHS, adversarial, relative_error
from tests.ops.triton.compare import compare, inputs
from tests.ops.triton.test_lln_diag import blend

pytestmark = pytest.mark.gpu

OPS = {
    "bidirectional": {},
    "causal": {},
    "lln_diag": {"block": 64, "scale": 0.125},
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Every pair of widths in one dtype, every width in every dtype.
PAIRS = [(d, e, DTYPES[(i + j) % 3]) for i, d in enumerate(WIDTHS) for j, e in enumerate(WIDTHS)]


def fastest(op, q, k, v, block=None):
    """What runs on a GPU: the kernels, beside plain PyTorch for blocks that have none."""
    taken = choose(Call(op, q, k, v, is_causal=op == "causal", block=block), None)
    assert taken is not eager
    return getattr(taken, op)


def dispatched(op):
    """The op by name, to be called with tensors and options."""

    def attend(q, k, v, **options):
        return fastest(op, q, k, v, options.get("block"))(q, k, v, **options)

    return attend


def check(op, tensors, dtype, *, floor=0.1, **options) -> None:
    compare(dispatched(op), getattr(reference, op), tensors, dtype, floor=floor, **options)


def packed(lengths, device, *, dtype=torch.bfloat16, width=64):
    """Tensors and boundaries of packed sequences, 4 query heads and 2 key heads."""
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    shapes = {
        "q": (sum(lengths), 4, width), "k": (sum(lengths), 2, width), "v": (sum(lengths), 2, width),
    }  # fmt: skip
    tensors = {n: torch.randn(s, device=device).to(dtype) for n, s in shapes.items()}
    tensors["alpha"] = 1 + torch.rand(len(lengths), 4, device=device)
    tensors["beta"] = 1 + torch.rand(len(lengths), 2, device=device)
    return tensors, cu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [*LENGTHS, 1000])
@pytest.mark.parametrize("op", OPS)
def test_lengths(op, length, dtype, device):
    tensors = inputs(1, 2, length, width=64, key_heads=1, device=device)
    # one key is all there is to attend: the gradients to q and k are 0 up to rounding
    floor = 1.0 if length == 1 and op != "causal" else 0.1
    check(op, tensors, dtype, floor=floor, **OPS[op])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [4096, 5003])
@pytest.mark.parametrize("op", OPS)
def test_long_sequences(op, length, dtype, device):
    """Against plain PyTorch in float64: the O(N²) reference would keep N² D numbers."""
    tensors = inputs(2, 4, length, width=64, key_heads=2, device=device)
    compare(dispatched(op), getattr(eager, op), tensors, dtype, floor=0.01, **OPS[op])


@pytest.mark.parametrize("width, values, dtype", PAIRS)
def test_widths(width, values, dtype, device):
    tensors = inputs(2, 2, 300, 333, width, values, device=device)
    mask = torch.rand(2, 333, device=device) > 0.3
    check("bidirectional", tensors, dtype, key_mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "width, values",
    [(16, 16), (48, 16), (64, 32), (48, 80), (64, 64), (128, 64), (128, 128)],
)
@pytest.mark.parametrize("op", ["causal", "lln_diag"])
def test_widths_of_the_other_ops(op, width, values, dtype, device):
    x = torch.empty(1, 1, 1, width, dtype=dtype, device=device)
    if op == "causal" and kernels.refuses(Call(op, x, x, x.new_empty(1, 1, 1, values))):
        pytest.skip("refused, so that dispatch takes plain PyTorch")
    tensors = inputs(1, 4, 300, None, width, values, key_heads=2, device=device)
    mask = torch.rand(1, 300, device=device) > 0.3
    check(op, tensors, dtype, key_mask=mask, **OPS[op])


@pytest.mark.parametrize("length", [256, 257])
@pytest.mark.parametrize("op", OPS)
def test_wide_heads(op, length, device):
    """128 features are done as two blocks where that saves registers."""
    tensors = inputs(1, 2, length, None, 128, 128, key_heads=1, device=device)
    check(op, tensors, torch.bfloat16, **OPS[op])


@pytest.mark.parametrize("block", [16, 48, 64, 100, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks(block, dtype, device):
    tensors = inputs(1, 2, 500, width=64, device=device)
    check("lln_diag", tensors, dtype, block=block, scale=0.125)


@pytest.mark.parametrize("width", [64, 128])
def test_learned_mix(width, device):
    """Also of heads so wide that the gradients of the state take a pass of their own."""
    tensors = inputs(1, 2, 300, width=width, key_heads=1, device=device)
    tensors["mix"] = torch.rand(2, dtype=torch.float64, device=device)
    compare(kernels.lln_diag, blend, tensors, torch.bfloat16, floor=0.1, **OPS["lln_diag"])


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("op", OPS)
def test_no_input_breaks(op, name, device):
    q, k, v = (x.to(device) for x in adversarial(name, 600, 64))
    two = torch.full((1, 2), 2.0, dtype=torch.float64, device=device)
    tensors = {"q": q, "k": k, "v": v, "alpha": two, "beta": two}
    check(op, tensors, torch.float32, floor=1.0, **OPS[op])


@pytest.mark.parametrize("name", ["outlier_entry", "late_outlier_key", "drifting_keys"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outliers_in_half_precision(dtype, name, device):
    """A key that exceeds all earlier ones takes the careful path, whatever the dtype."""
    q, k, v = (x.to(device) for x in adversarial(name, 600, 64))
    two = torch.full((1, 2), 2.0, dtype=torch.float64, device=device)
    tensors = {"q": q, "k": k, "v": v, "alpha": two, "beta": two}
    compare(kernels.causal, reference.causal, tensors, dtype, floor=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences(dtype, device):
    tensors, cu = packed([100, 0, 600, 1033, 1], device, dtype=torch.float64)
    compare(
        lambda **t: kernels.varlen(**t), reference.varlen, tensors, dtype,
        floor=0.1, cu_q=cu, cu_k=cu.int(),
    )  # fmt: skip


@pytest.mark.parametrize("op", [*OPS, "varlen"])
def test_same_bits_on_every_run(op, device):
    if op == "varlen":
        tensors, cu = packed([700, 1300, 1000], device)
        options = {"cu_q": cu, "cu_k": cu}
    else:
        tensors, options = inputs(2, 4, 3000, width=64, key_heads=2, device=device), OPS[op]
    leaves = {
        n: x.to(torch.bfloat16 if n in "qkv" else torch.float32).requires_grad_()
        for n, x in tensors.items()
    }
    runs = []
    for _ in range(3):
        out = getattr(kernels, op)(**leaves, **options)
        gradients = torch.autograd.grad(out.float().square().sum(), list(leaves.values()))
        runs.append((out, *gradients))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_strided_views(op, device):
    """Slices of one fused projection [B, N, 3, H, D] are read in place."""
    fused = torch.randn(2, 700, 3, 4, 64, device=device, dtype=torch.bfloat16)
    views = [x.transpose(1, 2) for x in fused.unbind(2)]
    scale = torch.full((1, 1), 2.0, device=device).expand(2, 4)
    options = {"alpha": scale, "beta": scale, **OPS[op]}
    out = getattr(kernels, op)(*views, **options)
    copied = getattr(kernels, op)(*(x.contiguous() for x in views), **options)
    assert torch.equal(out, copied)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("context", [1, 5000])
def test_decode_at_the_batch_that_is_measured(context, width, device):
    make = {"device": device, "dtype": torch.bfloat16}
    k, v = (torch.randn(64, 12, context, width, **make) for _ in range(2))
    token = [torch.randn(64, 12, 1, width, **make) for _ in range(3)]
    scale = torch.full((64, 12), 2.0, device=device)
    state = kernels.summarize(k, v, beta=scale)
    out, log_mass, mean = kernels.decode(*token, *state, alpha=scale, beta=scale)
    exact = [x.double() for x in state]
    added = eager.summarize(*(x.double() for x in token[1:]), beta=scale.double())
    exact = eager.merge(*exact, *added)
    expected = eager.read(token[0].double(), *exact, alpha=scale.double())
    assert relative_error(log_mass, exact[0]) < 1e-6
    assert relative_error(mean, exact[1]) < 1e-6
    assert relative_error(out, expected) < 4e-3


def graph_of(run) -> tuple[torch.cuda.CUDAGraph, object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compile outside of the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("op", [*OPS, "varlen"])
def test_cuda_graph(op, device):
    """Outputs and gradients of a replay are those of a plain run."""
    if op == "varlen":
        tensors, cu = packed([100, 0, 700, 33], device, dtype=torch.float16)
        options = {"cu_q": cu, "cu_k": cu}
    else:
        tensors = inputs(1, 2, 1000, width=64, device=device)
        options = OPS[op]
    leaves = {
        n: x.to(torch.float16 if n in "qkv" else torch.float32).requires_grad_()
        for n, x in tensors.items()
    }
    upstream = torch.randn_like(leaves["q"])

    def run():
        out = getattr(kernels, op)(**leaves, **options)
        return out, *torch.autograd.grad(out, list(leaves.values()), upstream)

    expected = [x.detach().clone() for x in run()]
    graph, found = graph_of(run)
    for x in found:
        x.detach().zero_()
    graph.replay()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_cuda_graph_of_a_decoding_step(device):
    q, k, v = (torch.randn(4, 2, 1, 64, device=device, dtype=torch.float16) for _ in range(3))
    scale = torch.full((4, 2), 2.0, device=device)
    state = lln.summarize(k.expand(4, 2, 9, 64), v.expand(4, 2, 9, 64), beta=scale)
    with torch.no_grad():
        expected, _ = lln.prefill(q, k, v, state, alpha=scale, beta=scale)
        graph, (out, _) = graph_of(lambda: lln.prefill(q, k, v, state, alpha=scale, beta=scale))
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
@pytest.mark.parametrize("op", OPS)
def test_compile_with_inductor(op, device):
    leaves = [torch.randn(1, 2, 500, 64, device=device, requires_grad=True) for _ in range(3)]
    scale = torch.full((1, 2), 2.0, device=device)
    options = {"alpha": scale, "beta": scale, **OPS[op]}
    attend = dispatched(op)
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, **options).tanh(), fullgraph=True)
    expected, got = attend(*leaves, **options).tanh(), compiled(*leaves)
    torch.testing.assert_close(got, expected)
    pairs = (torch.autograd.grad(x.square().sum(), leaves) for x in (expected, got))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(other, one)


def test_many_parts_of_few_heads(device):
    tensors = inputs(1, 1, 20000, width=64, device=device)
    given = {n: x.to(torch.float32) for n, x in tensors.items()}
    state = kernels.summarize(given["k"], given["v"], beta=given["beta"])
    exact = torch.logsumexp(tensors["beta"][..., None, None] * tensors["k"], dim=2)
    torch.testing.assert_close(state[0].double(), exact, rtol=1e-5, atol=1e-5)
