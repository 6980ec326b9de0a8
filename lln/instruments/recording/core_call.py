"""A call of a mechanism that is neither softmax nor LLN, measured on the matrix it tells of itself.

Performer, elu and the other cores of the zoo have ``attention_matrix``, see
:class:`lln.protocols.AttentionCore`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lln.instruments.checks import check_rows
from lln.instruments.recording.attention_call import AttentionCall, readable
from lln.instruments.spectral_gap import DENSE_LIMIT
from lln.instruments.variance import log_variance
from lln.mechanisms import KNOWN

NAMES = {mechanism.made_by: name for name, mechanism in KNOWN.items()}


@dataclass(frozen=True)
class CoreCall(AttentionCall):
    """What a core was called with; its matrix is asked for when it is measured.

    Attributes:
        core: The module, whose weights are still those of the call.
    """

    core: Any = None

    def _measured(
        self, measures: Sequence[str], rows: int | None
    ) -> dict[str, Float[Tensor, "S H"]]:
        """NaN beyond the length at which matrices are built, and where rows are no distributions.

        Nyströmformer and Linformer have weights with signs, of which no entropy is defined.
        """
        values = torch.full((len(measures), *self.q.shape[:2]), torch.nan)
        everyone = torch.arange(self.heads)
        short = max(self.q.shape[2], self.k.shape[2]) <= DENSE_LIMIT
        for sample in range(self.q.shape[0] if short else 0):
            p = self.matrix(sample)
            if _are_distributions(p):
                values[:, sample] = self._measures_of(p, sample, everyone, measures)
        return dict(zip(measures, values, strict=True))

    def _temperature(self, sample: int, heads: Tensor, p: Tensor) -> Float[Tensor, " h"]:
        return log_variance(p).rsqrt()

    @torch.no_grad()
    def matrix(self, sample: int, heads: Int[Tensor, " h"] | None = None) -> Float[Tensor, "h n m"]:
        """The weights of the values of one sample over the queries and keys that count.

        A row in which the kernel vanishes everywhere is uniform, as
        :func:`lln.instruments.measure` has it.
        """
        heads = torch.arange(self.heads) if heads is None else heads
        mask = None if self.key_mask is None else self.key_mask[sample, None]
        devices = [self.q.device] if self.q.is_cuda else []
        with torch.random.fork_rng(devices):  # Skyformer draws landmarks while it trains
            p = self.core.attention_matrix(self.q[sample, None], self.k[sample, None], mask, mask)
        p = p[0, heads][:, self.tokens[sample]][:, :, self.keys[sample]]
        seen = torch.ones_like(p[0])
        seen = seen.tril(p.shape[2] - p.shape[1]) if self.is_causal else seen
        return torch.where((p == 0).all(-1, keepdim=True), seen / seen.sum(-1, keepdim=True), p)


def _are_distributions(p: Tensor) -> bool:
    try:
        check_rows(p)
    except ValueError:
        return False
    return True


def name_of(module: nn.Module) -> str | None:
    """What the zoo calls a core of its own; None for other modules, LLN among them."""
    kind = type(module)
    return NAMES.get(f"{kind.__module__}:{kind.__qualname__}")


def call_of_core(
    name: str, core: Any, given: Sequence[Any], named: Mapping[str, Any], samples: int
) -> CoreCall | None:
    """What ``core(q, k, v, key_mask)`` compared; None for a whole layer, which has no q and k."""
    if not hasattr(core, "attend_in_model"):
        return None
    told = {**dict(zip(("q", "k", "v", "key_mask"), given, strict=False)), **named}
    mask = told.get("key_mask")
    return CoreCall(
        0,
        "",
        name,
        q=readable(told["q"], samples),
        k=readable(told["k"], samples),
        key_mask=None if mask is None else mask[:samples].clone(),
        is_causal=core.causal,
        core=core,
    )
