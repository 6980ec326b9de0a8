"""`lln convert`, from a saved model to a report: tiny models, a tokenizer made on the spot."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import lln.hf
from lln.cli import app as cli
from lln.conversion import needles, run, subject, unfinished
from lln.conversion.run import convert_and_judge
from lln.conversion.settings import Settings
from lln.records.rows import read_rows
from tests.conversion.tiny_text import article, tokenizer_of
from tests.hf.conversion.loud import loud
from tests.hf.tiny import make

EXAMPLES = Path(__file__).parents[3] / "examples"
BLOCK = ("--set", "diag_block=16", "--set", "diag_overlap=0", "--set", "slots=16")
SHORT = ("--length", "64", "--transfer-steps", "6", "--recover-steps", "2")
QUICK = (*SHORT, *BLOCK, "--judge-articles", "6", "--cost-length", "0", "--device", "cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folders of an encoder and a decoder, and a file of text."""
    root = tmp_path_factory.mktemp("convert")
    tokenizers = {
        "bert": tokenizer_of(frame=True),
        "llama": tokenizer_of(needles.NAMES, frame=False),
    }
    for family, tokenizer in tokenizers.items():
        head = "AutoModel" if family == "bert" else None
        loud(family, head).save_pretrained(root / family)
        tokenizer.save_pretrained(root / family)
    lines = [json.dumps({"text": article(200, seed)}) + "\n" for seed in range(200)]
    (root / "words.jsonl").write_text("".join(lines), encoding="utf-8")
    return root


def command(place, family: str, out, *more: str):
    given = [
        "convert",
        str(place / family),
        "--data",
        str(place / "words.jsonl"),
        "--out",
        str(out),
    ]
    return CliRunner().invoke(cli.app, [*given, *QUICK, *more])


@pytest.fixture(scope="module")
def converted(place):
    """Both models, converted, with what was printed and the results."""
    found = {}
    for family in ("bert", "llama"):
        out = place / f"{family}-linear"
        more = ("--results", str(place / "results"))
        more += ("--cost-length", "96") if family == "llama" else ()
        done = command(place, family, out, *more)
        assert done.exit_code == 0, done.output
        found[family] = (out, done.stdout)
    return found


def said_by(done) -> str:
    """What a command wrote, with the words it ended with."""
    return f"{done.output}{done.exception}"


