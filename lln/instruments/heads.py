"""One attention head that yields rows of its matrix and its spectrum without holding the matrix.

Two kinds answer the same questions. :class:`ScoredHead` recomputes rows of the kernel block by
block: O(N) memory, O(N²) time. :class:`FactoredHead` knows P = A Bᵀ with A and Bᵀ row-stochastic
(N×D and D×M), which makes everything but the Shannon entropy exact in O(N D²):
    T = BᵀA (D×D) has the non-zero eigenvalues of P, for M = N;
    Σ_j P_ij² = a_iᵀ(BᵀB)a_i;   mean row = B ā;   σ₁(P̄)² = λ₁(Ā'ᵀĀ' BᵀB),  Ā' = A − 1 āᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lln.instruments.arnoldi import largest_eigenvalue, random_start
from lln.instruments.entropy import collision
from lln.instruments.kernels import find_kernel
from lln.instruments.spectral_gap import DENSE_LIMIT, diagonal_eigenvalue
from lln.protocols import compute_dtype

BLOCK_ENTRIES = 2**19  # entries of P alive at a time


@runtime_checkable
class Head(Protocol):
    """What :func:`lln.instruments.measure` asks of a head; see the subclasses for the cost."""

    queries: int
    keys: int
    is_causal: bool

    def rows(self, index: Int[Tensor, " r"]) -> Float[Tensor, "r M"]:
        """The chosen rows of P."""
        ...

    def mean_row(self) -> Float[Tensor, " M"]: ...

    def collisions(self) -> Float[Tensor, " N"]:
        """Σ_j P_ij² of every row."""
        ...

    def second_eigenvalue(self) -> float: ...

    def centred_singular_value(self) -> float: ...


def over_rows(
    head: Head, function: Callable[[Tensor], Tensor], index: Int[Tensor, " r"] | None = None
) -> Tensor:
    """Apply ``function`` to the rows of P, all or the chosen ones, in blocks of bounded size.

    Results go into one tensor made at the start: kept one by one, they would lie between the blocks
    and leave the allocator a hole as large as a block each time, N×M in the end.
    """
    index = torch.arange(head.queries) if index is None else index
    out: Tensor | None = None
    first = 0
    for block in index.split(max(1, BLOCK_ENTRIES // head.keys)):
        value = function(head.rows(block))
        if out is None:
            out = value.new_empty(len(index), *value.shape[1:])
        out[first : first + len(block)] = value
        first += len(block)
    assert out is not None
    return out


class ScoredHead:
    """Rows are normalised exp(log_weights); nothing is known about their structure.

    Args:
        log_weights: Gives ln κ(q_i, k_j) for a block of rows, up to a constant per row.
        start: N×c block of directions close to the leading eigenvectors of P, for Arnoldi.
    """

    def __init__(
        self,
        log_weights: Callable[[Tensor], Tensor],
        *,
        queries: int,
        keys: int,
        start: Tensor,
        is_causal: bool = False,
    ) -> None:
        self.log_weights = log_weights
        self.queries, self.keys, self.is_causal = queries, keys, is_causal
        self.start = start

    def rows(self, index: Int[Tensor, " r"]) -> Float[Tensor, "r M"]:
        """Softmax of the log-weights over visible keys; a row that is zero everywhere is uniform.

        The last is the limit of κ + ε as ε → 0; it concerns kernels that vanish, as ReLU does.
        """
        index = index.to(self.start.device)
        logs = self.log_weights(index)
        if self.is_causal:
            last = index[:, None] + self.keys - self.queries
            hidden = torch.arange(self.keys, device=logs.device) > last
            empty = logs.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True) == -torch.inf
            logs = torch.where(empty, 0, logs).masked_fill(hidden, -torch.inf)
        else:
            logs = torch.where(logs.amax(-1, keepdim=True) == -torch.inf, 0, logs)
        return torch.softmax(logs, dim=-1)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Mean row and collisions, in one pass."""
        total = torch.zeros(self.keys, dtype=torch.float64, device=self.start.device)

        def read(block: Tensor) -> Tensor:
            total.add_(block.sum(0))
            return collision(block)

        collisions = over_rows(self, read)
        return total / self.queries, collisions

    def mean_row(self) -> Float[Tensor, " M"]:
        return self._sums[0]

    def collisions(self) -> Float[Tensor, " N"]:
        return self._sums[1]

    def second_eigenvalue(self) -> float:
        if self.is_causal:
            return diagonal_eigenvalue(self._diagonal())
        if self.queries <= DENSE_LIMIT:
            return torch.linalg.eigvals(self._centred()).abs().max().item()
        some = random_start(self.queries, self.start.device)[:, :16]  # if q misses the leading ones
        return largest_eigenvalue(self._product, torch.cat([self.start.double(), some], dim=1))

    def centred_singular_value(self) -> float:
        if min(self.queries, self.keys) <= DENSE_LIMIT:
            return torch.linalg.matrix_norm(self._centred(), ord=2).item()
        start = random_start(self.keys, self.start.device)[:, :16]
        return math.sqrt(largest_eigenvalue(self._gram_product, start))

    def _centred(self) -> Tensor:
        p = over_rows(self, lambda block: block).double().cpu()
        return p - p.mean(0)

    def _product(self, x: Tensor) -> Tensor:
        """P̄ x for a block of vectors."""
        narrow = x.to(self.start.dtype)
        image = over_rows(self, lambda block: block @ narrow)
        return image.double() - self.mean_row() @ x

    def _gram_product(self, x: Tensor) -> Tensor:
        """P̄ᵀP̄ x = PᵀP̄ x for a block of vectors, in one pass over the rows."""
        narrow, shift = x.to(self.start.dtype), self.mean_row() @ x
        total = torch.zeros_like(x)

        def read(block: Tensor) -> Tensor:
            image = (block @ narrow).double() - shift
            total.add_(block.T @ image.to(block.dtype))
            return image[:, 0]

        over_rows(self, read)
        return total

    def _diagonal(self) -> Tensor:
        """P_ii, the last visible entry of every row."""
        own = torch.arange(self.keys - self.queries, self.keys, device=self.start.device)
        diagonal = torch.empty(self.queries, dtype=torch.float64, device=self.start.device)
        for index in torch.arange(self.queries).split(max(1, BLOCK_ENTRIES // self.keys)):
            diagonal[index] = self.rows(index).double().gather(1, own[index, None]).squeeze(1)
        return diagonal


class FactoredHead:
    """P = A Bᵀ with A and Bᵀ row-stochastic, both in float64."""

    is_causal = False

    def __init__(self, a: Float[Tensor, "N D"], b: Float[Tensor, "M D"]) -> None:
        self.a, self.b = a, b
        self.queries, self.keys = a.shape[0], b.shape[0]

    def rows(self, index: Int[Tensor, " r"]) -> Float[Tensor, "r M"]:
        return self.a[index.to(self.a.device)] @ self.b.T

    def mean_row(self) -> Float[Tensor, " M"]:
        return self.b @ self.a.mean(0)

    def collisions(self) -> Float[Tensor, " N"]:
        return ((self.a @ self._key_gram) * self.a).sum(-1)

    def second_eigenvalue(self) -> float:
        transfer = (self.b.T @ self.a).cpu()
        return torch.linalg.eigvals(transfer - transfer.mean(0)).abs().max().item()

    def centred_singular_value(self) -> float:
        centred = self.a - self.a.mean(0)
        values, vectors = torch.linalg.eigh(self._key_gram)
        root = vectors * values.clamp(min=0).sqrt()  # root rootᵀ = BᵀB
        return math.sqrt(torch.linalg.matrix_norm(root.T @ (centred.T @ centred) @ root, ord=2))

    @cached_property
    def _key_gram(self) -> Float[Tensor, "D D"]:
        return self.b.T @ self.b


def key_factor(log_k: Float[Tensor, "... M D"]) -> tuple[Tensor, Float[Tensor, "... D"]]:
    """B and the logarithm of the total of each feature; a feature no key has is spread evenly."""
    log_mass = torch.logsumexp(log_k, dim=-2)
    dead = (log_mass == -torch.inf)[..., None, :]
    if dead.any():
        log_k = torch.where(dead, 0, log_k)
    return torch.softmax(log_k, dim=-2), log_mass


def query_factor(log_q: Float[Tensor, "... N D"], log_mass: Float[Tensor, "... D"]) -> Tensor:
    """A; a query whose features all vanish, or meet no key, takes the limit of φ + ε as ε → 0."""
    log_mass = log_mass[..., None, :]
    weights = log_q + log_mass
    empty = weights.amax(-1, keepdim=True) == -torch.inf
    if empty.any():
        no_key = (log_mass == -torch.inf).all(-1, keepdim=True)
        weights = torch.where(empty, log_mass.masked_fill(no_key, 0), weights)
    return torch.softmax(weights, dim=-1)


def build_head(
    kernel: str,
    q: Float[Tensor, "N D"],
    k: Float[Tensor, "M D"],
    scales: tuple[float, float],
    is_causal: bool,
) -> Head:
    """The head that attends with ``kernel``: factored if it is linear and every key is visible.

    The rows of a causal linear kernel are those of A Bᵀ, cut and normalised again.
    """
    chosen = find_kernel(kernel)
    sizes = {"queries": q.shape[0], "keys": k.shape[0], "is_causal": is_causal}
    if chosen.log_score is not None:
        wide = q.to(compute_dtype(q))
        log_score, keys = chosen.log_score, k.to(wide.dtype) / math.sqrt(k.shape[1])
        return ScoredHead(lambda index: log_score(wide[index] @ keys.T), start=wide, **sizes)
    assert chosen.log_feature is not None
    log_k = chosen.log_feature(k.double() * scales[1])
    b, log_mass = key_factor(log_k)
    del log_k
    a = query_factor(chosen.log_feature(q.double() * scales[0]), log_mass)
    head = FactoredHead(a, b)
    if not is_causal:
        return head
    return ScoredHead(lambda index: head.rows(index).log(), start=a, **sizes)
