"""GLUE from plain files: the official TSV layout, or ``.jsonl.xz`` of a data folder.

    <data>/SST-2/train.tsv, dev.tsv        official, preferred
    <data>/sst2_train.jsonl.xz, ...        one example per line, with the fields of TASKS
    <data>/glue/..., <data>/GLUE/...       the same one folder deeper

The official test sets have no labels, so "dev" is what results are reported on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lln.records.rows import parse_row
from lln.records.seeds import generator
from lln.texts import sources
from lln.texts.damage import DamagedData
from lln.texts.labels import class_of, score_of

HELD_OUT = 0.1  # share of train that chooses learning rate and epoch
MOST_HELD_OUT = 2000
LARGEST_SCORE = 5  # of STS-B


@dataclass(frozen=True)
class Glue:
    """A task of GLUE.

    Attributes:
        fields: The one or two texts, as ``.jsonl`` files name them.
        classes: 1 means regression.
        metrics: What is reported; ``score`` is their mean unless ``score`` names one of them.
        folder, columns: Of the official files; the last column is the label. CoLA's have no header
            and are counted.
        words: Labels that the official files write as words, in order.
        jsonl: Names of the train and dev files of a data folder.
        note: What to know of those files.
    """

    name: str
    title: str
    fields: tuple[str, ...]
    classes: int
    metrics: tuple[str, ...]
    folder: str
    columns: tuple[str | int, ...]
    jsonl: tuple[str, str]
    words: tuple[str, ...] = ()
    score: str = ""
    dev: str = "dev.tsv"
    note: str = ""
    normalized: bool = False


_PAIR = ("sentence1", "sentence2")
_ENTAILS = ("entailment", "not_entailment")
_TABLE = (
    Glue(
        "sst2", "SST-2", ("sentence",), 2, ("accuracy",),
        folder="SST-2", columns=("sentence", "label"), jsonl=("sst2_train", "sst2_dev"),
    ),
    Glue(
        "mnli", "MNLI", ("premise", "hypothesis"), 3, ("accuracy",),
        folder="MNLI", columns=(*_PAIR, "gold_label"), dev="dev_matched.tsv",
        jsonl=("mnli_train_subset", "mnli_dev_matched"),
        words=("entailment", "neutral", "contradiction"),
        note="23,664 of 392,702 training pairs, not a random sample; dev-matched complete",
    ),
    Glue(
        "qnli", "QNLI", ("question", "sentence"), 2, ("accuracy",),
        folder="QNLI", columns=("question", "sentence", "label"), words=_ENTAILS,
        jsonl=("qnli_train", "qnli_dev"),
        note="there is no training split in the data folder, only dev",
    ),
    Glue(
        "qqp", "QQP", ("question1", "question2"), 2, ("accuracy", "f1"), score="accuracy",
        folder="QQP", columns=("question1", "question2", "is_duplicate"),
        jsonl=("qqp_train_subset", "qqp_bimpm_test"), normalized=True,
        note="33,851 labelled Quora pairs and the 10,000 balanced test pairs of Wang et al. 2017, "
        "not the GLUE split; lower case, punctuation split off",
    ),
    Glue(
        "rte", "RTE", _PAIR, 2, ("accuracy",),
        folder="RTE", columns=(*_PAIR, "label"), words=_ENTAILS, jsonl=("rte_train", "rte_dev"),
    ),
    Glue(
        "mrpc", "MRPC", _PAIR, 2, ("accuracy", "f1"),
        folder="MRPC", columns=("#1 String", "#2 String", "Quality"),
        jsonl=("mrpc_train", "mrpc_dev"),
    ),
    Glue(
        "cola", "CoLA", ("sentence",), 2, ("matthews",),
        folder="CoLA", columns=(3, 1), jsonl=("cola_train", "cola_dev"),
    ),
    Glue(
        "stsb", "STS-B", _PAIR, 1, ("pearson", "spearman"),
        folder="STS-B", columns=(*_PAIR, "score"), jsonl=("stsb_train", "stsb_dev"),
    ),
)  # fmt: skip
TASKS: dict[str, Glue] = {task.name: task for task in _TABLE}


@dataclass(frozen=True)
class Examples:
    """Texts (one or two each) and labels: a class, or a number from 0 to 1 (STS-B)."""

    texts: list[tuple[str, ...]]
    labels: list[float]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> Examples:
        return Examples([self.texts[row] for row in rows], [self.labels[row] for row in rows])


@dataclass(frozen=True)
class Splits:
    """``valid`` is held out of the training split; ``test`` is GLUE's dev, looked at once."""

    train: Examples
    valid: Examples
    test: Examples


def find_task(name: str) -> Glue:
    """A task by its name."""
    if name not in TASKS:
        raise ValueError(f"task={name!r} is unknown; choose from {', '.join(TASKS)}")
    return TASKS[name]


