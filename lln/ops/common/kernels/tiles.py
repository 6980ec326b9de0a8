"""Block sizes of the kernels: one small measured table instead of a search at the first call.

`lln bench tiles` tries others on a device. Devices with less shared memory than an H200 have other
entries where those of the table do not fit, and fewer shapes for which :func:`causal_fits` and its
like say yes.

A tile is (rows, warps, stages, programs, through, registers, values, sums, columns, ahead): tokens
per step, warps per program, loads in flight, the programs that run on one multiprocessor at a time,
whether half precision becomes float32 through the tensor cores
(:func:`lln.ops.common.kernels.features.as_float`), the most registers per thread if not what the
compiler likes, the most values per block if fewer than fit, whether causal kernels carry sums
instead of means, the keys per step of queries with windows (of keys: the queries), and whether
windows of one or two such steps are walked without a loop, so that the next one loads ahead.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from lln.ops.common.arguments import constant_under_compile


class Tile(NamedTuple):
    rows: int
    warps: int
    stages: int
    programs: int
    through: bool = True
    registers: int | None = None
    values: int | None = None
    sums: bool = False
    columns: int = 64
    ahead: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What every kernel with such a tile is launched with."""
        return {
            "THROUGH": self.through,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


# Half precision, by the larger of the padded widths; measured on an H200 (sm_90).
HALF = {
    "summarize": {64: Tile(64, 4, 3, 3), 128: Tile(64, 8, 3, 1), 256: Tile(32, 8, 2, 1)},
    "read": {
        64: Tile(64, 4, 3, 3),
        128: Tile(64, 8, 3, 2, through=False, registers=128),
        256: Tile(64, 8, 2, 1),
    },
    "read_backward": {
        64: Tile(64, 4, 4, 2),
        128: Tile(64, 8, 3, 1, through=False),
        256: Tile(32, 8, 1, 1),
    },
    "summarize_backward": {
        64: Tile(64, 4, 3, 3, registers=168),
        128: Tile(64, 8, 3, 1, through=False),
        256: Tile(32, 8, 1, 1),
    },
    "diag": {64: Tile(64, 4, 3, 2), 128: Tile(64, 4, 1, 2, through=False)},
    "diag_backward": {64: Tile(64, 4, 3, 2, through=False), 128: Tile(64, 4, 1, 2, through=False)},
    # LLN+Diag with blocks of more than 64 tokens, and windows that overlap
    "wide": {
        64: Tile(64, 4, 2, 2, columns=128, ahead=True),
        128: Tile(64, 4, 1, 2, through=False),
    },
    # ... whose windows are walked: as measured on overlapping ones; three programs fit where all of
    # their tiles are full, two elsewhere
    "wide_loop": {64: Tile(64, 4, 2, 3), 128: Tile(64, 4, 1, 2, through=False)},
    "wide_dq": {64: Tile(64, 4, 2, 2), 128: Tile(64, 4, 2, 2, through=False, columns=32)},
    "wide_dkdv": {
        64: Tile(64, 4, 2, 2, through=False, ahead=True),
        128: Tile(64, 4, 2, 2, through=False, columns=32),
    },
    # windows alone: not measured yet
    "near": {64: Tile(64, 4, 2, 3), 128: Tile(64, 8, 2, 1)},
    "near_dq": {64: Tile(64, 4, 2, 2), 128: Tile(64, 8, 1, 1)},
    "near_dkdv": {64: Tile(64, 4, 2, 2), 128: Tile(64, 8, 1, 1)},
    # windows with far keys
    "joint": {64: Tile(64, 4, 1, 3), 128: Tile(128, 8, 1, 1), 256: Tile(32, 8, 1, 1)},
    "joint_dq": {
        64: Tile(128, 4, 1, 2, through=False),
        128: Tile(128, 8, 1, 1, through=False),
        256: Tile(32, 8, 1, 1, through=False),
    },
    "joint_dkdv": {
        64: Tile(64, 4, 1, 2, through=False),
        128: Tile(64, 4, 1, 2, through=False),
        256: Tile(32, 8, 1, 1, through=False),
    },
    "joint_segments": {64: Tile(64, 4, 3, 3), 128: Tile(64, 8, 3, 1), 256: Tile(32, 8, 2, 1)},
    "causal": {
        64: Tile(64, 4, 3, 2, sums=True),
        128: Tile(64, 8, 1, 1, through=False, sums=True),
    },
    "causal_dq": {64: Tile(64, 4, 2, 2, sums=True), 128: Tile(64, 8, 1, 1, sums=True)},
    "causal_dkdv": {64: Tile(64, 4, 2, 2, sums=True), 128: Tile(64, 8, 1, 1, sums=True)},
    # heads of 256: not measured
    "convolution": {64: Tile(64, 4, 3, 2), 128: Tile(64, 4, 2, 4), 256: Tile(64, 8, 1, 1)},
    "statistics": {64: Tile(32, 8, 4, 6), 128: Tile(16, 8, 1, 5), 256: Tile(16, 8, 1, 4)},
}
# float32 dots run on the ordinary cores with both operands in registers: small tiles.
SINGLE = {64: Tile(32, 4, 2, 4), 128: Tile(16, 8, 1, 2), 256: Tile(16, 8, 1, 1)}


# KiB of shared memory that a program may ask for, by compute capability (NVIDIA's CUDA programming
# guide); a device that is not listed, as those with 99, is taken for one with the least.
LEAST_SHARED, MOST_SHARED = 99, 227
SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
Table = dict[int, Tile]


def _with(smaller: dict[str, Table]) -> dict[str, Table]:
    """The table of half precision with other entries where those do not fit; not measured."""
    return {kernel: {**table, **smaller.get(kernel, {})} for kernel, table in HALF.items()}


_HALF_IN_163: dict[str, Table] = {  # would fit, but with kilobytes of registers spilled
    "joint_dq": {128: Tile(32, 8, 1, 1, through=False)},
    "joint_dkdv": {
        64: Tile(32, 4, 1, 2, through=False),
        128: Tile(32, 8, 1, 1, through=False),
    },
}
_HALF_IN_99: dict[str, Table] = {
    "read_backward": {128: Tile(64, 8, 2, 1, through=False)},
    "summarize_backward": {
        128: Tile(64, 8, 1, 1, through=False),
        256: Tile(32, 8, 1, 1, values=32),
    },
    "wide": {64: Tile(64, 4, 2, 2)},
    "wide_dkdv": {64: Tile(64, 4, 2, 2, through=False)},
    "joint": {128: Tile(64, 8, 1, 1, through=False)},
    "joint_segments": {128: Tile(64, 8, 1, 1, through=False)},
    **_HALF_IN_163,
}
# float32 without loads in flight where they do not fit
_SINGLE_IN_99: dict[str, Table] = {
    kernel: {**SINGLE, 64: Tile(32, 4, 1, 2)} for kernel in ("causal", "causal_dkdv", "joint_dq")
}
HALF_BY_MEMORY: dict[int, dict[str, Table]] = {
    227: HALF, 163: _with(_HALF_IN_163), 99: _with(_HALF_IN_99),
}  # fmt: skip
SINGLE_BY_MEMORY: dict[int, dict[str, Table]] = {227: {}, 163: {}, 99: _SINGLE_IN_99}


def padded(width: int) -> int:
    """The width of a register tile: the next power of two, at least the 16 of a tensor core."""
    return max(16, 1 << (width - 1).bit_length())


def value_block(d: int, e: int, dtype: torch.dtype, tile: Tile) -> int:
    """Values per block: the float32 accumulator [D, block] must fit the registers."""
    limit = (16384 if dtype.itemsize == 2 else 8192) // padded(d)
    return min(padded(e), limit, tile.values or limit)


@functools.cache
def tile(kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The entry of the table for widths D and E, rounded up to the next one listed."""
    width, memory = max(padded(d), padded(e)), shared(device)
    half, single = HALF_BY_MEMORY[memory][kernel], SINGLE_BY_MEMORY[memory].get(kernel, SINGLE)
    table = half if dtype.itemsize == 2 else single
    return table[min((w for w in table if w >= width), default=max(table))]


@constant_under_compile
def shared(device: torch.device) -> int:
    """KiB of shared memory that a program may ask for; the most where there is no CUDA device."""
    return _shared(device) if device.type == "cuda" else MOST_SHARED


@functools.cache
def _shared(device: torch.device) -> int:
    return SHARED.get(torch.cuda.get_device_capability(device), LEAST_SHARED)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a small number elsewhere, so that splits are exercised."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def whole_tiles(tokens: int, parts: int, tile: Tile) -> int:
    """Tokens per part, rounded up to whole tiles."""
    return -(-tokens // (parts * tile.rows)) * tile.rows


# In steps of one token: what a program costs before and after its loop, less where a step is long
# (windows, and the backward pass of LLN+Diag).
PROGRAM, DIAG_PROGRAM = 256, 64
# To merge more parts than MERGE_IN_READER takes a kernel of its own, as long as so many programs.
MERGE = 4
# Up to this many parts every reader merges for itself.
MERGE_IN_READER = 4


def most_gradient_parts(d: int, e: int) -> int:
    """The same for the gradients of a state, whose readers have fewer registers to spare."""
    return MERGE_IN_READER if padded(d) * padded(e) <= 4096 else 1


def causal_fits(d: int, e: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the causal kernels of these widths fit the shared memory of a multiprocessor."""
    narrow, wide = sorted((padded(d), padded(e)))
    if wide > 64 and shared(device) == LEAST_SHARED:
        return wide <= 128 and narrow <= 64 and dtype.itemsize == 2
    return wide <= (128 if dtype.itemsize == 2 or narrow <= 64 else 64)


# Tokens of the blocks of which a tile holds whole ones; larger ones are walked tile by tile. Either
# way is the slower one on the other side of it: results/blocks_nvidia-h200_2026-11-19.json.
LARGEST_BLOCK = 64


def block_fits(d: int, e: int, dtype: torch.dtype, block: int, device: torch.device) -> bool:
    """Whether the kernels of the diagonal branch take blocks of these widths."""
    width = max(padded(d), padded(e))
    single = dtype.itemsize == 4  # each dot keeps its operands in three terms
    if width > 32 and shared(device) == LEAST_SHARED and (single or width > 64):
        return False
    return width <= 64 and block <= 32 if single else width <= 128


def in_windows(d: int, e: int, dtype: torch.dtype, block: int, overlap: int) -> bool:
    """Whether LLN+Diag walks the windows of its queries tile by tile.

    Where no tile holds a whole one, and where one backward kernel would not hold both branches.
    """
    large = overlap > 0 or block > LARGEST_BLOCK or not fused_backward(d, e)
    return dtype.itemsize == 2 and large


def near_fits(d: int, e: int) -> bool:
    """Whether the kernels of windows and sinks take these widths."""
    return max(padded(d), padded(e)) <= 128


# Slots times values that a program of far keys holds in half precision; half as many in float32.
STATE_ELEMENTS = 1 << 14


def state_elements(dtype: torch.dtype) -> int:
    """The most slots times values, both padded, that the kernels of far keys take."""
    return STATE_ELEMENTS if dtype.itemsize == 2 else STATE_ELEMENTS // 2


def state_fits(slots: int, e: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a program of far keys holds a state of this size."""
    wide = max(padded(slots), padded(e))
    if dtype.itemsize == 4 and wide > 64 and shared(device) < MOST_SHARED:
        return wide <= 128 < shared(device) and padded(slots) * padded(e) <= state_elements(dtype)
    return padded(slots) * padded(e) <= state_elements(dtype)


STEP_ELEMENTS = 1 << 15  # slots times values that a program reads in a step of decoding


def step_fits(d: int, slots: int, e: int) -> bool:
    """Whether a program of a step of decoding holds these widths in registers."""
    return padded(d) <= 256 and padded(slots) * padded(e) <= STEP_ELEMENTS


def fused_backward(d: int, e: int) -> bool:
    """Whether one backward kernel of LLN+Diag holds the gradients of a state, too, in registers."""
    return max(padded(d), padded(e)) <= 64


# Chunks of causal attention; the backward pass must cut the sequence as the forward pass did.
CHUNK = 64


def segments(tokens: int, heads: int, device: torch.device) -> tuple[int, int]:
    """(segments, tokens per segment) of causal attention: about three rounds of two per processor.

    Plain arithmetic, so that it can be traced with symbolic lengths: the shape of a saved tensor
    follows from it.
    """
    wanted = max(1, 6 * multiprocessors(device) // heads)
    most = (tokens + 4 * CHUNK - 1) // (4 * CHUNK)
    count = min(wanted, most)
    chunks = (tokens + CHUNK - 1) // CHUNK
    span = (chunks + count - 1) // count * CHUNK
    return (tokens + span - 1) // span, span


@functools.cache
def block_tile(
    kernel: str, block: int, d: int, e: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tile, int]:
    """(tile, padded rows) for blocks of ``block`` tokens: the tile's rows are whole blocks."""
    t = tile(kernel, d, e, dtype, device)
    rows = max(t.rows, padded(block))
    return t._replace(rows=rows // block * block), rows


# Caches of what follows from the tables: those of the launchers add themselves.
REMEMBERED: list[Any] = []


def forget() -> None:
    """Drop what was remembered of the tables and of the devices that tiles were planned for."""
    for remembered in (tile, block_tile, split, *REMEMBERED):
        remembered.cache_clear()


@functools.lru_cache(maxsize=4096)
def split(
    tokens: int, heads: int, tile: Tile, device: torch.device, *, merged: bool = False,
    program: int = PROGRAM,
) -> tuple[int, int]:  # fmt: skip
    """(parts, tokens per part) of whole tiles: the fewest steps until the last program ends.

    ``slots`` programs run at a time, so the time is the number of rounds times the length of one.
    """
    slots = multiprocessors(device) * tile.programs
    most = min(-(-tokens // tile.rows), max(1, 4 * slots // heads))

    def steps(parts: int) -> int:
        rounds = -(-heads * parts // slots)
        merge = MERGE * program if merged and parts > MERGE_IN_READER else 0
        return rounds * (whole_tiles(tokens, parts, tile) + program) + merge

    span = whole_tiles(tokens, min(range(1, most + 1), key=steps), tile)
    return -(-tokens // span), span
