"""Near keys exactly and far keys by LLN, under one normaliser: the kernels of both, in a row."""

from __future__ import annotations

from torch import Tensor

from lln.ops.eager.joint.near_far import far_mask, sink_positions
from lln.ops.triton.joint.far import join
from lln.ops.triton.joint.near import near_with_log


def near(
    q, k, v, *, block, scale, overlap=0, sinks=0, key_mask=None, is_causal=False
) -> Tensor:  # fmt: skip
    """Softmax attention over windows of blocks and sinks."""
    return near_and_log(
        q, k, v, block=block, scale=scale, overlap=overlap, sinks=sinks, key_mask=key_mask,
        is_causal=is_causal,
    )[0]  # fmt: skip


def near_and_log(
    q, k, v, *, block, scale, overlap, sinks, key_mask, is_causal
) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the sum of near keys."""
    always = sink_positions(k, sinks, key_mask) if sinks else None
    window = {"block": block, "overlap": overlap, "scale": scale, "is_causal": is_causal}
    return near_with_log(q, k, v, sinks=always, key_mask=key_mask, **window)


def near_far(
    q, k, v, *, q_far, k_far, alpha, beta, gamma, block, scale, overlap=0, sinks=0, far="others",
    key_mask=None, is_causal=False, normalize_keys=False,
) -> Tensor:  # fmt: skip
    """u · near + (1 − u) · far, u = sigmoid(ℓ_near − γ − ℓ_far)."""
    always = sink_positions(k, sinks, key_mask) if sinks else None
    window = {"block": block, "overlap": overlap, "is_causal": is_causal}
    local = near_with_log(q, k, v, sinks=always, key_mask=key_mask, scale=scale, **window)
    left = far_mask(k, always, key_mask)
    scales = {"alpha": alpha, "beta": beta, "gamma": gamma, "normalize_keys": normalize_keys}
    return join(*local, q_far, k_far, v, key_mask=left, **scales, **window)
