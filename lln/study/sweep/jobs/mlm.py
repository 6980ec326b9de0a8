"""Masked language modelling in a sweep; fine-tunings may follow."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lln.records.rows import read_rows
from lln.study.data import text, tokens
from lln.study.sweep.jobs import Key, Place, Spec
from lln.study.tasks import mlm
from lln.study.tasks.pretrained import Pretrained
from lln.study.train.runlog import CURVE, MONITOR, thinned


def keys(spec: Spec, place: Place) -> list[Key]:
    config, settings = _plan(spec, place)
    return [(config.train.digest(settings), config.train.seed)]


def run(spec: Spec, place: Place) -> None:
    done = mlm.run(
        mlm.configure(**spec),
        data=place.data,
        folder=place.folder,
        tensorboard=False,
    )
    place.add("mlm", done.row)
    for name in (CURVE, MONITOR):
        path = place.folder / name
        if path.exists():
            place.keep_curves(done.row, f"{Path(name).stem}s", thinned(read_rows(path)))


def pretrained(spec: Spec, place: Place) -> Pretrained:
    """What a fine-tuning will find in the folder of this run, before it has run."""
    config, settings = _plan(spec, place)
    digest = config.train.digest(settings)
    identity = f"mlm-{digest}-seed{config.train.seed}"
    return Pretrained(place.folder, identity, {**config.train.as_dict(), **settings})


def _plan(spec: Spec, place: Place) -> tuple[mlm.MLMConfig, Mapping[str, Any]]:
    config = mlm.configure(**spec)
    return config, mlm.MLM(config, encoded(config, place)).settings


def encoded(config: mlm.MLMConfig, place: Place) -> tokens.Encoded:
    """The corpus of a run, looked up once for all runs of a sweep that share it."""
    return _encoded(place.data, config.corpus, config.vocabulary)


@lru_cache(maxsize=4)
def _encoded(data: Path | None, corpus: str | None, vocabulary: int) -> tokens.Encoded:
    return tokens.encode(text.find(data, corpus), vocabulary)
