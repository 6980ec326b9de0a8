"""`lln convert`, from a saved model to a report: tiny models, a tokenizer made on the spot."""

from __future__ import annotations

import functools
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
from lln.conversion import estimate, findings, gain, judge, needles, run, subject, unfinished
from lln.conversion.row import row_of
from lln.conversion.run import convert_and_judge
from lln.conversion.settings import Settings
from lln.records import files
from lln.records.rows import read_rows
from lln.texts import bundled
from tests.conversion.tiny_text import article, tokenizer_of
from tests.hf.conversion.loud import loud
from tests.hf.tiny import make

pytestmark = pytest.mark.slow  # the command: whole conversions, in processes of their own

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCK = ("--set", "near=16", "--set", "slots=16")
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
        if family == "llama":
            more += ("--cost-length", "96", "--set", 'near={"block": 16, "sinks": 4}')
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
    words = gain.gain_words(found)  # of time and memory, at the head and on the terminal
    assert words in " ".join(printed.split()) and page.index(words) < page.index("<h2")
    assert all(cell in printed and cell in page for line in gain.gain_lines(found) for cell in line)
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
    assert findings.near_keys({"near": lln.Near(16, overlap=8, sinks=4)}, causal=True) == 28
    assert findings.near_keys({"near": lln.Near(16, overlap=8)}, causal=False) == 32
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
        found = before(*args, **options)
        own = found.measure
        found.measure = lambda model: measured.append(1) or own(model)
        return found

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


