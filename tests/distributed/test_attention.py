"""Slices on several processes equal one process; what they send does not depend on the length."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import lln
from lln.distributed.sliced import SHARED
from tests.distributed.cases import CASES
from tests.distributed.processes import PROCESSES, run
from tests.helpers import relative_error, run_with_grads

AGREEMENT = PROCESSES * 8 * (1 + 2 * len(SHARED))  # bytes: whether a process failed, and arguments
BY_NAME = {f"{case.name} on {size}": case for case in CASES for size in (1, 2, 4)}


pytestmark = pytest.mark.slow  # starts processes


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of 4 processes found; they are started once for all tests of this file."""
    return run("tests.distributed.worker", tmp_path_factory.mktemp("distributed"))


def test_slices_equal_the_whole_sequence(results):
    compared = 0
    for rank, result in enumerate(results):
        for name, errors in result["errors"].items():
            case = BY_NAME[name]
            rounding = torch.finfo(case.dtype).eps
            # An exponent is rounded in proportion to its size, which grows with the inputs.
            wide = torch.float64 if case.dtype == torch.float64 else torch.float32
            accumulated = 128 * max(case.spread, case.shift) * torch.finfo(wide).eps
            for tensor, (error, of_one_process, largest) in errors.items():
                compared += 1
                allowed = 2 * of_one_process + (2 * rounding + accumulated) * max(1, largest)
                assert error <= allowed, (
                    f"{name}, process {rank}, {tensor}: {error:.2e} exceeds {allowed:.2e}"
                )
    assert compared > PROCESSES * len(CASES) * 2 * 3


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_exchange_each_way_whose_size_does_not_depend_on_the_length(results, is_causal):
    batch, heads, width = 2, 3, 16
    state = batch * heads * width * (width + 1) * 4
    for result in results:
        for tokens in (16, 512):
            found = result["exchanges"][f"{tokens} tokens, measured=False, {is_causal=}"]
            backward = PROCESSES * state if is_causal else state
            assert found == [AGREEMENT, PROCESSES * state, backward]


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_normaliser_exchanges_states_and_the_tokens_at_the_edges(results, is_causal):
    batch, heads, width, overlap = 2, 3, 16, 4
    edges = batch * heads * 2 * overlap * (2 * width + 1) * 4
    state = batch * heads * width * (width + 1) * 4
    given = 2 if is_causal else 3  # states of a process: whole, without last keys, without first
    for result in results:
        for tokens in (16, 512):
            first, *found = result["exchanges"][f"{tokens} tokens, joint, {is_causal=}"]
            assert first == AGREEMENT
            assert sorted(found) == sorted(
                PROCESSES * sent for sent in (edges, given * state, state, edges)
            )


def test_measuring_the_scales_costs_six_numbers_per_head_more(results):
    for result in results:
        for tokens in (16, 512):
            found = result["exchanges"][f"{tokens} tokens, measured=True, is_causal=False"]
            assert found.pop(1) == PROCESSES * 2 * 3 * 6 * 8
            assert found == result["exchanges"]["16 tokens, measured=False, is_causal=False"]


REFUSALS = {
    "block": "12 tokens, not a multiple of the blocks of near, 8",
    "causal lengths": "q has 4 tokens but k has 12",
    "diag lengths": "needs the queries and keys of the same slice",
    "causal without scales": "is_causal=True needs alpha and beta",
    "one scale": "alpha was given without beta",
    "reference": "impl='reference' has no states",
    "joint without gamma": "near with joint=True needs gamma where a sequence is split",
    "joint by kernels": "impl='triton' cannot run here: one normaliser for both",
    "sinks": "sinks=2 of near is refused where a sequence is split over processes",
    "long overlap": "12 tokens, fewer than overlap=13",
    "not a member": "not a member of group",
}


def test_bad_calls_are_refused_on_every_process(results):
    for result in results:
        assert result["refusals"].keys() == REFUSALS.keys()
        for name, words in REFUSALS.items():
            assert words in result["refusals"][name], name


OWN = {
    "slice": "v has",
    "type": "q",
    "mask": "key_mask has shape [1, 3]",
    "block": "12 tokens, not a multiple of the blocks of near, 8",
}
OTHERS = {
    "alpha": ("alpha is a tensor [1, 2] of mean 1.5 on", "alpha is a tensor [1, 2] of mean 1.6 on"),
    "beta": ("beta is a tensor [1, 2] of mean 2 on", "beta is a tensor [1, 2] of mean 2.05 on"),
    "order of beta": ("beta is a tensor [1, 2] of mean 2 on",) * 2,
    "measured": ("alpha is a tensor [1, 2] of mean 1.5 on", "alpha is None on"),
    "batch": ("the batch is 1 on process", "the batch is 2 on process 1"),
    "causal": ("is_causal is False on process", "is_causal is True on process 1"),
}


def test_what_is_wrong_on_one_process_is_an_error_on_all(results):
    """Nobody waits for it; and calls that are right go on after that."""
    for rank, result in enumerate(results):
        said = result["apart"]
        assert said.keys() == {*OWN, *OTHERS, "rounded", "longer"}
        for name, words in OWN.items():
            expected = words if rank == 1 else "process 1 of the group refused its slice"
            assert expected in said[name], (rank, name)
        for name, words in OTHERS.items():
            assert words[rank == 1] in said[name], (rank, name)
            assert "pass the same on all of them" in said[name]
        assert said["rounded"] == said["longer"] == "nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"near": 64}, {"is_causal": True}], ids=str)
def test_the_kernels_are_used_on_a_gpu(options, dtype):
    """A group of one process: the state passes through the exchange, forward and backward."""
    shape = (2, 4, 256, 64)
    inputs = {name: torch.randn(shape, device="cuda", dtype=dtype) for name in "qkv"}
    scales = {name: torch.full((4,), 2.0, device="cuda") for name in ("alpha", "beta")}
    d_out = torch.randn(shape, device="cuda", dtype=dtype)
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        attend = functools.partial(lln.distributed.attention, group=None, **options)
        got = run_with_grads(attend, inputs | scales, d_out)
    finally:
        torch.distributed.destroy_process_group()
    plain = run_with_grads(functools.partial(lln.attention, **options), inputs | scales, d_out)
    for name, x in got.items():
        limit = 0.02 if dtype == torch.bfloat16 else 1e-3
        assert relative_error(x, plain[name].double()) < limit, name


def test_without_a_process_group_the_call_says_what_to_do():
    x = torch.randn(1, 1, 8, 8)
    with pytest.raises(RuntimeError, match="init_process_group"):
        lln.distributed.attention(x, x, x, group=None)
