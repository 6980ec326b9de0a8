"""Recipes with some fields changed by name."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from lln.study.tasks import mechanism
from lln.study.train.config import TrainConfig

Config = TypeVar("Config", bound=Any)


def changed(start: Config, *, fixed: tuple[str, ...] = (), **changes: Any) -> Config:
    """A copy of a recipe; fields of it and of the TrainConfig in its ``train`` go by one name.

    Args:
        start: A frozen dataclass with a field ``train``.
        fixed: Its fields that a recipe decides alone.

    Raises:
        ValueError, TypeError: There is no such field, mechanism, or option of it.

    Example:
        >>> changed(recipe("image"), attention="performer", steps=500, seed=1)
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
    mechanism.check(train.attention, train.options)
    return dataclasses.replace(start, **others, train=train)
