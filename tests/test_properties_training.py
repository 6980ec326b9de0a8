"""What must hold for every step of training: forward passes run twice, and queries kept in order.

`make fuzz` runs these with thousands of cases, too. What is compiled is compiled once per kind.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lln.nn import LLNAttention

HEADS, WIDTH = 2, 4
WAYS = ("eager", "compiled around", "compiled inside")

# A case is several steps of training, forwards and backwards.
costly = settings(max_examples=settings.default.max_examples // 4)
seeds = st.integers(0, 2**31)
sizes = st.sampled_from([0.1, 1.0, 10.0])


@dataclass(frozen=True)
class Batch:
    """Random but reproducible inputs of one forward pass, in float64."""

    seed: int
    size: float

    def tensors(self, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, and which keys are valid."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(tokens: int) -> Tensor:
            shape = (2, HEADS, tokens, WIDTH)
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        q, k, v = self.size * draw(queries), draw(keys), draw(keys)
        return q, k, v, torch.rand(2, keys, generator=generator) > 0.3


batches = st.builds(Batch, seed=seeds, size=sizes)


@cache
def pair(way: str, causal: bool):
    """A module, its twin, and a way to run the twin with activation checkpointing."""
    options = {"statistics": "running", "learn_scale": True, "causal": causal}
    core = LLNAttention(HEADS, WIDTH, **options).double()
    twin = copy.deepcopy(core)
    run = twin if way != "compiled inside" else torch.compile(twin, backend="aot_eager")

    def saving(*inputs: Tensor) -> Tensor:
        return checkpoint(run, *inputs, use_reentrant=False)

    around = torch.compile(saving, backend="aot_eager") if way == "compiled around" else saving
    return core, twin, around


def start_again(core: LLNAttention, seed: int) -> None:
    """Statistics as some earlier training might have left them."""
    core.reset_parameters()
    core.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    core.statistics.variances.copy_(0.1 + 3 * torch.rand(2, HEADS, generator=generator))
    core.statistics.batches.fill_(seed % 7)


def gradients(core: LLNAttention, run, steps: list[Batch], tokens: int) -> list[Tensor]:
    """Of the inputs of every step, then of the parameters after all of them."""
    found = []
    for step in steps:
        *inputs, valid = step.tensors(tokens, tokens)
        inputs = [x.requires_grad_() for x in inputs]
        run(*inputs, valid, valid).square().sum().backward()
        found += [x.grad for x in inputs]
    return found + [parameter.grad for parameter in core.parameters()]


def close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.slow  # compiles eight graphs first
@costly
@given(
    way=st.sampled_from(WAYS),
    causal=st.booleans(),
    steps=st.lists(batches, min_size=1, max_size=3),
    tokens=st.sampled_from([5, 9]),
    start=seeds,
)
def test_activation_checkpointing_changes_nothing(way, causal, steps, tokens, start):
    core, twin, run = pair(way, causal)
    for module in (core, twin):
        start_again(module, start)
    expected = gradients(core, core, steps, tokens)
    close(gradients(twin, run, steps, tokens), expected)
    close(dict(twin.state_dict()), dict(core.state_dict()))


@costly
@given(
    waiting=st.lists(batches, min_size=1, max_size=4, unique=True),
    order=st.randoms(use_true_random=False),
    start=seeds,
)
def test_backward_passes_find_their_own_run_in_any_order(waiting, order, start):
    core, twin, run = pair("eager", True)
    found = []
    turns = order.sample(range(len(waiting)), len(waiting))
    for module, attend in ((core, core), (twin, run)):
        start_again(module, start)
        inputs = [[x.requires_grad_() for x in step.tensors(7, 7)[:3]] for step in waiting]
        losses = [attend(*x).square().sum() for x in inputs]
        for turn in turns:
            losses[turn].backward()
        found.append([x.grad for each in inputs for x in each])
    close(found[1], found[0])


@given(
    statistics=st.sampled_from(["running", "fixed"]),
    train=st.booleans(),
    near=st.sampled_from([None, 1, 3]),
    lengths=st.tuples(st.integers(1, 12), st.integers(1, 12)).filter(lambda x: x[0] != x[1]),
    cut=st.integers(0, 12),
    batch=batches,
    start=seeds,
)
def test_later_queries_change_nothing(statistics, train, near, lengths, cut, batch, start):
    """Cross-attention of a decoder."""
    core = LLNAttention(HEADS, WIDTH, statistics=statistics, near=near)
    core = core.double().train(train)
    if statistics == "running":
        start_again(core, start)
    q, k, v, valid = batch.tensors(*lengths)
    changed = torch.cat([q[:, :, :cut], 50 * torch.ones_like(q[:, :, cut:])], dim=2)
    twin = copy.deepcopy(core)
    close(twin(changed, k, v, valid)[:, :, :cut], core(q, k, v, valid)[:, :, :cut])
