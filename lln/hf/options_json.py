"""Options of an attention as config.json holds them."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from lln.moments import MomentFit
from lln.ops.window.near import Near


def to_json(options: dict[str, Any]) -> dict[str, Any]:
    """Options as config.json can hold them; α and β are among the weights."""
    kept = {name: value for name, value in options.items() if name not in ("alpha", "beta")}
    for name, value in kept.items():
        if isinstance(value, MomentFit):
            kept[name] = dataclasses.asdict(value)
        elif isinstance(value, Near):
            kept[name] = value.to_json()
        elif isinstance(value, Tensor):
            kept[name] = value.tolist()
    return kept


def from_json(options: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`to_json`."""
    return {
        name: MomentFit(**value) if name == "method" and isinstance(value, dict) else value
        for name, value in options.items()
    }
