"""Packed sequences: several texts in one row of a batch, none of which sees another.

Two things tell where a text begins: positions that start again, or FlashAttention's cumulative
lengths. Both become the number of each token's sequence, ``[B, N]``, which travels as a mask. A
layer takes its tokens apart into padded batches of sequences of similar length, attends to these as
to any other, and puts the answers back.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True)
class Groups:
    """Where the tokens of a packed batch go, and where they come back from.

    Attributes:
        parts: For every padded batch the places of its tokens among all B·N, ``[S, L]``, and which
            of them are real; None if all are.
        back: The place of every token among those of all parts.
    """

    parts: list[tuple[Int[Tensor, "S L"], Bool[Tensor, "S L"] | None]]
    back: Int[Tensor, " T"]

    @classmethod
    def of(cls, sequences: Int[Tensor, "B N"], *, together: bool) -> Groups:
        """Group sequences whose lengths share a power of two, or put all of them together."""
        known = getattr(sequences, "_lln_groups", None) or {}
        if together not in known:
            known[together] = cls._make(sequences, together)
            sequences._lln_groups = known  # pyright: ignore[reportAttributeAccessIssue]
        return known[together]

    @classmethod
    def _make(cls, sequences: Tensor, together: bool) -> Groups:
        device = sequences.device
        begins = torch.ones_like(sequences, dtype=torch.bool)
        begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
        starts = begins.flatten().nonzero()[:, 0].cpu()
        ends = torch.cat([starts[1:], torch.tensor([sequences.numel()])])
        buckets: dict[int, list[int]] = {}
        for number, length in enumerate((ends - starts).tolist()):
            buckets.setdefault(0 if together else length.bit_length(), []).append(number)
        parts, back, offset = [], torch.empty(sequences.numel(), dtype=torch.long), 0
        for members in buckets.values():
            first, length = starts[members], ends[members] - starts[members]
            place = torch.arange(int(length.max()))
            real = place < length[:, None]
            index = first[:, None] + place * real  # padding: the first token of its sequence again
            back[index[real]] = offset + torch.arange(index.numel()).view_as(index)[real]
            offset += index.numel()
            parts.append((index.to(device), None if bool(real.all()) else real.to(device)))
        return cls(parts, back.to(device))

    def join(self, answers: list[Tensor], rows: int) -> Tensor:
        """``[B, N, ...]`` from the answers ``[S, L, ...]`` to all parts."""
        tokens = torch.cat([answer.flatten(0, 1) for answer in answers])
        return tokens[self.back].unflatten(0, (rows, -1))


def take_tokens(x: Tensor, index: Int[Tensor, "S L"]) -> Tensor:
    """``[S, L, ...]`` from ``[B, N, ...]``, by the places of :class:`Groups`."""
    return x.flatten(0, 1)[index]


def take_heads(x: Tensor, index: Int[Tensor, "S L"]) -> Tensor:
    """The same with heads before tokens: ``[B, H, N, D] -> [S, H, L, D]``."""
    return take_tokens(x.transpose(1, 2), index).transpose(1, 2)


def from_positions(positions: Int[Tensor, "B N"], *, is_causal: bool) -> Int[Tensor, "B N"] | None:
    """The number of each token's sequence, by positions that start again; None if they do not.

    Positions rise by one inside a sequence, and fall where the next begins, in encoders to the
    first position of the row. Others mean something else: nothing is said about them here.

    Raises:
        ValueError: An encoder's positions are all those of a first token.
    """
    if positions.shape[1] < 2:
        return None  # without a look: a step of decoding must not wait for the device
    steps = positions.diff(dim=1)
    begins = steps != 1
    falls = steps < 1
    if not is_causal:
        falls = falls & (positions[:, 1:] == positions[:, :1])
    found = torch.stack([begins.any() & (falls == begins).all(), begins.all()])
    packed, nothing_rises = found.tolist()
    if not packed:
        return None
    if nothing_rises and not is_causal:
        raise ValueError(
            f"all position_ids of a row are the same, {int(positions[0, 0])}: texts of one token "
            "each, or one text without order. Pass cu_seq_lens_q for packed texts, and an "
            "attention_mask of ones for one text"
        )
    return nn.functional.pad(begins.cumsum(1), (1, 0))


def from_lengths(lengths: Mapping[str, Any], rows: int, tokens: int) -> Int[Tensor, "B N"] | None:
    """The number of each token's sequence, by FlashAttention's cumulative lengths, if there are."""
    if not any(name in lengths for name in LENGTHS):
        return None
    given = [lengths.get(name) for name in LENGTHS]
    queries, keys = (given[0] if x is None else x for x in given)
    queries = keys if queries is None else queries
    if queries is None or keys is None or max(len(queries), len(keys)) <= 2:
        return None
    if torch.compiler.is_compiling():
        raise ValueError(
            "packed sequences, cu_seq_lens_q, in a compiled model: a compiler cannot see where "
            "they begin; pad instead of packing, or run the model without torch.compile"
        )
    if len(queries) != len(keys) or not torch.equal(queries, keys.to(queries)):
        raise ValueError(
            f"cu_seq_lens_q={queries.tolist()} and cu_seq_lens_k={keys.tolist()} differ: queries "
            "and keys of packed self-attention are the same tokens; pass the same lengths for both"
        )
    sizes = queries.diff()
    whole = rows == 1 and int(queries[0]) == 0 and int(queries[-1]) == tokens
    if not whole or bool((sizes < 0).any()):
        raise ValueError(
            f"cu_seq_lens_q={queries.tolist()} must rise from 0 to the number of tokens of a "
            f"single row, and the batch has {rows} rows of {tokens}; pack all sequences into one "
            "row, as DataCollatorWithFlattening does"
        )
    return torch.repeat_interleave(sizes)[None]


class _Calls(threading.local):
    """The calls of models that have packed inputs, innermost last."""

    def __init__(self) -> None:
        self.running: list[_Call] = []


@dataclass
class _Call:
    model: nn.Module
    sequences: Tensor
    read: bool = False


_calls = _Calls()


def begin(model: nn.Module, sequences: Int[Tensor, "B N"]) -> None:
    """Let the masks of this call of a model be those of packed sequences."""
    _calls.running.append(_Call(model, sequences))


def current(rows: int, queries: int, keys: int) -> Int[Tensor, "B N"] | None:
    """The numbers of the sequences, for the mask function of a model whose call has begun."""
    if torch.compiler.is_compiling() or not _calls.running:
        return None
    call = _calls.running[-1]
    if call.sequences.shape != (rows, queries) or queries != keys:
        return None
    call.read = True
    return call.sequences


def end(model: nn.Module, args: tuple, output: Any) -> None:
    """Forget a call; called after a model, whether it answered or failed."""
    if torch.compiler.is_compiling() or not _calls.running or _calls.running[-1].model is not model:
        return
    call = _calls.running.pop()
    if output is not None and not call.read:
        raise ValueError(
            f"{type(model).__name__} makes its masks itself, so that nobody keeps packed sequences "
            "apart; pad instead of packing"
        )
