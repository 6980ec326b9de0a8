"""Masked language modelling with RoBERTa: what a run may be told, and recipes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lln_study.tasks.recipe import changed
from lln_study.train.config import TrainConfig, check_whole

POSITIONS = ("normal", "sinusoid")


@dataclass(frozen=True)
class MLMConfig:
    """A run of masked language modelling.

    Attributes:
        recipe: The name it was made from.
        length: Tokens of a row.
        block: Of the mechanisms with a block-diagonal branch, unless their options say another.
        batches: "packed" or "padded", see :class:`lln_study.data.mlm.Rows`.
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
        check_whole("length", self.length, least=8)
        for name in ("layers", "width", "heads", "feed_forward", "vocabulary", "block"):
            check_whole(name, getattr(self, name), least=1)
        if self.positions not in POSITIONS:
            raise ValueError(
                f"positions={self.positions!r} is unknown; choose from {', '.join(POSITIONS)}"
            )


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
