"""Pre-training: the loss of transformers, folders that load, every way to run it."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from lln.cli import options as cli_settings
from lln.nn import recommended
from lln.records.rows import read_rows
from lln.texts import bundled as data
from lln.texts import text
from lln_study.data import tokens
from lln_study.tasks import experiment, mlm, step
from lln_study.train.loop import train
from tests.lln_study.train.processes import (
    curve,
    finish,
    finish_all,
    kill_when,
    start,
    start_ranks,
    weights,
)

TINY = {"layers": 2, "width": 32, "heads": 2, "feed_forward": 64, "vocabulary": 300, "length": 32}
RUN = {"steps": 6, "batch_size": 4, "log_every": 2, "eval_every": 3, "save_every": 2}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small corpus, which all tests share with its cache."""
    folder = tmp_path_factory.mktemp("text")
    whole = data.text()
    (folder / "small_train.txt").write_text(whole[:20_000])
    (folder / "small_valid.txt").write_text(whole[20_000:22_000])
    (folder / "small_test.txt").write_text(whole[22_000:24_000])
    return folder


@pytest.fixture(autouse=True)
def own_cache(place, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(place / "cache"))
    monkeypatch.delenv("LLN_DATA", raising=False)


def tiny(**changes) -> mlm.MLMConfig:
    return mlm.configure("roberta-tiny", **{**TINY, **RUN, **changes})


def run(place, config, **where):
    return mlm.run(config, mlm.load(place, **mlm.reads(config)), **where)


def task(place, **changes) -> mlm.MLM:
    config = tiny(**changes)
    made = mlm.MLM(config, tokens.encode(text.find(place), config.vocabulary))
    made.prepare(CPU)
    return made


@pytest.mark.parametrize("batches", ["packed", "padded"])
def test_the_loss_is_that_of_transformers(place, batches):
    """On the hidden positions alone, computed from all of them."""
    made = task(place, attention="softmax", batches=batches)
    model = made.build().eval()
    batch = made.batch(0, slice(0, 4))
    total, terms = made.loss(model, batch)
    labels = torch.full_like(batch["input_ids"], -100)
    labels.scatter_(1, batch["positions"], batch["labels"])
    expected = model(batch["input_ids"], batch.get("attention_mask"), labels=labels).loss
    assert terms == (labels >= 0).sum() and 4 < terms <= 4 * round(0.15 * 32)
    torch.testing.assert_close(total / terms, expected)


def test_weights_are_shared_by_all_attentions(place):
    softmax, lln = (task(place, attention=name).build() for name in ("softmax", "lln_diag"))
    others = dict(lln.named_parameters())
    for name, value in softmax.named_parameters():
        assert torch.equal(value, others[name])


def test_parameter_counts_are_stated(place):
    row = run(place, tiny(steps=1, attention="linformer"))
    assert row["parameters"] > row["parameters_softmax"] > 0
    row = run(place, tiny(steps=1, attention="lln_diag"))
    assert row["parameters"] == row["parameters_softmax"]


@pytest.mark.parametrize("attention", ["softmax", "lln_diag", "linformer"])
def test_a_checkpoint_is_a_model_folder(place, tmp_path, attention):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    import lln.hf

    made = task(place, attention=attention)
    summary = train(made, made.config.train, tmp_path, tensorboard=False)
    best = tmp_path / "best"
    if attention == "softmax":
        loaded = AutoModelForMaskedLM.from_pretrained(best)
    else:
        loaded = lln.hf.load(best, AutoModelForMaskedLM)
    tokenizer = AutoTokenizer.from_pretrained(best)
    ids = tokenizer(["First Citizen:", "We are"], padding=True, return_tensors="pt")
    assert ids["input_ids"][0, 0] == tokens.START and tokenizer.mask_token_id == tokens.MASK
    assert summary.best[1] == 6  # so that the best weights are the last
    with torch.no_grad():
        got = loaded.eval()(ids["input_ids"], ids["attention_mask"]).logits
        expected = summary.model(ids["input_ids"], ids["attention_mask"]).logits
    torch.testing.assert_close(got, expected)


