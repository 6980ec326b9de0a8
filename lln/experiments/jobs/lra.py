"""The Long Range Arena in a sweep; ``"throughput": true`` only times updates, for Table 4."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from lln.experiments import lra
from lln.experiments.data.lra import LRAData
from lln.experiments.jobs import Key, Place, Spec


def keys(spec: Spec, place: Place) -> list[Key]:
    config, timed = _plan(spec)
    arrays = _arrays(config.task, config.train_size, place.data)
    return [(lra.digest(config, arrays, timed=timed), config.train.seed)]


def run(spec: Spec, place: Place) -> None:
    config, timed = _plan(spec)
    arrays = _arrays(config.task, config.train_size, place.data)
    if timed:
        place.add("lra", lra.throughput(config, arrays))
    else:
        place.add("lra", lra.run(config, arrays, folder=place.folder, tensorboard=False))


def _plan(spec: Spec) -> tuple[lra.LRAConfig, bool]:
    fields = {name: value for name, value in spec.items() if name != "throughput"}
    config = lra.recipe(**fields)
    timed = bool(spec.get("throughput"))
    return (lra.as_timed(config) if timed else config), timed


@lru_cache(maxsize=8)
def _arrays(task: str, train_size: int | None, folder: Path | None) -> LRAData:
    """Generated before the first run starts, and then read from the cache by all of them."""
    return lra.load(lra.recipe(task, train_size=train_size), folder)
