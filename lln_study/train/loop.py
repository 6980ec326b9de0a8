"""The training loop: one for all tasks, resumable at any moment, the same on any number of devices.

    class Copy(Task):                      # a task: see tests/lln_study/train/toy.py for all of it
        name, metric, better = "copy", "loss", "lower"
        ...
    summary = train(Copy(), TrainConfig(steps=200), Path("runs/copy"))

Nothing depends on the state of a loader or a generator: batches, dropout and the learning rate are
functions of the step. So `kill -9` and the same call again give the same weights, bit for bit on a
CPU in float32, and the same curve.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln.device.precision import tf32_products
from lln.instruments.monitor import DEFAULT_MEASURES, monitor
from lln.report.progress import Progress, Silent
from lln_study.train import checkpoint, processes, runfolder
from lln_study.train.config import TrainConfig
from lln_study.train.engine import Engine, stored
from lln_study.train.interruption import held_back
from lln_study.train.runlog import RunLog
from lln_study.train.task import Summary, Task

HOPELESS = 100  # updates in a row that had to be left out


def train(
    task: Task,
    config: TrainConfig,
    folder: Path | None,
    *,
    progress: Progress | None = None,
    tensorboard: bool = True,
    test: bool = False,
) -> Summary:
    """Train, or continue what an earlier call in the same folder has left.

    Args:
        folder: Of the run: run.json, curve.jsonl, monitor.jsonl, tensorboard/, checkpoints/, best
            and last. None keeps nothing.
        progress: Shows how far it is; silent by default.
        test: Evaluate on "test" too, once, with the last weights.

    Raises:
        ValueError: The folder holds another run, or another process is at work in it.

    Example:
        >>> summary = train(task, TrainConfig(steps=100, eval_every=20), Path("runs/a"))
        >>> summary.metrics["loss"], summary.best
    """
    group = processes.join()
    on_gpu = group.device.type == "cuda"
    folder = None if folder is None else Path(folder)
    with runfolder.held(folder):
        task.prepare(group.device)
        if folder is not None and group.rank == 0:
            runfolder.compare(folder, identity(task, config), _configuration(task, config))
        group.wait()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        # what autocast leaves in float32 may be TF32 in a run of half precision
        with tf32_products(on_gpu and config.precision != "fp32"):
            engine = Engine(group, task.build(), task, config)
            run = _Run(task, config, folder, engine, progress or Silent(), tensorboard)
            with contextlib.closing(run):
                return run.to_the_end(test=test)


class _Run:
    """The state of a run between two updates."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        folder: Path | None,
        engine: Engine,
        progress: Progress,
        tensorboard: bool,
    ) -> None:
        self.task, self.config, self.folder, self.engine = task, config, folder, engine
        self.step, self.saved, self.since_best = 0, -1, 0
        self.best: tuple[float, int] | None = None
        self.kept: tuple[int, dict[str, Tensor]] | None = None  # the best step and its weights
        self.metrics: dict[str, float] = {}
        self.loss: float | None = None
        self.diverged = self.stopped = False
        self.skipped = self.stuck = 0  # updates without a finite gradient: in all, in a row
        self.seconds = self.first_seconds = 0.0
        self.counted, self.untimed = 0, engine.untimed  # updates `seconds` is about, and not
        self.mark = time.perf_counter()
        self.main = engine.rank == 0
        self.progress = progress if self.main else Silent()
        self._resume()
        self.resumed = self.step
        self.log = None
        if folder is not None and self.main:
            self.log = RunLog(folder, step=self.step, tensorboard=tensorboard)

    def to_the_end(self, *, test: bool) -> Summary:
        """Run all updates that are left."""
        config = self.config
        if self.step >= config.steps or self.stopped:
            self.progress.finished(self.step)
        else:
            self.progress.start(config.steps, self.step)
        if self.step == 0 and config.eval_every and self.engine.evaluate(self.task.is_ready):
            self._evaluate()
        self.mark = time.perf_counter()
        with held_back() as is_asked_to_stop:
            self._updates(is_asked_to_stop)
        if not self.metrics:  # it had ended before
            self.metrics = self._measure("valid")
        self.diverged = self.diverged or self._came_to_nothing()
        return self._summary(self._measure("test") if test else {})

    def _updates(self, is_asked_to_stop: Callable[[], bool]) -> None:
        config = self.config
        while self.step < config.steps and not self.stopped:
            self._update()
            if self.step == self.resumed + 1:
                self._claim()
            last = self.step == config.steps
            if self.step % config.log_every == 0 or last:
                self._note()
            if (config.eval_every and self.step % config.eval_every == 0) or last or self.stopped:
                self._off_the_clock(self._evaluate)
            due = bool(config.save_every) and self.step % config.save_every == 0
            # of several processes each would stop at a step of its own, and wait for the others
            interrupted = self.engine.world == 1 and is_asked_to_stop()
            if due or last or self.stopped or interrupted:
                self._off_the_clock(self._save)
            if interrupted and not last:
                raise KeyboardInterrupt

    def _claim(self) -> None:
        """The folder is this run's from its first update on; what cannot run does not take it."""
        if self.folder is not None and self.main:
            configuration = _configuration(self.task, self.config)
            runfolder.claim(self.folder, identity(self.task, self.config), configuration)

    def _came_to_nothing(self) -> bool:
        """Whether half of its updates were left out, or its loss is NaN, however short it was."""
        broken = not all(map(math.isfinite, self.metrics.values()))
        return broken or (self.skipped > 0 and 2 * self.skipped >= self.step)

    def _update(self) -> None:
        every = self.config.monitor_every
        if every and self.step % every == 0:
            self._off_the_clock(self._measured_update)
        else:
            self.engine.update(self.step)
            self._count()
        self.step += 1
        self.progress.at(self.step)

    def _count(self) -> None:
        """Time all updates but the first of this process, which compile, allocate and record."""
        if self.untimed == 0:
            self.counted += 1
            return
        _wait(self.engine.device)
        now = time.perf_counter()
        self.first_seconds += now - self.mark
        self.untimed, self.mark = self.untimed - 1, now

    def _measured_update(self) -> None:
        """Update uncompiled, since compiled code passes the monitor by; it sees one micro-batch."""
        engine, accumulation = self.engine, self.config.accumulation
        measures = self.config.measures or DEFAULT_MEASURES
        options = {"every": accumulation, "measures": measures, "first_step": self.step}
        with monitor(engine.root, **options) as rows:
            engine.update(self.step, self.task.loss)
        if self.log is not None:
            self.log.monitor([{**row, "step": self.step} for row in rows if "layer" in row])

    def _off_the_clock(self, action) -> None:
        """Do something that is not training."""
        _wait(self.engine.device)
        self.seconds += time.perf_counter() - self.mark
        action()
        _wait(self.engine.device)
        self.mark = time.perf_counter()

    def _note(self) -> None:
        """Read the sums of the last updates, the only time a GPU is waited for."""
        losses, terms, broken = self.engine.read_sums()
        self.engine.set_sums([0.0] * 3)
        now = time.perf_counter()
        self.seconds += now - self.mark
        self.mark = now
        self.loss = losses / terms if terms else math.nan
        row = {
            "kind": "train",
            "step": self.step,
            "loss": self.loss,
            "learning_rate": self.config.rate(self.step - 1),
            "gradient_norm": self.engine.gradient_norm(),
            "loss_scale": self.engine.scaler.get_scale()
            if self.engine.scaler.is_enabled()
            else None,
            "skipped": round(broken),
            "tokens": self.step * self.config.batch_size * self.task.tokens,
            "seconds": round(self.seconds, 3),
        }
        if self.log is not None:
            self.log.curve(row)
        self.progress.train(row, self._tokens_per_second())
        self.skipped += round(broken)
        updates = (self.step - 1) % self.config.log_every + 1
        self.stuck = self.stuck + updates if round(broken) >= updates else 0
        if self.stuck >= HOPELESS:
            self.diverged = self.stopped = True

    def _measure(self, split: str) -> dict[str, float]:
        return dict(self.engine.evaluate(self.task.evaluate, split))

    def _evaluate(self) -> None:
        self.metrics = self._measure("valid")
        value = self.metrics.get(self.task.metric, math.nan)
        sign = 1 if self.task.better == "higher" else -1
        finite = math.isfinite(value) and all(map(math.isfinite, self.metrics.values()))
        if finite and (self.best is None or sign * value > sign * self.best[0]):
            self.best, self.since_best = (value, self.step), 0
            if self.task.keeps_best:
                self.kept = self.step, self.engine.copied_weights()
        else:
            self.since_best += 1
        row = {"kind": "eval", "step": self.step, **self.metrics}
        row |= {"tokens": self.step * self.config.batch_size * self.task.tokens}
        if self.log is not None:
            self.log.curve({**row, "seconds": round(self.seconds, 3)})
        self.progress.evaluation(row)
        if self.config.patience and self.since_best >= self.config.patience:
            self.stopped = True
        improved = self.best is not None and self.best[1] == self.step
        if improved and self.config.save_every and self.step > 0:
            self._save()

    def _save(self) -> None:
        if self.folder is None or self.config.keep == 0 or self.saved == self.step:
            return
        engine = self.engine
        model, moments, sums = (
            engine.model_tensors(),
            engine.optimizer_tensors(),
            engine.read_sums(),
        )
        self.saved = self.step
        if not self.main:
            return
        state = {
            "step": self.step,
            "sums": sums,
            "scaler": engine.scaler.state_dict(),
            "best": self.best,
            "since_best": self.since_best,
            "stopped": self.stopped,
            "diverged": self.diverged,
            "skipped": self.skipped,
            "stuck": self.stuck,
            "loss": None if self.loss is None or not math.isfinite(self.loss) else self.loss,
            "seconds": self.seconds,
            "first_seconds": self.first_seconds,
            "counted": self.counted,
        }
        parent = self.folder / "checkpoints"
        written = checkpoint.write(
            parent,
            model=model,
            optimizer=moments,
            state=state,
            identity=identity(self.task, self.config),
            extra=lambda inside: self.task.save(engine.model, inside),
        )
        self._point(written)
        best = None if self.best is None else self.best[1]
        checkpoint.prune(written, self.config.keep, best)

    def _point(self, last: Path) -> None:
        """Let "last" and "best" lead to their checkpoints; a best one that is not kept has none."""
        assert self.folder is not None
        checkpoint.point(self.folder / "last", last)
        best = None if self.best is None else checkpoint.place(last.parent, self.best[1])
        checkpoint.point(self.folder / "best", best if best and best.exists() else None)

    def _resume(self) -> None:
        if self.folder is None:
            return
        found = checkpoint.newest(self.folder / "checkpoints", identity(self.task, self.config))
        if found is None:
            return
        try:
            self._continue_from(found)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"checkpoint {found.folder} does not fit this run ({type(error).__name__}: "
                f"{error}); remove it to continue from the one before"
            ) from error
        if self.main:
            self._point(found.folder)  # a kill may have come before the links were set

    def _continue_from(self, found: checkpoint.Checkpoint) -> None:
        state = found.state
        self.engine.load_weights(found.tensors(checkpoint.MODEL))
        self.engine.load_moments(found.tensors(checkpoint.OPTIMIZER))
        self.engine.set_sums(state["sums"])
        self.engine.scaler.load_state_dict(state["scaler"])
        self.step = self.saved = state["step"]
        self.best = None if state["best"] is None else tuple(state["best"])
        self.since_best, self.loss = state["since_best"], state["loss"]
        self.stopped = state["stopped"]
        self.diverged, self.stuck, self.skipped = (
            state[name] for name in ("diverged", "stuck", "skipped")
        )
        self.seconds, self.counted = state["seconds"], state["counted"]
        self.first_seconds = state["first_seconds"]

    def _tokens_per_second(self) -> float | None:
        if not self.counted or not self.seconds or not self.task.tokens:
            return None
        return self.counted * self.config.batch_size * self.task.tokens / self.seconds

    def _summary(self, test: dict[str, float]) -> Summary:
        engine, cuda = self.engine, self.engine.device.type == "cuda"
        engine.wrapped.eval()
        return Summary(
            steps=self.step,
            resumed=self.resumed,
            metrics=self.metrics,
            test=test,
            best=self.best,
            loss=self.loss,
            parameters=sum(parameter.numel() for parameter in engine.model.parameters()),
            seconds=self.seconds,
            first_seconds=self.first_seconds,
            step_ms=1e3 * self.seconds / self.counted if self.counted else None,
            tokens_per_second=self._tokens_per_second(),
            peak_mb=torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
            processes=engine.world,
            skipped=self.skipped,
            diverged=self.diverged,
            device=str(engine.device),
            model=engine.model,
            test_best=self._test_best,
        )

    def _test_best(self) -> dict[str, float]:
        if self.best is not None and self.best[1] != self.step:
            self.engine.load_weights(self._best_weights(self.best[1]))
        return self._measure("test")

    def _best_weights(self, step: int) -> Mapping[str, Tensor]:
        """The weights of a step: kept in memory, or in a checkpoint of an earlier call."""
        if step == 0:
            return stored(self.task.build())
        if self.kept is not None and self.kept[0] == step:
            return self.kept[1]
        found = None if self.folder is None else checkpoint.place(self.folder / "checkpoints", step)
        if found is None or not found.exists():
            raise ValueError(
                f"{self.folder} has no checkpoint of step {step}, the best on validation, so the "
                "run cannot be tested; remove the folder to train again, with save_every "
                "to keep the best"
            )
        owner = identity(self.task, self.config)
        reason = checkpoint.fault(found, owner, unread=(checkpoint.OPTIMIZER,))
        if reason is not None:
            raise ValueError(
                f"checkpoint {found} is the best on validation and cannot be tested: {reason}; "
                "copy it again, or remove the folder of the run to train again"
            )
        return checkpoint.Checkpoint(found, {}).tensors(checkpoint.MODEL)

    def close(self) -> None:
        self.progress.stop()
        self.engine.end_training()
        if self.log is not None:
            self.log.close()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def identity(task: Task, config: TrainConfig) -> str:
    """Names a run and its checkpoints: the task, what is computed, the seed."""
    return f"{task.name}-{config.digest(task.settings)}-seed{config.seed}"


def _configuration(task: Task, config: TrainConfig) -> dict[str, Any]:
    return {"task": task.name, **config.as_dict(), **task.settings}
