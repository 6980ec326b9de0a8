"""What a core refuses for DTensors, asked without processes: tests/distributed runs the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lln import Near
from lln.distributed.layout import Layout
from lln.nn import LLNAttention
from lln.nn.sharded import _check_possible, _convolution
from tests.nn.inputs import qkv

JOINT = {"near": Near(8, joint=True)}
RUNNING = {"statistics": "running"}


def check(*, dropout: float = 0.0, train: bool = True, **options) -> None:
    _check_possible(LLNAttention(2, 8, **options).train(train), dropout)


@pytest.mark.parametrize(
    "options",
    [
        *({}, RUNNING, JOINT, {"near": 8, "mix": "learned"}, {"dropout": 0.5, "train": False}),
        {**RUNNING, **JOINT, "train": False},
        {**RUNNING, "feature_map": "signs", "learn_scale": True, "sharpness": 0.6},
    ],
    ids=str,
)
def test_what_needs_no_numbers_of_other_processes_is_possible(options):
    check(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dropout": 0.5}, "dropout"),
        ({**RUNNING, **JOINT}, "joint=True and statistics='running' while training"),
        ({"feature_map": "signs"}, "feature_map with statistics='sample'"),
        ({"center_keys": True}, "center_keys"),
        ({"sharpness": 0.6}, "sharpness with statistics='sample'"),
        ({"learn_scale": True}, "learn_scale with statistics='sample'"),
    ],
)
def test_what_does_is_refused(options, message):
    with pytest.raises(ValueError, match=f"{message} is refused for DTensors"):
        check(**options)


def test_a_shifted_level_that_is_measured_is_refused():
    core = LLNAttention(2, 8, **JOINT)
    core.level.offset = -1.0
    with pytest.raises(ValueError, match="an offset of gamma"):
        _check_possible(core, 0.0)


@pytest.mark.parametrize(
    "over_tokens, keys, message",
    [("inner", 9, "conv=3 looks at neighbours"), (None, 12, "conv=3 is for self-attention")],
)
def test_a_convolution_across_processes_is_refused(over_tokens, keys, message, monkeypatch):
    layout = SimpleNamespace(over_tokens=over_tokens)
    monkeypatch.setattr(Layout, "of", staticmethod(lambda *_: layout))
    core = LLNAttention(2, 8, conv=3)
    with pytest.raises(ValueError, match=message):
        _convolution(core, *qkv(1, 2, 9, 8, keys=keys), key_mask=None, is_causal=False)
