"""The convolution over tokens as an op: launchers, gradients, registration."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.kernels.launching import (
    Launch,
    Layout,
    layout,
    planned,
    row_strides,
    rows_of,
    steps,
)
from lln.ops.common.kernels.library import (
    contiguous_mask,
    empty_rows,
    floats,
    mask_stride,
    rows_contiguous,
)
from lln.ops.common.kernels.tiles import padded, split, tile
from lln.ops.common.registration import register
from lln.ops.taps.kernels.convolution_kernels import (
    convolve_backward_kernel,
    convolve_kernel,
    filter_kernel,
)

NOWHERE = (0, 0, 0, 0)  # strides of what is not there
ENTRIES, TAPS_AT_ONCE = 1024, 8  # of the diagonals that a program adds in one step


def convolution(
    v: Float[Tensor, "B Hkv N E"],
    weight: Float[Tensor, "Hkv K"],
    *,
    causal: bool = False,
    onto: Float[Tensor, "B H N E"] | None = None,
    key_mask: Bool[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B H N E"]:
    """v convolved over its tokens: see :func:`lln.ops.taps.convolution.convolve_tokens`."""
    before = weight.shape[1] - 1 if causal else weight.shape[1] // 2
    return _convolution(v, weight, before, onto, key_mask)


def convolve(
    v: Tensor, weight: Tensor, before: int, onto: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``onto`` + the convolution, nothing differentiable."""
    if v.numel() == 0:
        return _fake(v, weight, before, onto, key_mask)
    v, weight, key_mask = rows_contiguous(v), weight.contiguous(), contiguous_mask(key_mask)
    onto = None if onto is None else rows_contiguous(onto)
    rows, launch = _forward_plan(
        layout(v), weight.shape[1], before, None if onto is None else layout(onto),
        mask_stride(key_mask),
    )  # fmt: skip
    out = v.new_empty_strided(*rows)
    launch(v, weight, onto, key_mask, out)
    return out


@planned
def _forward_plan(
    v: Layout, taps: int, before: int, onto: Layout | None, mask: int | None
) -> tuple[Any, Launch]:
    (b, kv_heads, tokens, e), v_strides, dtype, device = v
    out = rows_of(onto or v, e)
    heads = out[0][1]
    t = tile("convolution", e, e, dtype, device)
    pieces, span = split(tokens, b * heads, t, device)
    onto_strides = NOWHERE if onto is None else onto[1]
    return out, Launch(
        convolve_kernel, (pieces, b * heads),
        ((*row_strides(v_strides, onto_strides, out[1]), taps, mask or 0), heads, heads // kv_heads,
         tokens, span),
        E=e, BE=padded(e), TAPS=taps, BEFORE=before, ROWS=t.rows, HALO=padded(taps - 1),
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


def _fake(
    v: Tensor, weight: Tensor, before: int, onto: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return empty_rows(v if onto is None else onto, v.shape[-1])


def _backward_impl(
    dout: Tensor, v: Tensor, weight: Tensor, before: int, need_v: bool, need_weight: bool,
    key_mask: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    if v.numel() == 0:
        found = _backward_fake(dout, v, weight, before, need_v, need_weight, key_mask)
        return found[0].zero_(), found[1].zero_()
    return convolve_backward(dout, v, weight, before, key_mask, (need_v, need_weight))


def convolve_backward(
    dout: Tensor, v: Tensor, weight: Tensor, before: int, key_mask: Tensor | None,
    needed: tuple[bool, bool], *, add_to: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(dv, dweight), None where they are not ``needed``.

    ``add_to`` is another gradient of v, in its memory order, which becomes the sum in place.
    """
    need_v, need_weight = needed
    dout, v = rows_contiguous(dout), rows_contiguous(v)
    weight, key_mask = weight.contiguous(), contiguous_mask(key_mask)
    rows, shape, launch, add = _backward_plan(
        layout(v), layout(dout), weight.shape[1], before, mask_stride(key_mask), add_to is not None
    )
    dv = add_to
    if dv is None and need_v:
        dv = v.new_empty_strided(*rows)
    if not need_weight:
        launch(dout, v, weight, key_mask, dv, None)
        return dv, None
    dweight, parts = torch.empty_like(weight), floats(v, *shape)
    if dv is None or _at_once(v):
        launch(dout, v, weight, key_mask, dv, parts)
    else:
        launch(dout, v, weight, key_mask, dv, None)
        launch(dout, v, weight, key_mask, None, parts)
    add(parts, dweight)
    return dv, dweight


def _at_once(v: Tensor) -> bool:
    """Whether both gradients fit the registers; they share what they read."""
    return v.dtype.itemsize == 2 and v.shape[-1] <= 128


@planned
def _backward_plan(
    v: Layout, dout: Layout, taps: int, before: int, mask: int | None, added: bool
) -> tuple[Any, tuple[int, ...], Launch, Launch]:
    (b, heads, tokens, e), v_strides, dtype, device = v
    dv = rows_of(v, e)
    t = tile("convolution", e, e, dtype, device)
    halo = padded(taps - 1)
    pieces, span = split(tokens, b * heads, t, device)
    shape = b, heads, pieces, t.rows, t.rows + halo
    launch = Launch(
        convolve_backward_kernel, (pieces, b * heads),
        ((*row_strides(dout[1], v_strides, dv[1]), taps, mask or 0), heads, tokens, span),
        E=e, BE=padded(e), TAPS=taps, AFTER=taps - 1 - before, GROUP=dout[0][1] // heads,
        ROWS=t.rows, HALO=halo, ADD=added, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    add = Launch(
        filter_kernel, (heads, steps(taps, TAPS_AT_ONCE)), (b, heads, pieces),
        TAPS=taps, ROWS=t.rows, HALO=halo, MANY=ENTRIES // t.rows, BLOCK=TAPS_AT_ONCE, num_warps=8,
    )  # fmt: skip
    return dv, shape, launch, add


def _backward_fake(
    dout: Tensor, v: Tensor, weight: Tensor, before: int, need_v: bool, need_weight: bool,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    nothing = v.new_empty(0, dtype=torch.float32)
    dv = empty_rows(v, v.shape[-1]) if need_v else nothing
    return dv, torch.empty_like(weight) if need_weight else nothing


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    v, weight, ctx.before, _, key_mask = (*inputs, None, None)[:5]  # torch leaves defaults out
    ctx.save_for_backward(v, weight, key_mask)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    v, weight, key_mask = ctx.saved_tensors
    need_v, need_weight, _, *need_onto = ctx.needs_input_grad
    dv, dweight = None, None
    if need_v or need_weight:
        dv, dweight = _backward(dout, v, weight, ctx.before, need_v, need_weight, key_mask)
    dv, dweight = dv if need_v else None, dweight if need_weight else None
    return dv, dweight, None, dout if any(need_onto) else None, None


_convolution = register(
    "convolution(Tensor v, Tensor weight, int before, Tensor? onto=None, Tensor? key_mask=None) "
    "-> Tensor",
    convolve,
    _fake,
    save=_save,
    differentiate=_differentiate,
)
_backward = register(
    "convolution_backward(Tensor dout, Tensor v, Tensor weight, int before, bool need_v, "
    "bool need_weight, Tensor? key_mask=None) -> (Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
