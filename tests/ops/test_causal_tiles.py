"""The two ways through a causal tile: squares where the features are tame, trees where not."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from lln.ops import reference
from lln.ops.causal.causal import causal
from lln.ops.causal.segments import segments
from lln.ops.causal.square import is_tame
from tests.helpers import relative_error, run_with_grads

WAYS = {"square": True, "tree": False}
ONE = torch.ones(2, 3)


def force(monkeypatch, way: str) -> None:
    for module in ("eager_causal", "eager_backward"):
        target = sys.modules[f"lln.ops.causal.{module}"]
        monkeypatch.setattr(target, "is_tame", lambda *_: WAYS[way])


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    force(monkeypatch, request.param)
    return request.param


def tensors(length: int = 150, spread: float = 2.0) -> dict[str, torch.Tensor]:
    """Queries, keys and values whose features spread over ``±spread``."""
    q, v = torch.randn(2, 3, length, 8), torch.randn(2, 3, length, 5)
    return {"q": q, "k": spread * (2 * torch.rand(2, 3, length, 8) - 1), "v": v}


def exact_and_got(inputs, **options):
    d_out = torch.randn(*inputs["v"].shape)
    wide = {name: x.double() for name, x in inputs.items()}
    oracle = run_with_grads(
        lambda **t: reference.causal(**t, alpha=ONE.double(), beta=ONE.double(), **options),
        wide,
        d_out.double(),
    )
    got = run_with_grads(
        lambda **t: causal(**t, alpha=ONE, beta=ONE, impl="eager", **options), inputs, d_out
    )
    return oracle, got


@pytest.mark.parametrize("masked", [False, True])
def test_both_ways_equal_the_definition(way, masked):
    inputs = tensors()
    options = {}
    if masked:
        mask = torch.rand(2, 150) > 0.3
        mask[0, :70] = False  # a whole tile and more in which rows see nothing
        options["key_mask"] = mask
    oracle, got = exact_and_got(inputs, **options)
    for name, value in oracle.items():
        assert relative_error(got[name], value) < 2e-6, name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("elements", [1, 1100])
def test_segments_carry_what_came_before(way, masked, elements, monkeypatch):
    """Long inputs are cut into segments of tiles; here so small that each has one or few."""
    monkeypatch.setattr(sys.modules["lln.ops.causal.segments"], "SEGMENT_ELEMENTS", elements)
    assert len(segments(torch.zeros(2, 3, 230, 8), 64)) == (4 if elements == 1 else 2)
    options = {"key_mask": torch.rand(2, 230) > 0.3} if masked else {}
    oracle, got = exact_and_got(tensors(230), **options)
    for name, value in oracle.items():
        assert relative_error(got[name], value) < 2e-6, name


def test_both_ways_drop_the_same_slots(monkeypatch):
    inputs, d_out = tensors(), torch.randn(2, 3, 150, 5)
    dropped = (torch.rand(2, 3, 150, 8) > 0.4) / 0.6
    found = {}
    for name in WAYS:
        force(monkeypatch, name)
        found[name] = run_with_grads(
            lambda **t: causal(**t, alpha=ONE, beta=ONE, slot_dropout=dropped, impl="eager"),
            inputs,
            d_out,
        )
    for name, value in found["tree"].items():
        assert relative_error(found["square"][name], value) < 2e-6, name


@pytest.mark.parametrize("sign", [1, -1])
def test_the_square_holds_as_far_as_it_is_taken(sign):
    """Features that fill the range: late keys are e^±60 times the first, and nothing is lost."""
    inputs = tensors(64)
    ramp = sign * torch.linspace(-30, 30, 64)[:, None] * torch.linspace(0.2, 1, 8)
    inputs["k"] = ramp.expand(2, 3, 64, 8).contiguous()
    assert is_tame(inputs["k"].flatten(0, 1), 64)
    oracle, got = exact_and_got(inputs)
    for name, value in oracle.items():
        assert relative_error(got[name], value) < 1e-5, name


def test_what_is_tame():
    f = torch.zeros(2, 64, 4)
    assert is_tame(f, 64)
    f[0, 40, 1] = 60.0
    f[0, 41, 1] = -1e4  # far below the first key is no danger
    assert is_tame(f, 64)
    f[0, 50, 2] = 80.0
    assert not is_tame(f, 64)
    wide = f.double()
    assert is_tame(wide, 64)
    wide[0, 50, 2] = 600.0
    assert is_tame(wide, 64)
    wide[0, 50, 2] = 700.0  # e^700 is finite, 64 such keys times their values need not be
    assert not is_tame(wide, 64)
    f[0, 50] = -torch.inf  # a masked key has no features
    assert is_tame(f, 64)
    f[1] = -torch.inf
    f[1, 7:] = 90.0  # the first that is not masked counts
    assert is_tame(f, 64)
    assert not is_tame(f, 64, torch.tensor([0.0, math.nan]))


def test_the_future_changes_no_bit(way):
    inputs = tensors(150)
    before = causal(**inputs, alpha=ONE, beta=ONE, impl="eager")
    for x in inputs.values():
        x[:, :, 100:] += torch.randn_like(x[:, :, 100:])
    after = causal(**inputs, alpha=ONE, beta=ONE, impl="eager")
    assert torch.equal(before[:, :, :100], after[:, :, :100])
    assert not torch.equal(before[:, :, 100:], after[:, :, 100:])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_bad_token_stays_in_the_future(name, bad):
    inputs = tensors(100)
    inputs[name][0, 1, 60] = bad
    clean = causal(**{**inputs, name: inputs[name].nan_to_num(0, 0)}, alpha=ONE, beta=ONE)
    got = causal(**inputs, alpha=ONE, beta=ONE, impl="eager")
    torch.testing.assert_close(got[0, 1, :60], clean[0, 1, :60])
    torch.testing.assert_close(got[1], clean[1])
    torch.testing.assert_close(got[0, [0, 2]], clean[0, [0, 2]])
