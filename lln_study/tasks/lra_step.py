"""Time and memory of an update on a task of the Long Range Arena, for Table 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lln.records.rows import Row
from lln_study.data.arena.datasets import LRAData
from lln_study.tasks import experiment, lra
from lln_study.tasks.experiment import InSweeps, Key
from lln_study.tasks.lra import LRA, LRAConfig, reads_in_sweeps
from lln_study.tasks.lra import load as load
from lln_study.tasks.lra import reads as reads

IN_SWEEPS = InSweeps(lists={"attentions": "attention"}, reads=reads_in_sweeps)


def configure(task: str, **fields: Any) -> LRAConfig:
    """Change a recipe as :func:`lln_study.tasks.lra.configure` does, and leave only updates."""
    return experiment.only_updates(lra.configure(task, **fields))


class Step(experiment.Timed, LRA):
    """The updates of a task; how they are launched decides how long they take."""

    name = "lra_step"

    def __init__(self, config: LRAConfig, arrays: LRAData) -> None:
        super().__init__(config, arrays)
        launched = {"compile": config.train.compile, "graph": config.train.graph}
        self.settings = {**self.settings, "timed": launched}

    def facts(self) -> dict[str, Any]:
        return {"task": self.config.task, "data_mb": self.data_mb}


def key(config: LRAConfig, arrays: LRAData) -> Key:
    """Name the row of a run before it has run: digest and seed."""
    return experiment.key(Step(config, arrays), config.train)


def run(config: LRAConfig, arrays: LRAData, *, results: Path | None = None, **where: Any) -> Row:
    """Time updates; ``where`` is not needed, as nothing is kept of them."""
    return experiment.time_updates(Step(config, arrays), config.train, results)