def test_a_run_says_all_that_a_row_needs(place, tmp_path):
    results = tmp_path / "rows.jsonl"
    config = tiny(monitor_every=2, seed=3)
    for _ in range(2):  # the second finds it finished, and adds no row
        again = run(place, config, folder=tmp_path / "run", results=results)
    rows = read_rows(results)
    assert len(rows) == 1 and rows[0] == again
    row = rows[0]
    assert row["subject"] == "mlm" and row["mechanism"] == "lln_diag" and row["seed"] == 3
    assert row["configuration"]["length"] == 32 and row["configuration"]["corpus"] == "small"
    assert row["tokens"] == 6 * 4 * 32 and row["commit"] and row["device"] and row["torch"]
    assert row["step_ms"] > 0 and row["tokens_per_second"] > 0
    assert (
        row["test_loss"] == pytest.approx(row["loss"], rel=0.1) and row["test_loss"] != row["loss"]
    )
    measured = read_rows(tmp_path / "run" / "monitor.jsonl")
    assert {(line["step"], line["layer"], line["head"]) for line in measured} == {
        (step, layer, head) for step in (0, 2, 4) for layer in (0, 1) for head in (0, 1)
    }
    assert all(line["entropy"] > 0 and line["alpha"] > 0 for line in measured)
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_the_monitor_changes_nothing(place, tmp_path):
    for name, every in (("plain", 0), ("watched", 1)):
        config = tiny(monitor_every=every, dropout=0.1)
        run(place, config, folder=tmp_path / name, tensorboard=False)
    assert curve(tmp_path / "plain") == curve(tmp_path / "watched")


@pytest.mark.parametrize(
    "changes", [{"accumulation": 4}, {"checkpointing": True}], ids=["accumulation", "checkpointing"]
)
def test_the_manner_of_computing_does_not_matter(place, tmp_path, changes):
    for name, own in (("plain", {}), ("other", changes)):
        config = tiny(batches="padded", **own)
        run(place, config, folder=tmp_path / name, tensorboard=False)
    for row, other in zip(curve(tmp_path / "plain"), curve(tmp_path / "other"), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_close(place, tmp_path, precision):
    for name in ("fp32", precision):
        config = tiny(precision=name)
        run(place, config, folder=tmp_path / name, tensorboard=False)
    for row, other in zip(curve(tmp_path / "fp32"), curve(tmp_path / precision), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=5e-3)
        if row["kind"] == "train":
            assert (other["loss_scale"] is not None) == (precision == "fp16")


def test_throughput_is_a_row_of_its_own():
    row = step.run(experiment.only_updates(tiny(steps=3)))
    assert row["subject"] == "step" and row["step_ms"] > 0 and not row["out_of_memory"]
    assert row["tokens_per_second"] == pytest.approx(4 * 32 / row["step_ms"] * 1e3)


def test_memory_that_runs_out_is_a_result(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(experiment, "train", full)
    row = step.run(experiment.only_updates(tiny(steps=3)))
    assert row["out_of_memory"] and row["step_ms"] is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention": "sofmax"}, "sofmax"),
        ({"attention": "softmax", "options": {"method": "paper"}}, "method= is not an option"),
        ({"options": {"bloc": 3}}, "bloc= is not an option"),
        ({"length": 100_000}, "length=100000 is longer than the text"),
    ],
)
def test_wrong_settings_are_named(place, changes, said):
    with pytest.raises((ValueError, TypeError), match=said):
        run(place, tiny(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention": "softmx"}, "attention='softmx' is unknown; did you mean 'softmax'"),
        ({"options": {"foo": 1}}, "foo= is not an option; 'lln_diag' takes .*near"),
        ({"attention": "softmax_eager", "options": {"rank": 1}}, "rank= is not an option"),
        ({"options": "foo"}, "options='foo' is no set of names and values"),
    ],
)
def test_mechanisms_and_options_are_looked_up_before_anything_else(changes, said):
    with pytest.raises((ValueError, TypeError), match=said):
        mlm.configure("roberta-tiny", **changes)


def test_unknown_recipes_and_fields_are_refused():
    with pytest.raises(ValueError, match="recipe='bert' is unknown; choose from roberta-base"):
        mlm.configure("bert")
    with pytest.raises(ValueError, match="lenght is no field of a run; choose from"):
        mlm.configure("roberta-tiny", lenght=3)


def command(*arguments: str):
    from typer.testing import CliRunner

    from lln.cli import app as cli

    return CliRunner().invoke(cli.app, ["train", "mlm", *arguments])


WORDS = (
    "--set",
    "length=32",
    "--set",
    "steps=4",
    "--set",
    "batch_size=2",
    "--set",
    "learning_rate=1e-3",
)


def test_the_command_trains_and_says_where(place, tmp_path):
    out = ("--out", str(tmp_path / "run"), "--data", str(place))
    done = command(*WORDS, *out, "--set", "options.method=paper", "--set", "options.near=16")
    assert done.exit_code == 0, done.output
    assert "recommended for the place 'encoder': lln_diag" in done.output
    assert "tokens/s" in done.output and str(tmp_path / "run") in done.output.replace("\n", "")
    row = read_rows(tmp_path / "run" / "results.jsonl")[0]
    assert row["mechanism"] == "lln_diag"
    assert row["configuration"]["options"] == {**recommended(), "method": "paper", "near": 16}
    assert row["configuration"]["learning_rate"] == 1e-3


