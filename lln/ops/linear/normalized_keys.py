"""The keys of the unbiased variant: features like any others, so that no op knows of it."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.arguments import hide
from lln.protocols import compute_dtype


def normalized_keys(
    k: Float[Tensor, "B Hkv M S"],
    beta: Float[Tensor, "*b Hkv"],
    key_mask: Bool[Tensor, "B M"] | None = None,
) -> Float[Tensor, "B Hkv M S"]:
    r"""Return ln S + log_softmax_l(beta k_jl): what LLN sees instead of k, with beta = 1.

    Each key's features then have the mean 1, whatever the key: exp of them is S softmax_l.

    Args:
        key_mask: True = may be attended; whatever other keys hold, NaN included, their gradient
            is 0.

    Returns:
        Same dtype as ``k``.

    Numerics: computed in float32 or wider and rounded once. ln S cancels in every ratio; it keeps
    the features near 0, where half precision has its bits.
    """
    scaled = hide(k, key_mask).to(compute_dtype(k)) * beta[..., None, None]
    return (torch.log_softmax(scaled, dim=-1) + math.log(k.shape[-1])).to(k.dtype)
