"""Which layers and heads keep softmax: those served worst otherwise, as far as time allows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from lln.hf.cores import attend
from lln.hf.rotation import Rotation, sees_before
from lln.hf.softmax import softmax_attention


def worst_layers(errors: Mapping[int, float], count: int) -> list[int]:
    """Numbers of the layers with the largest error, in the order of the model."""
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
    heads = heads_of(core)
    keys = getattr(core, "num_kv_heads", heads)
    q, k, v = (
        torch.randn(1, count, length, core.key_dim, device=device, dtype=dtype)
        for count in (heads, keys, keys)
    )
    causal = bool(core.causal)
    rotation = None
    if sees_before(core):
        ones = q.new_ones(1, length, core.key_dim)
        rotation = Rotation(ones, 0 * ones, lambda q, k, cos, sin: (q * cos + q.flip(-1) * sin, k))
    runs = (
        lambda: attend(core, q, k, v, key_mask=None, is_causal=causal, rotation=rotation),
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


def check_keep(keep: Any, layers: Collection[int]) -> None:
    """Raise unless ``keep`` is one that :func:`choose_kept` can read.

    Args:
        layers: Numbers of the replaced layers.
    """
    if keep == "auto":
        return
    if _is_number(keep):
        if not 0 <= keep <= len(layers):
            raise ValueError(f"keep={keep} of {len(layers)} layers: give 0 to {len(layers)}")
        return
    if isinstance(keep, str) or not isinstance(keep, Collection):
        raise ValueError(
            f'keep={keep!r} is unknown; give a whole number, a list of layers or "auto"'
        )
    unknown = sorted(set(keep) - set(layers))
    if unknown:
        raise ValueError(f"keep={list(keep)}: there is no replaced layer {unknown[0]}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def choose_kept(
    keep: int | str | Sequence[int],
    errors: Mapping[int, float],
    cores: Mapping[int, Any],
    *,
    length: int,
    budget: float,
) -> list[int]:
    """Read ``keep``: a number of the worst layers, "auto", or the layers themselves."""
    check_keep(keep, errors)
    if isinstance(keep, str):
        order = sorted(errors, key=lambda number: -errors[number])
        seconds = {number: time_of_layer(cores[number], length) for number in order}
        return worst_layers(errors, affordable(seconds, budget))
    if isinstance(keep, (int, Integral)):
        return worst_layers(errors, int(keep))
    return sorted(set(keep))


def heads_of(core: Any) -> int:
    """The number of query heads of a core."""
    return core.num_heads if hasattr(core, "num_heads") else core.layer.num_heads


Heads = dict[int, list[int]]


def worst_heads(errors: Mapping[int, Sequence[float]], count: int) -> Heads:
    """The heads with the largest part in the error of their layer, by layer.

    Args:
        errors: Of each layer ‖core_h − softmax_h‖² / ‖softmax‖² of its heads.
    """
    return _by_layer(_worst_first(errors)[:count])


def affordable_heads(
    order: Sequence[tuple[int, int]],
    seconds: Mapping[int, tuple[float, float]],
    heads: Mapping[int, int],
    *,
    kept: Sequence[int],
    budget: float,
) -> int:
    """How many heads may keep softmax: attention takes at most ``budget`` × that of none kept.

    A head costs its share of its layer's softmax; linear attention goes on in all heads.

    Args:
        order: Layer and number of the heads, worst first.
        seconds: Of each layer: with linear attention, and with softmax.
        heads: Of each layer, their number.
        kept: Layers that keep softmax as a whole, which is paid first.
    """
    if budget < 1:
        raise ValueError(f"budget={budget} is less than no kept head takes; give 1 or more")
    linear = sum(ours for ours, _ in seconds.values())
    total = linear + sum(seconds[number][1] - seconds[number][0] for number in kept)
    count = 0
    for number, _ in order:
        total += seconds[number][1] / heads[number]
        if total > budget * linear:
            break
        count += 1
    return count


def check_keep_heads(keep_heads: Any, heads: Mapping[int, int]) -> None:
    """Raise unless ``keep_heads`` is one that :func:`choose_kept_heads` can read.

    Args:
        heads: How many heads the layers have that do not keep softmax as a whole.
    """
    if not heads and keep_heads:
        raise ValueError(
            f"keep_heads={keep_heads!r}, but all layers keep softmax as a whole; leave keep_heads "
            "out, or keep fewer layers"
        )
    if keep_heads == "auto":
        return
    if _is_number(keep_heads):
        total = sum(heads.values())
        if not 0 <= keep_heads <= total:
            raise ValueError(f"keep_heads={keep_heads} of {total} heads: give 0 to {total}")
        return
    if not isinstance(keep_heads, Mapping):
        raise ValueError(
            f'keep_heads={keep_heads!r} is unknown; give a whole number, heads by layer or "auto"'
        )
    for number, wanted in keep_heads.items():
        if number not in heads:
            raise ValueError(
                f"keep_heads={dict(keep_heads)}: layer {number} is not replaced, or keeps softmax "
                "as a whole"
            )
        wrong = [head for head in wanted if not 0 <= head < heads[number]]
        if wrong:
            raise ValueError(
                f"keep_heads={dict(keep_heads)}: layer {number} has {heads[number]} heads, "
                f"not {wrong[0]}"
            )


def choose_kept_heads(
    keep_heads: int | str | Mapping[int, Sequence[int]],
    errors: Mapping[int, Sequence[float]],
    cores: Mapping[int, Any],
    *,
    kept: Sequence[int],
    length: int,
    budget: float,
) -> Heads:
    """Read ``keep_heads``: a number of the worst heads, "auto", or the heads of each layer."""
    free = {number: found for number, found in errors.items() if number not in kept}
    check_keep_heads(keep_heads, {number: len(found) for number, found in free.items()})
    if isinstance(keep_heads, str):
        seconds = {number: time_of_layer(core, length) for number, core in cores.items()}
        sizes = {number: heads_of(core) for number, core in cores.items()}
        order = _worst_first(free)
        return worst_heads(free, affordable_heads(order, seconds, sizes, kept=kept, budget=budget))
    if isinstance(keep_heads, (int, Integral)):
        return worst_heads(free, int(keep_heads))
    return _by_layer([(number, head) for number, heads in keep_heads.items() for head in heads])


def _worst_first(errors: Mapping[int, Sequence[float]]) -> list[tuple[int, int]]:
    """Layer and number of all heads."""
    places = [(number, head) for number, found in errors.items() for head in range(len(found))]
    return sorted(places, key=lambda place: -errors[place[0]][place[1]])


def _by_layer(places: Sequence[tuple[int, int]]) -> Heads:
    found: Heads = {}
    for number, head in sorted(set(places)):
        found.setdefault(number, []).append(head)
    return found
