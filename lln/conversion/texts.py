"""Text for conversion: articles from files, and batches of their ids as functions of the step."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lln.conversion.masking import Masking
from lln.records import order
from lln.texts import bundled, sources, text

GROUP = 64  # articles that a tokenizer gets at once
PIECE_OF_A_WORD = "a"  # what a tokenizer is asked to frame


class TooShort(ValueError):
    """There is not enough text for what is wanted; the message says how much there is."""


def articles(place: str | os.PathLike[str] | None, split: str | None = None) -> Iterator[str]:
    """Read the articles of a file or folder, one at a time; blank ones are left out.

    Files are those of training: .txt (WikiText at its headings), .jsonl with a field "text", and
    both packed as .xz. A folder with files per split has its training files read, one without has
    all of them, in the order of their names.

    Args:
        place: None looks at ``LLN_DATA``, then takes the text that comes with the package.
        split: "train", "valid" or "test", as :class:`lln.texts.text.Corpus` has them: where
            no file is named so, the end of the text is "valid". None reads everything.

    Raises:
        ValueError: There is no such place, a file is damaged, or nothing is in it.

    Example:
        >>> first = next(articles("data/wiki2015_valid.jsonl.xz"))
    """
    corpus = text.find(place)
    if split is not None and split not in corpus.splits:
        raise ValueError(f"split={split!r} is not in {place}; there is {', '.join(corpus.splits)}")
    if split:
        found = iter(corpus.articles(split))
    elif corpus.files:
        found = (each for path in corpus.files["train"] for each in text.read(path))
    else:
        found = iter([bundled.text()])
    empty = True
    for article in found:
        if article.strip():
            empty = False
            yield article
    if empty:
        raise ValueError(f"{place} has no text; pass a file or folder with some")


def whole_text(path: str | os.PathLike[str]) -> str:
    """The text as it stands in a .txt file; the articles of a .jsonl file with a line between."""
    if ".jsonl" in Path(path).suffixes:
        return "\n\n".join(articles(path))
    content = sources.read_bytes(path)
    try:
        found = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}; pass another file") from None
    if not found.strip():
        raise ValueError(f"{path} has no text; pass a file with some")
    return found


@dataclass(frozen=True)
class Batches:
    """Sequences of ids, and batches of them; a batch depends on its step alone.

    Iterating goes through the sequences once. With a seed they are shuffled anew in every epoch and
    there is a batch for every step; without one they come in order, and the last may be smaller.

    Attributes:
        pad: Id to the right of shorter sequences; None where all have the same length.
        seed: None = in order.
        masking: Hides tokens of every batch, for masked language models; ``labels`` has them.

    Example:
        >>> batches = encoder_batches(tokenizer, articles("wiki.txt"), 512, batch_size=8, seed=0)
        >>> for batch in batches.between(100, 200): ...      # resume at step 100
    """

    sequences: Sequence[np.ndarray]
    batch_size: int
    pad: int | None = None
    seed: int | None = None
    masking: Masking | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")

    def __len__(self) -> int:
        """Batches of one epoch."""
        return -(-len(self.sequences) // self.batch_size)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        return self.batch(step)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[dict[str, Tensor]]:
        """Batches of the steps ``first`` to ``last`` − 1."""
        return (self.batch(step) for step in range(first, last))

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, Tensor]:
        """``input_ids`` and, where sequences differ in length, ``attention_mask`` of a step.

        Args:
            rows: The part of ``range(batch_size)`` that a process wants.
        """
        if step < 0 or (self.seed is None and step >= len(self)):
            raise IndexError(f"step {step} is not among the {len(self)} of an ordered text")
        count = len(self.sequences)
        if self.seed is None:
            here = range(count)[step * self.batch_size : (step + 1) * self.batch_size]
            chosen = list(here[rows])
        else:
            options = {"batch_size": self.batch_size, "count": count, "seed": self.seed}
            chosen = order.shuffled(step, rows, **options).tolist()
        found = padded([self.sequences[index] for index in chosen], self.pad)
        if self.masking is not None:
            found["input_ids"], found["labels"] = self.masking.hide(found["input_ids"], step)
        return found


def padded(sequences: Sequence[np.ndarray], pad: int | None) -> dict[str, Tensor]:
    """Ids as a tensor ``[B, N]`` with their mask; without a mask if ``pad`` is None."""
    rows = [torch.from_numpy(np.asarray(ids, dtype=np.int64)) for ids in sequences]
    if pad is None:
        return {"input_ids": torch.stack(rows)}
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def encoder_batches(
    tokenizer: Any,
    texts: Iterable[str],
    length: int,
    *,
    batch_size: int,
    seed: int | None = None,
    fill: float = 0.0,
    every_piece: bool = False,
    limit: int | None = None,
) -> Batches:
    """Texts for an encoder: special tokens as the tokenizer adds them, padding at the right.

    Args:
        length: Most tokens of a sequence, special ones included.
        fill: Leave out what fills less than this share of ``length``.
        every_piece: Cut texts into pieces of ``length``; otherwise only the first piece is taken.
        limit: Most sequences; what comes after is not read.

    Raises:
        TooShort: No text is long enough.
    """
    frame = Frame.of(tokenizer)
    room = frame.room(length)
    longest, found = 0, []
    for ids in token_ids(tokenizer, texts):
        longest = max(longest, len(ids) + frame.size)
        starts = range(0, len(ids) if every_piece else 1, room)
        pieces = (frame.around(ids[start : start + room]) for start in starts)
        found += [piece for piece in pieces if len(piece) >= fill * length]
        if limit is not None and len(found) >= limit:
            break
    if not found:
        raise TooShort(
            f"no text fills {fill:.0%} of length={length} tokens, the longest has {longest}; pass "
            "longer texts, or a smaller length"
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return Batches(found[:limit], batch_size, pad, seed)


def decoder_batches(
    tokenizer: Any,
    texts: Iterable[str],
    length: int,
    *,
    batch_size: int,
    seed: int | None = None,
    limit: int | None = None,
) -> Batches:
    """Texts for a decoder: end to end, with the end token between, cut into windows of ``length``.

    The rest at the end is left out; there is no padding.

    Args:
        limit: Most windows; what comes after is not read.

    Raises:
        TooShort: The texts do not fill one window.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts, count = [], 0
    for ids in token_ids(tokenizer, texts):
        parts.append(np.array([*ids, *end], dtype=np.int32))
        count += len(parts[-1])
        if limit is not None and count >= limit * length:
            break
    windows = count // length if limit is None else min(limit, count // length)
    if not windows:
        raise TooShort(
            f"the texts have {count} tokens, which do not fill a window of length={length}; pass "
            "more text, or a smaller length"
        )
    stream = np.concatenate(parts)[: windows * length]
    return Batches(list(stream.reshape(windows, length)), batch_size, None, seed)


