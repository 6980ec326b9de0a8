"""The iteration by which Nyströmformer and Skyformer invert a small matrix."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def pseudoinverse(a: Float[Tensor, "... m m"], *, steps: int) -> Float[Tensor, "... m m"]:
    """Moore–Penrose inverse by the third-order iteration of Razavi et al. 2014.

        Z ← Z (13 I − AZ (15 I − AZ (7 I − AZ))) / 4,  Z₀ = Aᵀ / (‖A‖₁ ‖A‖_∞)

    The norms are those of each matrix; public versions take one maximum over the whole batch.
    Rows and columns of zeros stay zero: masked landmarks drop out.
    """
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    sums = a.abs()
    # by index, not amax, whose gradient is shared among all sums that equal it: compiled, none may
    norms = sums.sum(-1).max(-1).values * sums.sum(-2).max(-1).values
    norms = norms.masked_fill(norms == 0, 1)  # nothing valid: Z stays 0
    z = a.mT / norms[..., None, None]
    for _ in range(steps):
        az = a @ z
        z = z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return z
