"""Kernels count as the plain PyTorch of the same operation does."""

from __future__ import annotations

import pytest
import torch

from lln.instruments import flop_counter
from lln.instruments.flops import _formulas
from lln.ops import eager
from lln.ops import triton as kernels

B, H, N, D, E, BLOCK = 1, 2, 48, 16, 32, 16
WITHOUT_PRODUCTS = {"standard_deviations", "match", "measure", "running_variances"}


def both_passes(run, inputs) -> tuple[int, int]:
    counter = flop_counter()
    with counter:
        out = run(*inputs)
    forward = counter.get_total_flops()
    with counter:
        torch.autograd.grad(out.sum(), inputs)
    return forward, counter.get_total_flops()


@pytest.mark.parametrize(
    "op", ["bidirectional", "lln_diag", "causal", "block_diagonal", "near", "near_far"]
)
def test_forward_and_backward(op, device):
    scales = {name: torch.full((B, H), 2.0, device=device) for name in ("alpha", "beta")}
    block = {"block": BLOCK, "scale": 0.25}
    options: dict = {
        "bidirectional": scales,
        "causal": scales,
        "lln_diag": {**scales, **block},
        "block_diagonal": block,
    }
    window = {**block, "overlap": 16, "sinks": 2, "is_causal": True}
    far = {x: torch.randn(B, H, N, D, device=device) for x in ("q_far", "k_far")}
    gamma = torch.zeros(B, H, device=device)
    options |= {"near": window, "near_far": {**scales, **window, **far, "gamma": gamma}}
    shapes = (B, H, N, D), (B, H, N, D), (B, H, N, E)
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    ours = both_passes(lambda *x: getattr(kernels, op)(*x, **options[op]), inputs)
    plain = both_passes(lambda *x: getattr(eager, op)(*x, **options[op]), inputs)
    assert ours == plain
    assert ours[0] > 0


def test_a_convolution_is_a_product_with_its_taps(device):
    v = torch.randn(B, H, N, E, device=device, requires_grad=True)
    weight = torch.randn(H, 5, device=device, requires_grad=True)
    once = 2 * v.numel() * 5
    assert both_passes(kernels.convolution, [v, weight]) == (once, 2 * once)
    scales = {name: torch.rand(B, H, device=device) for name in ("alpha", "beta")}

    def branches(v, weight=None):
        return kernels.lln_diag(v, v, v, conv=weight, block=16, scale=0.1, **scales)

    without, added = both_passes(branches, [v]), both_passes(branches, [v, weight])
    assert added == (without[0] + once, without[1] + 2 * once)


def test_every_operator_has_a_formula():
    """A new one would count as nothing, and nobody would notice."""
    import lln.nn  # noqa: F401 - whose operators count as well

    for name in kernels._MODULES:
        getattr(kernels, name)
    defined = {
        schema.name.removeprefix("lln::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("lln::")
    }
    known = {str(op).removeprefix("lln.") for op in _formulas()}
    assert defined - known == WITHOUT_PRODUCTS
