"""Attention on DTensors: each process attends with its shards of batch, heads and tokens.

Samples and heads do not see each other, so nothing is sent for them. Over tokens the states of the
slices are merged, see :func:`lln.distributed.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lln.distributed import sliced
from lln.distributed.layout import BATCH, HEADS, MASK, QKV, TOKENS, Layout
from lln.ops.window.near import Near

#: Axes of q that the axes of an argument are: a tensor ``[H]`` has one, ``[B, H]`` two.
SCALE = {0: (), 1: (HEADS,), 2: (BATCH, HEADS)}


def attention(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> DTensor:
    """Attend with DTensors q, k and v.

    Args:
        attend: :func:`lln.attention`, for the shards.
        options: As there; tensors may be DTensors, or whole and plain.
    """
    layout = Layout.of(q, k, v)
    shape = (*q.shape[:3], v.shape[3])
    for name, x in list(options.items()):
        if isinstance(x, Tensor):
            options[name] = layout.local(x, _axes(name, x))
        elif name == "features" and x is not None:
            options[name] = tuple(layout.local(each, QKV) for each in x)
    own = tuple(layout.local(x, QKV) for x in (q, k, v))
    if 0 in own[0].shape[:2]:  # more processes than samples or heads
        return layout.whole(_nothing(*own), shape)
    dimension = layout.over_tokens
    if dimension is None:
        return layout.whole(attend(*own, **options), shape)
    _check_blocks(layout, q.shape[TOKENS], Near.read(options.get("near")))
    out = sliced.attention(*own, group=layout.mesh.get_group(dimension), **options)
    return layout.whole(out, shape)


def _axes(name: str, x: Tensor) -> Sequence[int]:
    if name in ("key_mask", "query_mask"):
        return MASK
    if x.dim() not in SCALE:
        raise ValueError(
            f"{name} has shape {list(x.shape)}; pass a number, [heads] or [batch, heads]"
        )
    return SCALE[x.dim()]


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of no sample or head; it hangs on q, k and v, so that all take part backward."""
    return q.sum(-1, keepdim=True) * (k.sum() + v.sum()) + v.new_zeros(v.shape[3])


def _check_blocks(layout: Layout, tokens: int, near: Near | None) -> None:
    """Refuse on all processes what one of them would refuse while the others wait for it."""
    if near is None:
        return
    for length in layout.lengths(tokens):
        try:
            near.check_slice(length)
        except ValueError as error:
            raise ValueError(
                f"{tokens} tokens are split into {layout.lengths(tokens)} with near={near}: {error}"
            ) from None
