"""Image classification: models, batches, a run, the command."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from lln.cli.app import app
from lln.records.rows import read_rows
from lln_study.sweep import job
from lln_study.sweep.job import Place
from lln_study.tasks import vit
from tests.lln_study.data.test_images import folder  # noqa: F401  a fixture
from tests.lln_study.tasks.classes import pictures

SMALL = {
    "layers": 2,
    "width": 16,
    "heads": 2,
    "feed_forward": 32,
    "patch": 2,
    "steps": 6,
    "batch_size": 8,
    "precision": "fp32",
    "eval_every": 3,
    "save_every": 3,
    "log_every": 1,
}


def small(attention: str = "softmax", **changes) -> vit.ViTRun:
    return vit.configure("paper", **{"attention": attention, **SMALL, **changes})


def test_the_models_of_the_paper():
    config = vit.configure("paper")
    assert (config.layers, config.width, config.heads) == (12, 128, 8)
    tiny = vit.configure("deit-tiny", attention="softmax")
    task = vit.Vision(tiny, pictures(side=16))
    model = task.build()
    assert task.tokens == 17 and tiny.train.precision == "fp16"
    assert model.config.hidden_size == 192 and model.config.num_attention_heads == 3
    with pytest.raises(ValueError, match="choose from paper"):
        vit.configure("large")
    with pytest.raises(ValueError, match="patch=3 does not divide the side 8"):
        vit.Vision(small(patch=3), pictures())
    with pytest.raises(TypeError, match="rank= is not an option; 'softmax' takes"):
        vit.Vision(small(options={"rank": 3}), pictures()).build()


def test_every_attention_starts_from_the_same_weights():
    models = {
        name: vit.Vision(small(name), pictures()).build()
        for name in ("softmax", "softmax_eager", "lln_diag", "linformer")
    }
    reference = models["softmax"].state_dict()
    for model in models.values():
        state = model.state_dict()
        assert all(torch.equal(state[name], values) for name, values in reference.items())
    extra = {name for name in models["linformer"].state_dict() if name not in reference}
    assert extra and all("lln" in name for name in extra)


def test_batches_are_functions_of_step_and_row():
    task = vit.Vision(small(), pictures())
    task.prepare(torch.device("cpu"))
    whole = task.batch(2, slice(0, 8))
    parts = [task.batch(2, slice(i, i + 2)) for i in range(0, 8, 2)]
    for name, values in whole.items():
        assert torch.equal(values, torch.cat([part[name] for part in parts]))
    assert whole["pixel_values"].shape == (8, 3, 8, 8)


def test_a_run_learns_and_writes_its_row(tmp_path):
    config = small("lln_diag", options={"near": 8}, steps=30, learning_rate=5e-3, monitor_every=10)
    row = vit.run(config, pictures(), folder=tmp_path / "run", results=tmp_path / "rows.jsonl")
    assert row["accuracy"] == 1.0  # dark or light
    assert read_rows(tmp_path / "rows.jsonl")[0]["digest"] == vit.key(config, pictures())[0]
    scales = row["curves"]["scales"]
    assert scales["step"] == [0, 10, 20] and scales["layers"] == [0, 1]
    assert all(value > 0 for layers in scales["alpha"] for value in layers)


@pytest.mark.parametrize("save_every", [3, 0])
def test_a_finished_run_that_is_repeated_adds_no_row(tmp_path, save_every):
    """Also where the best weights were not kept, so that there is nothing to test again."""
    places = {"folder": tmp_path / "run", "results": tmp_path / "rows.jsonl"}
    config = small(steps=9, save_every=save_every, learning_rate=5e-2)
    first, second = (vit.run(config, pictures(), tensorboard=False, **places) for _ in range(2))
    assert len(read_rows(tmp_path / "rows.jsonl")) == 1
    assert first["accuracy"] == second["accuracy"] and first["date"] == second["date"]
    vit.run(config, pictures(), folder=tmp_path / "other", results=places["results"])
    assert len(read_rows(tmp_path / "rows.jsonl")) == 2  # measured again from its start


def test_fixed_scales_and_the_loss_scale_of_fp16(tmp_path):
    """What Fig. 10 needs: α = β as given, and the scale of every step."""
    config = small(
        "lln",
        options={"statistics": "fixed", "alpha": 2.0, "beta": 2.0},
        precision="fp16",
        monitor_every=3,
    )
    row = vit.run(config, pictures(), folder=tmp_path, tensorboard=False)
    scales = row["curves"]["scales"]
    assert all(
        value == 2.0 for name in ("alpha", "beta") for each in scales[name] for value in each
    )
    assert row["curves"]["loss_scale"]["step"] == [1, 2, 3, 4, 5, 6]
    assert all(value > 0 for value in row["curves"]["loss_scale"]["loss_scale"])


def test_command_on_the_digits(tmp_path):
    words = [
        "train",
        "vit",
        "--set",
        "options.near=4",
        "--set",
        "steps=3",
        "--set",
        "batch_size=8",
    ]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "test accuracy" in result.output
    (row,) = read_rows(tmp_path / "results.jsonl")
    assert row["configuration"]["data"] == "scikit-learn digits"
    assert (tmp_path / "last" / "model.safetensors").exists()


def test_command_on_damaged_images(folder, tmp_path):  # noqa: F811
    (folder / "train" / "dog.3.jpg").write_bytes(b"")
    words = ["train", "vit", "--attention", "elu", "--set", "steps=1", "--set", "batch_size=4"]
    words += ["--set", "side=8", "--set", "precision=fp32"]
    words += ["--data", str(folder), "--out", str(tmp_path / "run")]
    stopped = CliRunner().invoke(app, words)
    assert stopped.exit_code == 1 and not (tmp_path / "run").exists()
    assert "dog.3.jpg" in str(stopped.output) + str(stopped.exception)
    with pytest.warns(UserWarning, match="left out"):
        went_on = CliRunner().invoke(app, [*words, "--on-damaged", "skip"])
    assert went_on.exit_code == 0, went_on.output
    (row,) = read_rows(tmp_path / "run" / "results.jsonl")
    assert row["configuration"]["examples"]["train"] == 31


def test_job_of_a_sweep(tmp_path):
    place = Place(None, tmp_path / "results", tmp_path / "run")
    spec = {"recipe": "digits", "attention": "softmax", "steps": 2, "batch_size": 4, "seed": 1}
    job.run("vit", spec, place)
    (row,) = read_rows(tmp_path / "results" / "vit.jsonl")
    assert [(row["digest"], row["seed"])] == job.keys("vit", spec, place)


def test_command_says_that_a_run_diverged(tmp_path):
    words = ["train", "vit", "--attention", "softmax", "--set", "steps=8", "--set", "batch_size=8"]
    result = CliRunner().invoke(
        app, [*words, "--set", "learning_rate=1e30", "--out", str(tmp_path)]
    )
    assert result.exit_code == 1
    (row,) = read_rows(tmp_path / "results.jsonl")
    assert row["diverged"] and row["skipped"] >= 4
    assert f"{row['skipped']} of 8 updates were left out" in result.output
    assert "lln train vit: the run diverged" in result.output + str(result.exception)
