"""Generated tables: numbers, categories and gaps, and a class that depends on them.

A batch of tables is a function of a seed, drawn on the device by a few dozen calls for all tables
together. Rows of a table are drawn alike and without order: any of them may be context or question.

| kind | the class of a row |
|---|---|
| network | the largest output of a random network with two hidden layers |
| cells | that of the nearest of 4 to 64 prototypes |
| tree | that of a leaf of a random tree of depth 6, some of them changed |
| linear | the largest of random linear scores with noise |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

FEATURES, CLASSES = 32, 10  # at most
KINDS = ("network", "cells", "tree", "linear")
MOST_PROTOTYPES = 64
HIDDEN, DEPTH, LEVELS = 32, 6, 8


class _Draw:
    """Random numbers of one generator, on its device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.options = {"generator": torch.Generator(device).manual_seed(seed), "device": device}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self.options)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, **self.options)

    def between(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from low to high, both included, as often per octave."""
        return (low * ((high + 1) / low) ** self.uniform(*shape)).long().clamp(max=high)


@torch.no_grad()
def draw(
    count: int,
    rows: int,
    *,
    kinds: Sequence[str] = KINDS,
    seed: int,
    device: torch.device | str = "cpu",
) -> tuple[Float[Tensor, "B N 32"], Int[Tensor, "B N"]]:
    """Draw tables; table i is of the kind ``kinds[i % len(kinds)]``.

    Returns:
        Features, NaN where a value is missing and 0 in columns that a table does not have, and
        classes 0, 1, ….

    Example:
        >>> features, labels = draw(32, 1024 + 128, seed=0)     # [32, 1152, 32], [32, 1152]
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds={list(kinds)!r}: choose from {', '.join(KINDS)}")
    device = torch.device(device)
    random = _Draw(seed, device)
    with torch.autocast(device.type, enabled=False):
        used = random.between(2, FEATURES, count, 1, 1)
        classes = random.between(2, CLASSES, count, 1, 1)
        own = torch.arange(FEATURES, device=device) < used  # [B, 1, 32]
        # Rows beyond those asked for are drawn alike, and serve as prototypes and thresholds.
        values, shown = _columns(random, own, rows + MOST_PROTOTYPES)
        labels = torch.empty(count, rows, dtype=torch.long, device=device)
        for place, kind in enumerate(kinds):
            every = slice(place, count, len(kinds))
            x, others = values[every].split([rows, MOST_PROTOTYPES], dim=1)
            if len(x):
                labels[every] = _CLASSES_OF[kind](random, x, others, used[every], classes[every])
        return shown[:, :rows], labels


def _columns(random: _Draw, own: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """What the classes depend on, and what a table shows of it."""
    count, width = own.shape[0], own.sum(-1, keepdim=True)
    x = random.normal(count, rows, FEATURES) * own
    mixed = random.uniform(count, 1, 1) * random.normal(count, FEATURES, FEATURES) / width.sqrt()
    x = (x + x @ mixed) * own
    # Categories: a level has a number that is shown and a value of its own that decides.
    level = torch.special.ndtr(x / (1 + mixed.square().sum(1, keepdim=True)).sqrt())
    level = (level * random.between(2, LEVELS, count, 1, FEATURES)).long().clamp(0, LEVELS - 1)
    effect = random.normal(count, LEVELS, FEATURES).gather(1, level)
    share = 0.5 * (2 * random.uniform(count, 1, 1) - 1).relu()  # of the columns: 0 to a half
    is_category = random.uniform(count, 1, FEATURES) < share
    values = torch.where(is_category, effect, x) * own
    is_skewed = random.uniform(count, 1, FEATURES) < 0.2
    number = torch.where(is_skewed, x.clamp(max=6).exp(), x)
    number = random.normal(count, 1, FEATURES) + random.normal(count, 1, FEATURES).exp() * number
    shown = torch.where(is_category, level.float(), number) * own
    lost = 0.4 * (random.uniform(count, 1, 1) - 0.5).relu()  # of the values: 0 to a fifth
    is_lost = (random.uniform(count, rows, FEATURES) < lost) & own
    return values, shown.masked_fill(is_lost, torch.nan)


def _largest(random: _Draw, scores: Tensor, classes: Tensor) -> Tensor:
    """The class of the largest score, after scores of all classes were made alike large."""
    scores = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
    scores = scores + 0.3 * random.normal(len(scores), 1, CLASSES)
    missing = torch.arange(CLASSES, device=scores.device) >= classes
    return scores.masked_fill(missing, -torch.inf).argmax(-1)


def _network(random: _Draw, x: Tensor, others: Tensor, used: Tensor, classes: Tensor) -> Tensor:
    count = len(x)
    for inputs, width in ((FEATURES, used), (HIDDEN, torch.full_like(used, HIDDEN))):
        weight = 2 * random.normal(count, inputs, HIDDEN) / width.sqrt()
        x = torch.tanh(x @ weight + random.normal(count, 1, HIDDEN))
    return _largest(random, x @ random.normal(count, HIDDEN, CLASSES), classes)


def _linear(random: _Draw, x: Tensor, others: Tensor, used: Tensor, classes: Tensor) -> Tensor:
    scores = x @ random.normal(len(x), FEATURES, CLASSES) / used.sqrt()
    noise = 0.5 * random.uniform(len(x), 1, 1) * random.normal(*scores.shape)
    return _largest(random, scores + noise, classes)


def _cells(random: _Draw, x: Tensor, others: Tensor, used: Tensor, classes: Tensor) -> Tensor:
    number = random.between(4, MOST_PROTOTYPES, len(x), 1, 1).maximum(classes)
    place = torch.arange(MOST_PROTOTYPES, device=x.device)
    distance = distances(x, others).masked_fill(place >= number, torch.inf)
    return distance.argmin(-1) % classes[..., 0]


def _tree(random: _Draw, x: Tensor, others: Tensor, used: Tensor, classes: Tensor) -> Tensor:
    count = len(x)
    column = (random.uniform(count, 2**DEPTH) * used[..., 0]).long()  # of each node
    threshold = others[:, : 2**DEPTH].gather(2, column[..., None])[..., 0]
    node = torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
    for _ in range(DEPTH):
        value = x.gather(2, column.gather(1, node)[..., None])[..., 0]
        node = 2 * node + (value > threshold.gather(1, node))
    leaf = (random.uniform(count, 2**DEPTH) * classes[..., 0]).long()
    label = leaf.gather(1, node - 2**DEPTH)
    is_changed = random.uniform(*label.shape) < 0.1 * random.uniform(count, 1)
    return torch.where(is_changed, (random.uniform(*label.shape) * classes[..., 0]).long(), label)


def distances(x: Float[Tensor, "B N F"], y: Float[Tensor, "B M F"]) -> Float[Tensor, "B N M"]:
    """Euclidean, not by products, which a GPU may round."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


_CLASSES_OF = {"network": _network, "cells": _cells, "tree": _tree, "linear": _linear}
