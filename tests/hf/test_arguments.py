"""What models hand to an attention function is served, refused, or known to say nothing new."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import transformers as hf

import lln.hf
from lln.hf.packing import LENGTHS
from lln.hf.refusing import LEFT_OUT_BY_SDPA, REFUSED
from tests.hf.test_families import CONSTANTS, NARROW, PICTURE, batch, hidden, model_of
from tests.hf.tiny import ENDLESS, TEXT, VOCABULARY, make, padded, run, text

pytestmark = pytest.mark.filterwarnings("ignore")  # of configurations made so small
# Arguments of models that say nothing that the mask and the tensors do not say.
HARMLESS = {
    *("query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal"),
    *("position_ids", "use_cache", "output_attentions"),
    *("max_length_q", "max_length_k", "deterministic"),  # of flash attention's kernels
    *LENGTHS,  # of packed sequences, which are taken apart first
}
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def handed_on(source: str) -> set[str]:
    """Names of the arguments with which a file calls its attention function."""
    found: set[str] = set()
    for rest in source.split("= attention_interface(")[1:]:
        call = ast.parse(f"f({rest[: closing(rest)]})", mode="eval").body
        assert isinstance(call, ast.Call)
        found |= {word.arg for word in call.keywords if word.arg}
    return found


def closing(text: str) -> int:
    """Where the bracket ends in which a text begins."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return place
    raise AssertionError("the bracket is never closed")


def test_every_argument_of_every_model_is_known():
    """Of the installed transformers; a new one has to be read before it is entered."""
    found: set[str] = set()
    for path in (Path(hf.__file__).parent / "models").glob("*/modeling_*.py"):
        found |= handed_on(path.read_text(encoding="utf-8"))
    assert {"scaling", "sliding_window", "position_bias", "indices"} <= found
    assert found <= set(REFUSED) | HARMLESS


VALUES = {"sliding_window": 4, "softcap": 30.0}


def one_layer(**replaced):
    model = make("llama")
    lln.hf.replace(model, "lln", quiet=True, **CONSTANTS, **replaced)
    x = torch.randn(1, 5, 32)
    return model.model.layers[0].self_attn, x, model.model.rotary_emb(x, torch.arange(5)[None])


@pytest.mark.parametrize("argument", REFUSED)
def test_what_changes_the_scores_is_refused(argument):
    layer, x, positions = one_layer()
    value = VALUES.get(argument, torch.zeros(1, 5, 5))
    with pytest.raises(ValueError, match=rf"layer 0 .*{REFUSED[argument]}, {argument}="):
        layer(x, positions, None, **{argument: value})
    layer(x, positions, None, **{argument: None})


def test_one_sequence_is_not_packed():
    layer, x, positions = one_layer()
    expected = layer(x, positions, None)[0]
    assert torch.equal(layer(x, positions, None, cu_seq_lens_q=torch.tensor([0, 5]))[0], expected)


@pytest.mark.parametrize("argument", LEFT_OUT_BY_SDPA)
def test_softmax_beside_lln_leaves_nothing_out(argument):
    """transformers' function for plain softmax would ignore these."""
    layer, x, positions = one_layer(layers=[1])
    with pytest.raises(ValueError, match=rf"LlamaAttention asks for {REFUSED[argument]}"):
        layer(x, positions, None, **{argument: torch.zeros(1, 5, 5)})


@pytest.mark.parametrize(
    "flag", ["use_relative_position_bias", "use_shared_relative_position_bias"]
)
def test_a_bias_of_relative_positions_is_refused_in_its_layer(flag):
    """BEiT adds it to the mask."""
    pictures = {"pixel_values": torch.randn(2, 3, 32, 32)}
    model = model_of("beit", {**PICTURE, flag: True})
    before = hidden(model, **pictures)
    undo = lln.hf.replace(model, "lln", quiet=True)
    with pytest.raises(ValueError, match=r"layer 0 .*a bias of relative positions.*the config"):
        hidden(model, **pictures)
    undo()
    assert torch.equal(hidden(model, **pictures), before)


