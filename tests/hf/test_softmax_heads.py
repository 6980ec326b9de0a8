"""Single heads of a replaced layer that keep softmax."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers as hf

import lln
import lln.hf
from lln.hf import StateLayer
from lln.hf.cores import attend
from lln.hf.softmax import softmax_attention
from lln.instruments.recording.recorder import attention_calls
from lln.nn import LLNAttention
from tests.hf.conversion.loud import loud
from tests.hf.tiny import inputs, make, padded, run, text

NEARFAR = {"near": lln.Near(4, sinks=1), "feature_map": "learned", "slots": 16, "quiet": True}


def ready(family: str, attention: str = "lln_nearfar", heads=None, **options):
    model = loud(family)
    usual = NEARFAR if attention == "lln_nearfar" else {"quiet": True}
    done = lln.hf.replace(model, attention, **{**usual, **options})
    if family == "llama" and attention.startswith("lln"):
        lln.hf.calibrate(model, [{"input_ids": text(3, 40, seed=5)}])
    done.keep_softmax_heads(heads or {})
    return model, done


def core_inputs(kv_heads: int = 2, tokens: int = 30):
    torch.manual_seed(0)
    q = torch.randn(2, 4, tokens, 8)
    k, v = (torch.randn(2, kv_heads, tokens, 8) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_kept_heads_are_softmax_and_the_others_unchanged(is_causal, kv_heads, side):
    q, k, v = core_inputs(kv_heads)
    place, length = torch.arange(30), torch.tensor([[30], [21]])
    mask = {None: None, "right": place < length, "left": place >= 30 - length}[side]
    core = LLNAttention(
        4, 8, num_kv_heads=kv_heads, statistics="fixed", near=lln.Near(4, joint=True)
    )
    options = {"key_mask": mask, "is_causal": is_causal}
    plain = attend(core, q, k, v, **options)
    wanted = softmax_attention(q, k, v, **options, scale=8**-0.5)
    core.softmax_heads = (1, 2)
    got = attend(core, q, k, v, **options)
    real = torch.ones(2, 30, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(got[:, [0, 3]], plain[:, [0, 3]])
    for head in (1, 2):
        torch.testing.assert_close(got[:, head][real], wanted[:, head][real], rtol=0, atol=1e-5)


def test_gradients_are_those_of_the_two_attentions():
    tensors = [x.double().requires_grad_(True) for x in core_inputs()]
    options = {"statistics": "fixed", "near": lln.Near(4, joint=True), "learn_scale": True}
    core = LLNAttention(4, 8, num_kv_heads=2, dtype=torch.float64, **options)
    masks = {"key_mask": None, "is_causal": True}
    plain, exact = attend(core, *tensors, **masks), softmax_attention(
        *tensors, **masks, scale=8**-0.5
    )  # fmt: skip
    kept = torch.tensor([False, True, False, True])[:, None, None]
    core.softmax_heads = (1, 3)
    direction = torch.randn_like(plain)
    sources = [*tensors, *core.parameters()]
    expected = torch.autograd.grad((torch.where(kept, exact, plain) * direction).sum(), sources)
    got = torch.autograd.grad((attend(core, *tensors, **masks) * direction).sum(), sources)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert core.log_alpha.grad is None and got[-2].flatten()[0] != 0


@pytest.mark.parametrize("attention", ["lln", "lln_diag", "lln_nearfar", "elu", "hedgehog"])
@pytest.mark.parametrize("family", ["bert", "llama", "vit"])
def test_all_heads_of_all_layers_are_the_model_of_before(family, attention):
    wanted = run(loud(family), **inputs(family))
    every = {0: range(4), 1: range(4)}
    model, done = ready(family, attention, every)
    torch.testing.assert_close(run(model, **inputs(family)), wanted, rtol=1e-4, atol=1e-4)
    done.keep_softmax_heads({0: [], 1: []})
    assert not torch.allclose(run(model, **inputs(family)), wanted, rtol=1e-2, atol=1e-2)
    assert done.softmax_heads == {}


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_they_are_saved_and_folders_without_them_load(family, tmp_path):
    model, done = ready(family, heads={1: [2, 0]})
    automatic = hf.AutoModelForMaskedLM if family == "bert" else hf.AutoModelForCausalLM
    model.save_pretrained(tmp_path / "new")
    loaded = lln.hf.load(tmp_path / "new", automatic)
    assert torch.equal(run(loaded, **inputs(family)), run(model, **inputs(family)))
    loaded.save_pretrained(tmp_path / "again")
    stored = json.loads((tmp_path / "again" / "config.json").read_text())["lln"]
    assert stored[0]["softmax_heads"] == {"1": [0, 2]}
    copied = copy.deepcopy(model)
    assert torch.equal(run(copied, **inputs(family)), run(model, **inputs(family)))
    done.keep_softmax_heads({1: []})
    model.save_pretrained(tmp_path / "none")
    stored = json.loads((tmp_path / "none" / "config.json").read_text())["lln"]
    assert "softmax_heads" not in stored[0]
    again = lln.hf.load(tmp_path / "none", automatic)
    assert torch.equal(run(again, **inputs(family)), run(model, **inputs(family)))


@pytest.mark.parametrize("attention", ["lln", "lln_diag", "lln_nearfar"])
@pytest.mark.parametrize("heads", [{0: [1]}, {0: [0, 3], 1: [0, 1, 2, 3]}])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}])
def test_generation_keeps_their_keys_beside_the_state(attention, heads, how):
    model, _ = ready("llama", attention, heads)
    prompt = padded(text(2, 13), 5, "left")
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True,
               "output_logits": True}  # fmt: skip
    got = model.generate(**prompt, **options, **how)
    without = {name: value for name, value in how.items() if name == "num_beams"}
    expected = model.generate(**prompt, **options, **without, use_cache=False)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    layer = got.past_key_values.layers[0]
    assert isinstance(layer, StateLayer)
    kept = layer.memory.tensors["kept_k"]
    assert kept.shape[1:3] == (len({head // 2 for head in heads[0]}), 13 + 5 + 7)
    assert ("kept_k" in got.past_key_values.layers[1].memory.tensors) == (1 in heads)


def test_generation_from_all_keys_is_the_same():
    model, _ = ready("llama", heads={0: [1, 2]})
    options = {"max_new_tokens": 8, "do_sample": False}
    cache = hf.DynamicCache(config=model.config)
    kept = model.generate(text(2, 13), **options, past_key_values=cache)
    assert torch.equal(kept, model.generate(text(2, 13), **options))


def test_a_cache_that_was_begun_with_other_heads_is_refused():
    model, done = ready("llama", heads={0: [1]})
    out = model.generate(
        text(1, 9), max_new_tokens=2, do_sample=False, return_dict_in_generate=True
    )
    done.keep_softmax_heads({0: [1, 2]})
    with pytest.raises(ValueError, match=r"heads \[1, 2\] keep softmax.*begun with \[1\]"):
        model.generate(out.sequences, max_new_tokens=2, past_key_values=out.past_key_values)


def test_kept_heads_have_no_error_and_learn_nothing():
    model, done = ready("bert", learn_scale=True)
    batch = padded(text(3, 30), 6, "right")
    before = lln.hf.transfer(model, [batch], learning_rate=0)
    assert all(sum(row["heads"]) == pytest.approx(row["error"]) for row in before)
    done.keep_softmax_heads({0: [2]})
    after = lln.hf.transfer(model, [batch], learning_rate=0)
    assert after[0]["heads"][2] < 1e-10 and after[0]["error"] < before[0]["error"]
    others = [0, 1, 3]
    assert [after[0]["heads"][h] for h in others] == pytest.approx(
        [before[0]["heads"][h] for h in others]
    )
    assert after[1] == before[1]
    core = model.bert.encoder.layer[0].attention.self.lln
    maps = core.features.q_map.detach().clone()
    rows = lln.hf.transfer(model, [batch] * 4)
    changed = (core.features.q_map - maps).abs().amax((1, 2))
    assert changed[2] == 0 and (changed[others] > 0).all()
    assert "heads" not in rows[0]


@pytest.mark.slow
def test_the_recorder_shows_the_matrix_that_answers():
    for attention in ("lln", "lln_diag", "lln_nearfar"):
        for options in ({}, {"feature_map": "signs", "slots": 16, "center_keys": True}):
            model, _ = ready("bert", attention, {0: [1, 3]}, **options)
            batch = padded(text(2, 20), 6, "left")
            with attention_calls(model, samples=2) as calls:
                model(**batch)
            assert len(calls) == 2 and calls[1].kept is None
            ours, plain = calls[0], ready("bert", attention, **options)[0]
            with attention_calls(plain, samples=2) as others:
                plain(**batch)
            softmax = loud("bert")
            with attention_calls(softmax, samples=2) as exact:
                softmax(**batch)
            matrix = ours.matrix(0)
            wanted = exact[0].matrix(0)
            torch.testing.assert_close(matrix[[1, 3]], wanted[[1, 3]], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(matrix[[0, 2]], others[0].matrix(0)[[0, 2]])
            assert [ours.kernel_of(head) for head in (1, 2)] == ["softmax", ours.kernel]
            names = ("entropy", "temperature")
            found, theirs = ours.measured(names), exact[0].measured(names)
            for name in names:
                torch.testing.assert_close(
                    found[name][:, 1], theirs[name][:, 1], rtol=1e-3, atol=1e-3
                )
            for share in (ours.near_share(), ours.lln_share()):
                if share is not None:
                    assert share[:, [1, 3]].isnan().all() and share[:, [0, 2]].isfinite().all()


def test_wrong_requests_are_named():
    _, done = ready("bert", layers=[1])
    with pytest.raises(ValueError, match="layer 0 is not replaced; replaced are"):
        done.keep_softmax_heads({0: [1]})
    with pytest.raises(ValueError, match=r"layer 1 has heads 0 to 3, not \[4\]"):
        done.keep_softmax_heads({1: [4]})
    whole = make("bert")
    swapped = lln.hf.replace(whole, "reformer", chunk=8, quiet=True)
    with pytest.raises(ValueError, match="keep whole layers with keep_softmax"):
        swapped.keep_softmax_heads({0: [1]})
    done.keep_softmax_heads({1: [0]})
    done.keep_softmax([1])
    assert done.softmax_heads == {} or not done.active
