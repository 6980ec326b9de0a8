"""convert: a softmax model becomes a linear one that answers nearly as it did."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import lln.hf
from lln.hf.conversion.convert import Cycle
from lln.hf.conversion.digest import digest_of_batches, digest_of_model
from lln.hf.conversion.keep import best_first, check_keep, choose_kept, of_key_heads
from lln.hf.conversion.usual import usual_options
from tests.hf.conversion.loud import loud
from tests.hf.tiny import make, padded, text

SMALL = {"near": lln.Near(8, overlap=0), "slots": 16}


def batches(count: int = 6, tokens: int = 40):
    return [padded(text(2, tokens, seed=seed), 6, "right") for seed in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "llama", "vit"])
def test_every_stage_comes_closer_and_the_folder_loads(family, tmp_path):
    head = {"bert": "AutoModel", "llama": "AutoModelForCausalLM", "vit": "AutoModel"}[family]
    model = loud(family, head)
    if family == "vit":
        data = [{"pixel_values": torch.randn(2, 3, 32, 32)} for _ in range(4)]
        first = model(**data[-1]).last_hidden_state.detach()
        real = torch.ones(first.shape[:2], dtype=torch.bool)
    else:
        data = batches()
        out = model(**data[-1])
        first = (out.logits if family == "llama" else out.last_hidden_state).detach()
        real = data[-1]["attention_mask"].bool()

    def measure(model):
        out = model(**data[-1])
        found = out.logits if family == "llama" else out.last_hidden_state
        return {"distance": ((found - first)[real].norm() / first[real].norm()).item()}

    done = lln.hf.convert(
        model, data, options=SMALL, calibration=2, transfer_steps=40, recover_steps=40,
        recover_options={"learning_rate": 2e-4}, held_out=data[-1:], measure=measure,
    )  # fmt: skip
    names = [row["stage"] for row in done.stages]
    assert names == ["softmax", "calibrate", "transfer", "recover"]
    found = [row["distance"] for row in done.stages]
    assert found[0] == 0 and found[3] < found[2] < found[1]
    assert all(done.errors["transfer"][n] < done.errors["calibrate"][n] for n in (0, 1))
    assert len(done.curves["transfer"]) == 40 * 2 and len(done.curves["recover"]) == 40
    model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if family == "llama" else AutoModel
    again = lln.hf.load(tmp_path, auto).eval()
    assert measure(again)["distance"] == pytest.approx(found[3], rel=1e-3)


def test_a_layer_whose_key_heads_are_all_kept_answers_as_before(tmp_path):
    model, data = make("llama"), batches()
    done = lln.hf.convert(
        model, data, options=SMALL, transfer_steps=4, recover_steps=0, keep={1: [1, 0]}
    )
    assert done.kept == [1] and done.kept_heads == {} and done.replacement.layers == [0]
    assert done.kept_key_heads == {1: [0, 1]} and done.key_heads == 4 and done.scores == {}
    assert [row["stage"] for row in done.stages] == ["softmax", "calibrate", "transfer", "keep"]
    layers = [block.self_attn for block in model.model.layers]
    assert ["lln" in layer._modules for layer in layers] == [True, False]
    loads_and_writes_the_same(model, tmp_path)


def loads_and_writes_the_same(model, folder):
    """Beams and left padding included: what is kept grows beside states in one cache."""
    model.save_pretrained(folder)
    again = lln.hf.load(folder, AutoModelForCausalLM).eval()
    ids = text(2, 12)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    for given in ({"input_ids": ids}, padded(text(2, 13), 5, "left")):
        for beams in (1, 3):
            options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
            written = again.generate(**given, **options)
            assert written.equal(model.generate(**given, **options))
            assert written.equal(model.generate(**given, **options, use_cache=False))


def test_the_worst_key_heads_keep_softmax_with_all_their_query_heads(tmp_path):
    model, data = loud("llama"), batches()
    done = lln.hf.convert(
        model, data, options=SMALL, transfer_steps=6, recover_steps=2, keep=1, keep_by="error"
    )
    parts = {
        (n, h): x for n, found in done.scores["error"].items() for h, x in enumerate(found)
    }  # fmt: skip
    (layer, head), *_ = sorted(parts, key=lambda place: -parts[place])
    assert done.kept_key_heads == {layer: [head]}
    assert done.kept_heads == {layer: [2 * head, 2 * head + 1]} and done.kept == []
    for number, error in done.errors["transfer"].items():
        assert sum(x for (n, _), x in parts.items() if n == number) == pytest.approx(error**2)
    left = parts[layer, 1 - head]
    assert done.errors["keep"][layer] == pytest.approx(left**0.5, abs=1e-4)
    stages = [row["stage"] for row in done.stages]
    assert stages == ["softmax", "calibrate", "transfer", "keep", "recover"]
    loads_and_writes_the_same(model, tmp_path)


def test_encoders_and_other_mechanisms_keep_heads_by_their_error():
    data, steps = batches(3), {"transfer_steps": 2, "recover_steps": 0}
    mixed = {**steps, "options": SMALL, "keep": {0: range(4), 1: [2, 1]}}
    done = lln.hf.convert(make("bert", head="AutoModel"), data, **mixed)
    assert done.kept == [0] and done.kept_heads == {1: [1, 2]} and done.replacement.layers == [1]
    assert set(done.errors["keep"]) == {1}
    for attention in ("lln_nearfar", "hedgehog"):
        model = make("bert", head="AutoModel")
        zoo = lln.hf.convert(model, data, attention=attention, keep=5, **steps)
        assert set(zoo.scores) == {"error"} and sum(map(len, zoo.kept_key_heads.values())) == 5
        assert len(zoo.scores["error"][1]) == 4


def test_which_key_heads_are_kept():
    scores = {0: [0.1, 0.4], 3: [0.2, 0.3]}
    assert best_first(scores) == [(0, 1), (3, 1), (3, 0), (0, 0)]
    assert choose_kept(3, scores) == {0: [1], 3: [0, 1]} and choose_kept(0, scores) == {}
    assert choose_kept({3: [1, 0, 1], 0: []}, {}) == {3: [0, 1]}
    assert of_key_heads({3: [1.0, 2.0, 4.0, 8.0]}, {3: 2}) == {3: [3.0, 12.0]}
    for wrong, match in (
        (5, "keep=5 of 4 key heads"), ("auto", r"keep='auto' is unknown.*CacheShare"),
        ({1: [1]}, "no layer 1"), ({3: [2]}, "layer 3 has 2 key heads, not 2"), (True, "keep=True"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            check_keep(wrong, {0: 2, 3: 2})


def test_all_kept_is_the_model_of_before():
    model, ids = make("bert", head="AutoModel"), text(2, 20)
    before = model(ids).last_hidden_state
    done = lln.hf.convert(model, batches(2), options=SMALL, transfer_steps=2, keep=8)
    assert not done.replacement.active
    assert model(ids).last_hidden_state.equal(before)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["transfer", "recover"])
def test_a_killed_conversion_goes_on(killed, tmp_path):
    options = {
        "options": SMALL, "transfer_steps": 8, "recover_steps": 8, "calibration": 2,
        "transfer_options": {"warmup": 2}, "recover_options": {"short_windows": 0.0},
    }  # fmt: skip
    whole = make("bert", head="AutoModel")
    lln.hf.convert(whole, batches(), **options)

    def kill(stage, step, steps, value):
        if stage == killed and step == 6:
            raise KeyboardInterrupt

    monkey = pytest.MonkeyPatch()
    monkey.setattr("lln.hf.conversion.convert.EVERY", 4)
    model = make("bert", head="AutoModel")
    with pytest.raises(KeyboardInterrupt):
        lln.hf.convert(model, batches(), folder=tmp_path, progress=kill, **options)
    seen = []
    model = make("bert", head="AutoModel")
    lln.hf.convert(
        model, batches(), folder=tmp_path, progress=lambda *said: seen.append(said[:2]), **options
    )
    monkey.undo()
    assert (killed, 5) in seen and (killed, 4) not in seen
    ids = text(2, 30)
    torch.testing.assert_close(
        model(ids).last_hidden_state, whole(ids).last_hidden_state, rtol=1e-4, atol=1e-5
    )


def test_other_mechanisms_convert_too():
    model = make("bert", head="AutoModel")
    done = lln.hf.convert(
        model, batches(3), attention="hedgehog", transfer_steps=10, recover_steps=0
    )
    assert done.errors["transfer"][0] < done.errors["calibrate"][0]


@pytest.mark.parametrize("kind", ["hedgehog", "t2r", "elu"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_maps_of_other_papers_convert_too(kind, family):
    model = loud(family, "AutoModel" if family == "bert" else None)
    options = {"feature_map": kind, "near": lln.Near(8, joint=True)}
    done = lln.hf.convert(
        model, batches(), options=options, calibration=2, transfer_steps=20, recover_steps=0
    )
    errors = done.errors
    assert all(errors["transfer"][n] < errors["calibrate"][n] for n in (0, 1))
    for core in (x for x in model.modules() if isinstance(x, lln.nn.LLNAttention)):
        assert all(scale.eq(1).all() for scale in core.scales())
        start = lln.nn.LLNAttention(4, 8, statistics="fixed", **options)
        assert not torch.allclose(core.level.stored.value, start.level.stored.value, atol=1e-3)
        assert core.features.before_rotation == (family == "llama")
        assert (core.center is None) == (family == "llama")


def test_maps_of_other_papers_are_calibrated_where_there_is_a_level():
    ids, options = text(2, 20), {"near": 8, "feature_map": "elu", "quiet": True}
    joint, apart = make("llama"), make("llama")
    lln.hf.replace(joint, "lln_nearfar", **options)
    with pytest.raises(ValueError, match=r"call lln\.hf\.calibrate"):
        joint(ids)
    lln.hf.calibrate(joint, [{"input_ids": ids}])
    assert joint(ids).logits.isfinite().all()
    lln.hf.replace(apart, "lln_diag", **options)
    assert apart(ids).logits.isfinite().all()
    running = make("llama")
    lln.hf.replace(running, "lln_nearfar", statistics="running", **options)
    running.train()(ids)
    assert running.eval()(ids).logits.isfinite().all()


def test_options_follow_the_model():
    assert usual_options(make("bert"))["slots"] == 64
    decoder = usual_options(make("llama"))
    assert decoder["near"] == lln.Near(128, overlap=128, sinks=4, joint=True)
    assert usual_options(make("roberta"))["near"] == lln.Near(128, joint=True)


def test_maps_of_a_decoder_see_what_is_not_rotated_where_that_can_be_had():
    """Maps of rotated queries and keys fail beyond the length at which they learned."""
    usual = usual_options(make("llama"))
    assert usual["before_rotation"] and "center_keys" not in usual
    for model, given in (
        ("llama", {"before_rotation": False}),
        ("llama", {"center_keys": True}),
        ("llama", {"feature_map": "identity"}),
        ("gpt2", {}),  # learned positions
        ("bert", {}),
    ):
        found = usual_options(make(model), given)
        assert not found.get("before_rotation") and found["center_keys"], (model, given)


def test_another_teacher_is_imitated_and_left_alone():
    teacher, model = loud("bert", "AutoModel"), make("bert", head="AutoModel")
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.05 * torch.randn_like(x))
    before = {name: x.clone() for name, x in teacher.state_dict().items()}
    seen, data = [], batches(2)
    wanted = teacher(**data[0]).last_hidden_state.detach()

    def measure(own):
        seen.append(own)
        return {"gap": (own(**data[0]).last_hidden_state - wanted).norm().item()}

    done = lln.hf.convert(
        model, data, options=SMALL, teacher=teacher, calibration=2, transfer_steps=0,
        recover_steps=30, recover_options={"learning_rate": 1e-3, "embeddings": True},
        measure=measure,
    )  # fmt: skip
    assert seen == [teacher, model, model]
    softmax, start, end = (row["gap"] for row in done.stages)
    assert softmax == 0 and end < 0.9 * start
    assert all(x.equal(before[name]) for name, x in teacher.state_dict().items())


def test_batches_are_used_in_turn():
    assert list(Cycle([{"i": n} for n in range(3)], 2, 4)) == [{"i": n} for n in (2, 0, 1, 2)]


def test_bad_requests_say_what_to_do():
    with pytest.raises(ValueError, match="batches is empty"):
        lln.hf.convert(make("bert"), [])
    with pytest.raises(ValueError, match="transfer_steps=-1"):
        lln.hf.convert(make("bert"), batches(1), transfer_steps=-1)
    with pytest.raises(ValueError, match="teacher is the model that changes"):
        lln.hf.convert(model := make("bert"), batches(1), teacher=model)


STEPS = {"options": SMALL, "transfer_steps": 2, "recover_steps": 2, "calibration": 1}


@pytest.mark.parametrize("failing", ["calibrate", "transfer", "keep", "recover", "measure"])
def test_a_failed_conversion_gives_the_model_back(failing, monkeypatch):
    model, ids = loud("llama").train(), text(2, 20)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    wanted, names = model(ids).logits, list(model.state_dict())
    flags = [x.requires_grad for x in model.parameters()]

    def fail(*args, **options):
        raise RuntimeError("midway")

    def measure(model):
        if failing == "measure" and "recover" in seen:
            fail()
        return {}

    seen = set()
    if failing in ("calibrate", "recover"):
        monkeypatch.setattr(f"lln.hf.conversion.convert.{failing}", fail)
    if failing == "transfer":
        monkeypatch.setattr("lln.hf.conversion.lessons.Lesson.answer", fail)
    if failing == "keep":
        monkeypatch.setattr("lln.hf.conversion.convert.choose_kept", fail)
    with pytest.raises(RuntimeError, match="midway"):
        lln.hf.convert(
            model, batches(3), **STEPS, keep=1, measure=measure,
            progress=lambda *said: seen.add(said[0]),
        )  # fmt: skip
    assert model(ids).logits.equal(wanted)
    assert list(model.state_dict()) == names and not hasattr(model.config, "lln")
    assert model.training and flags == [x.requires_grad for x in model.parameters()]
    monkeypatch.undo()
    assert lln.hf.convert(model, batches(3), **STEPS).replacement.active


def test_a_model_beside_another_teacher_is_given_back_too():
    model, ids = make("bert", head="AutoModel"), text(2, 20)
    wanted = model(ids).last_hidden_state

    def measure(own):
        if seen:
            raise RuntimeError("midway")
        return {}

    seen = []
    with pytest.raises(RuntimeError, match="midway"):
        lln.hf.convert(
            model, batches(2), options=SMALL, teacher=loud("bert", "AutoModel"), transfer_steps=0,
            recover_steps=2, measure=measure, progress=lambda *said: seen.append(said),
        )  # fmt: skip
    assert model(ids).last_hidden_state.equal(wanted)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": 1.5}, r"keep=1\.5 .*key heads by layer"),
        ({"keep": 9}, "keep=9 of 8 key heads"),
        ({"keep": {2: [0]}}, "no layer 2"),
        ({"keep": 1, "keep_by": "loss"}, "keep_by='loss' is unknown; choose from retrieval, error"),
        ({"keep": 1, "keep_by": "retrieval"}, 'does not predict the next token.*keep_by="error"'),
    ],
)
def test_what_is_kept_is_checked_before_anything_is_learned(options, match):
    seen = []
    with pytest.raises(ValueError, match=match):
        lln.hf.convert(
            make("bert"), batches(2), **STEPS, **options, progress=lambda *said: seen.append(said)
        )
    assert not seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_learning_without_gradients_is_refused(mode):
    model = make("bert", head="AutoModel")
    with mode(), pytest.raises(ValueError, match=r"torch\.no_grad\(\) or torch\.inference_mode"):
        lln.hf.convert(model, batches(2), **STEPS)
    lln.hf.replace(model, "lln_diag", quiet=True, learn_scale=True, near=8)
    with mode(), pytest.raises(ValueError, match=r"transfer learns.*torch\.no_grad"):
        lln.hf.transfer(model, batches(1))
    with mode(), pytest.raises(ValueError, match=r"recover learns.*torch\.no_grad"):
        lln.hf.recover(model, make("bert", head="AutoModel"), batches(1))
    with mode():
        assert lln.hf.transfer(model, batches(1), learning_rate=0)


def test_batches_are_tensors_by_name():
    ids = text(2, 12)
    for wrong, match in (
        ({"input_ids": ids.tolist()}, r"input_ids is a list; .*torch\.tensor"),
        (ids, "a batch is a Tensor; pass a dictionary"),
    ):
        with pytest.raises(TypeError, match=match):
            lln.hf.convert(make("llama"), [wrong], **STEPS)
        with pytest.raises(TypeError, match=match):
            lln.hf.convert(make("llama"), [{"input_ids": ids}, wrong], **STEPS, held_out=batches(1))
    with pytest.raises(TypeError, match=r"batches is a generator; .*a list"):
        lln.hf.convert(make("llama"), (x for x in batches(2)), **STEPS)


def trained_otherwise(seed=5):
    """The architecture of `make("llama")` with other weights."""
    model = make("llama")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1 * torch.randn(x.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("model", "model"),
        ("batches", "batches"),
        ({"options": {**SMALL, "near": 4}}, r"options\.near=8, not 4"),
        ({"transfer_steps": 1}, "transfer_steps=2, not 1"),
        ({"recover_steps": 1}, "recover_steps=2, not 1"),
        ({"transfer_options": {"seed": 1}}, r"transfer_options\.seed=None, not 1"),
        ({"keep": 1}, "keep=0, not 1"),
    ],
)
def test_a_folder_belongs_to_one_conversion(change, told, tmp_path):
    """Another model of the same shape was given the first one's weights."""
    lln.hf.convert(make("llama"), batches(3), folder=tmp_path, **STEPS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = trained_otherwise() if change == "model" else make("llama")
    data = batches(4)[1:] if change == "batches" else batches(3)
    wanted = model(text()).logits
    options = {**STEPS, **(change if isinstance(change, dict) else {})}
    with pytest.raises(ValueError, match=told) as error:
        lln.hf.convert(model, data, folder=tmp_path, **options)
    assert str(tmp_path) in str(error.value) and "another folder" in str(error.value)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert model(text()).logits.equal(wanted)


def test_transfer_is_used_again_for_another_recovery(tmp_path):
    """What recovery alone is told does not decide what transfer has learned."""
    options = {**STEPS, "recover_steps": 0}
    lln.hf.convert(make("llama"), batches(3), folder=tmp_path, **options)
    seen = []
    lln.hf.convert(
        make("llama"), batches(3), folder=tmp_path, progress=lambda *said: seen.append(said[0]),
        **STEPS,
    )  # fmt: skip
    assert seen == ["recover", "recover"]


def test_a_choice_is_not_made_again(tmp_path, monkeypatch):
    """Rounding may say otherwise after a kill, and the stage is that of the first choice."""
    monkeypatch.setattr("lln.hf.conversion.convert.EVERY", 1)
    options = {**STEPS, "keep": 2}
    found = iter(({1: [0, 1]}, {0: [0, 1]}))
    monkeypatch.setattr("lln.hf.conversion.convert.choose_kept", lambda *a, **k: next(found))

    def kill(stage, step, steps, value):
        if stage == "recover" and step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lln.hf.convert(make("llama"), batches(3), folder=tmp_path, progress=kill, **options)
    done = lln.hf.convert(make("llama"), batches(3), folder=tmp_path, **options)
    assert done.kept == [1] and done.replacement.layers == [0]
    assert set(done.scores["retrieval"]) == {0, 1} and len(done.scores["error"][0]) == 2


def test_a_digest_is_of_content_alone(tmp_path):
    model = make("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = digest_of_model(model)
    assert digest_of_model(again) == wanted == digest_of_model(model.train())
    with torch.no_grad():
        again.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-6
    changed = digest_of_model(again)
    again.config.rms_norm_eps = 1e-3
    assert len({wanted, changed, digest_of_model(again), digest_of_model(model.bfloat16())}) == 4
    ids = text(2, 12)
    batches = [{"input_ids": ids}], [{"input_ids": ids.T}], [{"labels": ids}], [{"input_ids": 1}]
    assert len({digest_of_batches(each) for each in batches}) == 4
