r"""σ̃² for a wanted concentration: the curves of :mod:`lln.moments.quadrature`, inverted.

For every head size D and wanted y = σ_sm² the inverse is
    σ̃²(y) = limit · y^power · exp(Σ_n c_n T_n(z)),      z = 2 x(y)/x(top) − 1,
    x(y)  = ln(1 + (stretch · η)^power),                 η = y / (1 − y/bound),
with T_n the Chebyshev polynomials and c_n polynomials in ln(D − 1), all in ``curves.json``, which
:mod:`lln.moments.tabulate` makes. As y → 0 the sum vanishes and the exact limit remains:
2D·y for plain LLN; 2D·√(y/(D − 1)) with normalised keys, whose first-order terms cancel.

Beyond ``top`` σ̃² continues along the tangent. With normalised keys the divergence of a row cannot
exceed ln D, so "entropy" has the bound y < 2 ln D, and top stands at 0.8 of it.

Numerics: relative error of y below 1e-4 for 2 ≤ D ≤ 1024, 1e-4 ≤ y ≤ top. Coefficients are Python
numbers: no table has to live on the device of the tensors, and none is read from it.
"""

from __future__ import annotations

import functools
import json
import math
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.ops.common.arguments import constant_under_compile

METHODS = ("variance", "entropy")
HEAD_DIMS = (2, 1024)
TABLE = "curves.json"
ON_CPU: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # whatever the default is


class Shape(NamedTuple):
    """The part of the formula that is known without quadrature, for one head size."""

    limit: float
    power: float
    stretch: float
    bound: float
    top: float

    def position(self, y: Tensor) -> Tensor:
        """x(y): 0 at y = 0, where a curve starts, and stretched where it bends."""
        if self.bound < math.inf:
            y = y / (1 - y / self.bound)
        y = y * self.stretch
        return torch.log1p(y if self.power == 1 else y.sqrt())

    def target(self, position: float) -> float:
        """The y of a position: the inverse of :meth:`position`."""
        y = math.expm1(position) ** (1 / self.power) / self.stretch
        return y / (1 + y / self.bound)

    def start(self, y: Tensor) -> Tensor:
        """limit · y^power."""
        return self.limit * (y if self.power == 1 else y.sqrt())


class Curve(NamedTuple):
    """σ̃² as a function of the wanted σ_sm², for one method and head size."""

    shape: Shape
    coefficients: tuple[float, ...]
    end: float  # x(top)
    end_slope: float  # d ln σ̃² / d ln y at top

    def sigma2(self, y: Tensor) -> Tensor:
        """σ̃²(y), elementwise, for y > 0; increasing in y; NaN stays NaN."""
        inside = y.clamp(max=self.shape.top)
        z = self.shape.position(inside) * (2 / self.end) - 1
        value = self.shape.start(inside) * _chebyshev(self.coefficients, z).exp()
        return value * (1 + (y - inside) * (self.end_slope / self.shape.top))

    @property
    def numbers(self) -> tuple[float, ...]:
        """What the kernel of the match knows of it, beside the coefficients."""
        limit, _, stretch, bound, top = self.shape
        return limit, stretch, 1 / bound, top, 2 / self.end, self.end_slope / top


def shape(method: str, head_dim: float, normalize_keys: bool) -> Shape:
    """The known part of a curve; ``head_dim`` need not be an integer."""
    d = head_dim
    if not normalize_keys:
        return Shape(2 * d, 1.0, 2 * d, math.inf, 100.0)
    limit = 2 * d / math.sqrt(d - 1)
    if method == "variance":
        return Shape(limit, 0.5, d, math.inf, 100.0)
    bound = 2 * math.log(d)
    return Shape(limit, 0.5, d, bound, 0.8 * bound)


@functools.lru_cache(maxsize=256)
def _curve(method: str, head_dim: int, normalize_keys: bool) -> Curve:
    table = torch.tensor(_table()[table_key(method, normalize_keys)], **ON_CPU)
    weights = chebyshev_basis(head_position(float(head_dim)), table.shape[0])
    coefficients = (weights @ table).tolist()
    known = shape(method, float(head_dim), normalize_keys)
    ends = torch.tensor([1 - 1e-5, 1.0], **ON_CPU) * known.top
    end = known.position(ends)[1].item()
    draft = Curve(known, tuple(coefficients), end, end_slope=0.0)
    below, at = draft.sigma2(ends).log().tolist()
    return draft._replace(end_slope=(at - below) / 1e-5)


@constant_under_compile
def curve(method: str, head_dim: int, normalize_keys: bool) -> Curve:
    """The curve of "variance" or "entropy" for a head size; a constant under torch.compile."""
    low, high = HEAD_DIMS
    if not low <= head_dim <= high:
        raise ValueError(
            f"head_dim={head_dim} is outside the table of method={method!r}, {low} to {high}; "
            'use method="paper", or a line from lln.moments.fit_line(head_dim)'
        )
    return _curve(method, head_dim, normalize_keys)


def table_key(method: str, normalize_keys: bool) -> str:
    return f"{method}, normalized keys" if normalize_keys else method


def head_position(head_dim: int | float) -> float:
    """Where a head size stands on [−1, 1]: ln(D − 1), scaled."""
    low, high = (math.log(d - 1) for d in HEAD_DIMS)
    return 2 * (math.log(head_dim - 1) - low) / (high - low) - 1


def chebyshev_basis(z: float, count: int) -> Tensor:
    """T_0(z), …, T_{count−1}(z)."""
    angle = math.acos(min(max(z, -1.0), 1.0))
    return torch.cos(angle * torch.arange(count, **ON_CPU))


@functools.cache
def _table() -> dict[str, list[list[float]]]:
    text = resources.files("lln.moments").joinpath(TABLE).read_text(encoding="utf-8")
    return json.loads(text)["curves"]


def _chebyshev(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    """Σ_n c_n T_n(z)."""
    recorded = z.is_cuda and torch.cuda.is_current_stream_capturing()
    if recorded or z.requires_grad or torch.compiler.is_compiling():
        return _clenshaw(coefficients, z)
    return _cosines(coefficients, z)


def _clenshaw(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    """Evaluate by recurrence, with numbers only: fuses to one kernel, copies nothing."""
    twice = 2 * z
    last = torch.zeros_like(z)
    value = torch.full_like(z, coefficients[-1])
    for c in coefficients[-2:0:-1]:
        last, value = value, torch.addcmul(c - last, twice, value)
    return torch.addcmul(coefficients[0] - last, z, value)


def _cosines(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    """Evaluate by T_n(z) = cos(n·arccos z), in few launches; the copy waits for nothing."""
    table = torch.tensor([range(len(coefficients)), coefficients], dtype=z.dtype, device="cpu")
    n, c = table.to(z.device, non_blocking=True)
    angle = z.clamp(-1, 1).acos()
    return (torch.cos(angle[..., None] * n) * c).sum(-1)
