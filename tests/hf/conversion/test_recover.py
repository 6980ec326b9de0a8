"""recover: a converted model learns its teacher's answers, all weights or adapters."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import lln.hf
from lln.hf.conversion.recover import divergence_of_logits
from lln.hf.conversion.stage import Stage
from tests.hf.conversion.loud import loud
from tests.hf.tiny import padded, text

slow = pytest.mark.slow

OPTIONS = {"near": 8, "feature_map": "learned", "learn_scale": True, "slots": 16}


def pair(family, head=None, **changes):
    teacher = loud(family, head)
    model = copy.deepcopy(teacher)
    lln.hf.replace(model, "lln_nearfar", statistics="fixed", quiet=True, **{**OPTIONS, **changes})
    lln.hf.calibrate(model, [{"input_ids": text(3, 40)}])
    return teacher, model


def batches(count=20):
    return [padded(text(2, 40, seed=seed % 3), 6, "right") for seed in range(count)]


def gap(teacher, model, batch) -> float:
    out = [m(**batch) for m in (teacher, model)]
    real = batch["attention_mask"].bool()
    a, b = (o.logits[real] if hasattr(o, "logits") else o.last_hidden_state[real] for o in out)
    return ((a - b).norm() / a.norm()).item()


# All weights of an encoder: tests/hf/conversion/test_convert.py.
@pytest.mark.parametrize(
    ("family", "head", "lora"),
    [
        ("llama", None, 0),
        *(pytest.param(*x, 4, marks=slow) for x in (("llama", None), ("bert", "AutoModel"))),
    ],
)
def test_the_answers_come_closer(family, head, lora):
    teacher, model = pair(family, head)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    first = gap(teacher, model, batches(1)[0])
    rows = lln.hf.recover(
        model, teacher, batches(40), learning_rate=1e-3 if lora else 1e-4, lora=lora, core_rate=3
    )
    assert len(rows) == 40 and rows[-1]["loss"] < rows[0]["loss"]
    assert gap(teacher, model, batches(1)[0]) < 0.9 * first
    changed = {name for name, x in model.named_parameters() if not x.equal(before[name])}
    assert not any("embed" in name and "Norm" not in name for name in changed)
    assert any(".lln." in name for name in changed) and any(".lln." not in n for n in changed)
    assert set(before) == {name for name, _ in model.named_parameters()}


def test_embeddings_learn_when_asked():
    teacher, model = pair("bert", "AutoModel")
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    lln.hf.recover(model, teacher, batches(1), embeddings=True)
    changed = {name for name, x in model.named_parameters() if not x.equal(before[name])}
    assert any("word_embeddings" in name for name in changed)
    with pytest.raises(ValueError, match="lora=4 leaves all weights but its adapters alone"):
        lln.hf.recover(model, teacher, batches(1), embeddings=True, lora=4)


def test_accumulated_batches_are_one_update():
    found = []
    for size, accumulation in ((1, 2), (2, 1)):
        teacher, model = pair("llama")
        ids = text(4, 30)
        data = [{"input_ids": part} for part in ids.split(size)]
        lln.hf.recover(
            model, teacher, data, accumulation=accumulation, learning_rate=1e-3, clip=0, warmup=0
        )
        found.append(model(ids).logits)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_mode_flags_and_gradients_are_left_alone():
    teacher, model = pair("bert", "AutoModel")
    model.train()
    model.encoder.layer[0].output.dense.weight.requires_grad_(False)
    flags = {name: x.requires_grad for name, x in model.named_parameters()}
    lln.hf.recover(model, teacher, batches(2))
    assert all(module.training for module in model.modules())
    assert flags == {name: x.requires_grad for name, x in model.named_parameters()}
    assert all(x.grad is None for x in model.parameters())


@pytest.mark.parametrize("stage", ["transfer", "recover"])
def test_windows_are_short_in_as_many_updates_as_asked(stage, monkeypatch):
    teacher, model = pair("llama", near=lln.Near(64, overlap=64, sinks=2, joint=True))
    cores = [c for c in model.modules() if isinstance(c, lln.nn.LLNAttention)]
    seen, plain = [], lln.nn.LLNAttention.draw

    def watch(core, *given, **options):
        seen.append(core.near)
        return plain(core, *given, **options)

    monkeypatch.setattr(lln.nn.LLNAttention, "draw", watch)
    options = {"short_windows": 0.5, "seed": 3}
    given = (teacher, batches(16)) if stage == "recover" else (batches(16),)
    getattr(lln.hf, stage)(model, *given, **options)
    usual, short = cores[0].near, lln.Near(16, overlap=16, sinks=2, joint=True).at(8)
    assert usual.block == 64 and set(seen) == {usual, short}
    assert 4 <= sum(near == short for near in seen) / len(cores) <= 12
    assert all(x == y for x, y in zip(seen[::2], seen[1::2], strict=True))  # in all layers
    with pytest.raises(ValueError, match=r"short_windows=1\.0 is not a share"):
        getattr(lln.hf, stage)(model, *given, short_windows=1.0)


def test_an_error_leaves_the_weights_as_they_were():
    for lora in (0, 4):
        teacher, model = pair("llama")
        before = {name: x.detach().clone() for name, x in model.named_parameters()}
        with pytest.raises(ValueError, match="exactly one of"):
            lln.hf.recover(model, teacher, [*batches(1), {"nonsense": 1}], lora=lora)
        after = dict(model.named_parameters())
        assert set(after) == set(before)
        assert all(x.equal(before[name]) for name, x in after.items())


def test_half_precision_learns():
    teacher, model = pair("llama")
    rows = lln.hf.recover(model, teacher, batches(10), learning_rate=1e-4, precision=torch.bfloat16)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_divergence_is_that_of_real_tokens():
    given, wanted = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    p, log_q = wanted.softmax(-1), given.log_softmax(-1)
    by_token = (p * (p.log() - log_q)).sum(-1)
    expected = (by_token * mask).sum() / mask.sum()
    torch.testing.assert_close(divergence_of_logits(given, wanted, mask), expected)
    assert divergence_of_logits(wanted, wanted, None).abs() < 1e-6


@pytest.mark.parametrize(("family", "head", "ahead"), [("bert", None, 0), ("llama", None, 1)])
def test_labels_tell_which_answers_are_compared(family, head, ahead):
    """At a hidden token itself in a masked language model, one before it in a decoder."""
    teacher, model = pair(family, head)
    [batch] = batches(1)
    labels = torch.full_like(batch["input_ids"], -100)
    asked = [(0, 5), (0, 20), (1, 9), (1, 39)]  # the last one is padding
    for row, place in asked:
        labels[row, place] = 3
    with torch.no_grad():
        ours, theirs = (m(**batch).logits.log_softmax(-1) for m in (model, teacher))
    by_token = (theirs.exp() * (theirs - ours)).sum(-1)
    real = batch["attention_mask"].bool()
    wanted = [by_token[r, p - ahead] for r, p in asked if real[r, p - ahead]]
    assert 3 <= len(wanted) <= 4
    [row] = lln.hf.recover(model, teacher, [{**batch, "labels": labels}], learning_rate=1e-9)
    assert row["loss"] == pytest.approx(torch.stack(wanted).mean().item(), rel=1e-4)
    [plain] = lln.hf.recover(model, teacher, [batch], learning_rate=1e-9)
    assert plain["loss"] == pytest.approx(by_token[real].mean().item(), rel=1e-4)
    assert abs(plain["loss"] - row["loss"]) > 1e-3 * plain["loss"]


def test_labels_do_not_change_what_states_are_compared():
    teacher, model = pair("bert", "AutoModel")
    [batch] = batches(1)
    labels = torch.full_like(batch["input_ids"], -100)
    found = [
        lln.hf.recover(model, teacher, [each], learning_rate=1e-9)[0]["loss"]
        for each in (batch, {**batch, "labels": labels})
    ]
    assert found[0] > 0 and found[1] == pytest.approx(found[0], rel=1e-4)


def test_bad_requests_say_what_to_do():
    teacher, model = pair("bert", "AutoModel")
    data = batches(1)
    with pytest.raises(ValueError, match="objective='loss'"):
        lln.hf.recover(model, teacher, data, objective="loss")
    with pytest.raises(ValueError, match="has no logits"):
        lln.hf.recover(model, teacher, data, objective="logits")
    with pytest.raises(ValueError, match="shares its weights"):
        lln.hf.recover(model, model, data)
    with pytest.raises(ValueError, match="batches is empty"):
        lln.hf.recover(model, teacher, [])


def resumed(tmp_path, **options):
    """All tensors of a model that learned at once, and of one that was killed in between."""
    found = []
    for name, kills in (("whole", ()), ("killed", (4, 5))):
        for kill in (*kills, None):
            torch.manual_seed(len(found))  # what else was drawn must not matter
            teacher, model = pair("llama")
            model.to(options.get("dtype", torch.float32))
            teacher.to(options.get("dtype", torch.float32))

            def stop(step, loss, kill=kill):
                if step == kill:
                    raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt):
                lln.hf.recover(
                    model, teacher, batches(6), learning_rate=1e-3, short_windows=0.5,
                    lora=options.get("lora", 0), stage=Stage(tmp_path / name, 2), progress=stop,
                )  # fmt: skip
        found.append(model.state_dict())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=slow)])
@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=slow)])
def test_a_killed_recovery_ends_as_one_that_was_not(lora, dtype, tmp_path):
    """Bit for bit, with updates whose windows are short by chance."""
    whole, killed = resumed(tmp_path, lora=lora, dtype=dtype)
    assert whole.keys() == killed.keys()
    assert all(x.dtype == killed[name].dtype and x.equal(killed[name]) for name, x in whole.items())


@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_learn_as_others_do(dtype, lora):
    """Their weights are float32 meanwhile: in bfloat16 most updates were rounded away."""
    teacher, model = pair("llama")
    for x in (teacher, model):
        x.to(dtype)
        x.lm_head.weight = x.model.embed_tokens.weight  # tied weights stay tied
    kept = {name: x.detach().clone() for name, x in model.state_dict().items()}
    first = gap(teacher, model, batches(1)[0])
    rate = 1e-3 if lora else 1e-4
    rows = lln.hf.recover(model, teacher, batches(20), learning_rate=rate, lora=lora, core_rate=3)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert gap(teacher, model, batches(1)[0]) < 0.95 * first
    after = model.state_dict()
    assert {name: x.dtype for name, x in after.items()} == {n: x.dtype for n, x in kept.items()}
    learned = [n for n in after if "proj" in n]
    changed = sum((after[n] != kept[n]).sum() for n in learned) / sum(
        kept[n].numel() for n in learned
    )
    assert changed > 0.25
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(text()).logits.dtype == dtype


def test_an_error_in_half_precision_leaves_weights_and_gradients():
    teacher, model = pair("llama")
    teacher, model = teacher.bfloat16(), model.bfloat16()
    model(text()).logits.sum().backward()
    before = {name: (x.detach().clone(), x.grad) for name, x in model.named_parameters()}
    with pytest.raises(ValueError, match="exactly one of"):
        lln.hf.recover(model, teacher, [*batches(1), {"nonsense": 1}])
    for name, x in model.named_parameters():
        assert x.dtype == torch.bfloat16 and x.equal(before[name][0])
        assert x.grad is before[name][1]


def tuned(family="llama", **options):
    """A softmax model with an adapter of its own, which matters, and which is called "default"."""
    import peft

    model = loud(family)
    torch.manual_seed(3)
    config = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    model.add_adapter(peft.LoraConfig(**config, init_lora_weights=False, **options))
    return model.eval()


def test_adapters_that_were_there_stay():
    teacher = tuned()
    model = copy.deepcopy(teacher)
    plain = copy.deepcopy(teacher)
    plain.disable_adapters()
    lln.hf.replace(model, "lln_nearfar", statistics="fixed", quiet=True, **OPTIONS)
    lln.hf.calibrate(model, [{"input_ids": text(3, 40)}])
    before, [batch] = {name: x.detach().clone() for name, x in model.named_parameters()}, batches(1)
    first, far = gap(teacher, model, batch), gap(teacher, plain, batch)
    lln.hf.recover(model, teacher, batches(20), learning_rate=1e-3, lora=2, core_rate=3)
    assert gap(teacher, model, batch) < min(first, far)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(x.equal(before[name]) for name, x in after.items() if ".lora_" in name)
    assert any(not x.equal(before[name]) for name, x in after.items() if "base_layer" in name)
    assert model.active_adapters() == ["default"] and list(model.peft_config) == ["default"]
    kept = model(**batch).logits
    model.disable_adapters()
    assert not torch.allclose(model(**batch).logits, kept, atol=1e-2)


def test_after_an_error_adapters_are_as_they_were():
    teacher = tuned()
    model = copy.deepcopy(teacher)
    undo = lln.hf.replace(model, "lln_nearfar", statistics="fixed", quiet=True, **OPTIONS)
    lln.hf.calibrate(model, [{"input_ids": text(3, 40)}])
    with pytest.raises(ValueError, match="exactly one of"):
        lln.hf.recover(model, teacher, [*batches(1), {"nonsense": 1}], lora=2)
    undo()
    assert model(text()).logits.equal(teacher(text()).logits)
    assert model.active_adapters() == ["default"] and list(model.peft_config) == ["default"]


def test_a_model_without_adapters_has_none_afterwards():
    teacher, model = pair("llama")
    lln.hf.recover(model, teacher, batches(1), lora=2)
    assert not hasattr(model, "peft_config") and type(model.lm_head) is torch.nn.Linear
    assert not any("lora" in name for name, _ in model.named_modules())


def test_adapters_that_no_other_can_stand_beside_are_refused():
    for change in ("dora", "off"):
        model = tuned(use_dora=change == "dora")
        if change == "off":
            model.disable_adapters()
        teacher = copy.deepcopy(model)
        lln.hf.replace(model, "lln_nearfar", statistics="fixed", quiet=True, **OPTIONS)
        lln.hf.calibrate(model, [{"input_ids": text(3, 40)}])
        with pytest.raises(ValueError, match=r"lora=2: model\.layers\.0.*merge_and_unload"):
            lln.hf.recover(model, teacher, batches(1), lora=2)
