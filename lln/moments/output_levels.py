"""The level of LLN's far keys beside softmax's near ones by which the output is closest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.moments.levels import RowScores, scores_of_rows, solve_share
from lln.ops.common.arguments import hide, no_autocast
from lln.protocols import compute_dtype

FARTHEST = 6.0  # from the level that matches shares: a far branch without weight learns nothing
STEP = 0.05


@dataclass(frozen=True)
class OutputTerms:
    r"""What the error of the output depends on, at some queries: a parabola in the far share.

    With n, f, s the outputs of the near keys, of LLN's far ones and of softmax over all, and the
    far share w = sigmoid(γ + lln − near),
        ‖n + w (f − n) − s‖² = ‖n − s‖² + 2 w (n − s)·(f − n) + w² ‖f − n‖².

    Attributes:
        near, far, linear: Logarithms of the three normalisers; ``linear`` over the keys of LLN.
        slope, square: (n − s)·(f − n), and ‖f − n‖².
        counted: Queries that LLN answers something; the others do not depend on γ.
    """

    near: Float[Tensor, "H n"]
    far: Float[Tensor, "H n"]
    linear: Float[Tensor, "H n"]
    slope: Float[Tensor, "H n"]
    square: Float[Tensor, "H n"]
    counted: Bool[Tensor, "H n"]

    @staticmethod
    def join(parts: Sequence[OutputTerms]) -> OutputTerms:
        """Those of all queries."""
        return OutputTerms(
            *(torch.cat([getattr(x, own.name) for x in parts], 1) for own in fields(OutputTerms))
        )

    def to_cpu(self) -> OutputTerms:
        """In float64, which not every device has."""
        found = (getattr(self, own.name).cpu() for own in fields(self))
        return OutputTerms(*(x.double() if x.is_floating_point() else x for x in found))

    def level(self) -> Float[Tensor, " H"]:
        """γ of each head with the least error over all samples; 0 where nothing depends on it.

        It is sought within ``FARTHEST`` of the level that matches the shares of near keys.
        """
        hidden = ~self.counted
        if bool(hidden.all()):
            return self.near.new_zeros(len(self.near))
        has_far = self.counted & self.far.isfinite()
        matched = solve_share(self.near[None], self.far[None], self.linear[None], has_far[None])[0]
        slope, square = (x.masked_fill(hidden, 0) for x in (self.slope, self.square))
        above = (self.near - self.linear).masked_fill(hidden, 0)
        offsets = torch.arange(-FARTHEST, FARTHEST + STEP / 2, STEP, dtype=above.dtype)
        errors = []
        for offset in offsets.tolist():
            share = (matched[:, None] + offset - above).sigmoid()
            errors.append((2 * share * slope + share.square() * square).sum(-1))
        best = torch.stack(errors).argmin(0)
        found = matched + offsets.to(matched.device)[best]
        return found.masked_fill(hidden.all(-1), 0)


@torch.no_grad()
def output_terms(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    key_mask: Bool[Tensor, "B M"] | None = None,
    **options: Any,
) -> OutputTerms:
    """The terms of evenly spaced queries, in O(rows M (D + S + E)) time.

    Args:
        options: Of :func:`lln.moments.match_level`.
    """
    if q.shape[2] == 0 or k.shape[2] == 0:
        nothing = q.new_zeros(q.shape[1], 0, dtype=compute_dtype(q, k))
        return OutputTerms(nothing, nothing, nothing, nothing, nothing, nothing.bool())
    found = scores_of_rows(q, k, key_mask=key_mask, **options)
    near, distant, linear = found.logs()
    counted = found.counted(distant, linear)
    slope, square = _parabola(found, v, key_mask)
    counted = counted & slope.isfinite() & square.isfinite()
    terms = (near, distant, linear, slope, square, counted)
    return OutputTerms(*(x.transpose(0, 1).flatten(1) for x in terms))


def _parabola(found: RowScores, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(n − s)·(f − n) and ‖f − n‖² of every query."""
    group = found.exact.shape[1] // max(v.shape[1], 1)
    values = hide(v.to(found.exact.dtype), key_mask).repeat_interleave(group, dim=1)

    def over(scores: Tensor, field: Tensor) -> Tensor:
        weights = torch.softmax(scores.masked_fill(~field, torch.finfo(scores.dtype).min), -1)
        return weights.masked_fill(~field, 0) @ values

    with no_autocast(v):
        near = over(found.exact, found.near)
        wanted = over(found.exact, found.near | found.far)
        step = over(found.linear, found.far) - near
    return ((near - wanted) * step).sum(-1), step.square().sum(-1)


def match_output_level(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    **options: Any,
) -> Float[Tensor, " H"]:
    """γ with which near and far keys together answer most as softmax does, one per head.

    :func:`lln.moments.match_level` gives near keys the share that softmax gives them on average.
    Where LLN looks at other far keys than softmax, as in trained models before anything was
    learned, that share of them is too much: this level weighs what they add against what they
    spoil. Its error over the queries looked at is at most that of the other one.

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        k: Keys ``[B, Hkv, M, D]``.
        v: Values ``[B, Hkv, M, E]``.
        options: Of :func:`lln.moments.match_level`.

    Example:
        >>> gamma = match_output_level(q, k, v, alpha=alpha, beta=beta, near=128)    # -> [8]
    """
    return output_terms(q, k, v, **options).level()
