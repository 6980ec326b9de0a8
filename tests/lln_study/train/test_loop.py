"""The loop: the gradient of one big batch, stopping, what a run leaves behind."""

from __future__ import annotations

import itertools
import json
import math
import shutil

import pytest
import torch

from lln.records.rows import read_rows
from lln_study.train import checkpoint
from lln_study.train.loop import train
from lln_study.train.runlog import thinned_curve
from tests.lln_study.train.toy import Toy, toy_config


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "last" / "model.safetensors")


def run(folder, *, dropout=0.0, task=Toy, **changes):
    config = toy_config(**changes)
    return train(task(config, dropout=dropout), config, folder, tensorboard=False)


def test_a_run_learns_and_says_so(tmp_path):
    summary = run(tmp_path, steps=40)
    curve = read_rows(tmp_path / "curve.jsonl")
    evaluations = [row for row in curve if row["kind"] == "eval"]
    assert [row["step"] for row in evaluations] == list(range(0, 41, 4))
    assert evaluations[-1]["loss"] < 0.8 * evaluations[0]["loss"]
    assert summary.metrics["loss"] == evaluations[-1]["loss"]
    assert summary.best == (
        min(row["loss"] for row in evaluations),
        min(evaluations, key=lambda row: row["loss"])["step"],
    )
    assert [row["step"] for row in curve if row["kind"] == "train"] == list(range(2, 41, 2))
    best = json.loads((tmp_path / "best" / "state.json").read_text())
    assert best["step"] == summary.best[1]
    kept = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert len(kept) <= 3 and kept[-1] == "step-00000040"


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_is_one_big_batch(tmp_path, accumulation):
    run(tmp_path / "one")
    run(tmp_path / "cut", accumulation=accumulation)
    one, cut = weights(tmp_path / "one"), weights(tmp_path / "cut")
    for name in one:
        torch.testing.assert_close(cut[name], one[name], rtol=1e-5, atol=1e-6)


def test_averaging_micro_batches_would_be_found_out(tmp_path):
    """The rows have different numbers of terms, so a mean of means is another gradient."""

    class MeanOfMeans(Toy):
        def loss(self, model, batch):
            total, terms = super().loss(model, batch)
            return total / terms, torch.ones(())

    run(tmp_path / "one")
    run(tmp_path / "cut", accumulation=4, task=MeanOfMeans)
    one, cut = weights(tmp_path / "one"), weights(tmp_path / "cut")
    assert max((cut[name] - one[name]).abs().max() for name in one) > 1e-4


def test_the_global_generator_has_no_influence(tmp_path):
    torch.manual_seed(1)
    run(tmp_path / "a", dropout=0.3)
    torch.manual_seed(2)
    run(tmp_path / "b", dropout=0.3)
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_another_seed_is_another_run(tmp_path):
    assert run(tmp_path / "a").metrics != run(tmp_path / "b", seed=1).metrics


def test_patience_ends_a_run_that_does_not_improve(tmp_path):
    class Worse(Toy):
        def evaluate(self, model, split):
            self.calls = getattr(self, "calls", 0) + 1
            return {"loss": float(self.calls)}

    summary = run(tmp_path, steps=400, patience=3, task=Worse)
    assert summary.steps == 12 and summary.best == (1.0, 0)


def test_a_run_that_breaks_is_given_up(tmp_path):
    class Broken(Toy):
        def loss(self, model, batch):
            total, terms = super().loss(model, batch)
            return total * math.nan, terms

    summary = run(tmp_path, steps=400, task=Broken)
    assert summary.diverged and summary.steps == 100
    rows = read_rows(tmp_path / "curve.jsonl")
    assert [row["loss"] for row in rows if row["kind"] == "train"] == [None] * 50
    assert run(tmp_path, steps=400, task=Broken).diverged  # asked again, it still is


@pytest.mark.parametrize(("steps", "skipped"), [(frozenset(range(6, 12)), 6), ({7, 8}, 2)])
def test_a_short_run_has_diverged_if_half_of_its_updates_are_left_out(tmp_path, steps, skipped):
    """It ends before it would be given up."""

    class Broken(Sometimes):
        pass

    Broken.steps = steps
    summary = run(tmp_path, task=Broken)
    assert summary.skipped == skipped == summary.row()["skipped"]
    assert summary.diverged == (skipped == 6) == summary.row()["diverged"]
    again = run(tmp_path, task=Broken)  # finished, it says the same
    assert (again.resumed, again.skipped, again.diverged) == (12, skipped, summary.diverged)


def test_a_run_that_ends_with_a_loss_of_nan_has_diverged(tmp_path):
    class Lost(Toy):
        def evaluate(self, model, split):
            return {"loss": math.nan}

    assert run(tmp_path, task=Lost).diverged


