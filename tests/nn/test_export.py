"""torch.export: one program for every batch and length."""

from __future__ import annotations

import io

import pytest
import torch

import lln.hf
from lln.nn import RECOMMENDED, LLNAttention, LLNMultiheadAttention
from tests.hf.tiny import make, text
from tests.nn.inputs import embeddings, padding, qkv

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def loaded(module, args, *sizes):
    """Exported with the named sizes open, written, and read again."""
    program = torch.export.export(module, args, dynamic_shapes=sizes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def open_sizes():
    return torch.export.Dim("batch", min=1, max=64), torch.export.Dim("tokens", min=2, max=4096)


# Windows under one normaliser: tests/nn/test_near_far.py; more of them as graphs: tests/onnx.
CORES = [
    (False, {}),
    (False, {"near": lln.Near(16, joint=True)}),
    (False, {"method": "entropy", "feature_map": "signs"}),
    (True, {"near": 16, "conv": 5, "mix": "learned"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("causal, options", CORES, ids=str)
def test_a_core_for_every_size(causal, options):
    statistics = "running" if causal else "sample"
    core = LLNAttention(4, 8, num_kv_heads=2, causal=causal, statistics=statistics, **options)
    core.eval()
    batch, tokens = open_sizes()
    sizes = {0: batch, 2: tokens}
    program = loaded(core, qkv(2, 4, 70, 8, kv_heads=2), sizes, sizes, sizes)
    for shape in ((2, 4, 70, 8), (1, 4, 64, 8), (3, 4, 133, 8)):
        x = qkv(*shape, kv_heads=2)
        torch.testing.assert_close(program(*x), core(*x))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(RECOMMENDED)], ids=str)
def test_a_layer_with_padding(options):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = LLNMultiheadAttention(32, 4, batch_first=True, **options)

        def forward(self, x, hidden):
            return self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]

    layer = Layer().eval()
    batch, tokens = open_sizes()
    sizes = {0: batch, 1: tokens}
    program = loaded(layer, (embeddings(2, 70, 32), ~padding([70, 50], 70)), sizes, sizes)
    for lengths in ([70, 50], [128, 128, 3]):
        x = embeddings(len(lengths), max(lengths), 32), ~padding(lengths, max(lengths))
        torch.testing.assert_close(program(*x), layer(*x))


@pytest.mark.slow
def test_a_model_after_replace():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make("roberta")
            lln.hf.replace(self.model, "lln_diag", quiet=True, near=8)

        def forward(self, ids, mask):
            return self.model(input_ids=ids, attention_mask=mask).logits

    model = Model().eval()
    batch, tokens = (
        torch.export.Dim("batch", min=1, max=64),
        torch.export.Dim("tokens", min=4, max=30),
    )
    sizes = {0: batch, 1: tokens}
    ids = text(2, 20)
    program = loaded(model, (ids, torch.ones_like(ids)), sizes, sizes)
    for ids in (text(2, 20), text(3, 27)):
        torch.testing.assert_close(
            program(ids, torch.ones_like(ids)), model(ids, torch.ones_like(ids))
        )
