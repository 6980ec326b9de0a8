"""Masks between Hugging Face models and linear attention: never a matrix, never silently dropped.

A model asks for its mask once, before its layers run, by the function registered here. What comes
back is a tensor that every layer of the model can read, and that still says whether it was causal:

    bool [B, M]             bidirectional, True = may be attended; [B, 0] if nothing is padded
    uint8 [B, M]            causal, 1 = may be attended; [B, 0] likewise
    int64 [B, 1, N]         packed sequences, bidirectional: the number of each token's sequence
    int32 [B, 1, N]         packed sequences, causal
    bool [B, 1, N, M]       a mask per query-key pair, refused by a linear layer when it is called

Refusing only there lets models build masks that none of their layers uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
)

from lln.hf import packing

HIDDEN_BELOW = -1e4  # of masks that are added to scores: what hides a key, in any dtype


def linear_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> Tensor:
    """The mask of linear attention from what a model knows; called by transformers."""
    is_causal = mask_function is causal_mask_function
    if _adds_bias(config):
        return _pairs(batch_size, q_length, kv_length, device)
    if not is_causal and mask_function is not bidirectional_mask_function:
        return _pairs(batch_size, q_length, kv_length, device)
    # A static cache has room behind the last token: its queries are not the last positions.
    if is_causal and (isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length):
        return _pairs(batch_size, q_length, kv_length, device)
    sequences = packing.current(batch_size, q_length, kv_length)
    if sequences is not None:
        sequences = sequences.to(torch.int32 if is_causal else torch.int64)
        return sequences.to(device)[:, None]
    mask = _padding(attention_mask, kv_length, kv_offset)
    return padding_code(mask, batch_size, is_causal=is_causal, device=device)


def mixed_mask(**arguments: Any) -> Tensor | None:
    """As :func:`linear_mask`, for models that keep softmax layers: pairwise masks are built."""
    if _adds_bias(arguments.get("config")):
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**arguments)
    mask = linear_mask(**arguments)
    if mask.dim() != 4:
        return mask
    built = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    sizes = (arguments[name] for name in ("batch_size", "q_length", "kv_length"))
    sequences = packing.current(*sizes)
    if sequences is not None:
        same = packed_sequence_mask_function(sequences.to(arguments.get("device", "cpu")))
        built["mask_function"] = and_masks(arguments["mask_function"], same)
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**built)


def _adds_bias(config: Any) -> bool:
    """Whether a model adds a bias per query-key pair to its mask, which must have that shape then.

    BEiT and its relatives; their layers see the sum, and linear ones refuse it.
    """
    flags = ("use_relative_position_bias", "use_shared_relative_position_bias")
    return any(getattr(config, flag, False) for flag in flags)


def _pairs(batch: int, queries: int, keys: int, device: torch.device | str) -> Tensor:
    """Stands for a mask per query-key pair without holding one: a single element, expanded."""
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device).expand(batch, 1, queries, keys)


def _padding(mask: Tensor | None, keys: int, offset: int) -> Tensor | None:
    """The bool mask of the keys; None if all of them are real, as far as one may look."""
    if mask is None:
        return None
    mask = mask[:, offset : offset + keys].to(torch.bool)
    if mask.shape[1] < keys:  # as transformers reads it: what the mask leaves out is padding
        mask = F.pad(mask, (0, keys - mask.shape[1]))
    return None if may_look(mask) and bool(mask.all()) else mask


def may_look(mask: Tensor) -> bool:
    """Not while a compiler traces or a CUDA graph records: values are not known then."""
    recording = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (recording or torch.compiler.is_compiling())


@dataclass(frozen=True)
class Visible:
    """What a layer was told: the keys that are real, and whether it is causal (None: unsaid)."""

    key_mask: Tensor | None
    is_causal: bool | None


def read_mask(mask: Tensor | None, keys: int) -> Visible:
    """Decode what :func:`linear_mask` returned, or a 2-D mask that a model handed on itself."""
    if mask is None:
        return Visible(None, None)
    all_real = mask.shape[1] == 0 and keys > 0
    return Visible(None if all_real else mask.to(torch.bool), mask.dtype == torch.uint8)


def packed(mask: Tensor | None) -> tuple[Tensor, bool] | None:
    """The sequence numbers ``[B, N]`` of a packed batch and whether it is causal, if it is one."""
    if mask is None or mask.dim() != 3:
        return None
    known = getattr(mask, "_lln_sequences", None)
    if known is None:
        known = mask[:, 0]
        mask._lln_sequences = known  # pyright: ignore[reportAttributeAccessIssue]
    return known, mask.dtype == torch.int32


def padding_code(real: Tensor | None, rows: int, *, is_causal: bool, device: Any) -> Tensor:
    """A mask as :func:`linear_mask` makes it, from a bool mask or None."""
    if real is None:
        real = torch.empty(rows, 0, dtype=torch.bool, device=device)
    return real.to(torch.uint8) if is_causal else real


def one_row(mask: Tensor, queries: int) -> Tensor:
    """``[B, M]`` from a mask ``[B, 1, 1, M]`` that all queries share; any other as it is.

    Some models make it themselves, bool or with 0 where a key may be attended and a huge negative
    number elsewhere. For a single query it says too little: a window looks the same.
    """
    if mask.dim() != 4 or mask.shape[1:3] != (1, 1) or queries == 1:
        return mask
    row = mask[:, 0, 0]
    if row.dtype == torch.bool:
        return row
    if not may_look(row) or not row.is_floating_point():
        return mask
    known = getattr(mask, "_lln_one_row", None)
    if known is None:
        seen = row == 0
        known = seen if bool((seen | (row < HIDDEN_BELOW)).all()) else mask
        mask._lln_one_row = known  # pyright: ignore[reportAttributeAccessIssue]
    return known


def starts_late(key_mask: Tensor) -> bool:
    """Whether a sample is padded on the left; looked up once per mask, as a GPU has to wait."""
    if not may_look(key_mask):
        return True
    known = getattr(key_mask, "_lln_starts_late", None)
    if known is None:
        known = not bool(key_mask[:, 0].all())
        key_mask._lln_starts_late = known  # pyright: ignore[reportAttributeAccessIssue]
    return known
