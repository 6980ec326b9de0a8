"""What a sweep file says: which runs, what names their rows, and what must have run before.

    {"base": {"run": "mlm", "recipe": "roberta-small"},              fields that all runs share
     "grid": {"attention": ["softmax", "lln_diag"], "seed": [0, 1]}, every combination
     "runs": [{"options": {"method": "entropy"}}, {}],               each of these
     "then": {"base": {"run": "glue"}, "grid": {"task": ["rte"]}}}   after each, from its checkpoint

or a list of runs. ``slots`` of a run says how many of the places of ``--jobs`` it takes.

    {"grid": {"learning_rate": [1e-3, 3e-4], "attention": [...]},
     "repeat": {"best_of": "learning_rate", "seed": [1, 2]}}

gives more seeds to the best rate of each attention alone, chosen on validation when all have run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lln.records.rows import has_row, key_of, read_rows
from lln_study.sweep import job as jobs
from lln_study.sweep.job import Place, Spec
from lln_study.sweep_files import FOLDER
from lln_study.tasks import experiment
from lln_study.tasks.experiment import Key
from lln_study.tasks.mlm import MLM
from lln_study.tasks.pretrained import Pretrained

OF_THE_SWEEP = ("run", "slots", "timed", "then")  # the rest are fields of the run
SETS = ("base", "grid", "runs", "then", "repeat")
FINISHED = ("done", "skipped")


def read(path: Path) -> Any:
    """The content of a sweep file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; pass a sweep file, such as those in {FOLDER}"
        ) from None
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


@dataclass(frozen=True)
class Places:
    """Folders of a sweep, and whether its data must be there."""

    data: Path | None
    out: Path
    scratch: Path
    need_data: bool


@dataclass(eq=False)
class Job:
    """A run, what names its rows, and what must have run before it.

    Attributes:
        timed: Its speed is reported, so it takes all places.
        state: "waiting", "running", "done", "failed" or "skipped".
        unknown: Why nobody knows what names its rows; empty if that is known.
        telling: Fields that the label names beside the usual ones, see :func:`tell_apart`.
    """

    kind: str
    spec: Spec
    slots: int
    keys: list[Key]
    place: Place
    before: Job | None = None
    after: list[Job] = field(default_factory=list)
    timed: bool = False
    state: str = "waiting"
    unknown: str = ""
    telling: Sequence[str] = ()

    @property
    def label(self) -> str:
        own = {**self.spec}
        words = [own.pop(name, None) for name in ("recipe", "task", "attention")]
        options = own.pop("options", None) or {}
        rate = [("learning_rate", own["learning_rate"])] if "learning_rate" in own else []
        more = [*options.items(), *rate, ("seed", own.get("seed", 0))]
        more += [(name, own[name]) for name in self.telling if name in own]
        rest = [f"{key}={value}" for key, value in more]
        if self.before is not None:
            words.append(f"after {self.before.label}")
        return " ".join([self.kind, *(str(word) for word in words if word), *rest])

    def is_decided(self) -> bool:
        """Whether it is known what will be run."""
        return True

    def has_rows(self) -> bool:
        path = self.place.results(self.kind)
        return not self.unknown and all(has_row(path, *key) for key in self.keys)

    def has_diverged(self) -> bool:
        """Whether a row of it says so."""
        path, keys = self.place.results(self.kind), {tuple(key) for key in self.keys}
        rows = read_rows(path) if path.exists() else []
        return any(row.get("diverged") and key_of(row) in keys for row in rows)

    def command(self, *, shared: bool) -> list[str]:
        """Give the command line that runs it; ``shared`` if others may run beside it."""
        place = dataclasses.replace(self.place, shared=shared).to_json()
        text = json.dumps({"kind": self.kind, "spec": self.spec, "place": place})
        return [sys.executable, "-m", "lln_study.sweep", text]


@dataclass(eq=False)
class Repeated(Job):
    """The best of some runs with another seed: a copy of ``choices[i]`` where ``rivals[i]`` wins.

    Until all rivals have run, it stands for the first choice.
    """

    rivals: Sequence[Job] = ()
    choices: Sequence[Job] = ()
    decided: bool = False

    @property
    def label(self) -> str:
        """The label of what was chosen, or of the first choice before that is decided."""
        own = super().label
        return own if self.decided else f"{own}, or another of {len(self.rivals)}"

    def is_decided(self) -> bool:
        if not self.decided and all(rival.state in FINISHED for rival in self.rivals):
            chosen = self.choices[best_on_validation(self.rivals)]
            self.spec, self.keys, self.place = chosen.spec, chosen.keys, chosen.place
            self.decided = True
        return self.decided

    def has_rows(self) -> bool:
        return self.is_decided() and super().has_rows()


