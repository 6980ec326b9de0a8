"""Layers and models as ONNX graphs, with padding, at sizes that were not traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lln
import lln.hf
from lln.nn import RECOMMENDED, LLNMultiheadAttention
from tests.hf.tiny import make, padded, text
from tests.nn.inputs import embeddings, padding
from tests.onnx.graphs import BATCH, TOKENS, Graph, steepest_growth

pytestmark = pytest.mark.slow  # exports whole models

OPEN = {0: BATCH, 1: TOKENS}
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


class Layer(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = LLNMultiheadAttention(32, 4, batch_first=True, **options)

    def forward(self, x, hidden):
        return self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]


class Encoder(nn.Module):
    """torch's own encoder with our attention in its layers."""

    def __init__(self, **options) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for layer in self.encoder.layers:
            layer.self_attn = LLNMultiheadAttention(32, 4, batch_first=True, **options)

    def forward(self, x, hidden):
        return self.encoder(x, src_key_padding_mask=hidden)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Layer, Encoder])
def test_layers_with_padding(kind, tmp_path):
    module = kind(**{**RECOMMENDED, "near": 16, "statistics": "running"}).eval()
    inputs = embeddings(2, 70, 32), ~padding([70, 50], 70)
    file = tmp_path / "layer.onnx"
    lln.onnx.export(module, inputs, file, dynamic_shapes=(OPEN, OPEN), optimize=False)
    graph = Graph(file)
    for lengths in ([70, 50], [129, 40, 1]):
        inputs = embeddings(len(lengths), max(lengths), 32), ~padding(lengths, max(lengths))
        with torch.no_grad():
            torch.testing.assert_close(graph(*inputs)[0], module(*inputs), **CLOSE)
    growth = steepest_growth(file, *((embeddings(1, n, 32), ~padding([n], n)) for n in (256, 1024)))
    assert growth <= 4.2


class Model(nn.Module):
    def __init__(self, family: str, attention: str, **options) -> None:
        super().__init__()
        self.model = make(family, max_position_embeddings=2048)
        lln.hf.replace(self.model, attention, quiet=True, **options)

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


@pytest.mark.parametrize(
    "family, attention",
    [
        ("bert", "lln_diag"),
        pytest.param("bert", "lln_nearfar", marks=pytest.mark.slow),
        pytest.param("roberta", "lln", marks=pytest.mark.slow),
        pytest.param("distilbert", "lln_diag", marks=pytest.mark.slow),
    ],
)
def test_a_hugging_face_encoder_after_replace(family, attention, tmp_path):
    options = {} if attention == "lln" else {"near": 8}
    model = Model(family, attention, **options).eval()
    file = tmp_path / "model.onnx"
    tokens = torch.export.Dim("tokens", min=2, max=1024)
    sizes = ({0: BATCH, 1: tokens},) * 2
    inputs = tuple(padded(text(2, 20), 3, "right").values())
    lln.onnx.export(model, inputs, file, dynamic_shapes=sizes, optimize=False)
    graph = Graph(file)
    for batch, length, more in ((2, 20, 3), (3, 37, 8), (1, 90, 1)):
        inputs = tuple(padded(text(batch, length), more, "right").values())
        with torch.no_grad():
            expected = model(*inputs)[:, :length]
        torch.testing.assert_close(graph(*inputs)[0][:, :length], expected, **CLOSE)
    ones = [(text(1, n), torch.ones(1, n, dtype=torch.long)) for n in (128, 512)]
    assert steepest_growth(file, *ones) <= 4.2
