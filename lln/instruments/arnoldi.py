"""Largest eigenvalue and singular value of an operator known only by its products (scipy).

λ₂ of an attention matrix is usually a complex pair, on which plain power iteration never settles;
Arnoldi iterations find the pair. Vectors are float64 tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def largest_eigenvalue(product: Product, size: int, *, tolerance: float = 1e-4) -> float:
    """max |λ| of the N×N operator ``product``."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs

    start = _start(size)
    if _vanishes(product, start):
        return 0.0
    operator = LinearOperator((size, size), matvec=_on_arrays(product), dtype=np.float64)
    try:
        values = eigs(
            operator, k=2, which="LM", v0=start, tol=tolerance, ncv=min(size, 40), maxiter=100,
            return_eigenvectors=False,
        )  # fmt: skip
    except ArpackNoConvergence as error:
        raise ArithmeticError(
            f"Arnoldi found {len(error.eigenvalues)} of 2 eigenvalues to tolerance={tolerance:g} "
            f"at N={size}; raise the tolerance or read centred_singular_value instead"
        ) from error
    return float(np.abs(values).max())


def largest_singular_value(
    product: Product, transposed: Product, shape: tuple[int, ...], *, tolerance: float = 1e-4
) -> float:
    """σ₁ of the N×M operator ``product`` whose transpose is ``transposed``."""
    from scipy.sparse.linalg import LinearOperator, svds

    start = _start(min(shape))
    if _vanishes(product, _start(shape[1])):
        return 0.0
    operator = LinearOperator(
        shape, matvec=_on_arrays(product), rmatvec=_on_arrays(transposed), dtype=np.float64
    )
    values = svds(operator, k=1, v0=start, tol=tolerance, return_singular_vectors=False)
    return float(values.max())


def _start(size: int) -> np.ndarray:
    """A fixed start, so that a measurement repeats exactly."""
    return np.random.default_rng(0).standard_normal(size)


def _vanishes(product: Product, start: np.ndarray) -> bool:
    """Whether the operator is zero up to rounding: ARPACK cannot start on it."""
    image = product(torch.from_numpy(start))
    return float(image.abs().max()) <= 1e-13 * np.abs(start).max()


def _on_arrays(product: Product) -> Callable[[np.ndarray], np.ndarray]:
    def apply(x: np.ndarray) -> np.ndarray:
        return product(torch.from_numpy(np.ascontiguousarray(x).ravel())).numpy()

    return apply
