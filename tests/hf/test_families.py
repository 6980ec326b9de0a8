"""LLN+Diag in tiny models of many families: by name where they are encoders, else by replace."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import lln.hf
from tests.hf.tiny import BOTH_WAYS, SIZES, TEXT, VOCABULARY, text

pytestmark = pytest.mark.filterwarnings("ignore")  # of configurations made so small

GROUPED = {**TEXT, "num_key_value_heads": 2}
NARROW = {**GROUPED, "head_dim": 8}
PICTURE = {**SIZES, "image_size": 32, "patch_size": 8}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
SOUND = {
    **SIZES,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
ENCODERS = {
    **dict.fromkeys(
        ("camembert", "xlm-roberta", "ernie", "data2vec-text", "layoutlm", "nomic_bert"), TEXT
    ),
    **{key: {**TEXT, "embedding_size": 32} for key in ("electra", "albert")},
    "esm": {**TEXT, "mask_token_id": 3},
}
PICTURES = ("deit", "dinov2", "beit", "vit_mae", "siglip_vision_model", "clip_vision_model")
DECODERS = {
    **dict.fromkeys(("phi", "gpt_neox"), TEXT),
    **dict.fromkeys(("phi3", "olmo2", "granite", "starcoder2", "stablelm"), GROUPED),
    **dict.fromkeys(("cohere", "smollm3", "nemotron"), GROUPED),
    **dict.fromkeys(("gemma", "glm", "helium"), NARROW),
    "mistral": {**GROUPED, "sliding_window": None},
    "mixtral": {**GROUPED, "num_local_experts": 2},
    "opt": {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_bigcode": OLD,
}
WINDOWS = {
    "gemma3_text": {**NARROW, "layer_types": ["sliding_attention", "full_attention"]},
    "modernbert": {
        **TEXT,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
    },
}
CONSTANTS = {"statistics": "fixed", "alpha": 2.0, "beta": 2.0}


def model_of(family, options, **arguments):
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(family, **options)
    return hf.AutoModel.from_config(config, **arguments).eval()


def batch():
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 14:] = 0
    return {"input_ids": text(2, 20), "attention_mask": mask}


def hidden(model, **inputs):
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_by_name_and_by_replace(family):
    lln.hf.register()
    options = ENCODERS[family]
    named = model_of(family, options, attn_implementation="lln_diag")
    named.config.lln_options = {"near": 8}
    replaced = model_of(family, options)
    before = hidden(replaced, **batch())
    lln.hf.replace(replaced, "lln_diag", quiet=True, near=8)
    out = hidden(replaced, **batch())
    torch.testing.assert_close(out, hidden(named, **batch()))
    assert not out.allclose(before)
    short = {name: x[1:, :14] for name, x in batch().items()}
    torch.testing.assert_close(out[1:, :14], hidden(replaced, **short), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", PICTURES)
def test_pictures(family):
    lln.hf.register()
    model = model_of(family, PICTURE, attn_implementation="lln_diag")
    assert hidden(model, pixel_values=torch.randn(2, 3, 32, 32)).isfinite().all()


def test_sound_and_moving_pictures():
    lln.hf.register()
    model = model_of("wav2vec2", SOUND, attn_implementation="lln_diag")
    assert hidden(model, input_values=torch.randn(2, 800)).isfinite().all()
    frames = {**PICTURE, "num_frames": 4, "tubelet_size": 2}
    model = model_of("videomae", frames, attn_implementation="lln_diag")
    assert hidden(model, pixel_values=torch.randn(2, 4, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_are_calibrated_and_causal(family):
    model = model_of(family, DECODERS[family])
    lln.hf.replace(model, "lln_diag", quiet=True, near=8)
    lln.hf.calibrate(model, [batch()])
    ids = text(2, 20)
    out = hidden(model, input_ids=ids, use_cache=False)
    other = torch.cat([ids[:, :12], text(2, 8, seed=5)], 1)
    changed = hidden(model, input_ids=other, use_cache=False)
    torch.testing.assert_close(changed[:, :12], out[:, :12], rtol=1e-4, atol=1e-4)
    assert not changed[:, 12:].allclose(out[:, 12:])


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_encoders_with_a_decoder(family):
    own = {"max_position_embeddings": 64}
    inputs = {**batch(), "decoder_input_ids": text(2, 10)}
    if family == "whisper":
        own = {"max_source_positions": 50, "max_target_positions": 32, "num_mel_bins": 8}
        own |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        inputs = {"input_features": torch.randn(2, 8, 100), "decoder_input_ids": text(2, 10)}
    model = model_of(family, {**BOTH_WAYS, **own})
    lln.hf.replace(model, "lln_diag", quiet=True, near=8)
    lln.hf.calibrate(model, [inputs])
    assert hidden(model, **inputs).isfinite().all()


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_keep_softmax(family):
    model = model_of(family, WINDOWS[family])
    done = lln.hf.replace(model, "lln_diag", layers="global", quiet=True, **CONSTANTS)
    assert len(done.layers) == 1 and hidden(model, **batch()).isfinite().all()


@pytest.mark.parametrize("family", ["mpnet", "roformer", "convbert", "deberta-v2", "bloom"])
def test_what_has_an_attention_of_its_own_is_refused(family):
    options = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}
    model = model_of(family, options if family == "bloom" else TEXT)
    with pytest.raises(ValueError, match="no layer that goes through transformers' attention"):
        lln.hf.replace(model, "lln_diag")
