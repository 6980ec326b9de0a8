"""What one forward pass of LLN attention decides before it reads a value."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lln.protocols import compute_dtype


class Draw(NamedTuple):
    """Scales, weights, features and dropout masks of one forward pass.

    α and β are those of the features in ``far``, if there are some.

    The output is linear in v given a draw, so the attention matrix is the same draw applied to the
    identity.
    """

    alpha: Float[Tensor, "B H"]
    beta: Float[Tensor, "B Hkv"]
    gamma: Float[Tensor, "B H"] | None
    key_mask: Bool[Tensor, "B M"] | None
    is_causal: bool
    mix: Float[Tensor, " H"] | None
    center: Float[Tensor, "#B Hkv 1 D"] | None  # of the keys
    slot_dropout: Float[Tensor, "B H N S"] | None
    probability_dropout: Float[Tensor, "B H N W"] | None
    far: tuple[Float[Tensor, "B H N S"], Float[Tensor, "B Hkv M S"]] | None = None


def features_by_name(far: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """What LLN sees instead of q and k, as arguments of the ops; empty if nothing."""
    return {} if far is None else {"q_far": far[0], "k_far": far[1]}


def keep_mask(q: Tensor, width: int | None, probability: float) -> Tensor | None:
    """0 where dropped, 1/(1 − p) where kept; None when nothing is dropped."""
    if width is None or probability == 0:
        return None
    ones = q.new_ones((*q.shape[:3], width), dtype=compute_dtype(q))
    return F.dropout(ones, probability)
