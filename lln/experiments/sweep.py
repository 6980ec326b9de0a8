"""Many runs from one file: each in a process of its own, several at once, rows only ever added.

    {"base": {"run": "mlm", "recipe": "roberta-small"},              fields that all runs share
     "grid": {"attention": ["softmax", "lln_diag"], "seed": [0, 1]}, every combination
     "runs": [{"options": {"method": "entropy"}}, {}],               each of these
     "then": {"base": {"run": "glue"}, "grid": {"task": ["rte"]}}}   after each, from its checkpoint

or a list of runs. ``slots`` of a run says how many of the places of ``--jobs`` it takes. A run that
has its row is skipped. What is pre-trained stays in the scratch folder until all that follows has
its rows, and an interrupted pre-training continues.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lln.experiments import jobs
from lln.experiments.jobs import Key, Place, Spec
from lln.experiments.runlog import has_row
from lln.instruments.rows import read_rows

OF_THE_SWEEP = ("run", "slots", "then")  # the rest are fields of the run
POLL_SECONDS = 0.2
SETS = ("base", "grid", "runs", "then")


def read(path: Path) -> Any:
    """The content of a sweep file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a sweep: {error}") from None


def expand(content: Any) -> list[Spec]:
    """The runs of a sweep file: base, then each of runs, then every point of grid, the later wins.

    Example:
        >>> expand({"base": {"run": "mlm"}, "grid": {"seed": [0, 1]}})
        [{'run': 'mlm', 'seed': 0}, {'run': 'mlm', 'seed': 1}]
    """
    if isinstance(content, list):
        return [spec for entry in content for spec in expand({"runs": [entry]})]
    if not isinstance(content, dict) or set(content) - set(SETS):
        wrong = sorted(set(content) - set(SETS)) if isinstance(content, dict) else content
        raise ValueError(
            f"a sweep has {wrong!r}; it is a list of runs, or an object of {', '.join(SETS)}"
        )
    names, values = list(content.get("grid", {})), list(content.get("grid", {}).values())
    points = [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]
    then = {"then": content["then"]} if "then" in content else {}
    return [
        {**content.get("base", {}), **then, **entry, **point}
        for entry in content.get("runs", [{}])
        for point in points
    ]


@dataclass
class Job:
    """A run, what names its rows, and what must have run before it."""

    kind: str
    spec: Spec
    slots: int
    keys: list[Key]
    place: Place
    before: Job | None = None
    after: list[Job] = field(default_factory=list)
    state: str = "waiting"  # running, done, failed

    @property
    def label(self) -> str:
        own = {**self.spec}
        words = [own.pop(name, None) for name in ("recipe", "task", "attention")]
        options = own.pop("options", None) or {}
        more = [*options.items(), ("seed", own.get("seed", 0))]
        rest = [f"{key}={value}" for key, value in more]
        if self.before is not None:
            words.append(f"after {self.before.label}")
        return " ".join([self.kind, *(str(word) for word in words if word), *rest])

    def has_rows(self) -> bool:
        path = self.place.results(self.kind)
        return all(has_row(path, *key) for key in self.keys)

    def command(self) -> list[str]:
        """Of the process that runs it."""
        paths = {
            name: None if value is None else str(value) for name, value in vars(self.place).items()
        }
        text = json.dumps({"kind": self.kind, "spec": self.spec, "place": paths})
        return [sys.executable, "-m", "lln.experiments.jobs", text]


def plan(content: Any, *, data: Path | None, out: Path, scratch: Path) -> list[Job]:
    """All jobs of a sweep, those that follow another after it."""
    found = []
    for spec in expand(content):
        job = _job(spec, data, out, scratch)
        found.append(job)
        for next_spec in expand(spec.get("then", [])):
            follower = _job(next_spec, data, out, scratch, job)
            job.after.append(follower)
            found.append(follower)
    return found


def _job(spec: Spec, data: Path | None, out: Path, scratch: Path, before: Job | None = None) -> Job:
    kind = spec.get("run", "glue" if before else None)
    if kind is None:
        raise ValueError(f'a run of the sweep does not say its kind: {spec}; add "run": "mlm"')
    own = {name: value for name, value in spec.items() if name not in OF_THE_SWEEP}
    identity = json.dumps([kind, own, before and before.place.folder.name], sort_keys=True)
    folder = scratch / f"{kind}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    place = Place(data, out, folder, before and before.place.folder)
    keys = _keys(kind, own, place, before)
    return Job(kind, own, max(1, int(spec.get("slots", 1))), keys, place, before)


