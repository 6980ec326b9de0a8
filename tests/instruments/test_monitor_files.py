"""What the monitor writes: rows that survive a kill and a resumed run, TensorBoard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lln.instruments import monitor, read_rows
from tests.instruments.training import encoder, loss_of, of_heads, train
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


def test_the_rest_of_a_resumed_run_is_appended(tmp_path):
    path = tmp_path / "runs" / "rows.jsonl"
    for first_step in (0, 4):
        model = encoder()
        with monitor(model, every=2, path=path, first_step=first_step) as rows:
            train(model, 4)
    kept = read_rows(path)
    assert sorted({row["step"] for row in kept}) == [0, 2, 4, 6]
    assert kept[len(kept) // 2 :] == rows


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = encoder()
    with monitor(model, every=1, tensorboard=tmp_path) as rows:
        train(model, 2)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    written = [event.value for event in events.Scalars("entropy/layer 1/head 3")]
    expected = [r["entropy"] for r in of_heads(rows) if (r["layer"], r["head"]) == (1, 3)]
    assert written == pytest.approx(expected)
    assert len(events.Scalars("gradient_norm")) == 2


def test_a_torn_last_line_is_left_out_and_removed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "entr')
    assert read_rows(path) == [{"step": 0}]
    model = encoder()
    with monitor(model, every=1, path=path) as rows:
        loss_of(model)
    assert read_rows(path) == [{"step": 0}, *rows]
    path.write_text('{"step": 0}\nbroken\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 2 is not a JSON object"):
        read_rows(path)


CHILD = """
import sys, torch
from torch import nn
from lln.instruments import monitor

layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
with monitor(model, every=1, path=sys.argv[1]):
    while True:
        model(torch.randn(3, 10, 32)).square().mean().backward()
"""


@pytest.mark.slow
def test_rows_survive_kill_9(tmp_path):
    path = tmp_path / "rows.jsonl"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], cwd=ROOT)
    try:
        wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= 60, child)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    rows = read_rows(path)
    last = rows[-1]["step"]
    assert len(rows) >= 60
    for step in range(last):  # 2 layers of 4 heads, and the step itself
        assert len([row for row in rows if row["step"] == step]) == 9
    assert all(json.dumps(row, allow_nan=False) for row in rows)
