"""Conversions as runs of a sweep: named before they run, done once, wherever their files lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lln.conversion.row import digest_of
from lln.conversion.settings import Settings
from lln.hf import CacheShare
from lln.records.rows import key_of, read_rows
from lln_study.sweep import job, plan
from lln_study.tasks import conversion
from tests.conversion.tiny_text import article, tokenizer_of
from tests.hf.conversion.loud import loud

SHORT = {
    "model": "bert", "data": "words.jsonl", "length": 32, "transfer_steps": 2, "recover_steps": 1,
    "options": {"near": 16, "slots": 16}, "judge_articles": 4, "cost_length": 0, "device": "cpu",
}  # fmt: skip
SPEC = {name: value for name, value in SHORT.items() if name != "device"}


def test_a_name_depends_on_what_is_asked_and_not_on_where_files_lie():
    here = conversion.configure(**SPEC)
    there = Settings(
        Path("/models/bert/"), Path("/text/words.jsonl"), Path("out"), results=Path("rows"),
        **{name: SHORT[name] for name in SHORT if name not in ("model", "data")},
    )  # fmt: skip
    name, seed = conversion.key(here, Path())
    assert (name, seed) == (digest_of(there.decisive()), 0)
    others = [{"keep": 1}, {"model": "llama"}, {"data": "more.jsonl"}, {"options": {"near": 32}}]
    names = {conversion.key(conversion.configure(**{**SPEC, **one}), Path())[0] for one in others}
    assert len(names | {name}) == 5
    assert conversion.key(conversion.configure(**SPEC, seed=3), Path()) == (name, 3)
    share = conversion.configure(**SPEC, keep={"share": 0.25, "context": 100}).keep
    assert share == CacheShare(0.25, context=100)


def test_a_bad_field_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"no field 'kept'; choose from .*'keep'"):
        conversion.configure(model="bert", kept=3)
    with pytest.raises(ValueError, match="no field 'out'"):
        conversion.configure(model="bert", out="here")
    with pytest.raises(ValueError, match="does not say its model"):
        plan.plan([{"run": "conversion"}], data=None, out=Path("r"), scratch=Path("s"))


@pytest.mark.slow
def test_a_sweep_converts_once(tmp_path, monkeypatch):
    loud("bert", "AutoModel").save_pretrained(tmp_path / "bert")
    tokenizer_of(frame=True).save_pretrained(tmp_path / "bert")
    lines = [json.dumps({"text": article(80, seed)}) + "\n" for seed in range(60)]
    (tmp_path / "words.jsonl").write_text("".join(lines), encoding="utf-8")
    places = {"data": tmp_path, "out": tmp_path / "rows", "scratch": tmp_path / "scratch"}
    [found] = plan.plan([{"run": "conversion", **SPEC}], **places)
    assert not found.has_rows() and "conversion" in found.label
    job.run("conversion", found.spec, found.place)
    [row] = read_rows(tmp_path / "rows" / "conversion.jsonl")
    assert found.has_rows() and [key_of(row)] == found.keys
    assert row["model"] == "bert" and row["configuration"]["data"] == "words"
    assert [stage["stage"] for stage in row["stages"]][-1] == "recover"
    assert (found.place.folder / "bert" / "report.html").exists()
    monkeypatch.setattr(conversion, "run", None)  # it would be called
    job.run("conversion", found.spec, found.place)


def test_the_sweep_of_the_library_is_planned_without_its_model(tmp_path):
    content = plan.read(Path(plan.FOLDER) / "conversion.json")
    jobs = plan.plan(content, data=tmp_path, out=tmp_path, scratch=tmp_path / "s", need_data=False)
    names = {tuple(one.keys) for one in jobs}
    assert len(names) == len(jobs) == 9 and not any(one.unknown for one in jobs)
    assert [one.spec.get("keep", 0) for one in jobs] == [5, 9, 0, 9, 9, 5, 2, 5, 5]
