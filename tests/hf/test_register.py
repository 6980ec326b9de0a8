"""attn_implementation="lln" in encoders: padding, batches, refusals, and no N×N mask."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface

import lln
import lln.hf
from lln.hf.register import core_of
from tests.hf.tiny import ENCODERS, images, inputs, make, padded, run, text

NAMES = ("lln", "lln_diag")


@pytest.fixture(autouse=True)
def registered():
    lln.hf.register()


def switched(family: str, name: str, **options):
    """The same weights with softmax and with another attention."""
    softmax, other = make(family), make(family)
    other.set_attn_implementation(name)
    other.config.lln_options = options
    return softmax, other


def test_every_core_of_the_zoo_is_registered_with_its_mask():
    names = lln.hf.register()
    assert lln.hf.register() == names
    assert {"lln", "lln_diag", "softmax", "performer", "cosformer"} <= set(names)
    assert not {"reformer", "flash", "tnn", "rebased"} & set(names)
    for name in names:
        assert name in AttentionInterface() and name in AttentionMaskInterface()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", [*ENCODERS, "vit"])
def test_outputs_are_finite_and_not_those_of_softmax(family, name):
    softmax, model = switched(family, name, **({"near": 4} if name == "lln_diag" else {}))
    expected, got = run(softmax, **inputs(family)), run(model, **inputs(family))
    assert got.isfinite().all() and got.shape == expected.shape
    assert (got - expected).abs().max() > 1e-2


def test_the_attention_is_that_of_the_library():
    """One layer's output from its own queries, keys and values."""
    _, model = switched("roberta", "lln_diag", near=4, method="entropy")
    layer = model.roberta.encoder.layer[0].attention.self
    x = torch.randn(2, 9, 32)
    mask = torch.arange(9) < torch.tensor([[9], [6]])
    with torch.no_grad():
        got, _ = layer(x, mask)
        heads = [
            getattr(layer, part)(x).unflatten(-1, (4, 8)).transpose(1, 2)
            for part in ("query", "key", "value")
        ]
    masks = {"key_mask": mask, "query_mask": mask}
    expected = lln.attention(*heads, **masks, near=4, method="entropy")
    torch.testing.assert_close(got, expected.transpose(1, 2).flatten(2))


def test_softmax_of_the_zoo_is_softmax():
    softmax, model = switched("roberta", "softmax")
    batch = padded(text(), 5, "right")
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(run(model, **batch)[real], run(softmax, **batch)[real])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [*NAMES, "cosformer", "block_diag"])
@pytest.mark.parametrize("family", ENCODERS)
def test_padding_changes_nothing(family, name, side):
    options = {"lln_diag": {"near": 4}, "block_diag": {"block": 4}}.get(name, {})
    _, model = switched(family, name, **options)
    ids = text(2, 10)
    batch = padded(ids, 7, side)
    place = torch.arange(17) - (7 if side == "left" else 0)  # of the text, wherever the padding is
    batch["position_ids"] = place.clamp(min=0).expand(2, -1)
    alone = {"input_ids": ids, "position_ids": torch.arange(10).expand(2, -1)}
    expected, got = run(model, **alone), run(model, **batch)
    assert got.isfinite().all()
    torch.testing.assert_close(got[batch["attention_mask"].bool()].view_as(expected), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["roberta", "vit"])
def test_a_sample_does_not_depend_on_its_batch(family, name):
    _, model = switched(family, name)
    ((key, batch),) = inputs(family).items()
    alone = run(model, **{key: batch[:1]})
    torch.testing.assert_close(run(model, **{key: batch})[:1], alone)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.itemsize)
        return out


def test_no_pairwise_mask_is_built():
    model = make("bert", head="AutoModel", max_position_embeddings=4096)
    model = hf.BertModel(model.config).eval()
    model.set_attn_implementation("lln_diag")
    batch = padded(text(1, 2000), 100, "right")
    with Largest() as watched:
        run(model, **batch)
    assert 2100 * 48 <= watched.elements < 2100 * 2100 / 4


def test_half_precision_and_training():
    model = make("roberta").to(torch.bfloat16)
    model.set_attn_implementation("lln_diag")
    model.train()
    batch = padded(text(), 4, "right")
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    assert loss.dtype == torch.bfloat16 and loss.isfinite()
    query = model.roberta.encoder.layer[0].attention.self.query.weight.grad
    assert query.isfinite().all() and query.abs().max() > 0


def test_attention_dropout_acts_in_training_only():
    _, model = switched("roberta", "lln")
    layer = model.roberta.encoder.layer[0].attention.self.train()
    x = torch.randn(1, 9, 32)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_another_scaling_of_the_scores_is_respected():
    """Matching assumes q·k/√d: a model with another factor is one with other queries."""
    _, model = switched("roberta", "lln_diag", near=4)
    layer = model.roberta.encoder.layer[0].attention.self
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        layer.scaling *= 3
        scaled = layer(x)[0]
        layer.scaling /= 3
        layer.query.weight *= 3
        layer.query.bias *= 3
        torch.testing.assert_close(layer(x)[0], scaled)


@pytest.mark.parametrize("mask", ["bool", "additive"])
def test_a_4d_mask_is_refused_by_the_layer(mask):
    _, model = switched("roberta", "lln")
    ids = text()
    pairs = torch.ones(3, 1, 20, 20).tril().bool()
    if mask == "additive":
        pairs = torch.zeros(3, 1, 20, 20).masked_fill(~pairs, -torch.inf)
    with pytest.raises(ValueError, match=r"mask per query-key pair.*\[3, 1, 20, 20\].*2-D padding"):
        model(input_ids=ids, attention_mask=pairs)


def test_an_uncalibrated_causal_model_names_its_layer():
    model = make("gpt2")
    model.set_attn_implementation("lln")
    with pytest.raises(ValueError, match=r"layer 0 \(GPT2Attention\).*lln.hf.calibrate"):
        model(text())


def test_a_mechanism_with_weights_needs_a_place_for_them():
    model = make("roberta")
    model.set_attn_implementation("hedgehog")
    with pytest.raises(
        ValueError, match=r"weights of its own.*lln.hf.replace\(model, 'hedgehog'\)"
    ):
        model(text())
    model.set_attn_implementation("reformer")
    with pytest.raises(ValueError, match=r"lln.hf.replace\(model, 'reformer'\)"):
        model(text())


def test_unknown_options_are_errors():
    _, model = switched("roberta", "lln", near=4)
    with pytest.raises(TypeError, match="near= is not an option; 'lln' takes method"):
        model(text())
    _, model = switched("roberta", "lln", causal=True)
    with pytest.raises(TypeError, match="causal= is decided by the model"):
        model(text())


def test_cross_attention_keeps_its_statistics_apart():
    """The padding of the encoder's tokens says nothing about the decoder's."""
    config = hf.BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=99,
        max_position_embeddings=64,
    )
    config.lln_options = {"statistics": "running"}
    layer = hf.BartModel(config).train().decoder.layers[0].encoder_attn
    config._attn_implementation = "lln"
    x, memory = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    measured = []
    for seen in (mask, None):
        other = copy.deepcopy(layer)
        other(x, key_value_states=memory, attention_mask=seen)
        measured.append(core_of(other, "lln").statistics.variances)
    torch.testing.assert_close(measured[0][0], measured[1][0])  # of the queries
    assert (measured[0][1] - measured[1][1]).abs().max() > 1e-3  # of the keys


def test_images_have_no_mask():
    _, model = switched("vit", "lln_diag", near=8)
    assert run(model, pixel_values=images()).isfinite().all()
