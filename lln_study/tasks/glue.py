"""Fine-tuning on GLUE: a pre-trained body, a classification head, the learning rate from a grid.

Only train and dev have labels. So a part of train is held out: it chooses learning rate and epoch,
and dev is looked at once, with the weights that were chosen.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.records.rows import Row, find_row
from lln.report.progress import Progress
from lln.texts import glue as data
from lln_study.data.pairs import Encoded, batches, bucket, encode, in_order
from lln_study.tasks import experiment, metrics
from lln_study.tasks.experiment import Asked, InSweeps, Key
from lln_study.tasks.pretrained import Pretrained
from lln_study.train import runfolder
from lln_study.train.config import TrainConfig, check_number, check_whole
from lln_study.train.loop import train
from lln_study.train.runlog import result_row
from lln_study.train.task import Summary, Task

EVALUATION_TOKENS = 65_536  # of a batch
PROTOCOL = (
    "learning rate and epoch chosen on a part of train that was held out; reported on dev, once"
)


@dataclass(frozen=True)
class GlueConfig:
    """A fine-tuning; see :func:`configure`.

    Attributes:
        rates: Learning rates that are tried; the best on held-out examples is reported.
        evaluations: Per epoch.
        max_length: Tokens that are kept of an example.
        dropout: Of embeddings, layers and head; attention has none.
    """

    task: str
    rates: tuple[float, ...] = (5e-5, 1e-4, 2e-4)
    epochs: int = 3
    batch_size: int = 32
    max_length: int = 128
    warmup: float = 0.06
    weight_decay: float = 0.1
    dropout: float = 0.1
    evaluations: int = 2
    precision: str = "fp32"
    compile: bool = False
    graph: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates:
            raise ValueError("rates is empty; pass at least one learning rate")
        for rate in self.rates:  # all of them before the first is tried
            check_number("rates", rate, "positive", lambda x: x > 0)
        for name in ("epochs", "batch_size", "max_length", "evaluations"):
            check_whole(name, getattr(self, name), least=1)
        check_number("warmup", self.warmup, "between 0 and 1", lambda x: 0 <= x <= 1)


def configure(task: str, **changes: Any) -> GlueConfig:
    """The usual settings of a task, some of them changed."""
    small = task in ("rte", "mrpc", "cola", "stsb")
    data.find_task(task)
    usual = GlueConfig(task)
    if small:
        usual = dataclasses.replace(usual, epochs=10, batch_size=16, evaluations=1)
    known = {item.name for item in dataclasses.fields(GlueConfig)} - {"task"}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} is no field of a fine-tuning; choose from "
            f"{', '.join(sorted(known))}"
        )
    if "rates" in changes:
        changes["rates"] = tuple(float(rate) for rate in changes["rates"])
    return dataclasses.replace(usual, **changes)


class Finetuning(Task):
    """Classification or regression of one or two texts."""

    name, metric, better = "glue", "score", "higher"
    keeps_best = True

    def __init__(
        self,
        config: GlueConfig,
        pretrained: Pretrained,
        splits: Mapping[str, Encoded],
        settings: Mapping[str, Any],
    ) -> None:
        self.config, self.pretrained, self.settings = config, pretrained, settings
        self.glue = data.find_task(config.task)
        self.splits = dict(splits)
        self.epoch: tuple[int, Tensor, list[int]] | None = None

    def prepare(self, device: torch.device) -> None:
        self.splits = {name: split.to(device) for name, split in self.splits.items()}

    def build(self) -> nn.Module:
        config = self.config
        return self.pretrained.classifier(self.glue.classes, config.seed, dropout=config.dropout)

    def batch(self, step: int, rows: slice) -> Mapping[str, Tensor]:
        epoch, inside = divmod(step, len(self.splits["train"]) // self.config.batch_size)
        if self.epoch is None or self.epoch[0] != epoch:
            self.epoch = epoch, *self._batches(epoch)
        _, index, sizes = self.epoch
        return self.splits["train"].rows(index[inside, rows], sizes[inside])

    def _batches(self, epoch: int) -> tuple[Tensor, list[int]]:
        """The examples of all batches, put onto the device at once, and the length of each."""
        config, examples = self.config, self.splits["train"]
        lengths = examples.lengths
        index = batches(lengths, batch_size=config.batch_size, seed=config.seed, epoch=epoch)
        longest = lengths[index].amax(1).tolist()
        return index.to(examples.ids.device), [bucket(x, config.max_length) for x in longest]

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        total = _loss(_outputs(model, batch), batch["labels"])
        return total, torch.full_like(total, len(batch["labels"]))

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        examples = self.splits[split]
        outputs, labels = self._predict(model, examples)
        loss = float(_loss(outputs, labels)) / len(examples)
        found = outputs[:, 0] if self.glue.classes == 1 else outputs.argmax(-1)
        values = metrics.compute(self.glue.metrics, labels.cpu().numpy(), found.cpu().numpy())
        score = values[self.glue.score] if self.glue.score else sum(values.values()) / len(values)
        return {"loss": loss, **values, "score": score}

    def _predict(self, model: nn.Module, examples: Encoded) -> tuple[Tensor, Tensor]:
        """Outputs of the head and labels, in the order of the lengths."""
        outputs, labels = [], []
        limits = {"max_length": self.config.max_length, "tokens": EVALUATION_TOKENS}
        for index, length in in_order(examples.lengths, **limits):
            batch = examples.rows(index.to(examples.ids.device), length)
            outputs.append(_outputs(model, batch))
            labels.append(batch["labels"])
        return torch.cat(outputs), torch.cat(labels)


def _outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model(**inputs).logits.float()


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The sum over examples: cross-entropy of classes, squares for a number."""
    if labels.is_floating_point():
        return F.mse_loss(outputs[:, 0], labels, reduction="sum")
    return F.cross_entropy(outputs, labels, reduction="sum")


