# type: ignore
"""Moment matching of all heads in one launch; plain PyTorch takes up to fifty small ones.

The formulas are those of :mod:`lln.moments.matching` and :mod:`lln.moments.curves`.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import jit
from lln.ops.moments.kernels.statistics_kernels import deviation


@jit
def match_kernel(
    SIGMA_Q,
    SIGMA_K,
    TARGET,
    ALPHA,
    BETA,
    count,
    sigma_floor,
    target_floor,
    target_ceiling,
    known,
    coefficients,
    LINE: tl.constexpr,
    ROOT: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ALPHA, BETA of ``count`` heads; σ_sm² from TARGET, or the product of the σ² if None.

    With LINE ``known`` is (a, b); else (limit, stretch, 1/bound, top, 2/end, slope/top) of a curve
    whose power is 1/2 if ROOT, 1 otherwise.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    sigma_q = at_least(tl.load(SIGMA_Q + index, mask=inside, other=1.0), sigma_floor)
    sigma_k = at_least(tl.load(SIGMA_K + index, mask=inside, other=1.0), sigma_floor)
    if TARGET is not None:
        y = tl.load(TARGET + index, mask=inside, other=1.0)
    else:
        y = sigma_q * sigma_k
        y *= y
    spread = matched(
        y, target_floor, target_ceiling, known, coefficients, LINE, ROOT, TERMS
    )  # fmt: skip
    tl.store(ALPHA + index, spread / sigma_q, mask=inside)
    tl.store(BETA + index, spread / sigma_k, mask=inside)


@jit
def measure_kernel(
    PARTS,
    ALPHA,
    BETA,
    samples,
    heads,
    group,
    q_count,
    k_count,
    sigma_floor,
    target_floor,
    target_ceiling,
    known,
    coefficients,
    LINE: tl.constexpr,
    ROOT: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ALPHA of ``group`` query heads and BETA of their key head, from the parts of both."""
    head = tl.program_id(0).to(tl.int64)
    keys = PARTS + (head + samples * heads) * k_count * 3
    sigma_q = at_least(deviation(PARTS + head * q_count * 3, q_count, BLOCK), sigma_floor)
    sigma_k = at_least(deviation(keys, k_count, BLOCK), sigma_floor)
    y = sigma_q * sigma_k
    y *= y
    spread = matched(
        y, target_floor, target_ceiling, known, coefficients, LINE, ROOT, TERMS
    )  # fmt: skip
    for member in range(group):
        tl.store(ALPHA + head * group + member, spread / sigma_q)
    tl.store(BETA + head, spread / sigma_k)


@jit
def matched(
    y,
    target_floor,
    target_ceiling,
    known,
    coefficients,
    LINE: tl.constexpr,
    ROOT: tl.constexpr,
    TERMS: tl.constexpr,
):
    """σ̃/√2 for σ_sm² = y."""
    y = at_most(at_least(y, target_floor), target_ceiling)
    if LINE:
        sigma2 = (y - known[1]) / known[0]
    else:
        low = at_most(y, known[3])
        x = low / (1.0 - low * known[2]) * known[1]
        start = low * known[0]
        if ROOT:
            x = tl.sqrt_rn(x)
            start = tl.sqrt_rn(low) * known[0]
        z = tl.log(1.0 + x) * known[4] - 1.0
        sigma2 = start * tl.exp(chebyshev(z, coefficients, TERMS))
        sigma2 *= 1.0 + (y - low) * known[5]
    return tl.sqrt_rn(sigma2 * 0.5)


@jit
def at_least(x, floor):
    """max(x, floor), and NaN for NaN."""
    return tl.where(x < floor, floor, x)


@jit
def at_most(x, ceiling):
    """min(x, ceiling), and NaN for NaN."""
    return tl.where(x > ceiling, ceiling, x)


@jit
def chebyshev(z, coefficients, TERMS: tl.constexpr):
    """Σ_n c_n T_n(z) by Clenshaw's recurrence."""
    last = z * 0.0
    value = last + coefficients[TERMS - 1]
    for step in tl.static_range(2, TERMS):
        following = coefficients[TERMS - step] - last + 2.0 * z * value
        last = value
        value = following
    return coefficients[0] - last + z * value
