"""Masked language modelling with RoBERTa: the task and a run of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.hf.cores import awaits_batches
from lln.records.rows import Row
from lln.records.seeds import derived_seed
from lln.texts import text
from lln_study.data import tokens
from lln_study.data.mlm import Masking, Rows, batch, in_order
from lln_study.tasks import experiment
from lln_study.tasks.experiment import InSweeps, Key
from lln_study.tasks.mlm_recipes import MLMConfig
from lln_study.tasks.mlm_recipes import configure as configure
from lln_study.tasks.models.roberta import build_model, fast_tokenizer
from lln_study.tasks.recipe import settings
from lln_study.train.task import Summary

IN_SWEEPS = InSweeps(needs=("recipe",), chosen_by=("loss", -1), is_followed=True)


class MLM(experiment.RowTask):
    """Predict the hidden 15 % of the tokens; the vocabulary is scored at those only.

    Args:
        encoded: The corpus, see :func:`lln_study.data.tokens.encode`.
    """

    name, metric, better = "mlm", "loss", "lower"

    def __init__(self, config: MLMConfig, encoded: tokens.Encoded) -> None:
        self.config, self.encoded = config, encoded
        self.tokens = config.length
        self.settings = {
            **settings(config),
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

    def is_ready(self, model: Any) -> bool:
        return not awaits_batches(model)

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

    def row(self, summary: Summary, folder: Path | None) -> dict[str, Any]:
        """Give the columns of a result row."""
        seen = summary.steps * self.config.train.batch_size * self.config.length
        more = {"parameters_softmax": self.parameters_softmax, "tokens": seen}
        return {**summary.row(), **more}

    def save(self, model: Any, folder: Path) -> None:
        model.config.save_pretrained(folder)
        fast_tokenizer(self.encoded.tokenizer, self.config.length).save_pretrained(folder)


def _scores(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scores of the vocabulary at the hidden positions ``[R K, V]``, and the labels ``[R K]``."""
    states = model.roberta(batch["input_ids"], attention_mask=batch.get("attention_mask"))[0]
    index = batch["positions"][:, :, None].expand(-1, -1, states.shape[2])
    scores = model.lm_head(states.gather(1, index))
    return scores.flatten(0, 1).float(), batch["labels"].flatten()


def reads(config: MLMConfig) -> dict[str, Any]:
    """Name the data of a configuration, as arguments of :func:`load`."""
    return {"corpus": config.corpus, "vocabulary": config.vocabulary}


def load(
    source: str | os.PathLike[str] | text.Corpus | None,
    *,
    corpus: str | None,
    vocabulary: int,
    tokenizer: str | os.PathLike[str] | None = None,
) -> tokens.Encoded:
    """Read and encode a corpus.

    Args:
        source: Folder or file, see :func:`lln.texts.text.find`, or what that found.
        tokenizer: A tokenizer.json to use instead of training one.
    """
    found = source if isinstance(source, text.Corpus) else text.find(source, corpus)
    return tokens.encode(found, vocabulary, tokenizer=tokenizer)


def key(config: MLMConfig, encoded: tokens.Encoded) -> Key:
    """Name the row of a run before it has run: digest and seed."""
    return experiment.key(MLM(config, encoded), config.train)


def run(config: MLMConfig, encoded: tokens.Encoded, **where: Any) -> Row:
    """Pre-train as configured, or continue; see :func:`lln_study.tasks.experiment.run`."""
    test = "test" in encoded.splits
    return experiment.run(MLM(config, encoded), config.train, test=test, **where)
