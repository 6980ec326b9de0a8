"""Result rows: many writers, torn lines, what a row says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from lln.records.rows import append_row, has_row, read_rows
from lln_study.train.config import TrainConfig
from lln_study.train.runlog import RunLog, result_row


def test_rows_of_many_writers_are_all_there(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    rows = [{"digest": "a", "seed": seed, "text": "x" * 3000} for seed in range(60)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda row: append_row(path, row), rows))
    assert sorted(read_rows(path), key=lambda row: row["seed"]) == rows


def test_a_torn_line_disappears_with_the_next_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, {"digest": "a", "seed": 0})
    with path.open("a") as stream:
        stream.write('{"digest": "b", "se')
    assert has_row(path, "a", 0) and not has_row(path, "b", 0)
    append_row(path, {"digest": "c", "seed": 1})
    assert [row["digest"] for row in read_rows(path)] == ["a", "c"]
    assert has_row(path, "c", 1) and not has_row(path, "c", 0)
    assert not has_row(tmp_path / "none.jsonl", "a", 0)


def test_a_row_names_its_run_and_its_machine():
    config = TrainConfig(attention="lln", steps=3, seed=4)
    metrics = {"loss": math.nan, "accuracy": 0.5}
    row = result_row("mlm", config, {"length": 64}, metrics, seconds=1.234, device="cpu")
    assert row["loss"] is None and row["accuracy"] == 0.5 and row["seed"] == 4
    assert row["configuration"]["length"] == 64 and row["configuration"]["steps"] == 3
    assert all(row[name] for name in ("device", "torch", "commit", "transformers", "date"))
    json.dumps(row, allow_nan=False)


def test_the_digest_names_what_is_computed():
    def digest(settings=None, **changes):
        return TrainConfig(**changes).digest(settings)

    same = digest()
    assert digest(seed=5) == digest(compile=True) == digest(log_every=7) == same
    assert digest(accumulation=4) == digest(measures=("entropy",)) == same
    others = [digest(steps=7), digest(options={"method": "entropy"}), digest({"length": 64})]
    assert len({same, *others}) == 4


def test_curves_are_cut_back_to_where_a_run_resumes(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    for step in (1, 2, 3):
        log.curve({"kind": "train", "step": step, "loss": math.inf if step == 2 else 1.0})
        log.monitor([{"step": step, "layer": 0, "head": 0, "entropy": 1.0}])
    log.close()
    RunLog(tmp_path, step=2, tensorboard=False).close()
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path / "curve.jsonl")] == [
        (1, 1.0),
        (2, None),
    ]
    # A row of the monitor is about the update that comes after its step.
    assert [row["step"] for row in read_rows(tmp_path / "monitor.jsonl")] == [1]


# A file may have 400 bytes in this process: a disk that is full in the middle of a row.
FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
from lln.records.rows import append_row
from lln.records.rows import RowFile
rows, curve, said = sys.argv[1], RowFile(sys.argv[2]), []
for step in range(6):
    row = {"digest": "a", "seed": step, "text": "x" * 80}
    for write in (lambda: append_row(rows, row), lambda: curve.write([row])):
        try:
            write()
        except OSError as error:
            said.append(error.strerror)
print(len(said), *set(said))
"""


def test_a_full_disk_loses_no_row_in_silence_and_tears_none(tmp_path):
    paths = [tmp_path / name for name in ("results.jsonl", "curve.jsonl")]
    words = [sys.executable, "-c", FULL, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["6", "File too large\n"]
    for path in paths:
        assert [row["seed"] for row in read_rows(path)] == [0, 1, 2]
        assert path.read_bytes().endswith(b"}\n")
