"""Launches that are planned once per shape: what a call of a kernel costs beside the kernel.

Triton binds thirty arguments at every launch, looks at each and builds a key to find the compiled
kernel by: more host time than a small kernel runs. Of all these arguments only the addresses of the
tensors change between two calls with the same shapes and strides.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from lln.ops.common.kernels import tiles
from lln.ops.common.kernels.library import on_device

P = ParamSpec("P")
R = TypeVar("R")

# Of a tensor: shape, strides, dtype, device. All that a launch may depend on beside its address.
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
# Bits of an address that are 0 where Triton's kernels for aligned memory fit, as in whole tensors.
ALIGNED = 15
# AMD's compiled kernels depend on more of a tensor.
_REMEMBERS = os.environ.get("LLN_DIRECT_LAUNCH", "1") != "0" and torch.version.hip is None


def layout(x: Tensor) -> Layout:
    """What plans are remembered by."""
    return x.shape, x.stride(), x.dtype, x.device


def planned(plan: Callable[P, R]) -> Callable[P, R]:
    """Remember the plans of the last shapes, until :func:`lln.ops.common.kernels.tiles.forget`."""
    remembered = functools.lru_cache(maxsize=1024)(plan)
    tiles.REMEMBERED.append(remembered)
    return cast(Callable[P, R], remembered)


def steps(size: int, step: int) -> int:
    """size / step, rounded up; ``triton.cdiv`` is a function of the compiler, and takes longer."""
    return -(-size // step)


def rows_of(like: Layout, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of :func:`lln.ops.common.kernels.library.empty_rows`."""
    (b, h, n, _), strides, *_ = like
    if strides[1] < strides[2]:
        return (b, h, n, width), (n * h * width, width, h * width, 1)
    return (b, h, n, width), (h * n * width, n * width, width, 1)


def row_strides(*strides: tuple[int, ...]) -> tuple[tuple[int | None, ...], ...]:
    """Batch, head and row strides of every tensor.

    Where the rows of all are equally far apart, as they are in most models, only the first one has
    a row stride: see :func:`lln.ops.common.kernels.features.row_of`.
    """
    first, *others = (x[:3] for x in strides)
    if all(x[2] == first[2] for x in others):
        others = [(*x[:2], None) for x in others]
    return first, *others


class Launch:
    """A kernel, its grid, and all of its arguments that are no tensors.

    Called with the tensors, in the order of the kernel's parameters: the first ones. The compiled
    kernel is launched as it is from the second call on, if all addresses are multiples of 16 and
    the tensors on the current CUDA device; through Triton's binder otherwise, and everywhere with
    ``LLN_DIRECT_LAUNCH=0`` in the environment.

    Args:
        numbers: The parameters after the tensors.
        constants: The others, and options of the compiler.
    """

    __slots__ = ("_after", "_compiled", "constants", "grid", "kernel", "numbers")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], **constants: Any
    ) -> None:
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self.grid = (*grid, 1, 1)[:3]
        self._compiled: dict[tuple[torch.dtype | None, ...], Callable[..., None]] = {}
        self._after: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | None) -> None:
        first = tensors[0]
        assert first is not None
        if not on_current_device(first):
            with on_device(first):
                self._bind(tensors)
            return
        addresses, kinds, bits = [], [], 0
        for x in tensors:
            if x is None:
                addresses.append(None)
                kinds.append(None)
            else:
                address = x.data_ptr()
                bits |= address
                addresses.append(address)
                kinds.append(x.dtype)
        if bits & ALIGNED:
            self._bind(tensors)
            return
        dtypes = tuple(kinds)
        compiled = self._compiled.get(dtypes)
        if compiled is not None:
            compiled(*addresses, *self._after)
            return
        found = self._bind(tensors)
        names = getattr(self.kernel, "arg_names", ())[len(tensors) + len(self.numbers) :]
        if _REMEMBERS and isinstance(found, CompiledKernel) and set(names) <= set(self.constants):
            self._after = (*self.numbers, *(self.constants[name] for name in names))
            self._compiled[dtypes] = found[self.grid]

    def _bind(self, tensors: tuple[Tensor | None, ...]) -> Any:
        return self.kernel[self.grid](*tensors, *self.numbers, **self.constants)


def on_current_device(x: Tensor) -> bool:
    """Whether x is in the memory of the CUDA device that kernels are launched on."""
    return x.is_cuda and x.device.index == torch.cuda.current_device()
