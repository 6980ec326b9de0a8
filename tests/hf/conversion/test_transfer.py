"""transfer: replaced layers learn what softmax answered in their place."""

from __future__ import annotations

import pytest
import torch

import lln.hf
from lln.hf.conversion.stage import Stage
from tests.hf.tiny import make, padded, text

LEARNED = {"mix": "learned", "learn_scale": True, "near": 8}


def mean_error(rows, step: int) -> float:
    errors = [row["error"] for row in rows if row["step"] == step]
    return sum(errors) / len(errors)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("family", ["roberta", "vit"])
def test_the_error_falls_and_only_the_cores_change(family):
    model = make(family)
    if family == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 32, 32)}
    else:
        batch = padded(text(3, 20), 6, "right")
    lln.hf.replace(model, "lln_diag", quiet=True, **LEARNED)
    before = weights(model)
    rows = lln.hf.transfer(model, [batch] * 12)
    assert len(rows) == 12 * 2 and {row["step"] for row in rows} == set(range(12))
    after = lln.hf.transfer(model, [batch], learning_rate=0)
    assert mean_error(after, 0) < 0.97 * mean_error(rows, 0)
    changed = {name for name, x in weights(model).items() if not x.equal(before[name])}
    assert changed and all(".lln." in name for name in changed)


def test_the_error_is_that_of_the_layers_output():
    """By hand, in the first layer, over real tokens alone."""
    model, batch = make("gpt2"), padded(text(3, 12), 4, "right")
    block, mask = model.transformer.h[0], batch["attention_mask"].bool()
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states[0]
        q, k, v = (
            x.unflatten(-1, (4, 8)).transpose(1, 2)
            for x in block.attn.c_attn(block.ln_1(states)).split(32, dim=2)
        )
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        given = lln.attention(q, k, v, alpha=1.2, beta=1.1, is_causal=True, key_mask=mask)
    lln.hf.replace(model, "lln", quiet=True, alpha=1.2, beta=1.1)
    rows = lln.hf.transfer(model, [batch], learning_rate=0)
    real = mask[:, None, :, None]
    expected = ((given - wanted) * real).square().sum() / (wanted * real).square().sum()
    assert rows[0]["layer"] == "transformer.h.0.attn"
    assert rows[0]["error"] == pytest.approx(expected.item(), rel=1e-4)


def test_softmax_answers_meanwhile():
    """So the second layer learns from what it will be given by a first layer that has learned."""
    model, ids = make("roberta"), text(3, 20)
    wanted = model(ids).logits
    seen = []
    lln.hf.replace(model, "lln_diag", quiet=True, **LEARNED)
    handle = model.register_forward_hook(lambda module, inputs, out: seen.append(out.logits))
    lln.hf.transfer(model, [{"input_ids": ids}] * 3)
    handle.remove()
    for logits in seen:
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_decoders_learn_from_calibrated_constants(family):
    model, ids = make(family), text(3, 20)
    lln.hf.replace(model, "lln_diag", quiet=True, **LEARNED)
    with pytest.raises(ValueError, match=r"call lln\.hf\.calibrate"):
        lln.hf.transfer(model, [{"input_ids": ids}])
    lln.hf.calibrate(model, [{"input_ids": ids}], method="entropy")
    rows = lln.hf.transfer(model, [{"input_ids": ids}] * 10)
    assert mean_error(rows, 9) < mean_error(rows, 0)
    model.generate(ids[:, :6], max_new_tokens=3, do_sample=False)


def test_other_mechanisms_learn_too():
    model, ids = make("roberta"), text(3, 20)
    lln.hf.replace(model, "hedgehog", quiet=True)
    rows = lln.hf.transfer(model, [{"input_ids": ids}] * 10)
    assert mean_error(rows, 9) < mean_error(rows, 0)


def test_the_model_may_run_in_half_precision():
    """Softmax's answers are then rounded, the comparison is not."""
    found, seen = [], []
    for precision in (None, torch.bfloat16):
        model, ids = make("roberta"), text(3, 20)
        lln.hf.replace(model, "lln_diag", quiet=True, **LEARNED)
        model.register_forward_hook(lambda module, inputs, out: seen.append(out.logits.dtype))
        rows = lln.hf.transfer(model, [{"input_ids": ids}] * 3, precision=precision)
        found.append([row["error"] for row in rows])
    assert seen == [torch.float32] * 3 + [torch.bfloat16] * 3
    assert found[0] != found[1] and found[0] == pytest.approx(found[1], rel=0.1)