def best_on_validation(rivals: Sequence[Job]) -> int:
    """Which of some runs, all with their rows; the first of equals, one without a value last."""
    chosen_by = experiment.find(rivals[0].kind).IN_SWEEPS.chosen_by
    assert chosen_by is not None, "others have no repetitions, see _repeated"
    name, sign = chosen_by
    rows = read_rows(rivals[0].place.results(rivals[0].kind))
    values = {key_of(row): row.get(name) for row in rows}
    found = [values[rival.keys[0]] for rival in rivals]
    worth = [-math.inf if value is None else sign * value for value in found]
    return worth.index(max(worth))


def tell_apart(jobs: Sequence[Job]) -> None:
    """Let labels that are the same name the fields in which their jobs differ."""
    alike: dict[str, list[Job]] = {}
    for job in jobs:
        alike.setdefault(job.label, []).append(job)
    for same in alike.values():
        names = dict.fromkeys(name for job in same for name in job.spec)
        values = {name: {json.dumps(job.spec.get(name)) for job in same} for name in names}
        for job in same:
            job.telling = [name for name in names if len(values[name]) > 1]


def plan(
    content: Any, *, data: Path | None, out: Path, scratch: Path, need_data: bool = True
) -> list[Job]:
    """All jobs of a sweep; those that follow another stand after it, repetitions at the end.

    Args:
        need_data: Without, jobs whose data are not there only say so (``unknown``).
    """
    found, first = [], []
    places = Places(data, out, scratch, need_data)
    for spec in expand(content):
        job = _job(spec, places)
        first.append(job)
        found.append(job)
        then = spec.get("then", [])
        if "repeat" in then:
            raise ValueError('"repeat" stands in "then" of a sweep; it may stand beside it only')
        for next_spec in expand(then):
            follower = _job(next_spec, places, job)
            job.after.append(follower)
            found.append(follower)
    repeat = content.get("repeat") if isinstance(content, dict) else None
    if repeat is not None:
        found += _repeated(first, repeat, places)
    return found


def _repeated(first: Sequence[Job], repeat: Any, places: Places) -> list[Job]:
    """For every group of runs that differ in one field alone, the best of them with other seeds."""
    if not isinstance(repeat, dict) or set(repeat) != {"best_of", "seed"}:
        raise ValueError(
            f"repeat={repeat!r} of a sweep; it is a field and a list of seeds, such as "
            '{"best_of": "learning_rate", "seed": [1, 2]}'
        )
    groups: dict[str, list[Job]] = {}
    for job in first:
        chosen_by = experiment.find(job.kind).IN_SWEEPS.chosen_by
        if chosen_by is None or job.after or job.spec.get("throughput"):
            known = [k for k in experiment.KINDS if experiment.find(k).IN_SWEEPS.chosen_by]
            raise ValueError(
                f'"repeat" cannot choose among runs of {job.kind!r} that are timed or that others '
                f"follow; it is for runs of {', '.join(known)} alone"
            )
        alike = {name: value for name, value in job.spec.items() if name != repeat["best_of"]}
        groups.setdefault(json.dumps(alike, sort_keys=True), []).append(job)
    made = []
    for seed, rivals in itertools.product(repeat["seed"], groups.values()):
        choices = [
            _job({"run": rival.kind, **rival.spec, "seed": seed}, places) for rival in rivals
        ]
        own = vars(choices[0]) | {"slots": rivals[0].slots, "timed": rivals[0].timed}
        made.append(Repeated(**own, rivals=rivals, choices=choices))
    return made


def _job(spec: Spec, places: Places, before: Job | None = None) -> Job:
    kind = spec.get("run", "glue" if before else None)
    if kind is None:
        raise ValueError(f'a run of the sweep does not say its kind: {spec}; add "run": "mlm"')
    if before is not None and (before.kind, kind) != ("mlm", "glue"):
        raise ValueError(f'"then" of a run {before.kind!r} holds {kind!r}; only glue follows mlm')
    own = {name: value for name, value in spec.items() if name not in OF_THE_SWEEP}
    for name in experiment.find(kind).IN_SWEEPS.needs:
        if name not in own:
            raise ValueError(f"a run of the sweep does not say its {name}: {spec}; add it")
    identity = json.dumps([kind, own, before and before.place.folder.name], sort_keys=True)
    folder = places.scratch / f"{kind}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    place = Place(places.data, places.out, folder, before and before.place.folder)
    slots, timed = max(1, int(spec.get("slots", 1))), bool(spec.get("timed", False))
    made = Job(kind, own, slots, [], place, before, timed=timed)
    jobs.runs(kind, own)  # mistakes in the fields are found without data
    try:
        made.keys = _keys(made, generate=places.need_data)
    except (OSError, ValueError) as error:
        if places.need_data:
            raise
        made.unknown = str(error)
    return made


def _keys(job: Job, *, generate: bool) -> list[Key]:
    before, body = job.before, None
    if before is not None:
        _, (config,) = jobs.runs("mlm", before.spec)
        encoded = jobs.data_of("mlm", config, before.spec, before.place)
        body = Pretrained.planned(MLM(config, encoded), config.train, before.place.folder)
    return jobs.keys(job.kind, job.spec, job.place, body, generate=generate)
