"""Counted operations: against torch's own count of the same products, written out."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import lln
from lln.instruments import flop_counter

B, H, N, D, E, BLOCK = 2, 3, 128, 16, 32, 32
SCALES = {"alpha": 2.0, "beta": 2.0}
KINDS = {
    "plain": {},
    "grouped": {},
    "diag": {"near": BLOCK},
    "one block": {"near": 2 * N},
    "causal": {"is_causal": True},
    "causal diag": {"is_causal": True, "near": BLOCK},
}


def tensors(heads: int = H) -> list[torch.Tensor]:
    shapes = (B, H, N, D), (B, heads, N, D), (B, heads, N, E)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def counted(counter, run) -> int:
    with counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_torchs_count_of_the_same_products(kind):
    options = KINDS[kind]
    q, k, v = tensors(1 if kind == "grouped" else H)
    block = options.get("near")
    wanted = 2 * (q.numel() + k.numel()) * E
    if block is not None:
        wanted += counted(
            FlopCounterMode(display=False),
            lambda: F.scaled_dot_product_attention(
                *(x.unflatten(2, (-1, min(block, N))).flatten(1, 2) for x in (q, k, v))
            ),
        )
    assert counted(flop_counter(), lambda: lln.attention(q, k, v, **SCALES, **options)) == wanted


@pytest.mark.parametrize("name", ["summarize", "read"])
def test_formulas_are_what_the_implementation_computes(name):
    """The function inside the operator, which torch can look into."""
    state = importlib.import_module("lln.ops.linear.eager_state")
    q, k, v = (x.detach() for x in tensors())
    scale = torch.full((B, H), 2.0)
    log_mass, mean = state._summarize(k, v, scale, None)
    ends = log_mass, mean
    forward, backward = {
        "summarize": ((k, v, scale, None), (*ends, k, v, scale, None, *ends)),
        "read": ((q, scale, *ends, None, False), (v, q, scale, *ends, None, False)),
    }[name]
    filled = (torch.empty_like(v),) if name == "read" else ()  # it writes into its result
    pairs = (
        (f"_{name}", f"{name}_op", forward, filled),
        (f"_{name}_backward", f"{name}_backward", backward, ()),
    )
    for inside, op, arguments, more in pairs:
        compute = partial(getattr(state, inside), *arguments, *more)
        here = counted(FlopCounterMode(display=False), compute)
        assert here > 0
        assert counted(flop_counter(), partial(getattr(state, op), *arguments)) == here


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_twice_the_products_and_scores_come_anew(kind):
    options = KINDS[kind]
    q, k, v = tensors(1 if kind == "grouped" else H)
    counter = flop_counter()
    with counter:
        out = lln.attention(q, k, v, **SCALES, **options)
    forward = counter.get_total_flops()
    linear = 2 * (q.numel() + k.numel()) * E
    backward = counted(counter, lambda: out.sum().backward())
    assert backward == 2 * linear + 5 * (forward - linear) // 2


def test_packed_sequences_count_as_one():
    q, k, v = (x.detach()[0].transpose(0, 1) for x in tensors())
    starts = torch.tensor([0, 40, N])
    run = lambda **more: lln.attention_varlen(q, k, v, starts, **SCALES, **more)  # noqa: E731
    assert counted(flop_counter(), run) == 2 * (q.numel() + k.numel()) * E
    more = counted(flop_counter(), lambda: run(near=BLOCK)) - counted(flop_counter(), run)
    assert more == 2 * H * N * BLOCK * (D + E)


def test_a_layer_is_linear_in_its_tokens_without_any_memory():
    layer = lln.nn.LLNMultiheadAttention(64, 4, batch_first=True, device="meta")

    def flops(tokens: int) -> int:
        x = torch.empty(1, tokens, 64, device="meta")
        return counted(flop_counter(), lambda: layer(x, x, x, need_weights=False))

    assert flops(200_000) == 2 * flops(100_000) > 0
    projections = 4 * 2 * 100_000 * 64 * 64
    assert flops(100_000) == projections + 4 * 100_000 * 64 * 16
