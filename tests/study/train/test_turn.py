"""Runs that are timed: nothing else trains meanwhile, though what comes next is there already."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from lln.records.rows import read_rows
from lln.study.sweep import jobs
from lln.study.sweep.jobs import Place
from lln.study.sweep.plan import Job, read
from lln.study.sweep.plan import plan as planned
from lln.study.sweep.run import Sweep
from lln.study.train import loop
from lln.study.train.turn import TURN, Gate, wait_for_turn
from tests.study.tasks.small_glue import write_glue, write_text
from tests.study.train.toy import Toy, toy_config

ROOT = Path(__file__).resolve().parents[3]

# A process that notes what it does, and trains until others have noted what they do.
SCRIPT = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from lln.study.train.turn import wait_for_turn
name, out, until, slow, end = sys.argv[2:]
events = out + "/events.txt"

def note(word):
    with open(events, "a") as stream:
        stream.write(f"{word} {name}" + chr(10))

def row(digest, task, seconds):
    with open(out + "/fake.jsonl", "a") as stream:
        line = {"digest": digest, "seed": 0, "seconds": seconds, "configuration": {"task": task}}
        stream.write(json.dumps(line) + chr(10))

note("prepares")
wait_for_turn()
note("trains")
limit = time.monotonic() + 60
while not all(word in open(events).read().splitlines() for word in json.loads(until)):
    if time.monotonic() > limit:
        sys.exit("nobody else came")
    time.sleep(0.02)
if end == "killed":
    os.kill(os.getpid(), 9)
note("trained")
if slow:
    row(slow + " of another mechanism", slow, 500.0)
row(name, name, 0.1)
"""


class Fake(Job):
    """A job whose process only notes what it does."""

    until: tuple[str, ...] = ()
    slow = end = ""

    def command(self):
        until = "[" + ", ".join(f'"{words}"' for words in self.until) + "]"
        words = [self.keys[0][0], str(self.place.out), until, self.slow, self.end]
        return [sys.executable, "-S", "-c", SCRIPT, str(ROOT), *words]


def job(folder, name, *, timed=True, before=None, kind="fake", **how):
    place = Place(None, folder, folder / "scratch" / name)
    made = Fake(kind, {"task": name}, 1, [(name, 0)], place, before, timed=timed)
    for field, value in how.items():
        setattr(made, field, value)
    if before is not None:
        before.after.append(made)
    return made


def run(folder, plan, **options):
    said = []
    outcome = Sweep(plan, say=said.append, **options).run()
    return outcome, said, (folder / "events.txt").read_text().splitlines()


def assert_alone(events, name):
    """Nothing begins or ends to train between its first and its last timed update."""
    inside = events[events.index(f"trains {name}") + 1 : events.index(f"trained {name}")]
    assert not [words for words in inside if not words.startswith("prepares")], events


def test_the_next_timed_run_prepares_itself_while_one_trains(tmp_path):
    plan = [job(tmp_path, "a", until=("prepares b",)), job(tmp_path, "b"), job(tmp_path, "c")]
    outcome, _, events = run(tmp_path, plan)
    assert len(outcome.done) == 3
    for name in "abc":
        assert_alone(events, name)
    trained = [words for words in events if words.startswith("trains")]
    assert trained == ["trains a", "trains b", "trains c"]  # in order
    assert events.index("prepares c") > events.index("trained a")  # one ahead


def test_what_follows_a_timed_run_goes_before_the_next_and_never_beside_one(tmp_path):
    first = job(tmp_path, "a", until=("prepares rte", "prepares cola", "prepares b"))
    then = [
        job(tmp_path, "rte", timed=False, before=first, until=("trains cola",)),  # at once
        job(tmp_path, "cola", timed=False, before=first, until=("trains rte",)),
        job(tmp_path, "sst2", timed=False, before=first),
    ]
    second = job(tmp_path, "b", until=("prepares mrpc",))
    last = job(tmp_path, "mrpc", timed=False, before=second)
    outcome, _, events = run(tmp_path, [first, *then, second, last], slots=2)
    assert len(outcome.done) == 6
    assert_alone(events, "a")
    assert_alone(events, "b")
    for name in ("rte", "cola", "sst2"):
        assert events.index("trained a") < events.index(f"trains {name}")
        assert events.index(f"trained {name}") < events.index("trains b")
    assert events[-2:] == ["trains mrpc", "trained mrpc"]
    assert not any((tmp_path / "scratch").iterdir())


def test_a_timed_run_waits_for_the_others(tmp_path):
    plan = [job(tmp_path, "a", timed=False, until=("prepares b",)), job(tmp_path, "b")]
    outcome, _, events = run(tmp_path, plan, slots=2)
    assert len(outcome.done) == 2
    assert events.index("trained a") < events.index("trains b")


