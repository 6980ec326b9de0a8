"""Masked language modelling with RoBERTa: recipes, the task, a run."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.records.rows import Row
from lln.study.data import text, tokens
from lln.study.data.mlm import Masking, Rows, batch, in_order
from lln.study.tasks.changes import changed
from lln.study.tasks.models.roberta import build_model, fast_tokenizer
from lln.study.train import runfolder, runlog
from lln.study.train.config import TrainConfig
from lln.study.train.loop import Summary, Task, train
from lln.study.train.progress import Progress
from lln.study.train.seeds import derived_seed

POSITIONS = ("normal", "sinusoid")


@dataclass(frozen=True)
class MLMConfig:
    """A run of masked language modelling.

    Attributes:
        recipe: The name it was made from.
        length: Tokens of a row.
        block: Of the mechanisms with a block-diagonal branch, unless their options say another.
        batches: "packed" or "padded", see :class:`lln.study.data.mlm.Rows`.
        vocabulary: Of the BPE tokenizer, if one is trained.
        corpus: What names of files begin with, where the data folder has several corpora.
        dropout: Of embeddings and layers; attention has none, whatever the mechanism.
        deviation: Standard deviation of fresh weights.
        positions: What the learned embeddings of positions start from: "normal" draws them as
            RoBERTa does, "sinusoid" takes sines and cosines of the same size, which put neighbours
            side by side from the first step on.
    """

    recipe: str
    layers: int
    width: int
    heads: int
    feed_forward: int
    vocabulary: int
    length: int = 512
    block: int = 64
    batches: str = "packed"
    dropout: float = 0.0
    deviation: float = 0.02
    positions: str = "normal"
    corpus: str | None = None
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.positions not in POSITIONS:
            raise ValueError(
                f"positions={self.positions!r} is unknown; choose from {', '.join(POSITIONS)}"
            )

    def settings(self) -> dict[str, Any]:
        """What a row says beside the fields of ``train``."""
        return {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name != "train"
        }


def roberta_base() -> MLMConfig:
    """12 layers of 768, N = 512, trained as fairseq's example, which the paper refers to.

    Its examples/roberta/config/pretraining/base.yaml on 8 GPUs, in bf16 and without dropout in the
    attention. Choose ``accumulation`` to fit your memory.
    """
    return MLMConfig(
        "roberta-base",
        layers=12,
        width=768,
        heads=12,
        feed_forward=3072,
        vocabulary=50_000,
        dropout=0.1,
        train=TrainConfig(
            steps=125_000,
            batch_size=2_048,
            learning_rate=5e-4,
            warmup=10_000,
            clip=0.0,
            precision="bf16",
            eval_every=2_000,
            save_every=2_000,
        ),
    )


def roberta_small() -> MLMConfig:
    """6 layers of 512, N = 512, many small steps.

    From sinusoids softmax leaves the plateau of its start, too: after 65M tokens it has 3.71 nats,
    and 6.53 from drawn positions (results/positions/mlm.jsonl).
    """
    return MLMConfig(
        "roberta-small",
        layers=6,
        width=512,
        heads=8,
        feed_forward=2048,
        vocabulary=16_384,
        positions="sinusoid",
        train=TrainConfig(
            steps=16_000,
            batch_size=32,
            learning_rate=7e-4,
            warmup=500,
            precision="bf16",
            eval_every=1_000,
            save_every=4_000,
        ),
    )


def roberta_tiny() -> MLMConfig:
    """2 layers of 64, N = 32, nearly bytes: half a minute on a CPU, for demonstrations.

    So short and narrow, with weights so large, it leaves the plateau of its start within the time.
    """
    return MLMConfig(
        "roberta-tiny",
        layers=2,
        width=64,
        heads=2,
        feed_forward=256,
        vocabulary=300,
        length=32,
        block=8,
        deviation=0.08,
        train=TrainConfig(
            steps=600,
            batch_size=32,
            learning_rate=5e-3,
            warmup=60,
            log_every=10,
            eval_every=100,
            save_every=200,
        ),
    )


def figure_1() -> MLMConfig:
    """The small single-head model of Fig. 1: temperature, entropy and gap while it trains."""
    small = roberta_small()
    return replace(
        small,
        recipe="figure-1",
        layers=4,
        width=256,
        heads=1,
        feed_forward=1024,
        length=128,
        block=32,
        train=replace(
            small.train,
            steps=4_000,
            learning_rate=1e-3,
            precision="fp32",
            monitor_every=50,
            measures=("temperature", "entropy", "spectral_gap"),
            eval_every=500,
            save_every=0,
        ),
    )


RECIPES: dict[str, Callable[[], MLMConfig]] = {
    "roberta-base": roberta_base,
    "roberta-small": roberta_small,
    "roberta-tiny": roberta_tiny,
    "figure-1": figure_1,
}


def configure(recipe: str, **changes: Any) -> MLMConfig:
    """A recipe with fields of :class:`MLMConfig` and :class:`TrainConfig` changed by name.

    Example:
        >>> configure("roberta-small", attention="lln_diag", options={"method": "entropy"}, seed=1)
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown; choose from {', '.join(RECIPES)}")
    return changed(RECIPES[recipe](), fixed=("recipe",), **changes)


