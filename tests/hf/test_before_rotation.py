"""Feature maps that see queries and keys before rotary positions are applied to them."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
import transformers as hf

import lln
import lln.hf
from lln.hf import StateLayer
from lln.hf.rotation import Rotation
from lln.instruments.recording.recorder import attention_calls
from tests.hf import test_families as families
from tests.hf.conversion.loud import loud
from tests.hf.test_copies import COPIES
from tests.hf.test_families import GROUPED, NARROW, WINDOWS, model_of
from tests.hf.test_generate import WAYS, generate, ragged
from tests.hf.tiny import TEXT, make, padded, run, text

pytestmark = pytest.mark.filterwarnings("ignore")  # of configurations made so small

NEAR_FAR = {"near": lln.Near(4, overlap=3, sinks=1), "feature_map": "learned", "slots": 24}
CONSTANTS = {"statistics": "fixed", "alpha": 0.7, "beta": 0.8, "gamma": -1.0}
ROTARY = {
    **{name: families.DECODERS[name] for name in families.DECODERS},
    **WINDOWS,
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": NARROW,
    "persimmon": TEXT,
    "ernie4_5": GROUPED,
    "esm": {**TEXT, "mask_token_id": 3, "position_embedding_type": "rotary"},
}
FIXED = {name: ROTARY.pop(name) for name in ("opt", "gpt_bigcode")}
# By halves, by neighbours, of the first coordinates only, with a scale.
CONVENTIONS = {
    "llama": GROUPED,
    "cohere": GROUPED,
    "glm": NARROW,
    "gpt_neox": {**TEXT, "rotary_pct": 0.5},
    "phi": TEXT,
    "yarn": {
        **GROUPED,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 32,
        },
    },
}


def louder(model):
    """Weights that make attention count, and maps that are no longer those of the start."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".lln.features" in name:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
        elif "norm" in name:
            parameter.data.add_(0.3 * torch.rand_like(parameter))
        elif parameter.dim() == 2:
            parameter.data.mul_(3)
    return model


def ready(family: str = "llama", attention: str = "lln_nearfar", **options):
    """A small decoder, near and far, whose maps see what there was before rotation."""
    model = make(family)
    chosen = {"before_rotation": True, **NEAR_FAR, **options}
    lln.hf.replace(model, attention, quiet=True, **{**CONSTANTS, **chosen})
    return louder(model)


def seen_by(core, model, **inputs):
    """What the feature maps and the near branch of a core are given in one call of its model."""
    seen = {}

    def maps(_, args):
        seen["rotation"] = args[2]
        seen["far"] = args[2](*args[:2]) if args[2] is not None else args[:2]
        seen["near"] = args[:2]

    handle = core.features.register_forward_pre_hook(maps)
    run(model, **inputs)
    handle.remove()
    return seen


