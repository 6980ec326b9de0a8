"""One call of attention inside a model, and what can be measured on it.

:mod:`lln.instruments.hooks` collects calls while a model runs; the monitor and ``lln inspect`` read
them afterwards.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln import moments
from lln.instruments.bias import column_bias, mutual_information
from lln.instruments.concentration import measure
from lln.instruments.entropy import effective_tokens, entropy, renyi2_entropy
from lln.instruments.heads import build_head
from lln.instruments.spectral_gap import (
    DENSE_LIMIT,
    CausalMatrixWarning,
    centred_singular_value,
    spectral_gap,
)
from lln.instruments.temperature import temperature
from lln.instruments.variance import log_variance
from lln.ops.bidirectional import bidirectional
from lln.ops.block_diagonal import block_diagonal
from lln.ops.causal import causal
from lln.ops.reference import repeat_heads
from lln.protocols import compute_dtype

MEASURABLE = ("softmax", "lln")
OF_THE_MATRIX = {
    "entropy": entropy,
    "spectral_gap": spectral_gap,
    "centred_singular_value": centred_singular_value,
    "renyi2_entropy": renyi2_entropy,
    "effective_tokens": effective_tokens,
    "column_bias": column_bias,
    "mutual_information": mutual_information,
    "log_variance": log_variance,
}


@dataclass(frozen=True)
class Branches:
    """The diagonal branch beside LLN: what is needed to compare the outputs of the two."""

    v: Float[Tensor, "S Hkv M E"]
    block: int
    scale: float
    mix: Float[Tensor, " H"] | None


@dataclass(frozen=True)
class AttentionCall:
    """What one call compared with what, for the first S samples of the batch, without gradient.

    Attributes:
        layer: Position of the call among those of the forward pass, from 0.
        module: Dotted name of the innermost module that made the call.
        kernel: "softmax", "lln", or the name of an attention that cannot be measured.
        q, k: In float32 or wider; q is scaled so that the softmax scores are qᵀk/√D.
        key_mask: True = may be attended.
        bias: What is added to the scores where a key mask and causality do not tell it all; −inf
            where a query cannot see a key. Hb is H, or 1 for all heads alike.
        softcap: Scores s become softcap · tanh(s / softcap) before the bias.
        unreadable: Why the matrix cannot be known, or "".
    """

    layer: int
    module: str
    kernel: str
    q: Float[Tensor, "S H N D"]
    k: Float[Tensor, "S Hkv M D"]
    key_mask: Bool[Tensor, "S M"] | None = None
    is_causal: bool = False
    bias: Float[Tensor, "S Hb N M"] | None = None
    softcap: float | None = None
    unreadable: str = ""
    alpha: Float[Tensor, "S H"] | None = None
    beta: Float[Tensor, "S Hkv"] | None = None
    normalize_keys: bool = False
    branches: Branches | None = None

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @cached_property
    def tokens(self) -> Bool[Tensor, "S N"]:
        """Queries that count: in self-attention a key that nobody sees is padding on both sides."""
        samples, _, queries, _ = self.q.shape
        everyone = self.q.new_ones(samples, queries, dtype=torch.bool)
        if queries != self.k.shape[2]:
            return everyone
        if self.bias is not None:
            return self.keys
        return everyone if self.key_mask is None else self.key_mask

    @cached_property
    def keys(self) -> Bool[Tensor, "S M"]:
        """Keys that somebody sees."""
        if self.bias is not None:
            return (self.bias > -torch.inf).any(2).any(1)
        if self.key_mask is not None:
            return self.key_mask
        return self.k.new_ones(self.k.shape[0], self.k.shape[2], dtype=torch.bool)

    def deviations(self) -> tuple[Float[Tensor, "S H"], Float[Tensor, "S H"]]:
        """σ_q and σ_k of every head over the tokens that count."""
        return moments.standard_deviations(
            self.q,
            repeat_heads(self.k, self.heads),
            key_mask=self.keys,
            query_mask=self.tokens,
        )

    def measured(
        self, measures: Sequence[str], *, rows: int | None = None
    ) -> dict[str, Float[Tensor, "S H"]]:
        """The named measures of :func:`lln.instruments.measure`; NaN where they do not exist."""
        if self.kernel not in MEASURABLE or self.unreadable:
            return {name: self.q.new_full(self.q.shape[:2], math.nan) for name in measures}
        if self.bias is None and self.softcap is None:
            found = measure(
                self.q,
                self.k,
                kernel=self.kernel,
                alpha=self.alpha,
                beta=self.beta,
                normalize_keys=self.normalize_keys,
                key_mask=self.key_mask,
                is_causal=self.is_causal,
                rows=rows,
                measures=measures,
            )
            return {name: getattr(found, name) for name in measures}
        values = torch.full((len(measures), *self.q.shape[:2]), math.nan)
        if max(self.q.shape[2], self.k.shape[2]) <= DENSE_LIMIT:
            for sample in range(self.q.shape[0]):
                values[:, sample] = self._measured_densely(sample, measures)
        return dict(zip(measures, values, strict=True))

    def _measured_densely(self, sample: int, measures: Sequence[str]) -> Float[Tensor, "m H"]:
        p = self.matrix(sample)
        values = torch.full((len(measures), self.heads), math.nan)
        for index, name in enumerate(measures):
            if name == "entropy_se":
                values[index] = 0
            elif name == "temperature":
                q, k = (x[sample, None] for x in (self.q, self.k))
                masks = {"key_mask": self.keys[sample, None]}
                masks["query_mask"] = self.tokens[sample, None]
                values[index] = temperature(q, k, target="measured", **masks)[0].cpu()
            elif name != "spectral_gap" or p.shape[-1] == p.shape[-2]:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", CausalMatrixWarning)
                    values[index] = OF_THE_MATRIX[name](p).cpu()
        return values

    def matrix(self, sample: int) -> Float[Tensor, "H n m"]:
        """P of one sample over the queries and keys that count; for an LLN+Diag head, of LLN.

        Rows of queries that see nothing are left out.
        """
        if self.kernel not in MEASURABLE or self.unreadable:
            reason = self.unreadable or f"the weights of {self.kernel!r} are not known"
            raise ValueError(f"layer {self.layer} ({self.module}) has no readable matrix: {reason}")
        queries, keys = self.tokens[sample], self.keys[sample]
        q = self.q[sample][:, queries]
        k = repeat_heads(self.k[sample, None], self.heads)[0][:, keys]
        if self.bias is None and self.softcap is None:
            scales = self._scales(sample)
            rows = torch.arange(q.shape[1])
            heads = [
                build_head(
                    self.kernel, q[h], k[h], scales[h], self.normalize_keys, self.is_causal
                ).rows(rows)
                for h in range(self.heads)
            ]
            return torch.stack(heads).to(self.q.dtype)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias[sample][:, queries][:, :, keys]
        if self.is_causal:
            triangle = torch.ones_like(scores[0], dtype=torch.bool)
            scores = scores.masked_fill(~triangle.tril(k.shape[1] - q.shape[1]), -torch.inf)
        seeing = (scores > -torch.inf).any(-1).all(0)
        return torch.softmax(scores[:, seeing], dim=-1)

    def _scales(self, sample: int) -> list[tuple[float, float]]:
        if self.alpha is None or self.beta is None:
            return [(1.0, 1.0)] * self.heads
        beta = repeat_heads(self.beta[sample, None], self.heads)[0]
        return list(zip(self.alpha[sample].tolist(), beta.tolist(), strict=True))

    def lln_share(self) -> Float[Tensor, "S H"] | None:
        r"""Share of the LLN branch in the output of LLN+Diag; None without a diagonal branch.

        ‖w LLN‖ / (‖w LLN‖ + ‖(1 − w) Diag‖), Frobenius norms over the valid tokens of a head;
        dropout is left out.
        """
        if self.branches is None or self.alpha is None or self.beta is None:
            return None
        op = causal if self.is_causal else bidirectional
        v = self.branches.v
        shared = {"key_mask": self.key_mask, "impl": "eager"}
        linear = op(
            self.q,
            self.k,
            v,
            alpha=self.alpha,
            beta=self.beta,
            normalize_keys=self.normalize_keys,
            **shared,
        )
        block, scale = self.branches.block, self.branches.scale
        local = block_diagonal(
            self.q, self.k, v, block=block, scale=scale, is_causal=self.is_causal, **shared
        )
        weight = 0.5 if self.branches.mix is None else self.branches.mix
        counted = self.tokens[:, None, :, None]
        norms = [(out * counted).norm(dim=(-2, -1)) for out in (linear, local)]
        linear_norm, local_norm = weight * norms[0], (1 - weight) * norms[1]
        return linear_norm / (linear_norm + local_norm)


def readable(x: Tensor, samples: int) -> Tensor:
    """A copy of the first samples that later changes of ``x`` and autograd do not reach."""
    return x[:samples].detach().to(compute_dtype(x), copy=True)
