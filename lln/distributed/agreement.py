"""What the processes of a group tell each other before they exchange states: that all can go on."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROUNDING = 1e-6  # by which shared numbers may differ


@contextlib.contextmanager
def agreed(group: Any, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Make what is wrong on one process an error on all of them.

    One exchange of 16 bytes for each name, for which the host waits; none while a compiler traces
    or a CUDA graph records, as nobody can wait there. Without it a process that raises would leave
    the others waiting for its state until the group's time is up.

    Yields:
        A dictionary for the arguments that must be the same on all processes, by these names.
    """
    shared: dict[str, Any] = dict.fromkeys(names)
    recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if recording or torch.compiler.is_compiling():
        yield shared
        return
    try:
        yield shared
    except Exception:
        _exchange(group, dict.fromkeys(names), failed=True)
        raise
    rank, table = dist.get_rank(group), _exchange(group, shared, failed=False)
    refused = [process for process, (flag, *_) in enumerate(table) if flag]
    if refused:
        raise ValueError(
            f"process {refused[0]} of the group refused its slice, and says why there; no process "
            "has attended"
        )
    for place, (name, value) in enumerate(shared.items()):
        columns = slice(1 + 2 * place, 3 + 2 * place)
        for process, row in enumerate(table):
            if not all(map(_same, row[columns], table[rank][columns])):
                raise ValueError(
                    f"{name} is {_shown(value)} on process {rank} of the group and another on "
                    f"process {process}; pass the same on all of them"
                )


@torch.no_grad()
def _exchange(group: Any, shared: dict[str, Any], *, failed: bool) -> list[list[float]]:
    """A row of numbers for every process: whether it failed, and two for each shared argument."""
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    flag = torch.tensor([failed], dtype=torch.float64)
    own = torch.cat([x.to(device) for x in (flag, *map(_numbers, shared.values()))])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return torch.stack(every).tolist()


def _numbers(value: Any) -> Tensor:
    """Two numbers by which values are told apart: of a tensor two means with different weights."""
    if isinstance(value, Tensor):
        x = value.flatten().double()
        weight = torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device)
        return torch.stack([x.mean(), (weight * x).sum() / weight.sum()])
    if value is None:
        value = math.nan
    elif not isinstance(value, (int, float)):
        value = zlib.crc32(repr(value).encode())
    return torch.tensor([value, value], dtype=torch.float64)


def _same(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return f"a tensor {list(value.shape)} of mean {value.double().mean().item():.6g}"
