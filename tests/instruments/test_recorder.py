"""Every kind of attention is found, and its matrix is the one the model used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from lln import functional, instruments
from lln.instruments import MEASURES
from lln.instruments.recording.recorder import attention_calls
from lln.nn import LLNAttention, LLNMultiheadAttention
from lln.ops.dispatch import IMPLEMENTATIONS
from tests.instruments import models

MATRIX_MEASURES = [name for name in MEASURES if name not in ("entropy_se", "temperature")]


def padded_batch() -> dict[str, torch.Tensor]:
    attention_mask = torch.ones(3, 20, dtype=torch.long)
    attention_mask[0, 15:] = 0
    return {"input_ids": torch.randint(5, 100, (3, 20)), "attention_mask": attention_mask}


def assert_measures_equal(call, p, sample=0):
    """The measures of one sample equal the functions of lln.instruments on its matrix."""
    measured = call.measured(MATRIX_MEASURES)
    for name in MATRIX_MEASURES:
        if name == "spectral_gap" and p.shape[-1] != p.shape[-2]:
            assert measured[name][sample].isnan().all()
            continue
        function = getattr(instruments, name)
        if name == "spectral_gap" and call.is_causal:
            with pytest.warns(instruments.CausalMatrixWarning):
                expected = function(p)
        else:
            expected = function(p)
        assert torch.allclose(measured[name][sample], expected, atol=2e-5, rtol=2e-5), name


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["roberta", "gpt2", "llama"])
def test_hugging_face_models(kind, attention, padded):
    model = models.build(kind, attention=attention).eval()
    inputs = padded_batch() if padded else {"input_ids": torch.randint(5, 100, (3, 20))}
    with torch.no_grad(), attention_calls(model, samples=2) as calls:
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        true = model(**inputs, output_attentions=True).attentions
    names = [name for name, module in model.named_modules()]
    assert [call.layer for call in calls] == [0, 1]
    assert all(call.kernel == "softmax" and call.module in names for call in calls)
    assert [call.is_causal for call in calls] == [kind != "roberta"] * 2
    for call, matrices in zip(calls, true, strict=True):
        for sample in range(2):
            kept = call.tokens[sample]
            assert kept.sum() == (15 if padded and sample == 0 else 20)
            p = matrices[sample][:, kept][:, :, kept]
            assert torch.allclose(call.matrix(sample), p, atol=1e-6)
            assert_measures_equal(call, p, sample)


def test_vision_model():
    model = models.build("vit", attention="sdpa").eval()
    with torch.no_grad(), attention_calls(model) as calls:
        model(pixel_values=torch.randn(2, 3, 16, 16))
    assert [call.q.shape for call in calls] == [(1, 4, 17, 8)] * 2


def test_scores_with_a_scale_of_their_own():
    q, k, v = torch.randn(3, 2, 3, 12, 8).unbind()
    model = Calls(lambda: F.scaled_dot_product_attention(q, k, v, scale=0.9))
    call = watch(model)
    p = torch.softmax(0.9 * q[0] @ k[0].mT, -1)
    assert torch.allclose(call.matrix(0), p, atol=1e-6)
    assert torch.allclose(
        call.measured(["temperature"])["temperature"][0],
        (0.9 * q[0] @ k[0].mT).flatten(1).std(correction=0, dim=1).reciprocal(),
        rtol=1e-4,
    )


class Calls(nn.Module):
    """A module that runs a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self):
        return self.function()


def watch(model, *inputs, **options):
    with attention_calls(model) as calls:
        model(*inputs, **options)
    assert len(calls) == 1
    return calls[0]


def masks():
    inside = torch.ones(12, 12, dtype=torch.bool).tril().triu(-3)
    added = torch.randn(2, 3, 12, 12)
    smallest = torch.zeros(2, 1, 1, 12)
    smallest[0, ..., 8:] = torch.finfo(torch.float32).min
    return {"window": inside, "added": added, "smallest": smallest}


