"""Linear Log-Normal (LLN) attention for PyTorch (arXiv:2311.13541).

Public names load on first use, so ``import lln`` costs nothing until something is called.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from lln import distributed, hf, instruments, moments, nn, onnx
    from lln.functional import attention, attention_varlen, prefill, which
    from lln.moments import match_moments
    from lln.ops.linear.state import State
    from lln.ops.linear.summarize import read, summarize
    from lln.ops.window.near import Near
    from lln.zoo import create, describe, list_mechanisms

_PUBLIC = {
    "attention": "lln.functional",
    "attention_varlen": "lln.functional",
    "prefill": "lln.functional",
    "summarize": "lln.ops.linear.summarize",
    "read": "lln.ops.linear.summarize",
    "State": "lln.ops.linear.state",
    "Near": "lln.ops.window.near",
    "match_moments": "lln.moments",
    "which": "lln.functional",
    "create": "lln.zoo",
    "list_mechanisms": "lln.zoo",
    "describe": "lln.zoo",
}
_MODULES = ("distributed", "hf", "instruments", "moments", "nn", "onnx")
_NEEDS = {"hf": "transformers", "onnx": "onnx"}  # extras of the same names install them

__all__ = [
    "Near",
    "State",
    "attention",
    "attention_varlen",
    "create",
    "describe",
    "distributed",
    "hf",
    "instruments",
    "list_mechanisms",
    "match_moments",
    "moments",
    "nn",
    "onnx",
    "prefill",
    "read",
    "summarize",
    "which",
]
# `from lln import *` works without the extras, too
if importlib.util.find_spec(_NEEDS["hf"]) is None:
    __all__.remove("hf")
if importlib.util.find_spec(_NEEDS["onnx"]) is None:
    __all__.remove("onnx")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"lln.{name}")
    else:
        raise AttributeError(f"module 'lln' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