def test_the_text_tower_of_clip_is_causal():
    """Its layers say is_causal=False; the model around them asks for a causal mask."""
    config = hf.CLIPTextConfig(**TEXT, projection_dim=32, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = hf.CLIPTextModel(config).eval()
    lln.hf.replace(model, "lln_diag", near=4, quiet=True)
    lln.hf.calibrate(model, [batch()])
    ids = text(2, 12)
    other = torch.cat([ids[:, :8], text(2, 4, seed=5)], 1)
    first, second = hidden(model, input_ids=ids), hidden(model, input_ids=other)
    torch.testing.assert_close(first[:, :8], second[:, :8], rtol=1e-4, atol=1e-4)
    assert not first[:, 8:].allclose(second[:, 8:])


def test_pictures_of_clip_are_not_causal():
    model = model_of("clip_vision_model", PICTURE)
    lln.hf.replace(model, "lln", quiet=True)
    kinds = [core.calibration.kind for core in model.modules() if lln.hf.cores.calibration_of(core)]
    assert (
        set(kinds) == {"sample"} and hidden(model, pixel_values=torch.randn(1, 3, 32, 32)).ndim == 3
    )


def deepseek():
    """Latent attention: the cache holds something else than keys, and heads are of two parts."""
    config = hf.DeepseekV3Config(
        **{**TEXT, "num_key_value_heads": 4, **ENDLESS},
        q_lora_rank=None,
        kv_lora_rank=8,
        v_head_dim=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=2,
    )
    torch.manual_seed(0)
    return hf.DeepseekV3ForCausalLM(config).eval()


def test_latent_attention_generates():
    model = deepseek()
    lln.hf.replace(model, "lln_diag", near=4, quiet=True)
    lln.hf.calibrate(model, [{"input_ids": text(4, 30, seed=5)}], method="entropy")
    core = model.model.layers[0].self_attn.lln
    assert core.head_dim == 12 and core.scale == 12**-0.5
    prompt = padded(text(2, 9), 3, "left")
    expected = model.generate(**prompt, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(**prompt, **GREEDY), expected)


def test_layers_that_attend_to_the_keys_of_another_generate():
    """Gemma 3n: the last two layers have no keys of their own."""
    config = hf.Gemma3nTextConfig(
        **{**NARROW, "num_hidden_layers": 4, "intermediate_size": [48] * 4, **ENDLESS},
        layer_types=["full_attention"] * 4,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
    )
    torch.manual_seed(0)
    model = hf.Gemma3nForCausalLM(config).eval()
    lln.hf.replace(model, "lln", quiet=True, **CONSTANTS)
    out = model.generate(text(2, 9), **GREEDY, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(text(2, 9), **GREEDY, use_cache=False))
    cache = out.past_key_values
    # transformers 5.23 has cache layers, which stay empty, for those without keys, too
    states = [isinstance(layer, lln.hf.StateLayer) for layer in cache.layers]
    assert states[:2] == [True, False] and not any(states[2:])
    cache.layers[1] = lln.hf.StateLayer()
    cache.reset()
    with pytest.raises(ValueError, match=r"layer 2 .* keys of another layer"):
        run(model, input_ids=text(2, 3), past_key_values=cache)


def test_a_layer_of_other_sizes_than_its_config_says_is_named():
    model = make("llama")
    lln.hf.replace(model, "lln", quiet=True, **CONSTANTS)
    model.model.layers[0].self_attn.lln.head_dim = 16
    with pytest.raises(ValueError, match=r"layer 0 .* 2 key heads of width 8, but its config says"):
        run(model, input_ids=text())


def test_keys_chosen_by_an_indexer_are_named():
    model = make("llama")
    model.model.layers[1].self_attn.indexer = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"layer 1 .*chooses the keys of every query"):
        lln.hf.replace(model, "lln", quiet=True)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_mask_while_a_compiler_traces(family, monkeypatch):
    """transformers looks for packed sequences in positions that it counted itself."""
    model = make(family)
    lln.hf.replace(model, "lln_diag", near=4, quiet=True, **CONSTANTS)
    expected = run(model, input_ids=text(), use_cache=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    got = run(model, input_ids=text(), use_cache=False)
    torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_without_a_mask(family):
    model = make(family)
    lln.hf.replace(model, "lln_diag", near=4, quiet=True, **CONSTANTS)
    model.config.use_cache = False
    expected = run(model, input_ids=text())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, input_ids=text()), expected)
