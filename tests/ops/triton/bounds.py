"""In the interpreter every address that a kernel touches must belong to one of its tensors.

A GPU only notices what leaves its mapped memory, which is luck; here every masked load and store is
looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as interpreter


class OutOfBounds(AssertionError):
    """A kernel touches memory that none of its tensors has."""


def extent(x: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor and the one after its last."""
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def union(extents: Iterable[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of intervals that do not overlap, in order."""
    merged: list[list[int]] = []
    for start, end in sorted(extents):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    both = np.array(merged or [[0, 0]], dtype=np.uint64)
    return both[:, 0].copy(), both[:, 1].copy()


class Guard:
    """Stands for the interpreter's loads and stores."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.starts, self.ends = union([])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def allow(self, tensors: Iterable[Any]) -> None:
        self.starts, self.ends = union(extent(x) for x in tensors if isinstance(x, torch.Tensor))

    def look_at(self, what: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        touched = addresses[mask.astype(bool)].astype(np.uint64)
        place = np.searchsorted(self.starts, touched, side="right").astype(np.int64) - 1
        inside = (place >= 0) & (touched + np.uint64(size) <= self.ends[np.maximum(place, 0)])
        if not inside.all():
            beyond = touched[~inside][0] - self.ends[max(place[~inside][0], 0)]
            raise OutOfBounds(
                f"{what} of {(~inside).sum()} of {touched.size} addresses outside every tensor; "
                f"the first is {np.int64(beyond)} bytes behind the end of one"
            )

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: Any, dtype: Any) -> Any:
        self.look_at("load", addresses, mask, np.dtype(dtype).itemsize)
        return self.original.load(addresses, mask, other, dtype)

    def store(self, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        self.look_at("store", addresses, mask, value.dtype.itemsize)
        return self.original.store(addresses, value, mask)


@contextmanager
def guarded() -> Iterator[Guard]:
    """Raises :class:`OutOfBounds` where an interpreted kernel leaves its tensors."""
    guard = Guard(interpreter._interpreter)
    prepare = interpreter.GridExecutor._init_args_hst

    def prepared(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = prepare(self, args, kwargs)
        guard.allow([*on_host[0], *on_host[1].values()])
        return on_host

    interpreter._interpreter = guard
    interpreter.GridExecutor._init_args_hst = prepared
    try:
        yield guard
    finally:
        interpreter._interpreter = guard.original
        interpreter.GridExecutor._init_args_hst = prepare
