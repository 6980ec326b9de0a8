"""Near and far on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

import lln
from lln.nn import LLNAttention
from lln.ops.window import near_far as near_far_op
from tests.helpers import relative_error, run_with_grads, windowed

near_far = windowed(near_far_op.near_far)

pytestmark = pytest.mark.gpu

WINDOWS = [(128, 0, 0), (128, 64, 0), (64, 32, 4), (256, 0, 0)]


def tensors(tokens=1024, width=64) -> dict:
    names = {"q": 4, "k": 2, "v": 2, "q_far": 4, "k_far": 2}
    given = {name: torch.randn(2, heads, tokens, width) for name, heads in names.items()}
    scales = {
        "alpha": torch.rand(2, 4) + 1,
        "beta": torch.rand(2, 2) + 1,
        "gamma": torch.randn(2, 4),
    }
    return {name: x.cuda() for name, x in {**given, **scales}.items()}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block, overlap, sinks", WINDOWS)
def test_bfloat16_against_float64(block, overlap, sinks, is_causal, masked):
    given = tensors()
    mask = torch.rand(2, 1024, device="cuda") > 0.2 if masked else None
    options = {"block": block, "overlap": overlap, "sinks": sinks, "scale": 0.125}
    options |= {"is_causal": is_causal, "key_mask": mask}
    half = {name: x.bfloat16() if x.dim() == 4 else x for name, x in given.items()}
    d_out = torch.randn(2, 4, 1024, 64, device="cuda").bfloat16()
    exact = run_with_grads(
        lambda **t: near_far(**t, **options, impl="eager"),
        {name: x.double() for name, x in half.items()},
        d_out.double(),
    )
    found = run_with_grads(lambda **t: near_far(**t, **options), half, d_out)
    for name, expected in exact.items():
        assert relative_error(found[name], expected) < 0.02, name


def own(width: int, dtype: torch.dtype) -> dict:
    """Features that are queries and keys, of heads that share no keys."""
    given = {name: torch.randn(2, 4, 1024, width).cuda().to(dtype) for name in "qkv"}
    scales = {name: torch.rand(2, 4).cuda() + 1 for name in ("alpha", "beta")}
    return {**given, **scales, "gamma": torch.randn(2, 4).cuda()}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("overlap", [0, 64, 128])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_that_are_queries_and_keys(dtype, width, block, overlap, is_causal):
    """Whole tiles, the fast path, twice to the same bits."""
    given = own(width, dtype)
    options = {"block": block, "overlap": overlap, "scale": width**-0.5, "is_causal": is_causal}
    d_out = torch.randn(2, 4, 1024, width, device="cuda").to(dtype)
    exact = run_with_grads(
        lambda **t: near_far(**t, **options, impl="eager"),
        {name: x.double() for name, x in given.items()},
        d_out.double(),
    )
    found, again = (
        run_with_grads(lambda **t: near_far(**t, **options, impl="triton"), given, d_out)
        for _ in range(2)
    )
    limit = 0.02 if dtype == torch.bfloat16 else 0.003
    for name, expected in exact.items():
        assert relative_error(found[name], expected) < limit, name
        assert torch.equal(found[name], again[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slots", [32, 128, 256])
def test_other_numbers_of_slots(slots, dtype):
    if dtype == torch.float32 and slots == 256:
        return  # beyond the registers of a program
    given = own(32 if slots == 256 else 64, dtype)
    far = {name: torch.randn(2, 4, 1024, slots).cuda().to(dtype) for name in ("q_far", "k_far")}
    options = {"block": 128, "overlap": 64, "scale": 0.125}
    d_out = torch.randn_like(given["v"])
    exact = run_with_grads(
        lambda **t: near_far(**t, **options, impl="eager"),
        {name: x.double() for name, x in {**given, **far}.items()},
        d_out.double(),
    )
    found = run_with_grads(
        lambda **t: near_far(**t, **options, impl="triton"), {**given, **far}, d_out
    )
    for name, expected in exact.items():
        assert relative_error(found[name], expected) < 0.02, name


def test_the_kernels_are_taken_where_they_fit():
    q, k, v = (tensors()[name].bfloat16() for name in "qkv")
    options = {"near": lln.Near(128, joint=True)}
    assert lln.which(q, k, v, **options) == "triton"
    assert lln.which(q, k, v, near=lln.Near(128, overlap=1, joint=True)) == "mixed"
    assert lln.which(q.double(), k.double(), v.double(), **options) == "eager"


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler looks at gradients of inputs
def test_a_compiled_module_trains_as_the_plain_one():
    core = LLNAttention(4, 64, near=lln.Near(128, overlap=64, joint=True), method="entropy").cuda()
    given = [torch.randn(2, 4, 1024, 64, device="cuda").bfloat16() for _ in range(3)]
    found = []
    for module in (core, torch.compile(core)):
        leaves = [x.clone().requires_grad_() for x in given]
        module(*leaves).float().square().mean().backward()
        found.append([x.grad for x in leaves])
    for one, other in zip(*found, strict=True):
        assert relative_error(other, one.double()) < 0.05
