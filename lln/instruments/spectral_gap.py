"""The spectrum of an attention matrix: second eigenvalue, spectral gap, centred singular value.

All three look at the centred matrix P̄ = P − 1 μᵀ, μ the mean row. Since P 1 = 1 and μᵀ1 = 1,
Wielandt's deflation gives P̄ the eigenvalues 0, λ₂, …, λ_N of P (A.4.2 of the paper).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lln.instruments.arnoldi import NotConverged, Product, largest_eigenvalue, random_start
from lln.instruments.checks import check_stochastic

DENSE_LIMIT = 1024  # up to here every eigenvalue is computed; above, Arnoldi finds the largest
RANK_ONE = 1e-14  # entries of P̄ below this are rounding: all rows are equal, λ₂ = 0
BLOCK = 8  # vectors per product: the matrix is there, so that a product costs what its columns do

CAUSAL_CAVEAT = (
    "the matrix is triangular (causal attention): its eigenvalues are its diagonal, so |λ₂| is the "
    "second largest P_ii and says nothing about the other entries; judge causal heads by entropy "
    "and centred_singular_value"
)


class CausalMatrixWarning(UserWarning):
    """The matrix is triangular, so its spectrum says less than the reader may think."""


def second_eigenvalue(p: Float[Tensor, "*batch N N"]) -> Float[Tensor, "*batch"]:
    r"""|λ₂|, the second largest modulus among the eigenvalues of an attention matrix.

    Section 3.2.2 of arXiv:2311.13541v4. It bounds the speed at which repeated attention forgets
    where it started: 0 if all rows are equal, 1 if the tokens split into groups that never mix.

    Returns:
        One number per leading index in float32 or wider; 0 for a single token.

    Numerics: computed in float64 as the largest eigenvalue of P̄. Every eigenvalue (LAPACK) for
    N ≤ 1024; above, block Arnoldi, accurate to about 1e-6, or LAPACK again where that does not
    converge. Triangular matrices give their diagonal, with a :class:`CausalMatrixWarning`.

    Example:
        >>> second_eigenvalue(torch.eye(3))
        tensor(1.)
    """
    p = check_stochastic(p, square=True)
    if any(is_triangular(matrix) for matrix in _matrices(p)):
        warnings.warn(CAUSAL_CAVEAT, CausalMatrixWarning, stacklevel=2)
    return _for_each(_second_eigenvalue, p)


def spectral_gap(p: Float[Tensor, "*batch N N"]) -> Float[Tensor, "*batch"]:
    r"""1 − |λ₂|, the paper's measure of unbiased concentration.

    Section 3.2.2 of arXiv:2311.13541v4: γ = 1 − |λ₂|. Attention that concentrates has a small gap;
    a large gap at low entropy means that all queries look at the same keys. Accuracy and the
    treatment of causal matrices: see :func:`second_eigenvalue`.

    Example:
        >>> spectral_gap(torch.full((4, 4), 0.25))
        tensor(1.)
    """
    return 1 - second_eigenvalue(p)


def centred_singular_value(p: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch"]:
    r"""σ₁(P̄): √N times the standard deviation of the rows along their major principal component.

    Theorem 3.3 of arXiv:2311.13541v4 equates its square with λ₂². That is an identity for normal
    matrices only; in general |λ₂| ≤ σ₁(P̄), and a head that attends to the previous token has
    λ₂ = 0 but σ₁(P̄) > 1. Read both.

    Returns:
        One number per leading index in float32 or wider; M may differ from N.

    Example:
        >>> centred_singular_value(torch.eye(3))
        tensor(1.)
    """
    return _for_each(_centred_singular_value, check_stochastic(p))


def is_triangular(p: Float[Tensor, "N N"]) -> bool:
    """Whether all entries above, or all below, the diagonal are zero; diagonal alone is not."""
    above, below = bool(p.triu(1).any()), bool(p.tril(-1).any())
    return above != below


def diagonal_eigenvalue(diagonal: Float[Tensor, " N"]) -> float:
    """|λ₂| of a triangular matrix: the second largest diagonal entry, 0 for one token."""
    return 0.0 if len(diagonal) == 1 else diagonal.topk(2).values[1].item()


def _matrices(p: Tensor) -> Tensor:
    return p.reshape(-1, *p.shape[-2:])


def _for_each(function: Callable[[Tensor], float], p: Tensor) -> Tensor:
    """Apply to one matrix at a time, in float64 on the CPU: a batch costs one copy of a matrix."""
    values = [function(matrix.double().cpu()) for matrix in _matrices(p)]
    return p.new_tensor(values).reshape(p.shape[:-2])


def _second_eigenvalue(p: Tensor) -> float:
    if is_triangular(p):
        return diagonal_eigenvalue(p.diagonal())
    centred = p - p.mean(0)
    value = _iterated(centred.matmul, centred) if p.shape[0] > DENSE_LIMIT else None
    if value is None:
        value = torch.linalg.eigvals(centred).abs().max().item()
    return min(1.0, value)


def _centred_singular_value(p: Tensor) -> float:
    centred = p - p.mean(0)
    if centred.abs().max() <= RANK_ONE:
        return 0.0
    if min(p.shape) > DENSE_LIMIT:
        square = _iterated(lambda x: centred.T @ (centred @ x), centred)
        if square is not None:
            return math.sqrt(square)
    return torch.linalg.matrix_norm(centred, ord=2).item()


def _iterated(product: Product, centred: Tensor) -> float | None:
    """max |λ| of ``product``, or None where the moduli are too much alike, as in a permutation."""
    if centred.abs().max() <= RANK_ONE:
        return 0.0
    start = random_start(centred.shape[1], block=BLOCK)
    try:
        return largest_eigenvalue(product, start, tolerance=1e-6, block=BLOCK, rounds=200)
    except NotConverged:
        return None
