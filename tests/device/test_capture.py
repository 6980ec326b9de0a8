"""Recording a CUDA graph keeps the garbage collector out, whatever happens."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from lln.device.capture import recording


class Cycle:
    """Only the garbage collector frees it, as it does a finished run that holds graphs."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # a collection at nearly every allocation
    yield object()
    gc.set_threshold(*threshold)


def test_nothing_is_collected_while_recording(graph):
    before = weakref.ref(Cycle())
    with recording(graph):
        assert before() is None
        meanwhile = weakref.ref(Cycle())
        kept = [[index] for index in range(1000)]
        assert meanwhile() is not None and len(kept) == 1000
    assert gc.isenabled()


def test_collection_goes_on_after_an_error(graph):
    with pytest.raises(RuntimeError, match="broken off"), recording(graph):
        raise RuntimeError("broken off")
    assert gc.isenabled()


def test_collection_stays_off_where_it_was_off(graph):
    gc.disable()
    try:
        with recording(graph):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
