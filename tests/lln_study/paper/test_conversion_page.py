"""The page of converted models: its numbers are those of rows, by hand."""

from __future__ import annotations

import json
from pathlib import Path

from lln_study.paper.pages import conversion
from lln_study.paper.pages.blocks import NOTHING_YET

ABOUT = {"device": "GPU", "torch": "2", "commit": "abc", "date": "2026-01-01"}


def write(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_needles_by_distance(tmp_path):
    def found(model, distance, exact):
        return {
            "model": model, "distance": distance, "exact": exact, "needles": 8, "length": 64
        }  # fmt: skip

    row = {
        "subject": "conversion", "mechanism": "lln_nearfar", "attention": "lln_nearfar",
        "digest": "d", "seed": 0, "configuration": {}, "model": "small", "kept": [],
        "near_keys": 20, "options": {"before_rotation": True}, "recover_steps": 3, **ABOUT,
        "agreement": 0.5,
        "needles": [
            found("teacher", None, 0.0), found("student", None, 0.0),
            found("teacher", 16, 1.0), found("student", 16, 0.75), found("teacher", 32, 0.5),
        ],
    }  # fmt: skip
    other = {**row, "digest": "f", "model": "large", "needles": [found("teacher", 16, 0.25)]}
    unusual = {
        **row, "digest": "g", "agreement": 0.4, "options": {"slots": 64}, "needles": row["needles"],
        "key_heads": 9, "kept_key_heads": {"0": [0]},
        "configuration": {"keep_by": "error", "recover_options": {"short_windows": 0.25}},
    }  # fmt: skip
    write(tmp_path, "conversion", [row, {**row, "digest": "e", "needles": []}, other, unusual])
    lines = conversion.needles(tmp_path).splitlines()
    assert lines[0] == "| small: tokens back | 16 | 32 |"
    assert lines[2] == "| softmax | 100 | 50 |"
    assert lines[3:5] == [
        "| 20 near keys, 1 of 9 key heads kept by error, 64 slots, maps after rotation, "
        "short windows, 3 updates of recovery | 75 | – |",
        "| 20 near keys, 3 updates of recovery | 75 | – |",
    ]
    assert lines[6:9:2] == ["| large: tokens back | 16 |", "| softmax | 25 |"]
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
