"""The tasks of the Long Range Arena as arrays: sequences of bytes, labels, and pairs for retrieval.

========== ======= ======= ================================================================
task        tokens classes taken from (the first that is there)
========== ======= ======= ================================================================
listops      2,000      10 ``basic_{train,val,test}.tsv``; generated
text         4,000       2 ``imdb_{train,test}.jsonl.xz``; ``aclImdb/{train,test}/{pos,neg}``
image        1,024      10 ``cifar10_gray_{train,test}.npy.xz``; ``cifar-10-batches-bin``
pathfinder   1,024       2 ``pathfinder32/curv_contour_length_14``; generated
retrieval  2×4,000       2 ``new_aan_pairs.{train,eval,test}.tsv``
retrieval_ 2×4,000       2 ``wiki2015_train.jsonl.xz``, or any corpus of articles: do two
wiki                       passages come from the same article? Not the official task
retrieval_    2×64       2 the same corpus: do two passages share 48 bytes, or are
short                      they of two articles? A stand-in that is learned soon
========== ======= ======= ================================================================

Token 0 is padding everywhere. Gray values are tokens themselves, as in the code base that the paper
used, so that there black pixels are padding.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lln.texts import text
from lln.texts.damage import DamagedData, check_policy
from lln_study.data.arena import files as lra_files
from lln_study.data.arena import listops, pathfinder
from lln_study.data.shards import Progress, Recipe, generate
from lln_study.data.tokens import cache_folder

PARTS = ("train", "valid", "test")
RELEASES = ("", "lra_release", "lra_release/lra_release")  # how the archive unpacks
HELD_OUT = 10  # one of so many training examples is for validation where there is no file for it
KEYS = ("train", "train_labels", "test", "test_labels")
SHORT, SHIFT = 64, 16  # bytes of a passage of retrieval_short, and to the next
MOST_PASSAGES = 20  # of an article there
WIKI_PAIRS = {"train": 100_000, "valid": 4_000, "test": 10_000}


@dataclass(frozen=True)
class Split:
    """Examples; with ``pairs`` [m, 2] an example is two rows of ``tokens``, and labels are [m]."""

    tokens: np.ndarray
    labels: np.ndarray
    pairs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> Split:
        if self.pairs is not None:
            return Split(self.tokens, self.labels[rows], self.pairs[rows])
        return Split(self.tokens[rows], self.labels[rows])


@dataclass(frozen=True)
class LRAData:
    """A task.

    Attributes:
        length: Tokens of a sequence as the model sees it, a power of two.
        vocabulary: Tokens are smaller than this.
        source: Where they come from, for the record of a run.
    """

    task: str
    splits: Mapping[str, Split]
    length: int
    vocabulary: int
    classes: int
    source: str

    @property
    def paired(self) -> bool:
        return self.splits["train"].pairs is not None


@dataclass(frozen=True)
class Ask:
    """Where and how to look.

    Attributes:
        folder: Of the user's files; None if there is none.
        train_size: Generated examples for training; None for as many as published.
        seed: Of generated data; not that of a run, so that all runs see the same.
        workers: Processes that generate.
    """

    folder: Path | None = None
    on_damaged: str = "stop"
    train_size: int | None = None
    seed: int = 0
    workers: int | None = None
    cache: Path | None = None
    progress: Progress | None = None

    def cached(self) -> Path:
        return (self.cache or cache_folder()) / "lra"

    def find(self, *names: str) -> list[Path] | None:
        """All of these files in the folder or where the release puts them, or None."""
        if self.folder is None:
            return None
        for place in RELEASES:
            paths = [self.folder / place / name for name in names]
            if all(path.exists() for path in paths):
                return paths
        return None


def load(task: str, folder: str | os.PathLike[str] | None = None, **options) -> LRAData:
    """The arrays of a task.

    Args:
        folder: The user's data folder; None looks at ``LLN_DATA``.
        options: Fields of :class:`Ask`.

    Example:
        >>> load("image", "data").splits["test"].tokens.shape
        (10000, 1024)
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown; choose from {', '.join(TASKS)}")
    place = folder or os.environ.get("LLN_DATA") or None
    if place is not None and not Path(place).is_dir():
        raise ValueError(f"data={place} is no folder; pass the one that holds the files of {task}")
    ask = Ask(folder=None if place is None else Path(place), **options)
    check_policy(ask.on_damaged)
    data = TASKS[task](ask)
    for name, split in data.splits.items():
        if len(split) == 0 or split.labels.min() < 0 or split.labels.max() >= data.classes:
            raise DamagedData(f"{task}: the {name} split of {data.source} is empty or mislabelled")
    return data


