"""The level of LLN's weights beside softmax's, where both stand under one normaliser."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.moments.features import log_products
from lln.moments.rows import spaced_rows, take_rows
from lln.ops.common.arguments import no_autocast
from lln.ops.linear.normalized_keys import normalized_keys
from lln.ops.window.fields import fields_of_rows
from lln.ops.window.near import Near
from lln.protocols import compute_dtype

ROWS = 64  # of each sample and head
STEPS = 24  # of the bisection


@torch.no_grad()
def match_level(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    near: int | Near,
    q_far: Float[Tensor, "B H N S"] | None = None,
    k_far: Float[Tensor, "B Hkv M S"] | None = None,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    is_causal: bool = False,
    normalize_keys: bool = False,
    rows: int = ROWS,
) -> Float[Tensor, "B H"]:
    r"""γ with which near keys get the share that softmax gives them, in O(rows M (D + S)) time.

    Matching α and β gives the two kernels the same log-variance, not the same level. γ solves,
    over ``rows`` evenly spaced queries, with s_ij = scale q_i·k_j (docs/equations.md),
        mean_i sigmoid(near_i − γ − lln_i) = mean_i sigmoid(near_i − far_i),
    near_i and far_i being logsumexp of s_ij over the near and the far keys, and lln_i over the far
    keys that of LLN's scores ln Σ_l exp(α q_il + β k_jl).

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        k: Keys ``[B, Hkv, M, D]``.
        near: As in :func:`lln.attention`.
        q_far, k_far: What the LLN branch sees instead of q and k.
        key_mask, query_mask: True = counts; the content of other tokens never matters.
        normalize_keys: As in :func:`lln.attention`.

    Returns:
        A constant of the backward pass, float32 (float64 for float64 inputs); 0 where no query has
        a far key, and nothing depends on it.

    Numerics: by bisection between the least and the largest γ that a single query would want. No
    law of the scores is assumed: where neighbours attract each other, a level from the mean and
    variance of all scores is too high by as much as they stand out, and the near branch is lost.

    Example:
        >>> gamma = match_level(q, k, alpha=alpha, beta=beta, near=128)    # -> [2, 8]
    """
    if q.shape[2] == 0 or k.shape[2] == 0:
        return q.new_zeros(q.shape[:2], dtype=compute_dtype(q, k))
    if normalize_keys:
        k_far = normalized_keys(k if k_far is None else k_far, beta, key_mask)
        beta = torch.ones_like(beta)
    found = scores_of_rows(
        q, k, alpha=alpha, beta=beta, near=near, q_far=q_far, k_far=k_far, key_mask=key_mask,
        query_mask=query_mask, is_causal=is_causal, rows=rows,
    )  # fmt: skip
    close, far, linear = found.logs()
    return solve_share(close, far, linear, found.counted(far, linear))


@dataclass(frozen=True)
class RowScores:
    """Scores of some queries against all keys, by softmax and by LLN, and which keys are near.

    Attributes:
        index: The queries.
        real: Which of them count; None is all.
    """

    exact: Float[Tensor, "B H r M"]
    linear: Float[Tensor, "B H r M"]
    near: Bool[Tensor, "#B 1 r M"]
    far: Bool[Tensor, "#B 1 r M"]
    index: Int[Tensor, "#B r"]
    real: Bool[Tensor, "B r"] | None

    def logs(self) -> tuple[Tensor, Tensor, Tensor]:
        """logsumexp ``[B, H, r]`` of softmax over near and over far keys, and of LLN over far."""
        near, far, linear = (
            x.masked_fill(~field, -torch.inf).logsumexp(-1)
            for x, field in ((self.exact, self.near), (self.exact, self.far),
                             (self.linear, self.far))
        )  # fmt: skip
        return near, far, linear

    def counted(self, far: Tensor, linear: Tensor) -> Bool[Tensor, "B H r"]:
        """Which queries have far keys, of finite logarithms."""
        known = self.far.any(-1) & far.isfinite() & linear.isfinite()
        return known if self.real is None else known & self.real[:, None]


def scores_of_rows(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    near: int | Near,
    q_far: Float[Tensor, "B H N S"] | None = None,
    k_far: Float[Tensor, "B Hkv M S"] | None = None,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    is_causal: bool = False,
    rows: int = ROWS,
) -> RowScores:
    """Scores of ``rows`` evenly spaced queries; arguments are those of :func:`match_level`."""
    dtype, heads = compute_dtype(q, k), q.shape[1]
    field = Near.read(near, q.shape[-1])
    assert field is not None and field.scale is not None
    q_far, k_far = q if q_far is None else q_far, k if k_far is None else k_far
    group = heads // max(k.shape[1], 1)
    index = spaced_rows(q.shape[2], rows, query_mask, q.device)  # [#B, r]

    def some(x: Tensor) -> Tensor:
        return take_rows(x, index).to(dtype)

    is_near, is_far = fields_of_rows(index, q.shape[2], k.shape[2], field, key_mask, is_causal)
    hidden = None if key_mask is None else ~key_mask[:, None, :, None]

    def keys(x: Tensor) -> Tensor:
        x = x.to(dtype) if hidden is None else x.to(dtype).masked_fill(hidden, 0)
        return x.repeat_interleave(group, dim=1)

    with no_autocast(q):
        exact = float(field.scale) * some(q) @ keys(k).transpose(-1, -2)
        features = keys(k_far) * beta.to(dtype).repeat_interleave(group, dim=1)[..., None, None]
        queries = some(q_far) * alpha.to(dtype)[..., None, None]
        linear = log_products(queries, features)
    real = None if query_mask is None else query_mask.gather(1, index)
    return RowScores(exact, linear, is_near, is_far, index, real)


def solve_share(near: Tensor, far: Tensor, linear: Tensor, counted: Tensor) -> Float[Tensor, "B H"]:
    """γ from the three logarithms ``[B, H, r]`` of the queries that count; 0 without any."""
    hidden, above = ~counted, near - linear
    wanted_by_each = far - linear
    low = wanted_by_each.masked_fill(hidden, torch.inf).amin(-1)
    high = wanted_by_each.masked_fill(hidden, -torch.inf).amax(-1)
    low, high = (x.masked_fill(~counted.any(-1), 0) for x in (low, high))
    target = (near - far).sigmoid().masked_fill(hidden, 0).sum(-1)
    for _ in range(STEPS):
        middle = (low + high) / 2
        share = (above - middle[..., None]).sigmoid().masked_fill(hidden, 0).sum(-1)
        higher = share > target  # too much for the near keys
        low, high = torch.where(higher, middle, low), torch.where(higher, high, middle)
    return (low + high) / 2
