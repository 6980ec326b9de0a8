"""Near and far keys of a slice whose windows reach over its edges."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lln.distributed.exchange import ExchangeEdges, ExchangeOutside, taking_part
from lln.ops.linear.eager_state import summarize_op
from lln.ops.window.eager_far import far_op
from lln.ops.window.eager_near import near_op
from lln.ops.window.eager_near_far import Sinks
from lln.ops.window.near import Near

Branch = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]  # output and logarithm of its sum


class Reach:
    """A slice and ``overlap`` tokens on either side of it (causal: before it).

    Attributes:
        q: With zeros beside the tokens after the slice, so that the last query is at the last key.
        key_mask: False for the tokens that are not there: before the first slice, after the last.
        origin: A position of the first key at which the blocks are those of the whole sequence.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        near: Near,
        group: Any,
        key_mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        self.q, self.k, self.v, self.key_mask, self.origin = q, k, v, key_mask, 0
        self.queries, overlap = q.shape[2], near.overlap
        if not overlap:
            return
        seen = k.new_ones(k.shape[:3]) if key_mask is None else key_mask[:, None].to(k.dtype)
        own = torch.cat([k, v, seen.expand(k.shape[:3])[..., None]], dim=-1)
        edges: tuple[Tensor, Tensor] = ExchangeEdges.apply(  # type: ignore[assignment]
            taking_part(own[:, :, :overlap]), own[:, :, -overlap:], group
        )
        wide = torch.cat([edges[0], own] if is_causal else [edges[0], own, edges[1]], dim=2)
        self.k, self.v, seen = wide.split([k.shape[3], v.shape[3], 1], dim=-1)
        self.key_mask, self.origin = seen[:, 0, :, 0] > 0, near.origin
        if not is_causal:
            self.q = F.pad(q, (0, 0, 0, overlap))

    def cut(self, branch: Branch) -> Branch:
        """The rows of the slice."""
        return branch[0][:, :, : self.queries], branch[1][:, :, : self.queries]


def attend_near(reach: Reach, near: Near, is_causal: bool) -> Branch:
    """Softmax attention of the slice over its near keys."""
    none = Sinks.among(reach.k, reach.v, 0, None)
    tensors = reach.q, reach.k, reach.v, none.k, none.v, none.position, reach.key_mask, None
    window = near.block, near.overlap, near.scale, reach.origin, is_causal
    return reach.cut(near_op(*tensors, *window))


def attend_far(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv N D"],
    v: Float[Tensor, "B Hkv N E"],
    reach: Reach,
    near: Near,
    group: Any,
    is_causal: bool,
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    key_mask: Bool[Tensor, "B N"] | None,
) -> Branch:
    """LLN attention of the slice over its far keys, wherever they are."""
    seen: tuple[Tensor, Tensor]
    parts = [slice(None)]
    if near.overlap:
        parts += [slice(None, -near.overlap), slice(near.overlap, None)][: 1 if is_causal else 2]
    states = [
        summarize_op(
            *(k[:, :, part], v[:, :, part], beta),
            None if key_mask is None else key_mask[:, part],
        )
        for part in parts
    ]
    log_mass, mean = (torch.stack(tensors) for tensors in zip(*states, strict=True))
    seen = ExchangeOutside.apply(  # type: ignore[assignment]
        taking_part(log_mass), mean, group, is_causal
    )
    tensors = reach.q, reach.k, reach.v, alpha, beta, *seen, reach.key_mask, None
    window = near.block, near.overlap, reach.origin, is_causal
    return reach.cut(far_op(*tensors, *window))
