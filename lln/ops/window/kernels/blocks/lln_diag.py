"""LLN+Diag in one op: the block-diagonal softmax shares the pass over the queries with LLN.

Forward: the state of the keys, then one pass over q, k, v. Backward: the gradients of the state
from q and dO, then one pass over q, k, v, dO for dq, dk, dv of both branches; where windows are
larger than a tile (:func:`lln.ops.common.kernels.tiles.in_windows`), one pass for dq and the
gradients of the state, and one for dk, dv. A convolution of the values is added by the kernels of
its own op, which add their gradient of v to that of the branches.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.causal.kernels.causal import causal
from lln.ops.common.kernels.library import empty_rows
from lln.ops.common.kernels.tiles import LARGEST_BLOCK, MERGE_IN_READER, in_windows
from lln.ops.common.parts import blend
from lln.ops.common.registration import register
from lln.ops.linear.kernels import launch
from lln.ops.taps.kernels.convolution import convolve, convolve_backward
from lln.ops.window.kernels.blocks.block_diagonal import block_diagonal
from lln.ops.window.kernels.blocks.causal_average import causal_average
from lln.ops.window.kernels.blocks.launch import diag, diag_backward, empty_diag_lse
from lln.ops.window.kernels.blocks.wide_launch import wide, wide_backward


def lln_diag(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv N D"],
    v: Float[Tensor, "B Hkv N E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    block: int,
    scale: float,
    overlap: int = 0,
    key_mask: Bool[Tensor, "B N"] | None = None,
    is_causal: bool = False,
    mix: Float[Tensor, " H"] | None = None,
    conv: Float[Tensor, "Hkv K"] | None = None,
    slot_dropout: None = None,
    probability_dropout: None = None,
) -> Float[Tensor, "B H N E"]:
    """mix · LLN + (1 − mix) · block-diagonal softmax (Fig. 3); the average if ``mix`` is None.

    Fused for the bidirectional case, where blocks may ``overlap``; causal, the two branches run one
    after the other, the second adding to what the first has written unless ``mix`` is given or the
    blocks are large. ``conv``: filters of v over its tokens, whose result is added; bidirectional.
    """
    if slot_dropout is not None or probability_dropout is not None:
        raise ValueError("dropout is not supported by impl='triton'; use impl='eager'")
    if is_causal and conv is not None:
        raise ValueError("conv is not fused with causal attention; use lln.ops.taps.convolution")
    if is_causal and mix is None and block <= LARGEST_BLOCK:
        return causal_average(q, k, v, alpha, beta, key_mask, block, scale)
    if is_causal:
        local = block_diagonal(q, k, v, block=block, scale=scale, key_mask=key_mask, is_causal=True)
        linear = causal(q, k, v, alpha=alpha, beta=beta, key_mask=key_mask)
        return blend(linear, local, mix, q.dtype)
    if mix is not None:
        mix = mix.contiguous()  # a number that stands for all heads is stored once
    arguments = q, k, v, alpha, beta, mix, key_mask, block, overlap, scale, conv
    inputs = q, k, v, alpha, beta, mix, conv
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _train(*arguments)[0]
    return _infer(*arguments)


def _in_windows(q: Tensor, v: Tensor, block: int, overlap: int) -> bool:
    return in_windows(q.shape[-1], v.shape[-1], q.dtype, block, overlap)


def _forward(
    q, k, v, alpha, beta, mix, key_mask, block, overlap, scale, conv=None, *, save: bool
) -> tuple[Tensor, Tensor | None, launch.Merged | None, Tensor | None]:
    """(out, lse, state, branches): what ``conv`` was added to, if the backward pass wants it."""
    q, k, v, key_mask = launch.prepared(q, k, v, key_mask)
    parts, count = launch.summarize_parts(k, v, beta, key_mask)
    merge_first = count > MERGE_IN_READER
    state = launch.empty_state(k, v) if save or merge_first else None
    if state is not None and merge_first:
        launch.merge(parts, count, state)
    given = {"state": state, "parts": None if merge_first else parts, "count": count, "save": save}
    in_windows = _in_windows(q, v, block, overlap)
    if in_windows:
        window = block, overlap, scale
        branches, lse = wide(q, k, v, key_mask, alpha, mix, window, **given)
    else:
        branches, lse = diag(
            q, k, v, key_mask, block=block, scale=scale, alpha=alpha, mix=mix, **given
        )
    if conv is None:
        return branches, lse, state, None
    out = convolve(v, conv, conv.shape[1] // 2, branches, key_mask)
    return out, lse, state, branches if save and in_windows else None


def _infer_impl(q, k, v, *rest) -> Tensor:
    if q.numel() == 0 or v.numel() == 0:
        return empty_rows(q, v.shape[-1]).zero_()
    return _forward(q, k, v, *rest, save=False)[0]


def _infer_fake(q, k, v, *rest) -> Tensor:
    return empty_rows(q, v.shape[-1])


def _train_impl(q, k, v, *rest) -> tuple[Tensor | None, ...]:
    if q.numel() == 0 or v.numel() == 0:
        return tuple(x.zero_() for x in _train_fake(q, k, v, *rest))
    out, lse, state, branches = _forward(q, k, v, *rest, save=True)
    assert lse is not None and state is not None
    return out, lse, *state, branches


def _train_fake(
    q, k, v, alpha, beta, mix, key_mask, block, overlap, scale, conv=None
) -> tuple[Tensor, ...]:
    out, lse = empty_rows(q, v.shape[-1]), empty_diag_lse(q, linear=True)
    kept = conv is not None and _in_windows(q, v, block, overlap)
    branches = torch.empty_like(out) if kept else lse.new_empty(0)
    return out, lse, *launch.empty_state(k, v), branches


def _backward_impl(
    dout, q, k, v, alpha, beta, mix, key_mask, conv, out, lse, log_mass, mean, norm, block, overlap,
    scale, need_alpha, need_beta, need_mix, need_conv,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if q.numel() == 0 or v.numel() == 0:
        gradients = _backward_fake(
            dout, q, k, v, alpha, beta, mix, key_mask, conv, out, lse, log_mass, mean, norm, block,
            overlap, scale, need_alpha, need_beta, need_mix, need_conv,
        )  # fmt: skip
        return tuple(x.zero_() for x in gradients)
    q, k, v, key_mask = launch.prepared(q, k, v, key_mask)
    state, slopes = launch.Merged(log_mass, mean, norm), (need_alpha, need_beta, need_mix)
    if _in_windows(q, v, block, overlap):
        found = wide_backward(
            dout, out, q, k, v, key_mask, alpha, beta, mix, lse, state, (block, overlap, scale),
            slopes=slopes,
        )  # fmt: skip
    else:
        _, parts, _ = launch.read_backward(
            dout, q, alpha, lse, log_mass, mean, parts_only=True, mix=mix, share=0.5
        )
        found = diag_backward(
            dout, q, k, v, key_mask, lse, block=block, scale=scale, alpha=alpha, beta=beta, mix=mix,
            state=state, parts=parts, slopes=slopes,
        )  # fmt: skip
    if conv is None:
        return *found, None
    given = dout, v, conv, conv.shape[1] // 2, key_mask
    return *found, convolve_backward(*given, (True, need_conv), add_to=found[2])[1]


def _backward_fake(
    dout, q, k, v, alpha, beta, mix, key_mask, conv, out, lse, log_mass, mean, norm, block, overlap,
    scale, need_alpha, need_beta, need_mix, need_conv,
) -> tuple[Tensor, ...]:  # fmt: skip
    return (
        empty_rows(q, q.shape[-1]), empty_rows(k, k.shape[-1]), empty_rows(v, v.shape[-1]),
        lse.new_empty(alpha.shape if need_alpha else (0,)),
        lse.new_empty(beta.shape if need_beta else (0,)),
        lse.new_empty(mix.shape if need_mix else (0,)),
        torch.empty_like(conv) if need_conv else lse.new_empty(0),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.options, conv = *inputs[:7], inputs[7:10], (*inputs, None)[10]  # may be left out
    out, *saved, branches = output
    if conv is None:
        branches = out
    if not _in_windows(tensors[0], tensors[2], *ctx.options[:2]):
        branches = None
    ctx.save_for_backward(*tensors, conv, branches, *saved)
    ctx.mark_non_differentiable(*(x for x in output[1:] if x is not None))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 11
    needed = ctx.needs_input_grad
    need = *needed[3:6], len(needed) > 10 and needed[10]
    dq, dk, dv, *slopes = _backward(dout, *ctx.saved_tensors, *ctx.options, *need)
    *slopes, dconv = (x if wanted else None for x, wanted in zip(slopes, need, strict=True))
    return dq, dk, dv, *slopes, *(None,) * 4, dconv


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor? mix, Tensor? key_mask"
_SAVED = "Tensor lse, Tensor log_mass, Tensor mean, Tensor norm"
_OPTIONS = "int block, int overlap, float scale"
_CONV = "Tensor? conv=None"
_infer = register(f"lln_diag({_INPUTS}, {_OPTIONS}, {_CONV}) -> Tensor", _infer_impl, _infer_fake)
_train = register(
    f"lln_diag_train({_INPUTS}, {_OPTIONS}, {_CONV}) -> (Tensor out, {_SAVED}, Tensor branches)",
    _train_impl,
    _train_fake,
    save=_save,
    differentiate=_differentiate,
)
_backward = register(
    f"lln_diag_backward(Tensor dout, {_INPUTS}, Tensor? conv, Tensor? out, {_SAVED}, {_OPTIONS}, "
    "bool need_alpha, bool need_beta, bool need_mix, bool need_conv) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
