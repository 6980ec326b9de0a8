"""Public names that are called otherwise now: they work for one more version, and say so."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

#: Old name -> new name. An entry is removed with the version after the one that renamed it.
OLD_NAMES = {
    "lln.moments.calibrate": "lln.moments.measure_scales",
}


def renamed(module: str, name: str) -> Any:
    """Find what a module called ``name``, with a warning; for ``__getattr__`` of that module.

    Raises:
        AttributeError: It never had such a name.
    """
    new = OLD_NAMES.get(f"{module}.{name}")
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(
        f"{module}.{name} is called {new} now; the old name goes with the next version",
        DeprecationWarning,
        stacklevel=3,
    )
    place, _, attribute = new.rpartition(".")
    return getattr(importlib.import_module(place), attribute)
