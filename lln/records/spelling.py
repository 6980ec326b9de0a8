"""Options by the names that stored rows have: what names a row must not change with the API.

``near`` was four options, ``diag_block``, ``diag_overlap``, ``sinks`` and ``scale``, and its
``joint`` was ``mix="joint"``, which "lln_nearfar" did not have to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STORED = {"block": "diag_block", "overlap": "diag_overlap", "sinks": "sinks", "scale": "scale"}


def as_stored(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as rows had it from the first on: for digests, and for nothing else.

    Args:
        configuration: As JSON holds it, with ``options`` beside ``attention``, at any depth.
    """
    found = {}
    for name, value in configuration.items():
        if name == "options" and isinstance(value, Mapping):
            found[name] = _stored_options(value, str(configuration.get("attention")))
        else:
            found[name] = as_stored(value) if isinstance(value, Mapping) else value
    return found


def _stored_options(options: Mapping[str, Any], attention: str) -> dict[str, Any]:
    near = options.get("near")
    if near is None:
        return dict(options)
    field = dict(near) if isinstance(near, Mapping) else {"block": near}
    found = {name: value for name, value in options.items() if name != "near"}
    found |= {_STORED[name]: value for name, value in field.items() if name in _STORED and value}
    if field.get("joint") and attention != "lln_nearfar":
        found["mix"] = "joint"
    return found


def as_given(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of a row of any age as it is given today; the inverse of the other."""
    found = {}
    for name, value in configuration.items():
        if name == "options" and isinstance(value, Mapping):
            found[name] = _given_options(value)
        else:
            found[name] = as_given(value) if isinstance(value, Mapping) else value
    return found


def _given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    if "diag_block" not in options:
        return dict(options)
    field = {name: options[old] for name, old in _STORED.items() if options.get(old)}
    joint = options.get("mix") == "joint"
    field |= {"joint": True} if joint else {}
    near = field["block"] if len(field) == 1 else field
    gone = {*_STORED.values()} - {"diag_block"} | ({"mix"} if joint else set())
    return {
        "near" if name == "diag_block" else name: near if name == "diag_block" else value
        for name, value in options.items()
        if name not in gone
    }