def _absent(task: str, wanted: str, ask: Ask) -> DamagedData:
    place = "no data folder was given" if ask.folder is None else f"{ask.folder} does not hold them"
    return DamagedData(f"task {task!r} needs {wanted}, and {place}; pass --data or set LLN_DATA")


def _held_out(tokens: np.ndarray, labels: np.ndarray) -> dict[str, Split]:
    """Every tenth example for validation. Files are sorted by class: this keeps their shares."""
    whole = Split(tokens, labels)
    valid = np.arange(len(labels)) % HELD_OUT == 0
    return {"train": whole.take(np.flatnonzero(~valid)), "valid": whole.take(np.flatnonzero(valid))}


def _generated(ask: Ask, name: str, make: Callable, sizes: Mapping[str, int]) -> dict[str, Split]:
    """Generated splits; validation and test come first, so that they do not depend on the rest."""
    sizes = {**sizes, "train": ask.train_size or sizes["train"]}
    recipe = Recipe(
        f"{name}-{sum(sizes.values())}-seed{ask.seed}", make, sum(sizes.values()), seed=ask.seed
    )
    arrays = generate(recipe, ask.cached(), workers=ask.workers, progress=ask.progress)
    splits, start = {}, 0
    for split in ("valid", "test", "train"):
        part = slice(start, start + sizes[split])
        splits[split] = Split(arrays["tokens"][part], np.asarray(arrays["labels"][part], np.int64))
        start = part.stop
    return splits


def _listops(ask: Ask) -> LRAData:
    names = [f"basic_{part}.tsv" for part in ("train", "val", "test")]
    paths = ask.find(*names) or ask.find(*(f"listops-1000/{name}" for name in names))
    if paths is None:
        splits = _generated(ask, "listops", listops.make, listops.SIZES)
        source = f"generated from the published parameters, seed {ask.seed}"
    else:
        read = (lra_files.listops_tsv(path, listops.LENGTH, ask.on_damaged) for path in paths)
        splits = {name: Split(*each) for name, each in zip(PARTS, read, strict=True)}
        source = "official files"
    return LRAData("listops", splits, 2048, len(listops.VOCABULARY), 10, source)


def _text(ask: Ask) -> LRAData:
    paths = ask.find("imdb_train.jsonl.xz", "imdb_test.jsonl.xz") or ask.find(
        "aclImdb/train", "aclImdb/test"
    )
    if paths is None:
        raise _absent("text", "imdb_train.jsonl.xz and imdb_test.jsonl.xz (or aclImdb/)", ask)

    def read() -> dict[str, np.ndarray]:
        train, test = (lra_files.imdb(path, 4000, ask.on_damaged) for path in paths)
        return {
            "train": train[0],
            "train_labels": train[1],
            "test": test[0],
            "test_labels": test[1],
        }

    arrays = _kept(ask, "imdb", paths, KEYS, read)
    splits = _held_out(arrays["train"], arrays["train_labels"])
    splits["test"] = Split(arrays["test"], arrays["test_labels"])
    return LRAData("text", splits, 4096, 256, 2, "IMDB reviews as bytes")


