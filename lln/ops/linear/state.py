"""The state of a set of keys, and how two of them are merged.

That one associative operation gives split-key kernels, chunked causal attention, recurrent
decoding, chunked prefill and sequence parallelism, at O(D E) per head whatever the length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lln.ops.common.arguments import check_alike, check_positive_int
from lln.ops.linear.eager_state import merge


@dataclass(frozen=True, eq=False)
class State:
    """What queries need to know of a set of keys.

    Attributes:
        log_mass: L_l = logsumexp_j(beta k_jl); −inf for the empty set.
        mean: M_l = sum_j exp(beta k_jl − L_l) v_j: per feature, a weighted mean of the values.

    Both are float32, or float64 for float64 inputs.
    """

    log_mass: Float[Tensor, "B Hkv D"]
    mean: Float[Tensor, "B Hkv D E"]

    @staticmethod
    def empty(
        batch: int,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> State:
        """The state of no keys: the identity of :meth:`merge`; reading it gives 0."""
        for name, size in (("head_dim", head_dim), ("heads", heads)):
            check_positive_int(name, size)
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype={dtype}; a state is float32, or float64 for float64 inputs")
        width = head_dim if value_dim is None else value_dim
        log_mass = torch.full((batch, heads, head_dim), -torch.inf, dtype=dtype, device=device)
        return State(log_mass, log_mass.new_zeros(batch, heads, head_dim, width))

    def merge(self, other: State) -> State:
        """The state of the union of two disjoint sets of keys; associative and commutative."""
        if not isinstance(other, State):
            raise TypeError(f"other is a {type(other).__name__}; pass a State from lln.summarize")
        if self.mean.shape != other.mean.shape:
            raise ValueError(
                f"other has shape {list(other.mean.shape)}, this state {list(self.mean.shape)}; "
                "states merge if batch, heads and widths are equal"
            )
        check_alike("this state", self.mean, "other", other.mean)
        return State(*merge(self.log_mass, self.mean, other.log_mass, other.mean))

    def select(self, index: Tensor) -> State:
        """The states of the samples ``index``, e.g. after a step of beam search."""
        return State(self.log_mass.index_select(0, index), self.mean.index_select(0, index))

    def detach(self) -> State:
        """The same numbers, cut from autograd: truncated back-propagation through a long stream."""
        return State(self.log_mass.detach(), self.mean.detach())
