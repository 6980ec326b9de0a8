"""alpha and beta of every head: from deviations in one launch, from q and k in two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.kernels.launching import Launch, planned, steps
from lln.ops.common.kernels.library import floats
from lln.ops.common.registration import register
from lln.ops.moments.kernels.matching_kernels import match_kernel, measure_kernel
from lln.ops.moments.kernels.statistics import moments_of_parts

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
    if count := sigma_q.numel():
        given = tuple(floors), tuple(known), tuple(coefficients), root
        launch = _match_plan(count, *given, sigma_q.device)
        launch(sigma_q, sigma_k, target, alpha, beta)
    return alpha, beta


@planned
def _match_plan(count: int, floors, known, coefficients, root: bool, _: torch.device) -> Launch:
    return Launch(
        match_kernel, (steps(count, BLOCK),), (count, *floors, known, coefficients),
        LINE=len(known) == 2, ROOT=root, TERMS=len(coefficients), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def _match_fake(sigma_q, sigma_k, target, floors, known, coefficients, root):
    return torch.empty_like(sigma_q), torch.empty_like(sigma_q)


_match = register(
    "match(Tensor sigma_q, Tensor sigma_k, Tensor? target, float[] floors, float[] known, "
    "float[] coefficients, bool root) -> (Tensor, Tensor)",
    _match_impl,
    _match_fake,
)


def measure(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    floors: tuple[float, float, float],
    known: Sequence[float],
    coefficients: Sequence[float] = NO_CURVE,
    root: bool = False,
) -> tuple[Float[Tensor, "B H"], Float[Tensor, "B Hkv"]]:
    """alpha, beta of q and k: their deviations, matched as by :func:`match`, not differentiable.

    The product of the variances is the target. Query heads that share a key head share alpha.
    """
    given = floors, known, coefficients, root
    return _measure(q.detach(), k.detach(), key_mask, query_mask, *given)


def _measure_impl(
    q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None,
    floors: Sequence[float], known: Sequence[float], coefficients: Sequence[float], root: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    alpha, beta = _measure_fake(q, k, key_mask, query_mask, floors, known, coefficients, root)
    if beta.numel():
        parts = moments_of_parts(q, k, key_mask, query_mask)
        given = tuple(floors), tuple(known), tuple(coefficients), root
        _measure_plan(q.shape[:2], k.shape[1], parts.shape[1], *given, q.device)(parts, alpha, beta)
    return alpha, beta


@planned
def _measure_plan(
    shape: tuple[int, ...], kv_heads: int, count: int, floors, known, coefficients, root: bool,
    _: torch.device,
) -> Launch:  # fmt: skip
    b, heads = shape
    group = heads // kv_heads
    return Launch(
        measure_kernel, (b * kv_heads,),
        (b, heads, group, group * count, count, *floors, known, coefficients),
        LINE=len(known) == 2, ROOT=root, TERMS=len(coefficients),
        BLOCK=triton.next_power_of_2(group * count), num_warps=1,
    )  # fmt: skip


def _measure_fake(q, k, key_mask, query_mask, floors, known, coefficients, root):
    return floats(q, *q.shape[:2]), floats(k, *k.shape[:2])


_measure = register(
    "measure(Tensor q, Tensor k, Tensor? key_mask, Tensor? query_mask, float[] floors, "
    "float[] known, float[] coefficients, bool root) -> (Tensor, Tensor)",
    _measure_impl,
    _measure_fake,
)
