"""The spectrum of an attention matrix: second eigenvalue, spectral gap, centred singular value.

All three look at the centred matrix P̄ = P − 1 μᵀ, μ the mean row. Since P 1 = 1 and μᵀ1 = 1,
Wielandt's deflation gives P̄ the eigenvalues 0, λ₂, …, λ_N of P (A.4.2 of the paper).
"""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from lln.instruments.arnoldi import largest_eigenvalue, largest_singular_value
from lln.instruments.stochastic import check_stochastic

DENSE_LIMIT = 1024  # up to here every eigenvalue is computed, above Arnoldi finds the largest


class CausalMatrixWarning(UserWarning):
    """The matrix is triangular, so its spectrum says less than the reader may think."""


CAUSAL_CAVEAT = (
    "p is lower triangular (causal attention): its eigenvalues are its diagonal, so |λ₂| is the "
    "second largest P_ii and says nothing about the entries below; use centred_singular_value or "
    "entropy to judge the concentration of causal heads"
)


def is_causal_matrix(p: Float[Tensor, "*batch N N"]) -> bool:
    """Whether no query sees a later key in any of the matrices, and some query sees an earlier."""
    return not bool(p.triu(1).any()) and bool(p.tril(-1).any())


def second_eigenvalue(p: Float[Tensor, "*batch N N"]) -> Float[Tensor, "*batch"]:
    r"""|λ₂|, the second largest modulus among the eigenvalues of an attention matrix.

    Section 3.2.2 of arXiv:2311.13541v4. It bounds the speed at which repeated attention forgets
    where it started: 0 if all rows are equal, 1 if the tokens split into groups that never mix.

    Returns:
        One number per leading index in float32 or wider; 0 for a single token.

    Numerics: computed in float64, as the largest eigenvalue of P̄. Exact (LAPACK) for N ≤ 1024;
    above, Arnoldi iterations, relative accuracy 1e-4. Triangular matrices give their diagonal,
    with a :class:`CausalMatrixWarning`.

    Example:
        >>> second_eigenvalue(torch.eye(3))
        tensor(1.)
    """
    p = check_stochastic(p, square=True)
    if is_causal_matrix(p):
        warnings.warn(CAUSAL_CAVEAT, CausalMatrixWarning, stacklevel=2)
        return p.diagonal(dim1=-2, dim2=-1).sort(-1).values[..., -2]
    return _for_each(_second_eigenvalue, p)


def spectral_gap(p: Float[Tensor, "*batch N N"]) -> Float[Tensor, "*batch"]:
    r"""1 − |λ₂|, the paper's measure of unbiased concentration.

    Section 3.2.2 of arXiv:2311.13541v4: γ = 1 − |λ₂|. Attention that concentrates has a small gap;
    a large gap at low entropy means that all queries look at the same keys.

    Example:
        >>> spectral_gap(torch.full((4, 4), 0.25))
        tensor(1.)
    """
    return 1 - second_eigenvalue(p)


def centred_singular_value(p: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch"]:
    r"""σ₁(P̄), the standard deviation of the rows along their major principal component (times √N).

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


def _for_each(function, p: Tensor) -> Tensor:
    """One matrix at a time, in float64 on the CPU, so that a batch costs one copy of a matrix."""
    matrices = p.flatten(0, -3) if p.ndim > 2 else p[None]
    values = [function(matrix.double().cpu()) for matrix in matrices]
    return p.new_tensor(values).reshape(p.shape[:-2])


def _second_eigenvalue(p: Tensor) -> float:
    mean_row = p.mean(0)
    if p.shape[0] <= DENSE_LIMIT:
        return torch.linalg.eigvals(p - mean_row).abs().max().clamp(max=1).item()
    return min(1.0, largest_eigenvalue(lambda x: p @ x - mean_row @ x, p.shape[0]))


def _centred_singular_value(p: Tensor) -> float:
    mean_row = p.mean(0)
    if max(p.shape) <= DENSE_LIMIT:
        return torch.linalg.matrix_norm(p - mean_row, ord=2).item()
    return largest_singular_value(
        lambda x: p @ x - mean_row @ x, lambda y: p.T @ y - mean_row * y.sum(0), p.shape
    )
