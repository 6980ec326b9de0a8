"""How long a run will take: from rows like its own, each counted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lln.study.sweep import plan
from lln.study.sweep.estimate import _parts, known_seconds
from lln.study.sweep.jobs import glue, lra, step
from lln.study.train.runlog import append_row

SWEEPS = sorted((Path(__file__).resolve().parents[3] / "sweeps").glob("*.json"))
ROWS = {"glue": glue._configs, "step": step._configs, "lra": lra.configs}

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
# As a sweep of training steps leaves them: the first row of a process has its start in it.
STEPS = {
    "softmax_eager": [8.74, 0.8, 0.78, 1.22, 4.06, 0.26, 0.39],
    "softmax": [7.9, 0.55, 0.59, 0.87, 1.04, 2.22, 6.14],
    "nystromformer": [9.54, 0.92, 1.11, 1.32, 1.82, 2.71, 4.76],
}
SPEC = {"recipe": "roberta-base", "steps": 16, "lengths": LENGTHS}


def add(path, name, seconds, seed=0, **configuration):
    configuration = {"attention": name, "seed": seed, **configuration}
    digest = "-".join(map(str, configuration.values()))
    row = {"digest": digest, "seed": seed, "seconds": seconds, "configuration": configuration}
    append_row(path, row)
    return digest, seed


@pytest.fixture
def steps(tmp_path):
    path = tmp_path / "step.jsonl"
    for name, times in STEPS.items():
        for length, seconds in zip(LENGTHS, times, strict=True):
            add(path, name, seconds, recipe="roberta-base", steps=16, length=length)
    return path


def keys(count):
    return [(f"new {number}", 0) for number in range(count)]


def test_a_run_of_several_rows_takes_as_long_as_such_rows_together(steps):
    known = known_seconds({**SPEC, "attention": "lln"}, keys(7), steps)
    assert known == pytest.approx(sum(max(times) for times in zip(*STEPS.values(), strict=True)))
    assert 20 < known < 35


def test_the_same_mechanism_tells_more_than_the_others(steps):
    known = known_seconds({**SPEC, "attention": "softmax", "seed": 1}, keys(7), steps)
    assert known == pytest.approx(sum(STEPS["softmax"]))


def test_rows_that_are_there_are_not_counted(steps):
    there = [
        add(steps, "lln", 1.0, recipe="roberta-base", steps=16, length=length)
        for length in LENGTHS[:5]
    ]
    known = known_seconds({**SPEC, "attention": "lln"}, [*there, *keys(2)], steps)
    assert known == pytest.approx(2.71 + 6.14)


def test_what_nothing_is_like_is_taken_for_the_slowest(steps):
    spec = {**SPEC, "attention": "lln", "lengths": [512, 65536]}
    assert known_seconds(spec, keys(2), steps) == pytest.approx(2 * 9.54)
    assert known_seconds({**SPEC, "steps": 99}, keys(7), steps) is None
    assert known_seconds(SPEC, keys(7), steps.with_name("absent.jsonl")) is None


def test_tasks_and_seeds_of_a_process_are_rows_of_their_own(tmp_path):
    path, rates = tmp_path / "glue.jsonl", [1e-4, 2e-4]
    times = {("mrpc", 0): 40, ("mrpc", 1): 26, ("rte", 0): 16, ("rte", 1): 11}
    for (task, seed), seconds in times.items():
        add(path, "softmax", seconds, seed, task=task, rates=rates, epochs=6)
        add(path, "softmax", 9 * seconds, seed, task=task, rates=3 * rates, epochs=6)
    spec = {"task": ["mrpc", "rte"], "seed": [0, 1], "rates": rates, "epochs": 6}
    assert known_seconds(spec, keys(4), path) == sum(times.values())
    assert known_seconds({**spec, "seed": 7}, keys(2), path) == 40 + 16


def test_every_mechanism_of_a_process_is_looked_up(tmp_path):
    path = tmp_path / "lra.jsonl"
    for name, seconds in (("softmax", 5.0), ("elu", 2.0)):
        add(path, name, seconds, task="text", steps=60)
    spec = {"task": "text", "steps": 60, "attentions": ["softmax", "elu", "reformer"]}
    assert known_seconds({**spec, "throughput": True}, keys(3), path) == 5 + 2 + 5


def test_a_pretraining_that_has_its_row_is_run_again_as_a_whole(tmp_path):
    path = tmp_path / "mlm.jsonl"
    key = add(path, "lln", 180.0, recipe="roberta-small", steps=10)
    spec = {"recipe": "roberta-small", "steps": 10, "attention": "lln"}
    assert known_seconds(spec, [key], path) == 180


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_rows_of_every_run_are_counted_right(path):
    runs = plan.expand(plan.read(path))
    for spec in [*runs, *(other for run in runs for other in plan.expand(run.get("then", [])))]:
        own = {name: value for name, value in spec.items() if name not in plan.OF_THE_SWEEP}
        assert len(_parts(own)) == (len(ROWS[spec["run"]](own)) if spec["run"] in ROWS else 1)