def _image(ask: Ask) -> LRAData:
    names = [f"cifar10_gray_{part}.npy.xz" for part in ("train", "test")]
    batches = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
    paths = ask.find(*names, "cifar10_labels.npz")
    binary = ask.find(*batches, "cifar-10-batches-bin/test_batch.bin")
    if paths is None and binary is None:
        wanted = f"{', '.join(names)} and cifar10_labels.npz (or cifar-10-batches-bin/)"
        raise _absent("image", wanted, ask)

    def read() -> dict[str, np.ndarray]:
        if paths is not None:
            (train, train_labels), (test, test_labels) = lra_files.cifar_gray(paths)
        else:
            assert binary is not None
            train, train_labels = lra_files.cifar_binary(binary[:5])
            test, test_labels = lra_files.cifar_binary(binary[5:])
        labels = {"train_labels": train_labels, "test_labels": test_labels}
        return {"train": train, "test": test, **labels}

    arrays = _kept(ask, "cifar10", paths or binary or [], KEYS, read)
    whole = Split(arrays["train"], np.asarray(arrays["train_labels"]))
    order = np.arange(len(whole))
    cut = len(whole) - len(whole) // HELD_OUT
    splits = {"train": whole.take(order[:cut]), "valid": whole.take(order[cut:])}
    splits["test"] = Split(arrays["test"], np.asarray(arrays["test_labels"]))
    return LRAData("image", splits, 1024, 256, 10, "CIFAR-10 in gray")


def _pathfinder(ask: Ask) -> LRAData:
    name = "curv_contour_length_14"
    found = ask.find(f"pathfinder32/{name}/metadata") or ask.find(f"{name}/metadata")
    if found is None:
        name = f"pathfinder{pathfinder.VERSION}"
        splits = _generated(ask, name, pathfinder.make, pathfinder.SIZES)
        source = f"generated as published (version {pathfinder.VERSION}), seed {ask.seed}"
    else:
        whole = Split(*lra_files.pathfinder_folder(found[0].parent, ask.on_damaged))
        order = np.random.default_rng(0).permutation(len(whole))
        cuts = np.split(order, [int(0.8 * len(order)), int(0.9 * len(order))])
        splits = {part: whole.take(rows) for part, rows in zip(PARTS, cuts, strict=True)}
        source = "official images"
    return LRAData("pathfinder", splits, 1024, 256, 2, source)


def _retrieval(ask: Ask) -> LRAData:
    names = [f"new_aan_pairs.{part}.tsv" for part in ("train", "eval", "test")]
    paths = ask.find(*names) or ask.find(*(f"tsv_data/{name}" for name in names))
    if paths is None:
        raise _absent("retrieval", f"{', '.join(names)} (task retrieval_wiki is a stand-in)", ask)
    splits = {}
    for part, path in zip(PARTS, paths, strict=True):
        tokens, labels = lra_files.aan_tsv(path, 4000, ask.on_damaged)
        splits[part] = Split(tokens, labels, np.arange(len(tokens)).reshape(-1, 2))
    return LRAData("retrieval", splits, 4096, 256, 2, "AAN pairs, official files")


def _retrieval_wiki(ask: Ask) -> LRAData:
    """Passages of 4,000 bytes that share no text; the same article or not."""
    tokens, article, name = _passages(ask, "retrieval_wiki", 4000, 4000)
    splits = _paired("retrieval_wiki", tokens, article)
    return LRAData("retrieval_wiki", splits, 4096, 256, 2, f"passages of {name} articles")


def _retrieval_short(ask: Ask) -> LRAData:
    """Passages of 64 bytes that share 48 of them, or are of two articles."""
    cut = _passages(ask, "retrieval_short", SHORT, SHIFT, most=MOST_PASSAGES)
    tokens, article, name = cut
    splits = _paired("retrieval_short", tokens, article, neighbours=True)
    source = f"passages of {name} articles that share three quarters"
    return LRAData("retrieval_short", splits, SHORT, 256, 2, source)


def _passages(
    ask: Ask, task: str, size: int, step: int, *, most: int | None = None
) -> tuple[np.ndarray, np.ndarray, str]:
    """Passages that begin every ``step`` bytes, their articles' numbers, the name of the corpus."""
    wiki = ask.find("wiki2015_train.jsonl.xz")
    if wiki is None and ask.folder is None:
        raise _absent(task, "wiki2015_train.jsonl.xz or another corpus", ask)
    name = "wiki2015" if wiki else text.find(ask.folder).name
    files = wiki or [Path(p) for p in text.find(ask.folder).files.get("train", ())]

    def read() -> dict[str, np.ndarray]:
        passages, article = [], []
        for number, body in enumerate(a for path in files for a in text.read(path)):
            content = body.encode()
            starts = range(0, len(content) - size + 1, step)[:most]
            passages += [content[start : start + size] for start in starts]
            article += [number] * len(starts)
        if not passages:
            raise DamagedData(
                f"{name} has no article of {size:,} bytes; pass a corpus of long texts"
            )
        return {"tokens": lra_files.as_rows(passages, size), "article": np.array(article)}

    kept_as = "wiki" if task == "retrieval_wiki" else f"{task}-{size}-{step}"
    arrays = _kept(ask, kept_as, files, ("tokens", "article"), read)
    return arrays["tokens"], np.asarray(arrays["article"]), name


