"""One token at a time, in place: the rows of near and far attention over the whole text."""

from __future__ import annotations

import pytest
import torch

from lln import Near
from lln.hf import cache
from lln.hf.decode.memory import empty_like
from lln.hf.serving.seat_layer import SeatLayer
from lln.nn import LLNAttention
from lln.ops import triton as kernels
from tests.helpers import relative_error

BLOCK, TOKENS, WIDTH, VALUES, HEADS, KEY_HEADS = 3, 13, 16, 24, 4, 2
CASES = {
    "block": {},
    "window": {"near": Near(BLOCK, overlap=3, joint=True)},
    "wide window": {"near": Near(BLOCK, overlap=7, joint=True)},
    "sinks": {"near": Near(BLOCK, overlap=3, sinks=2, joint=True)},
    "many sinks": {"near": Near(BLOCK, sinks=5, joint=True)},
    "slots": {
        "near": Near(BLOCK, overlap=4, sinks=1, joint=True),
        "feature_map": "learned",
        "slots": 40,
    },
    "slots, no window": {"feature_map": "signs"},
    "normalised": {"near": Near(BLOCK, overlap=3, sinks=3, joint=True), "normalize_keys": True},
    "centred": {"near": Near(BLOCK, overlap=2, joint=True), "center_keys": True},
}


def core_of(name: str, device: str) -> LLNAttention:
    """Every head with constants of its own."""
    torch.manual_seed(3)
    core = LLNAttention(
        HEADS, WIDTH, num_kv_heads=KEY_HEADS, causal=True,
        statistics="fixed", alpha=torch.linspace(0.5, 1.5, HEADS),
        beta=torch.linspace(0.6, 1.2, KEY_HEADS), gamma=torch.linspace(-1.0, 1.0, HEADS),
        **{"near": Near(BLOCK, joint=True), **CASES[name]},
    ).to(device)  # fmt: skip
    if core.center is not None:
        core.center.stored.value.normal_()
    return core.eval().requires_grad_(False)


