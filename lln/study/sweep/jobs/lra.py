"""The Long Range Arena in a sweep.

``"throughput": true`` only times updates, for Table 4: of all mechanisms in ``"attentions"``, one
after the other in one process.
"""

from __future__ import annotations

import gc
from functools import lru_cache
from pathlib import Path

import torch

from lln.study.data.arena.datasets import LRAData
from lln.study.sweep.jobs import Key, Place, Spec
from lln.study.tasks import lra
from lln.study.train.runlog import has_row


def keys(spec: Spec, place: Place) -> list[Key]:
    timed = bool(spec.get("throughput"))
    return [
        (lra.digest(config, _arrays(config, place), timed=timed), config.train.seed)
        for config in configs(spec)
    ]


def run(spec: Spec, place: Place) -> None:
    if not spec.get("throughput"):
        (config,) = configs(spec)
        arrays = _arrays(config, place)
        place.add("lra", lra.run(config, arrays, folder=place.folder, tensorboard=False))
        return
    for config, key in zip(configs(spec), keys(spec, place), strict=True):
        if not has_row(place.results("lra"), *key):
            place.add("lra", lra.throughput(config, _arrays(config, place)))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def configs(spec: Spec) -> list[lra.LRAConfig]:
    """One, or one per mechanism that is timed."""
    fields = {
        name: value for name, value in spec.items() if name not in ("throughput", "attentions")
    }
    if not spec.get("throughput"):
        if "attentions" in spec:
            raise ValueError('"attentions" is for "throughput": true; put them into "grid"')
        return [lra.recipe(**fields)]
    names = spec.get("attentions") or [spec.get("attention", "lln_diag")]
    return [lra.as_timed(lra.recipe(**{**fields, "attention": name})) for name in names]


def _arrays(config: lra.LRAConfig, place: Place) -> LRAData:
    return _load(config.task, config.train_size, place.data)


@lru_cache(maxsize=8)
def _load(task: str, train_size: int | None, folder: Path | None) -> LRAData:
    """Generated before the first run starts, and then read from the cache by all of them."""
    return lra.load(lra.recipe(task, train_size=train_size), folder)
