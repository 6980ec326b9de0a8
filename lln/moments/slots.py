"""How much larger alpha and beta must be where LLN has more slots than q and k have features.

More slots even out a row, so the same entropy takes larger exponents. The factor is read from
``slots.json``, which ``python -m lln.moments.slots`` makes by a seeded simulation: Gaussian q and
k, the same for the map and for the identity, both matched to softmax by
:func:`lln.moments.match_features`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

TABLE = "slots.json"
#: Blocks of the map: orthogonal matrices, or each of them and its negative.
FAMILIES = ("rotations", "signs")
MULTIPLES = (1, 2, 4, 8)  # slots / head size
HEAD_DIMS = (16, 32, 64, 128)
VARIANCES = (0.25, 1.0, 4.0, 16.0)  # of the softmax scores


def first_map(family: str, head_dim: int, slots: int, seed: int = 0) -> Float[Tensor, "D S"]:
    """Blocks of orthogonal matrices, the first of them the identity, cut to ``slots`` columns.

    With "signs" each block is followed by its negative.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks, width = [], 0
    while width < slots:
        block = torch.eye(head_dim)
        if blocks:
            noise = torch.randn(head_dim, head_dim, generator=generator)
            block = torch.linalg.qr(noise).Q
        blocks += [block] if family == "rotations" else [block, -block]
        width = head_dim * len(blocks)
    return torch.cat(blocks, dim=1)[:, :slots]


def slot_factor(
    family: str, head_dim: int, slots: int, score_variance: float | Tensor
) -> float | Tensor:
    """The factor of alpha and beta, by interpolation of the logarithms; 1 for as many as features.

    Args:
        family: "rotations" or "signs".
        score_variance: Of softmax's scores, a number or a tensor, whose shape the result has.
    """
    if slots == head_dim and family == "rotations":
        return 1.0
    row = _row(family, head_dim, slots)
    if not isinstance(score_variance, Tensor):
        return _interpolated(row, torch.tensor(float(score_variance))).item()
    return _interpolated(row, score_variance)


def _interpolated(row: tuple[float, ...], variance: Tensor) -> Tensor:
    """Linear between the tabulated variances, constant outside of them."""
    place = (variance.log() - math.log(VARIANCES[0])) / math.log(VARIANCES[1] / VARIANCES[0])
    result = torch.full_like(place, row[0])
    for step in range(len(row) - 1):
        result = result + (row[step + 1] - row[step]) * (place - step).clamp(0, 1)
    return result


@functools.lru_cache(maxsize=256)
def _row(family: str, head_dim: int, slots: int) -> tuple[float, ...]:
    """The factors at every tabulated variance, for one size."""
    # Numbers, not tensors: what torch.export traces must not be kept for the next call.
    multiples = [math.log(m) for m in MULTIPLES], math.log(slots / head_dim)
    heads = [math.log(d) for d in HEAD_DIMS], math.log(head_dim)
    columns = zip(*_table()[family], strict=True)  # a list of rows per head size
    return tuple(_between([_between(column, *multiples) for column in columns], *heads))


def _between(table: Sequence[list[float]], places: list[float], wanted: float) -> list[float]:
    """Linear interpolation between the rows of a table, constant outside."""
    for i in range(len(places) - 1):
        if wanted < places[i + 1] or i == len(places) - 2:
            share = min(max((wanted - places[i]) / (places[i + 1] - places[i]), 0.0), 1.0)
            rows = zip(table[i], table[i + 1], strict=True)
            return [(1 - share) * low + share * high for low, high in rows]
    raise AssertionError


@functools.cache
def _table() -> dict[str, list[list[list[float]]]]:
    text = resources.files("lln.moments").joinpath(TABLE).read_text(encoding="utf-8")
    return json.loads(text)["factors"]


def simulate(family: str, multiple: int, head_dim: int, variance: float) -> float:
    """One entry of the table."""
    from lln.moments.features import match_features, softmax_entropy

    if multiple == 1:
        return 1.0  # "signs" has no such map; the identity is the end of its line
    torch.manual_seed(0)
    spread = variance**0.25
    q, k = spread * torch.randn(1, 4, 64, head_dim), spread * torch.randn(1, 4, 2048, head_dim)
    wanted = softmax_entropy(q, k)
    maps = first_map(family, head_dim, multiple * head_dim)
    factors = [match_features(q @ m, k @ m, wanted) for m in (maps, torch.eye(head_dim))]
    return (factors[0] / factors[1]).mean().item()


def main() -> None:
    """Make the table."""
    sizes = len(MULTIPLES), len(HEAD_DIMS), len(VARIANCES)
    factors = {}
    for family in FAMILIES:
        found = [
            round(simulate(family, *entry), 4)
            for entry in itertools.product(MULTIPLES, HEAD_DIMS, VARIANCES)
        ]
        factors[family] = torch.tensor(found, dtype=torch.float64).view(sizes).tolist()
        print(family, factors[family], flush=True)
    text = json.dumps({"made_by": "python -m lln.moments.slots", "factors": factors})
    path = Path(__file__).with_name(TABLE)
    path.write_text(text.replace("]], ", "]],\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
