"""The page of near and far keys, and of needles: their numbers are those of rows, by hand."""

from __future__ import annotations

import json
from pathlib import Path

from lln_study.paper.pages import conversion, near_far
from lln_study.paper.pages.blocks import NOTHING_YET

ABOUT = {"device": "GPU", "torch": "2", "commit": "abc", "date": "2026-01-01"}


def pretraining(loss: float, *, seed: int = 0, mechanism: str = "lln_diag", **options) -> dict:
    recipe, steps, length = near_far.LONG
    if mechanism == "lln_diag":
        options = {"mix": "learned", **options}
    own = {"options": options, "recipe": recipe, "steps": steps, "length": length}
    name = json.dumps([mechanism, options])
    return {
        "subject": "mlm", "mechanism": mechanism, "digest": name, "seed": seed, "loss": loss,
        "best": loss, "best_step": steps, "tokens": 250_000_000, "configuration": own, **ABOUT,
    }  # fmt: skip


def write(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_long_runs_have_the_mean_and_standard_error_of_their_seeds(tmp_path):
    wide = {"diag_block": near_far.WIDE, "conv": 33}
    other = pretraining(9.0, **wide)
    other["configuration"] |= {"length": 8192}
    other["digest"] += "long"
    rows = [pretraining(loss, seed=seed, **wide) for seed, loss in enumerate((2.0, 2.2, 2.4))]
    rows += [other, pretraining(3.0, mechanism="softmax"), pretraining(2.5, mix="average")]
    write(tmp_path, "mlm", rows)
    lines = near_far.longer(tmp_path).splitlines()
    assert lines[2] == "| softmax | all | 3.000 (1) | – |"
    assert lines[3] == "| learned mix | block of 256 | – | 2.200 ± 0.115 (3) |"
    assert lines[4] == ""  # neither another length nor another mix is compared


def test_nothing_is_said_of_long_runs_before_there_is_one(tmp_path):
    write(tmp_path, "mlm", [pretraining(2.5, mechanism="softmax")])
    assert near_far.longer(tmp_path) == NOTHING_YET


def test_the_screen_tells_slots_apart_and_orders_them(tmp_path):
    folder = tmp_path / "near_far"
    folder.mkdir()
    write(folder, "mlm", [pretraining(3 + n / 1000, diag_block=128, slots=n) for n in (256, 64)])
    lines = near_far.screen(tmp_path).splitlines()[2:4]
    assert [line.split("|")[1].strip() for line in lines] == [
        "learned mix, 64 learned slots",
        "learned mix, 256 learned slots",
    ]


def test_the_screen_tells_the_plain_average_from_the_learned_mix(tmp_path):
    folder = tmp_path / "near_far"
    folder.mkdir()
    rows = [pretraining(3.0, diag_block=128), pretraining(4.0, diag_block=128, mix="average")]
    other = pretraining(9.0, mechanism="softmax")
    other["configuration"]["positions"] = "normal"
    write(folder, "mlm", [*rows, other, pretraining(8.0, mechanism="lln")])
    lines = near_far.screen(tmp_path).splitlines()[2:-2]
    assert lines == [
        "| plain average | block of 128 | 4.00 |",
        "| learned mix | block of 128 | 3.00 |",
    ]


def test_the_screen_keeps_a_run_with_another_option_apart(tmp_path):
    folder = tmp_path / "near_far"
    folder.mkdir()
    wide = {"mechanism": "lln_nearfar", "diag_block": near_far.WIDE}
    write(folder, "mlm", [pretraining(4.0, **wide), pretraining(3.0, statistics="fixed", **wide)])
    lines = near_far.screen(tmp_path).splitlines()[2:-2]
    assert lines == [
        "| one normaliser, far = others | block of 256 | 4.00 |",
        "| one normaliser, far = others, statistics = fixed | block of 256 | 3.00 |",
    ]


def test_needles_by_distance(tmp_path):
    def found(model, distance, exact):
        return {
            "model": model, "distance": distance, "exact": exact, "needles": 8, "length": 64
        }  # fmt: skip

    row = {
        "subject": "conversion", "mechanism": "lln_nearfar", "attention": "lln_nearfar",
        "digest": "d", "seed": 0, "configuration": {}, "model": "small", "kept": [],
        "near_keys": 20, "options": {}, "recover_steps": 3, **ABOUT,
        "needles": [
            found("teacher", None, 0.0), found("student", None, 0.0),
            found("teacher", 16, 1.0), found("student", 16, 0.75), found("teacher", 32, 0.5),
        ],
    }  # fmt: skip
    write(tmp_path, "conversion", [row, {**row, "digest": "e", "needles": []}])
    lines = conversion.needles(tmp_path).splitlines()
    assert lines[0] == "| tokens back | 16 | 32 |"
    assert lines[2] == "| small, softmax | 100 | 50 |"
    assert lines[3] == "| small, lln_nearfar, 20 near keys, 3 updates of recovery | 75 | – |"
    assert conversion.needles(tmp_path / "none") == NOTHING_YET


def test_a_converted_model_is_fine_tuned_beside_the_one_it_comes_from(tmp_path):
    def row(task, number, score, **before):
        own = {"task": task, "pretrained": before, "options": {}}
        name = json.dumps([own, score])
        return {
            "subject": "glue", "mechanism": "m", "digest": name, "seed": number, "score": score,
            "configuration": own, **ABOUT,
        }  # fmt: skip

    teacher = {"attention": "softmax", **conversion.TEACHER}
    write(
        tmp_path,
        "glue",
        [
            row("sst2", 0, 0.8, **teacher), row("sst2", 1, 0.7, **teacher),
            row("cola", 0, 0.2, **teacher), row("rte", 0, 0.5, **teacher),
            row("sst2", 0, 0.1, **{**teacher, "seed": 0}),
            row("sst2", 0, 0.1, **{**teacher, "options": {"conv": 33}}),
        ],
    )  # fmt: skip
    assert conversion.finetuned(tmp_path) == NOTHING_YET
    (tmp_path / "conversion").mkdir()
    write(tmp_path / "conversion", "glue", [row("sst2", 0, 0.9), row("cola", 0, 0.1)])
    lines = conversion.finetuned(tmp_path).splitlines()
    assert lines[0] == "| RoBERTa 6 × 512, % | SST-2 | CoLA | average |"
    assert lines[2:4] == ["| softmax | 75.0 | 20.0 | 47.5 |", "| converted | 90.0 | 10.0 | 50.0 |"]
