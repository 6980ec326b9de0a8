"""When it pays to split a sequence: the arithmetic of the guide's table."""

from __future__ import annotations

import math

import pytest

from lln_study.paper.pages import parallel
from lln_study.paper.pages.blocks import NOTHING_YET

LAYER = parallel.Layer(heads=2, width=4, linear=1e-9, softmax=1e-12, causal=True)


def test_bytes_are_those_that_are_sent():
    """A state is L and M of every head in float32; keys and values are in half precision."""
    assert LAYER.state == 4 * 2 * (4 + 4 * 4)
    assert LAYER.states(8) == 2 * 7 * LAYER.state
    both = parallel.Layer(2, 4, 1e-9, 1e-12, causal=False)
    assert both.states(8) == (7 + 2 * 7 / 8) * LAYER.state
    assert LAYER.keys(10) == 2 * 10 * 2 * 4 * 2


def test_one_gpu_sends_nothing_and_computing_is_shared():
    for way, power in ((LAYER.ours, 1), (LAYER.ring, 2)):
        assert way(1000, 1)[1] == 0 and way(1000, 8)[1] > 0
        assert way(1000, 8)[0] == pytest.approx(way(1000, 1)[0] / 8)
        assert way(2000, 8)[0] == pytest.approx(2**power * way(1000, 8)[0])
    assert LAYER.ours(1000, 8)[1] == LAYER.ours(2000, 8)[1]  # whatever the length
    assert LAYER.ours(10, 64)[1] > LAYER.ours(10, 8)[1]


def test_the_first_length_is_where_a_statement_begins_to_hold():
    assert parallel.first_length(lambda n: n >= 5000) == pytest.approx(5000, rel=2e-3)
    assert parallel.first_length(lambda n: True) == 1
    assert parallel.first_length(lambda n: False) is None
    sent = LAYER.ours(1, 8)[1]
    found = parallel.first_length(lambda n: sum(LAYER.ours(n, 8)) < sum(LAYER.ours(n, 1)))
    assert found == pytest.approx(sent / (1e-9 * 7 / 8), rel=2e-3)


def test_numbers_are_short_and_never_too_small():
    shown = [parallel._tokens(x) for x in (None, 1, 123, 1234, 5.01e6, 999.5)]
    assert shown == ["never", "always", "130", "1.3k", "5.1M", "1k"]
    assert math.isfinite(LAYER.ring(2**40, 1024)[0])


def test_without_rows_there_is_no_table(tmp_path):
    assert parallel.parallel(tmp_path) == NOTHING_YET
