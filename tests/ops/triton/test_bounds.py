"""The guard of the other tests sees what a kernel must not touch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.ops.triton import bounds
from tests.ops.triton.conftest import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="of the interpreter")


@pytest.fixture
def copy(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    @triton.jit
    def copy_kernel(X, Y, count, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        tl.store(Y + index, tl.load(X + index, mask=index < count, other=0.0))

    return copy_kernel


def test_what_stays_inside_runs(copy):
    x, y = torch.arange(10.0), torch.zeros(16)
    copy[(1,)](x, y, 10, BLOCK=16)
    assert y[:10].equal(x) and not y[10:].any()


def test_a_load_behind_the_end_is_seen(copy):
    with pytest.raises(InterpreterError, match="load of 2 of 12"):
        copy[(1,)](torch.zeros(10), torch.zeros(16), 12, BLOCK=16)


def test_a_store_behind_the_end_is_seen_even_in_the_same_storage(copy):
    with pytest.raises(InterpreterError, match="store of 1 of 16"):
        copy[(1,)](torch.zeros(10), torch.zeros(32)[:15], 10, BLOCK=16)


def test_views_share_what_they_cover():
    starts, ends = bounds.union([(0, 8), (4, 12), (20, 24), (12, 13)])
    assert (starts.tolist(), ends.tolist()) == ([0, 20], [13, 24])
    x = torch.zeros(4, 6)
    first, end = bounds.extent(x[:2, 1:3])
    assert (first - x.data_ptr(), end - x.data_ptr()) == (4, 4 * 9)
