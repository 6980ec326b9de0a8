"""Decoding from a state as a graph: state in, state out."""

from __future__ import annotations

import pytest
import torch

import lln
from lln.nn import LLNAttention
from tests.nn.inputs import qkv
from tests.onnx.graphs import BATCH, TOKENS, Graph


def decoder(**options) -> LLNAttention:
    core = LLNAttention(4, 8, num_kv_heads=2, causal=True, statistics="running", **options).eval()
    return core.calibrate_(*qkv(2, 4, 50, 8, kv_heads=2)[:2])


def first_state(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    empty = lln.State.empty(batch, 2, 8)
    return empty.log_mass, empty.mean


@pytest.mark.slow
def test_token_by_token_equals_the_whole_sequence(tmp_path):
    core, file = decoder(center_keys=True), tmp_path / "step.onnx"
    inputs = (*qkv(2, 4, 1, 8, kv_heads=2), *first_state(2))
    lln.onnx.export(
        lln.onnx.DecodingStep(core).eval(), inputs, file, dynamic_shapes=({0: BATCH},) * 5
    )
    graph, x = Graph(file), qkv(3, 4, 9, 8, kv_heads=2)
    state, outputs = first_state(3), []
    for i in range(9):
        out, *state = graph(*(part[:, :, i : i + 1] for part in x), *state)
        outputs.append(out)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(outputs, 2), core(*x), atol=3e-6, rtol=1e-5)


@pytest.mark.slow
def test_pieces_of_any_size(tmp_path):
    core, file = decoder(), tmp_path / "pieces.onnx"
    inputs = (*qkv(2, 4, 5, 8, kv_heads=2), *first_state(2))
    sizes = (*({0: BATCH, 2: TOKENS},) * 3, {0: BATCH}, {0: BATCH})
    lln.onnx.export(lln.onnx.DecodingStep(core).eval(), inputs, file, dynamic_shapes=sizes)
    graph, x = Graph(file), qkv(3, 4, 100, 8, kv_heads=2)
    state, outputs = first_state(3), []
    for start, stop in ((0, 70), (70, 72), (72, 100)):
        out, *state = graph(*(part[:, :, start:stop] for part in x), *state)
        outputs.append(out)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(outputs, 2), core(*x), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "make the core with causal=True"),
        ({"causal": True, "near": 8}, "near= keeps tokens beside the state"),
        ({"causal": True, "conv": 3}, "conv= keeps tokens beside the state"),
    ],
)
def test_what_does_not_decode_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lln.onnx.DecodingStep(LLNAttention(4, 8, statistics="running", **options))
