"""Articles from files of the user: plain text, JSON lines, the official WikiText files, also xz."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from lln.records.rows import parse_row
from lln.texts import bundled as data
from lln.texts import sources

SPLITS = ("train", "valid", "test")
# wiki.train.tokens, wiki2015_train_b.jsonl.xz, valid.txt: what stands before is the corpus.
NAME = re.compile(
    r"^(?P<corpus>.*?)[._-]?(?P<split>train|valid|validation|dev|test)(?P<part>[._-][\w-]*)??"
    r"(?P<kind>\.txt|\.jsonl|\.tokens|\.raw)(?P<packed>\.xz)?$"
)
READABLE = re.compile(r"\.(txt|jsonl|tokens|raw)(\.xz)?$")
HEADING = re.compile(r"^ = [^=].* = \n?$")
HELD_OUT = 0.05  # of a text without files for validation
EXPECTED = (
    "expected are files such as wiki.train.tokens and wiki.valid.tokens (WikiText), "
    'NAME_train.jsonl.xz and NAME_valid.jsonl.xz (a line {"text": ...} per article), or .txt files'
)


@dataclass(frozen=True)
class Corpus:
    """Where the articles of each split are.

    Attributes:
        name: For rows and messages.
        files: Paths by split; no paths at all stand for Tiny Shakespeare. Without "valid" the end
            of "train" is held out.
    """

    name: str
    files: Mapping[str, Sequence[Path]]

    def articles(self, split: str) -> list[str]:
        """The texts of a split."""
        if split in self.files and (split != "train" or "valid" in self.files):
            return [text for path in self.files[split] for text in read(path)]
        paths = self.files.get("train", ())
        texts = [text for path in paths for text in read(path)] if self.files else [data.text()]
        kept, held = _hold_out(texts)
        return kept if split == "train" else held

    def check(self) -> None:
        """Refuse files for training without a line of text, which would train on nothing."""
        paths = self.files.get("train", ())
        if self.files and not any(_has_text(path) for path in paths):
            raise ValueError(
                f"corpus {self.name!r} has no text for train: {', '.join(map(str, paths))} is "
                "empty; pass files with text, or no data at all for Tiny Shakespeare"
            )

    @property
    def splits(self) -> tuple[str, ...]:
        """Name the splits that have articles."""
        return SPLITS if "test" in self.files else SPLITS[:2]


BUNDLED = Corpus(data.NAME, {})


def find(place: str | os.PathLike[str] | None, corpus: str | None = None) -> Corpus:
    """The corpus in a folder or a file; None looks at ``LLN_DATA``, then takes Tiny Shakespeare.

    Args:
        place: A folder with files per split, a folder of .txt files, or one file.
        corpus: What the names begin with, where a folder has several: "wiki2015".

    Raises:
        ValueError: There is no such place, or the corpus is not there; nothing takes its place.
    """
    place = place or os.environ.get("LLN_DATA") or None
    if place is None:
        if corpus not in (None, BUNDLED.name):
            raise ValueError(
                f"corpus={corpus!r} needs the folder of its files: pass data=FOLDER (--data), or "
                f"set LLN_DATA; without a folder there is only {BUNDLED.name}"
            )
        return BUNDLED
    path = Path(place)
    if path.is_file():
        if not READABLE.search(path.name):
            raise ValueError(f"data={place} has a name that says nothing of its format; {EXPECTED}")
        name, parts = READABLE.sub("", path.name), NAME.match(path.name)
        if corpus not in (None, name, parts and parts["corpus"]):
            raise ValueError(
                f"corpus={corpus!r} is not in data={place}, which is one file, of {name!r}; leave "
                "corpus out, or pass the folder that has it"
            )
        return Corpus(name, {"train": [path]})
    if not path.is_dir():
        kind = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise ValueError(f"data={place} {kind}; {EXPECTED}")
    found = _by_name(path)
    if corpus is not None:
        if corpus not in found or "train" not in found[corpus]:
            raise ValueError(
                f"corpus={corpus!r} has no training file in {place}; there are "
                f"{', '.join(_with_train(found)) or 'none'}"
            )
        return Corpus(corpus or path.name, found[corpus])
    complete = [name for name in _with_train(found) if "valid" in found[name]]
    candidates = complete or _with_train(found)
    if len(candidates) > 1:
        raise ValueError(
            f"data={place} has several corpora, {', '.join(candidates)}; choose with corpus="
        )
    if candidates:
        return Corpus(candidates[0] or path.name, found[candidates[0]])
    named = (file for file in path.iterdir() if READABLE.search(file.name))
    plain = sorted(file for file in named if file.is_file())
    if not plain or found:
        has = f"has no training file among {', '.join(sorted(found))}" if found else "has no text"
        raise ValueError(f"data={place} {has}; {EXPECTED}")
    return Corpus(path.name, {"train": plain})


def _by_name(folder: Path) -> dict[str, dict[str, list[Path]]]:
    found: dict[str, dict[str, list[Path]]] = {}
    for path in sorted(folder.iterdir()):
        parts = NAME.match(path.name)
        if parts and path.is_file():
            split = {"validation": "valid", "dev": "valid"}.get(parts["split"], parts["split"])
            found.setdefault(parts["corpus"], {}).setdefault(split, []).append(path)
    return found


def _with_train(found: Mapping[str, Mapping[str, object]]) -> list[str]:
    return [name for name, files in found.items() if "train" in files]


def read(path: Path) -> Iterator[str]:
    """The articles of a file: lines of JSON, WikiText at its headings, else the whole text."""
    if ".jsonl" in path.suffixes:
        yield from _from_json(path)
        return
    try:
        with sources.open_text(path) as stream:
            yield from _from_text(stream)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} cannot be read: {error}; it is damaged, or not what its name says. Copy it "
            "again, or leave it out"
        ) from None


def _has_text(path: Path) -> bool:
    return any(text.strip() for text in read(path))


def _from_json(path: Path) -> Iterator[str]:
    for number, line in sources.lines(path):
        try:
            row = parse_row(line)
            text, title = sources.text_of(row, "text"), row.get("title")
        except ValueError as error:
            raise ValueError(
                f'{path}, line {number} is not an object with a field "text": {error}'
            ) from None
        yield f"{title}\n{text}" if title else text


def _from_text(stream: TextIO) -> Iterator[str]:
    lines: list[str] = []
    for line in stream:
        if HEADING.match(line):
            if any(map(str.strip, lines)):  # not what is before the first title
                yield "".join(lines)
            lines = []
        lines.append(line)
    if lines:
        yield "".join(lines)


def _hold_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """The last part for validation: whole articles if there are many, else a piece of the last."""
    if len(texts) >= 2 / HELD_OUT:
        cut = len(texts) - round(HELD_OUT * len(texts))
        return texts[:cut], texts[cut:]
    whole = "\n\n".join(texts)
    cut = _end_of_training(whole)
    return [whole[:cut]], [whole[cut:]]


def _end_of_training(text: str) -> int:
    """Return where to cut: after a line if one ends near by, else after a word, else anywhere."""
    last = round((1 - HELD_OUT) * len(text))
    first = round((1 - 2 * HELD_OUT) * len(text))
    ends = (text.rfind(mark, first, last) + 1 for mark in ("\n", " "))
    return next((end for end in ends if end), last)
