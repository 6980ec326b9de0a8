"""Rows of masked text: which tokens, which of them are hidden, as a pure function of place.

Everything is integer arithmetic on the device of the ids. The random numbers are a hash of (seed,
step, row, position): the same on every device, for every number of processes, and whatever was
drawn before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lln.records.order import shuffled
from lln.records.seeds import derived_seed
from lln_study.data.tokens import END, MASK, PAD, SPECIAL, START, Tokens

SHARE = 0.15  # of the tokens of a row that are to be predicted
KINDS = ("packed", "padded")
FAR = 2**62


class Rows:
    """The rows of a split, on a device.

    "packed": every row is <s> and the next ``length - 1`` ids of all articles end to end; what is
    left at the end is dropped. "padded": every row is a piece of one article between <s> and </s>,
    filled up with <pad>.
    """

    def __init__(self, tokens: Tokens, *, length: int, kind: str, device: torch.device) -> None:
        if kind not in KINDS:
            raise ValueError(f"batches={kind!r} is unknown; choose from {', '.join(KINDS)}")
        if length < 8:
            raise ValueError(f"length={length} is too short to mask anything; choose 8 or more")
        self.length, self.kind = length, kind
        begin, size = _packed(tokens, length) if kind == "packed" else _pieces(tokens, length)
        if not len(begin):
            raise ValueError(
                f"length={length} is longer than the text, which has {len(tokens.ids):,} tokens; "
                "choose a smaller length or more data"
            )
        # 16 bits are kept as they are and read without sign: torch knows few operations on uint16.
        self.ids = torch.from_numpy(np.array(tokens.ids).view(np.int16)).to(device)
        self.begin = torch.from_numpy(begin)
        self.size = torch.from_numpy(size)

    def __len__(self) -> int:
        return len(self.begin)

    def take(self, index: Tensor) -> Tensor:
        """The rows of these numbers; int64 ``[R, N]``."""
        device = self.ids.device
        begin = self.begin[index].to(device, non_blocking=True)[:, None]
        place = torch.arange(self.length - 1, device=device)
        if self.kind == "packed":
            text = self.ids[begin + place].long() & 0xFFFF
        else:
            size = self.size[index].to(device, non_blocking=True)[:, None]
            inside = (begin + place).clamp(max=len(self.ids) - 1)
            text = self.ids[inside].long() & 0xFFFF
            text = torch.where(place < size, text, torch.where(place == size, END, PAD))
        return torch.cat([torch.full_like(text[:, :1], START), text], 1)


def _packed(tokens: Tokens, length: int) -> tuple[np.ndarray, np.ndarray]:
    begin = np.arange(0, len(tokens.ids) - (length - 1) + 1, length - 1, dtype=np.int64)
    return begin, np.full_like(begin, length - 1)


def _pieces(tokens: Tokens, length: int) -> tuple[np.ndarray, np.ndarray]:
    begin, size = [], []
    for first, after in zip(tokens.starts[:-1], tokens.starts[1:] - 1, strict=True):
        begin.append(np.arange(first, after, length - 2, dtype=np.int64))
        size.append(np.minimum(after - begin[-1], length - 2))
    return np.concatenate(begin), np.concatenate(size)


@dataclass(frozen=True)
class Masking:
    """Dynamic masking: of 15 % of the tokens 80 % become <mask>, 10 % any token, 10 % stay."""

    vocabulary: int
    seed: int
    share: float = SHARE

    def hide(self, ids: Tensor, step: int, first_row: int) -> dict[str, Tensor]:
        """Mask rows of the global batch of a step.

        Args:
            ids: int64 ``[R, N]``.
            first_row: Number of the first of these rows in the global batch.

        Returns:
            ``input_ids`` [R, N]; ``positions`` [R, K] of the hidden tokens, K the same for every
            row; ``labels`` [R, K], the tokens themselves, -100 where a padded row has fewer than K.
        """
        device, (rows, length) = ids.device, ids.shape
        row = torch.arange(first_row, first_row + rows, device=device)[:, None]
        place = row * length + torch.arange(length, device=device)
        drawn = _hash(place, derived_seed(self.seed, "masking", step))
        ordinary = ids >= len(SPECIAL)
        count = max(1, round(self.share * length))
        chosen = torch.where(ordinary, drawn, FAR).topk(count, 1, largest=False)
        wanted = (self.share * (ids != PAD).sum(1, keepdim=True)).round().clamp(min=1)
        held = ordinary.gather(1, chosen.indices)
        positions, order = chosen.indices.sort(1)
        kept = ((torch.arange(count, device=device) < wanted) & held).gather(1, order)
        labels = ids.gather(1, positions)
        fate = _hash(place.gather(1, positions), derived_seed(self.seed, "fate", step))
        other = len(SPECIAL) + (fate // 16) % (self.vocabulary - len(SPECIAL))
        lot = fate % 10
        new = torch.where(lot < 8, MASK, torch.where(lot == 8, other, labels))
        new = torch.where(kept, new, labels)
        return {
            "input_ids": ids.scatter(1, positions, new),
            "positions": positions,
            "labels": torch.where(kept, labels, -100),
        }


def batch(
    rows: Rows, masking: Masking, step: int, part: slice, *, batch_size: int
) -> Mapping[str, Tensor]:
    """Rows ``part`` of the global batch of a step: shuffled, masked, with the mask of padding."""
    start, _, _ = part.indices(batch_size)
    options = {"batch_size": batch_size, "count": len(rows), "seed": masking.seed}
    ids = rows.take(shuffled(step, part, **options))
    found = masking.hide(ids, step, start)
    if rows.kind == "padded":
        found["attention_mask"] = ids != PAD
    return found


def in_order(rows: Rows, masking: Masking, size: int) -> list[dict[str, Tensor]]:
    """All rows once, masked in the same way at every call: for evaluation."""
    batches = []
    for first in range(0, len(rows), size):
        ids = rows.take(torch.arange(first, min(first + size, len(rows))))
        found = masking.hide(ids, 0, first)
        if rows.kind == "padded":
            found["attention_mask"] = ids != PAD
        batches.append(found)
    return batches


def _hash(counter: Tensor, seed: int) -> Tensor:
    """62 random bits of every number: the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = counter * -7046029254386353131 + seed
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return _shift(x ^ _shift(x, 31), 2)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
