"""Packed sequences inside models: every answer and gradient is that of one sequence at a time."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

import lln.hf
from lln import zoo
from lln.instruments.recording.recorder import attention_calls
from tests.hf.test_families import WINDOWS, model_of
from tests.hf.test_masks import sliding
from tests.hf.tiny import DECODERS, ENCODERS, TEXT, make, padded, run, text

LENGTHS = (7, 13, 4, 1, 9, 12)
CONSTANTS = {"statistics": "fixed", "alpha": 1.5, "beta": 1.5}
WINDOW = {"near": lln.Near(4, overlap=2, sinks=1)}
# As lln.RECOMMENDED has them for encoders, at the size of these models.
RECOMMENDED = {"method": "entropy", "learn_scale": True, "conv": 3, "near": 4}
SETTINGS = {
    "lln": ("lln", {}),
    "lln_diag": ("lln_diag", {"near": 4}),
    "recommended": ("lln_diag", RECOMMENDED),
    "near and far": ("lln_nearfar", {**WINDOW, "feature_map": "learned", "slots": 8}),
    "mixed": ("lln_diag", {"near": 4, "layers": [1]}),
}
FIRST = {"roberta": 1}  # padding_idx + 1


def texts(lengths=LENGTHS):
    return [text(1, length, seed=length) for length in lengths]


def pack(ids, first: int = 0):
    positions = [torch.arange(first, first + x.shape[1]) for x in ids]
    return {"input_ids": torch.cat(ids, 1), "position_ids": torch.cat(positions)[None]}


def lengths_of(ids):
    cu = torch.tensor([0, *(x.shape[1] for x in ids)]).cumsum(0).to(torch.int32)
    longest = max(x.shape[1] for x in ids)
    names = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    return {**names, "max_length_q": longest, "max_length_k": longest}


def replaced(family, setting="lln_diag", **changes):
    attention, options = SETTINGS[setting]
    model = make(family)
    if family in DECODERS:
        changes = {"statistics": "fixed", **changes}
    lln.hf.replace(model, attention, quiet=True, **{**options, **changes})
    for name, parameter in model.named_parameters():
        if ".lln." in name:  # filters start at zero, learned maps at the identity
            torch.manual_seed(1)
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    if any(core.calibration.kind != "sample" for core in cores(model)):
        lln.hf.calibrate(model, [{"input_ids": text(4, 30, seed=5)}], method="entropy")
    return model


def cores(model):
    found = (getattr(part, "_modules", {}).get("lln") for part in model.modules())
    return [core for core in found if core is not None]


def one_by_one(model, ids):
    return torch.cat([run(model, input_ids=x) for x in ids], 1)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        *((family, setting) for family in ("bert", "llama") for setting in SETTINGS),
        *((family, "near and far") for family in (*ENCODERS, *DECODERS)[1:] if family != "llama"),
    ],
)
def test_answers_and_gradients_are_those_of_one_by_one(family, setting):
    model, ids = replaced(family, setting), texts()
    batch = pack(ids, FIRST.get(family, 0))
    expected = torch.cat([model(input_ids=x).logits for x in ids], 1)
    found = []
    for logits in (expected, model(**batch).logits):
        close(logits, expected)
        model.zero_grad()
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-4, msg=name)
    together = run(model, input_ids=batch["input_ids"], position_ids=None)
    assert not together.allclose(expected, atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_maps_that_see_before_the_rotation(family):
    model, ids = replaced(family, "near and far", before_rotation=True), texts()
    close(run(model, **pack(ids)), one_by_one(model, ids))


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_what_the_collator_of_transformers_makes_is_taken_as_it_is(family):
    model, ids = replaced(family), texts()
    collate = hf.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, position_ids_start=FIRST.get(family, 0)
    )
    batch = collate([{"input_ids": x[0].tolist()} for x in ids])
    assert {"labels", "cu_seq_lens_q", "max_length_q"} <= set(batch)
    got = model(**batch)
    close(got.logits, one_by_one(model, ids))
    assert got.loss.isfinite() and getattr(got, "past_key_values", None) is None


def test_lengths_alone_are_enough_where_positions_are_rotated():
    model, ids = replaced("llama"), texts()
    packed = {"input_ids": torch.cat(ids, 1), **lengths_of(ids)}
    close(run(model, **packed), one_by_one(model, ids))
    packed["attention_mask"] = torch.ones_like(packed["input_ids"])
    close(run(model, **packed), one_by_one(model, ids))
    with pytest.raises(ValueError, match=r"BertModel got packed.* without position_ids"):
        run(replaced("bert"), input_ids=torch.cat(ids, 1), **lengths_of(ids))


def test_several_rows_each_packed_on_its_own():
    model, ids = replaced("llama"), texts((5, 7, 12, 9, 3))
    rows = [pack(ids[:2]), pack(ids[2:3]), pack(ids[3:])]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    close(run(model, **batch).flatten(0, 1), one_by_one(model, ids).flatten(0, 1))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_running_statistics_move_as_on_a_padded_batch(family):
    """One step for all sequences, however many batches they are taken apart into."""
    ids = texts()
    model = replaced(family, statistics="running").train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    other = copy.deepcopy(model)
    longest = max(LENGTHS)
    rows = [padded(x, longest - x.shape[1], "right") for x in ids]
    other(**{name: torch.cat([row[name] for row in rows]) for name in rows[0]})
    before = copy.deepcopy(cores(model)[0].statistics.state_dict())
    model(**pack(ids))
    for core, wanted in zip(cores(model), cores(other), strict=True):
        for name, value in wanted.statistics.state_dict().items():
            torch.testing.assert_close(core.statistics.state_dict()[name], value)
    after = cores(model)[0].statistics.state_dict()
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_constants_are_calibrated_as_on_a_padded_batch():
    ids, longest = texts(), max(LENGTHS)
    rows = [padded(x, longest - x.shape[1], "right") for x in ids]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    found = []
    for inputs in (batch, pack(ids)):
        model = make("llama")
        lln.hf.replace(model, "lln_nearfar", quiet=True, **WINDOW, center_keys=True)
        lln.hf.calibrate(model, [inputs])
        found.append([core.state_dict() for core in cores(model)])
    for wanted, got in zip(*found, strict=True):
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, msg=name)


@pytest.mark.parametrize("rows", [0, 8])
def test_transfer_learns_from_packed_batches(rows):
    model = make("llama")
    lln.hf.replace(model, "lln_nearfar", quiet=True, **WINDOW, feature_map="learned", slots=8)
    batch = pack(texts())
    lln.hf.calibrate(model, [batch])
    log = lln.hf.transfer(model, [batch] * 8, rows=rows)
    assert log[-1]["error"] < log[0]["error"]


def test_heads_that_keep_softmax():
    model = make("llama")
    done = lln.hf.replace(model, "lln_diag", quiet=True, near=4, **CONSTANTS)
    done.keep_softmax_heads({0: [0, 3], 1: [1]})
    ids = texts()
    close(run(model, **pack(ids)), one_by_one(model, ids))


@pytest.mark.parametrize(
    "attention", [name for name, entry in zoo.MECHANISMS.items() if not entry.replaces_ffn]
)
def test_other_mechanisms_of_the_zoo(attention):
    model = make("bert")
    lln.hf.replace(model, attention, quiet=True)
    ids = texts()
    close(run(model, **pack(ids)), one_by_one(model, ids))


def test_windows_that_keep_softmax_stay_windows():
    model = sliding(["full_attention", "sliding_attention"])
    lln.hf.replace(model, "lln", layers="global", quiet=True, **CONSTANTS)
    ids = texts()
    close(run(model, **pack(ids)), one_by_one(model, ids))
    close(run(model, input_ids=torch.cat(ids, 1), **lengths_of(ids)), one_by_one(model, ids))


def test_windows_of_eager_attention_stay_windows():
    """Its masks are added to the scores."""
    model = sliding(["full_attention", "sliding_attention"])
    model.set_attn_implementation("eager")
    lln.hf.replace(model, "lln", layers="global", quiet=True, **CONSTANTS)
    ids = texts()
    close(run(model, **pack(ids)), one_by_one(model, ids))
    close(run(model, input_ids=torch.cat(ids, 1), **lengths_of(ids)), one_by_one(model, ids))


@pytest.mark.filterwarnings("ignore")
def test_windows_of_an_encoder_stay_windows():
    model = model_of("modernbert", WINDOWS["modernbert"])
    lln.hf.replace(model, "lln_diag", layers="global", quiet=True, near=4)
    ids = texts((20, 9, 26))
    close(run(model, **pack(ids)), one_by_one(model, ids))
    close(run(model, **pack(ids), **lengths_of(ids)), one_by_one(model, ids))


def test_an_encoder_chosen_by_name_reads_lengths():
    lln.hf.register()
    model = make("bert")
    model.set_attn_implementation("lln_diag")
    ids = texts()
    close(run(model, **pack(ids), **lengths_of(ids)), one_by_one(model, ids))


def test_positions_that_only_jump_are_no_packed_sequences():
    model = replaced("bert")
    ids = text(1, 12)
    for positions in ([*range(6), *range(20, 26)], [*range(3, 9), *range(6)]):
        positions = torch.tensor([positions])
        mask = torch.ones_like(ids)
        expected = run(model, input_ids=ids, position_ids=positions, attention_mask=mask)
        assert torch.equal(run(model, input_ids=ids, position_ids=positions), expected)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("count", [2, 5])
def test_texts_of_one_token_each(family, count):
    model, ids = replaced(family), text(1, count).split(1, 1)
    close(run(model, **pack(ids)), one_by_one(model, ids))
    close(run(model, **pack(ids), **lengths_of(ids)), one_by_one(model, ids))


def test_a_mask_says_that_nothing_is_packed():
    """As in transformers, which looks at positions only where there is no mask."""
    model, batch = replaced("bert"), pack(texts((6, 6)))
    mask = torch.ones_like(batch["input_ids"])
    assert not run(model, **batch).allclose(run(model, **batch, attention_mask=mask))


def test_undone_and_failed_calls_leave_nothing_behind():
    model, ids = make("bert"), texts()
    before = run(model, **pack(ids))
    undo = lln.hf.replace(model, "lln_diag", quiet=True, near=4)
    expected = one_by_one(model, ids)
    layer = model.bert.encoder.layer[1]

    def fail(*_):
        raise KeyError("stop")

    handle = layer.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        run(model, **pack(ids))
    handle.remove()
    close(one_by_one(model, ids), expected)
    row = torch.cat(ids, 1)  # of the size of the call that failed
    assert not run(model, input_ids=row).allclose(expected)
    undo()
    assert torch.equal(run(model, **pack(ids)), before)


@pytest.mark.parametrize("setting", ["lln_diag", "mixed"])
def test_gradient_checkpoints(setting):
    model, batch = replaced("llama", setting).train(), pack(texts())
    found = []
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(**batch).logits.square().sum().backward()
        found.append(model.model.embed_tokens.weight.grad)
    close(*found)


def test_instruments_see_the_sequences_apart():
    """Each sequence is a sample, under LLN and under other mechanisms of the zoo."""
    ids = texts((6, 5))
    model = replaced("bert", "lln")
    with attention_calls(model, samples=2) as calls:
        run(model, **pack(ids))
    assert [list(call.q.shape[:3]) for call in calls] == [[2, 4, 6]] * 2
    model = make("bert")
    lln.hf.replace(model, "relu", quiet=True)
    with attention_calls(model, samples=2) as calls:
        run(model, **pack(ids))
    assert [list(call.q.shape[:3]) for call in calls] == [[2, 4, 6]] * 2
    assert all(call.key_mask.sum(-1).tolist() == [6, 5] for call in calls)


class TestRefused:
    @pytest.mark.parametrize("family", ENCODERS)
    def test_an_encoder_whose_tokens_all_have_one_position(self, family):
        """Texts of one token each, or one text without order: the caller says which."""
        model, ids = replaced(family), text(1, 5).split(1, 1)
        batch = pack(ids, FIRST.get(family, 0))
        with pytest.raises(ValueError, match=r"all position_ids of a row.*attention_mask of ones"):
            run(model, **batch)
        close(run(model, **batch, **lengths_of(ids)), one_by_one(model, ids))
        mask = torch.ones_like(batch["input_ids"])
        assert not run(model, **batch, attention_mask=mask).allclose(one_by_one(model, ids))

    def test_a_cache(self):
        model, batch = replaced("llama"), pack(texts())
        for extra in ({"use_cache": True}, {"past_key_values": hf.DynamicCache()}):
            with pytest.raises(ValueError, match=r"packed sequences and a cache.*use_cache=False"):
                run(model, **batch, **extra)

    def test_tokens_of_an_encoder(self):
        model = make("bert", head="AutoModel", is_decoder=True, add_cross_attention=True)
        lln.hf.replace(model, "lln", quiet=True, **CONSTANTS)
        with pytest.raises(ValueError, match="packed sequences and encoder_hidden_states"):
            run(model, **pack(texts()), encoder_hidden_states=torch.randn(1, 5, 32))

    def test_padding_beside_lengths(self):
        ids = texts()
        batch = {**pack(ids), **lengths_of(ids)}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -1] = 0
        with pytest.raises(ValueError, match="an attention_mask that hides tokens"):
            run(replaced("llama"), **batch)

    @pytest.mark.parametrize("cu", [[0, 5, 9], [1, 5, 46], [0, 30, 20, 46]])
    def test_lengths_that_do_not_fit(self, cu):
        cu = torch.tensor(cu)
        with pytest.raises(ValueError, match="must rise from 0 to the number of tokens"):
            run(replaced("llama"), input_ids=torch.cat(texts(), 1), cu_seq_lens_q=cu)

    def test_lengths_of_several_rows(self):
        cu = torch.tensor([0, 12, 24])
        with pytest.raises(ValueError, match="2 rows of 12; pack all sequences into one row"):
            run(replaced("llama"), input_ids=text(2, 12), cu_seq_lens_q=cu)

    def test_other_lengths_of_keys(self):
        model, ids = replaced("llama"), texts()
        lengths = {**lengths_of(ids), "cu_seq_lens_k": torch.tensor([0, 10, 46])}
        with pytest.raises(ValueError, match="differ: queries and keys"):
            run(model, input_ids=torch.cat(ids, 1), **lengths)

    def test_rotary_positions_that_go_on_without_replace(self):
        lln.hf.register()
        model, ids = make("llama"), texts()
        model.config.lln_options = CONSTANTS
        model.set_attn_implementation("lln")
        packed = {"input_ids": torch.cat(ids, 1), **lengths_of(ids), "use_cache": False}
        with pytest.raises(ValueError, match="which go on from one packed sequence to the next"):
            run(model, **packed)
        with pytest.raises(ValueError, match=r"packed sequences that lln.hf.replace was not told"):
            run(model, **pack(ids), use_cache=False)

    def test_models_that_make_their_masks_themselves(self):
        model = model_of("layoutlm", TEXT)
        lln.hf.replace(model, "lln_diag", quiet=True)
        with pytest.raises(ValueError, match="LayoutLMModel makes its masks itself"):
            run(model, **pack(texts()))

    def test_a_compiled_model(self, monkeypatch):
        ids = texts()
        bert, llama = replaced("bert"), replaced("llama")
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(ValueError, match=r"BertModel is compiled or recorded.*a mask of ones"):
            run(bert, **pack(ids))
        with pytest.raises(ValueError, match="in a compiled model"):
            run(llama, input_ids=torch.cat(ids, 1), **lengths_of(ids))
