# type: ignore
"""One more token: the state is read once, written once, and answers the new query on the way."""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import FLOOR, LN2, LOG2E, jit


@jit
def decode_kernel(
    Q,
    K,
    V,
    LOG_MASS,
    MEAN,
    MASK,
    ALPHA,
    BETA,
    OUT,
    NEW_LOG_MASS,
    NEW_MEAN,
    q_batch,
    q_head,
    k_batch,
    k_head,
    v_batch,
    v_head,
    out_batch,
    out_head,
    mask_batch,
    alpha_batch,
    alpha_head,
    beta_batch,
    beta_head,
    heads,
    group,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
):
    """The state of one key head after one key, and what its ``group`` queries read from it."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    features = tl.arange(0, BD)
    values = tl.program_id(1) * BE + tl.arange(0, BE)
    inside = features < D
    block = inside[:, None] & (values < E)[None, :]
    matrix = head * D * E + features[:, None] * E + values[None, :]
    beta = tl.load(BETA + b * beta_batch + h * beta_head).to(tl.float32)
    log_mass = tl.load(LOG_MASS + head * D + features, mask=inside, other=float("-inf"))
    mean = tl.load(MEAN + matrix, mask=block, other=0.0)
    k = tl.load(K + b * k_batch + h * k_head + features, mask=inside, other=0.0)
    v = tl.load(V + b * v_batch + h * v_head + values, mask=values < E, other=0.0)
    x = tl.where(inside, k.to(tl.float32) * beta, float("-inf"))
    v = v.to(tl.float32)
    if MASK is not None:
        keep = tl.load(MASK + b * mask_batch) != 0
        x = tl.where(keep, x, float("-inf"))
        v = tl.where(keep, v, 0.0)
    top = tl.maximum(tl.maximum(log_mass, x), FLOOR)
    # natural logarithms here: a state that hardly changes keeps its bits from token to token
    old, new = tl.exp2((log_mass - top) * LOG2E), tl.exp2((x - top) * LOG2E)
    mass = old + new
    norm = tl.where(mass == 0.0, 0.0, 1.0 / tl.where(mass == 0.0, 1.0, mass))
    mean = mean * (old * norm)[:, None] + (new * norm)[:, None] * v[None, :]
    log_mass = tl.where(mass == 0.0, float("-inf"), top + tl.log2(mass) * LN2)
    tl.store(NEW_MEAN + matrix, mean, mask=block)
    if tl.program_id(1) == 0:
        tl.store(NEW_LOG_MASS + head * D + features, log_mass, mask=inside)
    for member in range(group):
        query = h * group + member
        alpha = tl.load(ALPHA + b * alpha_batch + query * alpha_head).to(tl.float32) * LOG2E
        q = tl.load(Q + b * q_batch + query * q_head + features, mask=inside, other=0.0)
        y = q.to(tl.float32) * alpha + log_mass * LOG2E
        p = tl.exp2(y - tl.maximum(tl.max(y, axis=0), FLOOR))
        weight = tl.sum(p, axis=0)
        out = tl.sum(p[:, None] * mean, axis=0) / tl.where(weight == 0.0, 1.0, weight)
        pointers = OUT + b * out_batch + query * out_head + values
        tl.store(pointers, out.to(OUT.dtype.element_ty), mask=values < E)