@pytest.mark.parametrize("family", CONVENTIONS)
def test_the_maps_see_what_the_projections_gave(family):
    """With positions that are all 0 nothing is rotated: the maps see the same at any position."""
    options = CONVENTIONS[family]
    model = louder(model_of("llama" if family == "yarn" else family, options)).double()
    lln.hf.replace(model, "lln_nearfar", quiet=True, before_rotation=True, **NEAR_FAR, **CONSTANTS)
    core = next(part for part in model.modules() if isinstance(part, lln.nn.LLNAttention))
    mask = torch.ones(2, 12, dtype=torch.long)  # without one equal positions would be packed texts
    batch = {"input_ids": text(2, 12), "attention_mask": mask, "use_cache": False}
    seen = seen_by(core, model, **batch)
    plain = seen_by(core, model, **batch, position_ids=0 * mask)
    scale = plain["rotation"].cos.max()  # of YaRN
    assert (scale > 1.1) == (family == "yarn")
    rotated = plain["rotation"].cos.shape[-1]
    assert (rotated < core.head_dim) == (family in ("glm", "gpt_neox", "phi"))
    for far, near, unrotated in zip(seen["far"], seen["near"], plain["near"], strict=True):
        unrotated = unrotated.clone()
        unrotated[..., :rotated] /= scale
        torch.testing.assert_close(far, unrotated, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(near, unrotated, rtol=0.1)


@pytest.mark.parametrize("part", ["q_proj", "k_proj"])
def test_llamas_projections(part):
    model = ready().double()
    layer, given = model.model.layers[0].self_attn, []
    getattr(layer, part).register_forward_hook(lambda *call: given.append(call[2]))
    seen = seen_by(layer.lln, model, input_ids=text(2, 12))
    wanted = given[0].unflatten(-1, (-1, 8)).transpose(1, 2)
    torch.testing.assert_close(seen["far"][part == "k_proj"], wanted, rtol=1e-5, atol=1e-6)


def test_one_layer_by_hand():
    """Near keys by rotated q and k, far ones by features of unrotated ones."""
    model = ready().double()
    layer, found = model.model.layers[0].self_attn, {}
    core = layer.lln
    for name in "qkv":
        part = getattr(layer, f"{name}_proj")
        part.register_forward_hook(lambda *call, name=name: found.update({name: call[2]}))
    layer.o_proj.register_forward_pre_hook(lambda *call: found.update(out=call[1][0]))
    run(model, input_ids=text(2, 20))
    q, k, v = (found[name].unflatten(-1, (-1, 8)).transpose(1, 2) for name in "qkv")
    cos, sin = model.model.rotary_emb(v, torch.arange(20)[None])
    near = hf.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    expected = lln.attention(
        *near,
        v,
        features=(
            q @ core.features.q_map + core.features.bias[:, None],
            k @ core.features.k_map,
        ),
        is_causal=True,
        alpha=0.7,
        beta=0.8,
        gamma=-1.0,
        near=replace(NEAR_FAR["near"], joint=True),
        impl="reference",
    )
    got = found["out"].unflatten(-1, (-1, 8)).transpose(1, 2)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", [True, False])
def test_where_a_text_begins(before):
    """Without absolute positions a model answers the same 1,000 tokens later."""
    model, ids = ready(before_rotation=before).double(), text(2, 24)
    place = torch.arange(24).expand(2, -1)
    first, later = (run(model, input_ids=ids, position_ids=place + n) for n in (0, 1000))
    close = torch.allclose(later, first, rtol=1e-3, atol=1e-3)
    assert close == before


@pytest.mark.parametrize("family", ROTARY)
def test_families_that_are_served(family):
    model = louder(model_of(family, ROTARY[family]))
    options = {"layers": "global", "quiet": True, **NEAR_FAR, **CONSTANTS}
    done = lln.hf.replace(model, "lln_nearfar", before_rotation=True, **options)
    ids, place = text(2, 20), torch.arange(20).expand(2, -1)
    out = run(model, input_ids=ids)
    if family not in ("modernbert", "esm"):  # which count positions by themselves
        later = run(model, input_ids=ids, position_ids=place + 50)
        torch.testing.assert_close(later, out, rtol=1e-3, atol=1e-3)
    done()
    lln.hf.replace(model, "lln_nearfar", **options)
    assert not torch.allclose(run(model, input_ids=ids), out, rtol=1e-4, atol=1e-4)


REFUSED = {
    **{name: ("does not rotate queries and keys", options) for name, options in FIXED.items()},
    "cohere2": (
        "unrotated anyway; replace it in another call",
        {**GROUPED, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "hunyuan_v1_dense": ("does more to its queries and keys", NARROW),
    "gpt_oss": ("cannot be tried alone", NARROW),
    "deepseek_v3": (
        "does more to its queries and keys",
        {**TEXT, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_are_refused(family):
    message, options = REFUSED[family]
    model = louder(model_of(family, options))
    before = run(model, input_ids=text())
    name = type(model).__name__
    with pytest.raises(ValueError, match=rf"before_rotation=True: layer . .*{name}.*{message}"):
        lln.hf.replace(
            model, "lln_nearfar", layers="global", before_rotation=True, **NEAR_FAR, **CONSTANTS
        )
    assert torch.equal(run(model, input_ids=text()), before)


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("lln_nearfar", {}, "feature_map='identity' has none; give feature_map='learned'"),
        ("elu", {}, "'elu' does not have; choose 'lln_nearfar'"),
        ("nystromformer", {}, "'nystromformer' does not have"),
        (
            "lln_nearfar",
            {"feature_map": "learned", "center_keys": True},
            "center_keys=True.*give center_keys=False",
        ),
    ],
)
def test_options_that_exclude_it(attention, options, message):
    model = model_of("eurobert", GROUPED)
    with pytest.raises(ValueError, match=f"before_rotation=True.*{message}"):
        lln.hf.replace(model, attention, before_rotation=True, **options)
    assert not any("lln" in part._modules for part in model.modules())


def test_a_core_outside_of_its_model():
    core = ready().model.layers[0].self_attn.lln
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    for use in (lambda: core(q, k, v), lambda: core.attention_matrix(q, k)):
        with pytest.raises(ValueError, match=r"before_rotation=True: .* call the model"):
            use()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_padding_changes_nothing(family, side):
    model, ids = ready(family), text(2, 14)
    batch = padded(ids, 6, side)
    real = batch["attention_mask"].bool()
    alone, got = run(model, input_ids=ids), run(model, **batch)
    torch.testing.assert_close(got[real].view_as(alone), alone, rtol=1e-4, atol=1e-4)
    uncounted = run(model, **batch, position_ids=torch.arange(20).expand(2, -1))
    torch.testing.assert_close(uncounted[real].view_as(alone), alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["greedy", "beam"])
@pytest.mark.parametrize("options", [{}, {"attention": "lln_diag", "gamma": None}], ids=str)
def test_generation(options, way):
    model = ready(**options)
    tokens, logits, cache = generate(model, **ragged(), **WAYS[way])
    assert all(isinstance(layer, StateLayer) for layer in cache.layers)
    expected, expected_logits, _ = generate(model, **ragged(), **WAYS[way], use_cache=False)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_a_prompt_in_pieces(chunk):
    model = ready()
    _, whole, _ = generate(model, **ragged(), do_sample=False)
    _, logits, _ = generate(model, **ragged(), do_sample=False, prefill_chunk_size=chunk)
    torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-4)


def test_generation_with_heads_of_softmax():
    model = ready()
    model._lln_replacements.current[0].keep_softmax_heads({0: [1], 1: [0, 3]})
    _, logits, _ = generate(model, **ragged(), do_sample=False)
    _, expected, _ = generate(model, **ragged(), do_sample=False, use_cache=False)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_a_cache_that_keeps_all_keys_is_refused():
    model = ready()
    cache = hf.DynamicCache(config=model.config)
    with pytest.raises(ValueError, match=r"layer 0 .* got 10 keys, .* the last 1: .*own cache"):
        generate(model, input_ids=text(2, 9), do_sample=False, past_key_values=cache)


def test_saved_and_loaded(tmp_path):
    model = ready()
    model.save_pretrained(tmp_path)
    again = lln.hf.load(tmp_path, hf.AutoModelForCausalLM).eval()
    assert again._lln_replacements.current[0].before_rotation
    ids = text(2, 20)
    assert torch.equal(run(again, input_ids=ids), run(model, input_ids=ids))
    plain = ready(before_rotation=False)
    assert "before_rotation" not in plain.config.lln[0]
    assert not torch.allclose(run(plain, input_ids=ids), run(model, input_ids=ids), rtol=0.1)


@pytest.mark.parametrize("way", COPIES)
def test_copies(way):
    model, ids = ready(), text(2, 20)
    twin = COPIES[way](model)
    expected = run(model, input_ids=ids)
    model._lln_replacements.current[0]()
    assert torch.equal(run(twin, input_ids=ids), expected)


def test_the_undo():
    model, ids = make("llama"), text(2, 20)
    before = run(model, input_ids=ids)
    options = {"before_rotation": True, "quiet": True, **NEAR_FAR, **CONSTANTS}
    undo = lln.hf.replace(model, "lln_nearfar", **options)
    layers = [block.self_attn for block in model.model.layers]
    assert all(len(layer._forward_pre_hooks) == 1 for layer in layers)
    undo.keep_softmax([0])
    assert [len(layer._forward_pre_hooks) for layer in layers] == [0, 1]
    undo()
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert torch.equal(run(model, input_ids=ids), before)


def test_gradient_checkpointing():
    gradients = []
    for checkpointing in (False, True):
        model = ready().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(input_ids=text(), labels=text(), use_cache=False).loss.backward()
        gradients.append({name: x.grad for name, x in model.named_parameters()})
    for name, plain in gradients[0].items():
        assert plain is not None and torch.equal(gradients[1][name], plain), name


def test_gradients_reach_the_projections_by_both_branches():
    """The far branch alone (γ → ∞) moves the projections of queries and keys."""
    model = ready()
    for part in model.modules():
        if isinstance(part, lln.nn.LLNAttention):
            part.level.offset = 50.0
    model(input_ids=text(), labels=text()).loss.backward()
    layer = model.model.layers[1].self_attn
    assert layer.q_proj.weight.grad.abs().max() > 0 and layer.k_proj.weight.grad.abs().max() > 0


def test_half_precision():
    model = ready().to(torch.bfloat16)
    assert run(model, input_ids=text()).isfinite().all()
    fresh = make("llama").to(torch.bfloat16)
    lln.hf.replace(fresh, "lln_nearfar", before_rotation=True, quiet=True, **NEAR_FAR, **CONSTANTS)


def test_threads_do_not_see_each_others_positions():
    model = ready()
    batches = [
        {"input_ids": text(1, 20), "position_ids": p + torch.arange(20)[None]} for p in (0, 7)
    ]
    expected = [run(model, **batch) for batch in batches]
    wrong = []

    def work(number: int) -> None:
        for _ in range(20):
            if not torch.equal(run(model, **batches[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_instruments_see_the_unrotated_features():
    model, ids = ready().double(), text(1, 20)
    with attention_calls(model) as calls:
        run(model, input_ids=ids, use_cache=False)
    layer = model.model.layers[0].self_attn
    rotation = {}
    layer.lln.features.register_forward_pre_hook(lambda _, args: rotation.update(of=args[2]))
    outputs = []
    layer.o_proj.register_forward_pre_hook(lambda *call: outputs.append(call[1][0]))
    values = []
    layer.v_proj.register_forward_hook(lambda *call: values.append(call[2]))
    run(model, input_ids=ids, use_cache=False)
    v = values[0].unflatten(-1, (-1, 8)).transpose(1, 2)[0].repeat_interleave(2, 0)
    got = calls[0].matrix(0) @ v
    wanted = outputs[0].unflatten(-1, (-1, 8)).transpose(1, 2)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-8)
    assert isinstance(rotation["of"], Rotation) and calls[0].near_share() is not None


def test_calibration_measures_gamma_with_what_the_maps_see():
    gammas = []
    for before in (True, False):
        model = make("llama")
        lln.hf.replace(
            model, "lln_nearfar", quiet=True, before_rotation=before, method="entropy", **NEAR_FAR
        )
        louder(model)
        lln.hf.calibrate(model, [{"input_ids": text(4, 40)}])
        gammas.append(model.model.layers[0].self_attn.lln.stored_level().clone())
        shifted = {"input_ids": text(4, 40), "position_ids": 500 + torch.arange(40).expand(4, -1)}
        lln.hf.calibrate(model, [shifted])
        again = model.model.layers[0].self_attn.lln.stored_level()
        assert torch.allclose(again, gammas[-1], rtol=1e-3, atol=1e-3) == before
    assert not torch.allclose(*gammas, rtol=1e-3)


@pytest.mark.slow
def test_convert(tmp_path):
    model = loud("llama")
    data = [padded(text(2, 40, seed=seed), 6, "right") for seed in range(6)]
    options = {"before_rotation": True, "near": lln.Near(8, overlap=0), "slots": 16}
    done = lln.hf.convert(
        model, data, options=options, calibration=2, transfer_steps=40, recover_steps=20,
        recover_options={"learning_rate": 2e-4}, held_out=data[-1:],
    )  # fmt: skip
    assert "center_keys" not in done.options and done.options["before_rotation"]
    assert all(done.errors["transfer"][n] < done.errors["calibrate"][n] for n in (0, 1))
    losses = [row["loss"] for row in done.curves["recover"]]
    assert sum(losses[-5:]) < sum(losses[:5])
    model.save_pretrained(tmp_path)
    again = lln.hf.load(tmp_path, hf.AutoModelForCausalLM).eval()
    torch.testing.assert_close(run(again, **data[0]), run(model.eval(), **data[0]))


@pytest.mark.parametrize(
    "batch", [{"input_ids": text()}, padded(text(), 4, "left")], ids=["", "left"]
)
@pytest.mark.slow
def test_compiled_without_a_graph_break(batch):
    model = ready()
    model.config.use_cache = False
    expected = run(model, **batch)
    got = run(torch.compile(model, backend="eager", fullgraph=True), **batch)
    real = batch.get("attention_mask", torch.ones(expected.shape[:2])).bool()
    torch.testing.assert_close(got[real], expected[real])


@pytest.mark.slow
def test_exported():
    model, batch = ready(), {"input_ids": text(), "use_cache": False}
    with torch.no_grad():
        program = torch.export.export(model, (), batch, strict=False)
        torch.testing.assert_close(program.module()(**batch)[0], run(model, **batch))
