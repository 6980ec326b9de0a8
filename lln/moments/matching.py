"""alpha and beta from the statistics of q and k."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any, overload

import torch
from torch import Tensor

from lln.moments.curves import METHODS, ON_CPU, curve
from lln.moments.line import PAPER, MomentFit
from lln.ops import triton
from lln.ops.common.arguments import check_floating, constant_under_compile
from lln.ops.dispatch import may_launch
from lln.protocols import compute_dtype

# A constant input has σ = 0 and is treated alike by every finite alpha, so σ is clamped. The floor
# keeps alpha·q small enough for float32 to still tell features apart.
SIGMA_FLOOR = 1e-4
_VARIANCE_FLOOR, _VARIANCE_CEILING = 1e-16, 1e30  # squares of these stay finite in float32


@overload
def match_moments(
    sigma_q: float,
    sigma_k: float,
    head_dim: int,
    *,
    method: str | MomentFit = "paper",
    normalize_keys: bool = False,
    score_variance: float | None = None,
    impl: str | None = None,
) -> tuple[float, float]: ...
@overload
def match_moments(
    sigma_q: Tensor,
    sigma_k: Tensor | float,
    head_dim: int,
    *,
    method: str | MomentFit = "paper",
    normalize_keys: bool = False,
    score_variance: Tensor | float | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def match_moments(
    sigma_q: float,
    sigma_k: Tensor,
    head_dim: int,
    *,
    method: str | MomentFit = "paper",
    normalize_keys: bool = False,
    score_variance: Tensor | float | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def match_moments(
    sigma_q: Tensor | float,
    sigma_k: Tensor | float,
    head_dim: int,
    *,
    method: str | MomentFit = "paper",
    normalize_keys: bool = False,
    score_variance: Tensor | float | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor] | tuple[float, float]:
    r"""Scales that make LLN attention as concentrated as softmax attention on the same inputs.

    Eq. (10) of arXiv:2311.13541:
        alpha = σ̃/(√2 σ_q),   beta = σ̃/(√2 σ_k),   σ̃² = (σ_sm² − b)/a,   σ_sm² = σ_q² σ_k².

    Args:
        sigma_q, sigma_k: Standard deviations of the elements of q and k; numbers or tensors.
        head_dim: D, any size for a line, 2 to 1024 for "variance" and "entropy".
        method: "paper": the published a and b, fitted near D = 64, σ_sm = 1 to 2.
            "variance": equal variance of ln P within a row, exact for every D.
            "entropy": equal mean entropy of the rows of long sequences, exact for every D.
            Or a :class:`MomentFit`, a line of your own.
        normalize_keys: Match the variant whose key features are log_softmax_l(beta k_j). The lines
            do not know it; "entropy" can match it for σ_sm² up to 1.6 ln D.
        score_variance: σ_sm² itself, if it is known better than by the product.
        impl: As in :func:`lln.attention`: "eager" and "reference" launch no kernel of ours.

    Returns:
        alpha, beta: floats for numbers; for tensors, tensors of their broadcast shape, dtype and
        device. NaN in an entry gives NaN in that entry.

    Numerics: σ is clamped from below at 1e-4, so that constant inputs give finite scales. As
    σ_q, σ_k → 0, "variance" and "entropy" tend to σ̃² = 2D σ_q²σ_k² and alpha = √D σ_k, while a
    line keeps σ̃² ≥ −b/a and sends alpha to infinity. On a GPU float32 deviations of one shape are
    matched by one kernel.

    Example:
        >>> match_moments(1.0, 1.0, 64)                         # (2.1354..., 2.1354...)
        >>> match_moments(1.0, 1.0, 64, method="entropy")       # (1.8685..., 1.8685...)
    """
    head_dim = _checked_head_dim(head_dim)
    check_method(method)
    given = {"sigma_q": sigma_q, "sigma_k": sigma_k, "score_variance": score_variance}
    given = {name: value for name, value in given.items() if value is not None}
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    _check_values(given)
    if not tensors:
        numbers = {name: float(value) for name, value in given.items()}
        return _match_numbers(numbers, head_dim, method, normalize_keys)
    dtype, device = _kind(tensors)
    wide = compute_dtype(*tensors)
    values = {
        name: value.to(wide)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=wide, device=device)
        for name, value in given.items()
    }
    # a compiler makes one launch of the formula by itself
    in_one = may_launch(impl) and _one_launch(values) and not torch.compiler.is_compiling()
    matched = _match_in_one_launch if in_one else _match
    alpha, beta = matched(values, head_dim, method, normalize_keys)
    return alpha.to(dtype), beta.to(dtype)


def _one_launch(values: Mapping[str, Tensor]) -> bool:
    """Whether the kernel takes these values."""
    first = values["sigma_q"]
    alike = all(
        x.dtype == torch.float32 and x.shape == first.shape and x.is_contiguous()
        for x in values.values()
    )
    constant = not any(x.requires_grad for x in values.values())
    # torch.func maps and differentiates the formula, not a kernel
    plain = not torch._C._are_functorch_transforms_active()
    return alike and constant and plain and triton.refuses_device(first) is None


def _match_in_one_launch(
    values: Mapping[str, Tensor], head_dim: int, method: str | MomentFit, normalize_keys: bool
) -> tuple[Tensor, Tensor]:
    sigmas = values["sigma_q"], values["sigma_k"]
    options = kernel_options(method, head_dim, normalize_keys)
    return triton.match(*sigmas, values.get("score_variance"), **options)


@functools.lru_cache(maxsize=256)
def kernel_options(method: str | MomentFit, head_dim: int, normalize_keys: bool) -> dict[str, Any]:
    """What :func:`lln.ops.triton.match` is told of a line or a curve."""
    line = PAPER if method == "paper" else method
    options: dict[str, Any] = {"floors": (SIGMA_FLOOR, _VARIANCE_FLOOR, _VARIANCE_CEILING)}
    if isinstance(line, MomentFit):
        return {**options, "known": (float(line.a), float(line.b))}
    found = curve(line, head_dim, normalize_keys)
    known = {"known": found.numbers, "coefficients": found.coefficients}
    return {**options, **known, "root": found.shape.power != 1}


@constant_under_compile
def _match_numbers(
    values: Mapping[str, float], head_dim: int, method: str | MomentFit, normalize_keys: bool
) -> tuple[float, float]:
    tensors = {name: torch.tensor(x, **ON_CPU) for name, x in values.items()}
    alpha, beta = _match(tensors, head_dim, method, normalize_keys)
    return alpha.item(), beta.item()


def _match(
    values: Mapping[str, Tensor], head_dim: int, method: str | MomentFit, normalize_keys: bool
) -> tuple[Tensor, Tensor]:
    sigma_q = values["sigma_q"].clamp(min=SIGMA_FLOOR)
    sigma_k = values["sigma_k"].clamp(min=SIGMA_FLOOR)
    target = values["score_variance"] if "score_variance" in values else (sigma_q * sigma_k) ** 2
    target = target.clamp(_VARIANCE_FLOOR, _VARIANCE_CEILING)
    line = PAPER if method == "paper" else method
    if isinstance(line, MomentFit):
        sigma2 = (target - line.b) / line.a
    else:
        sigma2 = curve(line, head_dim, normalize_keys).sigma2(target)
    spread = (sigma2 / 2).sqrt()
    return spread / sigma_q, spread / sigma_k


def _kind(tensors: list[Tensor]) -> tuple[torch.dtype, torch.device]:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype, tensors[0].device


def _checked_head_dim(head_dim: object) -> int:
    try:
        size = operator.index(head_dim)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"head_dim is a {type(head_dim).__name__}; pass an int, e.g. q.shape[-1]"
        ) from None
    if size < 1:
        raise ValueError(f"head_dim={size} must be positive; pass q.shape[-1]")
    return size


def check_method(method: object) -> None:
    """Raise at what is neither the name of a method nor a line."""
    if isinstance(method, MomentFit):
        return
    if not isinstance(method, str):
        raise TypeError(
            f"method is a {type(method).__name__}; pass a name or a lln.moments.MomentFit"
        )
    if method not in ("paper", *METHODS):
        names = ", ".join(repr(name) for name in ("paper", *METHODS))
        raise ValueError(f"method={method!r} is unknown; pass {names} or a lln.moments.MomentFit")


def _check_values(given: Mapping[str, object]) -> None:
    """Check that numbers are finite and not negative, and tensors floating, whatever they hold."""
    for name, value in given.items():
        if isinstance(value, Tensor):
            check_floating(name, value)
        elif isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} is a {type(value).__name__}; pass a number or a tensor")
        elif not (math.isfinite(value) and float(value) >= 0):
            raise ValueError(
                f"{name}={value} must be finite and not negative; measure it with "
                "lln.moments.standard_deviations(q, k) or lln.moments.score_variance(q, k)"
            )
