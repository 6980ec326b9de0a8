"""A recipe with some fields changed by name, looked up before any data are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from lln import zoo
from lln_study.tasks.models import softmax
from lln_study.train.config import TrainConfig

Config = TypeVar("Config", bound=Any)


def changed(start: Config, *, fixed: tuple[str, ...] = (), **changes: Any) -> Config:
    """Copy a recipe; fields of it and of the TrainConfig in its ``train`` are changed by name.

    Args:
        start: A frozen dataclass with a field ``train``.
        fixed: Its fields that a recipe decides alone.

    Raises:
        ValueError, TypeError: There is no such field, mechanism, or option of it.

    Example:
        >>> changed(configure("image"), attention="performer", steps=500, seed=1)
    """
    inner = {item.name for item in dataclasses.fields(TrainConfig)}
    outer = {item.name for item in dataclasses.fields(start)} - {"train", *fixed}
    unknown = sorted(set(changes) - inner - outer)
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} is no field of a run; choose from "
            f"{', '.join(sorted(inner | outer))}"
        )
    asked = {name: value for name, value in changes.items() if name in inner}
    if "steps" in asked and "warmup" not in asked:  # a short run warms up in proportion
        asked["warmup"] = min(start.train.warmup, max(1, asked["steps"] // 10))
    if "betas" in asked:
        asked["betas"] = tuple(asked["betas"])
    others = {name: value for name, value in changes.items() if name in outer}
    train = dataclasses.replace(start.train, **asked)
    _check_mechanism(train.attention, train.options)
    return dataclasses.replace(start, **others, train=train)


def settings(config: Any) -> dict[str, Any]:
    """What a row says of a configuration beside the fields of its ``train``."""
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    del values["train"]
    return {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}


def _check_mechanism(attention: str, options: Mapping[str, Any]) -> None:
    """Refuse a name that is not in the zoo, and options that the mechanism does not have.

    Values are looked at when the model is built.
    """
    names = [*dict.fromkeys((*softmax.NAMES, *zoo.KNOWN))]
    if attention not in names:
        raise zoo.unknown_name("attention", attention, names)
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r} is no set of names and values, such as near=32")
    known = zoo.describe("softmax" if attention in softmax.NAMES else attention).defaults
    for option in options:
        if option not in known:
            raise TypeError(
                f"{option}= is not an option; {attention!r} takes {', '.join(known) or 'none'}"
            )
