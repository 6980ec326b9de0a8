"""Many runs at once, each in a process of its own, rows only ever added.

A run that has its row is skipped. What is pre-trained stays in the scratch folder until all that
follows has its rows, and an interrupted pre-training continues.

The speed of a run with ``"timed": true`` is reported, so nothing else runs beside it. The row of a
run that may have had company says so (``shared``), and no table shows its speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lln_study.sweep.plan import FINISHED, Job, tell_apart
from lln_study.train.runfolder import holder

POLL_SECONDS = 0.2
UNFINISHED = ("waiting", "running")


@dataclass(frozen=True)
class Outcome:
    """How a sweep ended: labels of the runs; those that diverged have their rows and are done."""

    done: list[str]
    skipped: list[str]
    failed: list[str]
    left: list[str]
    diverged: list[str]


@dataclass(eq=False)
class _Process:
    """The process of a job."""

    job: Job
    popen: subprocess.Popen
    since: float


class Sweep:
    """Runs jobs as processes.

    Args:
        slots: Places that running jobs share.
        minutes: After which nothing is started and what runs is stopped, to be continued another
            time.
        say: Told what happens, a line each.
    """

    def __init__(
        self,
        plan: Sequence[Job],
        *,
        slots: int = 1,
        minutes: float | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.jobs, self.slots, self.say = list(plan), max(1, slots), say
        tell_apart(self.jobs)
        self.started = time.monotonic()
        self.end = None if minutes is None else self.started + 60 * minutes
        self.processes: list[_Process] = []
        self.held: set[str] = set()
        self.diverged: list[str] = []

    def tell(self) -> list[Job]:
        """Say what has its rows and what would be run; the latter, which is not run."""
        self._skip(tidy=False)
        waiting = [job for job in self.jobs if job.state == "waiting"]
        unknown = [job for job in waiting if job.unknown]
        for job in self.jobs:
            if job.before is None:
                after = [other for other in job.after if other in waiting and not other.has_rows()]
                more = f", then {len(after)} of {len(job.after)} that follow" if after else ""
                word = "unknown" if job in unknown else "to run" if job in waiting else "done"
                self.say(f"{word:8}{job.label}{more}")
        done = len(self.jobs) - len(waiting)
        self.say(f"{done} done, {len(waiting) - len(unknown)} to run")
        if unknown:
            reason = unknown[0].unknown
            self.say(f"{len(unknown)} may have their rows, which takes their data: {reason}")
        return waiting

    def run(self) -> Outcome:
        """Run jobs until all are done or have failed, or the time is up."""
        self._skip()
        try:
            while True:
                self._collect()
                while self._start_what_fits():
                    pass  # what was skipped may have decided what else is to run
                running = sum(job.state == "running" for job in self.jobs)
                if not running:
                    break
                if self._is_time_up():
                    self.say(f"time is up: {running} runs are stopped")
                    break
                time.sleep(POLL_SECONDS)
        finally:
            self._stop()
        states = {
            state: [job.label for job in self.jobs if job.state == state]
            for state in ("done", "skipped", "failed", "waiting")
        }
        return Outcome(*states.values(), diverged=self.diverged)

    def _skip(self, *, tidy: bool = True) -> None:
        """Skip jobs that have their rows; a pre-training only if all that follows has, too."""
        for job in self.jobs:
            if self._has_all_rows(job):
                job.state = "skipped"
                if tidy:
                    self._tidy(job)

    @staticmethod
    def _has_all_rows(job: Job) -> bool:
        return job.has_rows() and all(follower.has_rows() for follower in job.after)

    def _is_time_up(self) -> bool:
        return self.end is not None and time.monotonic() >= self.end

    def _start_what_fits(self) -> bool:
        """Start followers first, for whose sake checkpoints stay; whether any job was skipped."""
        skipped = sum(job.state == "skipped" for job in self.jobs)
        waiting = [job for job in self.jobs if job.state == "waiting"]
        ready = [
            job
            for job in waiting
            if (job.before is None or job.before.state == "done") and job.is_decided()
        ]
        for job in sorted(ready, key=lambda job: job.before is None):
            if self._places(job) > self._room():
                if job.before is None:
                    break  # keep the order, or a wide run would wait for ever
                continue
            if not (self._is_run_elsewhere(job) or self._is_held(job) or self._is_time_up()):
                self._start(job)
        return sum(job.state == "skipped" for job in self.jobs) > skipped

    def _is_run_elsewhere(self, job: Job) -> bool:
        """Whether an earlier job is the same run, as two files may hold it, and gives the rows."""
        name, earlier = (job.kind, job.keys), self.jobs[: self.jobs.index(job)]
        for other in earlier:
            same = (other.kind, other.keys) == name and other.is_decided()
            if same and any(each.state in UNFINISHED for each in (other, *other.after)):
                return True
        if job.state == "waiting" and self._has_all_rows(job):
            for each in (job, *job.after):
                each.state = "skipped"
        return job.state == "skipped"

    def _is_held(self, job: Job) -> bool:
        """Whether a process that is not ours runs it, as those of a sweep that was killed may."""
        other = holder(job.place.folder)
        if other is not None and job.label not in self.held:
            self.held.add(job.label)
            self.say(f"not started, {other} is at it: {job.label}")
        return other is not None

    def _places(self, job: Job) -> int:
        return self.slots if job.timed else min(job.slots, self.slots)

    def _room(self) -> float:
        """Places that are free."""
        return self.slots - sum(self._places(process.job) for process in self.processes)

    def _start(self, job: Job) -> None:
        job.place.folder.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // self.slots)
        command = job.command(shared=self._places(job) < self.slots)
        with (job.place.folder / "log.txt").open("ab") as log:
            popen = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads), **os.environ},
            )
        self.processes.append(_Process(job, popen, time.monotonic()))
        job.state = "running"
        self.say(f"started: {job.label}")

    def _collect(self) -> None:
        for process in list(self.processes):
            if process.popen.poll() is not None:
                self.processes.remove(process)
                self._finish(process)

    def _finish(self, process: _Process) -> None:
        good = process.popen.returncode == 0 and process.job.has_rows()
        self._end(process.job, process.since, good=good)

    def _end(self, job: Job, since: float, *, good: bool) -> None:
        """Say how a job ended; what follows a failed one fails with it."""
        job.state = "done" if good else "failed"
        self.say(f"{job.state} in {time.monotonic() - since:.0f} s: {job.label}")
        if not good:
            self._explain(job)
        elif job.has_diverged():
            self.diverged.append(job.label)
            self.say("    it diverged, and its row says so")
        self._tidy(job.before or job)

    def _explain(self, job: Job) -> None:
        lines = (job.place.folder / "log.txt").read_text(errors="replace").splitlines()
        for line in lines[-5:]:
            self.say(f"    {line}")
        for follower in job.after:
            follower.state = "failed"

    def _tidy(self, job: Job) -> None:
        """Remove a run's folder when nothing needs it; that of a failed run stays, for its log."""
        if job.state in FINISHED and all(
            other.state in FINISHED or other.has_rows() for other in job.after
        ):
            for each in (job, *job.after):
                if holder(each.place.folder) is None:
                    shutil.rmtree(each.place.folder, ignore_errors=True)

    def _stop(self) -> None:
        """End all processes, whose jobs then wait again unless they have their rows by now."""
        for process in self.processes:
            process.popen.terminate()
        for process in self.processes:
            try:
                process.popen.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
            process.job.state = "done" if process.job.has_rows() else "waiting"
        self.processes.clear()
