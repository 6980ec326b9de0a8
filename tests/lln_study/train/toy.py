"""A task of milliseconds: a small network with dropout, rows with different numbers of terms."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from lln.records.order import shuffled
from lln.records.seeds import generator, seeded
from lln_study.train import processes
from lln_study.train.config import TrainConfig
from lln_study.train.loop import Task, train
from tests.waiting import HANGS


class Toy(Task):
    """Regression of a fixed random function; of every row a different number of outputs counts.

    Args:
        until: Step from which it waits to be killed.
    """

    name, metric, better = "toy", "loss", "lower"

    def __init__(
        self, config: TrainConfig, *, dropout: float = 0.0, until: float = math.inf
    ) -> None:
        self.config, self.dropout, self.until = config, dropout, until
        self.settings = {"recipe": "toy", "dropout": dropout}
        draw = generator(0, "toy data")
        self.x = torch.randn(64, 8, generator=draw)
        self.y = torch.randn(64, 4, generator=draw)
        self.counts = torch.randint(1, 5, (64,), generator=draw)

    def build(self) -> nn.Module:
        with seeded(self.config.seed, "weights"):
            hidden = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(self.dropout))
            return nn.Sequential(hidden, nn.Linear(16, 4))

    def batch(self, step, rows):
        if step >= self.until:
            time.sleep(HANGS)
        options = {"batch_size": self.config.batch_size, "seed": self.config.seed}
        index = shuffled(step, rows, count=64, **options)
        return {"x": self.x[index], "y": self.y[index], "counts": self.counts[index]}

    def loss(self, model, batch):
        kept = torch.arange(4) < batch["counts"][:, None]
        errors = F.mse_loss(model(batch["x"]), batch["y"], reduction="none")
        return (errors * kept).sum(), kept.sum()

    def evaluate(self, model, split):
        loss, terms = self.loss(model, {"x": self.x, "y": self.y, "counts": self.counts})
        return {"loss": (loss / terms).item()}


DEFAULTS = {"steps": 12, "batch_size": 8, "learning_rate": 1e-2, "warmup": 3}
WATCHING = {"log_every": 2, "eval_every": 4, "save_every": 3}


def toy_config(**changes) -> TrainConfig:
    return TrainConfig(**{**DEFAULTS, **WATCHING, **changes})


if __name__ == "__main__":  # python -m tests.lln_study.train.toy FOLDER field=value ...
    given = dict(word.split("=") for word in sys.argv[2:])
    until, dropout = float(given.pop("until", "inf")), float(given.pop("dropout", 0))
    config = toy_config(**{name: eval(value) for name, value in given.items()})
    done = train(
        Toy(config, dropout=dropout, until=until), config, Path(sys.argv[1]), tensorboard=False
    )
    if os.environ.get("RANK", "0") == "0":
        sharded = any(hasattr(parameter, "full_tensor") for parameter in done.model.parameters())
        print(f"done {done.steps} on {done.processes} sharded={sharded}")
    processes.leave()
