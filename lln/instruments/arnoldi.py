"""The largest eigenvalue of an operator known only by its products: block Arnoldi iterations.

λ₂ of an attention matrix is usually a complex pair inside a crowd of similar moduli, on which power
iteration never settles and single-vector Arnoldi needs a hundred products. When the matrix is
recomputed block by block, a product with 64 vectors costs little more than one with a single
vector, so the space grows by a whole block per product and a dozen of them suffice. For a matrix
that is there, narrow blocks are faster.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 64  # vectors per product
KEPT = 6  # blocks of the space before it is restarted from its leading part

Product = Callable[[Float[Tensor, "N c"]], Float[Tensor, "N c"]]


class NotConverged(ArithmeticError):
    """The iterations ended before the largest eigenvalue had settled."""


def largest_eigenvalue(
    product: Product,
    start: Float[Tensor, "N c"],
    *,
    tolerance: float = 1e-4,
    block: int = BLOCK,
    rounds: int = 60,
) -> float:
    r"""max |λ| of the operator x → ``product(x)`` on R^N.

    Args:
        product: Applied to float64 blocks of vectors, ``block`` columns or as many as ``start``.
        start: The first block; directions close to the leading eigenvectors save products.
        tolerance: Residual ‖P v − λ v‖ of the unit vector v at which λ is accepted.
        rounds: Products after which to give up.

    Raises:
        NotConverged: No eigenvalue was accepted, as in a permutation, where all moduli are alike.

    Numerics: Rayleigh–Ritz on a growing orthonormal basis, enlarged by the residuals of its leading
    Ritz vectors. The error of λ is about a tenth of the residual on attention matrices.
    """
    space = _Space(product, start, KEPT * block)
    for _ in range(rounds):
        basis, image = space.basis, space.image
        values, vectors = torch.linalg.eig((basis.T @ image).cpu())  # LAPACK: small matrices
        top = values.abs().argmax()
        vector = torch.view_as_real(vectors[:, top]).to(basis.device)
        scaled = torch.view_as_real(values[top] * vectors[:, top]).to(basis.device)
        if (image @ vector - basis @ scaled).norm() <= tolerance:
            return float(values[top].abs())
        space.enlarge(_leading_space(values, vectors, block).to(basis.device))
    raise NotConverged(
        f"the largest eigenvalue has not settled to tolerance={tolerance:g} after {rounds} "
        f"products at N={start.shape[0]}; raise the tolerance, or measure at most 1024 tokens"
    )


class _Space:
    """An orthonormal basis and its image, in two buffers that are filled column by column."""

    def __init__(self, product: Product, start: Tensor, limit: int) -> None:
        self.product, self.width = product, 0
        size = min(start.shape[0], limit + start.shape[1])
        self.columns, self.images = (start.new_empty(start.shape[0], size) for _ in range(2))
        self._append(start)

    @property
    def basis(self) -> Tensor:
        return self.columns[:, : self.width]

    @property
    def image(self) -> Tensor:
        return self.images[:, : self.width]

    def enlarge(self, leading: Tensor) -> None:
        """Add the residuals of the leading directions; if full, first keep only these."""
        kept_image = self.image @ leading
        fresh = kept_image - self.basis @ (self.basis.T @ kept_image)
        if self.width + leading.shape[1] > self.columns.shape[1]:
            kept = self.basis @ leading
            self.width = leading.shape[1]
            self.columns[:, : self.width], self.images[:, : self.width] = kept, kept_image
        self._append(fresh)

    def _append(self, fresh: Tensor) -> None:
        for _ in range(2):  # orthogonalising twice is enough
            fresh = torch.linalg.qr(fresh - self.basis @ (self.basis.T @ fresh))[0]
        end = self.width + fresh.shape[1]
        self.columns[:, self.width : end] = fresh
        self.images[:, self.width : end] = self.product(fresh)
        self.width = end


def random_start(
    size: int, device: torch.device | str | None = None, *, block: int = BLOCK
) -> Float[Tensor, "N c"]:
    """A fixed random block, so that a measurement repeats exactly."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, min(size, block), generator=generator, dtype=torch.float64)
    return start.to(device)


def _leading_space(values: Tensor, vectors: Tensor, block: int) -> Tensor:
    """An orthonormal real basis of the Ritz vectors of largest modulus, at most one block wide."""
    order = values.abs().argsort(descending=True)[:block]
    chosen = vectors[:, order]
    left, weight, _ = torch.linalg.svd(
        torch.cat([chosen.real, chosen.imag], dim=1), full_matrices=False
    )
    rank = int((weight > 1e-10 * weight[0]).sum())
    return left[:, : min(rank, block)]
