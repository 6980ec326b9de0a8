"""Modules made without memory, as large models are: on the meta device, then filled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lln
from lln.nn import RECOMMENDED, LLNAttention, LLNMultiheadAttention
from tests.nn.inputs import embeddings, qkv

OPTIONS = [
    {"method": "entropy", "statistics": "running"},
    {"method": "variance", "statistics": "fixed"},
    {"statistics": "fixed", "alpha": [1.0, 2.0, 3.0, 4.0], "beta": torch.tensor([2.0, 1.0])},
    {**RECOMMENDED, "learn_scale": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.get("statistics"))
def test_made_on_meta_then_filled(options):
    def made():
        return LLNAttention(4, 8, num_kv_heads=2, **options)

    here = made().eval()
    with torch.device("meta"):
        core = made().eval()
    assert all(x.is_meta for x in (*core.parameters(), *core.buffers()))
    core.to_empty(device="cpu")
    for x in (*core.parameters(), *core.buffers()):  # memory may hold anything
        x.data.fill_(torch.nan if x.is_floating_point() else 7)
    core.reset_parameters()
    for (name, x), y in zip(core.state_dict().items(), here.state_dict().values(), strict=True):
        assert x.isfinite().all(), name
        assert name == "conv_weight" or x.equal(y), name
    core.load_state_dict(here.state_dict())
    q, k, v = qkv(2, 4, 9, 8, kv_heads=2)
    assert core(q, k, v).equal(here(q, k, v))


def everything(module):
    return (*module.parameters(), *module.buffers())


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.get("statistics"))
def test_a_softmax_checkpoint_assigned_to_a_layer_without_memory(options):
    options = {**options, "alpha": 1.5, "beta": 0.5} if "alpha" in options else options
    softmax = nn.ModuleDict({"layer": nn.MultiheadAttention(32, 4, batch_first=True)})
    with torch.device("meta"):
        ours = LLNMultiheadAttention(32, 4, batch_first=True, **options)
        model = nn.ModuleDict({"layer": ours})
    model.load_state_dict(softmax.state_dict(), assign=True)
    assert not any(x.is_meta for x in everything(model))
    here = LLNMultiheadAttention(32, 4, batch_first=True, **options)
    here.load_state_dict(softmax["layer"].state_dict())
    for name, value in here.state_dict().items():
        assert name.endswith("conv_weight") or ours.state_dict()[name].equal(value), name
    x = embeddings(2, 9, 32)
    assert ours(x, x, x)[0].isfinite().all()


def test_a_checkpoint_of_our_own_assigned_to_a_layer_without_memory():
    def layer():
        return LLNMultiheadAttention(32, 4, batch_first=True, statistics="running")

    trained, x = layer(), embeddings(2, 9, 32)
    trained(x, x, x)
    with torch.device("meta"):
        ours = layer()
    ours.load_state_dict(trained.state_dict(), assign=True)
    assert not any(y.is_meta for y in everything(ours))
    out, _ = ours(x, x, x, is_causal=True)
    out.sum().backward()
    assert ours.attention.statistics.batches == 2


def test_a_softmax_checkpoint_keeps_what_an_ordinary_layer_has_learned():
    layer = LLNMultiheadAttention(32, 4, batch_first=True, statistics="running", learn_scale=True)
    x = embeddings(2, 9, 32)
    layer(x, x, x)
    nn.init.ones_(layer.attention.log_alpha)
    before = copy.deepcopy(layer.attention.state_dict())
    layer.load_state_dict(nn.MultiheadAttention(32, 4).state_dict(), assign=True)
    for name, value in layer.attention.state_dict().items():
        assert value.equal(before[name]), name


def test_starting_again_forgets_what_was_learned():
    core = LLNAttention(4, 8, near=4, mix="learned", conv=3, statistics="running")
    start = copy.deepcopy(core.state_dict())
    core(*qkv(2, 4, 9, 8))
    for parameter in core.parameters():
        torch.nn.init.ones_(parameter)
    core.reset_parameters()
    for name, x in core.state_dict().items():
        assert x.equal(start[name]) or (name == "conv_weight" and 0 < x.abs().max() <= 3**-0.5)


def test_a_layer_and_the_zoo_need_no_memory():
    with torch.device("meta"):
        layer = LLNMultiheadAttention(32, 4, batch_first=True, **RECOMMENDED)
        x = torch.empty(2, 300, 32)
        assert layer(x, x, x, need_weights=False)[0].shape == x.shape
        for name in lln.list_mechanisms():
            made = lln.create(name, dim=32, num_heads=4, max_length=128)
            assert any(parameter.is_meta for parameter in made.parameters()), name


def test_numbers_do_not_depend_on_the_default_device():
    expected = lln.match_moments(0.9, 1.1, 23, method="entropy")
    with torch.device("meta"):
        assert lln.match_moments(0.9, 1.1, 23, method="entropy") == expected
        assert lln.match_moments(0.9, 1.1, 29, method="variance") != expected
    x = embeddings(2, 9, 32)
    layer = LLNMultiheadAttention(32, 4, batch_first=True, method="entropy")
    inside = layer(x, x, x)[0]
    with torch.device("meta"):
        assert layer(x, x, x)[0].equal(inside)
