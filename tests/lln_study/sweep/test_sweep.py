"""Sweeps: what a file says, what is skipped, what runs at once, and when it stops."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lln
from lln.cli.app import app
from lln.records.rows import append_row, read_rows
from lln_study.paper.tables import table as tables
from lln_study.sweep import job as jobs
from lln_study.sweep.job import Place
from lln_study.sweep.plan import (
    OF_THE_SWEEP,
    Job,
    Repeated,
    best_on_validation,
    expand,
    plan,
    read,
)
from lln_study.sweep.run import Sweep
from lln_study.tasks import experiment, glue
from lln_study.tasks.experiment import InSweeps
from lln_study.tasks.models import softmax
from lln_study.train import runfolder
from tests.lln_study.tasks.small_glue import fine_tune, pretrain, write_glue, write_text
from tests.waiting import HANGS

ROOT = Path(__file__).resolve().parents[3]
REPEAT = {"best_of": "learning_rate", "seed": [1]}
TINY = {"run": "mlm", "recipe": "roberta-tiny"}
STEP = {"run": "step", "recipe": "roberta-tiny", "lengths": [16]}
SMOKE = Path(__file__).with_name("smoke.json")
SWEEPS = [SMOKE, *sorted((ROOT / "sweeps").glob("*.json"))]

# What a process of these tests does: wait, then add its row or fail.
SCRIPT = """
import json, sys, time
digest, seconds, fails, path = sys.argv[1:]
time.sleep(float(seconds))
if fails == "yes":
    sys.exit("it went wrong")
