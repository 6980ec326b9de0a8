"""Count the operations of attention: torch's counter knows its own operators only.

As there, multiplications and additions of matrix products count, everything else does not. What is
counted is the linear form itself: a state [D, E] per head is built from the keys and read by the
queries. The tiles that causal implementations add to it on their way are left out.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

# Which products an operator consists of; its variants for training and gradients, and those in
# plain PyTorch, carry its name and a suffix.
LINEAR = (
    *("summarize", "read", "bidirectional", "causal", "lln_diag", "varlen", "decode"),
    *("far", "near_far", "causal_average"),
)
BLOCKS = ("block_diagonal", "lln_diag", "causal_average", "varlen", "near", "near_far")
CONVOLUTION = {"convolution": "weight", "lln_diag": "conv"}  # and what its filters are called
SUFFIXES = ("", "_train", "_backward", "_eager", "_backward_eager")


def flop_counter(**options: Any) -> FlopCounterMode:
    """``torch.utils.flop_counter.FlopCounterMode`` that also knows the operators of this library.

    To torch's own, LLN attention is nothing.

    Args:
        options: Of torch's counter; nothing is printed unless ``display=True``.

    Example:
        >>> with flop_counter() as counter:
        ...     lln.attention(q, k, v)                          # [1, 8, 4096, 64]
        >>> counter.get_total_flops()                           # 2 · 2 · 8 · 4096 · 64²
        536870912
    """
    from torch.utils.flop_counter import FlopCounterMode

    own = {**_formulas(), **options.pop("custom_mapping", {})}
    return FlopCounterMode(**{"display": False, **options}, custom_mapping=own)


def _formulas() -> dict[Any, Callable[..., int]]:
    """The formulas of all operators there are."""
    import lln.ops.eager  # noqa: F401
    from lln.ops import triton

    names = {*LINEAR, *BLOCKS, *CONVOLUTION}
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        for name in names & set(triton._MODULES):
            getattr(triton, name)  # defines its operators
    return {
        getattr(torch.ops.lln, name + suffix): _formula(name, suffix)
        for name in sorted(names)
        for suffix in SUFFIXES
        if hasattr(torch.ops.lln, name + suffix)
    }


def _formula(name: str, suffix: str) -> Callable[..., int]:
    names = [
        argument.name
        for argument in getattr(torch.ops.lln, name + suffix).default._schema.arguments
    ]
    backward = "backward" in suffix

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = SimpleNamespace(**dict(zip(names, args, strict=False)), **kwargs)
        total = 0
        if name in LINEAR:
            total += _linear(given) * (2 if backward else 1)
        if name in BLOCKS and getattr(given, "block", 0):
            # softmax attention computes its scores anew before their gradient: 5 products, not 4
            total += _blocks(given) * (5 if backward else 2) // 2
        filters = getattr(given, CONVOLUTION.get(name, ""), None)
        if filters is not None:
            wanted = getattr(given, f"need_{CONVOLUTION[name]}", backward)
            total += (getattr(given, "need_v", True) + wanted) * _products(
                given.v, filters.shape[-1]
            )
        return total

    count._get_raw = True  # pyright: ignore[reportFunctionMemberAccess]  # tensors, not their shapes
    return count


def _products(x: Tensor, width: int) -> int:
    """Operations of the product of ``x [..., D]`` with a matrix [D, width]."""
    return 2 * math.prod(x.shape) * width


def _linear(given: SimpleNamespace) -> int:
    values = (given.v if hasattr(given, "v") else given.mean).shape[-1]
    features = (_features(given, x) for x in ("q", "k") if hasattr(given, x))
    return sum(_products(x, values) for x in features)


def _features(given: SimpleNamespace, name: str) -> Tensor:
    """What the linear form sees: of far keys it may be something else than queries and keys."""
    own = getattr(given, f"{name}_far", None)
    return getattr(given, name) if own is None else own


def _blocks(given: SimpleNamespace) -> int:
    """Operations of scores and sums over values, of every query with the keys of its window."""
    q, v = given.q, given.v
    tokens = q.shape[2] if q.dim() == 4 else q.shape[0]  # packed: [tokens, heads, D]
    near = given.block
    if hasattr(given, "overlap"):
        near += given.overlap * (1 if getattr(given, "causal", False) else 2) + _sinks(given)
    pairs = math.prod(q.shape[:-1]) * min(near, tokens)
    return 2 * pairs * (q.shape[-1] + v.shape[-1])


def _sinks(given: SimpleNamespace) -> int:
    if hasattr(given, "sink_k"):
        return given.sink_k.shape[2]
    sinks = getattr(given, "sinks", None)
    return 0 if sinks is None else sinks.shape[1]
