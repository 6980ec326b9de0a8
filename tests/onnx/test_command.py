"""``lln export``: file, check and table."""

from __future__ import annotations

import pytest
import torch
from transformers import RobertaForMaskedLM
from typer.testing import CliRunner

import lln.hf
from lln.cli.app import app
from lln.onnx import models
from tests.hf.tiny import make, text
from tests.onnx.graphs import Graph


def command(*words: object):
    return CliRunner().invoke(app, ["export", *map(str, words)])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A saved model, the file that the command made of it, and what it said."""
    folder = tmp_path_factory.mktemp("model")
    model = make("roberta", num_hidden_layers=1)
    lln.hf.replace(model, "lln", quiet=True)
    model.save_pretrained(folder / "saved")
    file = folder / "new" / "model.onnx"
    return folder / "saved", file, command(folder / "saved", "--out", file, "--length", 60)


@pytest.mark.slow
def test_a_folder_becomes_a_checked_file(exported):
    folder, file, done = exported
    assert done.exit_code == 0, done.output
    for shown in ("up to 127 tokens", "ms with softmax", " 16 ", " 31 ", " 60 "):
        assert shown in done.output
    ids = text(3, 41)
    with torch.no_grad():
        expected = lln.hf.load(folder, RobertaForMaskedLM).eval()(ids).logits
    got = Graph(file)(ids, torch.ones_like(ids))[0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]


@pytest.mark.slow
def test_a_graph_of_other_weights_fails_the_check(exported):
    """And no softmax model is needed for it."""
    folder, file, _ = exported
    ours, _ = models.load(folder)
    with torch.no_grad():
        ours.model.roberta.embeddings.word_embeddings.weight.mul_(1.1)
    rows = list(models.check(ours, file, (30,)))
    assert rows[0].difference > models.ALLOWED and rows[0].softmax_ms is None


@pytest.mark.slow
def test_what_cannot_be_exported_says_why(tmp_path):
    make("gpt2").save_pretrained(tmp_path / "gpt2")
    make("vit").save_pretrained(tmp_path / "vit")
    out = ("--out", tmp_path / "no.onnx")
    cases = {
        (tmp_path / "gpt2",): "was not saved after lln.hf.replace",
        (tmp_path / "gpt2", "--attention", "lln"): "has no calibrated alpha and beta",
        (tmp_path / "vit",): "only text models are exported",
    }
    for words, message in cases.items():
        done = command(*words, *out)
        assert done.exit_code == 1 and message in str(done.exception), words
    assert not (tmp_path / "no.onnx").exists()
