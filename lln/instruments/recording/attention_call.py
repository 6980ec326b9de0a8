"""One call of attention inside a model, and what can be measured on it.

:mod:`lln.instruments.recording.recorder` collects calls while a model runs; the monitor and
``lln inspect`` read them afterwards.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln import moments
from lln.instruments.checks import tokens_taking_part
from lln.instruments.concentration import measure
from lln.instruments.entropy import (
    column_bias,
    effective_tokens,
    entropy,
    mutual_information,
    renyi2_entropy,
)
from lln.instruments.heads import key_factor, query_factor
from lln.instruments.spectral_gap import (
    DENSE_LIMIT,
    CausalMatrixWarning,
    centred_singular_value,
    spectral_gap,
)
from lln.instruments.temperature import temperature
from lln.instruments.variance import log_variance
from lln.ops.causal.causal import causal
from lln.ops.linear.bidirectional import bidirectional
from lln.ops.reference import near_field, repeat_heads
from lln.ops.window.eager_near_far import near_share_of
from lln.ops.window.near import Near
from lln.ops.window.near_far import near
from lln.protocols import compute_dtype

MEASURABLE = ("softmax", "lln", "near_far")
SPECTRAL = {"spectral_gap", "centred_singular_value"}
FEW_TOKENS = 96
MATRIX_ENTRIES = 2**22  # of attention matrices alive at a time
MATRIX_MEASURES = {
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
    """The softmax branch beside LLN: what is needed to compare the two.

    Attributes:
        q, k: What it sees, if LLN has features of its own.
        gamma: Of one normaliser for both; None where each has its own.
    """

    v: Float[Tensor, "S Hkv M E"]
    near: Near
    mix: Float[Tensor, " H"] | None = None
    q: Float[Tensor, "S H N Dq"] | None = None
    k: Float[Tensor, "S Hkv M Dq"] | None = None
    gamma: Float[Tensor, "S H"] | None = None


@dataclass(frozen=True)
class AttentionCall:
    """What one call compared with what, for the first S samples of the batch, without gradient.

    Attributes:
        layer: Position of the call among those of the forward pass, from 0.
        module: Dotted name of the innermost module that made the call.
        kernel: "softmax", "lln", "near_far" (LLN and softmax under one normaliser), or the name of
            an attention that cannot be measured.
        q, k: In float32 or wider; q is scaled so that the softmax scores are qᵀk/√D. Features of
            its own if LLN has some, such as normalised keys.
        key_mask: True = may be attended.
        bias: What is added to the scores where a key mask and causality do not tell it all; −inf
            where a query cannot see a key. Hb is H, or 1 for all heads alike.
        softcap: Scores s become softcap · tanh(s / softcap) before the bias.
        unreadable: Why the matrix cannot be known, or "".
        kept: Heads that answer with softmax instead, and what they compare.
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
    branches: Branches | None = None
    kept: tuple[tuple[int, ...], AttentionCall] | None = None

    def kernel_of(self, head: int) -> str:
        """The kernel that a head answers with."""
        return "softmax" if self.kept is not None and head in self.kept[0] else self.kernel

    def without_kept(self, values: Float[Tensor, "S H"]) -> Float[Tensor, "S H"]:
        """What concerns linear attention: NaN in heads that answer with softmax."""
        if self.kept is None:
            return values
        values = values.clone()
        values[:, list(self.kept[0])] = math.nan
        return values

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
        """The named measures of :func:`lln.instruments.measure`; NaN where they do not exist.

        Where launching operations costs more than running them (a GPU up to 1024 tokens, a CPU up
        to 96), measures without a spectrum are read off the matrices of many heads at once.
        Elsewhere :func:`~lln.instruments.measure` does it, with ``rows`` sampled rows.
        """
        found = self._measured(measures, rows)
        if self.kept is not None:
            heads, softmax = self.kept
            for name, values in softmax._measured(measures, rows).items():
                found[name][:, list(heads)] = values.to(found[name])
        return found

    def _measured(
        self, measures: Sequence[str], rows: int | None
    ) -> dict[str, Float[Tensor, "S H"]]:
        if self.kernel not in MEASURABLE or self.unreadable:
            return {name: self.q.new_full(self.q.shape[:2], math.nan) for name in measures}
        tokens_taking_part(self.q, self.k, self.keys, self.tokens)  # explains what is not finite
        short = max(self.q.shape[2], self.k.shape[2]) <= DENSE_LIMIT
        needs_matrix = self.bias is not None or self.softcap is not None
        needs_matrix = needs_matrix or self.kernel == "near_far"
        few = short and (self.q.is_cuda or max(self.q.shape[2], self.k.shape[2]) <= FEW_TOKENS)
        if needs_matrix or (few and SPECTRAL.isdisjoint(measures)):
            values = torch.full((len(measures), *self.q.shape[:2]), math.nan)
            for sample in range(self.q.shape[0] if short else 0):
                for heads in torch.arange(self.heads).split(self._heads_at_once):
                    values[:, sample, heads] = self._measure_matrices(sample, heads, measures)
            return dict(zip(measures, values, strict=True))
        found = measure(
            self.q,
            self.k,
            kernel=self.kernel,
            alpha=self.alpha,
            beta=self.beta,
            key_mask=self.key_mask,
            is_causal=self.is_causal,
            rows=rows,
            measures=measures,
        )
        return {name: getattr(found, name).cpu() for name in measures}

    @property
    def _heads_at_once(self) -> int:
        return max(1, MATRIX_ENTRIES // (self.q.shape[2] * self.k.shape[2]))

    def _measure_matrices(
        self, sample: int, heads: Int[Tensor, " h"], measures: Sequence[str]
    ) -> Float[Tensor, "m h"]:
        return self._measures_of(self.matrix(sample, heads), sample, heads, measures)

    def _measures_of(
        self, p: Tensor, sample: int, heads: Int[Tensor, " h"], measures: Sequence[str]
    ) -> Float[Tensor, "m h"]:
        values = torch.full((len(measures), len(heads)), math.nan)
        if p.numel() == 0:
            return values
        for index, name in enumerate(measures):
            if name == "entropy_se":
                values[index] = 0
            elif name == "temperature":
                values[index] = self._temperature(sample, heads, p).cpu()
            elif name != "spectral_gap" or p.shape[-1] == p.shape[-2]:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", CausalMatrixWarning)
                    values[index] = MATRIX_MEASURES[name](p).cpu()
        return values

    def _temperature(self, sample: int, heads: Tensor, p: Tensor) -> Float[Tensor, " h"]:
        """As :func:`~lln.instruments.measure` defines it for the kernel."""
        if self.kernel in ("lln", "near_far"):
            return log_variance(p).rsqrt()
        k = repeat_heads(self.k[sample, None], self.heads)
        masks = {"key_mask": self.keys[sample, None], "query_mask": self.tokens[sample, None]}
        q = self.q[sample, None, heads]
        return temperature(q, k[:, heads], target="measured", **masks)[0]

    def matrix(self, sample: int, heads: Int[Tensor, " h"] | None = None) -> Float[Tensor, "h n m"]:
        """P of one sample over the queries and keys that count; for an LLN+Diag head, of LLN.

        Under one normaliser (kernel "near_far") it is the matrix of both.

        Rows of queries that see nothing are left out.
        """
        if self.kernel not in MEASURABLE or self.unreadable:
            reason = self.unreadable or f"the weights of {self.kernel!r} are not known"
            raise ValueError(f"layer {self.layer} ({self.module}) has no readable matrix: {reason}")
        heads = torch.arange(self.heads) if heads is None else heads
        queries, keys = self.tokens[sample], self.keys[sample]
        q = self.q[sample, heads][:, queries]
        k = repeat_heads(self.k[sample, None], self.heads)[0, heads][:, keys]
        if self.kernel == "near_far":
            scores = self._joint_scores(sample, heads, q, k)
        elif self.kernel == "lln":
            scores = self._lln_weights(sample, heads, q, k)[0].log()
        else:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.kept is not None:
            numbers, softmax = self.kept
            for place, head in enumerate(heads.tolist()):
                if head in numbers:
                    scores[place] = softmax._scores_of(sample, numbers.index(head)).to(scores)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            bias = self.bias[sample].expand(self.heads, -1, -1)[heads]
            scores = scores + bias[:, queries][:, :, keys]
        if self.is_causal:
            triangle = torch.ones_like(scores[0], dtype=torch.bool)
            scores = scores.masked_fill(~triangle.tril(k.shape[1] - q.shape[1]), -torch.inf)
        seeing = (scores > -torch.inf).any(-1).all(0)
        return torch.softmax(scores[:, seeing], dim=-1).to(self.q.dtype)

    def _scores_of(self, sample: int, head: int) -> Float[Tensor, "n m"]:
        """Softmax's scores of one head over the queries and keys that count."""
        q = self.q[sample, head][self.tokens[sample]]
        k = repeat_heads(self.k[sample, None], self.heads)[0, head][self.keys[sample]]
        return q @ k.mT / math.sqrt(q.shape[-1])

    def _lln_weights(
        self, sample: int, heads: Tensor, q: Tensor, k: Tensor
    ) -> tuple[Float[Tensor, "H n m"], Float[Tensor, "H n"]]:
        """A Bᵀ over all keys that count, in float64, and the logarithm of its rows' normalisers."""
        assert self.alpha is not None and self.beta is not None
        alpha = self.alpha[sample, heads].double()[:, None, None]
        beta = repeat_heads(self.beta[sample, None], self.heads)[0, heads].double()[:, None, None]
        b, log_mass = key_factor(beta * k)
        a = query_factor(alpha * q, log_mass)
        return a @ b.mT, torch.logsumexp(alpha * q + log_mass[:, None], dim=-1)

    def _joint_scores(self, sample: int, heads: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Logarithms of the weights of near and far keys, over the queries and keys that count."""
        both = self.branches
        assert both is not None and both.gamma is not None
        assert both.q is not None and both.k is not None
        weights, level = self._lln_weights(sample, heads, q, k)
        far = weights.log() + level[..., None] + both.gamma[sample, heads].double()[:, None, None]
        queries, keys = self.tokens[sample], self.keys[sample]
        near_q = both.q[sample, heads][:, queries].double()
        near_k = repeat_heads(both.k[sample, None], self.heads)[0, heads][:, keys].double()
        assert both.near.scale is not None
        exact = both.near.scale * near_q @ near_k.mT
        mask = None if self.key_mask is None else self.key_mask[sample, None]
        sizes = self.q.shape[2], self.k.shape[2]
        is_near = near_field(
            *sizes, both.near, key_mask=mask, is_causal=self.is_causal, device=q.device
        )[0, 0][queries][:, keys]
        return torch.where(is_near, exact, far)

    def near_share(self) -> Float[Tensor, "S H"] | None:
        """Mean weight of the near keys over the queries that count; None without one normaliser.

        In linear time.
        """
        both = self.branches
        if both is None or both.gamma is None or both.q is None or both.k is None:
            return None
        ones = torch.ones_like(both.v[..., :1])
        options = {"key_mask": self.key_mask, "is_causal": self.is_causal}
        share = near_share_of(
            both.q, both.k, ones, q_far=self.q, k_far=self.k, alpha=self.alpha, beta=self.beta,
            gamma=both.gamma, **both.near.options, **options,
        )  # fmt: skip
        counted = self.tokens[:, None].to(share.dtype)
        return self.without_kept((share * counted).sum(-1) / counted.sum(-1).clamp(min=1))

    def lln_share(self) -> Float[Tensor, "S H"] | None:
        r"""Share of the LLN branch in the output of LLN+Diag; None without a diagonal branch.

        ‖w LLN‖ / (‖w LLN‖ + ‖(1 − w) Diag‖), Frobenius norms over the valid tokens of a head;
        dropout is left out.
        """
        if self.branches is None or self.alpha is None or self.beta is None or self.unreadable:
            return None
        if self.branches.gamma is not None:  # one normaliser: see near_share
            return None
        op = causal if self.is_causal else bidirectional
        v = self.branches.v
        shared = {"key_mask": self.key_mask, "impl": "eager"}
        linear = op(self.q, self.k, v, alpha=self.alpha, beta=self.beta, **shared)
        q = self.q if self.branches.q is None else self.branches.q
        k = self.k if self.branches.k is None else self.branches.k
        options = {"near": self.branches.near, "is_causal": self.is_causal}
        local = near(q, k, v, **options, **shared)
        weight = 0.5 if self.branches.mix is None else self.branches.mix
        counted = self.tokens[:, None, :, None]
        norms = [(out * counted).norm(dim=(-2, -1)) for out in (linear, local)]
        linear_norm, local_norm = weight * norms[0], (1 - weight) * norms[1]
        return self.without_kept(linear_norm / (linear_norm + local_norm))


def readable(x: Tensor, samples: int) -> Tensor:
    """A copy of the first samples that later changes of ``x`` and autograd do not reach."""
    return x[:samples].detach().to(compute_dtype(x), copy=True)
