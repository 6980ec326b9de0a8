"""Causal LLN attention in plain PyTorch: squares or trees inside tiles, a state between them.

    out_i = Σ_{j≤i} Σ_l W_ijl v_j,    W_ijl = exp(α q_il + β k_jl − ℓ_i),
    ℓ_i = ln Σ_{j≤i} Σ_l exp(α q_il + β k_jl)

Saved for the backward pass: q, k, v, the state that came in, and ℓ (N floats per head).
With dropout on the slot weights (mask D_il) the numerator has D_il W_ijl, ℓ is unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.ops.causal import eager_backward
from lln.ops.causal.segments import Inputs, prefix_states, segments
from lln.ops.causal.square import attend_square, is_tame
from lln.ops.causal.tree import Rows, attend_tile
from lln.ops.common.features import finite_or_zero
from lln.ops.common.gradients import by_heads, register_with_gradient
from lln.ops.common.parts import causal_by_parts
from lln.ops.linear.eager_state import read, summarize
from lln.protocols import compute_dtype


def _forward_segment(
    inputs: Inputs, part: slice, log_mass: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and ℓ of a segment, and the state after it."""
    tile, length = inputs.tile, part.stop - part.start
    a, f, values = inputs.queries(part), inputs.keys(part), inputs.values(part)
    kept = inputs.kept(part)
    attend = attend_square if is_tame(f, tile, values) else attend_tile
    rows = attend(a, f, values, kept, tile)
    before, means = prefix_states(f, values, log_mass, mean, tile)
    scores = a.unflatten(1, (-1, tile)) + before[:-1].transpose(0, 1)[..., None, :]
    top = scores.amax(-1)
    slots = scores.sub_(finite_or_zero(top)[..., None]).exp_()
    mass = slots.sum(-1)
    if kept is not None:
        slots *= kept.unflatten(1, (-1, tile))
    total = slots @ means[:-1].transpose(0, 1)
    rows.add_(top.flatten(1, 2), mass.flatten(1, 2), total.flatten(1, 2))
    out, row_mass = _normalize(rows)
    return out[:, :length], row_mass[:, :length], before[-1], means[-1]


def _normalize(rows: Rows) -> tuple[Tensor, Tensor]:
    """out and ℓ; a row that sees nothing gives 0 and ℓ = +inf: all its weights are exp(−inf)."""
    blind = rows.mass == 0
    out = rows.total / rows.mass.masked_fill(blind, 1)[..., None]
    return out, (rows.top + rows.mass.log()).masked_fill(blind, torch.inf)


def _causal(
    q, k, v, alpha, beta, key_mask, log_mass, mean, slot_dropout, wide
) -> tuple[Tensor, Tensor]:
    inputs = Inputs(q, k, v, alpha, beta, key_mask, slot_dropout)
    out, row_mass = _causal_shapes(
        q, k, v, alpha, beta, key_mask, log_mass, mean, slot_dropout, wide
    )
    if q.shape[0] * q.shape[1] == 0:  # no rows at all: there is nothing to cut into tiles
        return out, row_mass
    state = inputs.expand(log_mass), inputs.expand(mean)
    for part in segments(q, inputs.tile):
        values, masses, *state = _forward_segment(inputs, part, *state)
        out[:, :, part] = values.unflatten(0, q.shape[:2])
        row_mass[:, :, part] = masses.unflatten(0, q.shape[:2])
    return out, row_mass


def _causal_shapes(q, k, v, alpha, beta, key_mask, log_mass, mean, slot_dropout, wide):
    dtype = compute_dtype(q, k, v)
    out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype if wide else q.dtype)
    return out, q.new_empty(q.shape[:3], dtype=dtype)


causal_op, causal_backward = register_with_gradient(
    "causal_eager"
    "(Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor? key_mask, Tensor log_mass, "
    "Tensor mean, Tensor? slot_dropout, bool wide) -> (Tensor out, Tensor row_mass)",
    forward=_causal,
    shapes=_causal_shapes,
    backward=eager_backward.causal_backward,
    gradients=("q", "k", "v", "alpha", "beta", "log_mass", "mean"),
    outputs=2,
    saved_from=1,
    around=by_heads,
    batched=True,
)


def causal(
    q,
    k,
    v,
    *,
    alpha,
    beta,
    key_mask=None,
    state=None,
    slot_dropout=None,
    wide=False,
) -> Tensor:
    """Causal LLN attention: query i sees keys j ≤ i + M − N, and those of ``state``."""

    def before(k, v, mask):
        return summarize(k, v, beta=beta, key_mask=mask)

    def attend(q, k, v, key_mask, drop, given):
        given = given or before(k[:, :, :0], v[:, :, :0], None)
        out, _ = causal_op(q, k, v, alpha, beta, key_mask, *given, drop, wide)
        return out

    def read_alone(q, log_mass, mean, drop):
        return read(q, log_mass, mean, alpha=alpha, slot_dropout=drop, wide=wide)

    return causal_by_parts(
        q, k, v, key_mask, state, slot_dropout, summarize=before, attend=attend, read=read_alone
    )
