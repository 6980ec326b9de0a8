"""Updates recorded as CUDA graphs: small models spend most of a step on launching kernels.

A graph is recorded per shape of the batch, after a few ordinary updates of that shape, and replayed
for every batch that fits. What is computed is the same; anything that waits for the GPU inside an
update cannot be recorded, and then all updates are ordinary ones again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lln.device.capture import free_generator, recording

Batch = Mapping[str, Tensor]
Key = tuple[tuple[str, torch.Size, torch.dtype], ...]
ORDINARY_FIRST = 3  # updates of a shape before it is recorded: they compile, tune and allocate
MOST_SHAPES = 16  # a graph keeps its memory


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    batches: list[dict[str, Tensor]]
    result: Tensor


class Graphs:
    """``update(batches) -> Tensor``, replayed from graphs where that is possible.

    Args:
        update: Uses nothing but its arguments and tensors that stay where they are; its result is
            overwritten by the next call.
        forget: Removes what an update that was broken off has left.
    """

    def __init__(
        self, update: Callable[[Sequence[Batch]], Tensor], forget: Callable[[], None]
    ) -> None:
        self.update, self.forget = update, forget
        self.recorded: dict[Key, _Recorded] = {}
        self.seen: dict[Key, int] = {}
        self.usable = True
        self.side = torch.cuda.Stream()

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        key = tuple((name, x.shape, x.dtype) for batch in batches for name, x in batch.items())
        found = self.recorded.get(key)
        if found is None:
            seen = self.seen[key] = self.seen.get(key, 0) + 1
            if not self.usable or seen <= ORDINARY_FIRST or len(self.recorded) >= MOST_SHAPES:
                return self._ordinary(batches)
            found = self._record(batches)
            if found is None:
                return self._ordinary(batches)
            self.recorded[key] = found
        for own, given in zip(found.batches, batches, strict=True):
            for name, x in given.items():
                own[name].copy_(x, non_blocking=True)
        found.graph.replay()
        return found.result

    def _ordinary(self, batches: Sequence[Batch]) -> Tensor:
        """Update on a stream of its own, which a later recording asks for."""
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            result = self.update(batches)
        current.wait_stream(self.side)
        return result

    def _record(self, batches: Sequence[Batch]) -> _Recorded | None:
        """Record without computing: the first replay computes."""
        own = [{name: x.clone() for name, x in batch.items()} for batch in batches]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # on the stream of ordinary updates, so that gradients are gathered where those did it
            with recording(graph, stream=self.side, capture_error_mode="thread_local"):
                result = self.update(own)
        except RuntimeError as error:
            self.usable = False
            self.recorded.clear()  # they draw from the generator that is exchanged now
            free_generator()
            self.forget()
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"this update cannot be recorded as a CUDA graph ({reason}); going on without, "
                "which is slower for small models",
                stacklevel=2,
            )
            return None
        return _Recorded(graph, own, result)
