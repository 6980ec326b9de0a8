"""The figure of converted decoders: caches counted by hand, needles that softmax finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lln_study.paper.figures import converted

pytestmark = pytest.mark.slow  # the study

RESULTS = Path(__file__).parents[3] / "results"
ROW = {
    "subject": "conversion", "mechanism": "lln_nearfar", "attention": "lln_nearfar", "seed": 0,
    "model": "SmolLM2-135M", "length": 2048, "layers": 30, "near_keys": 260, "kept": [],
    "kept_heads": {}, "agreement": 0.8, "options": {"feature_map": "learned", "slots": 128},
    "digest": "0", "configuration": {},
}  # fmt: skip


def needle(model: str, distance: int | None, exact: float) -> dict:
    return {"model": model, "distance": distance, "exact": exact}


def test_a_cache_is_counted_as_it_was_measured():
    # 496,136 bytes of a layer of three key heads, by lln.hf; with 1,028 near keys .267 was measured
    assert converted.cache_share(ROW) == pytest.approx(496_136 / (3 * 256 * 8192), rel=0.01)
    assert converted.cache_share({**ROW, "near_keys": 1028}) == pytest.approx(0.267, rel=0.01)
    assert converted.cache_share({**ROW, "cache_share": {"8192": 0.5}}) == 0.5
    least = converted.cache_share(ROW)
    three = {**ROW, "kept_heads": {"4": [0, 2, 8]}}  # heads 0 and 2 read one key head
    assert converted.cache_share(three) == pytest.approx(least + 2 / 90)
    layers = {**ROW, "kept": [1, 2, 3]}
    assert converted.cache_share(layers) == pytest.approx((3 + 27 * least) / 30)
    window = {**ROW, "attention": "window_sinks", "options": {}}
    assert converted.cache_share(window) == pytest.approx(260 / 8192)


def test_needles_count_where_they_are_far_and_softmax_finds_them():
    asked = [
        needle("teacher", None, 0.0), needle("student", None, 0.0),
        needle("teacher", 256, 1.0), needle("student", 256, 1.0),  # a near key
        needle("teacher", 512, 1.0), needle("student", 512, 0.5),
        needle("teacher", 1024, 0.98), needle("student", 1024, 1.0),
        needle("teacher", 6000, 0.5), needle("student", 6000, 0.0),
    ]  # fmt: skip
    assert converted.needles_found({**ROW, "needles": asked}) == 75
    assert converted.needles_found({**ROW, "needles": asked[:4]}) is None
    assert converted.needles_found(ROW) is None


def test_each_way_to_spend_memory_is_a_curve_from_the_same_start(tmp_path):
    found = [needle("teacher", 512, 1.0), needle("student", 512, 0.25)]
    better = [needle("teacher", 512, 1.0), needle("student", 512, 0.5)]
    whole = {"kept_heads": {"4": [0, 1, 2]}, "kept_key_heads": {"4": [0]}}
    rows = [
        {**ROW, "needles": found},
        {**ROW, "digest": "1", "agreement": 0.7, "needles": better},  # as large, worse
        {**ROW, "digest": "2", "near_keys": 516, "agreement": 0.9},
        {**ROW, "digest": "3", "kept_heads": {"4": [0]}, "agreement": 0.95},
        {**ROW, "digest": "5", **whole, "agreement": 0.98},
        {
            **ROW,
            "digest": "6",
            **whole,
            "options": {**ROW["options"], "slots": 256},
            "agreement": 0.99,
        },
        {**ROW, "digest": "4", "attention": "window_sinks", "options": {}, "agreement": 0.5},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "conversion.jsonl").write_text(lines, encoding="utf-8")
    perplexity, needles = converted.panels(tmp_path)
    curves = {curve.label: curve for curve in perplexity.curves}
    assert list(curves) == [
        "more near keys", "key heads keep softmax", "key heads, more slots",
        "query heads keep softmax", "no far keys", "softmax",
    ]  # fmt: skip
    assert list(curves["more near keys"].y) == pytest.approx([1 / 0.8, 1 / 0.9])
    assert list(curves["query heads keep softmax"].y) == pytest.approx([1 / 0.8, 1 / 0.95])
    assert list(curves["key heads keep softmax"].y) == pytest.approx([1 / 0.8, 1 / 0.98])
    assert list(curves["key heads, more slots"].y) == pytest.approx([1 / 0.99])
    assert curves["key heads keep softmax"].x[0] == curves["more near keys"].x[0]
    assert list(curves["no far keys"].y) == [2.0]
    assert [(curve.label, list(curve.y)) for curve in needles.curves] == [
        ("more near keys", [25.0]),
        ("softmax", [100, 100]),
    ]
    assert converted.panels(tmp_path / "none") == []


def test_more_memory_is_better_in_our_rows():
    perplexity, _ = converted.panels(RESULTS)
    for curve in perplexity.curves:
        assert list(curve.x) == sorted(curve.x) and all(0 <= x <= 100 for x in curve.x)
        assert curve.y[-1] < curve.y[0] or len(curve.y) == 1 or curve.label == "softmax"
