"""Where a module takes α and β from: the current sample, running averages, or fixed constants.

All three answer the same question, ``forward(q, k, ...) -> (alpha [B, H], beta [B, Hkv])``, and all
three treat the answer as a constant of the backward pass. Variances are within one sample; over a
batch they are averaged with the number of valid tokens as weight, so padding counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.nn import averages
from lln.nn.feature_maps import LOG_FEATURES
from lln.nn.matching import Matching
from lln.nn.stored import keeping_precision

KINDS = ("sample", "running", "fixed")
CAUSAL_NEEDS_STORED_STATISTICS = (
    "statistics='sample' cannot serve causal attention: σ of the whole sequence would leak the "
    "future into every output; use statistics='running' (averages over past batches) or "
    "statistics='fixed' (constants, given or set by calibrate_)"
)
CROSS_NEEDS_STORED_STATISTICS = (
    "statistics='sample' cannot serve cross-attention: σ over all queries would let each query of "
    "a decoder see the ones after it; use statistics='running' (averages over past batches) or "
    "statistics='fixed' (constants, given or set by calibrate_)"
)
NOTHING_STORED = (
    "statistics='sample' measures every sample anew and stores nothing; construct the module with "
    "statistics='running' or statistics='fixed'"
)


class Statistics(nn.Module):
    """Base of the three kinds: keeps its buffers out of half precision."""

    def __init__(self, matching: Matching) -> None:
        super().__init__()
        self.matching = matching

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        *,
        key_mask: Bool[Tensor, "B M"] | None = None,
        query_mask: Bool[Tensor, "B N"] | None = None,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "#B H"], Float[Tensor, "#B Hkv"]]:
        """α and β for these queries and keys, without gradient; not from them if causal."""
        raise NotImplementedError

    #: Whether :meth:`forward` gives every sample its own α and β, in the dtype of the sums.
    per_sample = False

    def reset_parameters(self) -> None:
        """Restore what was stored at construction."""

    def stored(self) -> tuple[Float[Tensor, " H"], Float[Tensor, " Hkv"]]:
        """α and β as evaluation uses them."""
        raise ValueError(NOTHING_STORED)

    def calibrate_(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        *,
        key_mask: Bool[Tensor, "B M"] | None = None,
        query_mask: Bool[Tensor, "B N"] | None = None,
    ) -> None:
        """Replace what is stored by the statistics of these tensors."""
        raise ValueError(NOTHING_STORED)

    def store_variances_(self, variances: Float[Tensor, "2 Hkv"]) -> None:
        """Replace what is stored by what these variances give, rows as of :class:`Matching`."""
        raise ValueError(NOTHING_STORED)

    def extra_repr(self) -> str:
        """The options of the match that differ from their defaults."""
        options = {
            name: getattr(self.matching, name)
            for name in ("method", "normalize_keys")
            if getattr(self.matching, name) != getattr(Matching, name)
        }
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        return super()._apply(keeping_precision(fn), recurse)


class SampleStatistics(Statistics):
    """α and β measured from each sample: nothing is stored, bidirectional attention only."""

    per_sample = True

    def forward(self, q, k, *, key_mask=None, query_mask=None, is_causal=False):
        if is_causal:
            raise ValueError(CAUSAL_NEEDS_STORED_STATISTICS)
        return self.matching.measure(q, k, {"key_mask": key_mask, "query_mask": query_mask})


class RunningStatistics(Statistics):
    """α and β from per-head averages of the variances over the batches seen in training.

    After batch t = 1, 2, … the buffer is v ← v + f (v_batch − v) with f = max(0.1, 1/t): a
    plain mean over ten batches, an exponential average from then on, so the value before the first
    batch (σ = 1) is forgotten at once.

    ============== ======================= ============================================
    mode           α and β come from       the buffers
    ============== ======================= ============================================
    training       the current batch       move towards the batch
    training,      the buffers as left by  move towards the batch, after the output was
    causal         earlier batches         computed
    evaluation     the buffers             do not change
    ============== ======================= ============================================

    A batch whose statistics are not finite, or without a valid token, leaves the buffers alone.
    """

    variances: Tensor
    batches: Tensor
    _runs: Tensor

    def __init__(self, matching: Matching, *, device=None) -> None:
        super().__init__(matching)
        ones = torch.ones(2, matching.num_kv_heads, dtype=torch.float32, device=device)
        self.register_buffer("variances", ones)
        self.register_buffer("batches", torch.zeros((), dtype=torch.long, device=device))
        runs = ones.expand(averages.REMEMBERED_RUNS, 2, -1, -1).clone()
        self.register_buffer("_runs", runs, persistent=False)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as torch does; what no state dict holds leaves the meta device with the averages."""
        super()._load_from_state_dict(*args, **kwargs)
        if self._runs.is_meta and not self.variances.is_meta:
            self._runs = torch.ones_like(self._runs, device=self.variances.device)

    def reset_parameters(self) -> None:
        self.variances.fill_(1)
        self.batches.zero_()
        self._runs.fill_(1)

    def forward(self, q, k, *, key_mask=None, query_mask=None, is_causal=False):
        if not self.training:
            alpha, beta = self.stored()
            return alpha[None], beta[None]
        batch = self.matching.pooled_variances(q, k, key_mask=key_mask, query_mask=query_mask)
        alpha, beta = self.follow(batch, is_causal)
        return alpha[None], beta[None]

    def follow(
        self, batch: Float[Tensor, "2 Hkv"], is_causal: bool
    ) -> tuple[Float[Tensor, " H"], Float[Tensor, " Hkv"]]:
        """α and β of a batch in training with these variances; moves the averages."""
        source = averages.follow(batch, self.variances, self.batches, self._runs, is_causal)
        return self.matching.scales(source)

    def stored(self):
        return self.matching.scales(self.variances)

    def calibrate_(self, q, k, *, key_mask=None, query_mask=None):
        batch = self.matching.pooled_variances(q, k, key_mask=key_mask, query_mask=query_mask)
        self.store_variances_(_checked(batch))

    def store_variances_(self, variances: Tensor) -> None:
        self.variances.copy_(variances)
        self.batches.fill_(1)


