"""New tokens as a core sees them, and the constants that evaluation takes from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lln.hf.rotation import Rotation
from lln.nn import LLNAttention
from lln.ops.window.eager_near_far import combine


@dataclass(frozen=True)
class Constants:
    """What evaluation takes from a core's statistics.

    Attributes:
        key_beta: β for the features of keys.
        beta: β of these features.
        gamma: The level of far keys under one normaliser; None where branches are averaged.
        mix: The weight of LLN where they are.
    """

    alpha: Float[Tensor, " H"]
    key_beta: Float[Tensor, " Hkv"]
    beta: Float[Tensor, " Hkv"]
    gamma: Float[Tensor, " H"] | None
    mix: Float[Tensor, " H"] | None

    @staticmethod
    def of(core: LLNAttention, dtype: torch.dtype) -> Constants:
        """Read them; gradients flow where the core learns them."""
        alpha, beta = (x.to(dtype) for x in core.scales())
        gamma = None if core.level is None else core.stored_level().to(dtype)
        return Constants(alpha, beta, core.far_beta(beta), gamma, core.mix_weight(dtype))

    def together(
        self, near: tuple[Tensor, Tensor], linear: tuple[Tensor, Tensor | None]
    ) -> Float[Tensor, "B H N E"]:
        """Near keys and LLN as one attention: outputs and logarithms of their sums."""
        if self.gamma is not None:
            assert linear[1] is not None
            return combine(near, (linear[0], linear[1]), self.gamma.expand(len(near[0]), -1))
        if self.mix is None:
            return torch.lerp(near[0], linear[0], 0.5)
        return torch.lerp(near[0], linear[0], self.mix[:, None, None])


@dataclass(frozen=True)
class Tokens:
    """Queries, keys and values; what LLN sees of queries and (centred) keys."""

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B Hkv N D"]
    v: Float[Tensor, "B Hkv N E"]
    q_far: Float[Tensor, "B H N S"]
    k_far: Float[Tensor, "B Hkv N S"]

    @staticmethod
    def of(
        core: LLNAttention,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        v: Float[Tensor, "B Hkv M E"],
        constants: Constants,
        rotation: Rotation | None,
    ) -> Tokens:
        """Of what a layer attends with."""
        k, q_far, k_far = core.decoding_inputs(q, k, constants.key_beta, rotation)
        return Tokens(q, k, v, q_far, k_far)
