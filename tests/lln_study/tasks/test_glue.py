"""Fine-tuning from a pre-trained run: what is chosen, what is reported, what is refused."""

from __future__ import annotations

import gc
import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Dropout
from typer.testing import CliRunner

from lln.cli.app import app
from lln.records.rows import read_rows
from lln_study.sweep import job
from lln_study.sweep.job import Place
from lln_study.tasks import glue, metrics
from lln_study.tasks.pretrained import Pretrained
from tests.helpers import never_waiting
from tests.lln_study.tasks.small_glue import fine_tune, pretrain, write_glue

QUICK = {"epochs": 4, "batch_size": 8, "max_length": 32, "rates": (3e-3,)}
QUICK |= {"dropout": 0.0}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Data, and runs with three kinds of attention."""
    folder = tmp_path_factory.mktemp("glue")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLN_CACHE", str(folder / "cache"))
        patch.delenv("LLN_DATA", raising=False)
        runs = {
            "lln_diag": pretrain(folder, "lln_diag", near=16, method="entropy"),
            "softmax": pretrain(folder, "softmax"),
            "flash": pretrain(folder, "flash", query_dim=16, chunk=16),
        }
    return write_glue(folder / "data"), runs


def test_a_row_says_what_was_chosen_and_from_what(places, tmp_path):
    data, runs = places
    results = tmp_path / "glue.jsonl"
    config = glue.configure("sst2", **{**QUICK, "rates": (1e-6, 3e-3)})
    options = {"folder": tmp_path / "run", "tensorboard": False}
    row = fine_tune(config, runs["lln_diag"], data, results=results, **options)
    assert read_rows(results) == [json.loads(json.dumps(row))]
    assert (row["subject"], row["mechanism"], row["seed"]) == ("glue", "lln_diag", 0)
    assert row["learning_rate"] == 3e-3 and row["valid_by_rate"]["0.003"] == row["valid"]
    assert row["valid_by_rate"]["1e-06"] <= row["valid"]
    assert row["accuracy"] == row["score"] > 0.75  # guessing gives 0.5
    assert (row["train_examples"], row["valid_examples"], row["test_examples"]) == (180, 20, 60)
    used = row["configuration"]
    assert used["options"] == {"near": 16, "method": "entropy"}
    assert used["pretrained"]["recipe"] == "roberta-tiny" and "held out" in used["protocol"]
    pretrained = Pretrained.find(runs["lln_diag"])
    assert used["pretraining"] == pretrained.identity
    examples = glue.load(data, body=pretrained, **glue.reads(config))
    assert (row["digest"], row["seed"]) == glue.key(config, examples)
    assert (tmp_path / "run" / "rate-0.003" / "curve.jsonl").exists()
    again = fine_tune(config, runs["lln_diag"], data, results=results, **options)
    assert again == read_rows(results)[0] and len(read_rows(results)) == 1  # not run again


def model_folder(run, folder):
    """The best checkpoint as a folder of another library, whose files nobody has summed up."""
    shutil.copytree(Pretrained.find(run).folder.resolve(), folder)
    (folder / "manifest.json").unlink()
    return folder


def rewritten(folder, change) -> None:
    """The weights of a folder after ``change(weights)``."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("rates", [("1e30", "1e-3"), ("1e30",)], ids=["one", "all"])
def test_the_command_says_which_rates_diverged(places, tmp_path, rates):
    """It ends with status 1 if no other rate is left to report."""
    data, runs = places
    words = ["train", "glue", "--task", "sst2", "--from", str(runs["softmax"]), "--data", str(data)]
    words += [
        "--set",
        "epochs=1",
        "--set",
        "batch_size=8",
        "--set",
        "max_length=32",
        "--out",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, [*words, "--set", f"rates={','.join(rates)}"])
    assert "diverged with learning rate 1e+30" in done.output
    (row,) = read_rows(tmp_path / "results.jsonl")
    assert row["diverged_rates"] == [1e30]
    assert done.exit_code == (len(rates) == 1) == row["diverged"]


@pytest.mark.parametrize("attention", ["softmax", "lln_diag", "flash"])
def test_a_body_with_random_weights_is_refused(places, tmp_path, attention):
    _, runs = places
    folder = model_folder(runs[attention], tmp_path / "model")
    assert Pretrained.find(folder).classifier(2, seed=0)  # its head alone is new
    name = sorted(load_file(folder / "model.safetensors"))[-1]
    assert name.startswith("roberta.encoder.layer.0.")
    rewritten(folder, lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match=f"has no weights {re.escape(name)}: config.json"):
        Pretrained.find(folder).classifier(2, seed=0)
    rewritten(folder, lambda weights: weights.update({name: torch.ones(3, 5, 7)}))
    with pytest.raises(ValueError, match=r"model.safetensors cannot be loaded"):
        Pretrained.find(folder).classifier(2, seed=0)
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model.safetensors cannot be loaded"):
        Pretrained.find(folder).classifier(2, seed=0)


