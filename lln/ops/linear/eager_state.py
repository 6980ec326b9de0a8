"""summarize and read in plain PyTorch, with gradients of their own.

    L_l = logsumexp_j(β k_jl),   M_l = Σ_j exp(β k_jl − L_l) v_j          summarize
    A_il = softmax_l(α q_il + L_l),   out_i = Σ_l A_il M_l                read

Both run over chunks of tokens with an online maximum, so that temporaries do not grow with N, and
both recompute their exponentials in the backward pass: saved are q, k, v, L and M only.
They are opaque to ``torch.compile`` (registered ops), so the loops are never unrolled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.ops.common.features import (
    Scratch,
    chunks,
    clean_values,
    finite_or_zero,
    key_features,
    key_gradients,
    times_transposed,
)
from lln.ops.common.gradients import by_heads, register_with_gradient
from lln.protocols import compute_dtype


def _summarize(
    k: Tensor, v: Tensor, beta: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(k, v)
    scratch = Scratch(k, dtype)
    batch, heads, _, width = k.shape
    top = k.new_full((batch, heads, width), -torch.inf, dtype=dtype)
    mass = torch.zeros_like(top)
    total = k.new_zeros((batch, heads, width, v.shape[-1]), dtype=dtype)
    for part in chunks(k):
        mask = None if key_mask is None else key_mask[:, part]
        features = key_features(k[:, :, part], beta, mask, scratch)
        values = clean_values(v[:, :, part], mask, scratch)
        higher = torch.maximum(top, features.amax(-2))
        shift = finite_or_zero(higher)
        weights = features.sub_(shift[..., None, :]).exp_()
        fade = (top - shift).exp_()
        mass = mass * fade + weights.sum(-2)
        total = total * fade[..., None] + weights.transpose(-1, -2) @ values
        top = higher
    mean = total / mass.masked_fill(mass == 0, 1)[..., None]
    return finite_or_zero(top) + mass.log(), mean


def _summarize_backward(
    d_log_mass: Tensor,
    d_mean: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    key_mask: Tensor | None,
    log_mass: Tensor,
    mean: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    scratch = Scratch(k, mean.dtype)
    shift = finite_or_zero(log_mass)[..., None, :]
    constant = (d_log_mass - (d_mean * mean).sum(-1))[..., None, :]
    d_k, d_v = torch.empty_like(k), torch.empty_like(v)
    d_beta = torch.zeros_like(log_mass[..., 0])
    for part in chunks(k):
        mask = None if key_mask is None else key_mask[:, part]
        features = key_features(k[:, :, part], beta, mask, scratch)
        values = clean_values(v[:, :, part], mask, scratch)
        weights = torch.sub(features, shift, out=scratch("weights", *features.shape)).exp_()
        d_v[:, :, part] = weights @ d_mean
        d_features = weights.mul_(times_transposed(values, d_mean).add_(constant))
        d_part, d_beta_part = key_gradients(d_features, features, k[:, :, part], beta)
        d_k[:, :, part] = d_part
        d_beta += d_beta_part
    return d_k, d_v, d_beta


def merge(
    log_mass: Tensor, mean: Tensor, other_log_mass: Tensor, other_mean: Tensor
) -> tuple[Tensor, Tensor]:
    """The state of the union of two disjoint sets of keys; differentiable, empty sets included."""
    higher = finite_or_zero(torch.maximum(log_mass, other_log_mass).detach())
    mine, theirs = (log_mass - higher).exp(), (other_log_mass - higher).exp()
    mass = mine + theirs
    nonzero = mass.masked_fill(mass == 0, 1)
    share = (theirs / nonzero)[..., None]
    merged = (mine / nonzero)[..., None] * mean + share * other_mean
    return (higher + nonzero.log()).masked_fill(mass == 0, -torch.inf), merged


def merge_all(log_masses: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the union of R sets of keys, ``[R, ...]``; empty if there are none.

    With w_r = exp(L_r − L) it is L = logsumexp_r L_r, M = Σ_r w_r M_r.
    """
    log_mass = log_masses.logsumexp(0)
    weights = (log_masses - finite_or_zero(log_mass)).exp()
    return log_mass, (weights[..., None] * means).sum(0)


