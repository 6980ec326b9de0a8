"""What every part of the package agrees on: axes, the record of a call, and what a core is.

Axes, one legend for the whole project:
    B batch, H query heads, Hkv key heads (H is a multiple of Hkv), N queries, M keys,
    D query/key width, E value width, C block or chunk, T packed tokens, S packed sequences.
Public tensors are ``[B, H, N, D]`` as in ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Accumulate in float32 whatever the input, float64 if any input is float64."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


class Call(NamedTuple):
    """What an implementation is asked to do: all that its refusal may depend on.

    ``needs`` names features beyond the plain op: ``"dropout"``, ``"learned_mix"``, ``"state"``,
    ``"windows"`` (overlapping blocks, sinks), ``"features"`` (of one's own for the LLN branch).
    The other fields are given for ops that have them as options; ``slots`` is the
    width of features of one's own, ``causal_block`` the number of tokens that see each other in
    causal attention, None for one.
    """

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    needs: frozenset[str] = frozenset()
    is_causal: bool = False
    block: int | None = None
    overlap: int = 0
    sinks: int = 0
    slots: int | None = None
    causal_block: int | None = None


@runtime_checkable
class AttentionCore(Protocol):
    """Attention on queries, keys and values that are given: LLN and the cores of the baselines.

    Masks are True at valid tokens. ``key_mask`` says which keys may be attended, ``query_mask``
    which queries count where something is measured; a core that measures nothing ignores it.

    Attributes:
        causal: Whether each query sees the keys up to its own position only.
    """

    causal: bool

    @property
    def key_dim(self) -> int:
        """Width of q and k."""
        ...

    @property
    def positions_matter(self) -> bool:
        """Whether shifting all tokens, as padding before them does, changes the output."""
        ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """Map q ``[B, H, N, D]``, k and v ``[B, H, M, D or E]`` to an output ``[B, H, N, E]``."""
        ...

    def attention_matrix(
        self,
        q: Tensor,
        k: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the weights ``[B, H, N, M]`` of the values. O(N M), for looking at."""
        ...

    def attend_in_model(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        *,
        is_causal: bool,
        dropout: float | None = None,
    ) -> Tensor:
        """Attend inside a model that says in every call whether it is causal, and its dropout.

        Key heads may be fewer than query heads, and causal queries are those of the last keys.
        """
        ...
