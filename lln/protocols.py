"""What every part of the package agrees on: the letters for axes and the record of a call.

Axes, one legend for the whole project:
    B batch, H query heads, Hkv key heads (H is a multiple of Hkv), N queries, M keys,
    D query/key width, E value width, C block or chunk, T packed tokens, S packed sequences.
Public tensors are ``[B, H, N, D]`` as in ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Accumulate in float32 whatever the input, float64 if any input is float64."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


@dataclass(frozen=True)
class Call:
    """What an implementation is asked to do: all that its refusal may depend on.

    ``needs`` names features beyond the plain op: ``"dropout"``, ``"learned_mix"``, ``"state"``.
    ``is_causal`` and ``block`` are given for ops that have them as options.
    """

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    needs: frozenset[str] = field(default_factory=frozenset)
    is_causal: bool = False
    block: int | None = None


@dataclass(frozen=True)
class Mechanism:
    """What is known of a mechanism of the zoo; see :func:`lln.describe`.

    Attributes:
        build: The class that computes it: an attention core, or a whole layer.
        paper: Authors, year and arXiv number.
        time, memory: Cost in N tokens; d is the head size, other letters are options.
        source: Whose the defaults are.
        growth: Power of N with which the largest tensor grows.
        matrix: ``"stochastic"`` if rows of ``attention_matrix`` are non-negative and sum to 1 (or
            to 0 where nothing is seen), else ``"signed"``.
        parameters: What it learns beyond the projections of queries, keys, values and output.
        replaces_ffn: Whether the feed-forward network is left out beside it.
    """

    name: str
    build: type
    paper: str
    time: str
    memory: str
    source: str
    growth: int = 1
    matrix: str = "stochastic"
    parameters: str = "none"
    replaces_ffn: bool = False
    note: str = ""
    bidirectional: bool = True
    masks: str = "key padding"

    @property
    def defaults(self) -> dict[str, Any]:
        """Options of :func:`lln.create` and their values, read from the signature of ``build``."""
        parameters = dict(inspect.signature(self.build).parameters)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            base = self.build.__mro__[1]
            parameters = {**inspect.signature(base).parameters, **parameters}
        left_out = getattr(self.build, "left_out", ())
        return {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name not in left_out
        }

    @property
    def causal(self) -> bool:
        """Whether a causal form is offered."""
        return "causal" in self.defaults

    @property
    def cross(self) -> bool:
        """Whether keys may be those of another sequence (through ``module.core``)."""
        return getattr(self.build, "crosses", False)

    @property
    def core(self) -> bool:
        """Whether ``module.core`` maps q, k, v ``[B, H, N, D]`` to an output."""
        return hasattr(self.build, "attend")