def read(out) -> dict:
    return json.loads((out / "conversion.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_converted_model_is_loaded_and_answers(converted, family):
    out, _ = converted[family]
    automatic = hf.AutoModel if family == "bert" else hf.AutoModelForCausalLM
    model = lln.hf.load(out, automatic)
    tokenizer = hf.AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([tokenizer(article(40, 999))["input_ids"]])
    with torch.no_grad():
        assert model(ids)[0].isfinite().all()
    assert not (out / unfinished.PROGRESS).exists()
    assert not [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")]


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_report_has_the_numbers_of_the_file(converted, family):
    out, printed = converted[family]
    found, page = read(out), (out / "report.html").read_text(encoding="utf-8")
    score = "cosine_mean" if family == "bert" else "perplexity"
    assert [row["stage"] for row in found["stages"]] == [
        *("softmax", "calibrate", "transfer", "recover")
    ]
    for row in found["stages"]:
        text = f"{row[score]:.{4 if family == 'bert' else 2}f}"
        assert text in page and text in printed
    for values in found["layer_errors"].values():
        assert f"{sum(values) / len(values):.3f}" in page
    for own in found["branches"].values():
        assert f"{own[score]:.4f}" in page and f"{own[score]:.4f}" in printed
    assert len(found["near_shares"]) == 2 * 4
    assert page.count('id="shares-cell-') == 2 * 4
    assert "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)


def test_an_encoder_is_judged_by_its_embeddings(converted):
    found = read(converted["bert"][0])
    first, last = found["stages"][0], found["stages"][-1]
    assert first["cosine_mean"] == pytest.approx(1, abs=1e-5) and first["token_nmse"] == 0
    assert found["agreement"] == last["cosine_mean"] < 1
    assert last["texts"] == 6 and last["tokens"] == 6 * 64
    assert found["retrieval"]["articles"] == 6
    assert found["tokens"] == (4 + 6 + 2) * 2 * 64
    assert found["near_keys"] == 16 and found["kept"] == []


def test_a_decoder_is_judged_by_its_tokens(converted):
    found = read(converted["llama"][0])
    first, last = found["stages"][0], found["stages"][-1]
    assert found["agreement"] == pytest.approx(first["perplexity"] / last["perplexity"])
    assert found["near_keys"] == 16 + 4
    assert run.near_keys({"diag_block": 16, "diag_overlap": 8, "sinks": 4}, causal=True) == 28
    assert run.near_keys({"diag_block": 16, "diag_overlap": 8}, causal=False) == 32
    assert {row["model"] for row in found["needles"]} == {"teacher", "student"}
    assert set(found["loss_by_position"]) == {"teacher", "student"}
    assert len(found["texts"]) == 3
    assert [row["N"] for row in found["forward_cost"]] == [96]
    assert found["decode_cost"][0]["student_cache"] > 0


def test_rows_of_both_become_tables(place, converted):
    rows = read_rows(place / "results" / "conversion.jsonl")
    assert [row["model"] for row in rows] == ["bert", "llama"]
    for row in rows:
        assert row["subject"] == "conversion" and row["mechanism"] == row["attention"]
        assert row["layer_error_transfer"] < row["layer_error_calibrate"]
        assert {"digest", "seed", "configuration", "commit", "device", "torch", "date"} <= set(row)
        assert str(place) not in json.dumps(row)  # where it was run is nobody's business
    given = ["table", "conversion", "--results", str(place / "results")]
    shown = CliRunner().invoke(cli.app, given).stdout
    assert f"{rows[0]['stages'][-1]['cosine_mean']:.4f}" in shown
    assert f"{rows[1]['stages'][-1]['perplexity']:.2f}" in shown
    records = json.loads(CliRunner().invoke(cli.app, [*given, "--json"]).stdout)
    assert [record["model"] for record in records] == ["bert", "llama"]


@pytest.mark.parametrize(("required", "status"), [("0.01", 0), ("0.99999", 1)])
def test_the_exit_status_tells_whether_it_is_good_enough(place, tmp_path, required, status):
    done = command(
        place, "bert", tmp_path / "out", "--require", required, "--transfer-steps", "0",
        "--recover-steps", "0",
    )  # fmt: skip
    assert done.exit_code == status, done.output
    assert ("less than --require" in said_by(done)) == bool(status)
    assert (tmp_path / "out" / "report.html").exists()  # what came of it is kept all the same


@pytest.mark.parametrize("stage", ["transfer", "recover"])
def test_a_killed_run_goes_on_and_ends_as_one_in_one_go(
    place, converted, tmp_path, stage, monkeypatch
):
    from lln.hf.conversion import convert

    monkeypatch.setattr(convert, "EVERY", 1)
    out = tmp_path / "out"
    told = unfinished.Unfinished.took

    def killed(self, name, step, total):
        told(self, name, step, total)
        if name == stage and step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(unfinished.Unfinished, "took", killed)
    assert command(place, "bert", out).exit_code == 130
    assert [path.name for path in out.iterdir()] == [unfinished.PROGRESS]
    monkeypatch.setattr(unfinished.Unfinished, "took", told)
    other = command(place, "bert", out, "--seed", "1")
    assert other.exit_code == 1 and "was begun with seed=0, not 1" in said_by(other)
    measured = []
    before = run.judge_of

    def counted(*args, **options):
        judge = before(*args, **options)
        own = judge.measure
        judge.measure = lambda model: measured.append(1) or own(model)
        return judge

    monkeypatch.setattr(run, "judge_of", counted)
    done = command(place, "bert", out)
    assert done.exit_code == 0 and "goes on where it was interrupted" in done.stdout
    if stage == "recover":  # what was measured before is not measured again, but for the branches
        assert len(measured) == 1 + 2
    again, whole = read(out), read(converted["bert"][0])
    assert again["agreement"] == pytest.approx(whole["agreement"], abs=1e-5)
    assert again["layer_errors"]["transfer"] == pytest.approx(
        whole["layer_errors"]["transfer"], rel=1e-3
    )


def test_layers_may_keep_softmax_beside_maps_of_what_there_was_before_rotation(place, tmp_path):
    more = ("--keep", "1", "--recover-steps", "0", "--set", "before_rotation=true")
    done = command(place, "llama", tmp_path / "out", *more)
    assert done.exit_code == 0, done.output
    found = read(tmp_path / "out")
    assert found["options"]["before_rotation"] and "center_keys" not in found["options"]
    (kept,) = found["kept"]
    layers = lln.hf.load(tmp_path / "out", hf.AutoModelForCausalLM).model.layers
    assert layers[1 - kept].self_attn.lln.features.before_rotation
    assert "lln" not in layers[kept].self_attn._modules
    assert [row["stage"] for row in found["stages"]][-1] == "keep"
    assert {row["layer"] for row in found["near_shares"]} != {0, 1}


def test_another_attention_has_no_branches(place, tmp_path):
    given = ["convert", str(place / "bert"), "--data", str(place / "words.jsonl")]
    given += ["--out", str(tmp_path / "out"), "--attention", "hedgehog", *SHORT]
    done = CliRunner().invoke(cli.app, [*given, "--judge-articles", "4", "--cost-length", "0"])
    assert done.exit_code == 0, done.output
    found = read(tmp_path / "out")
    assert found["branches"] == {} and found["near_keys"] is None and found["near_shares"] == []


def test_half_precision(place, tmp_path):
    done = command(place, "bert", tmp_path / "out", "--precision", "bf16")
    assert done.exit_code == 0, done.output
    assert read(tmp_path / "out")["precision"] == "bf16"


def test_text_that_is_held_out_is_never_learned_from(place, tmp_path):
    own = subject.find_texts(place / "words.jsonl", None)
    learned, held = set(own.learned()), set(own.held())
    assert len(held) == 10 and len(learned) == 190 and not learned & held
    for split, seeds in {"train": range(3), "valid": range(3, 5)}.items():
        lines = [json.dumps({"text": article(80, seed)}) + "\n" for seed in seeds]
        (tmp_path / f"w_{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    split = subject.find_texts(tmp_path, None)
    assert len(list(split.learned())) == 3 and len(list(split.held())) == 2
    other = subject.find_texts(place / "words.jsonl", tmp_path / "w_valid.jsonl")
    assert len(list(other.learned())) == 200 and len(list(other.held())) == 2
    assert other.judged_text(1) == article(80, 3)
    with pytest.raises(ValueError, match="is among the text to learn from"):
        subject.find_texts(tmp_path, tmp_path / "w_train.jsonl")


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize(("updates", "learned", "apart"), [(5, 10, 8), (10**4, None, 8)])
def test_layers_are_compared_on_text_apart(place, family, updates, learned, apart):
    own, texts = (
        subject.load_subject(place / family, "cpu"),
        subject.find_texts(place / "words.jsonl", None),
    )
    sizes = {"length": 64, "batch_size": 2, "seed": 0}
    lessons = subject.training_batches(own, texts, **sizes, updates=updates)
    seen, other = (
        {x.tobytes() for x in part.sequences} for part in (lessons.batches, lessons.apart)
    )
    assert len(other) == apart and not seen & other
    assert learned is None or len(seen) == learned
    judged = " ".join(texts.held())
    assert own.tokenizer.decode(lessons.apart.sequences[0][5:40]) not in judged


def broken(place, tmp_path, kind: str):
    """A folder that cannot be converted."""
    folder = tmp_path / kind
    if kind == "missing":
        return folder
    shutil.copytree(place / "bert", folder)
    if kind in ("pickle", "empty"):
        (folder / "model.safetensors").unlink()
    if kind == "pickle":
        (folder / "pytorch_model.bin").write_bytes(b"")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if kind == "head":
        config["architectures"] = ["BertForSequenceClassification"]
    if kind == "converted":
        config["lln"] = [{}]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("missing", "is not a folder"),
        ("pickle", "pytorch_model.bin, a pickle that could run code"),
        ("empty", r"has no \*\.safetensors"),
        ("head", "has a BertForSequenceClassification"),
        ("converted", "was converted before"),
    ],
)
def test_a_wrong_folder_is_refused(place, tmp_path, kind, said):
    folder = broken(place, tmp_path, kind)
    given = ["convert", str(folder), "--data", str(place / "words.jsonl")]
    done = CliRunner().invoke(cli.app, [*given, "--out", str(tmp_path / "out"), *QUICK])
    assert done.exit_code == 1
    assert re.search(said, said_by(done)), said_by(done)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--data", "nowhere.txt"), "data=nowhere.txt does not exist"),
        (("--length", "4096"), "more than the 128 positions"),
        (("--precision", "fp8"), "--precision fp8 is unknown"),
        (("--attention", "linformr"), "linformr"),
        (("--set", "diag_blok=3"), "diag_blok"),
        (("--keep", "9"), "keep=9 of 2 layers"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_arguments_are_named(place, tmp_path, more, said):
    done = command(place, "bert", tmp_path / "out", *more)
    assert done.exit_code == 1 and said in said_by(done), done.output
    assert "Traceback" not in done.output


def test_words_of_the_command_line_are_checked(place, tmp_path):
    for more in (("--keep", "few"), ("--set", "diag_block")):
        assert command(place, "bert", tmp_path / "out", *more).exit_code == 2


def test_a_folder_with_files_is_left_alone(place, tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    done = command(place, "bert", tmp_path)
    assert done.exit_code == 1 and "has files already, such as notes.txt" in said_by(done)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_processes_do_not_write_one_folder(place, tmp_path):
    settings = Settings(place / "bert", place / "words.jsonl", tmp_path / "out", cost_length=0)
    with (
        unfinished.Unfinished(settings.out, settings.decisive()).held(),
        pytest.raises(ValueError, match="is being written by process"),
    ):
        convert_and_judge(settings)


def test_a_report_that_fails_leaves_nothing_half_done(place, tmp_path, monkeypatch):
    def fails(found):
        raise OSError("disk full")

    monkeypatch.setattr(run.page, "build", fails)
    out = tmp_path / "out"
    done = command(place, "bert", out)
    assert done.exit_code == 1 and "disk full" in said_by(done)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == [unfinished.PROGRESS]
    monkeypatch.undo()
    assert command(place, "bert", out).exit_code == 0


def test_roberta_counts_its_positions_from_behind_the_padding():
    assert subject._positions(make("roberta")) == (127, True)
    assert subject._positions(make("llama")) == (128, False)
    assert subject._positions(make("gpt2")) == (128, True)


def test_the_example_converts(place, capsys):
    main = runpy.run_path(str(EXAMPLES / "convert_minilm.py"))["main"]
    scores = main(str(place / "bert"), str(place / "words.jsonl"), steps=3, length=64)
    assert 0.5 < scores["cosine_mean"] <= 1
    assert "layer 1: error" in capsys.readouterr().out