def _keys(kind: str, spec: Spec, place: Place, before: Job | None) -> list[Key]:
    if before is None:
        return jobs.find(kind).keys(spec, place)
    if (before.kind, kind) != ("mlm", "glue"):
        raise ValueError(f'"then" of a run {before.kind!r} holds {kind!r}; only glue follows mlm')
    from lln.experiments.jobs import glue, mlm

    return glue.keys(spec, place, mlm.pretrained(before.spec, before.place))


@dataclass(frozen=True)
class Outcome:
    """How a sweep ended: labels of the runs."""

    done: list[str]
    skipped: list[str]
    failed: list[str]
    left: list[str]


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
        self.running: dict[subprocess.Popen, tuple[Job, float]] = {}
        self.late: set[str] = set()

    def run(self) -> Outcome:
        """Until all is done, has failed, or the time is up."""
        skipped = self._skip()
        try:
            while True:
                self._collect()
                self._start_what_fits()
                if not self.running:
                    break
                if self._left() is not None and self._left() <= 0:  # type: ignore[operator]
                    self.say(f"time is up: {len(self.running)} runs are stopped")
                    break
                time.sleep(POLL_SECONDS)
        finally:
            self._stop()
        states = {
            state: [job.label for job in self.jobs if job.state == state]
            for state in ("done", "failed", "waiting")
        }
        return Outcome(states["done"], skipped, states["failed"], states["waiting"])

    def _skip(self) -> list[str]:
        """Jobs that have their rows; a pre-training only if all that follows has, too."""
        skipped = []
        for job in self.jobs:
            if job.has_rows() and all(follower.has_rows() for follower in job.after):
                job.state = "skipped"
                skipped.append(job.label)
                self._tidy(job)
        return skipped

    def _left(self) -> float | None:
        return None if self.end is None else self.end - time.monotonic()

    def _start_what_fits(self) -> None:
        """Followers first: what they wait for takes room on the disk."""
        waiting = [job for job in self.jobs if job.state == "waiting"]
        ready = [job for job in waiting if job.before is None or job.before.state == "done"]
        for job in sorted(ready, key=lambda job: job.before is None):
            used = sum(other.slots for other, _ in self.running.values())
            free = self.slots - used
            if min(job.slots, self.slots) > free:
                if job.before is None:
                    break  # keep the order, or a wide run would wait for ever
                continue
            left, known = self._left(), known_seconds(job)
            if left is not None and (left <= 0 or (known is not None and known > left)):
                if job.label not in self.late:
                    self.late.add(job.label)
                    self.say(f"not started, {left:.0f} s are left: {job.label}")
                continue
            self._start(job)

    def _start(self, job: Job) -> None:
        job.place.folder.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // self.slots)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        with (job.place.folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                job.command(), stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        self.running[process] = job, time.monotonic()
        job.state = "running"
        self.say(f"started: {job.label}")

    def _collect(self) -> None:
        for process, (job, since) in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[process]
            seconds = time.monotonic() - since
            good = process.returncode == 0 and job.has_rows()
            job.state = "done" if good else "failed"
            self.say(f"{job.state} in {seconds:.0f} s: {job.label}")
            if not good:
                self._explain(job)
            self._tidy(job.before or job)

    def _explain(self, job: Job) -> None:
        lines = (job.place.folder / "log.txt").read_text(errors="replace").splitlines()
        for line in lines[-5:]:
            self.say(f"    {line}")
        for follower in job.after:
            follower.state = "failed"

    def _tidy(self, job: Job) -> None:
        """Remove a run's folder when nothing needs it; that of a failed run stays, for its log."""
        finished = ("done", "skipped")
        if job.state in finished and all(
            other.state in finished or other.has_rows() for other in job.after
        ):
            for each in (job, *job.after):
                shutil.rmtree(each.place.folder, ignore_errors=True)

    def _stop(self) -> None:
        for process, (job, _) in self.running.items():
            process.terminate()
            job.state = "waiting"
        for process in self.running:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()


def known_seconds(job: Job) -> float | None:
    """How long it will take, from the slowest run like it: same kind, recipe or task, and size."""
    path = job.place.results(job.kind)
    if not path.exists():
        return None
    alike = ("recipe", "task", "steps", "epochs", "length")
    wanted = {name: job.spec[name] for name in alike if name in job.spec}
    took = [
        row["seconds"]
        for row in read_rows(path)
        if all(
            row["configuration"].get(name) in (value if isinstance(value, list) else [value])
            for name, value in wanted.items()
        )
    ]
    return len(job.keys) * max(took) if took else None
