"""Short calls from Python, and in which thread their backward pass runs."""

from __future__ import annotations

import pytest
import torch

from lln_study.bench import host
from lln_study.bench.cases import FORWARD, TRAINING, Case

SMALL = Case("bidirectional", "eager", 32, H=2, D=16)


def test_both_passes_are_timed_with_a_thread_of_their_own_and_without(monkeypatch):
    seen = []

    def call(case, tensors):
        def run():
            seen.append((case.passes, torch._C._is_multithreading_enabled()))

        return run

    monkeypatch.setattr(host, "call", call)
    row = host.measure(SMALL, calls=3)
    each = host.WARMING + 3
    expected = [(FORWARD, True), (TRAINING, True), (TRAINING, False)]
    assert seen == [one for one in expected for _ in range(each)]
    assert torch._C._is_multithreading_enabled()
    assert list(row)[-3:] == ["fwd_ms", "both_ms", "one_thread_ms"]


def test_every_call_can_be_built():
    found = {(case.op, case.impl, case.N) for case in host.cases()}
    assert len(found) == len(host.CALLS) * len(host.LENGTHS)
    row = host.measure(SMALL, calls=2)
    assert row["op"] == "bidirectional" and min(row["both_ms"], row["one_thread_ms"]) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no CUDA device"):
        host.run(tmp_path)
    assert not list(tmp_path.iterdir())