@dataclass(frozen=True)
class Examples:
    """The examples of a task for one pre-trained body; read and encoded when they are needed."""

    pretrained: Pretrained
    files: data.Files
    max_length: int

    @cached_property
    def splits(self) -> dict[str, Encoded]:
        """Token numbers of each split."""
        tokenizer = self.pretrained.tokenizer()
        kind = torch.float32 if self.files.task.classes == 1 else torch.int64
        return {
            name: encode(
                tokenizer,
                part.texts,
                torch.tensor(part.labels, dtype=kind),
                max_length=self.max_length,
            )
            for name, part in vars(data.read(self.files)).items()
        }


def reads(config: GlueConfig) -> dict[str, Any]:
    """Name the data of a configuration, as arguments of :func:`load` beside ``body``."""
    return {"task": config.task, "max_length": config.max_length}


def _reads_in_sweeps(config: GlueConfig, asked: Asked) -> dict[str, Any]:
    if asked.body is None:
        raise ValueError(
            'a run "glue" needs "from", the folder of a pre-trained model, unless it stands in the '
            '"then" of a run "mlm"'
        )
    return {"body": asked.body}


IN_SWEEPS = InSweeps(
    needs=("task",), lists={"task": "task", "seed": "seed"}, reads=_reads_in_sweeps
)


def load(
    source: str | os.PathLike[str] | None = None,
    *,
    body: str | os.PathLike[str] | Pretrained,
    task: str,
    max_length: int,
) -> Examples:
    """Find the files of a task and the pre-trained body.

    Args:
        source: See :func:`lln.texts.glue.find`.
        body: A run of ``lln train mlm``, or a Hugging Face folder.
    """
    pretrained = body if isinstance(body, Pretrained) else Pretrained.find(Path(body))
    return Examples(pretrained, data.find(task, source), max_length)


def key(config: GlueConfig, examples: Examples) -> Key:
    """Name the row of a fine-tuning before it has run: digest and seed."""
    shared, settings = plan(config, examples)
    return shared.digest(settings), config.seed


def plan(config: GlueConfig, examples: Examples) -> tuple[TrainConfig, dict]:
    """What decides a result: the TrainConfig of the first rate without its steps, the settings."""
    pretrained = examples.pretrained
    attention, options = pretrained.attention
    shared = TrainConfig(
        attention=attention,
        options=options,
        batch_size=config.batch_size,
        learning_rate=config.rates[0],
        weight_decay=config.weight_decay,
        precision=config.precision,
        compile=config.compile,
        graph=config.graph,
        log_every=20,
        keep=0,
        seed=config.seed,
    )
    settings = {
        "task": config.task,
        "data": examples.files.source,
        "protocol": PROTOCOL,
        "rates": list(config.rates),
        "epochs": config.epochs,
        "evaluations": config.evaluations,
        "warmup_share": config.warmup,
        "max_length": config.max_length,
        "dropout": config.dropout,
        "pretraining": pretrained.identity,
    }
    return shared, settings


