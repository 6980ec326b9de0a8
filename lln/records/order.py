"""The order of examples: which ones a batch holds, as a pure function of the step."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lln.records.seeds import generator


def shuffled(step: int, rows: slice, *, batch_size: int, count: int, seed: int) -> Tensor:
    """Indices of the examples in ``rows`` of the global batch of ``step``; int64 ``[rows]``.

    Every epoch is a new permutation; the stream of permutations is cut into batches, so a batch
    may reach into the next epoch and no example is left out.

    Args:
        rows: Part of ``range(batch_size)`` that this process wants.
        count: Examples there are.

    Example:
        >>> shuffled(0, slice(0, 4), batch_size=8, count=100, seed=0)   # the first half of step 0
    """
    if count < 1:
        raise ValueError(f"count={count}: there are no examples to choose from")
    start, stop, _ = rows.indices(batch_size)
    places = torch.arange(step * batch_size + start, step * batch_size + stop)
    epochs, inside = places // count, places % count
    index = torch.empty_like(places)
    for epoch in epochs.unique().tolist():
        here = epochs == epoch
        index[here] = _permutation(count, seed, epoch)[inside[here]]
    return index


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "epoch", epoch))