def merge_backward(
    d_log_mass: Tensor, d_mean: Tensor, own: tuple[Tensor, Tensor], union: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradient of one state of a union: dM_r = w_r dM, dL_r = w_r (dL + dM·(M_r − M))."""
    weight = (own[0] - finite_or_zero(union[0])).exp()
    d_weight = d_log_mass + (d_mean * (own[1] - union[1])).sum(-1)
    return weight * d_weight, weight[..., None] * d_mean


def _slot_weights(q: Tensor, alpha: Tensor, log_mass: Tensor, scratch: Scratch) -> Tensor:
    """A_il for queries ``[B, Hkv, G, n, D]``; uniform over the zero means of an empty state."""
    empty = (log_mass == -torch.inf).all(-1, keepdim=True)
    log_mass = log_mass.masked_fill(empty, 0)[:, :, None, None, :]
    scores = torch.mul(q, alpha[..., None, None], out=scratch("scores", *q.shape)).add_(log_mass)
    return torch.softmax(scores, dim=-1, out=scores)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """``[B, H, ...] -> [B, Hkv, G, ...]``: the query heads that read one key head, side by side."""
    return x.unflatten(1, (heads, x.shape[1] // max(heads, 1)))


def _read(
    q: Tensor,
    alpha: Tensor,
    log_mass: Tensor,
    mean: Tensor,
    slot_dropout: Tensor | None,
    wide: bool,
    out: Tensor,
) -> Tensor:
    heads, scratch = log_mass.shape[1], Scratch(q, mean.dtype)
    scale = _grouped(alpha, heads)
    for part in chunks(q):
        weights = _slot_weights(_grouped(q[:, :, part], heads), scale, log_mass, scratch)
        if slot_dropout is not None:
            weights *= _grouped(slot_dropout[:, :, part], heads)
        _multiply_into(_grouped(out[:, :, part], heads), weights, mean)
    return out


def _multiply_into(out: Tensor, weights: Tensor, mean: Tensor) -> None:
    """``out[b, h, g] = weights[b, h, g] @ mean[b, h]``, held only once where the dtypes agree."""
    if out.dtype != mean.dtype:
        out.copy_(weights @ mean[:, :, None])
        return
    tables = mean[:, :, None].expand(-1, -1, out.shape[2], -1, -1)
    torch.bmm(weights.flatten(0, 2), tables.flatten(0, 2), out=out.view(-1, *out.shape[-2:]))


def _read_backward(
    d_out: Tensor,
    q: Tensor,
    alpha: Tensor,
    log_mass: Tensor,
    mean: Tensor,
    slot_dropout: Tensor | None,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, scratch = log_mass.shape[1], Scratch(q, mean.dtype)
    scale = _grouped(alpha, heads)
    d_q = torch.empty_like(q)
    d_alpha = torch.zeros_like(scale)
    d_log_mass, d_mean = torch.zeros_like(log_mass), torch.zeros_like(mean)
    for part in chunks(q):
        queries = _grouped(q[:, :, part], heads)
        gradient = _grouped(d_out[:, :, part], heads).to(mean.dtype)
        weights = _slot_weights(queries, scale, log_mass, scratch)
        d_slots = times_transposed(gradient, mean[:, :, None])
        kept = weights
        if slot_dropout is not None:
            kept = weights * _grouped(slot_dropout[:, :, part], heads)
        d_scores = d_slots.mul_(kept)
        d_mean += (kept.transpose(-1, -2) @ gradient).sum(2)
        d_scores -= weights.mul_(d_scores.sum(-1, keepdim=True))
        d_log_mass += d_scores.sum((2, 3))
        d_alpha += (d_scores * queries).sum((-1, -2))
        d_q[:, :, part] = d_scores.mul_(scale[..., None, None]).flatten(1, 2)
    return d_q, d_alpha.flatten(1, 2), d_log_mass, d_mean


def _summarize_shapes(k, v, beta, key_mask):
    dtype = compute_dtype(k, v)
    log_mass = k.new_empty((*k.shape[:2], k.shape[3]), dtype=dtype)
    return log_mass, k.new_empty((*log_mass.shape, v.shape[-1]), dtype=dtype)


def _read_shapes(q, alpha, log_mass, mean, slot_dropout, wide):
    return q.new_empty((*q.shape[:3], mean.shape[-1]), dtype=mean.dtype if wide else q.dtype)


def _read_by_heads(compute, shapes):
    return by_heads(compute, shapes, fills=compute is _read)


summarize_op, summarize_backward = register_with_gradient(
    "summarize_eager(Tensor k, Tensor v, Tensor beta, Tensor? key_mask) "
    "-> (Tensor log_mass, Tensor mean)",
    forward=_summarize,
    shapes=_summarize_shapes,
    backward=_summarize_backward,
    gradients=("k", "v", "beta"),
    outputs=2,
    saved_from=0,
    around=by_heads,
    batched=True,
)
read_op, read_backward = register_with_gradient(
    "read_eager(Tensor q, Tensor alpha, Tensor log_mass, Tensor mean, Tensor? slot_dropout, "
    "bool wide) -> Tensor out",
    forward=_read,
    shapes=_read_shapes,
    backward=_read_backward,
    gradients=("q", "alpha", "log_mass", "mean"),
    around=_read_by_heads,
    batched=True,
)


def summarize(k, v, *, beta, key_mask=None) -> tuple[Tensor, Tensor]:
    """(L, M) of a set of keys in the compute dtype."""
    return summarize_op(k, v, beta, key_mask)


def read(q, log_mass, mean, *, alpha, slot_dropout=None, wide=False) -> Tensor:
    """softmax_l(α q + L) · M."""
    return read_op(q, alpha, log_mass, mean, slot_dropout, wide)


def bidirectional(q, k, v, *, alpha, beta, key_mask=None, slot_dropout=None, wide=False) -> Tensor:
    """LLN attention: every query reads the summary of all keys."""
    log_mass, mean = summarize(k, v, beta=beta, key_mask=key_mask)
    return read(q, log_mass, mean, alpha=alpha, slot_dropout=slot_dropout, wide=wide)
