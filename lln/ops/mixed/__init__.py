"""Both branches on a GPU where no kernel of ours fuses them: torch's kernels beside ours.

LLN+Diag whose blocks no kernel takes (too large, overlapping, or fewer queries than keys): the LLN
branch, which grows with the sequence, by its Triton kernel, and the near keys by torch. Near and
far under one normaliser: the near keys by flex_attention, the far ones by our kernel, or by plain
PyTorch where it does not fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.ops import eager, triton
from lln.ops.eager.parts import blend
from lln.ops.mixed import flex
from lln.protocols import Call


def refuses(call: Call) -> str | None:
    """Why the branches have no kernel for these tensors, or None."""
    if call.op == "near_far":
        if call.needs:
            return f"flex_attention is not used with {', '.join(sorted(call.needs))}"
        return flex.refuses(call.q, call.k, call.v)
    if call.op != "lln_diag":
        return f"{call.op} has no two branches; this is for LLN+Diag"
    linear = "causal" if call.is_causal else "bidirectional"
    return triton.refuses(Call(linear, call.q, call.k, call.v, call.needs, call.is_causal))


def near_far(
    q, k, v, *, block, scale, overlap=0, sinks=0, key_mask=None, is_causal=False, **options: Any
) -> Tensor:  # fmt: skip
    """Near keys by flex_attention, far ones by LLN, one normaliser."""
    window = {"block": block, "overlap": overlap, "sinks": sinks, "scale": scale}
    masks = {"key_mask": key_mask, "is_causal": is_causal}
    local = flex.near(q, k, v, **window, **masks)
    if _refuses_join(v, options["q_far"], block, overlap, options.get("far", "others")) is not None:
        return eager.near_far(q, k, v, local=local, **window, **masks, **options)
    scales = {name: options[name] for name in ("alpha", "beta", "gamma")}
    mask = _without_first(k, sinks) if sinks else key_mask
    return triton.join(
        *local, options["q_far"], options["k_far"], v, **scales, key_mask=mask, block=block,
        overlap=overlap, is_causal=is_causal, normalize_keys=options.get("normalize_keys", False),
    )  # fmt: skip


def _refuses_join(v: Tensor, q_far: Tensor, block: int, overlap: int, far: str) -> str | None:
    """Why the far keys have no kernel, or None."""
    if far != "others":
        return f"far={far!r}: the kernels take the keys outside of the windows"
    call = Call("join", q_far, q_far, v)
    return triton.refuses(call) or triton.refuses_window(q_far, v, block, overlap)


def _without_first(k: Tensor, count: int) -> Tensor:
    """A mask of all keys but the first ``count``, the same for every sample."""
    mask = torch.arange(k.shape[2], device=k.device) >= count
    return mask.expand(k.shape[0], -1)


def lln_diag(
    q, k, v, *, alpha, beta, block, scale, key_mask=None, is_causal=False, normalize_keys=False,
    mix=None, overlap=0, sinks=0, q_far=None, k_far=None,
) -> Tensor:  # fmt: skip
    """mix · LLN + (1 − mix) · softmax over near keys (Fig. 3); the average if ``mix`` is None."""
    attend = triton.causal if is_causal else triton.bidirectional
    scales = {"alpha": alpha, "beta": beta, "normalize_keys": normalize_keys}
    far = q if q_far is None else q_far, k if k_far is None else k_far
    linear = attend(*far, v, key_mask=key_mask, **scales)
    masks = {"key_mask": key_mask, "is_causal": is_causal}
    window = {"block": block, "overlap": overlap, "sinks": sinks, "scale": scale}
    if flex.refuses(q, k, v) is None and not (sinks and key_mask is not None):
        local, _ = flex.near(q, k, v, **window, **masks)
    elif overlap or sinks:
        local = eager.near(q, k, v, wide=True, **window, **masks)
    else:
        local = eager.block_diagonal(q, k, v, block=block, scale=scale, wide=True, **masks)
    return blend(linear, local, mix, q.dtype)
