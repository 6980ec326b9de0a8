"""A whole decoder as a graph: token and state in, logits and state out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import lln.hf
import lln.onnx
from lln.cli.app import app
from lln.onnx import decoders
from lln.onnx.models import ALLOWED
from tests.hf.serving.test_engine import MECHANISMS
from tests.hf.tiny import make, text
from tests.onnx.graphs import Graph


def ready(family: str, name: str, **changes):
    model = make(family, **changes)
    lln.hf.replace(model, name.split()[0], quiet=True, **MECHANISMS[name])
    return lln.hf.calibrate(model, [{"input_ids": text(4, 30, seed=5)}])


def test_a_step_in_torch_leaves_its_inputs_and_follows_generate():
    """Streams at different positions, as the graph has them."""
    model = ready("llama", "lln_nearfar before")
    step, ids = lln.onnx.DecoderStep(model), text(2, 14)
    assert step.names[:2] == ["layer0.log_mass", "layer0.mean"]
    state, late = step.empty(2), 4  # the second stream begins four tokens later
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for place in range(14):
            position = torch.tensor([place, max(0, place - late)])
            if place == late:
                fresh = zip(state, step.empty(1), strict=True)
                state = [torch.stack([x[0], y[0]]) for x, y in fresh]
            before = [x.clone() for x in state]
            token = ids[torch.arange(2), position]
            logits, *after = step(token, position, *state)
            assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))
            state = after
            torch.testing.assert_close(logits[0], whole[0, place], atol=1e-4, rtol=1e-4)
            if place >= late:
                torch.testing.assert_close(logits[1], whole[1, place - late], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=f"got 1 tensors of the state; pass {len(step.names)}"):
        step(token, position, state[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "lln"),
        ("llama", "lln_diag windows"),
        ("llama", "lln_nearfar before"),
        ("gpt2", "lln_diag learned"),
        ("llama", "lln_nearfar before, a key head kept"),
    ],
)
def test_the_graph_follows_generate_step_by_step(family, name, tmp_path):
    """For a batch that was not traced; beyond the windows."""
    name, kept = name.split(",")[0], name.endswith("kept")
    model, file = ready(family, name), tmp_path / "decoder.onnx"
    if kept:
        model._lln_replacements.current[0].keep_softmax_heads({1: [2, 3]})
    step = lln.onnx.DecoderStep(model, max_length=26 if kept else None)
    assert ("layer1.kept_k" in step.names) == kept
    lln.onnx.export_decoder(step, file)
    graph, ids, state = Graph(file), text(3, 6), step.empty(3)
    options = {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    out = model.generate(ids, max_new_tokens=20, do_sample=False, **options)
    for place in range(25):
        logits, *state = graph(out.sequences[:, place], torch.full((3,), place), *state)
        if place >= 5:
            expected = out.logits[place - 5]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            assert torch.equal(logits.argmax(-1), out.sequences[:, place + 1])
    names = {entry.name for entry in graph.session.get_inputs()}
    assert names == {"token", "position", *step.names}


@pytest.mark.slow
def test_the_command_writes_and_checks_a_decoder(tmp_path):
    model = ready("llama", "lln_diag", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "step.onnx"
    words = ["export", str(tmp_path / "model"), "--out", str(file), "--decoder"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "20 tokens after a prompt of 12" in done.output and "the same tokens" in done.output
    step = lln.onnx.DecoderStep(model)
    assert decoders.check_decoder(step, file).difference < 1e-5
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert decoders.check_decoder(step, file).difference > 0.1
    refused = CliRunner().invoke(app, [*words, "--length", "9"])
    assert refused.exit_code != 0 and "--length and --results" in refused.output


class InTorch:
    """A step in the place of its graph, which takes seconds to write."""

    def __init__(self, step: decoders.DecoderStep) -> None:
        self.step = step

    def get_inputs(self):
        return [SimpleNamespace(name=name) for name in ("token", "position", *self.step.names)]

    def run(self, _, feed):
        return [x.numpy() for x in self.step(*map(torch.from_numpy, feed.values()))]


def test_the_check_reads_beyond_the_windows(monkeypatch):
    """A graph whose far keys weigh exp(20) times as much is noticed."""
    model = make("llama", num_hidden_layers=1)
    lln.hf.replace(model, "lln_nearfar", quiet=True, near=lln.Near(24, overlap=24, sinks=2))
    lln.hf.calibrate(model, [{"input_ids": text(4, 90, seed=5)}])
    step, graph = lln.onnx.DecoderStep(model), lln.onnx.DecoderStep(model)
    monkeypatch.setattr(decoders, "session_of", lambda file: InTorch(graph))
    found = decoders.check_decoder(step, "graph.onnx")
    assert found.prompt > 24 + 24 + 2 and found.difference < 1e-5
    layer = graph._layers[0]
    layer.constants = replace(layer.constants, gamma=layer.constants.gamma + 20)
    assert decoders.check_decoder(step, "graph.onnx").difference > ALLOWED


def test_the_check_stays_within_learned_positions(monkeypatch):
    model = make("gpt2", num_hidden_layers=1, n_positions=40)
    lln.hf.replace(model, "lln_diag", quiet=True, near=32, alpha=1.0, beta=1.0)
    step = lln.onnx.DecoderStep(model)
    monkeypatch.setattr(decoders, "session_of", lambda file: InTorch(step))
    found = decoders.check_decoder(step, "graph.onnx")
    assert found.prompt + found.tokens == 40 and found.difference < 1e-5


def test_an_encoder_is_refused(tmp_path):
    model = make("roberta", num_hidden_layers=1)
    lln.hf.replace(model, "lln", quiet=True)
    with pytest.raises(ValueError, match="no causal LLN attention"):
        lln.onnx.DecoderStep(model)
