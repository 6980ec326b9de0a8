"""replace: which layers, what is attached, the undo, whole modules, training."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import transformers as hf

import lln
import lln.hf
from lln.hf.cores import calibration_of
from lln.hf.replace import replacements_of
from tests.hf.tiny import (
    CONFIGS,
    DECODERS,
    ENCODERS,
    ENDLESS,
    TEXT,
    inputs,
    make,
    padded,
    run,
    text,
)

FAMILIES = [*ENCODERS, "vit", *DECODERS]


def replaced(family: str, name: str = "lln_diag", **options):
    """A model with another attention, calibrated if it has to be."""
    model = make(family)
    undo = lln.hf.replace(model, name, quiet=True, **options)
    if family in DECODERS and name in ("lln", "lln_diag"):
        lln.hf.calibrate(model, [{"input_ids": text(4, 30, seed=5)}])
    return model, undo


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_is_bit_identical(family):
    model = make(family)
    before, names = run(model, **inputs(family)), list(model.state_dict())
    saved = model.config.to_dict()
    undo = lln.hf.replace(model, "lln_diag", near=4, quiet=True)
    if family in DECODERS:
        lln.hf.calibrate(model, [inputs(family)])
    during = run(model, **inputs(family))
    assert during.isfinite().all() and (during - before).abs().max() > 1e-2
    undo()
    undo()
    assert torch.equal(run(model, **inputs(family)), before)
    assert list(model.state_dict()) == names and model.config.to_dict() == saved
    assert model.config._attn_implementation == "sdpa"


def test_parameter_counts_are_printed_and_returned(capsys):
    model = make("roberta")
    undo = lln.hf.replace(model, "lln_diag", mix="learned")
    assert undo.parameters_after == undo.parameters_before + 2 * 4
    shown = f"{undo.parameters_before:,} -> {undo.parameters_after:,} parameters"
    assert f"lln_diag in 2 of 2 attention layers: {shown}" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["roberta", "llama"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_layers_left_out_keep_softmax(family, side):
    """Replacing layer 1 leaves the output of layer 0 as it was, padding included."""
    model = make(family)
    batch = padded(text(), 5, side)
    real = batch["attention_mask"].bool()

    def after_first() -> torch.Tensor:
        with torch.no_grad():
            return model(**batch, output_hidden_states=True).hidden_states[1][real]

    before, logits = after_first(), run(model, **batch)
    undo = lln.hf.replace(model, "lln", layers=[-1], statistics="fixed", alpha=2, beta=2)
    assert undo.layers == [1] and model.config._attn_implementation == "lln_mixed"
    torch.testing.assert_close(after_first(), before)
    assert (run(model, **batch) - logits)[real].abs().max() > 1e-2
    undo()
    assert torch.equal(run(model, **batch), logits)


def test_two_mechanisms_in_one_model_undone_in_any_order():
    model = make("roberta")
    before = run(model, **inputs("roberta"))
    first = lln.hf.replace(model, "lln", layers=[0], quiet=True)
    alone = run(model, **inputs("roberta"))
    second = lln.hf.replace(model, "performer", layers=[1], quiet=True)
    both = run(model, **inputs("roberta"))
    with pytest.raises(ValueError, match=r"layer 0 .*was replaced already; undo that first"):
        lln.hf.replace(model, "elu", layers=[0])
    assert torch.equal(run(model, **inputs("roberta")), both)
    second()
    assert torch.equal(run(model, **inputs("roberta")), alone)
    first()
    assert torch.equal(run(model, **inputs("roberta")), before)


def test_a_model_made_from_the_same_config_is_left_alone():
    config = CONFIGS["roberta"]()
    one, other = (hf.RobertaForMaskedLM(config).eval() for _ in range(2))
    before = run(other, **inputs("roberta"))
    lln.hf.replace(one, "lln", quiet=True)
    assert one.config is not other.config and one.roberta.config is one.config
    assert torch.equal(run(other, **inputs("roberta")), before)


def test_a_copy_of_a_model_works_by_itself():
    model, undo = replaced("llama")
    twin = copy.deepcopy(model)
    expected = run(model, **inputs("llama"))
    tokens = model.generate(text(), max_new_tokens=4, do_sample=False)
    undo()
    assert torch.equal(run(twin, **inputs("llama")), expected)
    assert torch.equal(twin.generate(text(), max_new_tokens=4, do_sample=False), tokens)
    replacements_of(twin).current[0]()
    assert torch.equal(run(twin, **inputs("llama")), run(model, **inputs("llama")))


@pytest.mark.parametrize(
    "name", ["reformer", "longformer", "transformer_ls", "tnn", "rebased", "polaformer"]
)
@pytest.mark.parametrize("family", ["roberta", "distilbert"])
def test_whole_modules_are_swapped(family, name):
    model = make(family)
    before = run(model, **inputs(family))
    undo = lln.hf.replace(model, name, quiet=True)
    out = run(model, **inputs(family))
    assert out.isfinite().all() and (out - before).abs().max() > 1e-3
    ids = text(2, 10)
    right, left = padded(ids, 7, "right"), padded(ids, 7, "left")
    place = torch.arange(17)
    right["position_ids"] = place.expand(2, -1)
    left["position_ids"] = (place - 7).clamp(min=0).expand(2, -1)
    alone = run(model, input_ids=ids, position_ids=place[:10].expand(2, -1))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(run(model, **right)[:, :10], alone, **close)
    torch.testing.assert_close(run(model, **left)[:, 7:], alone, **close)
    undo()
    assert torch.equal(run(model, **inputs(family)), before)


def test_a_swapped_module_has_one_output_projection():
    """RoBERTa's lies outside of the module, DistilBERT's inside."""
    roberta, distilbert = make("roberta"), make("distilbert")
    lln.hf.replace(roberta, "reformer", quiet=True)
    lln.hf.replace(distilbert, "reformer", quiet=True)
    assert isinstance(roberta.roberta.encoder.layer[0].attention.self.mixer.out, torch.nn.Identity)
    assert isinstance(
        distilbert.distilbert.transformer.layer[0].attention.mixer.out, torch.nn.Linear
    )


@pytest.mark.parametrize("name", ["elu", "hedgehog", "linformer", "nystromformer", "rfa"])
def test_cores_with_and_without_weights(name):
    model = make("roberta")
    options = {"linformer": {"rank": 8}, "nystromformer": {"landmarks": 4}}.get(name, {})
    lln.hf.replace(model, name, quiet=True, **options).__str__()
    model.train()
    batch = padded(text(), 4, "right")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    for label, parameter in model.named_parameters():
        if ".lln." in label:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), label


def test_causal_cores_of_the_zoo_generate_with_and_without_cache():
    model, _ = replaced("llama", "elu")
    ids = text(2, 9)
    greedy = {"max_new_tokens": 6, "do_sample": False}
    with_cache = model.generate(ids, **greedy)
    assert torch.equal(with_cache, model.generate(ids, **greedy, use_cache=False))
    future = ids.clone()
    future[:, -1] = 5
    assert torch.equal(run(model, input_ids=ids)[:, :-1], run(model, input_ids=future)[:, :-1])


def test_swapped_modules_refuse_what_they_cannot_do():
    model, _ = replaced("llama", "rebased")
    assert run(model, input_ids=text()).isfinite().all()
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(text(), max_new_tokens=3)
    assert model.generate(text(), max_new_tokens=3, use_cache=False).shape == (3, 23)


def test_statistics_follow_the_task():
    encoder, _ = replaced("roberta")
    found = [calibration_of(module) for module in encoder.modules()]
    assert {calibration.kind for calibration in found if calibration} == {"sample"}
    decoder, _ = replaced("llama")
    core = decoder.model.layers[0].self_attn.lln
    assert (
        core.calibration.kind == "fixed"
        and core.num_kv_heads == 2
        and core.scales()[0].shape == (4,)
    )


def test_running_statistics_learn_in_training_and_freeze_in_evaluation():
    model = make("gpt2")
    lln.hf.replace(model, "lln", statistics="running", quiet=True)
    with pytest.raises(ValueError, match=r"layer 0 \(transformer.h.0.attn\) of GPT2LMHeadModel"):
        run(model, input_ids=text())
    model.train()
    for _ in range(3):
        model(input_ids=text())
    model.eval()
    core = model.transformer.h[0].attn.lln
    assert core.statistics.batches == 3
    alpha = core.scales()[0].clone()
    run(model, input_ids=text())
    assert torch.equal(core.scales()[0], alpha) and not torch.allclose(alpha, alpha[:1])


@pytest.mark.parametrize("family", ["roberta", "llama"])
def test_gradient_checkpointing_changes_no_gradient(family):
    gradients = []
    for checkpointing in (False, True):
        model, _ = replaced(family, "lln_diag", near=4, statistics="running")
        model.config.use_cache = False
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = text()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert (plain is None) == (again is None)
        if plain is not None:
            torch.testing.assert_close(again, plain)


@pytest.mark.slow
def test_compiled_without_a_graph_break():
    model = make("llama")
    lln.hf.replace(model, "lln_diag", near=4, alpha=2, beta=2, quiet=True)
    model.config.use_cache = False
    batch = padded(text(), 4, "left")
    expected = run(model, **batch)
    got = run(torch.compile(model, backend="eager", fullgraph=True), **batch)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[real], expected[real])


def test_weights_travel_by_state_dict():
    model, _ = replaced("llama", mix="learned", learn_scale=True)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = make("llama")
    lln.hf.replace(other, "lln_diag", mix="learned", learn_scale=True, quiet=True)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(run(other, **inputs("llama")), run(model, **inputs("llama")))


def test_half_precision_keeps_the_constants_exact():
    model, _ = replaced("llama")
    alpha = model.model.layers[0].self_attn.lln.scales()[0].clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.model.layers[0].self_attn.lln.scales()[0], alpha)
    assert run(model, input_ids=text()).isfinite().all()


def test_what_replace_refuses():
    model = make("roberta")
    for arguments, message in (
        ({"attention": "lnl"}, "did you mean 'lln'"),
        ({"attention": "flash"}, "attention and feed-forward network together"),
        ({"layers": [2]}, "layers=2 does not exist; the model has 2"),
        ({"layers": []}, "layers is empty"),
        ({"attention": "lln", "near": 4}, "near= is not an option"),
        ({"dropout": 0.1}, "dropout= is decided by the model"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            lln.hf.replace(model, **arguments)
    assert model.config._attn_implementation == "sdpa" and "lln" not in model.config.to_dict()
    with pytest.raises(ValueError, match=r"'linformer' has no causal form.*choose one that has"):
        lln.hf.replace(make("gpt2"), "linformer")


def test_a_model_outside_of_the_interface_is_named():
    config = hf.FNetConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=48, vocab_size=99)
    with pytest.raises(ValueError, match="FNetModel has no layer"):
        lln.hf.replace(hf.FNetModel(config))


def test_encoder_decoder_models_keep_softmax_across():
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
        forced_eos_token_id=None,
        eos_token_id=None,
    )
    model = hf.BartForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() == 2 else 1)
    undo = lln.hf.replace(model, "lln_diag", near=4, quiet=True)
    assert (
        undo.layers == [0, 1] and "lln" not in model.model.decoder.layers[0].encoder_attn._modules
    )
    batch = padded(text(2, 9), 3, "right")
    lln.hf.calibrate(model, [{**batch, "decoder_input_ids": text(2, 9)}])
    options = {"max_new_tokens": 8, "do_sample": False, "decoder_start_token_id": 2}
    with_state = model.generate(**batch, **options)
    assert torch.equal(with_state, model.generate(**batch, **options, use_cache=False))


def gemma2(kinds=("full_attention", "full_attention")):
    """Scores are capped, which transformers' eager attention alone can do on a CPU."""
    torch.manual_seed(0)
    config = hf.Gemma2Config(
        **{**TEXT, "num_key_value_heads": 2, "head_dim": 8, **ENDLESS},
        layer_types=list(kinds),
        sliding_window=6,
        attn_logit_softcapping=2.0,
    )
    model = hf.Gemma2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() == 2 else 1)
    return model


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@torch.no_grad()
def test_kept_layers_keep_the_implementation_of_the_model(kind, tmp_path):
    model = gemma2((kind, "full_attention"))
    given = [{"input_ids": text()}, padded(text(), 4, "left"), padded(text(), 4, "right")]

    def first_layer(model, batch):
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        return model(**batch, output_hidden_states=True).hidden_states[1][real]

    before = [first_layer(model, batch) for batch in given]
    constants = {"statistics": "fixed", "alpha": 1.5, "beta": 1.5}
    lln.hf.replace(model, "lln_diag", layers=[1], near=4, quiet=True, **constants)
    with pytest.raises(ValueError, match=r"asks for a cap on the scores, softcap=2\.0"):
        run(model, input_ids=text())
    model.model.layers[1].self_attn.attn_logit_softcapping = None  # LLN has none
    for batch, expected in zip(given, before, strict=True):
        torch.testing.assert_close(first_layer(model, batch), expected)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(**given[1], **options)
    assert torch.equal(tokens, model.generate(**given[1], **options, use_cache=False))
    model.save_pretrained(tmp_path)
    again = lln.hf.load(tmp_path, hf.Gemma2ForCausalLM)
    again.model.layers[1].self_attn.attn_logit_softcapping = None
    torch.testing.assert_close(first_layer(again, given[0]), before[0])
