"""The table of implementations, and the choice among them.

An explicit choice succeeds or explains; only ``impl=None`` may choose, and :func:`which` tells
what it takes.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from lln.ops import eager, reference, triton
from lln.protocols import Call

# In order of preference; the reference is never taken unasked.
IMPLEMENTATIONS: dict[str, ModuleType] = {
    "triton": triton,
    "eager": eager,
    "reference": reference,
}
_CHOSEN_BY_DEFAULT = ("triton", "eager")


def choose(call: Call, impl: str | None) -> ModuleType:
    """The implementation that will run ``call``.

    Raises:
        ValueError: ``impl`` is unknown, or cannot run here; the message says why.
    """
    if impl is None:
        for name in _CHOSEN_BY_DEFAULT:
            if IMPLEMENTATIONS[name].refuses(call) is None:
                return IMPLEMENTATIONS[name]
    if impl not in IMPLEMENTATIONS:
        raise ValueError(
            f"impl={impl!r} is unknown; pass one of {', '.join(map(repr, IMPLEMENTATIONS))}, "
            "or None for the fastest that accepts the tensors"
        )
    reason = IMPLEMENTATIONS[impl].refuses(call)
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot run here: {reason}")
    return IMPLEMENTATIONS[impl]


def which(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    diag_block: int | None = None,
    impl: str | None = None,
) -> str:
    """The name of the implementation :func:`lln.attention` would take for these tensors.

    Example:
        >>> lln.which(q, k, v)        # CPU tensors
        'eager'
    """
    op = "causal" if is_causal else "bidirectional"
    module = choose(Call("lln_diag" if diag_block else op, q, k, v), impl)
    return next(name for name, known in IMPLEMENTATIONS.items() if known is module)
