"""The folder of a run: one process at a time, and only a run that runs takes it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading

import pytest

from lln_study.sweep import __main__ as one_job
from lln_study.sweep.job import Place
from lln_study.sweep.plan import Job
from lln_study.train import runfolder
from lln_study.train.loop import train
from tests.lln_study.train.processes import kill_when, start
from tests.lln_study.train.toy import Toy, toy_config

TOY = ("-m", "tests.lln_study.train.toy")


def run(folder, task=Toy, **changes):
    config = toy_config(**changes)
    return train(task(config), config, folder, tensorboard=False)


def test_a_folder_in_which_another_process_works_is_refused_until_that_is_killed(tmp_path):
    other = start(*TOY, str(tmp_path), "until=4")

    def refused():
        if not (tmp_path / "checkpoints").exists():
            return False
        words = rf"is in use by process {other.pid} on .*; wait .* or choose another folder"
        with pytest.raises(ValueError, match=words):
            run(tmp_path)
        return True

    kill_when(other, refused)
    assert runfolder.holder(tmp_path) is None


def test_a_thread_may_ask_again_and_others_may_not(tmp_path):
    said = []

    def ask():
        try:
            with runfolder.held(tmp_path):
                said.append("in")
        except ValueError as error:
            said.append(str(error))

    with runfolder.held(tmp_path), runfolder.held(tmp_path / "." / ""):
        assert runfolder.holder(tmp_path) == f"process {os.getpid()} on {os.uname().nodename}"
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        ask()
    assert f"in use by process {os.getpid()}" in said[0] and said[1] == "in"
    assert runfolder.holder(tmp_path) is None and runfolder.holder(tmp_path / "none") is None
    with runfolder.held(None):
        pass


def test_the_first_process_of_a_run_holds_it_for_all(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with runfolder.held(tmp_path):
        monkeypatch.setattr(runfolder, "_held", {})  # as in another process
        monkeypatch.setenv("RANK", "1")
        with runfolder.held(tmp_path):
            assert not runfolder.is_first_process()
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ValueError, match="is in use"), runfolder.held(tmp_path):
            pass
        monkeypatch.undo()


def test_a_file_system_without_locks_lets_everybody_in_and_says_so(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.warns(UserWarning, match="no locks: see to it that no other process"),
        runfolder.held(tmp_path),
    ):
        pass


def fail(*_):
    raise ValueError("near=-3 is not possible")


@pytest.mark.parametrize("when", ["build", "batch"])
def test_what_cannot_run_does_not_take_the_folder(tmp_path, when):
    """The corrected call is not refused, at the latest after the first update."""
    wrong = type("Wrong", (Toy,), {when: fail})
    with pytest.raises(ValueError, match="near=-3"):
        run(tmp_path, wrong, learning_rate=0.5)
    assert not (tmp_path / "run.json").exists()
    assert run(tmp_path).steps == 12
    with pytest.raises(ValueError, match=r"learning_rate=0.01 and not 0.5"):
        run(tmp_path, learning_rate=0.5)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "3", "{}", '{"identity": "a"}', '{"identity": "a", "configuration": 3}', "\xff"],
)
def test_a_damaged_run_file_is_named(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"run.json cannot be read.*choose another folder"):
        runfolder.compare(tmp_path, "b", {})


def test_a_job_of_a_sweep_holds_its_folder_to_the_end(tmp_path, monkeypatch):
    """Also while it adds its rows, so that the rerun of a sweep that was killed leaves it alone."""
    seen = []

    def run(kind, spec, place):
        seen.append((spec, runfolder.holder(place.folder)))

    monkeypatch.setattr(one_job, "run", run)
    place = Place(None, tmp_path / "out", tmp_path / "run")
    one_job.main(Job("mlm", {"seed": 3}, 1, [], place).command(shared=False)[-1])
    assert seen == [({"seed": 3}, f"process {os.getpid()} on {os.uname().nodename}")]
