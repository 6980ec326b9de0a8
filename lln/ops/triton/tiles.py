"""Block sizes of the kernels: one small measured table instead of a search at the first call.

A tile is (rows, warps, stages, programs): tokens per step, warps per program, loads in flight, and
the number of programs per multiprocessor that the split of the sequence aims at.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    rows: int
    warps: int
    stages: int
    programs: int


# Half precision, by the larger of the padded widths; measured on an H200 (sm_90).
HALF = {
    "summarize": {16: Tile(128, 4, 3, 4), 64: Tile(64, 4, 3, 4), 128: Tile(64, 8, 3, 2)},
    "read": {16: Tile(128, 4, 3, 4), 64: Tile(64, 4, 3, 4), 128: Tile(64, 8, 3, 2)},
    "read_backward": {16: Tile(128, 4, 3, 4), 64: Tile(64, 4, 3, 4), 128: Tile(64, 8, 2, 2)},
    "statistics": {16: Tile(256, 4, 2, 8), 64: Tile(64, 4, 2, 8), 256: Tile(32, 4, 2, 8)},
    "summarize_backward": {16: Tile(128, 4, 3, 4), 64: Tile(64, 4, 3, 4), 128: Tile(64, 8, 2, 2)},
}
# float32 dots run on the ordinary cores with both operands in registers: small tiles.
SINGLE = {16: Tile(64, 4, 2, 4), 64: Tile(32, 4, 2, 4), 128: Tile(16, 8, 1, 2)}


def padded(width: int) -> int:
    """The width of a register tile: the next power of two, at least the 16 of a tensor core."""
    return max(16, 1 << (width - 1).bit_length())


def value_block(d: int, e: int, dtype: torch.dtype) -> int:
    """Values per block: the float32 accumulator [D, block] must fit the registers."""
    limit = (16384 if dtype.itemsize == 2 else 8192) // padded(d)
    return min(padded(e), limit)


@functools.cache
def tile(kernel: str, d: int, e: int, dtype: torch.dtype) -> Tile:
    """The entry of the table for widths D and E, rounded up to the next one measured."""
    width = max(padded(d), padded(e))
    table = HALF[kernel] if dtype.itemsize == 2 else SINGLE
    return table[min((w for w in table if w >= width), default=max(table))]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a small number elsewhere, so that splits are exercised."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def whole_tiles(tokens: int, parts: int, tile: Tile) -> int:
    """Tokens per part, rounded up to whole tiles."""
    return -(-tokens // (parts * tile.rows)) * tile.rows


def split(tokens: int, heads: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """(parts, tokens per part): enough parts of whole tiles to give every multiprocessor work."""
    wanted = max(1, round(multiprocessors(device) * tile.programs / heads))
    span = whole_tiles(tokens, min(wanted, -(-tokens // tile.rows)), tile)
    return -(-tokens // span), span
