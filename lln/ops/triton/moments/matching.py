"""alpha and beta of every head from the deviations of q and k, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from lln.ops.registration import register
from lln.ops.triton.library import on_device
from lln.ops.triton.moments.matching_kernels import match_kernel

BLOCK = 128
NO_CURVE = (0.0, 0.0)  # coefficients of a line, which has none


def match(
    sigma_q: Float[Tensor, " *heads"],
    sigma_k: Float[Tensor, " *heads"],
    target: Float[Tensor, " *heads"] | None,
    *,
    floors: tuple[float, float, float],
    known: Sequence[float],
    coefficients: Sequence[float] = NO_CURVE,
    root: bool = False,
) -> tuple[Float[Tensor, " *heads"], Float[Tensor, " *heads"]]:
    """alpha, beta as :func:`lln.moments.match_moments`, float32, not differentiable.

    Args:
        target: σ_sm²; the product of the variances if None.
        floors: The least σ, the least and the largest σ_sm².
        known: a and b of a line; or limit, stretch, 1/bound, top, 2/end, slope/top of a curve.
        coefficients, root: Of the curve, whose power is ½ if ``root``.
    """
    return _match(sigma_q, sigma_k, target, floors, known, coefficients, root)


def _match_impl(
    sigma_q: Tensor, sigma_k: Tensor, target: Tensor | None, floors: Sequence[float],
    known: Sequence[float], coefficients: Sequence[float], root: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    alpha, beta = torch.empty_like(sigma_q), torch.empty_like(sigma_q)
    count = sigma_q.numel()
    if count:
        with on_device(sigma_q):
            match_kernel[(triton.cdiv(count, BLOCK),)](
                sigma_q, sigma_k, target, alpha, beta, count, *floors,
                tuple(known), tuple(coefficients),
                LINE=len(known) == 2, ROOT=root, TERMS=len(coefficients), BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return alpha, beta


def _match_fake(sigma_q, sigma_k, target, floors, known, coefficients, root):
    return torch.empty_like(sigma_q), torch.empty_like(sigma_q)


_match = register(
    "match(Tensor sigma_q, Tensor sigma_k, Tensor? target, float[] floors, float[] known, "
    "float[] coefficients, bool root) -> (Tensor, Tensor)",
    _match_impl,
    _match_fake,
)
