"""``--set KEY=VALUE``: fields of a run by the names that sweep files use, typed by its dataclasses.

The flags of 0.1.0 are rewritten to it before a command sees them, with a note.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand

from lln.study.train.runfolder import is_first_process

LIST = "list"  # `--set list` shows the keys instead of training
FLAGS = {"attention": "--attention", "recipe": "--recipe", "task": "--task"}
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def value_of(text: str) -> Any:
    """JSON, or the words as they are: ``32``, ``true``, ``[1, 2]``, ``entropy``."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def mechanism_options(pairs: Iterable[str] | None, flag: str = "--set") -> dict[str, Any]:
    """``["diag_block=32", "method=entropy"]`` as a dictionary; values are JSON or words.

    "recommended" stands for all of :func:`lln.nn.recommended`, for encoders.

    Args:
        flag: Of the command line that they come from.
    """
    found: dict[str, Any] = {}
    for pair in pairs or ():
        if pair == "recommended":
            from lln.nn import recommended

            found.update(recommended("encoder"))
            continue
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise typer.BadParameter(
                f"{flag} {pair!r} is not KEY=VALUE, such as diag_block=32, nor 'recommended'"
            )
        found[key] = value_of(value)
    return found


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
            f"--set options={text}: give options one by one, options.diag_block=32, as JSON, "
            "'options={\"diag_block\": 32}', or options=recommended"
        )
    return value


def _unknown(key: str, known: Sequence[str]) -> ValueError:
    """The error of a key that there is not, with the nearest one."""
    if key in FLAGS:
        return ValueError(f"--set {key}=…: that is {FLAGS[key]}")
    close = difflib.get_close_matches(key, known, n=1)
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


def rewritten(words: Sequence[str], old: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Words of a command line with old flags as ``--set``, and what each flag became.

    Args:
        old: Flag -> key; "key=VALUE" for a flag without a word after it, "key+" for one that is
            repeated, "key." for one that takes KEY=VALUE itself.
    """
    kept: list[str] = []
    notes: dict[str, str] = {}
    lists: dict[str, list[str]] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            kept += [word, *queue]
            break
        flag, sign, value = word.partition("=")
        key = old.get(flag)
        if key is None or not flag.startswith("--"):
            kept.append(word)
            continue
        if "=" in key:
            kept += ["--set", key]
            notes[flag] = f"--set {key}"
            continue
        if not sign:
            if not queue:  # the parser says what is missing
                kept.append(word)
                continue
            value = queue.pop(0)
        if key.endswith("+"):
            lists.setdefault(key[:-1], []).append(value)
            notes[flag] = f"--set {key[:-1]}=A,B"
        elif key.endswith("."):
            whole = value == "recommended"
            kept += ["--set", f"{key[:-1]}={value}" if whole else f"{key}{value}"]
            notes[flag] = f"--set {key}KEY=VALUE"
        else:
            kept += ["--set", f"{key}={value}"]
            notes[flag] = f"--set {key}=VALUE"
    for key, values in lists.items():
        kept += ["--set", f"{key}={','.join(values)}"]
    return kept, notes


class WithOldFlags(TyperCommand):
    """A command that takes the flags of 0.1.0, too, and says what they are called now."""

    old: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words, notes = rewritten(args, self.old)
        if notes and is_first_process():
            said = ", ".join(f"{flag} is {new}" for flag, new in notes.items())
            typer.echo(
                f"{ctx.command_path}: {said} now; the old flags go with the next version", err=True
            )
        return super().parse_args(ctx, words)


def with_old_flags(old: Mapping[str, str]) -> type[WithOldFlags]:
    """Make the class of a command whose flags were these."""
    return type("WithOldFlags", (WithOldFlags,), {"old": dict(old)})
