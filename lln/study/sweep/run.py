"""Many runs at once, each in a process of its own, rows only ever added.

A run that has its row is skipped. What is pre-trained stays in the scratch folder until all that
follows has its rows, and an interrupted pre-training continues.

The speed of a run with ``"timed": true`` is reported, so nothing else is trained while it is being
timed. What comes next is started ahead all the same: the next timed run imports, reads, builds and
compiles, and stops before its first update that is timed; what follows the running one imports its
packages. Then what follows goes first, and the next timed run when nothing else is left to run. The
row of a run that may have had company says so (``shared``), and no table shows its speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lln.study.sweep.estimate import known_seconds
from lln.study.sweep.plan import FINISHED, Job
from lln.study.train.runfolder import holder
from lln.study.train.turn import SHARED, TURN, Gate, can_wait

POLL_SECONDS = 0.2
UNFINISHED = ("waiting", "ahead", "running")


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
    """Of a job; its gate is closed as long as the job was only started ahead."""

    job: Job
    popen: subprocess.Popen
    since: float
    gate: Gate | None


class Sweep:
    """Runs jobs as processes.

    Args:
        slots: Places that running jobs share.
        minutes: After which everything is stopped; a run that is known to take longer than what is
            left is not started.
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
        self.started = time.monotonic()
        self.end = None if minutes is None else self.started + 60 * minutes
        self.processes: list[_Process] = []
        self.late: set[str] = set()
        self.held: set[str] = set()
        self.diverged: list[str] = []

    def tell(self) -> list[Job]:
        """Say what has its rows and what would be run; the latter, which is not run."""
        self._skip(tidy=False)
        waiting = [job for job in self.jobs if job.state == "waiting"]
        for job in self.jobs:
            if job.before is None:
                after = [other for other in job.after if other in waiting and not other.has_rows()]
                more = f", then {len(after)} of {len(job.after)} that follow" if after else ""
                self.say(f"{'to run' if job in waiting else 'done':8}{job.label}{more}")
        self.say(f"{len(self.jobs) - len(waiting)} done, {len(waiting)} to run")
        return waiting

    def run(self) -> Outcome:
        """Until all is done, has failed, or the time is up."""
        self._skip()
        try:
            while True:
                self._collect()
                while self._start_what_fits():
                    pass  # what was skipped may have decided what else is to run
                self._start_what_follows_ahead()
                if not self.processes:
                    break
                if self._left() is not None and self._left() <= 0:  # type: ignore[operator]
                    running = sum(job.state == "running" for job in self.jobs)
                    self.say(f"time is up: {running} runs are stopped")
                    break
                time.sleep(POLL_SECONDS)
        finally:
            self._stop(self.processes)
        states = {
            state: [job.label for job in self.jobs if job.state == state]
            for state in ("done", "skipped", "failed", "waiting")
        }
        return Outcome(*states.values(), diverged=self.diverged)

    def _skip(self, *, tidy: bool = True) -> None:
        """Jobs that have their rows; a pre-training only if all that follows has, too."""
        for job in self.jobs:
            if self._has_all_rows(job):
                job.state = "skipped"
                if tidy:
                    self._tidy(job)

    @staticmethod
    def _has_all_rows(job: Job) -> bool:
        return job.has_rows() and all(follower.has_rows() for follower in job.after)

    def _left(self) -> float | None:
        return None if self.end is None else self.end - time.monotonic()

    def _start_what_fits(self) -> bool:
        """Followers first: what they wait for takes room on the disk; whether any was skipped."""
        skipped = sum(job.state == "skipped" for job in self.jobs)
        waiting = [job for job in self.jobs if job.state in ("waiting", "ahead")]
        ready = [
            job
            for job in waiting
            if (job.before is None or job.before.state == "done") and job.is_decided()
        ]
        for job in sorted(ready, key=lambda job: job.before is None):
            used = sum(self._places(other) for other in self._running())
            if self._places(job) > self.slots - used:
                if job.before is None:
                    self._start_next_ahead(job)
                    break  # keep the order, or a wide run would wait for ever
                continue
            if not (self._is_run_elsewhere(job) or self._is_held(job) or self._too_late(job)):
                self._go(job)
        return sum(job.state == "skipped" for job in self.jobs) > skipped

    def _is_run_elsewhere(self, job: Job) -> bool:
        """Two files may hold the same run: the second waits for the first, whose rows are its."""
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
        if any(process.job is job for process in self.processes):
            return False
        other = holder(job.place.folder)
        if other is not None and job.label not in self.held:
            self.held.add(job.label)
            self.say(f"not started, {other} is at it: {job.label}")
        return other is not None

    def _running(self) -> Iterator[Job]:
        return (job for job in self.jobs if job.state == "running")

    def _places(self, job: Job) -> int:
        return self.slots if job.timed else min(job.slots, self.slots)

    def _too_late(self, job: Job) -> bool:
        left, results = self._left(), job.place.results(job.kind)
        known = known_seconds(job.spec, job.keys, results)
        if left is None or (left > 0 and (known is None or known <= left)):
            return False
        if job.label not in self.late:
            self.late.add(job.label)
            self.say(f"not started, {left:.0f} s are left: {job.label}")
        self._stop([process for process in self.processes if process.job is job])
        return True

    def _start_next_ahead(self, job: Job) -> None:
        """One at a time; not beside another kind, whose few updates compiling might disturb."""
        ahead = any(other.state == "ahead" and other.before is None for other in self.jobs)
        alike = all(other.kind == job.kind for other in self._running() if other.timed)
        possible = job.timed and alike and not ahead and can_wait() and not self._is_held(job)
        if possible and not self._is_run_elsewhere(job) and not self._too_late(job):
            self._start(job, ahead=True)

    def _start_what_follows_ahead(self) -> None:
        """Of a timed run that is running, as many as will find a place."""
        if can_wait():
            for job in [job for job in self._running() if job.timed]:
                for follower in job.after[: self.slots]:
                    if follower.state == "waiting" and not self._is_held(follower):
                        self._start(follower, ahead=True)

    def _go(self, job: Job) -> None:
        """Let a job run, whose process may be there already."""
        for process in self.processes:
            if process.job is job and process.gate is not None:
                process.gate.open()
                process.gate, process.since = None, time.monotonic()
                break
        else:
            self._start(job, ahead=False)
        job.state = "running"
        self.say(f"started: {job.label}")

    def _start(self, job: Job, *, ahead: bool) -> None:
        job.place.folder.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // self.slots)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        if self._places(job) < self.slots:
            environment[SHARED] = "1"
        gate = Gate(job.place.folder / "turn") if ahead else None
        if gate is not None:
            environment[TURN] = str(gate.path)
            job.state = "ahead"
        with (job.place.folder / "log.txt").open("ab") as log:
            popen = subprocess.Popen(
                job.command(), stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        self.processes.append(_Process(job, popen, time.monotonic(), gate))

    def _collect(self) -> None:
        for process in list(self.processes):
            if process.popen.poll() is not None and process in self.processes:
                self.processes.remove(process)
                self._finish(process)

    def _finish(self, process: _Process) -> None:
        job, seconds = process.job, time.monotonic() - process.since
        good = process.popen.returncode == 0 and job.has_rows()
        job.state = "done" if good else "failed"
        self.say(f"{job.state} in {seconds:.0f} s: {job.label}")
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
        self._stop([process for process in self.processes if process.job.before is job])
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

    def _stop(self, processes: Iterable[_Process]) -> None:
        """End processes, whose jobs then wait again."""
        stopped = list(processes)
        for process in stopped:
            process.popen.terminate()
            process.job.state = "waiting"
        for process in stopped:
            try:
                process.popen.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
            if process.gate is not None:
                process.gate.open()
            self.processes.remove(process)