def test_another_kind_is_not_started_ahead(tmp_path):
    """It might compile on the GPU while a few updates of the other are timed."""
    other = job(tmp_path, "b", kind="other")
    outcome, _, events = run(tmp_path, [job(tmp_path, "a"), other])
    assert events.index("trained a") < events.index("prepares b")
    assert len(outcome.done) == 1  # its row is looked for in other.jsonl


def test_the_turn_of_a_killed_run_goes_to_the_next(tmp_path):
    first = job(tmp_path, "a", until=("prepares rte", "prepares b"), end="killed")
    follower = job(tmp_path, "rte", timed=False, before=first)
    outcome, _, events = run(tmp_path, [first, follower, job(tmp_path, "b")])
    assert len(outcome.failed) == 2 and len(outcome.done) == 1
    assert events[-2:] == ["trains b", "trained b"]
    assert "trained a" not in events and "trains rte" not in events


def test_a_prepared_run_that_would_take_too_long_is_dismissed(tmp_path):
    first = job(tmp_path, "a", until=("prepares b",), slow="b")  # says that b takes 500 s
    outcome, said, events = run(tmp_path, [first, job(tmp_path, "b", end="killed")], minutes=1)
    assert len(outcome.done) == 1 and "prepares b" in events and "trains b" not in events
    assert any(line.startswith("not started") for line in said)


def test_nobody_waits_for_a_sweep_that_was_killed(tmp_path, monkeypatch):
    path = tmp_path / "turn"
    code = f"""
import time
from pathlib import Path
from lln.study.train.turn import Gate
gate = Gate(Path({str(path)!r}))
print("closed", flush=True)
time.sleep(600)
"""
    monkeypatch.setenv(TURN, str(path))
    events: list[str] = []
    waiting = threading.Thread(target=lambda: (wait_for_turn(), events.append("goes on")))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"closed\n"
        waiting.start()
        waiting.join(0.2)
        events.append("kill")
        holder.kill()
    waiting.join(60)
    assert events == ["kill", "goes on"]
    assert wait_for_turn() == 0.0  # once


def test_the_loop_waits_before_its_first_timed_update(tmp_path, monkeypatch):
    gate = Gate(tmp_path / "turn")
    monkeypatch.setenv(TURN, str(gate.path))
    events = []

    class Watched(Toy):
        def batch(self, step, rows):
            events.append(step)
            return super().batch(step, rows)

    def open_it():
        while not events:
            time.sleep(0.01)
        time.sleep(0.2)
        events.append("opened")
        gate.open()

    opener = threading.Thread(target=open_it)
    opener.start()
    config = toy_config(eval_every=0)
    summary = loop.train(Watched(config), config, None)
    opener.join()
    assert events == [0, "opened", *range(1, config.steps)]
    assert summary.waited_seconds > 0


def test_waiting_is_off_the_clock(monkeypatch):
    now = [0.0]

    class Ticking(Toy):
        def batch(self, step, rows):
            now[0] += 1
            return super().batch(step, rows)

    def wait():
        now[0] += 100
        return 100.0

    config = toy_config(eval_every=0)
    task = Ticking(config)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
        patch.setattr(loop, "wait_for_turn", wait)
        summary = loop.train(task, config, None)
    assert (summary.first_seconds, summary.waited_seconds) == (1, 100)
    assert summary.seconds == config.steps - 1 and summary.step_ms == 1000


def smoke(folder, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(folder / "cache"))
    data = write_glue(write_text(folder / "data"), train=60, dev=20)
    content = read(ROOT / "sweeps" / "smoke.json")
    content["base"]["timed"] = True
    return planned(content, data=data, out=folder / "out", scratch=folder / "scratch")


def test_rows_do_not_count_the_time_that_a_run_has_waited(tmp_path, monkeypatch):
    first = smoke(tmp_path, monkeypatch)[0]
    assert first.timed
    monkeypatch.setattr(loop, "wait_for_turn", lambda: 1e6)
    jobs.find("mlm").run(first.spec, first.place)
    (row,) = read_rows(tmp_path / "out" / "mlm.jsonl")
    assert row["seconds"] < 0 < row["train_seconds"] < 1e6


@pytest.mark.slow
def test_a_timed_sweep_of_real_runs_ends_as_any_other(tmp_path, monkeypatch):
    said: list[str] = []
    outcome = Sweep(smoke(tmp_path, monkeypatch), slots=2, say=said.append).run()
    assert len(outcome.done) == 4, said
    assert [line.split()[0] for line in said if "mlm" in line and "glue" not in line] == [
        *("started:", "done") * 2
    ]
    assert len(read_rows(tmp_path / "out" / "glue.jsonl")) == 8
    assert not any((tmp_path / "scratch").iterdir())
