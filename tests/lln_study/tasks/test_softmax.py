"""Softmax in models of transformers: SDPA without a mask that hides nothing, same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lln_study.tasks import mlm
from lln_study.tasks.models import roberta, softmax


def built(attention: str, **options):
    config = mlm.configure("roberta-tiny", attention=attention, options=options)
    return roberta.build_model(config, 300)[0].eval()


@pytest.fixture
def model():
    return built("softmax")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("attention, known", [("softmax", "sdpa"), ("softmax_eager", "eager")])
def test_numbers_are_those_of_transformers(attention, known, masked):
    model = built(attention)
    ids = torch.randint(5, 300, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    given = {"attention_mask": mask} if masked else {}
    ours = model.roberta(ids, **given)[0]
    model.set_attn_implementation(known)
    theirs = model.roberta(ids, **given)[0]
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()])


def test_no_mask_is_built_while_a_step_is_compiled(model, monkeypatch):
    """transformers 5.17 builds one of N x N there."""
    seen = []
    attend = F.scaled_dot_product_attention

    def spy(*tensors, **options):
        seen.append(options.get("attn_mask"))
        return attend(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)
    model.roberta(torch.randint(5, 300, (2, 20)))
    assert seen == [None, None]


def test_the_matrix_refuses_a_mask_per_pair():
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"attention_mask \[1, 1, 4, 4\].*use 'softmax'"):
        softmax.matrix_attention(torch.nn.Module(), x, x, x, torch.ones(1, 1, 4, 4))


def test_softmax_with_a_convolution_is_a_module_of_its_own(model):
    ids = torch.randint(5, 300, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    wide = built("softmax", conv=5)
    weights = {name: x for name, x in wide.named_parameters() if name.endswith("conv_weight")}
    layers = wide.config.num_hidden_layers
    assert len(weights) == layers and all(x.shape[1] == 5 for x in weights.values())
    for given in ({}, {"attention_mask": mask}):
        seen = given.get("attention_mask", torch.ones_like(mask)).bool()
        plain, more = (m.roberta(ids, **given)[0][seen] for m in (model, wide))
        assert (plain - more).abs().max() > 1e-3
    for weight in weights.values():
        torch.nn.init.zeros_(weight)
    for given in ({}, {"attention_mask": mask}):
        seen = given.get("attention_mask", torch.ones_like(mask)).bool()
        torch.testing.assert_close(*(m.roberta(ids, **given)[0][seen] for m in (model, wide)))


def test_options_are_refused():
    with pytest.raises(ValueError, match="'softmax_eager' has none"):
        softmax.is_replaced("softmax_eager", {"conv": 5})
    with pytest.raises(TypeError, match="method= is not an option"):
        built("softmax", method="paper")
    assert softmax.is_replaced("lln", {}) and not softmax.is_replaced("softmax", {})