class Sometimes(Toy):
    """Gradients that are not finite at some steps, from a loss that always is."""

    steps = frozenset({2, 3, 8})

    def batch(self, step, rows):
        return {**super().batch(step, rows), "bad": torch.tensor(step in self.steps)}

    def loss(self, model, batch):
        total, terms = super().loss(model, batch)
        if batch.get("bad"):
            total = total + torch.sqrt(0 * next(model.parameters())).sum()  # 0, its gradient is not
        return total, terms


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_update_without_a_finite_gradient_is_left_out(tmp_path, precision):
    summary = run(tmp_path, task=Sometimes, precision=precision)
    rows = [row for row in read_rows(tmp_path / "curve.jsonl") if row["kind"] == "train"]
    assert [row["skipped"] for row in rows] == [0, 2, 0, 0, 1, 0]
    assert math.isfinite(summary.metrics["loss"]) and not summary.diverged
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


def test_what_is_left_out_changes_nothing(tmp_path):
    class Never(Sometimes):
        steps = frozenset(range(2, 12))

    run(tmp_path / "two", steps=2, task=Toy, warmup=0, schedule="constant")
    run(tmp_path / "left", steps=12, task=Never, warmup=0, schedule="constant")
    two, left = weights(tmp_path / "two"), weights(tmp_path / "left")
    assert all(torch.equal(two[name], left[name]) for name in two)


