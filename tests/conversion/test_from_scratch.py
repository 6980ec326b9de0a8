"""`lln convert --from-scratch`: weights drawn anew, and rates that are given."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import lln.hf
from lln.cli import app as cli
from lln.conversion import run, unfinished
from lln.conversion.judge import DecoderJudge
from lln.conversion.settings import SCRATCH_RATE, Settings
from lln.conversion.subject import drawn_anew
from lln.records.rows import read_rows
from tests.conversion.tiny_text import article, tokenizer_of
from tests.hf.conversion.loud import loud
from tests.hf.tiny import make

pytestmark = pytest.mark.slow  # whole conversions

SIZES = ("--length", "64", "--judge-articles", "4", "--cost-length", "0", "--device", "cpu")
BLOCK = ("--set", "near=16", "--set", "slots=16")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("scratch")
    for family, frame in (("bert", True), ("llama", False)):
        loud(family, "AutoModel" if frame else None).save_pretrained(root / family)
        tokenizer_of(frame=frame).save_pretrained(root / family)
    lines = [json.dumps({"text": article(80, seed)}) + "\n" for seed in range(80)]
    (root / "words.jsonl").write_text("".join(lines), encoding="utf-8")
    return root


def command(place, out, *more: str, family: str = "bert"):
    given = ["convert", str(place / family), "--data", str(place / "words.jsonl"), "--out"]
    return CliRunner().invoke(cli.app, [*given, str(out), *SIZES, *BLOCK, *more])


def read(out) -> dict:
    return json.loads((out / "conversion.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def scratch(place):
    out = place / "out"
    more = ("--from-scratch", "--recover-steps", "8", "--seed", "7")
    more += ("--results", str(place / "results"))
    done = command(place, out, *more)
    assert done.exit_code == 0, done.output
    return out, done.stdout


def test_the_teacher_is_judged_beside_weights_of_which_none_is_its_own(place, scratch):
    found = read(scratch[0])
    assert [row["stage"] for row in found["stages"]] == ["softmax", "calibrate", "recover"]
    softmax, start, end = (row["cosine_mean"] for row in found["stages"])
    assert softmax == pytest.approx(1, abs=1e-5) and start < 0.5 and end > start
    assert "parameters, drawn anew): 0 updates of transfer and 8 of recovery" in scratch[1]
    trained = hf.AutoModel.from_pretrained(place / "bert").state_dict()
    own = lln.hf.load(scratch[0]).state_dict()
    model = make("bert", head="AutoModel")
    torch.manual_seed(7)
    drawn = drawn_anew(model).state_dict()
    for name, x in trained.items():
        if name.startswith("pooler"):  # it is not asked for, and stays as it was drawn
            assert own[name].equal(drawn[name])
        elif x.is_floating_point() and x.ndim == 2:
            assert not own[name].equal(x), name
            assert not own[name].equal(drawn[name]), f"{name} has not learned"


def test_the_row_and_the_table_say_so(place, scratch):
    (row,) = read_rows(place / "results" / "conversion.jsonl")
    assert row["from_scratch"] is True and row["configuration"]["from_scratch"] is True
    assert row["configuration"]["recover_options"] == {"learning_rate": SCRATCH_RATE}
    given = ["table", "conversion", "--results", str(place / "results"), "--markdown"]
    shown = CliRunner().invoke(cli.app, given)
    assert "lln_nearfar (from scratch, slots 16, recovered at 0.0005)" in shown.stdout, shown.output
    page = (scratch[0] / "report.html").read_text(encoding="utf-8")
    assert "weights drawn anew, from scratch" in page


def test_a_decoder_is_measured_by_the_perplexity_of_its_teacher(place, tmp_path, monkeypatch):
    rest = {"branches": {}, "near_shares": []}  # texts and needles: test_convert.py
    monkeypatch.setattr(DecoderJudge, "finish", lambda judge, student: rest)
    more = ("--from-scratch", "--recover-steps", "2", "--recover-rate", "1e-3", "--seed", "7")
    done = command(place, tmp_path / "out", *more, family="llama")
    assert done.exit_code == 0, done.output
    first, start, last = read(tmp_path / "out")["stages"]
    assert first["perplexity"] == start["teacher_perplexity"]
    assert start["perplexity"] != pytest.approx(first["perplexity"], rel=1e-4)
    assert read(tmp_path / "out")["agreement"] == first["perplexity"] / last["perplexity"]


def test_the_seed_decides_the_weights_and_the_teacher_stays():
    model = make("bert", head="AutoModel")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(drawn_anew(model).encoder.layer[0].attention.self.query.weight)
    assert found[0].equal(found[1]) and not found[0].equal(found[2])
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())
    assert drawn_anew(model.double()).dtype == torch.float64


def test_rates_reach_their_stages_and_change_nothing_otherwise(place, tmp_path, monkeypatch):
    asked = {}

    def convert(*_, **given):
        asked.update(given)
        raise ValueError("enough")

    monkeypatch.setattr(lln.hf, "convert", convert)
    monkeypatch.setattr(run, "_estimate", lambda *_: "no updates are tried out")
    command(place, tmp_path / "a", "--transfer-rate", "0.01", "--recover-rate", "1e-5")
    assert asked["transfer_options"]["learning_rate"] == 0.01
    assert asked["recover_options"]["learning_rate"] == 1e-5
    command(place, tmp_path / "b")
    assert "learning_rate" not in asked["transfer_options"] | asked["recover_options"]
    assert "embeddings" not in asked["recover_options"] and asked["teacher"] is None
    assert (asked["transfer_steps"], asked["recover_steps"]) == (300, 100)


def test_old_settings_are_stored_as_before(place, tmp_path):
    plain = Settings(place / "bert", place / "words.jsonl", tmp_path / "out")
    stored = plain.decisive()
    assert "from_scratch" not in stored
    assert stored["transfer_options"] == stored["recover_options"] == {}
    other = Settings(
        plain.model, plain.data, plain.out, transfer_steps=0, recover_options={"lora": 0},
        from_scratch=True,
    )  # fmt: skip
    assert other.decisive()["from_scratch"] is True
    assert other.recover_options == {"learning_rate": SCRATCH_RATE, "lora": 0}
    unfinished.Unfinished(other.out, other.decisive())
    trained = Settings(
        plain.model, plain.data, plain.out, transfer_steps=0,
        recover_options=dict(other.recover_options),
    )  # fmt: skip
    with pytest.raises(ValueError, match="begun with from_scratch=True, not None"):
        unfinished.Unfinished(trained.out, trained.decisive())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--from-scratch", "--transfer-steps", "5"), "--transfer-steps 5 with --from-scratch"),
        (("--from-scratch", "--keep", "1"), "--keep 1 with --from-scratch"),
        (("--recover-rate", "0"), "--recover-rate 0.0 is not positive"),
        (("--transfer-rate", "nan"), "--transfer-rate nan is not positive"),
    ],
    ids=["transfer", "keep", "recover-rate", "transfer-rate"],
)
def test_what_excludes_each_other_is_named(place, tmp_path, more, said):
    done = command(place, tmp_path / "out", *more)
    assert done.exit_code == 1 and said in f"{done.output}{done.exception}"
    assert not (tmp_path / "out").exists()
