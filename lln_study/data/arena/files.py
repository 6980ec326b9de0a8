"""Readers of the files that Long Range Arena tasks come in: official layouts and plain ones.

Every reader returns tokens ``uint8 [n, length]``, padded with 0, and labels ``[n]``; what is
damaged is collected and then stops the run or is left out.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lln.records.rows import parse_row
from lln.texts import sources
from lln.texts.damage import DamagedData, settle
from lln.texts.labels import check_classes, class_of
from lln_study.data.arena import listops

Labelled = tuple[np.ndarray, np.ndarray]


def as_rows(texts: Iterable[bytes], length: int) -> np.ndarray:
    """Bytes as tokens, cut or padded to ``length``; a zero byte would be padding and becomes 1."""
    kept = [np.frombuffer(text[:length], np.uint8) for text in texts]
    rows = np.zeros((len(kept), length), np.uint8)
    for row, text in zip(rows, kept, strict=True):
        row[: len(text)] = np.maximum(text, 1)
    return rows


def read_npy_xz(path: Path) -> np.ndarray:
    """An array in a compressed .npy file."""
    content = sources.read_bytes(path)
    try:
        return np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise DamagedData(f"{path} cannot be read: {error}; copy it again") from None


def json_lines(path: Path, on_damaged: str, check: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """``check(row)`` for every object of a .jsonl or .jsonl.xz file; its ValueErrors are damage."""
    found, damaged, total = [], [], 0
    for number, line in sources.lines(path):
        total += 1
        try:
            found.append(check(parse_row(line)))
        except ValueError as error:
            damaged.append(f"{path.name}, line {number} ({error})")
    settle(damaged, total, f"lines of {path.name}", on_damaged)
    return found


def imdb(path: Path, length: int, on_damaged: str) -> Labelled:
    """``{"text": ..., "label": 0 or 1}`` per line, or a folder with pos/*.txt and neg/*.txt."""
    if path.is_dir():
        found = [
            (sources.read_bytes(file), int(word == "pos"))
            for word in ("neg", "pos")
            for file in sorted((path / word).glob("*.txt"))
        ]
    else:
        found = json_lines(path, on_damaged, _review)
    labels = np.array([label for _, label in found], np.int64)
    return as_rows((text for text, _ in found), length), labels


def _review(row: dict[str, Any]) -> tuple[bytes, int]:
    if not isinstance(row.get("text"), str):
        raise ValueError('has no text in its field "text"')
    # bytes that were no UTF-8 may have been kept as such
    return row["text"].encode("utf-8", "surrogateescape"), class_of(row.get("label"), 2)


def cifar_gray(paths: list[Path]) -> list[Labelled]:
    """Training and test images from two compressed arrays and an npz of labels."""
    try:
        with sources.open_npz(paths[2]) as archive:
            labels = [check_classes(archive[part], 10, paths[2]) for part in ("train", "test")]
    except KeyError as error:
        raise DamagedData(f"{paths[2]} cannot be read: {error}; copy it again") from None
    found = []
    for path, own in zip(paths[:2], labels, strict=True):
        pixels = read_npy_xz(path)
        if pixels.shape != (len(own), 32, 32):
            raise DamagedData(f"{path} has shape {list(pixels.shape)} and {len(own)} labels")
        found.append((pixels.reshape(len(own), -1), own))
    return found


def cifar_binary(paths: Iterable[Path]) -> Labelled:
    """``data_batch_1.bin`` of the official binary version: a label and 3 x 1024 bytes per image."""
    parts = []
    for path in paths:
        content = np.frombuffer(sources.read_bytes(path), np.uint8)
        if len(content) == 0 or len(content) % 3073:
            raise DamagedData(f"{path} has {len(content):,} bytes, no multiple of 3,073")
        parts.append(content.reshape(-1, 3073))
        check_classes(parts[-1][:, 0], 10, path)
    records = np.concatenate(parts)
    red, green, blue = records[:, 1:].reshape(-1, 3, 1024).transpose(1, 0, 2).astype(np.float64)
    gray = np.floor(255.5 * (0.2989 * red + 0.5870 * green + 0.1140 * blue) / 255)
    return gray.astype(np.uint8), records[:, 0].astype(np.int64)


def _tab_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(sys.maxsize)
    with sources.check_regular(path).open(encoding="utf-8", errors="replace", newline="") as stream:
        rows = csv.reader(stream, delimiter="\t")
        try:
            yield from ((rows.line_num, fields) for fields in rows if fields)
        except csv.Error as error:
            raise DamagedData(f"{path}, line {rows.line_num}: {error}; copy it again") from None


def listops_tsv(path: Path, length: int, on_damaged: str) -> Labelled:
    """``basic_train.tsv``: Source and Target, with a line of headings."""
    rows, labels, damaged, total = [], [], [], 0
    for number, fields in _tab_lines(path):
        if fields[:1] == ["Source"]:
            continue
        total += 1
        try:
            source, target = fields
            tokens = listops.encode(source, length)
            label = class_of(target, 10)
            if not tokens.any():
                raise ValueError("has no expression")
        except ValueError as error:
            damaged.append(f"line {number} ({error})")
            continue
        rows.append(tokens)
        labels.append(label)
    settle(damaged, total, f"lines of {path.name}", on_damaged)
    return np.array(rows), np.array(labels)


def pathfinder_folder(folder: Path, on_damaged: str) -> Labelled:
    """``curv_contour_length_14``: text files in metadata/ (named .npy) and PNG images beside it."""
    from concurrent.futures import ThreadPoolExecutor

    lines = [
        line.split(" ")
        for file in sorted((folder / "metadata").glob("*.npy"), key=lambda p: (len(p.name), p))
        for line in sources.read_bytes(file).decode(errors="replace").splitlines()
    ]
    with ThreadPoolExecutor() as pool:
        read = list(pool.map(lambda line: _pathfinder_image(folder, line), lines))
    damaged = [fault for _, fault in read if fault]
    settle(damaged, len(read), f"images of {folder.name}", on_damaged)
    kept = [
        (image, int(line[3])) for (image, fault), line in zip(read, lines, strict=True) if not fault
    ]
    return np.array([image for image, _ in kept]), np.array([label for _, label in kept])


def _pathfinder_image(folder: Path, line: list[str]) -> tuple[np.ndarray, str]:
    from PIL import Image

    name = "/".join(line[:2])
    try:
        if len(line) < 4 or line[3] not in ("0", "1"):
            raise ValueError("no label in its line of metadata")
        with Image.open(sources.check_regular(folder / name)) as image:
            pixels = np.asarray(image.convert("L"))
        if pixels.shape != (32, 32):
            raise ValueError(f"{pixels.shape[0]} x {pixels.shape[1]} pixels")
    except Exception as error:  # decoders raise whatever they like on broken input
        return np.empty(0), f"{name} ({error})"
    return pixels.reshape(-1), ""


def aan_tsv(path: Path, length: int, on_damaged: str) -> tuple[np.ndarray, np.ndarray]:
    """``new_aan_pairs.train.tsv``: label, two ids, two texts. Rows 2i and 2i+1 are a pair."""
    texts: list[bytes] = []
    labels, damaged, total = [], [], 0
    for number, fields in _tab_lines(path):
        total += 1
        try:
            label, _, _, one, other = fields
            labels.append(class_of(label, 2))
            texts += [one.encode(), other.encode()]
        except ValueError as error:
            damaged.append(f"line {number} ({error})")
    settle(damaged, total, f"lines of {path.name}", on_damaged)
    return as_rows(texts, length), np.array(labels)