@pytest.mark.parametrize("changed", ["model", "text"])
def test_an_unfinished_run_of_other_files_in_the_same_place_is_not_resumed(
    place, tmp_path, changed, monkeypatch
):
    shutil.copytree(place / "bert", tmp_path / "bert")
    shutil.copy(place / "words.jsonl", tmp_path)
    told = unfinished.Unfinished.took

    def killed(self, name, step, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(unfinished.Unfinished, "took", killed)
    assert command(tmp_path, "bert", tmp_path / "out").exit_code == 130
    monkeypatch.setattr(unfinished.Unfinished, "took", told)
    if changed == "model":
        torch.manual_seed(1)
        hf.AutoModel.from_config(loud("bert", "AutoModel").config).save_pretrained(
            tmp_path / "bert"
        )
    else:
        lines = [json.dumps({"text": article(200, seed)}) + "\n" for seed in range(300, 500)]
        (tmp_path / "words.jsonl").write_text("".join(lines), encoding="utf-8")
    other = command(tmp_path, "bert", tmp_path / "out")
    what = "files of the model" if changed == "model" else "text"
    assert other.exit_code == 1 and f"was begun with digest of the {what}=" in said_by(other)
    assert "pass another --out" in said_by(other)


def test_layers_may_keep_softmax_beside_maps_of_what_there_was_before_rotation(
    place, tmp_path, monkeypatch
):
    from lln.hf.conversion import convert

    more = ("--keep", "2", "--recover-steps", "0", "--set", "before_rotation=true")
    monkeypatch.setattr(convert, "choose_kept", lambda *_: {1: [0, 1]})  # a whole layer
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
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "2 of 4 key heads keep softmax" in page and "place by error" in page
    for own in (*found["scores"]["retrieval"], *found["scores"]["error"]):
        assert all(f"{score:.4f}" in page for score in own)
    recalled = {(row["model"], row["task"]): row for row in found["recall"]}
    assert len(recalled) == 4 and f"{recalled['student', 'pairs']['loss']:.3f}" in page


def test_key_heads_are_kept_as_a_cache_has_room_for_them(place, tmp_path):
    given = ("--memory", "3/4", "--context", "8192", "--recover-steps", "0")
    done = command(place, "llama", tmp_path / "out", *given)
    assert done.exit_code == 0, done.output
    found = read(tmp_path / "out")
    kept = {(int(layer), h) for layer, own in found["kept_key_heads"].items() for h in own}
    assert len(kept) == 2  # linear attention takes some
    rows = found["near_shares"]  # of query heads, two a key head
    assert len(rows) == 4 and not kept & {(row["layer"], row["head"] // 2) for row in rows}
    shares = [row["near_share"] for row in rows]
    assert row_of(found)["near_share"] == pytest.approx(sum(shares) / 4)
    assert found["settings"]["keep"] == {"share": 0.75, "context": 8192}


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


def plain(folder, words: int) -> Path:
    """A .txt file of lines without headings, so that nothing tells where an article ends."""
    lines = "\n".join(article(10, seed) for seed in range(words // 10))
    (folder / "plain.txt").write_text(lines, encoding="utf-8")
    return folder / "plain.txt"


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_text_without_articles_is_cut_into_pieces(place, tmp_path, family):
    data = plain(tmp_path, 8000)
    done = command(place, family, tmp_path / "out", "--data", str(data))
    assert done.exit_code == 0, said_by(done)
    if family == "bert":  # the last 400 words are held out, 62 fit beside [CLS] and [SEP]
        found = read(tmp_path / "out")
        assert found["stages"][-1]["texts"] == 6 and found["retrieval"]["articles"] == 3
        assert found["stages"][-1]["similarity_correlation"] is not None
        assert "is cut into pieces of 64 tokens" in done.stdout


def test_without_data_the_bundled_text_is_taken_and_that_is_said(place, tmp_path, monkeypatch):
    monkeypatch.delenv("LLN_DATA", raising=False)
    none = ("--transfer-steps", "0", "--recover-steps", "0")
    given = ["convert", str(place / "bert"), "--out", str(tmp_path / "out"), *QUICK, *none]
    done = CliRunner().invoke(cli.app, given)
    assert done.exit_code == 0, said_by(done)
    assert "without --data it learns from tinyshakespeare" in done.stdout
    assert read(tmp_path / "out")["corpus"].startswith("tinyshakespeare")
    own = subject.find_texts(None, None)
    assert not set("".join(own.held()).split("\n\n")) <= set("".join(own.learned()).split("\n\n"))
    assert "".join(own.learned()) + "".join(own.held()) == bundled.text()


def test_an_estimate_counts_what_is_done(place, monkeypatch):
    """Trying out leaves the model as it was; the seconds of what was tried make the sum."""
    own = subject.load_subject(place / "bert", "cpu")
    texts = subject.find_texts(place / "words.jsonl", None)
    sizes = {"length": 64, "batch_size": 2}
    judged = judge.judge_of(own, texts, **sizes, articles=6)
    lessons = subject.training_batches(own, texts, **sizes, updates=20, seed=0)
    batches = subject.OnDevice(lessons.batches, "cpu")
    options = {"near": lln.Near(16, overlap=0), "slots": 16}
    steps = {"transfer_steps": 8, "recover_steps": 5, "cost_length": 0}
    settings = Settings(place / "bert", None, place / "no", options=options, **sizes, **steps)
    before = {name: x.clone() for name, x in own.model.state_dict().items()}
    pace = estimate.try_out(own.model, batches, run._arguments(settings, judged))
    assert all(seconds > 0 for seconds in vars(pace).values())
    assert all(torch.equal(x, before[name]) for name, x in own.model.state_dict().items())
    assert not getattr(own.model.config, "lln", None)
    made = estimate.Pace(softmax=1, converted=2, prepared=3, error=4, transfer=5, recover=6)
    monkeypatch.setattr(run, "try_out", lambda *_: made)
    said = run._estimate(settings, own, judged, batches, 64, loading=7.0)
    learned = 4 * (3 + 4) + 8 * 5 + 5 * 6
    tokens = 6 * 64 / (2 * 64)  # of a pass over what is judged, in batches
    passes = 3 * 1 + (3 + 2 + 2) * 2  # teacher and halves; stages, branches and halves
    assert f"{learned} s to learn, {passes * tokens:.0f} s to judge, 0 s to measure" in said
    assert 0 <= estimate.seconds_since_start() < 1e6  # since the start of this process
    known = {"tokens": 128, "length": 64, "loading": 7.0}
    assert estimate.cost_seconds(made, own.model, [], **known) == 0
    assert estimate.cost_seconds(made, own.model, [64], **known) == 7 + (4 + 2) * (0.5 + 1)
    assert estimate.cost_seconds(made, own.model, [64, 128], **known) > 7 + 3 * (4 + 2) * (0.5 + 1)


def test_too_few_texts_for_their_similarities_leave_them_out(place, tmp_path):
    done = command(place, "bert", tmp_path / "out", "--data", str(plain(tmp_path, 2000)))
    assert done.exit_code == 0, said_by(done)
    found = read(tmp_path / "out")
    assert found["stages"][-1]["texts"] == 2
    assert found["stages"][-1]["similarity_correlation"] is None
    assert "similarities are compared among three texts or more" in done.stdout


@pytest.mark.parametrize(("words", "said"), [(30, "is too short"), (60, "more text")])
def test_a_text_that_is_too_short_is_named(place, tmp_path, words, said):
    data = plain(tmp_path, words)
    done = command(place, "bert", tmp_path / "out", "--data", str(data))
    assert done.exit_code == 1
    assert str(data) in said_by(done) and said in said_by(done), said_by(done)
    assert "--length" in said_by(done) and not (tmp_path / "out" / "report.html").exists()


def test_what_is_no_number_is_left_out_of_scores(tmp_path):
    own = unfinished.Unfinished(tmp_path / "out", {})
    assert own.once(lambda model: {"cosine_mean": float("nan"), "texts": 1})(None) == {
        "cosine_mean": None,
        "texts": 1,
    }


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
    if kind in ("words", "half"):
        (folder / "tokenizer.json").unlink()
    if kind == "words":
        (folder / "tokenizer_config.json").unlink()
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
        ("words", r"has no tokenizer.*tokenizer\.save_pretrained"),
        ("half", r"has no tokenizer.*tokenizer\.save_pretrained"),
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
        (("--device", "foo"), "--device foo is unknown; choose cpu, cuda"),
        (("--device", "cpu:x"), "--device cpu:x is unknown; choose cpu, cuda"),
        (("--attention", "linformr"), "linformr"),
        (("--set", "diag_blok=3"), "diag_blok"),
        (("--keep", "9"), "keep=9 of 8 key heads"),
        (("--memory", "1/7"), "--memory 1/7 is a share of softmax's cache, which grows"),
        (("--memory", "1/0", "--context", "8"), "--memory 1/0 is not a share"),
        (("--memory", "7", "--context", "8"), "--memory 7 is not in (0, 1]"),
        (("--memory", "1/7", "--context", "8", "--keep", "2"), "leave one of them out"),
        (("--context", "8"), "--context 8 is of --memory, which is missing"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_arguments_are_named(place, tmp_path, more, said):
    done = command(place, "bert", tmp_path / "out", *more)
    assert done.exit_code == 1 and said in said_by(done), done.output
    assert "Traceback" not in done.output


def test_words_of_the_command_line_are_checked(place, tmp_path):
    for more in (("--keep", "few"), ("--set", "near")):
        assert command(place, "bert", tmp_path / "out", *more).exit_code == 2


def test_a_folder_with_files_is_left_alone(place, tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    done = command(place, "bert", tmp_path)
    assert done.exit_code == 1 and "has files already, such as notes.txt" in said_by(done)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_processes_do_not_write_one_folder(place, tmp_path):
    settings = Settings(place / "bert", place / "words.jsonl", tmp_path / "out", cost_length=0)
    with (
        files.held(settings.out / unfinished.PROGRESS / "lock"),
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


def test_what_stands_beside_the_weights_is_kept(place, tmp_path):
    folder = tmp_path / "bert"
    shutil.copytree(place / "bert", folder)
    kept = ["README.md", "1_Pooling/config.json", "2_Dense/model.safetensors", "own/words.txt"]
    modules = [{"idx": i, "path": path} for i, path in enumerate(["", "1_Pooling", "2_Dense"])]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    old = ["pytorch_model.bin", "onnx/model.onnx", "model.safetensors.index.json", ".git/config"]
    for name in (*kept, *old, "training_args.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    none = ("--transfer-steps", "0", "--recover-steps", "0")
    done = command(tmp_path, "bert", folder / "out", "--data", str(place / "words.jsonl"), *none)
    assert done.exit_code == 0, said_by(done)
    out = folder / "out"
    assert [(out / name).read_text(encoding="utf-8") for name in kept] == kept
    assert (out / "modules.json").exists() and not (out / "out").exists()
    assert not [name for name in (*old, "training_args.bin") if (out / name).exists()]
    lln.hf.load(out)


def test_an_opt_is_judged_and_timed_within_its_positions(place, tmp_path, monkeypatch):
    quick = functools.partial(run.forward_cost, min_seconds=0.0, with_memory=False)
    monkeypatch.setattr(run, "forward_cost", quick)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = hf.OPTConfig(
        vocab_size=99, max_position_embeddings=128, word_embed_proj_dim=32, **sizes, **tokens
    )
    model = hf.OPTForCausalLM(config)
    assert subject._positions(model) == (128, True)
    model.save_pretrained(tmp_path / "opt")
    tokenizer_of(needles.NAMES, frame=False).save_pretrained(tmp_path / "opt")
    more = ("--data", str(place / "words.jsonl"), "--cost-length", "4096")
    none = ("--transfer-steps", "0", "--recover-steps", "0")
    done = command(tmp_path, "opt", tmp_path / "out", *more, *none)
    assert done.exit_code == 0, said_by(done)
    assert [row["N"] for row in read(tmp_path / "out")["forward_cost"]] == [128]
    done = command(tmp_path, "opt", tmp_path / "more", *more, "--length", "129")
    assert done.exit_code == 1 and "more than the 128 positions" in said_by(done)


@pytest.mark.parametrize("part", ["forward_cost", "finish", "measure"])
def test_judging_that_fails_leaves_the_model_and_is_told(place, tmp_path, monkeypatch, part):
    def fails(*_, **__):
        raise IndexError("index out of range in self")

    if part == "forward_cost":
        monkeypatch.setattr(run, "forward_cost", fails)
    elif part == "finish":
        monkeypatch.setattr(judge.EncoderJudge, "finish", fails)
    else:
        own = judge.EncoderJudge.measure

        def of_softmax_alone(self, model):
            return fails() if getattr(model.config, "lln", None) else own(self, model)

        monkeypatch.setattr(judge.EncoderJudge, "measure", of_softmax_alone)
    out = tmp_path / "out"
    more = ("--results", str(tmp_path / "results"), "--require", "0.01")
    more += ("--cost-length", "64") if part == "forward_cost" else ()
    done = command(place, "bert", out, *more)
    assert done.exit_code == (1 if part == "measure" else 0), said_by(done)
    assert not (tmp_path / "results").exists()
    assert "IndexError: index out of range in self" in done.stdout
    assert any("IndexError" in note for note in read(out)["notes"])
    assert "IndexError" in (out / "report.html").read_text(encoding="utf-8")
    lln.hf.load(out)


def test_roberta_counts_its_positions_from_behind_the_padding():
    assert subject._positions(make("roberta")) == (127, True)
    assert subject._positions(make("llama")) == (128, False)
    assert subject._positions(make("gpt2")) == (128, True)


def test_the_example_converts(place, capsys):
    main = runpy.run_path(str(EXAMPLES / "convert_minilm.py"))["main"]
    scores = main(str(place / "bert"), str(place / "words.jsonl"), steps=3, length=64)
    assert 0.5 < scores["cosine_mean"] <= 1
    assert "layer 1: error" in capsys.readouterr().out
