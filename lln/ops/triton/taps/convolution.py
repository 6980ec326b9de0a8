"""The convolution over tokens as an op: launchers, gradients, registration."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lln.ops.registration import register
from lln.ops.triton.library import empty_rows, floats, on_device, rows_contiguous, strides
from lln.ops.triton.taps.convolution_kernels import convolve_kernel, filter_gradient_kernel
from lln.ops.triton.tiles import padded, split, tile


def convolution(
    v: Float[Tensor, "B H N E"], weight: Float[Tensor, "H K"], *, causal: bool = False
) -> Float[Tensor, "B H N E"]:
    """v convolved over its tokens: see :func:`lln.ops.convolution.convolve_tokens`."""
    return _convolution(v, weight, weight.shape[1] - 1 if causal else weight.shape[1] // 2)


def _forward(v: Tensor, weight: Tensor, before: int) -> Tensor:
    (b, heads, tokens, e), taps = v.shape, weight.shape[1]
    out = empty_rows(v, e)
    if v.numel() == 0:
        return out
    v, weight = rows_contiguous(v), weight.contiguous()
    t = tile("convolution", e, e, v.dtype, v.device)
    pieces, span = split(tokens, b * heads, t, v.device)
    with on_device(v):
        convolve_kernel[(pieces, b * heads)](
            v, weight, out, *strides(v), *strides(out), weight.stride(0), heads, tokens, span,
            E=e, BE=padded(e), TAPS=taps, BEFORE=before, ROWS=t.rows, HALO=padded(taps - 1),
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out


def _filter_gradient(dout: Tensor, v: Tensor, taps: int, before: int) -> Tensor:
    b, heads, tokens, e = v.shape
    dout, v = rows_contiguous(dout), rows_contiguous(v)
    t = tile("convolution", e, e, v.dtype, v.device)
    halo = padded(taps - 1)
    pieces, span = split(tokens, b * heads, t, v.device)
    parts = floats(v, b, heads, pieces, t.rows, t.rows + halo)
    with on_device(v):
        filter_gradient_kernel[(pieces, b * heads)](
            v, dout, parts, *strides(v), *strides(dout), heads, tokens, span,
            E=e, BE=padded(e), TAPS=taps, BEFORE=before, ROWS=t.rows, HALO=halo,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    # the sum along the diagonals t = column − row, which are places of the flattened matrix
    rows = torch.arange(t.rows, device=v.device)
    places = (rows[:, None] * (t.rows + halo + 1) + torch.arange(taps, device=v.device)).flatten()
    total = parts.sum((0, 2)).flatten(1)
    return total.index_select(1, places).unflatten(1, (t.rows, taps)).sum(1)


def _fake(v: Tensor, weight: Tensor, before: int) -> Tensor:
    return empty_rows(v, v.shape[-1])


def _backward_impl(
    dout: Tensor, v: Tensor, weight: Tensor, before: int, need_v: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    if v.numel() == 0:
        return torch.zeros_like(v), torch.zeros_like(weight)
    taps = weight.shape[1]
    dv = _forward(dout, weight.flip(1), taps - 1 - before) if need_v else v.new_empty(0)
    if not need_weight:
        return dv, weight.new_empty(0)
    return dv, _filter_gradient(dout, v, taps, before).to(weight.dtype)


def _backward_fake(
    dout: Tensor, v: Tensor, weight: Tensor, before: int, need_v: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    dv = empty_rows(dout, v.shape[-1]) if need_v else v.new_empty(0)
    return dv, torch.empty_like(weight) if need_weight else weight.new_empty(0)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.before = inputs[2]


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    need = ctx.needs_input_grad[:2]
    found = _backward(dout, *ctx.saved_tensors, ctx.before, *need)
    dv, dweight = (x if needed else None for x, needed in zip(found, need, strict=True))
    return dv, dweight, None


_convolution = register(
    "convolution(Tensor v, Tensor weight, int before) -> Tensor",
    _forward,
    _fake,
    save=_save,
    differentiate=_differentiate,
)
_backward = register(
    "convolution_backward(Tensor dout, Tensor v, Tensor weight, int before, bool need_v, "
    "bool need_weight) -> (Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