def test_layers_that_the_configuration_does_not_know_are_refused(places, tmp_path):
    """They would be left out, and a smaller model fine-tuned."""
    _, runs = places
    folder = model_folder(runs["softmax"], tmp_path / "model")
    name = "roberta.encoder.layer.1.output.dense.weight"
    rewritten(folder, lambda weights: weights.update({name: torch.ones(3)}))
    with pytest.raises(ValueError, match=f"has no place for {re.escape(name)}"):
        Pretrained.find(folder).classifier(2, seed=0)


@pytest.mark.parametrize("inside", [True, False], ids=["run", "checkpoint"])
def test_a_checkpoint_that_was_changed_is_not_fine_tuned(places, tmp_path, inside):
    data, runs = places
    shutil.copytree(runs["softmax"], tmp_path / "run", symlinks=True)
    best = Pretrained.find(tmp_path / "run").folder
    content = bytearray((best / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (best / "model.safetensors").write_bytes(content)
    (best / "optimizer.safetensors").unlink()  # which is not needed
    source = tmp_path / "run" if inside else best
    with pytest.raises(ValueError, match=r"cannot be fine-tuned: model.safetensors was changed"):
        fine_tune(glue.configure("sst2", **QUICK), source, data)


@pytest.mark.parametrize("attention", ["lln_diag", "flash"])
def test_weights_of_a_run_that_diverged_are_refused(places, tmp_path, attention):
    data, runs = places
    broken = model_folder(runs[attention], tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if "layer.0." in name and name.endswith(".weight"))
    weights[name].view(-1)[0] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    results = tmp_path / "glue.jsonl"
    with pytest.raises(ValueError, match=rf"not finite, \S*{re.escape(name)} to begin"):
        fine_tune(glue.configure("sst2", **QUICK), broken, data, results=results)
    assert not results.exists()


def test_the_weights_of_the_best_evaluation_are_reported(places, monkeypatch):
    data, runs = places
    scores, original = [], metrics.compute

    def compute(names, labels, predictions):
        value = original(names, labels, predictions)
        scores.append((len(labels), value["accuracy"]))
        return value

    monkeypatch.setattr(glue.metrics, "compute", compute)
    row = fine_tune(glue.configure("sst2", **QUICK), runs["softmax"], data)
    assert row["valid"] == max(score for count, score in scores if count == 20)
    assert [count for count, _ in scores].count(60) == 1  # dev is looked at once
    assert scores[-1] == (60, row["accuracy"])


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(places):
    """Also in a model without attention layers, where units replace attention and FFN."""
    data, runs = places
    rows = [
        fine_tune(
            glue.configure("stsb", **{**QUICK, "epochs": 1}, seed=seed),
            runs["flash"],
            data,
        )
        for seed in (0, 0, 1)
    ]
    assert rows[0]["loss"] == rows[1]["loss"] != rows[2]["loss"]
    assert rows[0]["digest"] == rows[2]["digest"]
    assert {"pearson", "spearman"} <= rows[0].keys()
    assert rows[0]["score"] == (rows[0]["pearson"] + rows[0]["spearman"]) / 2


def test_seeds_of_a_process_share_the_encoded_examples_and_compute_the_same(
    places, tmp_path, monkeypatch
):
    data, runs = places
    calls, original = [], glue.encode
    monkeypatch.setattr(glue, "encode", lambda *a, **b: calls.append(a) or original(*a, **b))
    spec = {**QUICK, "task": ["sst2", "stsb"], "seed": [0, 1], "epochs": 1, "rates": [1e-3, 3e-3]}
    place = Place(data, tmp_path, tmp_path / "scratch", runs["softmax"])
    job.run("glue", spec, place)
    assert len(calls) == 2 * 3  # the splits of two tasks
    assert gc.get_freeze_count() == 0
    rows = read_rows(tmp_path / "glue.jsonl")
    assert [(row["digest"], row["seed"]) for row in rows] == job.keys("glue", spec, place)
    alone = {**QUICK, "epochs": 1, "rates": [1e-3, 3e-3], "seed": 1}
    row = fine_tune(glue.configure("sst2", **alone), runs["softmax"], data)
    assert (row["loss"], row["valid"]) == (rows[1]["loss"], rows[1]["valid"])


def test_the_body_is_the_pretrained_one_with_its_attention(places):
    from safetensors.torch import load_file

    _, runs = places
    for name, run in runs.items():
        pretrained = Pretrained.find(run)
        model = pretrained.classifier(3, seed=0, dropout=0.25)
        assert pretrained.attention[0] == name
        stored = load_file(pretrained.folder / "model.safetensors")
        body = {key: x for key, x in model.state_dict().items() if key.startswith("roberta.")}
        assert all(torch.equal(x, stored[key]) for key, x in body.items())
        inside = {type(module).__name__ for module in model.modules()}
        assert ("LLNAttention" in inside, "Flash" in inside) == (
            name == "lln_diag",
            name == "flash",
        )
        assert model.classifier.out_proj.out_features == 3
        assert 0.25 in {m.p for m in model.roberta.encoder.modules() if isinstance(m, Dropout)}
        other = pretrained.classifier(3, seed=1).classifier.out_proj.weight
        assert not torch.equal(model.classifier.out_proj.weight, other)


def test_a_hugging_face_folder_is_a_source_too(places):
    _, runs = places
    found = Pretrained.find(Pretrained.find(runs["lln_diag"]).folder.resolve())
    assert found.attention == ("lln_diag", {"near": 16, "method": "entropy"})
    assert found.configuration == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_length": 128}, "max_length=128 is more than the 64 positions"),
        ({"batch_size": 500}, "batch_size=500 is more than the 180 training examples"),
        ({"rates": ()}, "rates is empty"),
        ({"rates": (1e-3, float("inf"))}, "rates=inf is not possible; it must be finite"),
        ({"rates": (1e-3, -1.0)}, "rates=-1.0 is not possible"),
        ({"epochs": 0}, "epochs=0 is not possible; it must be a whole number, at least 1"),
        ({"warmup": 6}, "warmup=6 is not possible; .*between 0 and 1"),
        ({"rate": 1e-3}, "rate is no field of a fine-tuning"),
    ],
)
def test_bad_settings_are_refused(places, changes, words):
    data, runs = places
    with pytest.raises(ValueError, match=words):
        fine_tune(glue.configure("sst2", **{**QUICK, **changes}), runs["softmax"], data)


