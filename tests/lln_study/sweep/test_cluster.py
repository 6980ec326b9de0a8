"""Sweeps on a Ray cluster: what a task does, and two workers here of which some are killed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lln
from lln.cli.app import app
from lln.records.rows import read_rows
from lln_study.sweep import cluster
from lln_study.sweep.cluster import RESTARTS, ClusterSweep, work
from lln_study.sweep.plan import plan, read
from lln_study.sweep.run import Outcome
from tests.lln_study.sweep.patient import let_go_on, patient_work
from tests.lln_study.tasks.small_glue import write_glue, write_text
from tests.waiting import HANGS, wait_until

ROOT = Path(__file__).resolve().parents[3]
SMOKE = Path(__file__).with_name("smoke.json")
ALONE = {**read(SMOKE)["base"], "attention": "softmax", "steps": 1}
TASKS = [("sst2", 0), ("sst2", 1), ("stsb", 0), ("stsb", 1)]

# Ray reads them when it is imported and started: a busy machine takes longer than it waits.
for _name in (
    "gcs_server_port_wait_time_s",
    "NUM_REDIS_GET_RETRIES",
    "worker_register_timeout_seconds",
):
    os.environ.setdefault(f"RAY_{_name}", str(HANGS))
os.environ.setdefault("RAY_worker_niceness", "0")  # of 15, beside other tests hardly one starts


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLN_DATA", raising=False)
    return write_glue(write_text(tmp_path / "data"), train=60, dev=20)


def planned(content, folder, data):
    return plan(content, data=data, out=folder / "out", scratch=folder / "scratch")


def test_a_task_sends_what_has_no_row_and_leaves_no_folder(tmp_path, data):
    first, second = planned(read(SMOKE), tmp_path, data)[:2]
    told = [cluster._told(each, shared=True) for each in (first, second)]
    told[1] = dataclasses.replace(told[1], finished=frozenset(second.keys[1:3]))
    news = list(work(told, {}, lln.__version__))
    assert [(each.index, each.what) for each in news] == [
        *((0, "started"), (0, "row"), (0, "row"), (0, "ended")),
        *((1, "started"), (1, "row"), (1, "row"), (1, "ended")),
    ]
    rows = [each for each in news if each.what == "row"]
    assert [each.name for each in rows] == ["mlm", "curves", "glue", "glue"]
    tasks = [(each.content["configuration"]["task"], each.content["seed"]) for each in rows[2:]]
    assert tasks == [TASKS[0], TASKS[3]] and all(each.content["shared"] for each in rows)
    assert not (tmp_path / "out").exists() and not any((tmp_path / "scratch").iterdir())


def test_an_error_on_a_worker_is_told_and_what_follows_is_not_tried(tmp_path, data):
    told = [cluster._told(each, shared=False) for each in planned(read(SMOKE), tmp_path, data)[:2]]
    place = dataclasses.replace(told[0].place, data=tmp_path / "absent")
    absent = [dataclasses.replace(told[0], place=place), told[1]]
    started, failed = work(absent, {}, lln.__version__)
    assert (started.what, failed.what) == ("started", "failed") and "absent" in failed.content
    _, failed = work(told, {}, "0.0.1")
    assert f"lln {lln.__version__} is installed on" in failed.content


def test_a_place_is_a_part_of_a_gpu_or_of_the_largest_machine():
    gpus = [{"CPU": 64.0, "GPU": 8.0}, {"CPU": 12.0, "GPU": 2.0}, {"CPU": 96.0}]
    assert cluster._whole(gpus) == {"GPU": 1, "CPU": 6.0}
    assert cluster._whole([{"CPU": 4.0}, {"CPU": 16.0}]) == {"CPU": 16.0}
    assert [cluster._part(6, places / 4) for places in (1, 2, 4)] == [1, 3, 6]
    assert [cluster._part(1, places / 3) for places in (1, 2, 3)] == [0.3333, 0.6666, 1]
    assert 3 * cluster._part(1, 1 / 3) <= 1


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--ray"], "auto"),
        (["--ray", "--jobs", "2"], "auto"),
        (["--ray", "10.0.0.1:6379"], "10.0.0.1:6379"),
        ([], None),
    ],
)
def test_the_address_of_a_cluster_may_be_left_out(tmp_path, monkeypatch, words, address):
    asked = []

    class Asked:
        def __init__(self, plan, *, address=None, **options):
            asked.append(address)

        def run(self):
            return Outcome([], [], [], [], [])

    monkeypatch.setattr("lln_study.sweep.run.Sweep", Asked)
    monkeypatch.setattr("lln_study.sweep.cluster.ClusterSweep", Asked)
    (tmp_path / "none.json").write_text("[]")
    file = str(tmp_path / "none.json")
    for line in (["sweep", file, *words], ["sweep", *words, file]):
        done = CliRunner().invoke(app, line)
        assert done.exit_code == 0, done.output
    assert asked == [address] * 2


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match=r"ray://host:10001 is Ray's client"):
        ClusterSweep([], address="ray://host:10001")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'lln-attention\[cluster\]'"):
        ClusterSweep([])


class Killer:
    """Hears what a sweep says, and kills the processes of runs that start, one for each word."""

    def __init__(self, out: Path, *words: str) -> None:
        self.out, self.words, self.said = out, list(words), []

    def __call__(self, line: str) -> None:
        self.said.append(line)
        found = re.match(r"started by process (\d+) on \S+: (.*)", line)
        if not found:
            return
        word = next((word for word in self.words if found[2].startswith(word)), None)
        if word:
            self.words.remove(word)
            os.kill(int(found[1]), signal.SIGKILL)
        else:
            let_go_on(self.out, int(found[1]))


@pytest.fixture(scope="module")
def two_workers():
    """A cluster of two CPUs and, as Ray counts, a GPU, of which each run takes half."""
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, num_gpus=1, object_store_memory=80 * 2**20, **options)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_killed_runs_are_started_again_and_rows_come_to_one_file(
    tmp_path, data, two_workers, monkeypatch
):
    monkeypatch.setattr(cluster, "work", patient_work)
    killer = Killer(tmp_path / "out", "mlm roberta-tiny softmax", "glue")
    jobs = planned(read(SMOKE), tmp_path, data)
    outcome = ClusterSweep(jobs, slots=2, say=killer).run()
    assert len(outcome.done) == 4 and not (outcome.failed or outcome.left), killer.said
    assert killer.said[0] == "1 machines; 2 places in each 1 GPUs, 2 CPUs"
    assert not killer.words and sum(line.startswith("lost, ") for line in killer.said) == 2
    rows = read_rows(tmp_path / "out" / "glue.jsonl")
    found = sorted((row["mechanism"], row["configuration"]["task"], row["seed"]) for row in rows)
    assert found == [(name, *task) for name in ("lln_diag", "softmax") for task in TASKS]
    assert all(row["shared"] for row in rows)
    for name in ("mlm", "curves"):
        assert len(read_rows(tmp_path / "out" / f"{name}.jsonl")) == 2
    assert not any((tmp_path / "scratch").iterdir())
    again = ClusterSweep(planned(read(SMOKE), tmp_path, data), say=killer).run()
    assert len(again.skipped) == 4


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_fails_alone(tmp_path, data, two_workers, monkeypatch):
    monkeypatch.setattr(cluster, "work", patient_work)
    content = [{**ALONE, "then": read(SMOKE)["then"]}, {**ALONE, "seed": 1}]
    killer = Killer(tmp_path / "out", *["mlm roberta-tiny softmax seed=0"] * 9)
    outcome = ClusterSweep(planned(content, tmp_path, data), slots=2, say=killer).run()
    assert len(killer.words) == 9 - 1 - RESTARTS
    assert len(outcome.failed) == 2 and outcome.done == ["mlm roberta-tiny softmax seed=1"]
    assert any("worker died" in line for line in killer.said if line.startswith("    "))
    assert [row["seed"] for row in read_rows(tmp_path / "out" / "mlm.jsonl")] == [1]


@pytest.mark.slow
def test_time_that_is_up_ends_the_tasks(tmp_path, data, two_workers):
    """The time is up when the run has started, however long a busy machine takes until then."""
    said = []

    def hear(line):
        said.append(line)
        if line.startswith("started by"):
            sweep.end = time.monotonic()

    jobs = planned([{**ALONE, "steps": 10**6}], tmp_path, data)
    sweep = ClusterSweep(jobs, minutes=60, say=hear)
    outcome = sweep.run()
    assert len(outcome.left) == 1 and said[-1] == "time is up: 1 runs are stopped"
    pid = int(next(re.findall(r"process (\d+)", line)[0] for line in said if "process" in line))
    wait_until(lambda: _is_gone(pid))


@pytest.mark.slow
def test_time_that_is_up_before_a_task_has_started_leaves_it_waiting(tmp_path, data, two_workers):
    said = []
    jobs = planned([{**ALONE, "steps": 10**6}], tmp_path, data)
    outcome = ClusterSweep(jobs, minutes=0, say=said.append).run()
    assert len(outcome.left) == 1 and not outcome.done and not outcome.failed
    assert not any(line.startswith("started by") for line in said)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# What a shell starts in the background ignores an interrupt, and so does all that it starts.
LISTENS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
def test_the_command_starts_a_cluster_and_ends_it_when_interrupted(tmp_path, data):
    pytest.importorskip("ray")
    (tmp_path / "sweep.json").write_text(json.dumps([{**ALONE, "steps": 10**6}]))
    words = ["--data", str(data), "--out", "out", "--scratch", "scratch", "--ray"]
    line = [sys.executable, "-u", "-m", "lln.cli", "sweep", "sweep.json", *words]
    line = [sys.executable, "-c", LISTENS, *line]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said, pid = "", None
    with subprocess.Popen(line, cwd=tmp_path, env=environment, **pipes) as command:
        for part in command.stdout:
            said += part
            if found := re.match(r"started by process (\d+)", part):
                pid = int(found[1])
                command.send_signal(signal.SIGINT)
    assert command.returncode == 130, said
    assert pid is not None
    wait_until(lambda: _is_gone(pid))


@pytest.mark.slow
def test_the_run_of_a_lost_machine_goes_to_another(tmp_path, data, monkeypatch):
    """Ray counts two machines of one CPU each, which are processes here."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    ray.shutdown()  # what the tests before have left
    monkeypatch.setattr(cluster, "work", patient_work)
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0})
    nodes = [machines.add_node(num_cpus=1, num_gpus=0) for _ in range(2)]
    said = []

    def lose_the_first_at_work(line):
        said.append(line)
        found = re.match(r"started by process (\d+)", line)
        if found and len(nodes) == 2:
            raylet = int(Path(f"/proc/{found[1]}/stat").read_text().split()[3])
            lost = next(n for n in nodes if n.all_processes["raylet"][0].process.pid == raylet)
            nodes.remove(lost)
            machines.remove_node(lost, allow_graceful=False)
        elif found:
            let_go_on(tmp_path / "out", int(found[1]))

    try:
        jobs = planned([ALONE, {**ALONE, "seed": 1}], tmp_path, data)
        outcome = ClusterSweep(jobs, address=machines.address, say=lose_the_first_at_work).run()
    finally:
        ray.shutdown()
        machines.shutdown()
    assert len(outcome.done) == 2 and sum(line.startswith("lost, ") for line in said) == 1, said
    assert said[0].startswith("3 machines; 1 places")
    assert len(read_rows(tmp_path / "out" / "mlm.jsonl")) == 2
