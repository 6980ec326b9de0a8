"""Calls that worker.py makes once on a whole sequence and once on slices of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lln import Near


@dataclass(frozen=True)
class Case:
    """A sequence, how it is split (shares of the processes, in blocks of 8), and the options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    shares: tuple[int, ...] = (1, 1, 1, 1)
    heads: int = 2
    key_heads: int = 2
    value_width: int = 8
    dtype: torch.dtype = torch.float64
    masked: bool = False
    scales: bool = True
    spread: float = 1.0
    shift: float = 0.0

    def lengths(self, processes: int) -> list[int]:
        return [8 * share for share in self.shares[:processes]]


GIVEN = (
    Case("bidirectional"),
    Case("bidirectional, uneven", shares=(3, 1, 0, 2)),
    Case("bidirectional, masked", masked=True, shares=(2, 1, 3, 1)),
    Case("bidirectional, grouped", heads=4, value_width=5),
    Case("bidirectional, normalized", {"normalize_keys": True}),
    Case("bidirectional, wide spread", spread=40.0),
    Case("bidirectional, float32", dtype=torch.float32),
    Case("bidirectional, bfloat16", dtype=torch.bfloat16),
    Case("diag", {"near": 8}, shares=(2, 1, 1, 2)),
    Case("diag, masked, grouped", {"near": Near(4, scale=0.5)}, heads=4, masked=True),
    Case("diag, bfloat16", {"near": 8}, dtype=torch.bfloat16, masked=True),
    Case("causal", {"is_causal": True}),
    Case("causal, uneven", {"is_causal": True}, shares=(1, 3, 0, 2)),
    Case("causal, masked", {"is_causal": True}, masked=True, shares=(2, 1, 1, 2)),
    Case("causal, grouped", {"is_causal": True, "normalize_keys": True}, heads=4, value_width=3),
    Case("causal, wide spread", {"is_causal": True}, spread=40.0),
    Case("causal, bfloat16", {"is_causal": True}, dtype=torch.bfloat16),
    Case("causal diag", {"is_causal": True, "near": 8}, masked=True, shares=(2, 1, 2, 1)),
    Case("mix of one's own", {"near": 8, "mix": 0.3}, shares=(2, 1, 1, 2)),
    Case("average, overlap", {"near": Near(8, overlap=5)}, shares=(2, 1, 1, 2)),
    Case("average, overlap, causal", {"near": Near(4, overlap=7), "is_causal": True}),
)
_BLOCKS = {"near": Near(8, joint=True)}
_OVERLAP = {"near": Near(4, overlap=6, joint=True)}
JOINT = (
    Case("joint", _BLOCKS),
    Case("joint, uneven", _BLOCKS, shares=(3, 1, 0, 2)),
    Case(
        "joint, masked, grouped",
        {"near": Near(8, scale=0.5, joint=True)},
        heads=4,
        value_width=5,
        masked=True,
    ),
    Case("joint, normalized", _BLOCKS | {"normalize_keys": True}, shares=(2, 1, 1, 2)),
    Case("joint, wide spread", _BLOCKS, spread=40.0),
    Case("joint, bfloat16", _BLOCKS, dtype=torch.bfloat16, masked=True),
    Case("joint, causal", _BLOCKS | {"is_causal": True}, shares=(1, 3, 0, 2)),
    Case("joint, causal, masked", _BLOCKS | {"is_causal": True}, masked=True, heads=4),
    Case("joint, overlap", _OVERLAP, shares=(2, 1, 3, 1)),
    Case("joint, overlap, masked", _OVERLAP, masked=True, heads=4, value_width=3),
    Case(
        "joint, overlap as long as a slice", {"near": Near(4, overlap=8, joint=True)}, masked=True
    ),
    Case("joint, overlap, float32", _OVERLAP, dtype=torch.float32),
    Case(
        "joint, overlap, causal", _OVERLAP | {"is_causal": True}, masked=True, shares=(2, 1, 2, 1)
    ),
)
MEASURED = (
    Case("measured", scales=False, shares=(3, 1, 2, 1)),
    Case("measured, masked, grouped", scales=False, masked=True, heads=4, shares=(2, 1, 0, 1)),
    Case("measured, entropy", {"method": "entropy", "near": 8}, scales=False),
    Case("measured, large mean", scales=False, shift=1e3, dtype=torch.float32),
)
CASES = GIVEN + JOINT + MEASURED


def tensors(case: Case, processes: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """The whole sequence: what has gradients, masks, and the gradient of the output."""
    draw = torch.Generator().manual_seed(len(case.name) + processes)
    batch, width, length = 2, 8, sum(case.lengths(processes))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    learned = {
        "q": case.spread * normal(batch, case.heads, length, width) + case.shift,
        "k": case.spread * normal(batch, case.key_heads, length, width) + case.shift,
        "v": normal(batch, case.key_heads, length, case.value_width),
    }
    learned = {name: x.to(case.dtype) for name, x in learned.items()}
    if case.scales:
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        learned["alpha"] = (1 + normal(case.heads).abs()).to(wide)
        learned["beta"] = (1 + normal(batch, case.key_heads).abs()).to(wide)
    near = Near.read(case.options.get("near"))
    if near is not None and near.joint:
        learned["gamma"] = normal(batch, case.heads).to(learned["alpha"].dtype)
    masks = {}
    if case.masked:
        seen = torch.rand(batch, length, generator=draw) < 0.6
        seen[1, : case.lengths(processes)[0]] = False  # the first slice of a sample has no key
        masks = {"key_mask": seen, "query_mask": seen.roll(3, 1)}
        learned["k"][~seen[:, None].expand(-1, case.key_heads, -1)] = torch.nan
    d_out = normal(batch, case.heads, length, case.value_width).to(case.dtype)
    return learned, masks, d_out