def test_padding_teaches_nothing():
    ids = text(3, 20)
    found = []
    for batch in (padded(ids, 5, "right"), {"input_ids": ids}):
        model = make("bert")
        lln.hf.replace(model, "lln_diag", quiet=True, **LEARNED)
        found.append([row["error"] for row in lln.hf.transfer(model, [batch], learning_rate=0)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_mode_gradients_and_iterables_are_left_alone():
    model, ids = make("roberta").train(), text(2, 12)
    lln.hf.replace(model, "lln_diag", quiet=True, **LEARNED)
    core = model.roberta.encoder.layer[0].attention.self.lln
    kept = torch.ones_like(next(core.parameters()))
    next(core.parameters()).grad = kept
    rows = lln.hf.transfer(model, ({"input_ids": ids} for _ in range(2)))  # of unknown number
    assert len(rows) == 4
    assert model.training and core.training and not hasattr(core, "lesson")
    assert next(core.parameters()).grad is kept
    assert all(x.grad is None for name, x in model.named_parameters() if ".lln." not in name)


def test_a_failed_batch_leaves_the_model_usable():
    model, ids = make("roberta"), text(2, 12)
    lln.hf.replace(model, "lln_diag", quiet=True, **LEARNED)
    before = weights(model)
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        lln.hf.transfer(model, [{"input_ids": ids}, {"nonsense": ids}])
    assert not any(hasattr(module, "lesson") for module in model.modules())
    assert all(x.equal(before[name]) for name, x in weights(model).items())
    model.roberta.encoder.layer[1].attention.self.value.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"layer\.1.* error of nan in batch 0"):
        lln.hf.transfer(model, [{"input_ids": ids}])
    assert all(x.equal(before[name]) for name, x in weights(model).items() if ".lln." in name)


def test_bad_requests_say_what_to_do():
    model, ids = make("roberta"), text(2, 12)
    with pytest.raises(ValueError, match="no replaced layer yet"):
        lln.hf.transfer(model, [{"input_ids": ids}])
    undo = lln.hf.replace(model, "lln_diag", quiet=True)
    with pytest.raises(ValueError, match="nothing to learn; give replace"):
        lln.hf.transfer(model, [{"input_ids": ids}])
    assert lln.hf.transfer(model, [{"input_ids": ids}], learning_rate=0)
    with pytest.raises(ValueError, match="learning_rate=-1"):
        lln.hf.transfer(model, [{"input_ids": ids}], learning_rate=-1)
    with pytest.raises(ValueError, match="batches is empty"):
        lln.hf.transfer(model, [], learning_rate=0)
    undo()
    lln.hf.replace(model, "reformer", quiet=True)
    with pytest.raises(ValueError, match="make their own queries and keys"):
        lln.hf.transfer(model, [{"input_ids": ids}])


@pytest.mark.parametrize("conv", [0, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_in_half_precision_learn_as_others_do(dtype, conv):
    """The errors are nearly those of float32; in float16 Adam divided by zero."""
    options = {"feature_map": "learned", "learn_scale": True, "slots": 16, "near": 8}
    options |= {"statistics": "fixed", "conv": conv}
    found = []
    for each in (torch.float32, dtype):
        model, ids = make("llama").to(each), text(3, 20)
        lln.hf.replace(model, "lln_nearfar", quiet=True, **options)
        lln.hf.calibrate(model, [{"input_ids": ids}])
        rows = lln.hf.transfer(model, [{"input_ids": ids}] * 12)
        found.append([mean_error(rows, step) for step in range(12)])
        learned = [x for name, x in model.named_parameters() if ".lln." in name]
        assert all(x.dtype == each and x.grad is None for x in learned)
    assert found[1] == pytest.approx(found[0], rel=0.05)
    assert found[1][-1] < found[1][0]


def test_progress_of_other_layers_is_refused(tmp_path):
    for family, refused in (("bert", False), ("roberta", True)):
        model, ids = make(family), text(2, 12)
        lln.hf.replace(model, "lln_diag", quiet=True, **LEARNED)
        stage = Stage(tmp_path / "stage")
        if not refused:
            lln.hf.transfer(model, [{"input_ids": ids}], stage=stage)
            continue
        with pytest.raises(ValueError, match="is of another conversion: it has no"):
            lln.hf.transfer(model, [{"input_ids": ids}], stage=stage)
