"""Chosen rows of an attention core's matrix, with gradients: what a teacher's rows are held to."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.moments.features import log_products
from lln.moments.rows import take_rows
from lln.nn.attention import LLNAttention
from lln.nn.draw import Draw
from lln.ops.common.arguments import hide
from lln.ops.window.fields import fields_of_rows
from lln.ops.window.near import Near
from lln.protocols import compute_dtype

LEAST = 1e-30  # of a product of features: its logarithm has a gradient


def row_weights(
    core: LLNAttention,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    index: Int[Tensor, "#B r"],
    draw: Draw,
) -> Float[Tensor, "B H r M"]:
    """The rows ``index`` of ``core.attention_matrix``, in O(r M (D + S)) time and memory.

    Dropout of the draw is left out. Gradients flow to α, β, γ, maps and mix, and to q and k.
    """
    dtype, heads = compute_dtype(q, k), q.shape[1]
    group = heads // k.shape[1]
    if draw.center is not None:
        k = k - draw.center
    q_far, k_far = (q, k) if draw.far is None else draw.far
    k, k_far = (hide(x, draw.key_mask) for x in (k, k_far))  # what they hold may not be finite
    k, k_far, beta = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, k_far, draw.beta))
    queries = take_rows(q_far, index).to(dtype) * draw.alpha[..., None, None]
    features = k_far * beta[..., None, None]
    linear = log_products(queries, features, least=LEAST)
    field = Near(1) if core.near is None else core.near
    near, far = fields_of_rows(index, q.shape[2], k.shape[2], field, draw.key_mask, draw.is_causal)
    seen = near | far
    if core.near is None:
        return _softmax(linear, seen)
    exact = core.scale * take_rows(q, index).to(dtype) @ k.transpose(-1, -2)
    if draw.gamma is None:
        weight = 0.5 if draw.mix is None else draw.mix[:, None, None]
        return weight * _softmax(linear, seen) + (1 - weight) * _softmax(exact, near)
    linear = linear + draw.gamma[..., None, None]
    return _softmax(torch.where(near, exact, linear), seen)


def _softmax(
    scores: Float[Tensor, "B H r M"], seen: Bool[Tensor, "#B 1 r M"]
) -> Float[Tensor, "B H r M"]:
    """Softmax over the keys that are seen; zeros in a row that sees none."""
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).masked_fill(~seen, 0)
