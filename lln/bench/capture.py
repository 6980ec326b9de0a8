"""A call as a CUDA graph: what it takes on the device, without Python between the launches."""

from __future__ import annotations

from collections.abc import Callable

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
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay


def free_generator() -> None:
    """A recording that was broken off leaves the device's generator waiting for its end.

    Every later draw would raise.
    """
    torch.cuda.synchronize()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(device="cuda").manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())
