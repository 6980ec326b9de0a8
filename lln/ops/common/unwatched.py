"""Whether anything but the result of an operator matters at this moment.

An operator of torch.library can be traced, mapped, counted, replayed and run on tensors that are no
memory. All of that asks for the dispatcher. A call on ordinary tensors outside of every mode does
not, and most calls are such.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _dispatch_keys

_TENSORS = frozenset({Tensor, torch.nn.Parameter})  # of other classes anything may be redefined
_TYPES: dict[str, frozenset[type]] = {
    "Tensor": _TENSORS,
    "Optional[Tensor]": _TENSORS | {type(None)},
    "bool": frozenset({bool}),
    "int": frozenset({int}),
    "float": frozenset({float}),
    "List[float]": frozenset({list, tuple}),
}


def _bits(*names: str) -> int:
    keys = DispatchKeySet(DispatchKey.Undefined)
    for name in names:
        keys |= DispatchKeySet(getattr(DispatchKey, name))
    return keys.raw_repr()


# What an ordinary dense tensor brings along, and what a thread always asks for. Anything else is
# a view that is negated on reading, a wrapper of torch.func, a sparse or meta tensor; a tracer, a
# TorchDispatchMode, functionalization.
_ORDINARY = _bits(
    *("CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA"),
    "ADInplaceOrView",
)
_ALWAYS = _bits("BackendSelect", "ADInplaceOrView")


def argument_types(op: Any) -> tuple[frozenset[type], ...]:
    """The classes that the arguments of an operator may have without being converted."""
    return tuple(_TYPES[str(argument.type)] for argument in op._schema.arguments)


def unwatched(args: tuple[Any, ...], types: tuple[frozenset[type], ...]) -> bool:
    """Whether a call with these arguments means the same without the dispatcher.

    Not to be traced: ask ``torch.compiler.is_compiling()`` first.
    """
    if torch._C._dispatch_tls_local_include_set().raw_repr() & ~_ALWAYS:
        return False
    if torch._C._is_torch_function_mode_enabled() or len(args) != len(types):
        return False
    brought = 0
    for x, known in zip(args, types, strict=True):
        kind = type(x)
        if kind not in known:
            return False
        if kind in _TENSORS:
            brought |= _dispatch_keys(x).raw_repr()
    return not brought & ~_ORDINARY
