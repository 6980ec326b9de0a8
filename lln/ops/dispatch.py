"""The table of implementations, and the choice among them.

An explicit choice is obeyed or refused with the reason; only ``impl=None`` may choose, and
:func:`lln.which` tells what it takes. Nothing below this table chooses again.
"""

from __future__ import annotations

from types import ModuleType

from lln.ops import eager, reference, triton
from lln.ops.window import mixed
from lln.protocols import Call

# In order of preference; the reference is never taken unasked.
IMPLEMENTATIONS: dict[str, ModuleType] = {
    "triton": triton,
    "mixed": mixed,
    "eager": eager,
    "reference": reference,
}
_CHOSEN_BY_DEFAULT = ("triton", "mixed", "eager")


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


def name_of(implementation: ModuleType) -> str:
    """The name of an implementation in the table."""
    return next(name for name, known in IMPLEMENTATIONS.items() if known is implementation)


def may_launch(impl: str | None) -> bool:
    """Whether ``impl`` leaves the helpers of an op (statistics, convolution) to Triton kernels."""
    return impl in (None, "triton", "mixed")