class FixedScales(Statistics):
    """α ``[H]`` and β ``[Hkv]`` as stored constants: given, or measured once by ``calibrate_``."""

    alpha: Tensor
    beta: Tensor

    def __init__(
        self,
        matching: Matching,
        *,
        alpha: float | Sequence[float] | Tensor | None,
        beta: float | Sequence[float] | Tensor | None,
        device=None,
    ) -> None:
        super().__init__(matching)
        if (alpha is None) != (beta is None):
            raise ValueError(f"alpha={alpha}, beta={beta}: give both or neither")
        if alpha is None or beta is None:
            alpha, beta = matching.scales(torch.ones(2, matching.num_kv_heads, device="cpu"))
        alpha = _per_head("alpha", alpha, matching.num_heads)
        beta = _per_head("beta", beta, matching.num_kv_heads)
        self.first = tuple(x if x.is_meta else x.cpu() for x in (alpha, beta))
        device = torch.get_default_device() if device is None else device
        self.register_buffer("alpha", alpha.to(device, copy=True))
        self.register_buffer("beta", beta.to(device, copy=True))

    def reset_parameters(self) -> None:
        self.alpha.copy_(self.first[0])
        self.beta.copy_(self.first[1])

    def forward(self, q, k, *, key_mask=None, query_mask=None, is_causal=False):
        return self.alpha[None], self.beta[None]

    def stored(self):
        return self.alpha, self.beta

    def calibrate_(self, q, k, *, key_mask=None, query_mask=None):
        batch = self.matching.pooled_variances(q, k, key_mask=key_mask, query_mask=query_mask)
        self.store_variances_(_checked(batch))

    def store_variances_(self, variances: Tensor) -> None:
        alpha, beta = self.matching.scales(variances)
        self.alpha.copy_(alpha)
        self.beta.copy_(beta)


class UnitScales(FixedScales):
    """α = β = 1: of feature maps that set their own scale nothing is matched."""

    def __init__(self, matching: Matching, *, device=None) -> None:
        super().__init__(matching, alpha=1.0, beta=1.0, device=device)

    def calibrate_(self, q, k, *, key_mask=None, query_mask=None):
        pass

    def store_variances_(self, variances: Tensor) -> None:
        pass


def _per_head(name: str, value: float | Sequence[float] | Tensor, heads: int) -> Tensor:
    """A float32 tensor ``[heads]``, checked."""
    given = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    scale = given.detach().to(torch.float32, copy=True)
    if scale.shape not in ((), (1,), (heads,)):
        raise ValueError(
            f"{name} has shape {list(scale.shape)}; give a number or one value per head, [{heads}]"
        )
    if not scale.is_meta and not bool(((scale >= 0) & scale.isfinite()).all()):
        raise ValueError(
            f"{name}={value} must be finite and not negative; take it from lln.match_moments, or "
            "leave both out and call calibrate_"
        )
    return scale.expand(heads).clone()


def _checked(variances: Tensor) -> Tensor:
    if not bool(variances.isfinite().all()):
        raise ValueError(
            "cannot calibrate on these tensors: they hold no valid token, or NaN or infinite values"
        )
    return variances


def choose_statistics(
    kind: str,
    matching: Matching,
    *,
    alpha: float | Sequence[float] | Tensor | None,
    beta: float | Sequence[float] | Tensor | None,
    device: torch.device | str | None,
) -> Statistics:
    """The module for ``kind``; options that it would ignore are errors."""
    if kind not in KINDS:
        raise ValueError(f"statistics={kind!r} is unknown; choose from {', '.join(KINDS)}")
    if matching.feature_map in LOG_FEATURES:
        given = {"alpha": alpha is not None, "beta": beta is not None}
        given["sharpness"] = matching.sharpness != 1
        for name in [name for name, set_ in given.items() if set_]:
            raise ValueError(
                f"{name}= has no meaning for feature_map={matching.feature_map!r}, which sets its "
                "own scale (alpha = beta = 1); leave it out"
            )
        return UnitScales(matching, device=device)
    if kind == "fixed":
        return FixedScales(matching, alpha=alpha, beta=beta, device=device)
    if alpha is not None or beta is not None:
        raise ValueError(
            f"alpha={alpha}, beta={beta} would be ignored: statistics={kind!r} measures them; "
            "use statistics='fixed'"
        )
    if kind == "running":
        return RunningStatistics(matching, device=device)
    return SampleStatistics(matching)
