"""The first call of an op: what is counted, and in which process; no time is taken here."""

from __future__ import annotations

import json

import pytest

from lln_study.bench.kernels import first
from lln_study.bench.kernels.offline import CannotCompile
from tests.lln_study.bench.outside import outside


def test_every_op_is_one_that_can_be_compiled():
    assert set(first.CALLED) <= set(first.OPS)


@pytest.mark.parametrize("wrong", [{"ops": ["nothing"]}, {"widths": [63]}])
def test_what_is_not_measured_is_refused(wrong):
    with pytest.raises(ValueError, match="is not known; pass one of"):
        first.run(**wrong)


def test_without_a_device_or_a_compiler_it_says_why(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CannotCompile, match="TRITON_INTERPRET=1"):
        first.run()


@pytest.mark.slow
def test_every_op_compiles_anew_in_a_process_of_its_own(toolchain, tmp_path):
    """A kernel that was compiled before would take no time and count as none."""
    command = ("-m", "lln.cli.app", "bench", "first", "--op", "decode", "--out", str(tmp_path))
    done = outside(*command, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("first-call_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["D"], row["pass"], row["kernels"]) for row in rows] == [
        (64, "fwd", 1),
        (128, "fwd", 1),
    ]
    assert all(row["seconds"] > 0 and row["commit"] for row in rows)
    assert not (tmp_path / "cache").exists()  # nor is anything left where the user's kernels lie
