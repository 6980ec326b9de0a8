"""A tiny masked language model on the bundled text: softmax, LLN+Diag, and both with `conv`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lln.experiments import mlm
from lln.experiments.config import TrainConfig
from lln.experiments.data.text import BUNDLED
from lln.experiments.progress import Silent
from lln.instruments.rows import read_rows

Row = dict[str, Any]
CONV = {"conv": 33}
# label -> (attention, its options)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "LLN+Diag": ("lln_diag", {}),
    "softmax, conv": ("softmax", CONV),
    "LLN+Diag, conv": ("lln_diag", CONV),
}
STEPS, QUICK_STEPS = 400, 20


class _Steps(Silent):
    """Tells how far the run is."""

    def __init__(self, label: str, watch: Callable[[str, int], None]) -> None:
        self.label, self.watch = label, watch

    def at(self, step: int) -> None:
        self.watch(self.label, step)


def configuration(
    attention: str, options: Mapping[str, Any] | None = None, *, quick: bool = False
) -> mlm.MLMConfig:
    """The run of one attention; the same for all but for that."""
    steps = QUICK_STEPS if quick else STEPS
    evaluations = 2 if quick else 5
    every = {"eval_every": steps // evaluations, "log_every": steps // 20}
    every |= {"save_every": 0, "keep": 0}
    chosen = {"attention": attention, "options": dict(options or {})}
    return mlm.configure("roberta-tiny", **chosen, steps=steps, **every)


def train(
    *, quick: bool = False, watch: Callable[[str, int], None]
) -> tuple[list[Row], list[Row], str]:
    """Result rows, curve rows (with ``attention``), and a line about the setting."""
    results, curves = [], []
    config = configuration("softmax", quick=quick)
    for label, (attention, options) in RUNS.items():
        config = configuration(attention, options, quick=quick)
        with tempfile.TemporaryDirectory() as folder:
            done = mlm.run(
                config,
                data=BUNDLED,
                folder=Path(folder),
                progress=_Steps(label, watch),
                tensorboard=False,
            )
            rows = read_rows(Path(folder) / "curve.jsonl")
        results.append({"attention": label, **done.row})
        shown = ("kind", "step", "loss")
        curves += [{"attention": label, **{key: row[key] for key in shown}} for row in rows]
    return results, curves, _about(config, config.train)


def _about(model: mlm.MLMConfig, training: TrainConfig) -> str:
    return (
        f"RoBERTa of {model.layers} layers of {model.width}, N = {model.length}, "
        f"diagonal blocks of {model.block}, {training.steps} updates of {training.batch_size} "
        f"rows, learning rate {training.learning_rate:g}, seed {training.seed}, Tiny Shakespeare"
    )