def test_a_run_with_a_damaged_run_file_is_named(places, tmp_path):
    _, runs = places
    shutil.copytree(runs["softmax"], tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "run.json").write_text('{"configuration": {}}')
    with pytest.raises(ValueError, match=r"run.json cannot be read"):
        Pretrained.find(tmp_path / "run")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a run of `lln train mlm`"):
        Pretrained.find(tmp_path)


def test_metrics_have_known_values():
    labels, found = np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 1, 0])
    got = metrics.compute(["accuracy", "f1", "matthews"], labels, found)
    assert got["accuracy"] == 0.6 and got["f1"] == pytest.approx(2 / 3)
    assert got["matthews"] == pytest.approx(1 / 6)
    x = np.array([0.0, 1.0, 2.0, 3.0])
    same = metrics.compute(["pearson", "spearman"], x, x**3)
    assert same["spearman"] == pytest.approx(1)
    assert metrics.compute(["pearson"], x, 3 - 2 * x) == pytest.approx({"pearson": -1})
    assert metrics.compute(["pearson", "spearman"], x, 0 * x) == {"pearson": 0.0, "spearman": 0.0}
    assert metrics.compute(["f1", "matthews"], labels, 0 * labels) == {"f1": 0.0, "matthews": 0.0}
    with pytest.raises(ValueError, match="metric 'bleu' is unknown"):
        metrics.compute(["bleu"], labels, found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lln_diag", "softmax"])
def test_recorded_updates_compute_the_same(places, name):
    """Padded batches of several lengths, replayed from CUDA graphs; no warning that it fails."""
    data, runs = places
    rows = [
        fine_tune(glue.configure("sst2", **QUICK, graph=graph), runs[name], data)
        for graph in (True, False)
    ]
    assert rows[0]["digest"] == rows[1]["digest"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=0.05)


@pytest.mark.gpu
def test_batches_do_not_wait_for_the_gpu(places):
    data, runs = places
    config = glue.configure("sst2", **QUICK)
    examples = glue.load(data, body=runs["softmax"], **glue.reads(config))
    task = glue.Finetuning(config, examples.pretrained, examples.splits, {})
    task.prepare(torch.device("cuda"))
    task.batch(0, slice(0, 8))  # an epoch is put onto the device at once
    with never_waiting():
        found = [task.batch(step, slice(0, 8)) for step in range(1, 4)]
    assert all(x.is_cuda for batch in found for x in batch.values())
