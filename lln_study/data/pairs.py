"""One or two texts per example as rows of token numbers, in batches of few different lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lln.records.seeds import generator

BUCKETS = (32, 64, 96, 128, 192, 256, 384, 512)
WINDOW = 32  # batches among which examples of like length are put together


@dataclass(frozen=True)
class Encoded:
    """Examples on a device.

    Attributes:
        ids: int64 ``[count, longest]``, padded on the right.
        mask: Of the same shape, where tokens are.
        lengths: int64 ``[count]``, always on the CPU: they decide shapes.
        labels: ``[count]``.
    """

    ids: Tensor
    mask: Tensor
    lengths: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device) -> Encoded:
        ids, mask, labels = (x.to(device) for x in (self.ids, self.mask, self.labels))
        return Encoded(ids, mask, self.lengths, labels)

    def rows(self, index: Tensor, length: int) -> dict[str, Tensor]:
        """A batch of these examples, cut to ``length`` tokens.

        Args:
            index: On the device of the examples, or a GPU has to be waited for.
        """
        return {
            "input_ids": self.ids[index, :length],
            "attention_mask": self.mask[index, :length],
            "labels": self.labels[index],
        }


def encode(
    tokenizer: Any, texts: Sequence[tuple[str, ...]], labels: Tensor, *, max_length: int
) -> Encoded:
    """Texts as RoBERTa reads them: ``<s> a </s>`` or ``<s> a </s></s> b </s>``.

    What exceeds ``max_length`` is cut from the end of the longer text, token by token.

    Args:
        tokenizer: A ``tokenizers.Tokenizer`` that knows ``<s>``, ``</s>`` and ``<pad>``.
    """
    start, end, padding = (special(tokenizer, name) for name in ("<s>", "</s>", "<pad>"))
    parts = [
        [found.ids for found in tokenizer.encode_batch(list(column), add_special_tokens=False)]
        for column in zip(*texts, strict=True)
    ]
    sequences = []
    for pieces in zip(*parts, strict=True):
        pieces = cut(pieces, max_length - 2 * len(pieces))
        joined = [token for piece in pieces for token in (end, *piece, end)]
        sequences.append([start, *joined[1:]])
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    width = bucket(int(lengths.max()), max_length)
    mask = torch.arange(width) < lengths[:, None]
    ids = torch.full((len(sequences), width), padding)
    ids[mask] = torch.tensor(list(chain.from_iterable(sequences)))
    return Encoded(ids, mask, lengths, labels)


def special(tokenizer: Any, name: str) -> int:
    """The number of a special token."""
    number = tokenizer.token_to_id(name)
    if number is None:
        raise ValueError(f"the tokenizer has no token {name}; it is not one of RoBERTa's kind")
    return number


def cut(pieces: Sequence[list[int]], room: int) -> list[list[int]]:
    """The starts of one or two texts that fit into ``room`` tokens, the longer one cut first."""
    if len(pieces) == 1:
        return [pieces[0][:room]]
    first, second = (len(piece) for piece in pieces)
    half = room // 2
    if first + second > room:
        first, second = (
            (min(first, room - second), second)
            if second <= half
            else (first, room - first)
            if first <= room - half
            else (room - half, half)
        )
    return [pieces[0][:first], pieces[1][:second]]


def bucket(length: int, max_length: int) -> int:
    """The smallest of few lengths that holds ``length``: compiled code and graphs are kept."""
    return next((size for size in BUCKETS if length <= size < max_length), max_length)


def batches(lengths: Tensor, *, batch_size: int, seed: int, epoch: int) -> Tensor:
    """The examples of every batch of an epoch, int64 ``[count // batch_size, batch_size]``.

    Shuffled; then, among every 32 batches, examples of like length are put together, and the
    batches shuffled. What does not fill a batch is left out, other examples in every epoch.
    """
    draw = generator(seed, "epoch", epoch)
    order = torch.randperm(len(lengths), generator=draw)
    order = order[: len(order) // batch_size * batch_size]
    windows = order.split(WINDOW * batch_size)
    alike = torch.cat([window[lengths[window].argsort(stable=True)] for window in windows])
    grouped = alike.unflatten(0, (-1, batch_size))
    return grouped[torch.randperm(len(grouped), generator=draw)]


def in_order(lengths: Tensor, *, max_length: int, tokens: int) -> Iterator[tuple[Tensor, int]]:
    """All examples from short to long in large batches: their numbers, and the length of a batch.

    Args:
        tokens: That a batch may have, with its padding.
    """
    order = lengths.argsort(stable=True)
    sizes = torch.tensor([bucket(length, max_length) for length in lengths[order].tolist()])
    for size in sizes.unique().tolist():
        for index in order[sizes == size].split(max(1, tokens // size)):
            yield index, size
