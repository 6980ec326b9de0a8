"""Time and memory of an update of masked language modelling, on random ids: "OOM" included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lln.records.rows import Row
from lln_study.data import tokens
from lln_study.tasks import experiment, mlm_recipes
from lln_study.tasks.experiment import InSweeps, Key
from lln_study.tasks.mlm import MLM
from lln_study.tasks.mlm_recipes import MLMConfig
from lln_study.train.engine import AUTOCAST

IN_SWEEPS = InSweeps(needs=("recipe", "lengths"), lists={"lengths": "length"})


def configure(recipe: str, **fields: Any) -> MLMConfig:
    """Change a recipe as :func:`lln_study.tasks.mlm.configure` does, and leave only updates."""
    return experiment.only_updates(mlm_recipes.configure(recipe, **fields))


def reads(config: MLMConfig) -> dict[str, Any]:
    return {}


def load(source: Any = None) -> None:
    """Read nothing: ids are random."""


class Step(experiment.Timed, MLM):
    """The updates of pre-training; how they are launched decides how long they take."""

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


def key(config: MLMConfig, data: None = None) -> Key:
    """Name the row: digest and seed. Also how updates are launched decides how long they take."""
    manner = {"compiled": config.train.compile, "recorded": config.train.graph}
    return config.train.digest({**Step(config).settings, **manner}), config.train.seed


def run(config: MLMConfig, data: None = None, *, results: Path | None = None, **where: Any) -> Row:
    """Time updates; ``where`` is not needed, as nothing is kept of them."""
    row = experiment.time_updates(Step(config), config.train)
    row |= {"digest": key(config)[0], "sdpa_backend": _backend(config)}
    experiment.record(results, row)
    return row


def _backend(config: MLMConfig) -> str | None:
    """Which kernel of scaled_dot_product_attention softmax takes on this machine."""
    if config.train.attention != "softmax" or not torch.cuda.is_available():
        return None
    from torch.nn.attention import SDPBackend

    shape = (config.train.batch_size, config.heads, config.length, config.width // config.heads)
    half = AUTOCAST[config.train.precision]
    q = torch.empty(shape, device="cuda", dtype=half, requires_grad=True)
    chosen = torch._fused_sdp_choice(q, q, q)  # pyright: ignore[reportPrivateImportUsage]
    return SDPBackend(chosen).name.lower()