@pytest.mark.parametrize("name", masks())
def test_masks_of_any_kind(name):
    q, k, v = torch.randn(3, 2, 3, 12, 8).unbind()
    mask = masks()[name]
    call = watch(Calls(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
    added = torch.where(mask, 0, -torch.inf) if mask.dtype == torch.bool else mask
    p = torch.softmax(q @ k.mT / 8**0.5 + added, -1)[0]
    kept = call.tokens[0]
    assert kept.sum() == (8 if name == "smallest" else 12)
    p = p[:, kept][:, :, kept]
    assert torch.allclose(call.matrix(0), p, atol=1e-6)
    measured = call.measured(["entropy", "column_bias"])
    assert torch.allclose(measured["entropy"][0], instruments.entropy(p), atol=1e-5)
    assert torch.allclose(measured["column_bias"][0], instruments.column_bias(p), atol=1e-5)


def test_causal_attention_over_more_keys_than_queries_is_aligned_as_torch_does():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    call = watch(Calls(lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True)))
    visible = torch.ones(5, 9, dtype=torch.bool).tril()
    p = (q @ k.mT / 8**0.5).masked_fill(~visible, -torch.inf).softmax(-1)[0]
    assert torch.allclose(call.matrix(0), p[..., :5], atol=1e-6)  # nobody sees the last four


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_multihead_attention_of_torch(need_weights, extra):
    options = {"add_bias_kv": True, "add_zero_attn": True} if extra else {}
    model = nn.MultiheadAttention(32, 4, batch_first=True, **options)
    x = torch.randn(2, 10, 32)
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[0, 7:] = True
    call = watch(model, x, x, x, key_padding_mask=padding, need_weights=need_weights)
    _, weights = model(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    p = weights[0][:, call.tokens[0]][:, :, call.keys[0]]
    assert p.shape == (4, 10 if extra else 7, 9 if extra else 7)
    assert torch.allclose(call.matrix(0), p, atol=1e-6)
    assert_measures_equal(call, p.detach())


def test_multihead_attention_with_a_causal_mask_and_other_keys():
    model = nn.MultiheadAttention(32, 4, kdim=16, vdim=16)
    call = watch(model, torch.randn(6, 3, 32), torch.randn(9, 3, 16), torch.randn(9, 3, 16))
    assert call.q.shape == (1, 4, 6, 8) and call.k.shape == (1, 4, 9, 8)
    model, x = nn.MultiheadAttention(32, 4), torch.randn(6, 3, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    assert watch(model, x, x, x, attn_mask=mask, is_causal=True).is_causal


@pytest.mark.parametrize("causal", [False, True])
def test_lln_attention(causal):
    options = {"causal": True, "statistics": "running"} if causal else {}
    core = LLNAttention(4, 8, num_kv_heads=2, normalize_keys=not causal, **options).eval()
    q, k = torch.randn(2, 4, 11, 8), torch.randn(2, 2, 11, 8)
    key_mask = None if causal else torch.arange(11) < torch.tensor([[8], [11]])
    call = watch(core, q, k, k, key_mask, key_mask)
    kept = 11 if causal else 8
    p = core.attention_matrix(q, k, key_mask, key_mask)[0, :, :kept, :kept]
    assert (call.kernel, call.is_causal) == ("lln", causal)
    assert torch.allclose(call.matrix(0), p, atol=1e-5)
    assert_measures_equal(call, p)
    alpha, beta = core.statistics(q, k, key_mask=key_mask, query_mask=key_mask, is_causal=causal)
    assert torch.equal(call.alpha, alpha[:1]) and torch.equal(call.beta, core.far_beta(beta[:1]))
    _, k_far = core.far_inputs(q, k, beta.expand(2, -1), key_mask)
    assert torch.equal(call.k, k_far[:1])


def test_lln_as_a_function_and_as_the_layer_of_an_encoder():
    q, k, v = torch.randn(3, 2, 3, 12, 8).unbind()
    call = watch(Calls(lambda: functional.attention(q, k, v, alpha=2.0, beta=1.5)))
    assert call.alpha.tolist() == [[2.0] * 3] and call.beta.tolist() == [[1.5] * 3]
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    layer.self_attn = LLNMultiheadAttention(32, 4, batch_first=True)
    assert watch(layer, torch.randn(2, 10, 32)).module == "self_attn"


@pytest.mark.parametrize("options", [{}, {"mix": "learned"}])
def test_shares_of_the_two_branches(options):
    core = LLNAttention(2, 8, near=4, **options)
    q, k, v = torch.randn(3, 1, 2, 10, 8).unbind()
    if core.mix_logit is not None:
        nn.init.constant_(core.mix_logit, 1.0)
    weight = torch.tensor(1.0).sigmoid() if core.mix_logit is not None else 0.5
    call = watch(core, q, k, v)
    whole = LLNAttention(2, 8)(q, k, v).norm(dim=(-2, -1))
    blocks = [slice(0, 4), slice(4, 8), slice(8, 10)]
    local = torch.cat(
        [F.scaled_dot_product_attention(q[:, :, b], k[:, :, b], v[:, :, b]) for b in blocks], 2
    ).norm(dim=(-2, -1))
    expected = weight * whole / (weight * whole + (1 - weight) * local)
    assert torch.allclose(call.lln_share(), expected, atol=1e-5)


def test_lln_registered_with_transformers():
    """What a model uses decides, not the name under which it was registered."""
    from transformers import AttentionInterface

    def lln_attention(module, q, k, v, attention_mask, **options):
        return functional.attention(q, k, v, alpha=2.0, beta=2.0).transpose(1, 2), None

    def unknown(module, q, k, v, attention_mask, **options):
        return v.transpose(1, 2), None

    model = models.build("roberta").eval()
    for name, function in (("lln_test", lln_attention), ("values_only", unknown)):
        AttentionInterface.register(name, function)
        model.config._attn_implementation = name
        try:
            with torch.no_grad(), attention_calls(model) as calls:
                model(torch.randint(5, 100, (2, 20)))
        finally:
            AttentionInterface._global_mapping.pop(name)
        assert [call.kernel for call in calls] == ["lln" if function is lln_attention else name] * 2
    assert calls[0].measured(["entropy"])["entropy"].isnan().all()
    assert (calls[0].deviations()[0] > 0).all()
    with pytest.raises(ValueError, match="the weights of 'values_only' are not known"):
        calls[0].matrix(0)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("mechanism", ["softmax", "performer", "linformer", "lln_diag"])
def test_mechanisms_put_into_a_transformers_model(mechanism, padded):
    """Their masks have a form of their own, [B, 0] where nothing is padded."""
    import lln.hf

    model = models.build("roberta").eval()
    options = {} if mechanism == "softmax" else {"max_length": 20}
    if mechanism == "linformer":
        options["rank"] = 8
    lln.hf.replace(model, mechanism, quiet=True, **options)
    mask = torch.ones(2, 20, dtype=torch.long)
    if padded:
        mask[0, 15:] = 0
    with torch.no_grad(), attention_calls(model) as calls:
        model(torch.randint(5, 100, (2, 20)), attention_mask=mask)
    kernel = {"softmax": "softmax", "lln_diag": "lln"}.get(mechanism, mechanism)
    assert [call.kernel for call in calls] == [kernel] * 2
    for call in calls:
        expected = mask[:1].bool() if padded else None
        seen = call.key_mask
        assert seen is None if expected is None else torch.equal(seen, expected)


def everything_that_is_watched():
    interface = transformers.AttentionInterface
    return (
        dict(IMPLEMENTATIONS),
        {name: interface.__dict__.get(name) for name in ("get_interface", "__getitem__")},
        interface.get_interface,
        dict(torch.nn.modules.module._global_forward_hooks),
        dict(torch.nn.modules.module._global_forward_pre_hooks),
        bool(torch.nn.modules.module._has_any_global_hook()),  # of which torch.compile warns
        torch.overrides._get_current_function_mode_stack(),
    )


def test_everything_is_restored_after_an_exception():
    before = everything_that_is_watched()
    with pytest.raises(RuntimeError, match="inside"), attention_calls(nn.Identity()):
        assert everything_that_is_watched() != before
        raise RuntimeError("inside")
    assert everything_that_is_watched() == before
