"""Which layers keep softmax: those that linear attention serves worst, as far as time allows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lln.hf.register import softmax_attention


def worst_layers(errors: Mapping[int, float], count: int) -> list[int]:
    """Numbers of the layers with the largest error, in the order of the model."""
    if not 0 <= count <= len(errors):
        raise ValueError(f"keep={count} of {len(errors)} layers: give 0 to {len(errors)}")
    return sorted(sorted(errors, key=lambda number: -errors[number])[:count])


def affordable(seconds: Mapping[int, tuple[float, float]], budget: float) -> int:
    """How many layers may keep softmax: attention takes at most ``budget`` × that of none kept.

    Args:
        seconds: Of each layer, worst first: with linear attention, and with softmax.
    """
    if budget < 1:
        raise ValueError(f"budget={budget} is less than no kept layer takes; give 1 or more")
    linear = sum(ours for ours, _ in seconds.values())
    total, count = linear, 0
    for ours, softmax in seconds.values():
        total += softmax - ours
        if total > budget * linear:
            break
        count += 1
    return count


@torch.no_grad()
def time_of_layer(core: Any, length: int, *, repeats: int = 3) -> tuple[float, float]:
    """Seconds of a core and of softmax on one input of a length, the least of some repeats."""
    like = next(itertools.chain(core.parameters(), core.buffers()), torch.zeros(()))
    device, dtype = like.device, like.dtype if like.is_floating_point() else torch.float32
    q, k, v = (
        torch.randn(1, heads, length, core.head_dim, device=device, dtype=dtype)
        for heads in (core.num_heads, core.num_kv_heads, core.num_kv_heads)
    )
    causal = bool(core.causal)
    runs = (
        lambda: core.attend_in_model(q, k, v, None, None, is_causal=causal),
        lambda: softmax_attention(
            q, k, v, key_mask=None, is_causal=causal, scale=q.shape[3] ** -0.5
        ),
    )
    found = []
    for run in runs:
        run()
        best = float("inf")
        for _ in range(repeats):
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            best = min(best, time.perf_counter() - start)
        found.append(best)
    return found[0], found[1]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose_kept(
    keep: int | str | Sequence[int],
    errors: Mapping[int, float],
    cores: Mapping[int, Any],
    *,
    length: int,
    budget: float,
) -> list[int]:
    """Read ``keep``: a number of the worst layers, "auto", or the layers themselves."""
    if isinstance(keep, str):
        if keep != "auto":
            raise ValueError(f'keep={keep!r} is unknown; give a number, a list of layers or "auto"')
        order = sorted(errors, key=lambda number: -errors[number])
        seconds = {number: time_of_layer(cores[number], length) for number in order}
        return worst_layers(errors, affordable(seconds, budget))
    if isinstance(keep, int):
        return worst_layers(errors, keep)
    unknown = sorted(set(keep) - set(errors))
    if unknown:
        raise ValueError(f"keep={list(keep)}: there is no replaced layer {unknown[0]}")
    return sorted(set(keep))
