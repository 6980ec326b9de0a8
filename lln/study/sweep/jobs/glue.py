"""Fine-tunings on GLUE in a sweep, after the pre-training they follow or from a given folder.

Starting a process takes longer than some tasks: ``task`` and ``seed`` may be lists, whose runs
follow each other in one process and have a row each.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

from lln.study.data.glue import find
from lln.study.sweep.jobs import Key, Place, Spec
from lln.study.tasks import glue
from lln.study.tasks.pretrained import Pretrained
from lln.study.train.runlog import has_row


def keys(spec: Spec, place: Place, pretrained: Pretrained | None = None) -> list[Key]:
    body = pretrained or Pretrained.find(_source(spec, place))
    return [
        (glue.digest(config, body, find(config.task, place.data).source), config.seed)
        for config in _configs(spec)
    ]


def run(spec: Spec, place: Place) -> None:
    with _cheap_collections():
        _run(spec, place)


@contextlib.contextmanager
def _cheap_collections() -> Iterator[None]:
    """Recording a graph collects garbage, among half a million objects that imports have made.

    With every learning rate that is tried comes a recording for each length.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run(spec: Spec, place: Place) -> None:
    source = _source(spec, place)
    body, splits = Pretrained.find(source), {}
    for config, (digest, seed) in zip(_configs(spec), keys(spec, place), strict=True):
        if has_row(place.results("glue"), digest, seed):
            continue
        if config.task not in splits:  # the seeds of a task follow each other
            splits = {config.task: glue.encoded(config, body, find(config.task, place.data))}
        folder = place.folder / f"{config.task}-seed{seed}"
        options = {"data_folder": place.data, "folder": folder, "tensorboard": False}
        place.add("glue", glue.run(config, source, splits=splits[config.task], **options))


def _configs(spec: Spec) -> list[glue.GlueConfig]:
    fields = {name: value for name, value in spec.items() if name not in ("from", "task", "seed")}
    if "task" not in spec:
        raise ValueError(f'a run "glue" has no "task": {spec}')
    tasks, seeds = (x if isinstance(x, list) else [x] for x in (spec["task"], spec.get("seed", 0)))
    return [glue.recipe(task, seed=seed, **fields) for task in tasks for seed in seeds]


def _source(spec: Spec, place: Place) -> Path:
    source = place.source or spec.get("from")
    if source is None:
        raise ValueError(
            'a run "glue" needs "from", the folder of a pre-trained model, unless it stands in '
            'the "then" of a run "mlm"'
        )
    return Path(source)
