"""Image classification in a sweep."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from lln.study.data import images
from lln.study.sweep.jobs import Key, Place, Spec
from lln.study.tasks import vit


def keys(spec: Spec, place: Place) -> list[Key]:
    config = _config(spec)
    return [(vit.digest(config, _pictures(config, place.data)), config.train.seed)]


def run(spec: Spec, place: Place) -> None:
    config = _config(spec)
    pictures = _pictures(config, place.data)
    place.add("vit", vit.run(config, pictures, folder=place.folder, tensorboard=False))


def _config(spec: Spec) -> vit.ViTRun:
    fields = {name: value for name, value in spec.items() if name != "recipe"}
    return vit.recipe(spec.get("recipe", "paper"), **fields)


def _pictures(config: vit.ViTRun, folder: Path | None) -> images.Images:
    if config.recipe == "digits":
        return _read(None, config.side)
    return _read(folder or os.environ.get("LLN_DATA") or None, config.side)


@lru_cache(maxsize=2)
def _read(source: str | Path | None, side: int | None) -> images.Images:
    return images.load(source, side=side)
