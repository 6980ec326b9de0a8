"""Both branches on a GPU where no kernel of ours fuses them: our kernels beside plain PyTorch.

LLN+Diag whose blocks no kernel takes (large or overlapping ones in float32, sinks, features of
their own, causal windows, or fewer queries than keys): the LLN branch, which grows with the
sequence, by its Triton kernel, and the near keys by the kernel of windows where it fits. Near and
far under one normaliser, with far keys that no kernel takes: the near keys by the kernel of
windows, the far ones by plain PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from lln.ops import eager, triton
from lln.ops.common.parts import blend
from lln.protocols import Call


def refuses(call: Call) -> str | None:
    """Why the branches have no kernel for these tensors, or None."""
    if call.op == "near_far":
        return triton.refuses(Call("near", call.q, call.k, call.v, call.needs, sinks=call.sinks))
    if call.op != "lln_diag":
        return f"{call.op} has no two branches; this is for LLN+Diag"
    linear = "causal" if call.is_causal else "bidirectional"
    linear = linear if call.causal_block is None else "block_causal"
    tensors = call.q, call.k, call.v
    return triton.refuses(
        Call(linear, *tensors, call.needs, call.is_causal, causal_block=call.causal_block)
    )


def near_far(
    q, k, v, *, block, scale, overlap=0, sinks=0, key_mask=None, is_causal=False, **options: Any
) -> Tensor:  # fmt: skip
    """Near keys by their kernel, far ones by plain PyTorch, one normaliser."""
    window = {"block": block, "overlap": overlap, "sinks": sinks, "scale": scale}
    masks = {"key_mask": key_mask, "is_causal": is_causal}
    local = triton.near_and_log(q, k, v, **window, **masks)
    return eager.near_far(q, k, v, local=local, **window, **masks, **options)


def lln_diag(
    q, k, v, *, alpha, beta, block, scale, key_mask=None, is_causal=False, causal_block=None,
    mix=None, overlap=0, sinks=0, q_far=None, k_far=None,
) -> Tensor:  # fmt: skip
    """mix · LLN + (1 − mix) · softmax over near keys (Fig. 3); the average if ``mix`` is None."""
    attend = triton.causal if is_causal else triton.bidirectional
    if causal_block is not None:  # as in plain PyTorch: nothing to hide in the blocks
        attend, is_causal = functools.partial(triton.block_causal, causal_block=causal_block), False
    scales = {"alpha": alpha, "beta": beta}
    far = q if q_far is None else q_far, k if k_far is None else k_far
    linear = attend(*far, v, key_mask=key_mask, **scales)
    masks = {"key_mask": key_mask, "is_causal": is_causal}
    window = {"block": block, "overlap": overlap, "sinks": sinks, "scale": scale}
    if triton.refuses(Call("near", q, k, v, sinks=sinks)) is None:
        local = triton.near(q, k, v, **window, **masks)
    elif overlap or sinks:
        local = eager.near(q, k, v, wide=True, **window, **masks)
    else:
        local = eager.block_diagonal(q, k, v, block=block, scale=scale, wide=True, **masks)
    return blend(linear, local, mix, q.dtype)
