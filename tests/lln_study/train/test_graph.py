"""Updates replayed from CUDA graphs compute what ordinary updates compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lln.records.rows import read_rows
from lln_study.train.loop import train
from tests.lln_study.train.toy import Toy, toy_config

pytestmark = pytest.mark.gpu


class OnDevice(Toy):
    def loss(self, model, batch):
        kept = torch.arange(4, device=batch["x"].device) < batch["counts"][:, None]
        errors = F.mse_loss(model(batch["x"]).float(), batch["y"], reduction="none")
        return (errors * kept).sum(), kept.sum()

    def evaluate(self, model, split):
        device = next(model.parameters()).device
        batch = {"x": self.x, "y": self.y, "counts": self.counts}
        loss, terms = self.loss(model, {name: x.to(device) for name, x in batch.items()})
        return {"loss": (loss / terms).item()}


class TwoShapes(OnDevice):
    """Every third batch has a row less."""

    def batch(self, step, rows):
        whole = super().batch(step, rows)
        return {name: x[: len(x) - (step % 3 == 0)] for name, x in whole.items()}


class Waiting(OnDevice):
    """Looks at a number on the way, which cannot be recorded."""

    def loss(self, model, batch):
        total, terms = super().loss(model, batch)
        return total * (1 if terms.item() else 0), terms


class WaitingOnce(TwoShapes):
    """Looks at a number in the batches of the smaller shape, after the larger was recorded."""

    def loss(self, model, batch):
        total, terms = super().loss(model, batch)
        small = len(batch["x"]) < self.config.batch_size
        return total * (1 if not small or terms.item() else 0), terms


def curve(folder, task, **changes):
    config = toy_config(steps=30, log_every=1, **changes)
    train(task(config, dropout=0.3), config, folder, tensorboard=False)
    rows = read_rows(folder / "curve.jsonl")
    return torch.tensor([row["loss"] for row in rows]), [row.get("loss_scale") for row in rows]


@pytest.mark.parametrize("task", [OnDevice, TwoShapes])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_curve_is_that_of_ordinary_updates(task, precision, accumulation, tmp_path):
    if task is TwoShapes and accumulation == 2:
        accumulation = 4
    options = {"precision": precision, "accumulation": accumulation}
    recorded, scales = curve(tmp_path / "graph", task, graph=True, **options)
    ordinary, others = curve(tmp_path / "plain", task, graph=False, **options)
    torch.testing.assert_close(recorded, ordinary, rtol=1e-5, atol=1e-6)
    assert scales == others


@pytest.mark.parametrize("task", [Waiting, WaitingOnce])
def test_what_cannot_be_recorded_goes_on_without(task, tmp_path):
    with pytest.warns(UserWarning, match="cannot be recorded as a CUDA graph"):
        recorded, _ = curve(tmp_path / "graph", task, graph=True)
    ordinary, _ = curve(tmp_path / "plain", task, graph=False)
    torch.testing.assert_close(recorded, ordinary, rtol=1e-5, atol=1e-6)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    whole, _ = curve(tmp_path / "whole", OnDevice)

    class Killed(OnDevice):
        def batch(self, step, rows):
            if step == 17:
                raise KeyboardInterrupt
            return super().batch(step, rows)

    with pytest.raises(KeyboardInterrupt):
        curve(tmp_path / "parts", Killed)
    parts, _ = curve(tmp_path / "parts", OnDevice)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