@dataclass(frozen=True)
class Files:
    """The train and dev file of a task.

    Attributes:
        source: What they are, in words, for result rows.
    """

    task: Glue
    train: Path
    dev: Path
    official: bool

    @property
    def source(self) -> str:
        if self.official:
            return f"official {self.task.title}"
        return f"{self.task.title}: {self.task.note or 'complete'}"


def find(name: str, folder: str | os.PathLike[str] | None = None) -> Files:
    """The files of a task below ``folder`` (default ``LLN_DATA``), official ones first.

    Raises:
        ValueError: A split is missing; the message says which files would do.
    """
    task = find_task(name)
    place = folder or os.environ.get("LLN_DATA")
    if not place:
        raise ValueError("data is missing; pass the folder of the GLUE files, or set LLN_DATA")
    root = Path(place)
    for place in (root, root / "glue", root / "GLUE"):
        official = [place / task.folder / file for file in ("train.tsv", task.dev)]
        if all(path.exists() for path in official):
            return Files(task, *official, official=True)
        paths = [_compressed(place, file) for file in task.jsonl]
        if all(path.exists() for path in paths):
            return Files(task, *paths, official=False)
    note = f" ({task.note})" if task.note else ""
    raise ValueError(
        f"{task.title} was not found in {root}{note}; put the official files at "
        f"{root / 'glue' / task.folder}/train.tsv and {task.dev}, or "
        f"{' and '.join(f'{file}.jsonl.xz' for file in task.jsonl)} into {root / 'glue'}"
    )


def read(files: Files) -> Splits:
    """The splits of a task; a tenth of train, at most 2,000 and always the same, is ``valid``.

    Example:
        >>> splits = read(find("sst2", "data"))
        >>> len(splits.train), len(splits.valid), len(splits.test)
        (65349, 2000, 872)
    """
    parse = _official if files.official else _lines
    train, test = (parse(files.task, path) for path in (files.train, files.dev))
    for path, examples, least in ((files.train, train, 2), (files.dev, test, 1)):
        if len(examples) < least:
            raise DamagedData(f"{path} has {len(examples)} examples, {least} are needed at least")
    order = torch.randperm(len(train), generator=generator(0, "glue", "valid")).tolist()
    count = min(MOST_HELD_OUT, max(1, int(HELD_OUT * len(train))))
    return Splits(train.take(order[count:]), train.take(order[:count]), test)


def _compressed(place: Path, file: str) -> Path:
    plain = place / f"{file}.jsonl"
    return plain if plain.exists() else place / f"{file}.jsonl.xz"


def _lines(task: Glue, path: Path) -> Examples:
    texts, labels = [], []
    for number, line in sources.lines(path):
        try:
            row = parse_row(line)
            texts.append(tuple(_clean(task, sources.text_of(row, field)) for field in task.fields))
            labels.append(_label(task, row.get("label")))
        except ValueError as error:
            raise DamagedData(f"{path}, line {number}: {error}; mend that line") from None
    return Examples(texts, labels)


def _clean(task: Glue, text: str) -> str:
    """Make sources alike that were tokenized differently: lower case, punctuation split off."""
    return " ".join(re.findall(r"\w+|[^\w\s]", text.lower())) if task.normalized else text


def _label(task: Glue, value: object) -> float:
    if task.classes == 1:
        return score_of(value, LARGEST_SCORE) / LARGEST_SCORE
    return task.words.index(value) if value in task.words else class_of(value, task.classes)


def _official(task: Glue, path: Path) -> Examples:
    texts, labels, columns = [], [], None
    for number, row in _table(path):
        if columns is None:
            columns = _positions(task, row, path)
            if not isinstance(task.columns[0], int):
                continue
        if len(row) <= max(columns):
            raise DamagedData(
                f"{path}, line {number} has {len(row)} columns, {max(columns) + 1} are needed; "
                "the file is damaged or not the official one"
            )
        *fields, label = (row[column] for column in columns)
        texts.append(tuple(fields))
        try:
            labels.append(_label(task, label))
        except ValueError as error:
            raise DamagedData(f"{path}, line {number}: {error}; mend that line") from None
    return Examples(texts, labels)


def _positions(task: Glue, header: list[str], path: Path) -> list[int]:
    missing = [c for c in task.columns if not isinstance(c, int) and c not in header]
    if missing:
        raise ValueError(
            f"{path} has no column {missing[0]!r} in its first line; it is not the official "
            f"{task.title} file"
        )
    return [c if isinstance(c, int) else header.index(c) for c in task.columns]


def _table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Lines with their numbers; quotes are letters, and fields have any length."""
    try:
        with sources.open_text(path, encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line.rstrip("\n").split("\t")
    except UnicodeDecodeError as error:
        raise DamagedData(f"{path} is no UTF-8 text: {error}; copy it again") from None
