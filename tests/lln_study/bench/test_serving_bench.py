"""`lln bench serve`: complete rows, checked first; how long a step takes is no test."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import lln.hf
from lln_study.bench import serving
from lln_study.bench.check import CheckFailed

SMALL = serving.Setting(layers=1, heads=2, kv_heads=1, head_dim=8, vocabulary=32)


def test_memory_is_constant_for_ours_and_grows_for_softmax(tmp_path, capsys):
    options = {"seats": (1, 2), "lengths": (700, 1400), "steps": 3, "setting": SMALL}
    content = json.loads(serving.run(tmp_path, **options).read_text())
    rows = {(row["seats"], row["tokens"]): row for row in content["rows"]}
    assert list(rows) == [(1, 700), (1, 1400), (2, 700), (2, 1400)]
    for row in rows.values():
        assert row["ours_ms"] > 0 and row["softmax_ms"] > 0 and row["ratio"] > 0
        assert row["torch"] and row["commit"] and "1 layers, 2 heads" in row["configuration"]
    assert rows[1, 700]["ours_bytes"] == rows[1, 1400]["ours_bytes"]
    assert rows[2, 700]["ours_bytes"] == 2 * rows[1, 700]["ours_bytes"]
    held = (1400 + 3 + serving.WARM + 1) * 1 * 8 * 2 * 4  # keys and values of one head, float32
    assert rows[1, 1400]["softmax_bytes"] == held
    assert "wrote" in capsys.readouterr().out


def test_kept_key_heads_cost_their_keys_and_values(tmp_path):
    setting = replace(SMALL, layers=2, heads=4, kv_heads=2)
    assert setting.spread(3) == {0: [0, 1, 2, 3], 1: [0, 1]} and setting.spread(0) == {}
    options = {"seats": (1,), "lengths": (700,), "steps": 3, "setting": setting, "keep": (0, 3)}
    path = serving.run(tmp_path, **options)
    plain, kept = json.loads(path.read_text())["rows"]
    assert "serving-kept" in path.name and kept["kept_key_heads"] == 3
    length = 700 + 3 + serving.WARM + 1
    assert kept["ours_bytes"] == plain["ours_bytes"] + 3 * 2 * 8 * length * 4
    with pytest.raises(ValueError, match="keep=5 of 4 key heads"):
        setting.spread(5)


def test_streams_stand_where_they_are_measured():
    engine = serving._seated(serving.make(SMALL, "cpu")["ours"], 2, 900, 910)
    assert engine.position.tolist() == [900, 900]
    found = [token for _ in range(3) for _, token in engine.step()]
    assert engine.position.tolist() == [903, 903] and len(found) == 6
    with torch.no_grad():
        far = engine.layers[0].tensors["log_mass"]
    assert torch.isfinite(far).all()  # the prompt was longer than the window


def test_wrong_tokens_stop_the_benchmark(monkeypatch):
    models = serving.make(SMALL, "cpu")
    serving.check(models)
    step = lln.hf.Engine._forward

    def wrong(self, **options):
        step(self, **options)
        self.tokens.add_(1).remainder_(32)

    monkeypatch.setattr(lln.hf.Engine, "_forward", wrong)
    with pytest.raises(CheckFailed, match="tokens of ours are"):
        serving.check(models)


def test_a_length_within_the_prompt_is_refused():
    models = serving.make(replace(SMALL, dtype="bfloat16"), "cpu")
    with pytest.raises(ValueError, match="length=100 is shorter than the prompt; pass at least"):
        serving.measure(models, 1, 100, steps=3)
