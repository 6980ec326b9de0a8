"""``--set KEY=VALUE``: fields of a run by their names in sweep files, typed by its dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import typer

from lln.cli.options import mechanism_options, value_of

LIST = "list"  # `--set list` shows the keys instead of training
FLAGS = {"attention": "--attention", "recipe": "--recipe", "task": "--task"}
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def fields_of(start: Any) -> dict[str, Any]:
    """Types of the fields of a configuration and of its ``train``, by name."""
    found = typing.get_type_hints(type(start))
    inner = found.pop("train", None)
    if inner is not None:
        found |= typing.get_type_hints(inner)
    return {name: kind for name, kind in found.items() if typing.get_origin(kind) is not ClassVar}


def read_settings(
    pairs: Sequence[str] | None, start: Any, *, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Read what ``--set`` was given as arguments of ``configure``.

    Args:
        start: The configuration that is changed; a dataclass.
        options: Names of the mechanism's options; none where there is no mechanism to choose.

    Raises:
        typer.BadParameter: A pair is not KEY=VALUE.
        ValueError: There is no such key, or its value is of another type; says which is nearest.

    Example:
        >>> read_settings(["steps=500", "options.conv=33"], configure("roberta-tiny"), ...)
        {'steps': 500, 'options': {'conv': 33}}
    """
    kinds = {name: kind for name, kind in fields_of(start).items() if name not in FLAGS}
    changes: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for pair in pairs or ():
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise typer.BadParameter(
                f"--set {pair!r} is not KEY=VALUE, such as steps=500; --set {LIST} shows the keys"
            )
        owner, _, name = key.partition(".")
        if key == "options" and "options" in kinds:
            chosen.update(_whole_options(text))
        elif owner == "options" and name in options:
            chosen[name] = value_of(text)
        elif key in kinds:
            changes[key] = _typed(key, text, kinds[key])
        else:
            raise _unknown(key, [*kinds, *(f"options.{option}" for option in options)])
    return changes | ({"options": chosen} if "options" in kinds else {})


def _whole_options(text: str) -> dict[str, Any]:
    """``recommended``, or all options as JSON."""
    if text == "recommended":
        return mechanism_options([text])
    value = value_of(text)
    if not isinstance(value, dict):
        raise ValueError(
            f"--set options={text}: give options one by one, options.near=32, as JSON, "
            "'options={\"near\": 32}', or options=recommended"
        )
    return value


def _unknown(key: str, known: Sequence[str]) -> ValueError:
    """The error of a key that there is not, with the nearest one."""
    if key in FLAGS:
        return ValueError(f"--set {key}=…: that is {FLAGS[key]}")
    option = f"options.{key}"
    close = [option] if option in known else difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}? --set {LIST} shows all" if close else ""
    there = hint or f"there are {', '.join(sorted(known))}"
    return ValueError(f"--set {key}=…: there is no such key; {there}")


def _typed(key: str, text: str, kind: Any) -> Any:
    """Read a value as the type of its field."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    wanted = next(each for each in kinds if each is not type(None))
    try:
        if wanted is bool:
            return WORDS[text.lower()]
        if wanted is int:
            return int(text)
        if wanted is float:
            return float(text)
        if typing.get_origin(wanted) is tuple:
            inner = typing.get_args(wanted)[0]
            return tuple(inner(part) for part in text.strip("[]() ").split(",") if part.strip())
    except (ValueError, KeyError):
        names = {bool: "true or false", int: "a whole number", float: "a number"}
        said = names.get(wanted, "a list of numbers, such as 5e-5,1e-4")
        raise ValueError(f"--set {key}={text}: {key} is {said}") from None
    return text


def show_settings(start: Any, options: Mapping[str, Any]) -> None:
    """Print the keys of ``--set`` with the values they have if they are left alone."""
    given: dict[str, Any] = {}
    for owner in (start, getattr(start, "train", None)):
        if owner is not None:
            given |= {item.name: getattr(owner, item.name) for item in dataclasses.fields(owner)}
    shown = {key: value for key, value in given.items() if key not in {*FLAGS, "train", "options"}}
    shown |= {f"options.{key}": value for key, value in options.items()}
    width = max(map(len, shown))
    for key, value in shown.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else json.dumps(value)
        typer.echo(f"{key:{width}}  {value if isinstance(value, str) else text}".rstrip())
