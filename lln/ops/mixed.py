"""LLN+Diag with the LLN branch by Triton kernels and the blocks by plain PyTorch.

For blocks that no kernel takes (too large, or fewer queries than keys): the branch that grows with
the sequence keeps its kernel.
"""

from __future__ import annotations

from torch import Tensor

from lln.ops import eager, triton
from lln.ops.eager.parts import blend
from lln.protocols import Call


def refuses(call: Call) -> str | None:
    """Why the LLN branch has no kernel for these tensors, or None."""
    if call.op != "lln_diag":
        return f"{call.op} has no two branches; this is for LLN+Diag"
    linear = "causal" if call.is_causal else "bidirectional"
    return triton.refuses(Call(linear, call.q, call.k, call.v, call.needs, call.is_causal))


def lln_diag(
    q, k, v, *, alpha, beta, block, scale, key_mask=None, is_causal=False, normalize_keys=False,
    mix=None,
) -> Tensor:  # fmt: skip
    """mix · LLN + (1 − mix) · block-diagonal softmax (Fig. 3); the average if ``mix`` is None."""
    attend = triton.causal if is_causal else triton.bidirectional
    scales = {"alpha": alpha, "beta": beta, "normalize_keys": normalize_keys}
    linear = attend(q, k, v, key_mask=key_mask, **scales)
    masks = {"key_mask": key_mask, "is_causal": is_causal}
    local = eager.block_diagonal(q, k, v, block=block, scale=scale, wide=True, **masks)
    return blend(linear, local, mix, q.dtype)