def run(
    config: GlueConfig,
    examples: Examples,
    *,
    folder: Path | None = None,
    results: Path | None = None,
    progress: Progress | None = None,
    tensorboard: bool = True,
) -> Row:
    """Fine-tune with every rate, report the best once; the row is returned, and appended.

    One that has its row in ``results`` is not run again.

    Args:
        examples: From :func:`load`.
        folder: For curves, one folder per rate; None keeps nothing.
        results: File that the row is appended to, by the first process.
    """
    started = time.perf_counter()
    _check(config, examples)
    with runfolder.held(folder):
        row = None if results is None else find_row(results, *key(config, examples))
        if row is not None and progress is not None and runfolder.is_first_process():
            progress.finished(row["steps"])
        if row is None:
            row = _run(config, examples, folder, progress=progress, tensorboard=tensorboard)
            row["seconds"] = round(time.perf_counter() - started, 2)
            experiment.record(results, row, once=True)
        return row


def _check(config: GlueConfig, examples: Examples) -> None:
    pretrained = examples.pretrained
    pretrained.check()
    if config.max_length > pretrained.longest:
        raise ValueError(
            f"max_length={config.max_length} is more than the {pretrained.longest} positions of "
            f"{pretrained.folder}; choose a smaller one"
        )
    count = len(examples.splits["train"])
    if config.batch_size > count:
        raise ValueError(
            f"batch_size={config.batch_size} is more than the {count} training examples; choose "
            "a smaller one"
        )


def _run(
    config: GlueConfig,
    examples: Examples,
    folder: Path | None,
    **watched: Any,
) -> Row:
    """Fine-tune with every rate and make the row of the best."""
    started, (shared, settings) = time.perf_counter(), plan(config, examples)
    pretrained, splits = examples.pretrained, examples.splits
    tried: dict[float, tuple[float, int] | None] = {}
    diverged = []
    best: tuple[tuple[bool, float], float, Summary] | None = None
    for rate in config.rates:
        task = Finetuning(config, pretrained, splits, {**settings, "rate": rate})
        own = _with_rate(config, shared, rate, len(splits["train"]))
        place = None if folder is None else folder / f"rate-{rate:g}"
        summary = train(task, own, place, **watched)
        tried[rate], splits = summary.best, task.splits  # which are on the device now
        diverged += [rate] * summary.diverged
        worth = (not summary.diverged, summary.best[0] if summary.best else -math.inf)
        if best is None or worth > best[0]:
            best = worth, rate, summary
    assert best is not None, "rates are at least one"
    (_, valid), rate, summary = best
    row = result_row(
        "glue",
        _with_rate(config, shared, rate, len(splits["train"])),
        {**settings, "pretrained": dict(pretrained.configuration)},
        {
            **summary.test_best(),
            "valid": valid,
            "valid_by_rate": {
                f"{rate:g}": None if x is None else x[0] for rate, x in tried.items()
            },
            "learning_rate": rate,
            "best_step": None if summary.best is None else summary.best[1],
            "parameters": summary.parameters,
            "steps": summary.steps,
            "skipped": summary.skipped,
            "diverged": summary.diverged,
            "diverged_rates": diverged,
            **{f"{name}_examples": len(split) for name, split in splits.items()},
        },
        seconds=time.perf_counter() - started,
        device=summary.device,
    )
    return {**row, "digest": shared.digest(settings)}


def _with_rate(config: GlueConfig, shared: TrainConfig, rate: float, examples: int) -> TrainConfig:
    epoch = examples // config.batch_size
    steps = epoch * config.epochs
    return dataclasses.replace(
        shared,
        learning_rate=rate,
        steps=steps,
        warmup=math.ceil(config.warmup * steps),
        eval_every=max(1, epoch // config.evaluations),
    )
