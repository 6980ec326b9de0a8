"""Labelled images as one uint8 array: a folder or tar of JPEGs, an npz, or scikit-learn's digits.

Decoded once, in parallel, and kept where the model is; what training changes in them (flips, crops,
colours) is computed there from random numbers that depend on the seed and the step only.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lln.texts import sources
from lln.texts.damage import DamagedData, check_policy, settle
from lln.texts.labels import check_classes

MOST_PIXELS = 2**26  # of an image, before it is made smaller
SUFFIXES = (".jpg", ".jpeg", ".png")
PACKED = "dogs_vs_cats_64.npz"
_KAGGLE = re.compile(r"^(?P<label>[^.]+)\.(?P<number>\d+)\.\w+$")  # cat.0.jpg
_NPZ_WORDS = ("header", "payload", "offsets", "labels", "index")


@dataclass(frozen=True)
class Images:
    """Every image that could be read.

    Attributes:
        pixels: uint8 ``[n, side, side, channels]``.
        labels: int64 ``[n]``, an index of ``classes``.
        number: int64 ``[n]``, what decides the split of an image: its number in the file name.
        source: What they are, for the record of a run.
    """

    pixels: np.ndarray
    labels: np.ndarray
    number: np.ndarray
    classes: tuple[str, ...]
    source: str

    def rows(self, split: str) -> np.ndarray:
        """Indices of a split: numbers ending in 0 are the test, in 1 the validation images."""
        last = self.number % 10
        chosen = {"test": last == 0, "valid": last == 1, "train": last > 1}
        if split not in chosen:
            raise ValueError(f"split={split!r} is unknown; choose from {', '.join(chosen)}")
        return np.flatnonzero(chosen[split])


@dataclass(frozen=True)
class _Encoded:
    """An image that is not decoded yet."""

    name: str
    read: Callable[[], bytes]


def load(
    source: str | os.PathLike[str] | None = None,
    *,
    side: int | None = None,
    on_damaged: str = "stop",
    workers: int | None = None,
) -> Images:
    """Read labelled images.

    Args:
        source: A folder or tar with files named like ``cat.0.jpg`` (the Kaggle layout) or with a
            folder per class; an npz as described in the guide; None for scikit-learn's digits.
        side: Length of both sides; images are resized. Default: 64, digits 8.
        on_damaged: "stop" raises before training if an image cannot be decoded, "skip" warns.
        workers: Threads that decode.

    Example:
        >>> load("dogs_vs_cats_64.npz").pixels.shape
        (25000, 64, 64, 3)
    """
    check_policy(on_damaged)
    if source is None:
        return _digits(side or 8)
    path = Path(source)
    if not path.exists():
        raise ValueError(f"data={path} does not exist; pass a folder of JPEGs, a tar or an npz")
    if path.is_dir() and (path / PACKED).exists():
        path = path / PACKED
    side = side or 64
    if not path.is_dir():
        sources.check_regular(path)
    if path.is_dir():
        entries = [_Encoded(str(file.relative_to(path)), file.read_bytes) for file in _files(path)]
    elif path.suffix == ".npz":
        return _from_npz(path, side, on_damaged, workers)
    elif tarfile.is_tarfile(path):
        entries, broken = _from_tar(path)
        settle(broken, len(entries) + len(broken), f"parts of {path.name}", on_damaged)
    else:
        raise DamagedData(f"{path} is neither a folder nor a readable tar or npz file")
    return _named(entries, path.name, side, on_damaged, workers)


def _files(folder: Path) -> list[Path]:
    found = (file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    return sorted(file for file in found if file.is_file())


def _from_tar(path: Path) -> tuple[list[_Encoded], list[str]]:
    """The images of an archive; one that is cut off gives those before the cut."""
    entries: list[_Encoded] = []
    unpacked = 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                unpacked += member.size
                sources.check_size(path, unpacked)
                if member.isfile() and Path(member.name).suffix.lower() in SUFFIXES:
                    content = archive.extractfile(member)
                    data = b"" if content is None else content.read()
                    entries.append(_Encoded(member.name, lambda data=data: data))
    except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        return entries, [f"everything after {len(entries)} images ({error})"]
    return entries, []


def _named(
    entries: list[_Encoded], source: str, side: int, on_damaged: str, workers: int | None
) -> Images:
    """Images whose class stands in their name, or is that of their folder."""
    entries = sorted(entries, key=lambda entry: entry.name)
    kaggle = [_KAGGLE.match(Path(entry.name).name) for entry in entries]
    if any(kaggle):
        entries = [entry for entry, match in zip(entries, kaggle, strict=True) if match]
        words = [match["label"] for match in kaggle if match]
        number = [int(match["number"]) for match in kaggle if match]
    else:
        words = [Path(entry.name).parent.name for entry in entries]
        count: dict[str, int] = {}
        number = [count.update({word: count.get(word, -1) + 1}) or count[word] for word in words]
    classes = tuple(sorted(set(words)))
    if len(classes) < 2:
        raise DamagedData(
            f"{source} holds {len(entries)} images of {len(classes)} classes; name the files like "
            "cat.0.jpg and dog.0.jpg, or give each class a folder"
        )
    labels = np.array([classes.index(word) for word in words])
    pixels, kept = _decode(entries, side, on_damaged, workers)
    return _checked(pixels, labels[kept], np.array(number)[kept], classes, source)


def _from_npz(path: Path, side: int, on_damaged: str, workers: int | None) -> Images:
    """JPEGs that share one header: image i is header + payload[offsets[i]:offsets[i + 1]]."""
    try:
        with sources.open_npz(path) as archive:
            header, payload, offsets, labels, index = (archive[name] for name in _NPZ_WORDS)
    except KeyError as error:
        raise DamagedData(
            f"{path} cannot be read ({error}); it must hold the arrays {', '.join(_NPZ_WORDS)}"
        ) from None
    if len(offsets) != len(labels) + 1 or len(index) != len(labels):
        raise DamagedData(
            f"{path} has {len(labels)} labels, {len(index)} numbers and {len(offsets) - 1} images"
        )
    # Every class has an image, so there are no more classes than images.
    labels = check_classes(labels, len(labels), path)
    index = check_classes(index, 2**53, path, "number")
    offsets = check_classes(offsets, payload.size + 1, path, "offset")
    head = header.tobytes()

    def entry(i: int) -> _Encoded:
        start, stop = int(offsets[i]), int(offsets[i + 1])
        return _Encoded(f"image {i}", lambda: head + payload[start:stop].tobytes())

    pixels, kept = _decode([entry(i) for i in range(len(labels))], side, on_damaged, workers)
    classes = ("cat", "dog") if labels.max() == 1 else tuple(map(str, range(labels.max() + 1)))
    return _checked(pixels, labels[kept], index[kept], classes, path.name)


def _digits(side: int) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits need scikit-learn: pip install 'lln-attention[train]', or pass --data"
        ) from error
    data: Any = load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)[..., None]
    if side != 8:
        raise ValueError(f"side={side} with the embedded digits, which have 8 x 8 pixels")
    number = np.arange(len(pixels))
    return _checked(pixels, data.target, number, tuple("0123456789"), "scikit-learn digits")


def _decode(
    entries: Sequence[_Encoded], side: int, on_damaged: str, workers: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of the images that can be decoded, and their indices."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("JPEG images need Pillow: pip install 'lln-attention[train]'") from error

    pixels = np.zeros((len(entries), side, side, 3), np.uint8)

    def decode(i: int) -> str:
        try:
            with Image.open(io.BytesIO(entries[i].read())) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels are too many")
                image = image.convert("RGB")
                if image.size != (side, side):
                    image = image.resize((side, side), Image.Resampling.LANCZOS)
                pixels[i] = np.asarray(image)
        except Exception as error:  # decoders raise whatever they like on broken input
            return f"{entries[i].name} ({_reason(error)})"
        return ""

    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        faults = list(pool.map(decode, range(len(entries)), chunksize=64))
    settle([fault for fault in faults if fault], len(entries), "images", on_damaged)
    kept = np.flatnonzero([not fault for fault in faults])
    return (pixels if len(kept) == len(pixels) else pixels[kept]), kept


def _reason(error: Exception) -> str:
    return "is no image" if "cannot identify" in str(error) else str(error)


def _checked(
    pixels: np.ndarray,
    labels: np.ndarray,
    number: np.ndarray,
    classes: tuple[str, ...],
    source: str,
) -> Images:
    images = Images(pixels, labels.astype(np.int64), number, classes, source)
    for split in ("train", "valid", "test"):
        missing = _missing(images.labels[images.rows(split)], len(classes))
        if missing:
            raise DamagedData(
                f"{source}: no image of {', '.join(classes[i] for i in missing)} is left for the "
                f"{split} split ({len(pixels)} images in all)"
            )
    return images


def _missing(labels: Iterable[int], count: int) -> list[int]:
    return sorted(set(range(count)) - set(np.asarray(labels).tolist()))
