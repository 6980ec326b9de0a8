"""save_pretrained and load: the choice, its options, the constants, the learned factors."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf

import lln
import lln.hf
from lln.hf import StateLayer
from tests.hf.tiny import DECODERS, HEADS, inputs, make, run, text


def automatic(family: str):
    return getattr(hf, HEADS.get(family, "AutoModelForCausalLM"))


CASES = [
    ("roberta", "lln", {}),
    ("bert", "lln_diag", {"near": 4, "mix": "learned", "method": "entropy", "conv": 5}),
    ("distilbert", "lln_diag", {"statistics": "running", "normalize_keys": True}),
    ("vit", "lln_diag", {"statistics": "fixed", "learn_scale": True}),
    ("gpt2", "lln", {"conv": 4}),
    ("llama", "lln_diag", {"near": 4, "statistics": "running"}),
    ("qwen3", "lln_diag", {"layers": [1]}),
    ("bert", "lln_nearfar", {"near": 4, "feature_map": "learned", "slots": 24}),
    ("bert", "lln_nearfar", {"near": 4, "feature_map": "rotations", "slots": 16}),
    (
        "llama",
        "lln_nearfar",
        {"near": lln.Near(4, overlap=2, sinks=1), "learn_scale": True, "center_keys": True},
    ),
    ("bert", "lln_nearfar", {"near": 4, "feature_map": "hedgehog", "statistics": "fixed"}),
    ("llama", "lln_nearfar", {"near": lln.Near(4, sinks=1), "feature_map": "t2r", "slots": 12}),
    ("llama", "lln_nearfar", {"near": 4, "feature_map": "elu", "statistics": "running"}),
    ("roberta", "performer", {}),
    ("roberta", "hedgehog", {"layers": [0]}),
    ("roberta", "linformer", {"rank": 8, "max_length": 40}),
    ("roberta", "reformer", {"chunk": 8}),
    ("vit", "longformer", {"layers": [1]}),
]


@pytest.mark.parametrize(("family", "name", "options"), CASES, ids=lambda x: str(x)[:40])
def test_round_trip(family, name, options, tmp_path):
    model = make(family)
    lln.hf.replace(model, name, quiet=True, **options)
    if "statistics" in options or family in DECODERS:
        lln.hf.calibrate(model, [inputs(family)], method="variance")
    for label, parameter in model.named_parameters():
        if ".lln." in label:
            parameter.data.add_(torch.rand_like(parameter))
    model.save_pretrained(tmp_path)
    loaded = lln.hf.load(tmp_path, automatic(family))
    assert type(loaded) is type(model) and not loaded.training
    assert loaded.config._attn_implementation == model.config._attn_implementation
    assert torch.equal(run(loaded, **inputs(family)), run(model, **inputs(family)))
    expected, got = model.state_dict(), loaded.state_dict()
    assert got.keys() == expected.keys()
    loaded.save_pretrained(tmp_path / "again")
    again = lln.hf.load(tmp_path / "again", automatic(family))
    assert torch.equal(run(again, **inputs(family)), run(model, **inputs(family)))


def test_a_loaded_decoder_generates_from_its_state(tmp_path):
    model = make("llama")
    lln.hf.replace(model, "lln_diag", near=4, quiet=True)
    lln.hf.calibrate(model, [{"input_ids": text()}])
    model.save_pretrained(tmp_path)
    loaded = lln.hf.load(tmp_path, hf.AutoModelForCausalLM)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    expected, got = (network.generate(text(), **options) for network in (model, loaded))
    assert torch.equal(got.sequences, expected.sequences)
    assert isinstance(got.past_key_values.layers[0], StateLayer)


def test_plain_from_pretrained_does_not_fall_back_silently(tmp_path):
    model = make("roberta")
    before = run(model, **inputs("roberta"))
    undo = lln.hf.replace(model, "lln", quiet=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lln\.hf\.load"):
        hf.AutoModelForMaskedLM.from_pretrained(tmp_path)
    softmax = hf.AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(run(softmax, **inputs("roberta")), before)
    undo()
    model.save_pretrained(tmp_path)
    plain = hf.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(run(plain, **inputs("roberta")), before)


def test_half_precision_leaves_the_constants_exact(tmp_path):
    model = make("llama")
    lln.hf.replace(model, "lln", quiet=True)
    lln.hf.calibrate(model, [{"input_ids": text()}])
    model.save_pretrained(tmp_path)
    loaded = lln.hf.load(tmp_path, hf.AutoModelForCausalLM, dtype=torch.bfloat16)
    layers = [network.model.layers[0].self_attn for network in (model, loaded)]
    assert layers[1].q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(layers[0].lln.scales()[0], layers[1].lln.scales()[0])


def test_another_head_on_the_same_body(tmp_path):
    """Pre-training, then fine-tuning: the body's constants come along."""
    model = make("roberta")
    lln.hf.replace(model, "lln", statistics="fixed", learn_scale=True, quiet=True)
    lln.hf.calibrate(model, [{"input_ids": text()}])
    model.save_pretrained(tmp_path)
    body = lln.hf.load(tmp_path, hf.AutoModel)
    classifier = lln.hf.load(tmp_path, hf.AutoModelForSequenceClassification, num_labels=3)
    assert run(classifier, input_ids=text()).shape == (3, 3)
    with torch.no_grad():
        expected = model(text(), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(run(body, input_ids=text()), expected)


def test_a_fitted_line_survives(tmp_path):
    line = lln.moments.MomentFit(a=0.2, b=-0.4, source="by hand")
    model = make("roberta")
    lln.hf.replace(model, "lln", method=line, quiet=True)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["lln"]
    assert stored[0]["options"]["method"]["a"] == 0.2
    loaded = lln.hf.load(tmp_path, hf.AutoModelForMaskedLM)
    assert torch.equal(run(loaded, input_ids=text()), run(model, input_ids=text()))


def test_two_mechanisms_survive(tmp_path):
    model = make("roberta")
    lln.hf.replace(model, "lln", layers=[0], quiet=True)
    lln.hf.replace(model, "elu", layers=[1], quiet=True)
    model.save_pretrained(tmp_path)
    loaded = lln.hf.load(tmp_path, hf.RobertaForMaskedLM)
    assert torch.equal(run(loaded, input_ids=text()), run(model, input_ids=text()))


def test_shards_and_devices(tmp_path):
    model = make("llama")
    lln.hf.replace(model, "lln", quiet=True)
    lln.hf.calibrate(model, [{"input_ids": text()}])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = lln.hf.load(tmp_path, hf.AutoModelForCausalLM, device_map="cpu")
    assert torch.equal(run(loaded, input_ids=text()), run(model, input_ids=text()))


def test_a_folder_without_replacement_is_named(tmp_path):
    make("roberta").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"was not saved after lln.hf.replace"):
        lln.hf.load(tmp_path, hf.AutoModelForMaskedLM)


def test_pickled_weights_are_refused(tmp_path):
    model = make("roberta")
    lln.hf.replace(model, "lln", quiet=True)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin, a pickle .*save_pretrained"):
        lln.hf.load(tmp_path, hf.AutoModelForMaskedLM)
    with pytest.raises(ValueError, match="use_safetensors=False would let files"):
        lln.hf.load(tmp_path, hf.AutoModelForMaskedLM, use_safetensors=False)


def test_code_beside_the_weights_is_not_run(tmp_path, monkeypatch):
    """transformers would ask at the keyboard, where somebody may say yes."""
    model = make("roberta")
    lln.hf.replace(model, "lln", quiet=True)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "another", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('this code was run')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="trust_remote_code"):
        lln.hf.load(tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code=True would let files"):
        lln.hf.load(tmp_path, trust_remote_code=True)
