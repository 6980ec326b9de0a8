# type: ignore
"""Which program does what for packed sequences, decided on the device: nobody waits for lengths."""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import jit


@jit
def plan_kernel(CU, PLAN, sequences, items, span, BLOCK: tl.constexpr):
    """PLAN = the sequence of each item of ``span`` tokens, then the first item of each sequence.

    There are at most tokens / span + sequences items; those not needed belong to the last sequence
    and lie behind its end.
    """
    s = tl.arange(0, BLOCK)
    inside = s < sequences
    start = tl.load(CU + s, mask=inside, other=0)
    end = tl.load(CU + s + 1, mask=inside, other=0)
    parts = tl.cdiv(end - start, span).to(tl.int32)
    last = tl.cumsum(parts, axis=0)
    first = last - parts
    total = tl.sum(parts, axis=0)
    tl.store(PLAN + items + s, first, mask=inside)
    tl.store(PLAN + items + sequences, total)
    for step in range(tl.max(parts, axis=0)):
        tl.store(PLAN + first + step, s, mask=inside & (step < parts))
    for spare in range(0, items, BLOCK):
        item = spare + s
        tl.store(PLAN + item, sequences - 1 + s * 0, mask=(item >= total) & (item < items))
