"""One step of decoding with near and far keys under one normaliser, whose memory stays in place.

Two launches instead of some eighty small operations. The memory is written in place, and nothing is
asked of the host: a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor

from lln.ops.common.kernels.library import on_device, rows_contiguous
from lln.ops.common.kernels.tiles import padded
from lln.ops.window.kernels.joint.next_token_kernels import attend_kernel, move_kernel
from lln.ops.window.near import Near

ROWS = 64  # keys of the window at a time
MOVED_VALUES = 4096  # numbers of a state that a program moves at a time


def next_token(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B Hkv 1 D"],
    v: Float[Tensor, "B Hkv 1 E"],
    q_far: Float[Tensor, "B H 1 S"],
    k_far: Float[Tensor, "B Hkv 1 S"],
    position: Int[Tensor, " B"],
    memory: Mapping[str, Tensor],
    *,
    alpha: Float[Tensor, " H"],
    beta: Float[Tensor, " Hkv"],
    gamma: Float[Tensor, " H"],
    local: Near,
) -> Float[Tensor, "B H 1 E"]:
    """Attention of one token of every seat to all before it; the token joins ``memory``.

    For inference: gradients do not flow.

    Args:
        position: Of the token, per seat.
        memory: By name, as in :class:`lln.hf.decode.memory.Memory`; states in float32, everything
            contiguous.
        local: Block, overlap, sinks and scale.
    """
    (batch, heads, _, d), kv_heads, e = q.shape, k.shape[1], v.shape[-1]
    slots = k_far.shape[-1]
    out = q.new_empty((batch, heads, 1, e))
    if out.numel() == 0:
        return out
    q, k, v, q_far, k_far = (rows_contiguous(x) for x in (q, k, v, q_far, k_far))
    sink_k, sink_v = (memory[name] if local.sinks else None for name in ("sink_k", "sink_v"))
    states = [memory[name] for name in ("log_mass", "mean")]
    waiting = [memory[f"pending_{name}"] for name in ("log_mass", "mean")]
    near = memory["near_k"], memory["near_v"]
    widths = {"D": d, "E": e, "S": slots, "BD": padded(d), "BS": padded(slots)}
    with on_device(q):
        move_kernel[(batch * kv_heads,)](
            k, v, k_far, position, beta, *near, memory.get("near_features"), sink_k, sink_v,
            *states, *waiting, *k.stride()[:2], *v.stride()[:2], *k_far.stride()[:2],
            kv_heads, local.block, local.overlap, local.sinks,
            **widths, BE=min(padded(e), max(16, MOVED_VALUES // padded(slots))),
            OVERLAP=local.overlap > 0, num_warps=4,
        )  # fmt: skip
        attend_kernel[(batch * heads,)](
            q, q_far, position, alpha, gamma, *near, sink_k, sink_v, *states, out,
            *q.stride()[:2], *q_far.stride()[:2], heads, heads // kv_heads,
            local.block, local.overlap, local.sinks, local.scale,
            **widths, BE=padded(e), ROWS=ROWS, SINKS=padded(local.sinks) if local.sinks else 0,
            num_warps=8,
        )  # fmt: skip
    return out
