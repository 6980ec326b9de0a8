"""A sweep on a Ray cluster: a run, with what follows it, is one task on some machine.

The tasks only send: rows come back as they are finished, and this process alone appends them to
the files. Folders of data, of checkpoints and of pre-trained models have the same paths on all
machines, and every machine has the same version of lln.

A run whose worker is lost, killed or with its machine, is started again. It continues from its last
checkpoint where it finds that: on the same machine, or in a scratch folder that machines share.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lln
from lln.records.rows import append_row, has_row
from lln_study.sweep import job as jobs
from lln_study.sweep.job import Place, Spec
from lln_study.sweep.plan import Job
from lln_study.sweep.run import Sweep
from lln_study.tasks.experiment import Key
from lln_study.train.runfolder import held

RESTARTS = 3  # of a run that lost its worker; one that raises an error would raise it again


@dataclass(frozen=True)
class Work:
    """A job as a worker is told of it, and which of its rows are there."""

    kind: str
    spec: Spec
    place: Place
    finished: frozenset[Key]


@dataclass(frozen=True)
class News:
    """What a worker says of job ``index`` of its task.

    ``what`` is "started" (``content`` says by whom), "row" (``name`` of its file, and the row),
    "failed" (the traceback) or "ended".
    """

    index: int
    what: str
    content: Any = None
    name: str = ""


def work(family: Sequence[Work], environment: Mapping[str, str], version: str) -> Iterator[News]:
    """Run a job and those that follow it, on the machine of a worker.

    Args:
        environment: Variables that hold where the machine does not set them itself.
        version: Of lln where the sweep was started.
    """
    here = f"process {os.getpid()} on {platform.node()}"
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    good = True
    for index, each in enumerate(family):
        yield News(index, "started", here)
        try:
            if version != lln.__version__:
                raise RuntimeError(
                    f"lln {lln.__version__} is installed on {platform.node()} and {version} where "
                    "the sweep was started; install the same everywhere"
                )
            with held(each.place.folder):
                is_done = _among(each.finished)
                for name, row in jobs.made(each.kind, each.spec, each.place, is_done=is_done):
                    row = {**row, "shared": each.place.shared}
                    yield News(index, "row", row, name)
        except Exception:
            good = False
            yield News(index, "failed", f"{here}\n{traceback.format_exc()}")
            if index == 0:  # the others start from its checkpoint
                return
        else:
            yield News(index, "ended")
    if good:
        for each in family:
            shutil.rmtree(each.place.folder, ignore_errors=True)


def _among(finished: frozenset[Key]) -> Any:
    return lambda *key: key in finished


@dataclass(eq=False)
class _Task:
    """A task under way; ``since`` when each of its jobs has started."""

    family: list[Job]
    news: Any  # ray.ObjectRefGenerator
    since: dict[Job, float] = field(default_factory=dict)


class ClusterSweep(Sweep):
    """Runs jobs as tasks of Ray, which has the queue.

    Args:
        address: ``HOST:PORT`` of a cluster. "auto" is what Ray takes by itself: ``RAY_ADDRESS``, a
            cluster that runs on this machine, or one that is started here for the sweep.
        slots: Runs that share a GPU, or the largest machine of a cluster without GPUs: a run takes
            as many of these parts as its ``slots``, and all of them if it is timed.
        options: As for :class:`Sweep`.
    """

    def __init__(self, plan: Sequence[Job], *, address: str = "auto", **options: Any) -> None:
        super().__init__(plan, **options)
        self.ray = _import_ray()
        self.owned = not self.ray.is_initialized()
        if self.owned:
            _connect(self.ray, address)
        self.tasks: list[_Task] = []
        self.losses: dict[Job, int] = {}
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        self.whole = _whole(nodes)
        found = ", ".join(f"{count:g} {name}s" for name, count in self.whole.items())
        self.say(f"{len(nodes)} machines; {self.slots} places in each {found}")

    def _room(self) -> float:
        return math.inf  # Ray starts what fits

    def _start(self, job: Job) -> None:
        family = [job, *(other for other in job.after if other.state == "waiting")]
        places = max(self._places(each) for each in family)
        share, shared = places / self.slots, places < self.slots
        task = self.ray.remote(
            num_cpus=_part(self.whole["CPU"], share),
            num_gpus=_part(self.whole.get("GPU", 0), share),
            num_returns="streaming",
            max_retries=0,  # this process counts
            max_calls=1,  # a worker runs one task and gives its memory back
        )(work)
        own = {name: value for name, value in os.environ.items() if name.startswith("LLN_")}
        told = [_told(each, shared=shared) for each in family]
        self.tasks.append(_Task(family, task.remote(told, own, lln.__version__)))
        for each in family:
            each.state = "running"
        self.say(f"queued: {job.label}")

    def _collect(self) -> None:
        for task in list(self.tasks):
            while self.ray.wait([task.news], timeout=0, fetch_local=False)[0]:
                try:
                    self._hear(task, self.ray.get(next(task.news)))
                except StopIteration:
                    self.tasks.remove(task)
                    break
                except self.ray.exceptions.RayError as error:
                    self.tasks.remove(task)
                    self._lose(task, error)
                    break

    def _hear(self, task: _Task, news: News) -> None:
        job = task.family[news.index]
        if news.what == "started":
            task.since[job] = time.monotonic()
            self.say(f"started by {news.content}: {job.label}")
        elif news.what == "row":
            append_row(job.place.results(news.name), news.content, once=True)
        else:
            text = news.content or (
                "its rows are not those that were planned here: the data on that machine are others"
            )
            self._finish_task(task, job, text, good=news.what == "ended" and job.has_rows())

    def _finish_task(self, task: _Task, job: Job, text: str, *, good: bool) -> None:
        if not good:
            job.place.folder.mkdir(parents=True, exist_ok=True)
            with (job.place.folder / "log.txt").open("a", encoding="utf-8") as log:
                log.write(text.rstrip() + "\n")
        self._end(job, task.since.get(job, time.monotonic()), good=good)

    def _lose(self, task: _Task, error: Exception) -> None:
        """Start again what a lost worker has not finished, or give it up."""
        job, left = task.family[0], [each for each in task.family if each.state == "running"]
        self.losses[job] = self.losses.get(job, 0) + 1
        reason = str(error).strip().partition("\n")[0]
        again = not isinstance(error, _errors_of_ours(self.ray))
        if again and self.losses[job] <= RESTARTS:
            self.say(f"lost, start {self.losses[job] + 1} of {RESTARTS + 1}: {job.label}")
            self.say(f"    {reason}")
            for each in left:
                each.state = "waiting"
            job.state = "waiting"
            return
        for each in left:
            if each.state == "running":  # the first takes those that follow it with it
                self._finish_task(task, each, str(error), good=False)

    def _stop(self) -> None:
        """End all tasks, whose jobs then wait again, and leave the cluster."""
        for task in self.tasks:
            self.ray.cancel(task.news, force=True)
            for job in task.family:
                if job.state == "running":
                    job.state = "waiting"
        self.tasks.clear()
        if self.owned:
            self.ray.shutdown()


def _told(job: Job, *, shared: bool) -> Work:
    """Write down a job with absolute paths, since workers have another current folder."""
    place = dataclasses.replace(job.place, shared=shared)
    paths = {name: path.absolute() for name, path in vars(place).items() if isinstance(path, Path)}
    spec = dict(job.spec)
    if spec.get("from"):
        spec["from"] = str(Path(spec["from"]).absolute())
    path = place.results(job.kind)
    finished = frozenset(key for key in job.keys if has_row(path, *key))
    return Work(job.kind, spec, dataclasses.replace(place, **paths), finished)


def _whole(nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Give what a run takes that is alone: a GPU with its part of the CPUs, or a machine."""
    with_gpu = [node for node in nodes if node.get("GPU")]
    if with_gpu:
        return {"GPU": 1, "CPU": min(node.get("CPU", 0) / node["GPU"] for node in with_gpu)}
    return {"CPU": max(node.get("CPU", 0) for node in nodes)}


def _part(whole: float, share: float) -> float:
    """Take a share; Ray counts in wholes, and below one in ten-thousandths."""
    part = whole * share
    return math.floor(part) if part >= 1 else math.floor(part * 10_000) / 10_000


def _errors_of_ours(ray: Any) -> tuple[type[Exception], ...]:
    """Errors that another start would meet again."""
    return ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise ImportError(
            "a sweep on a cluster needs Ray; install it: pip install 'lln-attention[cluster]'"
        ) from None
    return ray


def _connect(ray: Any, address: str) -> None:
    if address.startswith("ray://"):
        raise ValueError(
            f"--ray {address} is Ray's client, which cannot send rows as they are finished; run "
            "the command on a machine of the cluster, with HOST:PORT or without an address"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 hardly runs beside other work
    options = {"log_to_driver": False, "logging_level": "WARNING"}
    try:
        ray.init(address=None if address == "auto" else address, **options)
    except ConnectionError as error:
        raise ValueError(
            f"no Ray cluster answers at {address}: {error}; start one with `ray start --head`, or "
            "leave the address out"
        ) from None
