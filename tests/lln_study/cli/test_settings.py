"""``--set KEY=VALUE`` of ``lln train``: every field by its name, typed, and refused in a line."""

from __future__ import annotations

import importlib
import re

import pytest
from typer.testing import CliRunner

from lln.cli.app import app
from lln.nn import recommended
from lln_study.cli.settings import read_settings
from lln_study.tasks import glue, lra, mlm, vit
from lln_study.tasks.recipe import settings

TASKS = {
    "mlm": [],
    "glue": ["--task", "rte", "--from", "somewhere"],
    "vit": [],
    "lra": ["--task", "listops"],
}


@pytest.fixture
def configured(monkeypatch):
    """The configuration that a command makes of its words, and what it says; nothing is run."""

    def make(name: str, *words: str):
        found = []

        def reads(config):
            found.append(config)
            raise ValueError("configured")

        monkeypatch.setattr(importlib.import_module(f"lln_study.tasks.{name}"), "reads", reads)
        done = CliRunner().invoke(app, ["train", name, *TASKS[name], *words])
        assert done.exit_code == 1 and "configured" in done.output, done.output
        return found[0], done.stderr

    return make


SAME = [
    (
        "mlm",
        "--recipe roberta-tiny length=64 batches=padded steps=4 batch_size=8 learning_rate=1e-3 "
        "accumulation=2 precision=bf16 compile=true graph=false checkpointing=true shard=true "
        "keep=0 log_every=2 eval_every=3 save_every=5 monitor_every=7 patience=1 seed=3 "
        "corpus=wiki positions=sinusoid --attention performer options.num_features=16",
        lambda: mlm.configure(
            "roberta-tiny", length=64, batches="padded", steps=4, batch_size=8, learning_rate=1e-3,
            accumulation=2, precision="bf16", compile=True, graph=False, checkpointing=True,
            shard=True, keep=0, log_every=2, eval_every=3, save_every=5, monitor_every=7,
            patience=1, seed=3, corpus="wiki", positions="sinusoid", attention="performer",
            options={"num_features": 16},
        ),
    ),
    (
        "mlm",
        "options=recommended options.conv=5 options.method=entropy compile=false graph=true",
        lambda: mlm.configure(
            "roberta-tiny", attention="lln_diag", options={**recommended(), "conv": 5}
        ),
    ),
    (
        "glue",
        "rates=5e-5,1e-4 epochs=2 batch_size=8 max_length=64 precision=bf16 seed=1",
        lambda: glue.configure(
            "rte", rates=(5e-5, 1e-4), epochs=2, batch_size=8, max_length=64, precision="bf16",
            seed=1,
        ),
    ),
    (
        "vit",
        "patch=2 side=16 steps=9 learning_rate=1e-3 options.near=4 seed=2",
        lambda: vit.configure(
            "digits", patch=2, side=16, steps=9, learning_rate=1e-3, attention="lln_diag",
            options={"near": 4}, seed=2,
        ),
    ),
    (
        "lra",
        "train_size=10 steps=9 precision=fp32 save_every=0 --attention elu",
        lambda: lra.configure(
            "listops", train_size=10, steps=9, precision="fp32", save_every=0, attention="elu"
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "wanted"), SAME, ids=[f"{s[0]}" for s in SAME])
def test_every_setting_reaches_the_configuration(configured, name, words, wanted):
    flags = [part for word in words.split() for part in _as_given(word)]
    config, _ = configured(name, *flags)
    assert config == wanted()
    if hasattr(config, "train"):
        assert config.train.digest(settings(config)) == wanted().train.digest(settings(wanted()))


def _as_given(word: str) -> list[str]:
    """``steps=4`` as ``--set steps=4``; flags and their values as they are."""
    return ["--set", word] if "=" in word else [word]


def test_settings_are_typed_by_the_fields():
    start = mlm.configure("roberta-tiny")
    given = ["steps=5", "learning_rate=1", "compile=yes", "betas=[0.9, 0.95]", "corpus=none"]
    given += ["batches=padded", "measures=entropy,temperature", "options.near=[1]"]
    changes = read_settings(given, start, options=["near"])
    assert changes == {
        "steps": 5,
        "learning_rate": 1.0,
        "compile": True,
        "betas": (0.9, 0.95),
        "corpus": None,
        "batches": "padded",
        "measures": ("entropy", "temperature"),
        "options": {"near": [1]},
    }
    assert type(changes["learning_rate"]) is float
    assert read_settings(["rates=5e-5,1e-4"], glue.configure("rte")) == {"rates": (5e-5, 1e-4)}
    whole = read_settings(['options={"conv": 3}', "options.mix=0.5"], start, options=["mix"])
    assert whole == {"options": {"conv": 3, "mix": 0.5}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("step=5", "--set step=…: there is no such key; did you mean 'steps'?"),
        ("lerning_rate=5", "did you mean 'learning_rate'?"),
        ("near=5", "did you mean 'options.near'?"),
        ("options.nea=5", "did you mean 'options.near'?"),
        ("qqqqqq=5", "there is no such key; there are accumulation, batch_size"),
        ("attention=elu", "--set attention=…: that is --attention"),
        ("steps=many", "--set steps=many: steps is a whole number"),
        ("steps=1.5", "--set steps=1.5: steps is a whole number"),
        ("learning_rate=fast", "learning_rate is a number"),
        ("compile=perhaps", "compile is true or false"),
        ("betas=a,b", "betas is a list of numbers"),
        ("options=all", "--set options=all: give options one by one"),
        ("steps=0", "steps=0 is not possible; it must be a whole number, at least 1"),
        ("length=4", "length=4 is not possible; it must be a whole number, at least 8"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(words, message):
    done = CliRunner().invoke(app, ["train", "mlm", "--set", words])
    assert done.exit_code == 1 and message in done.output and "Traceback" not in done.output


def test_what_is_no_pair_is_refused():
    done = CliRunner().invoke(app, ["train", "mlm", "--set", "steps"])
    assert done.exit_code == 2
    assert "'steps' is not KEY=VALUE" in " ".join(re.sub("[│]", "", done.output).split())


@pytest.mark.parametrize("name", TASKS)
def test_the_keys_are_listed_with_their_values(name):
    done = CliRunner().invoke(app, ["train", name, *TASKS[name], "--set", "list"])
    listed = {line.split()[0]: " ".join(line.split()[1:]) for line in done.stdout.splitlines()}
    assert done.exit_code == 0 and listed["seed"] == "0" and "task" not in listed
    assert ("options.near" in listed) == (name != "glue")
    if name == "mlm":
        assert listed["steps"] == "600" and listed["batches"] == "packed"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("mlm", "recipe attention data set out results tokenizer throughput"),
        ("glue", "task from data set out results"),
        ("vit", "recipe attention data set out results on-damaged"),
        ("lra", "task attention data set out results on-damaged workers throughput"),
    ],
)
def test_help_has_few_flags_in_the_order_a_user_meets_them(name, flags):
    shown = CliRunner().invoke(app, ["train", name, "--help"]).stdout
    listed = re.findall(r"^  --([a-z-]+)", shown, flags=re.M)
    assert listed == [*flags.split(), "help"]
