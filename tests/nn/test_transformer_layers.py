"""Inside torch's own transformer layers, whose fast path would run softmax in our place."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from lln.nn import LLNMultiheadAttention
from tests.nn.inputs import embeddings, padding


def encoder_layer(**options) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    ours = LLNMultiheadAttention(8, 2, batch_first=True, **options)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    return layer


def by_hand(layer, x, **arguments):
    x = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False, **arguments)[0])
    return layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))


@pytest.mark.parametrize("masked", [False, True])
def test_fast_path_is_not_taken_in_evaluation(masked):
    layer = encoder_layer().eval()
    softmax = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    softmax.load_state_dict(layer.state_dict())
    x = embeddings(2, 9, 8)
    ignore = ~padding([9, 5], 9) if masked else None
    with torch.no_grad():
        out = layer(x, src_key_padding_mask=ignore)
        fast = softmax(x, src_key_padding_mask=ignore)
        torch.testing.assert_close(out, by_hand(layer, x, key_padding_mask=ignore))
        assert (out[0] - fast[0]).abs().max() > 1e-3
    layer.train()
    torch.testing.assert_close(layer(x, src_key_padding_mask=ignore), out)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_layers_replaced_inside_a_finished_encoder():
    """The encoder then hands a nested batch to our module when evaluating with padding."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(plain, 2)
    for layer in encoder.layers:
        layer.self_attn = LLNMultiheadAttention(8, 2, batch_first=True, near=4)
    encoder.eval()
    x = embeddings(2, 9, 8)
    valid = padding([9, 5], 9)
    expected = x
    for layer in encoder.layers:
        expected = by_hand(layer, expected, key_padding_mask=~valid)
    with torch.no_grad():
        out = encoder(x, src_key_padding_mask=~valid)
    assert (out[~valid] == 0).all()  # how torch fills what it had cut off: the nested path ran
    torch.testing.assert_close(out[valid], expected[valid])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_other_uses_of_nested_tensors_are_refused():
    layer = LLNMultiheadAttention(8, 2, batch_first=True)
    parts = [embeddings(5, 8), embeddings(3, 8)]
    nested = torch.nested.as_nested_tensor(parts)
    with pytest.raises(ValueError, match="need_weights=False"):
        layer(nested, nested, nested)
    jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(ValueError, match="to_padded_tensor"):
        layer(jagged, jagged, jagged, need_weights=False)


def test_encoder_detects_its_causal_mask():
    layer = encoder_layer(statistics="fixed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = embeddings(2, 7, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    out = encoder(x, mask=mask)
    expected = x
    for each in encoder.layers:
        expected = by_hand(each, expected, is_causal=True)
    torch.testing.assert_close(out, expected)
    changed = torch.cat([x[:, :4], x[:, 4:] + 5], dim=1)
    torch.testing.assert_close(encoder(changed, mask=mask)[:, :4], out[:, :4])


@pytest.mark.slow
def test_training_an_encoder_lowers_the_loss():
    layer = encoder_layer(statistics="running", near=4, mix="learned", learn_scale=True)
    model = nn.Sequential(layer, nn.Linear(8, 8))
    x = embeddings(8, 9, 8)
    target = x.roll(1, dims=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    start = copy.deepcopy(layer.self_attn.state_dict())
    losses = []
    for _ in range(60):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    moved = layer.self_attn.state_dict()
    for name in ("mix_logit", "log_alpha", "log_beta", "statistics.variances"):
        assert not torch.equal(moved[f"attention.{name}"], start[f"attention.{name}"]), name
    assert moved["attention.statistics.batches"] == 60
