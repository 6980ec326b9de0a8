"""A tiny masked language model on the bundled text: softmax, LLN+Diag, and both with `conv`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Any

from lln.device.processes import processes
from lln.device.threads import one_thread
from lln.records.rows import Row, read_rows
from lln.texts.text import BUNDLED
from lln_study.tasks import mlm
from lln_study.train.config import TrainConfig
from lln_study.train.runlog import CURVE

CONV = {"conv": 33}
# label -> (attention, its options)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "LLN+Diag": ("lln_diag", {}),
    "softmax, conv": ("softmax", CONV),
    "LLN+Diag, conv": ("lln_diag", CONV),
}
STEPS, QUICK_STEPS = 280, 20  # long enough for every run to leave its plateau


def configuration(
    attention: str, options: Mapping[str, Any] | None = None, *, quick: bool = False
) -> mlm.MLMConfig:
    """Configure the run of one attention; the runs differ in nothing else."""
    steps = QUICK_STEPS if quick else STEPS
    evaluations = 2 if quick else 4
    every = {"eval_every": steps // evaluations, "log_every": steps // 20}
    every |= {"save_every": 0, "keep": 0, "warmup": 2 if quick else 30}
    chosen = {"attention": attention, "options": dict(options or {})}
    return mlm.configure("roberta-tiny", **chosen, steps=steps, **every)


def train(
    *,
    quick: bool = False,
    workers: int | None = None,
    watch: Callable[[str, int], None],
) -> tuple[list[Row], list[Row], str]:
    """Return result rows, curve rows (with ``attention``), and a line about the setting.

    Args:
        workers: Runs at once, as processes of one thread each; None trains in this one.
        watch: Told a label and how many updates of its run are done, now and then.
    """
    results, curves = [], []
    with tempfile.TemporaryDirectory() as parent:
        places = {label: Path(parent) / str(i) for i, label in enumerate(RUNS)}
        for label, row in _trained(places, quick, workers, watch):
            results.append({"attention": label, **row})
            shown = ("kind", "step", "loss")
            rows = read_rows(places[label] / CURVE)
            curves += [{"attention": label, **{key: row[key] for key in shown}} for row in rows]
    config = configuration("softmax", quick=quick)
    return results, curves, _about(config, config.train)


def _trained(
    places: dict[str, Path],
    quick: bool,
    workers: int | None,
    watch: Callable[[str, int], None],
) -> Iterator[tuple[str, Row]]:
    """Yield each run's row, in the order of the runs."""
    if workers is None:
        for label, folder in places.items():
            yield label, _run(label, folder, quick)
            watch(label, _updates(folder))
        return
    with processes(min(workers, len(places))) as submit:
        # the longest first, which stand last
        runs = {label: submit(_run, label, places[label], quick) for label in reversed(places)}
        waiting = set(runs.values())
        while waiting:
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            for run in done:
                run.result()  # or its exception
            for label, folder in places.items():
                watch(label, _updates(folder))
        yield from ((label, runs[label].result()) for label in places)


def _run(label: str, folder: Path, quick: bool) -> Row:
    """Train one attention on one thread."""
    attention, options = RUNS[label]
    config = configuration(attention, options, quick=quick)
    with one_thread():
        encoded = mlm.load(BUNDLED, **mlm.reads(config))
        return mlm.run(config, encoded, folder=folder, tensorboard=False)


def _updates(folder: Path) -> int:
    """Count the updates a run has noted; 0 if it has not begun."""
    path = folder / CURVE
    rows = read_rows(path) if path.exists() else []
    return rows[-1]["step"] if rows else 0


def _about(model: mlm.MLMConfig, training: TrainConfig) -> str:
    return (
        f"RoBERTa of {model.layers} layers of {model.width}, N = {model.length}, "
        f"diagonal blocks of {model.block}, {training.steps} updates of {training.batch_size} "
        f"rows, learning rate {training.learning_rate:g}, seed {training.seed}, Tiny Shakespeare"
    )
