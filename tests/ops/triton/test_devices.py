"""Tiles and routing of devices with less shared memory than the one that was measured."""

from __future__ import annotations

import pytest
import torch

from lln.ops import triton as kernels
from lln.ops.common.kernels import tiles
from lln.protocols import Call

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def memory(monkeypatch):
    """Sets the KiB of shared memory that a program may ask for."""

    def give(kib: int) -> None:
        monkeypatch.setattr(tiles, "shared", lambda _: kib)
        monkeypatch.setattr(kernels, "shared", lambda _: kib)
        tiles.forget()

    yield give
    monkeypatch.undo()
    tiles.forget()


@pytest.mark.parametrize(
    "capability, kib",
    [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)],
)
def test_the_memory_is_that_of_the_device(capability, kib, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    tiles._shared.cache_clear()
    assert tiles.shared(torch.device("cuda:3")) == kib
    tiles._shared.cache_clear()
    assert tiles.shared(CPU) == tiles.MOST_SHARED


def test_what_was_measured_is_what_an_h200_gets():
    for kernel, table in tiles.HALF.items():
        for width, tile in table.items():
            assert tiles.tile(kernel, width, width, BF16, CPU) is tile
        assert tiles.tile(kernel, 64, 64, F32, CPU) is tiles.SINGLE[64]


def test_smaller_devices_have_the_same_kernels_and_no_larger_tiles():
    assert set(tiles.SHARED.values()) | {tiles.LEAST_SHARED} == set(tiles.HALF_BY_MEMORY)
    assert set(tiles.HALF_BY_MEMORY) == set(tiles.SINGLE_BY_MEMORY)
    for tables in tiles.HALF_BY_MEMORY.values():
        assert {k: set(t) for k, t in tables.items()} == {k: set(t) for k, t in tiles.HALF.items()}
        for kernel, table in tables.items():
            for width, tile in table.items():
                most = tiles.HALF[kernel][width]
                assert tile.rows <= most.rows and tile.stages <= most.stages
    for tables in tiles.SINGLE_BY_MEMORY.values():
        for table in tables.values():
            assert set(table) == set(tiles.SINGLE)
            assert all(table[width].stages <= tiles.SINGLE[width].stages for width in table)


SHAPES = [  # op, dtype, D, E, options, the KiB of those that take it
    ("bidirectional", BF16, 256, 256, {}, (99, 163, 227)),
    ("causal", BF16, 64, 64, {}, (99, 163, 227)),
    ("causal", BF16, 128, 64, {}, (99, 163, 227)),
    ("causal", BF16, 128, 128, {}, (163, 227)),
    ("causal", F32, 64, 64, {}, (99, 163, 227)),
    ("causal", F32, 128, 64, {}, (163, 227)),
    ("lln_diag", BF16, 64, 64, {"block": 128}, (99, 163, 227)),
    ("lln_diag", BF16, 128, 128, {"block": 64}, (163, 227)),
    ("lln_diag", BF16, 128, 16, {"block": 64}, (163, 227)),
    ("lln_diag", BF16, 16, 128, {"block": 64}, (163, 227)),
    ("lln_diag", F32, 32, 32, {"block": 32}, (99, 163, 227)),
    ("lln_diag", F32, 64, 64, {"block": 32}, (163, 227)),
    ("near", F32, 128, 128, {"block": 64}, (99, 163, 227)),
    ("near_far", BF16, 128, 128, {"block": 64}, (99, 163, 227)),
    ("near_far", F32, 64, 64, {"block": 64}, (99, 163, 227)),
    ("near_far", F32, 64, 64, {"block": 64, "slots": 128}, (163, 227)),
    ("block_causal", F32, 256, 32, {"causal_block": 64}, (227,)),
]


@pytest.mark.parametrize("op, dtype, d, e, options, taken", SHAPES)
def test_a_shape_that_does_not_fit_is_not_routed_to_the_kernels(
    op, dtype, d, e, options, taken, memory, monkeypatch
):
    monkeypatch.setattr(kernels, "refuses_device", lambda _: None)
    q, v = (torch.empty(1, 1, 8, width, dtype=dtype) for width in (d, e))
    call = Call(op, q, q, v, is_causal=op in ("causal", "block_causal"), **options)
    for kib in (99, 163, 227):
        memory(kib)
        reason = kernels.refuses(call)
        assert (reason is None) == (kib in taken), (kib, reason)
        assert reason is None or f"of {kib} KiB a program" in reason


def test_the_compiler_takes_the_memory_for_a_constant():
    def double_if_plenty(x):
        return 2 * x if tiles.shared(x.device) == tiles.MOST_SHARED else x

    compiled = torch.compile(double_if_plenty, fullgraph=True, backend="eager")
    assert compiled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


PARTS = [(1, 1, 64), (64, 1, 64), (65, 1, 128), (256, 2, 128), (257, 2, 192), (10, 3, 64)]


@pytest.mark.parametrize("tokens, parts, span", PARTS)
def test_parts_are_of_as_few_whole_tiles_as_hold_all_tokens(tokens, parts, span):
    assert tiles.whole_tiles(tokens, parts, tiles.Tile(64, 4, 1, 1)) == span


@pytest.mark.parametrize(
    "d, e, block, overlap, walked",
    [
        (64, 64, 64, 0, False),
        (64, 64, 64, 1, True),
        (64, 64, 128, 0, True),
        (128, 64, 64, 0, True),
        (64, 96, 64, 0, True),
    ],
)
def test_windows_that_no_tile_holds_are_walked_in_half_precision(d, e, block, overlap, walked):
    assert tiles.in_windows(d, e, BF16, block, overlap) == walked
    assert not tiles.in_windows(d, e, F32, block, overlap)