def _paired(
    task: str, tokens: np.ndarray, article: np.ndarray, *, neighbours: bool = False
) -> dict[str, Split]:
    """Pairs of each split; articles are split before passages are paired."""
    part = np.random.default_rng(0).permutation(article.max() + 1)[article] % 10
    chosen = {"test": part == 0, "valid": part == 1, "train": part > 1}
    how = {"task": task, "neighbours": neighbours}
    return {
        name: _pairs(tokens, article, np.flatnonzero(rows), WIKI_PAIRS[name], seed, **how)
        for seed, (name, rows) in enumerate(chosen.items())
    }


def _pairs(
    tokens: np.ndarray,
    article: np.ndarray,
    rows: np.ndarray,
    count: int,
    seed: int,
    *,
    task: str,
    neighbours: bool,
) -> Split:
    """Half of the pairs are two passages (or neighbours) of one article, the others of two."""
    generator = np.random.default_rng(seed)
    first = np.searchsorted(article[rows], article[rows])  # rows are sorted by article
    size = np.bincount(article[rows])[article[rows]]
    if not (size > 1).any() or len(np.unique(article[rows])) < 2:
        least = SHORT + SHIFT if neighbours else 2 * tokens.shape[1]
        raise DamagedData(f"{task} needs at least two articles of {least:,} bytes per split")
    labels = np.arange(count) % 2
    one = generator.choice(np.flatnonzero(size > 1), count)
    inside = one - first[one]
    if neighbours:
        other = one + np.where(inside + 1 < size[one], 1, -1)
    else:
        other = first[one] + (inside + generator.integers(1, size[one])) % size[one]
    far = generator.integers(len(rows), size=count)
    while (same := (article[rows[far]] == article[rows[one]])).any():
        far[same] = generator.integers(len(rows), size=int(same.sum()))
    pairs = np.stack([rows[one], rows[np.where(labels == 1, other, far)]], 1)
    return Split(tokens, labels, pairs)


def _kept(
    ask: Ask,
    name: str,
    paths: list[Path],
    keys: Sequence[str],
    read: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Arrays read from files, kept in the cache for the next run; other files make new ones."""
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    digest = hashlib.sha256(json.dumps([stamps, ask.on_damaged]).encode()).hexdigest()[:12]
    folder = ask.cached() / f"{name}-{digest}"
    found = _mapped(folder, keys) if folder.exists() else None
    if found is not None:
        return found
    arrays = read()
    building = folder.with_name(f".{folder.name}.{os.getpid()}")
    building.mkdir(parents=True, exist_ok=True)
    for key in keys:
        np.save(building / f"{key}.npy", arrays[key])
    shutil.rmtree(folder, ignore_errors=True)  # what is damaged
    try:
        building.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(building, ignore_errors=True)
        return arrays
    return _mapped(folder, keys) or arrays


def _mapped(folder: Path, keys: Sequence[str]) -> dict[str, np.ndarray] | None:
    """Arrays of the cache; None if one is missing or damaged."""
    try:
        return {key: np.load(folder / f"{key}.npy", mmap_mode="r") for key in keys}
    except (OSError, EOFError, ValueError) as error:
        warnings.warn(f"{folder} is damaged and made again: {error}", stacklevel=4)
        return None


TASKS: dict[str, Callable[[Ask], LRAData]] = {
    "listops": _listops,
    "text": _text,
    "image": _image,
    "pathfinder": _pathfinder,
    "retrieval": _retrieval,
    "retrieval_wiki": _retrieval_wiki,
    "retrieval_short": _retrieval_short,
}