def test_the_recommended_options_by_one_word():
    options = ["recommended", "conv=5", "normalize_keys=true"]
    wanted = {**recommended(), "conv": 5, "normalize_keys": True}
    assert cli_settings.mechanism_options(options) == wanted


def test_the_command_explains_what_is_wrong(place, tmp_path):
    done = command("--data", str(tmp_path / "no"), *WORDS)
    assert done.exit_code == 1 and "does not exist; expected are files such as" in done.output
    done = command("--data", str(place), *WORDS, "--set", "options.near")
    assert done.exit_code == 2 and "is not KEY=VALUE" in done.output
    for wrong in (
        ("--set", "options.foo=1"),
        ("--attention", "softmx"),
        ("--set", "learning_rate=inf"),
    ):
        done = command(*WORDS, "--data", str(place), "--out", str(tmp_path / "run"), *wrong)
        assert done.exit_code == 1 and not (tmp_path / "run").exists()


def test_the_command_trains_on_nothing_else_than_it_is_told(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    out = ("--out", str(tmp_path / "run"))
    done = command("--data", str(tmp_path / "empty.txt"), *WORDS, *out)
    assert done.exit_code == 1 and "has no text for train" in done.output
    done = command("--set", "corpus=wiki2015", *WORDS, *out)
    assert done.exit_code == 1 and "corpus='wiki2015' needs the folder" in done.output
    assert not (tmp_path / "run").exists()


def test_the_command_says_that_a_run_diverged(place, tmp_path):
    out = ("--out", str(tmp_path / "run"), "--data", str(place), "--attention", "softmax")
    done = command(*WORDS, *out, "--set", "learning_rate=1e30")
    assert done.exit_code == 1
    assert "updates were left out" in done.output and "mlm: the run diverged" in done.output
    assert read_rows(tmp_path / "run" / "results.jsonl")[0]["diverged"]


COMMAND = ("-m", "lln.cli.app")
# The same, which after its second checkpoint waits to be killed.
WAITING = """
import time
from lln.cli.app import main
from lln_study.train import checkpoint
write = checkpoint.write
def write_and_wait(*args, **options):
    folder = write(*args, **options)
    if folder.name == "step-00000006":
        time.sleep(600)
    return folder
checkpoint.write = write_and_wait
main()
"""
MLM = ("train", "mlm", "--recipe", "roberta-tiny", "--set", "length=32")
LONG = (
    "--set",
    "steps=24",
    "--set",
    "batch_size=4",
    "--set",
    "save_every=3",
    "--set",
    "eval_every=8",
)


@pytest.mark.slow
def test_the_command_killed_and_repeated_is_bit_identical(place, tmp_path):
    words = (*MLM, *LONG, "--set", "log_every=2", "--data", str(place))
    finish(start(*COMMAND, *words, "--out", str(tmp_path / "whole")))
    again = (*words, "--out", str(tmp_path / "killed"))
    reached = tmp_path / "killed" / "checkpoints" / "step-00000006"
    kill_when(start("-c", WAITING, *again), reached.exists)
    finish(start(*COMMAND, *again))
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    a, b = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--set", "shard=true")], ids=["ddp", "fsdp2"])
def test_two_processes_train_the_model_of_one(place, tmp_path, how):
    words = (*MLM, *LONG, "--set", "log_every=2", "--data", str(place), "--set", "batches=padded")
    finish(start(*COMMAND, *words, "--out", str(tmp_path / "one")))
    finish_all(start_ranks(2, *COMMAND, *words, "--out", str(tmp_path / "two"), *how))
    for row, other in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-4)
    shutil.copy(tmp_path / "two" / "best" / "model.safetensors", tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == weights(tmp_path / "one").keys()
    assert len(read_rows(tmp_path / "two" / "results.jsonl")) == 1


@pytest.mark.slow
def test_a_compiled_run_has_the_same_curve(place, tmp_path, monkeypatch):
    """Its graphs are traced and differentiated; tests of generated code stand with the modules."""
    original, seen = torch.compile, []

    def traced(function, **options):
        seen.append(function)
        return original(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", traced)
    for name, compiled in (("plain", False), ("compiled", True)):
        config = tiny(compile=compiled, monitor_every=4)
        run(place, config, folder=tmp_path / name, tensorboard=False)
    for row, other in zip(curve(tmp_path / "plain"), curve(tmp_path / "compiled"), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-3)
    assert len(seen) == 1


def test_running_statistics_are_first_evaluated_after_they_have_seen_a_batch(place, tmp_path):
    """Before that there is no α: it is no reason to stop."""
    options = {"statistics": "running", "near": 8}
    config = mlm.configure("roberta-tiny", attention="lln_diag", options=options, **TINY, **RUN)
    mlm.run(config, mlm.load(place, **mlm.reads(config)), folder=tmp_path, tensorboard=False)
    rows = read_rows(tmp_path / "curve.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [3, 6]
