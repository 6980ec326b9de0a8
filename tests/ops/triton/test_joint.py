"""Kernels of near and far keys under one normaliser: windows, masks, widths, all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lln.ops import reference
from lln.ops import triton as kernels
from lln.ops.window.kernels.joint.launch import Window
from lln.protocols import Call
from tests.helpers import ADVERSARIAL, adversarial, random_qkv, random_scales, run_with_grads
from tests.ops.triton.compare import compare

WINDOWS = [
    (16, 0, torch.float32),
    (32, 16, torch.float16),
    (16, 32, torch.float32),
    (48, 48, torch.float16),
]


def inputs(
    tokens, *, batch=2, heads=2, key_heads=2, width=16, slots=16, device
) -> dict[str, Tensor]:
    q, k, v = random_qkv(batch, heads, tokens, None, width, key_heads=key_heads)
    alpha, beta = random_scales(batch, heads, key_heads)
    far = {
        "q_far": torch.randn(batch, heads, tokens, slots, dtype=torch.float64),
        "k_far": torch.randn(batch, key_heads, tokens, slots, dtype=torch.float64),
    }
    gamma = torch.randn(batch, heads, dtype=torch.float64)
    tensors = {"q": q, "k": k, "v": v, **far, "alpha": alpha, "beta": beta, "gamma": gamma}
    return {name: x.to(device) for name, x in tensors.items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens, block, overlap", [(64, 16, 0), (70, 16, 8), (70, 16, 40)])
def test_there_are_states_of_the_segments_that_some_block_sees(tokens, block, overlap, causal):
    window = Window(block, overlap, 0.25, causal, tokens)
    ends = [window.origin + (n + 1) * window.step for n in range(window.segments)]
    assert ends[0] > 0 and ends[-1] - window.step < tokens <= ends[-1]
    last = (window.blocks - 1) * block - overlap
    seen = [end for end in ends if end <= last or not causal]
    assert window.states == max(1, len(seen))


def check(tensors: dict[str, Tensor], dtype: torch.dtype, **options) -> None:
    compare(kernels.near_far, reference.near_far, tensors, dtype, floor=0.1, scale=0.25, **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block, overlap, dtype", WINDOWS)
def test_windows(block, overlap, dtype, is_causal, device):
    options = {"block": block, "overlap": overlap, "is_causal": is_causal}
    tokens = 100 if dtype == torch.float32 else 96  # whole tiles, too
    check(inputs(tokens, batch=1, heads=1, key_heads=1, device=device), dtype, **options)


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("is_causal", [False, True])
def test_fewer_tokens_than_a_window(tokens, is_causal, device):
    options = {"block": 32, "overlap": 16, "is_causal": is_causal}
    check(inputs(tokens, batch=1, device=device), torch.float32, **options)


@pytest.mark.parametrize(
    "dtype, is_causal", [(torch.float32, False), (torch.float32, True), (torch.float16, True)]
)
def test_masks_groups_sinks_and_unequal_widths(dtype, is_causal, device):
    mask = torch.rand(2, 60, device=device) > 0.3
    mask[0, :36] = False  # blocks that see nothing, near or far
    options = {"block": 16, "overlap": 16, "sinks": 3, "is_causal": is_causal, "key_mask": mask}
    tensors = inputs(60, heads=2, key_heads=1, slots=48, device=device)
    check(tensors, dtype, **options)


def alike(op):
    """Near and far attention whose features of far keys are the queries and keys themselves."""
    return lambda q, k, v, **options: op(q, k, v, q_far=q, k_far=k, **options)


def own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if not name.endswith("_far")}


# Whole tiles of 64 tokens, without and with a segment that is cut at the start; then neither.
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "tokens, block, overlap, dtype",
    [
        (256, 128, 0, torch.float16),
        (256, 128, 64, torch.float16),
        (192, 64, 64, torch.float16),
        (75, 32, 16, torch.float32),
    ],
)
def test_features_that_are_queries_and_keys(tokens, block, overlap, dtype, is_causal, device):
    tensors = own(inputs(tokens, batch=1, heads=2, key_heads=1, device=device))
    options = {"block": block, "overlap": overlap, "is_causal": is_causal, "scale": 0.25}
    compare(
        alike(kernels.near_far), alike(reference.near_far), tensors, dtype, floor=0.1, **options
    )


def test_features_that_are_queries_have_no_gradient_of_their_own(device):
    """One tensor each for q and k leaves the kernels: nothing is added afterwards."""
    given = {name: x.float() for name, x in own(inputs(64, device=device)).items()}
    q, k, v = (given.pop(name).requires_grad_() for name in "qkv")
    out = alike(kernels.near_far)(q, k, v, **given, block=16, scale=0.25)
    edges = [function for function, _ in out.grad_fn.next_functions if function is not None]
    assert len(edges) == 3


def test_masks_groups_and_sinks_with_features_that_are_queries_and_keys(device):
    mask = torch.rand(2, 60, device=device) > 0.3
    mask[0, :36] = False  # blocks that see nothing, near or far
    options = {"block": 16, "overlap": 16, "sinks": 3, "is_causal": True, "key_mask": mask}
    tensors = own(inputs(60, heads=2, key_heads=1, device=device))
    compare(
        alike(kernels.near_far), alike(reference.near_far), tensors, torch.float32, floor=0.1,
        scale=0.25, **options,
    )  # fmt: skip


@pytest.mark.parametrize("slots, dtype", [(64, torch.float16), (48, torch.float32)])
def test_more_slots_than_features(slots, dtype, device):
    tensors = inputs(128, batch=1, heads=2, key_heads=1, slots=slots, device=device)
    check(tensors, dtype, block=64, overlap=0, is_causal=False)


def test_features_of_keys_alone(device):
    tensors = inputs(70, batch=1, heads=1, key_heads=1, device=device)
    del tensors["q_far"]
    compare(
        lambda q, **given: kernels.near_far(q, q_far=q, **given),
        lambda q, **given: reference.near_far(q, q_far=q, **given),
        tensors, torch.float32, floor=0.1, scale=0.25, block=16,
    )  # fmt: skip


def test_a_scale_of_zero(device):
    """The gradients of near and far keys share an accumulator, which is scaled at the end."""
    tensors = own(inputs(64, batch=1, heads=1, key_heads=1, device=device))
    options = {"block": 16, "overlap": 16, "scale": 0.0}
    compare(
        alike(kernels.near_far), alike(reference.near_far), tensors, torch.float32, floor=0.1,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("overlap", [0, 16, 32])
def test_later_keys_may_hold_anything(overlap, device):
    tensors = {name: x.float() for name, x in inputs(96, device=device).items()}
    options = {"block": 16, "overlap": overlap, "is_causal": True, "scale": 0.25}
    expected = kernels.near_far(**tensors, **options)
    later = torch.arange(96, device=device)[:, None] >= 64
    for value in (torch.nan, torch.inf):
        spoilt = {name: tensors[name].masked_fill(later, value) for name in ("k", "v", "k_far")}
        found = kernels.near_far(**{**tensors, **spoilt}, **options)
        assert torch.equal(found[:, :, :64], expected[:, :, :64])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block", [16, 48, 64])
@pytest.mark.parametrize("overlap", [-1, 0, 16, 24, 32, 80])
@pytest.mark.parametrize("tokens", [1, 100, 192])
def test_windows_begin_and_end_between_segments(tokens, block, overlap, is_causal):
    if overlap < 0 and not is_causal:
        return
    overlap = -block if overlap < 0 else overlap
    window = Window(block, overlap, 1.0, is_causal, tokens)
    edges = {window.origin + n * window.step for n in range(window.segments + 1)}
    assert min(edges) <= 0 < min(edges) + window.step and max(edges) >= tokens
    for number in range(window.blocks):
        first = number * block - overlap
        last = (number + 1) * block + overlap
        assert first <= 0 or first in edges
        assert first <= window.origin + window.states * window.step or first <= 0
        assert is_causal or last >= tokens or last in edges


def test_hidden_keys_may_hold_anything(device):
    tensors = {name: x.float() for name, x in inputs(64, device=device).items()}
    mask = torch.rand(2, 64, device=device) > 0.3
    options = {"block": 16, "is_causal": False, "scale": 0.25, "key_mask": mask}
    expected = kernels.near_far(**tensors, **options)
    hidden = ~mask[:, None, :, None]
    spoilt = {name: tensors[name].masked_fill(hidden, torch.nan) for name in ("k", "v", "k_far")}
    torch.testing.assert_close(kernels.near_far(**{**tensors, **spoilt}, **options), expected)


# With entries of a thousand the scores of near keys, products of two, are known to 1 at best.
@pytest.mark.parametrize("name", [name for name in ADVERSARIAL if name != "scale_1e3"])
def test_no_input_overflows(name, device):
    q, k, v = (x.to(device) for x in adversarial(name, 80, 16, heads=1))
    two = torch.full((1, 1), 2.0, dtype=torch.float64, device=device)
    tensors = {"q": q, "k": k, "v": v, "q_far": q, "k_far": k}
    tensors |= {"alpha": two, "beta": two, "gamma": 0 * two}
    options = {"block": 16, "is_causal": True, "scale": 0.25}
    compare(kernels.near_far, reference.near_far, tensors, torch.float32, floor=1.0, **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_near_keys_alone(is_causal, device):
    """Windows and sinks; a mask moves the sinks, and some rows see nothing."""
    given = inputs(70, heads=2, key_heads=1, width=16, device=device)
    tensors = {name: given[name] for name in "qkv"}
    mask = torch.rand(2, 70, device=device) > 0.3
    mask[0, :40] = False
    options = {"block": 16, "overlap": 8, "sinks": 3, "scale": 0.25, "is_causal": is_causal}
    for key_mask in (None, mask):
        compare(
            kernels.near, reference.near, tensors, torch.float32, floor=0.1, key_mask=key_mask,
            **options,
        )  # fmt: skip


def test_huge_inputs_give_averages_of_values(device):
    q, k, v = (x.float().to(device).requires_grad_() for x in adversarial("scale_1e3", 80, 16))
    scales = {name: torch.full((1, 2), 2.0, device=device) for name in ("alpha", "beta", "gamma")}
    far = {"q_far": q, "k_far": k}
    out = kernels.near_far(q, k, v, **far, **scales, block=16, is_causal=True, scale=0.25)
    assert (out <= v.amax(2, keepdim=True) + 1e-5).all()
    assert (out >= v.amin(2, keepdim=True) - 1e-5).all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_the_same_call_gives_the_same_bits(device):
    given = inputs(100, batch=1, heads=1, key_heads=1, device=device)
    tensors = {name: x.float() for name, x in given.items()}
    options = {"block": 16, "overlap": 16, "is_causal": False, "scale": 0.25}
    d_out = torch.randn(1, 1, 100, 16, device=device)
    one, other = (
        run_with_grads(lambda **t: kernels.near_far(**t, **options), tensors, d_out)
        for _ in range(2)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        ({"overlap": 8}, "common divisor"),
        ({"slots": 256}, None),
        ({"slots": 200}, "200 slots"),
        ({"slots": 256, "v": torch.zeros(1, 1, 4, 128, dtype=torch.float16)}, "256 slots"),
        ({"sinks": 65}, "sinks=65"),
        ({"k": torch.zeros(1, 1, 5, 64, dtype=torch.float16)}, "4 queries of 5 keys"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(change, reason, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
    call = Call("near_far", x, x, x, block=16, slots=64)._replace(**change)
    found = kernels.refuses(call)
    assert found is None if reason is None else reason in found
