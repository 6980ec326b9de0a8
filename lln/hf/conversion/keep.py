"""Which key heads keep softmax: as many as are asked for or fit into a cache, the best first.

Query heads share keys, and memory is paid per key head: it is kept with all its query heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from lln.hf.conversion.cache_size import CacheShare
from lln.hf.conversion.retrieval import can_retrieve, tasks_for

ORDERS = ("retrieval", "error")
Heads = dict[int, list[int]]  # by layer
Scores = dict[int, list[float]]  # of the key heads of every layer; the largest are kept first


def order_of(model: Any, keep_by: str | None) -> str:
    """By what key heads are chosen: by recall in decoders, unless something is said."""
    if keep_by is not None and keep_by not in ORDERS:
        raise ValueError(f"keep_by={keep_by!r} is unknown; choose from {', '.join(ORDERS)}")
    if keep_by == "retrieval" and not can_retrieve(model):
        raise ValueError(
            f"keep_by={keep_by!r}, but {type(model).__name__} does not predict the next token; "
            'pass keep_by="error"'
        )
    return keep_by or ("retrieval" if can_retrieve(model) else "error")


def check_keep(keep: Any, key_heads: Mapping[int, int]) -> None:
    """Raise unless :func:`choose_kept` can read ``keep``.

    Args:
        key_heads: How many the layers have.
    """
    if isinstance(keep, CacheShare):
        return
    if isinstance(keep, Integral) and not isinstance(keep, bool):
        total = sum(key_heads.values())
        if not 0 <= int(keep) <= total:
            raise ValueError(f"keep={keep} of {total} key heads: give 0 to {total}")
        return
    if not isinstance(keep, Mapping):
        raise ValueError(
            f"keep={keep!r} is unknown; give a number of key heads, key heads by layer such as "
            "{3: [0]}, or lln.hf.CacheShare(1 / 7, context=8192)"
        )
    for layer, wanted in keep.items():
        if layer not in key_heads:
            raise ValueError(f"keep={dict(keep)}: there is no layer {layer} to replace")
        wrong = [head for head in wanted if not 0 <= head < key_heads[layer]]
        if wrong:
            raise ValueError(
                f"keep={dict(keep)}: layer {layer} has {key_heads[layer]} key heads, not {wrong[0]}"
            )


def count_heads(model: Any, keep: Any, order: str) -> int | Mapping[int, Sequence[int]]:
    """How many heads fit into a cache that is asked for; anything else as it is.

    Raises:
        ValueError: None does, or there is no room for the tasks that choose: better now, after
            ``replace`` and ``calibrate``, than after hours of learning.
    """
    found = keep.heads(model) if isinstance(keep, CacheShare) else keep
    if isinstance(found, Mapping):
        return found
    if found and order == "retrieval":
        tasks_for(model, count=1)
    return int(found)


def choose_kept(keep: int | Mapping[int, Sequence[int]], scores: Scores) -> Heads:
    """The key heads of every layer that keep softmax: the best, or those that are given."""
    if isinstance(keep, Mapping):
        return {layer: sorted(set(heads)) for layer, heads in sorted(keep.items()) if heads}
    found: Heads = {}
    for layer, head in sorted(best_first(scores)[: int(keep)]):
        found.setdefault(layer, []).append(head)
    return found


def best_first(scores: Mapping[int, Sequence[float]]) -> list[tuple[int, int]]:
    """Layer and number of all key heads."""
    places = [(layer, head) for layer, found in scores.items() for head in range(len(found))]
    return sorted(places, key=lambda place: -scores[place[0]][place[1]])


def of_key_heads(errors: Mapping[int, Sequence[float]], key_heads: Mapping[int, int]) -> Scores:
    """The parts of query heads in the error of their layer, summed over those that share keys."""
    return {
        layer: [sum(found[head * group : (head + 1) * group]) for head in range(key_heads[layer])]
        for layer, found in errors.items()
        for group in [len(found) // key_heads[layer]]
    }


def query_heads(heads: Sequence[int], group: int) -> list[int]:
    """The query heads of key heads."""
    return [head * group + number for head in heads for number in range(group)]
