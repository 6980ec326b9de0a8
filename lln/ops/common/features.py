"""The scaled features of keys and queries, chunk by chunk, and the guards that keep exp() finite.

Masked keys become −inf features, so that removing a key and masking it are the same arithmetic,
and whatever the masked slots contained is gone. On a CPU fresh memory costs more than arithmetic,
so the loops over chunks write into a few buffers that stay in cache (:class:`Scratch`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements of a chunk of features: on a CPU those of one head, whatever other heads are computed
# beside it; on a GPU those of all, as many as make a launch cheap beside its work.
CHUNK_ELEMENTS = 1 << 17
CHUNK_ELEMENTS_OF_A_GPU = 1 << 25


def chunks(x: Tensor, multiple: int = 128) -> Iterator[slice]:
    """Consecutive slices over the tokens of ``x [B, H, N, D]``."""
    length = x.shape[2]
    size = fitting(x, x.shape[3] * multiple, CHUNK_ELEMENTS, CHUNK_ELEMENTS_OF_A_GPU) * multiple
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def fitting(x: Tensor, per_step: int, on_cpu: int, on_gpu: int) -> int:
    """How many steps of a loop over tokens are taken at once, at least one.

    Args:
        x: ``[B, H, ...]``, which says where and for how many heads.
        per_step: Elements of one step of one head.
        on_cpu: As many elements of one head may be in hand on a CPU, where the cut of heads
            (:mod:`lln.ops.common.threads`) then changes no number.
        on_gpu: As many of all heads elsewhere.
    """
    if x.device.type == "cpu":
        return max(1, on_cpu // max(1, per_step))
    return max(1, on_gpu // max(1, x.shape[0] * x.shape[1] * per_step))


class Scratch:
    """Named buffers that are made once and reused for every chunk of a loop."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._flat: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A contiguous uninitialised tensor; it is overwritten by the next request for ``name``."""
        size = 1
        for extent in shape:
            size *= extent
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = self._like.new_empty(size, dtype=self._dtype)
        return flat[:size].view(shape)


def key_features(k: Tensor, beta: Tensor, mask: Tensor | None, scratch: Scratch) -> Tensor:
    """β k_jl; −inf where ``mask`` is False. ``[B, Hkv, M, D]``."""
    features = torch.mul(k, beta[..., None, None], out=scratch("features", *k.shape))
    if mask is not None:
        features.masked_fill_(~mask[:, None, :, None], -torch.inf)
    return features


def clean_values(v: Tensor, mask: Tensor | None, scratch: Scratch) -> Tensor:
    """Values in the compute dtype, zero where masked: 0 · NaN would still be NaN."""
    buffer = scratch("values", *v.shape).copy_(v)
    return buffer if mask is None else buffer.masked_fill_(~mask[:, None, :, None], 0)


def key_gradients(
    d_features: Tensor, features: Tensor, k: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of k and β from the gradient of the features; ``d_features`` is consumed."""
    products = d_features * k
    products.masked_fill_(features == -torch.inf, 0)
    return d_features.mul_(beta[..., None, None]), products.sum((-1, -2))


def times_transposed(x: Tensor, y: Tensor) -> Tensor:
    """x yᵀ over stacks of matrices, y laid out anew: a view of it costs torch much more on ARM."""
    turned = y.transpose(-1, -2)
    return x @ (turned.contiguous() if y.device.type == "cpu" else turned)


def finite_or_zero(x: Tensor) -> Tensor:
    """Put 0 for −inf, the maximum over nothing, where it is a shift inside exp()."""
    return x.masked_fill(x == -torch.inf, 0)