class MLM(Task):
    """Predict the hidden 15 % of the tokens; the vocabulary is scored at those only.

    Args:
        encoded: The corpus, see :func:`lln.study.data.tokens.encode`.
    """

    name, metric, better = "mlm", "loss", "lower"

    def __init__(self, config: MLMConfig, encoded: tokens.Encoded) -> None:
        self.config, self.encoded = config, encoded
        self.tokens = config.length
        self.settings = {
            **config.settings(),
            "corpus": encoded.corpus,
            "vocabulary": encoded.vocabulary,
            "tokens_digest": encoded.digest,
        }
        self.parameters_softmax = 0

    def prepare(self, device: torch.device) -> None:
        options = {"length": self.config.length, "kind": self.config.batches, "device": device}
        self.rows = {name: Rows(split, **options) for name, split in self.encoded.splits.items()}
        self.masking = Masking(self.encoded.vocabulary, self.config.train.seed)
        # Every run and every seed is judged on the same hidden tokens.
        self.judging = Masking(self.encoded.vocabulary, derived_seed(0, "evaluation"))

    def build(self) -> nn.Module:
        model, self.parameters_softmax = build_model(self.config, self.encoded.vocabulary)
        return model

    def batch(self, step: int, rows: slice) -> Mapping[str, Tensor]:
        size = self.config.train.batch_size
        return batch(self.rows["train"], self.masking, step, rows, batch_size=size)

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores, labels = _scores(model, batch)
        return F.cross_entropy(scores, labels, reduction="sum"), (labels >= 0).sum()

    def evaluate(self, model: Any, split: str) -> dict[str, float]:
        device = self.rows[split].ids.device
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        size = max(1, 16_384 // self.config.length)
        for each in in_order(self.rows[split], self.judging, size):
            scores, labels = _scores(model, each)
            known = labels >= 0
            sums[0] += F.cross_entropy(scores, labels, reduction="sum")
            sums[1] += ((scores.argmax(-1) == labels) & known).sum()
            sums[2] += known.sum()
        loss, right, terms = sums.tolist()
        return {"loss": loss / terms, "accuracy": right / terms}

    def save(self, model: Any, folder: Path) -> None:
        model.config.save_pretrained(folder)
        fast_tokenizer(self.encoded.tokenizer, self.config.length).save_pretrained(folder)


def _scores(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scores of the vocabulary at the hidden positions ``[R K, V]``, and the labels ``[R K]``."""
    states = model.roberta(batch["input_ids"], attention_mask=batch.get("attention_mask"))[0]
    index = batch["positions"][:, :, None].expand(-1, -1, states.shape[2])
    scores = model.lm_head(states.gather(1, index))
    return scores.flatten(0, 1).float(), batch["labels"].flatten()


@dataclass
class Done:
    """A finished run: its result row, and the trained model in ``summary``."""

    row: Row
    summary: Summary
    task: MLM


def run(
    config: MLMConfig,
    *,
    data: str | os.PathLike[str] | text.Corpus | None = None,
    folder: Path | None = None,
    results: Path | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    tensorboard: bool = True,
) -> Done:
    """Pre-train as configured, or continue; the result row is returned, and appended once.

    Args:
        data: Folder or file, see :func:`lln.study.data.text.find`, or what that found.
        folder: Of the run, see :func:`lln.study.train.loop.train`; None keeps nothing.
        results: File that the row is appended to, by the first process.
        tokenizer: A tokenizer.json to use instead of training one.
    """
    started = time.perf_counter()
    corpus = data if isinstance(data, text.Corpus) else text.find(data, config.corpus)
    task = MLM(config, tokens.encode(corpus, config.vocabulary, tokenizer=tokenizer))
    watched = {"progress": progress, "tensorboard": tensorboard}
    with runfolder.held(folder):
        summary = train(task, config.train, folder, **watched, test="test" in corpus.splits)
        row = _row(task, summary, time.perf_counter() - started)
        if results is not None and runfolder.is_first_process():
            runlog.append_row(results, row, once=summary.was_finished)
        return Done(row, summary, task)


def _row(task: MLM, summary: Summary, seconds: float) -> Row:
    config = task.config
    metrics = {**summary.row(), "parameters_softmax": task.parameters_softmax}
    seen = summary.steps * config.train.batch_size * config.length
    return runlog.result_row(
        task.name,
        config.train,
        task.settings,
        {**metrics, "tokens": seen},
        seconds=seconds,
        device=summary.device,
    )


class Timed(MLM):
    """The same updates on random ids, without evaluation: only their time matters."""

    name = "step"

    def __init__(self, config: MLMConfig) -> None:
        rows = config.train.batch_size
        super().__init__(config, tokens.random_ids(config.vocabulary, rows * config.length))

    def prepare(self, device: torch.device) -> None:
        super().prepare(device)
        self.device = device

    def build(self) -> nn.Module:
        with self.device:  # a large model is not made on the CPU first
            return super().build()

    def evaluate(self, model: Any, split: str) -> dict[str, float]:
        return {}


def throughput(config: MLMConfig) -> Row:
    """Time of an update, tokens per second and peak memory; the row says so if memory ran out."""
    started = time.perf_counter()
    quick = replace(config.train, eval_every=0, save_every=0, keep=0, monitor_every=0)
    config = replace(config, train=quick)
    task = Timed(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        metrics = {**train(task, config.train, None).row(), "out_of_memory": False}
    except torch.OutOfMemoryError:
        metrics = {"step_ms": None, "tokens_per_second": None, "out_of_memory": True}
    return runlog.result_row(
        task.name,
        config.train,
        task.settings,
        metrics,
        seconds=time.perf_counter() - started,
        device=device,
    )
