"""The Long Range Arena: model, batches, a run, its continuation, the command."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lln
from lln.cli.app import app
from lln.records.rows import read_rows
from lln_study.sweep import job, plan
from lln_study.sweep.job import Place
from lln_study.tasks import lra, lra_step
from lln_study.tasks.models.lra import Classifier, LRASizes
from tests.lln_study.tasks.classes import sequences

SWEEPS = Path(__file__).resolve().parents[3] / "sweeps"
SMALL = {
    "steps": 6,
    "batch_size": 8,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "eval_every": 2,
    "save_every": 2,
    "log_every": 1,
}


def small(attention: str = "softmax", **changes) -> lra.LRAConfig:
    return lra.configure("text", **{"attention": attention, **SMALL, **changes})


def test_recipes_are_those_of_the_code_base():
    config = lra.configure("pathfinder", attention="performer")
    assert (config.layers, config.width, config.heads, config.feed_forward) == (2, 64, 2, 128)
    assert config.train.batch_size == 128 and config.train.learning_rate == 2e-4
    assert config.train.options == {"num_features": 128}
    own = lra.configure("image", attention="performer", options={"num_features": 32})
    assert own.train.options == {"num_features": 32}
    with pytest.raises(ValueError, match="choose from listops"):
        lra.configure("images")
    with pytest.raises(ValueError, match="depth is no field of a run"):
        lra.configure("image", depth=3)


@pytest.mark.parametrize("attention", ["softmax", "lln_diag", "flash", "transnormer_t1"])
def test_padding_changes_nothing_but_the_mean(attention):
    """Cutting the padding off scales the pooled vector, and nothing else."""
    sizes = LRASizes(vocabulary=9, length=16, classes=3, attention=attention, dropout=0.0)
    model = Classifier(sizes).eval()
    tokens = torch.randint(1, 9, (2, 12))
    padded = torch.nn.functional.pad(tokens, (0, 4))
    with torch.no_grad():
        short, long = model.encoder(tokens), model.encoder(padded)
    torch.testing.assert_close(long * 16 / 12, short, rtol=1e-4, atol=1e-5)


def test_pairs_share_the_encoder():
    sizes = LRASizes(vocabulary=9, length=10, classes=2, attention="elu", dropout=0.0)
    model = Classifier(sizes, paired=True).eval()
    tokens = torch.randint(1, 9, (3, 2, 10), dtype=torch.uint8)
    x, y = model.encoder(tokens[:, 0].int()), model.encoder(tokens[:, 1].int())
    expected = model.head(torch.cat([x, y, x * y, x - y], -1))
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize("paired", [False, True])
def test_batches_are_functions_of_step_and_row(paired):
    task = lra.LRA(small(), sequences(paired=paired))
    task.prepare(torch.device("cpu"))
    whole = task.batch(4, slice(0, 8))
    parts = [task.batch(4, slice(i, i + 4)) for i in (0, 4)]
    for name, values in whole.items():
        assert torch.equal(values, torch.cat([part[name] for part in parts]))
    assert whole["tokens"].shape == ((8, 2, 32) if paired else (8, 32))
    shown = torch.cat([task.batch(step, slice(0, 8))["tokens"] for step in range(6)])
    assert len(np.unique(shown.flatten(1), axis=0)) >= 40  # an epoch shows every example


def test_evaluation_counts_every_example():
    task = lra.LRA(small(validate_on=13), sequences())
    task.prepare(torch.device("cpu"))
    model = task.build().eval()
    with torch.no_grad():
        found = task.evaluate(model, "valid")
        tokens = torch.cat([batch["tokens"] for batch in task.in_order("valid")])
        labels = torch.cat([batch["labels"] for batch in task.in_order("valid")])
        right = (model(tokens).argmax(-1) == labels).float().mean().item()
    assert len(labels) == 13
    assert found["accuracy"] == pytest.approx(right)


def test_validation_on_some_examples_draws_from_all_of_them():
    """Files that are sorted by class would give one class otherwise."""
    data = sequences()
    order = np.argsort(data.splits["valid"].labels, kind="stable")
    data.splits["valid"] = data.splits["valid"].take(order)
    task = lra.LRA(small(validate_on=8), data)
    task.prepare(torch.device("cpu"))
    assert len(task.parts["valid"][1].unique()) == 2
    assert len(data.splits["valid"].labels[:8].nonzero()[0]) == 0


def test_a_run_writes_its_row(tmp_path):
    config = small("lln_diag", options={"near": 8}, monitor_every=3)
    row = lra.run(config, sequences(), folder=tmp_path / "run", results=tmp_path / "rows.jsonl")
    assert read_rows(tmp_path / "rows.jsonl") == [json.loads(json.dumps(row))]
    assert row["subject"] == "lra" and row["task"] == "text" and row["steps"] == 6
    assert 0 <= row["accuracy"] <= 1 and row["valid_accuracy"] >= 0
    assert row["configuration"]["data"] == "toy"
    assert row["curves"]["valid"]["step"] == [0, 2, 4, 6]
    scales = row["curves"]["scales"]
    assert scales["step"] == [0, 3] and np.shape(scales["alpha"]) == (2, 2)
    assert row["digest"] == lra.key(config, sequences())[0]
    lra.run(config, sequences(), folder=tmp_path / "run", results=tmp_path / "rows.jsonl")
    assert len(read_rows(tmp_path / "rows.jsonl")) == 1  # finished, it adds no other


class Stop(Exception):
    pass


def test_a_killed_run_ends_with_the_same_row(tmp_path):
    class Kill:
        def start(self, config, step): ...
        def train(self, row, tokens_per_second): ...
        def evaluation(self, row): ...
        def stop(self): ...
        def at(self, step):
            if step == 5:
                raise Stop

    undisturbed = lra.run(small("elu"), sequences(), folder=tmp_path / "a", tensorboard=False)
    with pytest.raises(Stop):
        lra.run(small("elu"), sequences(), folder=tmp_path / "b", progress=Kill())
    again = lra.run(small("elu"), sequences(), folder=tmp_path / "b", tensorboard=False)
    for name in ("accuracy", "loss", "valid_accuracy", "best_step", "train_loss"):
        assert again[name] == undisturbed[name], name


def test_the_test_uses_the_best_weights(tmp_path, monkeypatch):
    """Steps 2 and 4 are best and worst on "valid": the test sees the weights of step 2."""
    honest = lra.LRA.evaluate
    seen: list[torch.Tensor] = []
    scripted = iter([0.2, 0.9, 0.1, 0.3])

    def evaluate(self, model, split):
        seen.append(model.head[0].weight.detach().clone())
        metrics = honest(self, model, split)
        return {**metrics, "accuracy": next(scripted)} if split == "valid" else metrics

    monkeypatch.setattr(lra.LRA, "evaluate", evaluate)
    row = lra.run(small("elu"), sequences(), folder=tmp_path, tensorboard=False)
    assert row["best_step"] == 2 and row["valid_accuracy"] == 0.9
    assert torch.equal(seen[4], seen[1]) and not torch.equal(seen[4], seen[3])


def damage(best):
    content = bytearray((best / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (best / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "said"),
    [(damage, "model.safetensors was changed"), (shutil.rmtree, "no checkpoint of step 2")],
    ids=["changed", "removed"],
)
def test_other_weights_than_the_best_are_not_tested(tmp_path, monkeypatch, harm, said):
    """Killed after the last update, the run finds its best weights gone when it is repeated."""
    honest, scripted = lra.LRA.evaluate, iter([0.2, 0.9, 0.1, 0.3, 0.3])

    def evaluate(self, model, split):
        metrics = honest(self, model, split)
        return {**metrics, "accuracy": next(scripted)} if split == "valid" else metrics

    monkeypatch.setattr(lra.LRA, "evaluate", evaluate)
    with monkeypatch.context() as patch:
        patch.setattr(lra.LRA, "row", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            lra.run(small("elu"), sequences(), folder=tmp_path, tensorboard=False)
    harm(tmp_path / "checkpoints" / "step-00000002")
    with pytest.raises(ValueError, match=f"best on validation.*{said}|{said}, the best on valid"):
        lra.run(small("elu"), sequences(), folder=tmp_path, tensorboard=False)


def test_throughput_times_updates_only(tmp_path):
    config = lra_step.configure("text", attention="lln", **{**SMALL, "steps": 3})
    row = lra_step.run(config, sequences())
    assert row["subject"] == "lra_step" and row["step_ms"] > 0 and not row["out_of_memory"]
    assert "accuracy" not in row
    assert row["digest"] == lra_step.key(config, sequences())[0]


def write_reviews(folder, monkeypatch) -> None:
    for split, count in (("train", 30), ("test", 6)):
        rows = [{"text": "good " if i % 2 else "bad ", "label": i % 2} for i in range(count)]
        text = "\n".join(json.dumps(row) for row in rows).encode()
        (folder / f"imdb_{split}.jsonl.xz").write_bytes(lzma.compress(text))
    monkeypatch.setenv("LLN_CACHE", str(folder / "cache"))


COMMAND = ["train", "lra", "--task", "text", "--attention", "lln", "--set", "steps=2"]
COMMAND += ["--set", "batch_size=2", "--set", "precision=fp32"]


def test_command(tmp_path, monkeypatch):
    write_reviews(tmp_path, monkeypatch)
    out = ["--data", str(tmp_path), "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*COMMAND, *out])
    assert result.exit_code == 0, result.output
    assert "test accuracy" in result.output
    (row,) = read_rows(tmp_path / "run" / "results.jsonl")
    assert row["configuration"]["length"] == 4096


def test_command_says_that_a_run_diverged(tmp_path, monkeypatch):
    write_reviews(tmp_path, monkeypatch)
    out = ["--data", str(tmp_path), "--out", str(tmp_path / "run"), "--set", "learning_rate=1e30"]
    result = CliRunner().invoke(app, [*COMMAND, *out, "--attention", "elu"])
    assert result.exit_code == 1
    assert "lln train lra: the run diverged" in result.output + str(result.exception)
    assert read_rows(tmp_path / "run" / "results.jsonl")[0]["diverged"]


def test_command_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, [*COMMAND, "--data", str(tmp_path)])
    assert result.exit_code == 1
    assert "imdb_train.jsonl.xz" in str(result.exception or result.output)


def test_job_of_a_sweep(tmp_path, monkeypatch):
    write_reviews(tmp_path, monkeypatch)
    job._load.cache_clear()
    place = Place(tmp_path, tmp_path / "results", tmp_path / "run")
    spec = {"task": "text", "attention": "elu", **SMALL, "steps": 2, "batch_size": 2, "seed": 4}
    spec |= {"eval_every": 0, "save_every": 0}
    timed = {**spec, "throughput": True, "attentions": ["elu", "lln"]}
    for each in (spec, timed):
        job.run("lra", each, place)
    rows = read_rows(tmp_path / "results" / "lra.jsonl")
    assert [row["subject"] for row in rows] == ["lra", "lra_step", "lra_step"]
    assert [row["mechanism"] for row in rows] == ["elu", "elu", "lln"]
    wanted = [*job.keys("lra", spec, place), *job.keys("lra", timed, place)]
    assert [(row["digest"], row["seed"]) for row in rows] == wanted


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.json")), ids=lambda path: path.stem)
def test_sweeps_of_the_project_can_be_read(path):
    """Tasks, recipes, fields and options of mechanisms exist."""
    for spec in plan.expand(plan.read(path)):
        own = {name: value for name, value in spec.items() if name not in plan.OF_THE_SWEEP}
        if spec["run"] not in ("lra", "vit"):
            continue
        _, configs = job.runs(spec["run"], own)
        for config in configs:
            name, options = config.train.attention, config.train.options
            assert name in lra.SOFTMAX or set(options) <= set(lln.describe(name).defaults)