def test_the_fused_optimizer_leaves_out_what_it_is_told_to():
    """What updates on a GPU rely on; torch has it on a CPU, too."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    for gradient, broken in ((1.0, 0.0), (math.nan, 1.0), (1.0, 0.0)):
        weight.grad = torch.full((3,), gradient)
        optimizer.found_inf = torch.tensor(broken)
        before = weight.detach().clone()
        optimizer.step()
        assert torch.equal(weight, before) == bool(broken) and weight.isfinite().all()
    assert optimizer.state[weight]["step"] == 2


def test_a_run_whose_gradients_stay_broken_is_given_up(tmp_path, monkeypatch):
    class Never(Sometimes):
        steps = frozenset(range(6, 400))

    monkeypatch.setattr("lln_study.train.loop.HOPELESS", 10)
    summary = run(tmp_path, steps=400, task=Never)
    assert summary.diverged and summary.steps == 16 and math.isfinite(summary.metrics["loss"])


def test_a_folder_of_another_run_is_refused(tmp_path):
    first = run(tmp_path)
    with pytest.raises(ValueError, match=r"learning_rate=0.01 and not 0.5; choose another folder"):
        run(tmp_path, learning_rate=0.5)
    again = run(tmp_path, log_every=3)  # how it is watched does not matter
    assert (again.resumed, again.best, again.loss) == (12, first.best, first.loss)
    assert again.metrics == first.metrics


def test_nothing_is_kept_without_a_folder():
    summary = run(None)
    assert summary.steps == 12 and math.isfinite(summary.metrics["loss"])


def test_the_speed_is_that_of_all_updates_but_the_first(tmp_path):
    class Counted(Toy):
        tokens = 5

    summary = run(tmp_path, task=Counted)
    rows = read_rows(tmp_path / "curve.jsonl")
    assert all(row["tokens"] == row["step"] * 8 * 5 for row in rows)
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds) and seconds[-1] <= summary.seconds + 1e-3
    for row in rows:
        if row["kind"] == "train":
            assert row["learning_rate"] == toy_config().rate(row["step"] - 1)
            assert row["gradient_norm"] > 0 and row["loss_scale"] is None
    assert summary.step_ms == pytest.approx(1e3 * summary.seconds / 11)
    assert summary.tokens_per_second == pytest.approx(11 * 8 * 5 / summary.seconds)
    assert run(None).tokens_per_second is None  # of a task without tokens


class Fingerprint(Toy):
    """Its test is a number that tells weights apart; given losses say which step is best."""

    losses, seen = (), ()

    def prepare(self, device):
        assert device.type == "cpu"
        self.seen = []

    def evaluate(self, model, split):
        print_of = {"loss": sum(x.double().sum().item() for x in model.parameters())}
        if split == "test":
            return print_of
        self.seen.append(print_of)
        return {"loss": self.losses[len(self.seen) - 1]}


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    "losses, better, best",
    [
        ((3.0, 1.0, 2.0, 2.5), "lower", 1),
        ((3.0, 2.0, 2.0, 1.0), "lower", 3),
        ((3.0, 1.0, 2.0, 2.5), "higher", 0),  # before the first update
        ((1.0, 2.5, 2.5, 2.0), "higher", 1),
        ((math.nan,) * 4, "lower", None),
    ],
)
def test_the_last_weights_are_tested_and_the_best_if_asked(
    losses, better, best, in_memory, tmp_path
):
    config = toy_config(save_every=0 if in_memory else 100)
    task = Fingerprint(config)
    task.losses, task.better, task.keeps_best = losses, better, in_memory
    folder = None if in_memory else tmp_path
    summary = train(task, config, folder, test=True, tensorboard=False)
    assert len(task.seen) == 4 and summary.test == task.seen[-1]
    assert summary.best == (None if best is None else (losses[best], 4 * best))
    assert summary.test_best() == task.seen[-1 if best is None else best]


def test_a_best_checkpoint_that_is_gone_is_named(tmp_path):
    config = toy_config(save_every=100)
    task = Fingerprint(config)
    task.losses = (3.0, 1.0, 2.0, 2.5)
    summary = train(task, config, tmp_path, tensorboard=False)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    with pytest.raises(ValueError, match="no checkpoint of step 4, the best on validation"):
        summary.test_best()


def test_a_loss_scale_is_continued(tmp_path):
    options = {"task": Sometimes, "precision": "fp16"}
    run(tmp_path, **options)
    rows = read_rows(tmp_path / "curve.jsonl")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000012")
    run(tmp_path, **options)
    again = read_rows(tmp_path / "curve.jsonl")
    first, other = ([row.get("loss_scale") for row in found] for found in (rows, again))
    assert first == other and len({scale for scale in first if scale}) > 2


def test_what_a_task_saves_is_part_of_its_checkpoints(tmp_path):
    class Saving(Toy):
        def save(self, model, folder):
            (folder / "note.txt").write_text("a model")

    run(tmp_path, task=Saving)
    assert (tmp_path / "last" / "note.txt").read_text() == "a model"
    assert "note.txt" in json.loads((tmp_path / "last" / "manifest.json").read_text())["files"]


def test_activations_that_cannot_be_checkpointed_are_refused():
    with pytest.raises(ValueError, match="Sequential has no gradient_checkpointing_enable"):
        run(None, checkpointing=True)


def test_a_checkpoint_where_a_file_stands_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    given = {"model": {}, "optimizer": {}, "state": {"step": 3}, "identity": "a test"}
    with pytest.raises(OSError, match=r"step-00000003 cannot be written: .*make room"):
        checkpoint.write(tmp_path / "checkpoints", **given)


def test_half_precision_has_a_loss_scale(tmp_path):
    run(tmp_path, precision="fp16")
    rows = [row for row in read_rows(tmp_path / "curve.jsonl") if row["kind"] == "train"]
    assert all(row["loss_scale"] >= 1 for row in rows)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("precision", "fp8", "choose from fp32, bf16, fp16"),
        ("steps", 0, "at least 1"),
        ("accumulation", 3, "a divisor of self.batch_size=8"),
        ("schedule", "stairs", "choose from linear"),
        ("steps", 2.5, "a whole number"),
        ("steps", "5", "a whole number"),
        ("learning_rate", math.inf, "finite and positive"),
        ("learning_rate", math.nan, "finite and positive"),
        ("learning_rate", "1e-3", "finite and positive"),
        ("clip", math.inf, r"finite and 0 .no limit. or more"),
        ("weight_decay", -1.0, "finite and 0 or more"),
        ("epsilon", math.nan, "finite and positive"),
        ("betas", (0.9, 1.0), "less than 1"),
    ],
)
def test_impossible_settings_are_refused(field, value, remedy):
    with pytest.raises(ValueError, match=f"{field}=.*{remedy}"):
        toy_config(**{field: value})


def test_the_rate_rises_and_falls():
    config = toy_config(steps=10, warmup=4, learning_rate=1.0)
    rates = [config.rate(step) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and all(b < a for a, b in itertools.pairwise(rates[4:]))
    assert rates[-1] > 0


def test_thinned_curves_keep_evaluations_and_the_end():
    rows = [{"kind": "train", "step": step} for step in range(10, 1001, 10)]
    rows += [{"kind": "eval", "step": step} for step in range(0, 1001, 250)]
    kept = thinned_curve(rows, steps=30)
    steps = [row["step"] for row in kept if row["kind"] == "train"]
    assert 20 <= len(steps) <= 30 and steps[-1] == 1000
    assert sum(row["kind"] == "eval" for row in kept) == 5
    heads = [{"step": step, "layer": layer} for step in range(100) for layer in (0, 1)]
    found = thinned_curve(heads, steps=10)
    assert len(found) == 20 and {row["layer"] for row in found} == {0, 1}
    assert thinned_curve([]) == []
