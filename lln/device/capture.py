"""A call as a CUDA graph: what it takes on the device, without Python between the launches."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch


def captured(run: Callable[[], object], calls: int = 1) -> Callable[[], None]:
    """The same work, ``calls`` times, as a CUDA graph.

    Raises:
        RuntimeError: Something in it waits for the device; :func:`free_generator` then clears up.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with recording(graph):
        for _ in range(calls):
            run()
    return graph.replay


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """``torch.cuda.graph`` during which Python collects no garbage.

    An earlier graph that is collected meanwhile is destroyed, which the device does not permit and
    which breaks the recording off. What is garbage already is collected before.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if enabled:
            gc.enable()


def free_generator() -> None:
    """A recording that was broken off leaves the device's generator waiting for its end.

    Every later draw would raise.
    """
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(device="cuda").manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())