def token_ids(tokenizer: Any, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Ids of each text, int32, without special tokens."""
    remaining = iter(texts)
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    while group := list(itertools.islice(remaining, GROUP)):
        for ids in tokenizer(group, **options)["input_ids"]:
            yield np.array(ids, dtype=np.int32)


@dataclass(frozen=True)
class Frame:
    """The special tokens that a tokenizer puts before and after a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Any) -> Frame:
        """Ask a tokenizer."""
        bare = tokenizer(PIECE_OF_A_WORD, add_special_tokens=False)["input_ids"]
        whole = tokenizer(PIECE_OF_A_WORD)["input_ids"]
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return Frame(tuple(whole[:start]), tuple(whole[start + len(bare) :]))
        raise ValueError(
            f"{type(tokenizer).__name__} changes a text that it puts special tokens around; "
            "such a tokenizer cannot be used here"
        )

    @property
    def size(self) -> int:
        return len(self.before) + len(self.after)

    def room(self, length: int) -> int:
        """Tokens of the text in a sequence of ``length``."""
        if length <= self.size:
            raise ValueError(f"length={length} leaves no room beside {self.size} special tokens")
        return length - self.size

    def around(self, ids: np.ndarray) -> np.ndarray:
        """The ids with special tokens."""
        return np.array([*self.before, *ids, *self.after], dtype=np.int32)
