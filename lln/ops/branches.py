"""The two branches of LLN+Diag put together where no kernel does it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lln.protocols import compute_dtype


def blend(
    linear: Float[Tensor, "B H N E"],
    local: Float[Tensor, "B H N E"],
    mix: Float[Tensor, " H"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "B H N E"]:
    """mix · linear + (1 − mix) · local, rounded once to ``dtype``; the average without ``mix``."""
    wide = compute_dtype(linear, local)
    weight = 0.5 if mix is None else mix.to(wide)[:, None, None]
    return torch.lerp(local.to(wide), linear.to(wide), weight).to(dtype)