row = {"digest": digest, "seed": 0, "seconds": float(seconds), "configuration": {"task": digest}}
row["diverged"] = digest == "diverging"
open(path, "a").write(json.dumps(row) + chr(10))
"""


class Fake(Job):
    """A job whose process only waits."""

    seconds = 0.0
    fails = False

    def command(self, *, shared):
        path = self.place.results(self.kind)
        words = [self.keys[0][0], str(self.seconds), "yes" if self.fails else "no", str(path)]
        return [sys.executable, "-S", "-c", SCRIPT, *words]


def job(folder, name, *, seconds=0.0, fails=False, slots=1, timed=False, before=None):
    folder.mkdir(exist_ok=True, parents=True)
    place = Place(None, folder, folder / "scratch" / name)
    made = Fake("fake", {"task": name}, slots, [(name, 0)], place, before, timed=timed)
    made.seconds, made.fails = seconds, fails
    if before is not None:
        before.after.append(made)
    return made


def run(jobs, **options):
    said = []
    return Sweep(jobs, say=said.append, **options).run(), said


def order(said):
    """``["started a", "done a", ...]``"""
    words = (line.replace(":", "").split() for line in said if not line.startswith(" "))
    return [f"{line[0]} {line[line.index('fake') + 1]}" for line in words if "fake" in line]


def test_every_combination_of_a_file_is_a_run():
    content = {
        "base": {"run": "mlm", "seed": 5, "attention": "softmax"},
        "runs": [{}, {"attention": "lln", "options": {"method": "entropy"}}],
        "grid": {"seed": [0, 1], "steps": [10]},
    }
    found = expand(content)
    assert [(spec["attention"], spec["seed"]) for spec in found] == [
        *(("softmax", 0), ("softmax", 1)),
        *(("lln", 0), ("lln", 1)),
    ]
    assert all(spec["steps"] == 10 and spec["run"] == "mlm" for spec in found)
    assert expand([{"run": "mlm"}, {"run": "vit"}]) == [{"run": "mlm"}, {"run": "vit"}]
    with pytest.raises(ValueError, match="a sweep has \\['gird'\\]"):
        expand({"gird": {}})


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_of_the_project_are_complete(path):
    """Kinds, recipes, fields and options of mechanisms exist."""
    runs = expand(read(path))
    assert runs
    for spec in [*runs, *(other for run in runs for other in expand(run.get("then", [])))]:
        own = {name: value for name, value in spec.items() if name not in OF_THE_SWEEP}
        _, configs = jobs.runs(spec["run"], own)
        assert configs
        for config in configs if spec["run"] != "glue" else ():
            trained = getattr(config, "train", config)
            name, options = trained.attention, trained.options
            assert name in softmax.NAMES or set(options) <= set(lln.describe(name).defaults)


def test_runs_that_have_their_row_are_skipped(tmp_path):
    first = [job(tmp_path, name) for name in "ab"]
    outcome, _ = run(first)
    assert (len(outcome.done), len(outcome.skipped)) == (2, 0)
    outcome, _ = run([job(tmp_path, name) for name in "abc"])
    assert (len(outcome.done), len(outcome.skipped)) == (1, 2)
    assert [row["digest"] for row in read_rows(tmp_path / "fake.jsonl")] == ["a", "b", "c"]


def test_a_run_that_diverged_has_its_row_and_is_reported(tmp_path):
    outcome, said = run([job(tmp_path, name) for name in ("diverging", "good")])
    assert len(outcome.done) == 2 and not outcome.failed
    assert outcome.diverged == ["fake diverging seed=0"]
    assert said.count("    it diverged, and its row says so") == 1
    outcome, _ = run([job(tmp_path, "diverging")])
    assert len(outcome.skipped) == 1 and not outcome.diverged


def test_what_a_process_of_a_killed_sweep_is_at_is_left_to_it(tmp_path):
    planned = [job(tmp_path, name) for name in ("held", "free")]
    with runfolder.held(planned[0].place.folder):
        outcome, said = run(planned)
    assert (outcome.done, outcome.left) == (["fake free seed=0"], ["fake held seed=0"])
    assert sum("is at it: fake held" in line for line in said) == 1
    append_row(tmp_path / "fake.jsonl", {"digest": "held", "seed": 0})
    with runfolder.held(planned[0].place.folder):  # it has its row, and may still add a curve
        outcome, _ = run([job(tmp_path, "held")])
        assert len(outcome.skipped) == 1 and planned[0].place.folder.exists()
    run([job(tmp_path, "held")])
    assert not planned[0].place.folder.exists()


def test_rows_of_others_in_a_file_of_results_are_left_alone(tmp_path):
    append_row(tmp_path / "fake.jsonl", {"note": "no digest, no seed, no configuration"})
    outcome, _ = run([job(tmp_path, "a")], minutes=1)
    assert len(outcome.done) == 1
    outcome, _ = run([job(tmp_path, "a")], minutes=1)
    assert len(outcome.skipped) == 1


def test_a_list_says_what_is_done_and_runs_nothing(tmp_path):
    run([job(tmp_path, "a")])
    first = job(tmp_path, "first")
    others = [job(tmp_path, name, before=first) for name in ("rte", "cola")]
    said, done = [], job(tmp_path, "a")
    done.place.folder.mkdir(parents=True)  # what another sweep may be at
    left = Sweep([done, first, *others], say=said.append).tell()
    assert [line.split()[:2] for line in said[:2]] == [["done", "fake"], ["to", "run"]]
    assert said[1].endswith("then 2 of 2 that follow") and said[2:] == ["1 done, 3 to run"]
    assert left == [first, *others] and len(read_rows(tmp_path / "fake.jsonl")) == 1
    assert done.place.folder.exists()


def test_a_list_needs_no_data_and_its_lines_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLN_DATA", raising=False)
    other = {**TINY, "corpus": "wiki2015"}
    lists = {"run": "lra", "task": "listops", "throughput": True, "train_size": 4}
    content = [other, {**other, "length": 16}, {**TINY, "then": [{"task": "sst2"}]}, lists]
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    words = ["sweep", str(tmp_path / "sweep.json"), "--out", str(tmp_path / "out")]
    listed = CliRunner().invoke(app, [*words, "--list"])
    assert listed.exit_code == 0, listed.output
    assert listed.output.splitlines()[1:-1] == [
        "unknown mlm roberta-tiny seed=0 corpus=wiki2015",
        "unknown mlm roberta-tiny seed=0 corpus=wiki2015 length=16",
        "to run  mlm roberta-tiny seed=0, then 1 of 1 that follow",
        "unknown lra listops seed=0",
        "0 done, 1 to run",
    ]
    assert "4 may have their rows" in listed.output and "wiki2015" in listed.output
    assert CliRunner().invoke(app, words).exit_code == 1  # which would run them
    (tmp_path / "sweep.json").write_text(json.dumps([{**other, "step": 3}]))
    listed = CliRunner().invoke(app, [*words, "--list"])
    assert listed.exit_code == 1 and "step is no field" in listed.output + str(listed.exception)


def test_what_follows_runs_after_it_and_the_folder_is_removed(tmp_path):
    first = job(tmp_path, "first")
    others = [job(tmp_path, name, before=first) for name in ("rte", "cola")]
    outcome, said = run([first, job(tmp_path, "second"), *others])
    assert len(outcome.done) == 4
    names = ("first", "rte", "cola", "second")  # what follows goes before what is new
    assert order(said) == [f"{word} {name}" for name in names for word in ("started", "done")]
    assert not any((tmp_path / "scratch").iterdir())


def test_a_pretraining_runs_again_if_something_that_follows_has_no_row(tmp_path):
    row = {"digest": "pretraining", "seed": 0, "seconds": 1.0, "configuration": {}}
    append_row(tmp_path / "fake.jsonl", row)
    first = job(tmp_path, "pretraining")
    outcome, _ = run([first, job(tmp_path, "rte", before=first)])
    assert len(outcome.done) == 2 and not outcome.skipped


def test_a_run_that_stands_in_two_files_runs_once(tmp_path):
    before = [job(tmp_path, "a", seconds=0.3) for _ in range(2)]
    for each in before:
        job(tmp_path, "b", seconds=0.3, before=each)
    family = [each for one in before for each in (one, *one.after)]
    outcome, said = run([*family, job(tmp_path, "c")], slots=3)
    assert outcome.done == ["fake a seed=0", "fake b after fake a seed=0 seed=0", "fake c seed=0"]
    assert outcome.skipped == ["fake a seed=0", "fake b after fake a seed=0 seed=0"]
    assert sorted(order(said)) == sorted(
        f"{word} {name}" for name in "abc" for word in ("started", "done")
    )


def test_runs_share_the_slots(tmp_path):
    planned = [job(tmp_path, name, seconds=0.4) for name in "ab"]
    planned.append(job(tmp_path, "wide", slots=9))
    planned.append(job(tmp_path, "timed", timed=True))
    _, said = run(planned, slots=2)
    found = order(said)
    assert found[:2] == ["started a", "started b"]
    assert found[-4:] == ["started wide", "done wide", "started timed", "done timed"]


class FakeRepeated(Repeated, Fake):
    """The best of some jobs whose processes only wait."""


def repeated(folder, rivals, *seeds):
    made = []
    for seed in seeds:
        choices = [job(folder, f"{rival.keys[0][0]}-seed{seed}") for rival in rivals]
        fields = {item.name: getattr(choices[0], item.name) for item in dataclasses.fields(Job)}
        made.append(FakeRepeated(**fields, rivals=rivals, choices=choices))
    return made


def choose_by(monkeypatch, column, sign):
    """Let a task "fake" be known, whose best row is that with the most, or least, of a column."""
    known = types.ModuleType("fake")
    known.IN_SWEEPS = InSweeps(chosen_by=(column, sign))
    monkeypatch.setitem(sys.modules, "fake", known)
    monkeypatch.setitem(experiment.KINDS, "fake", "fake")


def test_the_best_on_validation_is_repeated_when_all_have_run(tmp_path, monkeypatch):
    choose_by(monkeypatch, "seconds", 1)  # the slowest wins
    times = {"low": 0.1, "high": 0.4, "other": 0.2}
    rivals = [job(tmp_path, name, seconds=seconds) for name, seconds in times.items()]
    outcome, said = run([*rivals, *repeated(tmp_path, rivals, 1, 2)], slots=4)
    assert len(outcome.done) == 5 and not outcome.left
    found = order(said)
    assert {line for line in found if "seed" in line} == {
        f"{word} high-seed{seed}" for word in ("started", "done") for seed in (1, 2)
    }
    assert found.index("started high-seed1") > max(found.index(f"done {name}") for name in times)
    rivals = [job(tmp_path, name, seconds=seconds) for name, seconds in times.items()]
    outcome, _ = run([*rivals, *repeated(tmp_path, rivals, 1, 2, 3)])
    assert len(outcome.skipped) == 5 and outcome.done == ["fake high-seed3 seed=0"]
    choose_by(monkeypatch, "seconds", -1)
    assert best_on_validation(rivals) == 0


# What a process does that knows one more task than lln_study has.
WITH_GUESS = """
import sys
from lln_study.sweep.__main__ import main
from lln_study.tasks import experiment
experiment.KINDS["guess"] = "tests.lln_study.sweep.guess"
main(sys.argv[1])
"""


def test_a_new_task_is_a_module_and_its_name_and_so_is_its_table(tmp_path, monkeypatch):
    monkeypatch.setitem(experiment.KINDS, "guess", "tests.lln_study.sweep.guess")
    command = Job.command
    monkeypatch.setattr(
        Job,
        "command",
        lambda self, *, shared: [
            sys.executable,
            "-c",
            WITH_GUESS,
            command(self, shared=shared)[-1],
        ],
    )
    places = {"data": None, "out": tmp_path, "scratch": tmp_path / "scratch"}
    with pytest.raises(ValueError, match="does not say its guess"):
        plan([{"run": "guess"}], **places)
    content = {
        "base": {"run": "guess"},
        "grid": {"guess": [1, 4]},
        "repeat": {"best_of": "guess", "seed": [1]},
    }
    planned = plan(content, **places)
    for each in planned[:2]:
        jobs.run(each.kind, each.spec, each.place)
    outcome, said = run(planned)
    assert (len(outcome.skipped), len(outcome.done)) == (2, 1), said
    rows = [(row["digest"], row["seed"]) for row in read_rows(tmp_path / "guess.jsonl")]
    assert rows == [("1-of-5", 0), ("4-of-5", 0), ("4-of-5", 1)]
    entry = ("tests.lln_study.sweep.guess", "guesses", "lln sweep guesses.json")
    monkeypatch.setitem(tables.TABLES, "guess", entry)
    shown = CliRunner().invoke(app, ["table", "guess", "--markdown", "--results", str(tmp_path)])
    assert shown.exit_code == 0 and shown.output.count("| 4 | 1 |") == 2, shown.output


def test_what_another_file_has_run_is_repeated_too(tmp_path, monkeypatch):
    choose_by(monkeypatch, "seconds", 1)
    first, again = ([job(tmp_path, name) for name in "ab"] for _ in range(2))
    outcome, _ = run([*first, *again, *repeated(tmp_path, again, 1)])
    assert (len(outcome.done), len(outcome.skipped), len(outcome.left)) == (3, 2, 0)


def test_nothing_is_repeated_where_a_rival_has_failed(tmp_path, monkeypatch):
    choose_by(monkeypatch, "seconds", 1)
    rivals = [job(tmp_path, "good"), job(tmp_path, "bad", fails=True)]
    outcome, _ = run([*rivals, *repeated(tmp_path, rivals, 1)])
    assert (len(outcome.done), len(outcome.failed), len(outcome.left)) == (1, 1, 1)


def test_rates_of_one_mechanism_are_rivals(tmp_path, data):
    small = read(SMOKE)["base"]
    content = {
        "base": {**small, "steps": 1},
        "grid": {"learning_rate": [1e-3, 5e-4], "attention": ["softmax", "lln"], "seed": [0]},
        "repeat": {"best_of": "learning_rate", "seed": [1, 2]},
    }
    planned = plan(content, data=data, out=tmp_path / "out", scratch=tmp_path / "scratch")
    first, later = planned[:4], planned[4:]
    assert [(each.choices[0].spec["attention"], each.spec["seed"]) for each in later] == [
        *(("softmax", 1), ("lln", 1)),
        *(("softmax", 2), ("lln", 2)),
    ]
    assert later[1].rivals == [first[1], first[3]] and not later[1].is_decided()
    assert len({each.label for each in planned}) == len(planned)
    assert first[0].label.endswith("softmax learning_rate=0.001 seed=0")
    assert later[0].label.endswith("learning_rate=0.001 seed=1, or another of 2")
    for each, loss in zip(first, [5.0, 3.0, 4.0, None], strict=True):
        (digest, seed), each.state = each.keys[0], "done"
        append_row(tmp_path / "out" / "mlm.jsonl", {"digest": digest, "seed": seed, "loss": loss})
    assert all(each.is_decided() for each in later)
    assert [each.spec["learning_rate"] for each in later] == [5e-4, 1e-3] * 2
    assert [each.spec["seed"] for each in later] == [1, 1, 2, 2]
    assert later[0].keys[0][0] == first[2].keys[0][0] and later[0].keys[0][1] == 1


def test_a_failed_run_is_explained_and_what_follows_is_not_tried(tmp_path):
    first = job(tmp_path, "pretraining", fails=True)
    outcome, said = run([first, job(tmp_path, "rte", before=first), job(tmp_path, "other")])
    assert len(outcome.failed) == 2 and len(outcome.done) == 1
    assert "    it went wrong" in said
    assert (tmp_path / "scratch" / "pretraining" / "log.txt").exists()


def test_it_stops_in_time_and_goes_on_later(tmp_path):
    """The time is up when the first run has started, however long that takes."""
    said = []

    def hear(line):
        said.append(line)
        if line.startswith("started"):
            sweep.end = time.monotonic()

    sweep = Sweep([job(tmp_path, name, seconds=HANGS) for name in "ab"], minutes=60, say=hear)
    outcome = sweep.run()
    assert len(outcome.left) == 2 and said[1:] == ["time is up: 1 runs are stopped"]
    assert not (tmp_path / "fake.jsonl").exists()
    outcome, _ = run([job(tmp_path, name) for name in "ab"])
    assert len(outcome.done) == 2


def test_what_has_its_row_when_the_time_is_up_is_done(tmp_path):
    """A process may be about to end: nothing of it is left."""

    def hear(line):
        if line.startswith("started"):
            append_row(tmp_path / "fake.jsonl", {"digest": "a", "seed": 0})
            sweep.end = time.monotonic()

    sweep = Sweep([job(tmp_path, name, seconds=HANGS) for name in "ab"], minutes=60, say=hear)
    outcome = sweep.run()
    assert [name.split()[1] for name in outcome.done] == ["a"]
    assert [name.split()[1] for name in outcome.left] == ["b"]


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLN_DATA", raising=False)
    return write_glue(write_text(tmp_path / "data"), train=60, dev=20)


def test_keys_are_known_before_a_run_and_rows_have_them(tmp_path, data):
    """The jobs of the smoke sweep one after the other, in this process."""
    content = read(SMOKE)
    places = {"data": data, "out": tmp_path / "out", "scratch": tmp_path / "scratch"}
    planned = plan(content, **places)
    assert [each.kind for each in planned] == ["mlm", "glue"] * 2
    assert not any(each.has_rows() for each in planned)
    for each in planned:
        told = json.loads(each.command(shared=each.kind == "glue")[-1])
        jobs.run(told["kind"], told["spec"], Place.from_json(told["place"]))
        assert each.has_rows(), each.label
    rows = read_rows(tmp_path / "out" / "glue.jsonl")
    assert all(row["shared"] for row in rows)
    assert not any(row["shared"] for row in read_rows(tmp_path / "out" / "mlm.jsonl"))
    found = [(row["mechanism"], row["configuration"]["task"], row["seed"]) for row in rows]
    tasks = [("sst2", 0), ("sst2", 1), ("stsb", 0), ("stsb", 1)]
    assert found == [(name, *task) for name in ("softmax", "lln_diag") for task in tasks]
    curves = read_rows(tmp_path / "out" / "curves.jsonl")
    assert [line["digest"] for line in curves] == [planned[0].keys[0][0], planned[2].keys[0][0]]
    assert {"train", "eval"} == {row["kind"] for row in curves[0]["rows"]}
    outcome, _ = run(plan(content, **places))
    assert len(outcome.skipped) == 4 and not any((tmp_path / "scratch").iterdir())


def test_a_training_step_is_timed_per_length(tmp_path, data):
    small = read(SMOKE)["base"]
    left_out = ("run", "length")
    spec = {name: value for name, value in small.items() if name not in left_out}
    spec |= {"attention": "lln", "steps": 3, "batch_size": 1, "lengths": [16, 32]}
    place = Place(data, tmp_path / "out", tmp_path / "scratch")
    jobs.run("step", spec, place)
    rows = read_rows(tmp_path / "out" / "step.jsonl")
    assert [(row["digest"], row["seed"]) for row in rows] == jobs.keys("step", spec, place)
    assert [row["configuration"]["length"] for row in rows] == [16, 32]
    assert all(row["step_ms"] > 0 and not row["out_of_memory"] for row in rows)
    jobs.run("step", spec, place)
    assert len(read_rows(tmp_path / "out" / "step.jsonl")) == 2
    assert set(jobs.keys("step", {**spec, "graph": False}, place)).isdisjoint(
        jobs.keys("step", spec, place)
    )


def test_mistakes_in_a_file_are_said(tmp_path, data):
    places = {"data": data, "out": tmp_path, "scratch": tmp_path}
    for content, words in (
        ([{"run": "mml"}], "run='mml' is unknown"),
        ([{"recipe": "roberta-tiny"}], "does not say its kind"),
        ([{**TINY, "step": 5}], "step is no field"),
        (
            [{**TINY, "attention": "softmx"}],
            "attention='softmx' is unknown; did you mean 'softmax'",
        ),
        ([{"run": "glue", "task": "sst2"}], 'needs "from"'),
        ([{**TINY, "then": [TINY]}], "only glue"),
        ({"base": TINY, "repeat": [1]}, r"repeat=\[1\]"),
        ({"base": {"run": "mlm"}}, "does not say its recipe"),
        ({"base": {"run": "lra"}}, "does not say its task"),
        ({"base": STEP, "repeat": REPEAT}, "cannot choose"),
        ({"base": TINY, "then": {"repeat": REPEAT}}, "beside it only"),
    ):
        with pytest.raises(ValueError, match=words):
            plan(content, **places)
    with pytest.raises(ValueError, match="corpus='wiki2015' needs the folder"):
        plan([{**TINY, "corpus": "wiki2015"}], **{**places, "data": None})
    with pytest.raises(ValueError, match=r"absent\.json does not exist"):
        read(tmp_path / "absent.json")
    (tmp_path / "torn.json").write_text('{"base": ')
    with pytest.raises(ValueError, match=r"torn\.json is not a sweep"):
        read(tmp_path / "torn.json")


def test_the_commands_run_what_they_are_asked(tmp_path, data):
    """A pre-training, `lln train glue` from it, and a sweep whose runs have their rows."""
    runner = CliRunner()
    small = [
        "--set",
        "batch_size=8",
        "--set",
        "epochs=1",
        "--set",
        "max_length=32",
        "--set",
        "rates=1e-3",
    ]
    absent = runner.invoke(app, ["train", "glue", "--task", "sst2", "--from", str(tmp_path)])
    assert absent.exit_code == 1 and "neither a run" in str(absent.output) + str(absent.exception)
    run_folder = pretrain(tmp_path, "lln")
    arguments = ["train", "glue", "--task", "sst2", "--from", str(run_folder), *small]
    done = runner.invoke(app, [*arguments, "--data", str(data), "--out", str(tmp_path / "sst2")])
    assert done.exit_code == 0 and "dev: accuracy" in done.output, done.output
    (row,) = read_rows(tmp_path / "sst2" / "results.jsonl")
    assert row["configuration"]["rates"] == [1e-3]
    spec = {"run": "glue", "task": "sst2", "from": str(run_folder), "rates": [1e-3]}
    spec |= {"batch_size": 8, "epochs": 1, "max_length": 32}
    (tmp_path / "one.json").write_text(json.dumps([spec]))
    append_row(tmp_path / "out" / "glue.jsonl", row)
    places = ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "scratch")]
    again = runner.invoke(app, ["sweep", str(tmp_path / "one.json"), "--data", str(data), *places])
    assert again.exit_code == 0 and "0 done, 1 skipped" in again.output, again.output
    (tmp_path / "two.json").write_text(json.dumps([spec]))
    both = [str(tmp_path / name) for name in ("one.json", "two.json")]
    pool = runner.invoke(app, ["sweep", *both, "--data", str(data), *places])
    assert pool.exit_code == 0 and "0 done, 2 skipped" in pool.output, pool.output
    listed = runner.invoke(app, ["sweep", *both, "--data", str(data), *places, "--list"])
    assert listed.exit_code == 0 and listed.output.endswith("2 done, 0 to run\n"), listed.output
    (tmp_path / "bad.json").write_text("{")
    bad = runner.invoke(app, ["sweep", str(tmp_path / "bad.json")])
    assert bad.exit_code == 1 and "is not a sweep" in str(bad.output) + str(bad.exception)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    expand(read(ROOT / "sweeps" / "tier_b.json")),
    ids=lambda spec: "-".join([spec["attention"], *map(str, spec.get("options", {}).values())]),
)
def test_every_mechanism_of_table_1_is_pretrained_and_fine_tuned(tmp_path, data, spec):
    options = {"length": 128, "steps": 2}
    run_folder = pretrain(tmp_path, spec["attention"], sizes=options, **spec.get("options", {}))
    config = glue.configure("sst2", epochs=1, batch_size=8, max_length=32, rates=[1e-3])
    row = fine_tune(config, run_folder, data)
    assert row["mechanism"] == spec["attention"] and 0 <= row["accuracy"] <= 1


def test_a_run_is_told_whether_it_may_share_the_device(tmp_path, monkeypatch):
    told = {}

    def command(self, *, shared):
        told[self.keys[0][0]] = shared
        return [sys.executable, "-S", "-c", ""]

    monkeypatch.setattr(Fake, "command", command)
    for name, slots, timed in (("narrow", 1, False), ("wide", 2, False), ("timed", 1, True)):
        run([job(tmp_path, name, slots=slots, timed=timed)], slots=2)
    assert told == {"narrow": True, "wide": False, "timed": False}