def seats_of(core: LLNAttention, seats: int, dtype: torch.dtype, device: str) -> SeatLayer:
    """A layer of empty seats."""
    local = core.near
    assert local is not None
    width = local.ring

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(1, KEY_HEADS, *shape, dtype=dtype, device=device)

    wide = torch.promote_types(dtype, torch.float32)
    states = {"log_mass": (core.slots,), "mean": (core.slots, VALUES)}
    made = {
        prefix + name: zeros(*shape, dtype=wide)
        for prefix in ("", "pending_")
        for name, shape in states.items()
    }
    made |= {"near_k": zeros(width, WIDTH), "near_v": zeros(width, VALUES)}
    if local.sinks:
        made |= {"sink_k": zeros(local.sinks, WIDTH), "sink_v": zeros(local.sinks, VALUES)}
    if core.has_features:
        made["near_features"] = zeros(width, core.slots)
    position = torch.zeros(seats, dtype=torch.long, device=device)
    return SeatLayer(core, empty_like(made, seats), position)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The steps that kernels took; they take what is on a CPU, too, in the interpreter."""
    monkeypatch.setattr(kernels, "refuses_device", lambda _: None)
    taken, own = [], kernels.next_token

    def noted(*args, **options):
        taken.append("step")
        return own(*args, **options)

    monkeypatch.setattr(kernels, "next_token", noted)
    return taken


def inputs(seats: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(7)
    shapes = (HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, VALUES)
    return [torch.randn(seats, h, TOKENS, w, dtype=torch.float64, device=device) for h, w in shapes]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CASES), ("slots", torch.bfloat16)],
)
def test_steps_are_rows_of_the_whole(name, dtype, device, launched):
    """Two seats, the second of which begins three tokens later, in the float64 definition."""
    core = core_of(name, device)
    late, given = 3, [x.to(dtype) for x in inputs(2, device)]
    layer = seats_of(core, 2, dtype, device)
    found = torch.empty(2, HEADS, TOKENS, VALUES, dtype=torch.float64, device=device)
    for step in range(TOKENS):
        at = torch.tensor([step, max(0, step - late)], device=device)
        layer.position.copy_(at)
        if step == late:  # what was written into the empty seat is nobody's
            layer.copy_(1, empty_like(layer.tensors, 1))
        q, k, v = (torch.stack([x[i, :, t] for i, t in enumerate(at)])[:, :, None] for x in given)
        out = layer.attend(core, q, k, v)
        assert out.dtype == dtype and out.shape == (2, HEADS, 1, VALUES)
        found[torch.arange(2), :, at] = out[:, :, 0].double()
    assert launched == ["step"] * TOKENS
    exact = core_of(name, device).double()
    whole = exact.attend_in_model(*(x.double() for x in given), None, None, is_causal=True)
    for seat, tokens in ((0, TOKENS), (1, TOKENS - late)):
        got, expected = found[seat, :, :tokens], whole[seat, :, :tokens]
        assert relative_error(got, expected) < (2e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("name", ["sinks", "slots", "slots, no window", "normalised"])
def test_the_memory_is_that_of_the_plain_steps(name, device, launched, monkeypatch):
    """Tensor by tensor, after every step: a stream may be moved to another device."""
    core, given = core_of(name, device), [x.float() for x in inputs(1, device)]
    layers = [seats_of(core, 1, torch.float32, device) for _ in range(2)]
    for step in range(TOKENS):
        q, k, v = (x[:, :, step : step + 1] for x in given)
        for layer, impl in zip(layers, ("triton", "eager"), strict=True):
            layer.position.fill_(step)
            core.impl = impl
            layer.attend(core, q, k, v)
        for key, own in layers[0].tensors.items():
            torch.testing.assert_close(own, layers[1].tensors[key], rtol=1e-5, atol=1e-6)
    assert len(launched) == TOKENS


@pytest.mark.parametrize("name", ["sinks", "slots", "slots, no window"])
@torch.no_grad()
def test_generate_takes_the_same_steps(name, device, launched, monkeypatch):
    """After a prompt, and after a chunk in the middle, as if all samples were on a GPU."""
    monkeypatch.setattr(cache, "may_look_at", lambda _: False)
    core, given = core_of(name, device), [x.float() for x in inputs(2, device)]
    layer, found = cache.StateLayer(), []
    for piece in zip(*(x.split([4, 1, 1, 3, 1, 1, 1, 1], 2) for x in given), strict=True):
        layer.update(*piece[1:])
        found.append(layer.attend(core, *piece, None))
    assert len(launched) == 6
    exact = core_of(name, device).double()
    whole = exact.attend_in_model(*(x.double() for x in given), None, None, is_causal=True)
    assert relative_error(torch.cat(found, 2).double(), whole) < 2e-6


@pytest.mark.parametrize("window", [{}, {"near": 4}, {"near": Near(4, overlap=2)}])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_a_state_with_a_normaliser_of_its_own_takes_one_launch(window, masked, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    decode, launched = kernels.decode, []
    monkeypatch.setattr(kernels, "decode", lambda *x, **o: launched.append(1) or decode(*x, **o))
    scales = {"alpha": [0.5, 0.8, 1.1, 1.5], "beta": [0.6, 1.2], "statistics": "fixed"}
    core = LLNAttention(HEADS, WIDTH, num_kv_heads=KEY_HEADS, causal=True, **scales, **window)
    core = core.to(device).eval()
    sizes = HEADS, KEY_HEADS, KEY_HEADS
    given = [torch.randn(2, heads, TOKENS, WIDTH, device=device) for heads in sizes]
    mask = torch.ones(2, TOKENS, dtype=torch.bool, device=device)
    mask[1, 6] = not masked
    layer, found, start = cache.StateLayer(), [], 0
    for piece in zip(*(x.split([5, *[1] * (TOKENS - 5)], 2) for x in given), strict=True):
        start += piece[0].shape[2]
        layer.update(*piece[1:])
        found.append(layer.attend(core, *piece, mask[:, :start] if masked else None))
    assert len(launched) == TOKENS - 5
    seen = mask if masked else None
    whole = core.double().attend_in_model(*(x.double() for x in given), seen, seen, is_causal=True)
    assert relative_error(torch.cat(found, 2).double(), whole) < 2e-6


def test_a_state_to_which_nothing_is_added_keeps_its_bits(device, launched):
    """Sinks never leave: the pending state of the first tokens stays empty, the far one too."""
    core = core_of("many sinks", device)
    layer = seats_of(core, 1, torch.float32, device)
    for step in range(5):
        layer.position.fill_(step)
        layer.attend(core, *(x[:, :, step : step + 1].float() for x in inputs(1, device)))
        for prefix in ("", "pending_"):
            assert torch.all(layer.tensors[f"{prefix}log_mass"] == -torch.inf)
            assert torch.all(layer.tensors[f"{prefix}mean"] == 0)


def test_what_the_kernels_do_not_take(device, monkeypatch):
    core = core_of("window", device)
    layer = seats_of(core, 1, torch.float64, device)
    q = torch.randn(1, HEADS, 1, WIDTH, dtype=torch.float64, device=device)
    monkeypatch.setattr(kernels, "refuses_device", lambda _: None)
    reason = kernels.refuses_next_token(q, q, q, layer.tensors)
    assert reason is not None and "float64" in reason
    wide = torch.zeros(1, HEADS, 1, 512, device=device)
    state = {"mean": torch.zeros(1, device=device)}
    assert "512 slots" in (kernels.refuses_next_token(wide, wide, wide, state) or "")
    turned = {"mean": torch.zeros(4, 3, device=device).T}
    assert "contiguous" in (kernels.refuses_next_token(q.float(), q, q, turned) or "")
