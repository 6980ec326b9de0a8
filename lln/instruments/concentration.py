"""All measures of concentration at once, from queries and keys, without the N×N matrix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln import moments
from lln.instruments.arnoldi import NotConverged
from lln.instruments.checks import tokens_taking_part
from lln.instruments.entropy import row_entropy
from lln.instruments.heads import Head, build_head, over_rows
from lln.instruments.kernels import find_kernel
from lln.instruments.spectral_gap import CAUSAL_CAVEAT
from lln.instruments.variance import log_variance_of_rows
from lln.ops.common.arguments import as_scale, check_positive_int
from lln.ops.linear.normalized_keys import normalized_keys
from lln.ops.reference import repeat_heads
from lln.protocols import compute_dtype


@dataclass(frozen=True)
class Concentration:
    """What :func:`measure` found, a tensor ``[B, H]`` per measure; NaN where not measured.

    ``entropy_se`` is the standard error of the entropy (0 if every row was read). ``note`` is
    empty or says how a number must be read. The other names are those of the functions of
    :mod:`lln.instruments`.
    """

    entropy: Float[Tensor, "B H"]
    entropy_se: Float[Tensor, "B H"]
    spectral_gap: Float[Tensor, "B H"]
    centred_singular_value: Float[Tensor, "B H"]
    renyi2_entropy: Float[Tensor, "B H"]
    effective_tokens: Float[Tensor, "B H"]
    column_bias: Float[Tensor, "B H"]
    mutual_information: Float[Tensor, "B H"]
    temperature: Float[Tensor, "B H"]
    log_variance: Float[Tensor, "B H"]
    kernel: str
    note: str


MEASURES = tuple(f.name for f in fields(Concentration) if f.name not in ("kernel", "note"))


@torch.no_grad()
def measure(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    kernel: str = "softmax",
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    rows: int | None = None,
    measures: Sequence[str] | None = None,
    is_causal: bool = False,
    normalize_keys: bool = False,
) -> Concentration:
    r"""Measure how one kernel would attend with these queries and keys.

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        k: Keys ``[B, Hkv, M, D]``.
        kernel: "softmax", "lln", "relu", "quadratic", "relu_linear", "quadratic_linear" or "elu";
            :data:`lln.instruments.KERNELS` has the formulas.
        alpha, beta: Of kernel="lln", as in :func:`lln.attention`; left out, they are matched to q
            and k by the paper's constants.
        key_mask: True = may be attended. With M = N it also leaves out the padded queries.
        query_mask: True = a real query, where that differs from ``key_mask``.
        rows: Estimate what needs a pass over all entries (entropy, log_variance and what follows
            from them) from this many random rows per head. None reads every row.
        measures: Names of the measures wanted; the others are left NaN and cost nothing.
        is_causal: Query i sees keys j ≤ i + M − N.
        normalize_keys: Of kernel="lln": log_softmax_l(β k_j) as key features.

    Returns:
        Float32 or wider. The spectral gap is NaN unless queries and keys are the same tokens, and
        everything is NaN for a sample without visible tokens. ``temperature`` is eq. (5) with the
        measured variance of the scores for softmax, and 1/√log_variance for other kernels.

    Numerics: "lln" and the other linear kernels cost O(N D²) time and O(N D) memory, in float64,
    except for the passes that ``rows`` shortens: O(rows N D). The quadratic kernels, and any causal
    one, are recomputed in blocks: O(N) memory, O(N² D) time per pass, eigenvalues by LAPACK up to
    N = 1024 and by Arnoldi iterations to about 1e-5 above. A causal matrix is triangular, so its
    eigenvalues are its diagonal: ``note`` says so.

    Example:
        >>> found = measure(q, k, kernel="lln", alpha=2.0, beta=2.0, rows=256)
        >>> found.spectral_gap                                            # [B, H]
    """
    queries, keys = tokens_taking_part(q, k, key_mask, query_mask)
    same_tokens = queries.shape == keys.shape and torch.equal(queries, keys)
    _check(rows, measures, is_causal and not (same_tokens or (queries.all() and keys.all())))
    wanted = MEASURES if measures is None else tuple(measures)
    scales = _scales(q, k, kernel, alpha, beta, keys, queries, normalize_keys)
    table = torch.full((len(MEASURES), *q.shape[:2]), torch.nan, dtype=compute_dtype(q, k))
    notes = [CAUSAL_CAVEAT] if is_causal else []
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        own_q = _chosen(q[b, h], queries[b])
        own_k = _chosen(k[b, h * k.shape[1] // q.shape[1]], keys[b])
        if own_q.shape[0] == 0 or own_k.shape[0] == 0:
            continue
        own_alpha, own_beta = scales[0][b, h].item(), scales[1][b, h].item()
        if normalize_keys:
            own_k = normalized_keys(own_k[None, None].double(), scales[1][b, h, None, None])[0, 0]
            own_beta = 1.0
        head = build_head(kernel, own_q, own_k, (own_alpha, own_beta), is_causal)
        reading = _Reading(head, rows=rows, same_tokens=same_tokens)
        for name in wanted:
            try:
                table[MEASURES.index(name), b, h] = reading.value(name)
            except NotConverged as error:
                notes.append(f"{name} of sample {b}, head {h} is NaN: {error}")
        if kernel == "softmax" and "temperature" in wanted:
            variance = moments.score_variance(own_q[None, None], own_k[None, None])
            table[MEASURES.index("temperature"), b, h] = variance.rsqrt().item()
    return Concentration(*table.to(q.device).unbind(0), kernel=kernel, note="; ".join(notes))


class _Reading:
    """The measures of one head; passes over its rows are made once, and only if asked for."""

    def __init__(self, head: Head, *, rows: int | None, same_tokens: bool) -> None:
        self.head, self.same_tokens = head, same_tokens
        self.sample: Tensor | None = None
        if rows is not None and rows < head.queries:
            generator = torch.Generator().manual_seed(0)
            self.sample = torch.randperm(head.queries, generator=generator)[:rows]

    def value(self, name: str) -> float:
        return float(getattr(self, name)())

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """Entropy in bits and log-variance of the rows read."""
        both = over_rows(
            self.head,
            lambda block: torch.stack([row_entropy(block), log_variance_of_rows(block)], dim=1),
            self.sample,
        )
        return both[:, 0].double(), both[:, 1].double()

    def entropy(self) -> Tensor:
        return self._rows[0].mean()

    def entropy_se(self) -> Tensor | float:
        """sd/√r, times √(1 − r/N) because rows are drawn without replacement."""
        bits, total = self._rows[0], self.head.queries
        if self.sample is None:
            return 0.0
        return bits.std() * math.sqrt((1 - len(bits) / total) / len(bits))

    def log_variance(self) -> Tensor:
        return self._rows[1].mean()

    def temperature(self) -> Tensor:
        return self.log_variance().rsqrt()

    def spectral_gap(self) -> float:
        return 1 - min(1.0, self.head.second_eigenvalue()) if self.same_tokens else math.nan

    def centred_singular_value(self) -> float:
        return self.head.centred_singular_value()

    def renyi2_entropy(self) -> Tensor:
        return -self.head.collisions().double().log2().mean()

    def effective_tokens(self) -> Tensor:
        return self.head.collisions().double().reciprocal().mean()

    def column_bias(self) -> Tensor:
        return (math.log2(self.head.keys) - row_entropy(self.head.mean_row())).clamp(min=0)

    def mutual_information(self) -> Tensor:
        return (row_entropy(self.head.mean_row()) - self.entropy()).clamp(min=0)


def _chosen(x: Tensor, mask: Tensor) -> Tensor:
    return x if mask.all() else x[mask]


def _check(rows: int | None, measures: Sequence[str] | None, misaligned: bool) -> None:
    if rows is not None:
        check_positive_int("rows", rows)
    unknown = [name for name in measures or () if name not in MEASURES]
    if unknown:
        raise ValueError(f"measures has {unknown}; choose from {', '.join(MEASURES)}")
    if misaligned:
        raise ValueError(
            "is_causal=True with a query_mask that differs from key_mask loses the alignment of "
            "queries and keys; mask the same tokens in both"
        )


def _scales(q, k, kernel, alpha, beta, keys, queries, normalize_keys) -> tuple[Tensor, Tensor]:
    """alpha and beta, one each per query head."""
    find_kernel(kernel)
    if kernel != "lln" and (alpha is not None or beta is not None or normalize_keys):
        raise ValueError(
            f"kernel={kernel!r} has no alpha, beta or normalize_keys; leave them out, or pass "
            "kernel='lln'"
        )
    if (alpha is None) != (beta is None):
        raise ValueError(f"alpha={alpha} and beta={beta}; pass both, or neither to match them")
    if kernel == "lln" and alpha is None:
        alpha, beta = moments.measure_scales(
            q, k, key_mask=keys, query_mask=queries, normalize_keys=normalize_keys
        )
    alpha = as_scale("alpha", 1.0 if alpha is None else alpha, q.shape[0], q.shape[1], q)
    beta = as_scale("beta", 1.0 if beta is None else beta, k.shape[0], k.shape[1], k)
    return alpha, repeat_heads(beta, q.shape[1])
