"""What a cache keeps of a stream, and how many key heads with softmax fit into one of some size."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lln.hf import cores
from lln.hf.cache import StateLayer, use_states
from lln.hf.conversion.transfer import cores_of
from lln.hf.replace import attention_modules


@dataclass(frozen=True)
class CacheShare:
    """A cache of a size: ``share`` of the bytes that softmax keeps after ``context`` tokens.

    Example:
        >>> lln.hf.convert(model, batches, keep=lln.hf.CacheShare(1 / 7, context=8192))
    """

    share: float
    context: int

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} is not in (0, 1]; 1 / 7 is a seventh of softmax")
        if isinstance(self.context, bool) or not isinstance(self.context, int) or self.context < 1:
            raise ValueError(
                f"context={self.context!r} is not a positive number of tokens; give the length at "
                "which the cache shall be as small, such as 8192"
            )

    def heads(self, model: Any) -> int:
        """How many key heads of a converted model may keep softmax in such a cache.

        Each takes its keys and values of every token beside the memory of linear attention, which
        is measured: a cache that has read two tokens holds all of it.

        Raises:
            ValueError: Linear attention alone takes more.
        """
        fixed, own = linear_bytes(model), list[Any](cores_of(model).values())
        size = next(model.parameters()).element_size()
        sizes = {2 * core.head_dim * size * self.context for core in own}
        total = sum(core.num_kv_heads for core in own)
        each = max(sizes)
        softmax = total * each
        if fixed > self.share * softmax:
            raise ValueError(
                f"a cache of {self.share:.4g} of softmax's (share of CacheShare, --memory) is less "
                f"than linear attention alone keeps, {fixed / softmax:.4g} after {self.context} "
                "tokens; give a larger share, a longer context, or fewer near keys and slots"
            )
        return min(total, math.floor((self.share * softmax - fixed) / each))


def cache_share(model: Any, *, key_heads: int, kept: int, context: int) -> float:
    """The cache of a converted decoder after ``context`` tokens, as a share of softmax's.

    Args:
        key_heads: Those of the model, of which ``kept`` keep softmax.
    """
    token = 2 * _head_dim(model) * next(model.parameters()).element_size()  # of a key head
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.no_grad():
        begun = cache_bytes(filled_cache(model, ids, 1).layers)
    return (begun + kept * token * (context - 2)) / (key_heads * token * context)


def _head_dim(model: Any) -> int:
    path, layer = next(iter(attention_modules(model).items()))
    return cores.place_of(layer, path).head_dim


def linear_bytes(model: Any) -> int:
    """Bytes that a stream keeps whatever its length, in a model that keeps softmax nowhere yet."""
    layers: list[Any] = [None]
    if model.can_generate():
        ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        with torch.no_grad():
            layers = filled_cache(model, ids, 1).layers
    if not all(isinstance(layer, StateLayer) and layer.memory for layer in layers):
        raise ValueError(
            f"keep=CacheShare(...), but {type(model).__name__} has no cache that its attention "
            "makes smaller; give a number of key heads, or a decoder and an attention of LLN"
        )
    return cache_bytes(layers)


def filled_cache(model: Any, ids: Tensor, chunk: int) -> Any:
    """A cache as ``generate`` makes it, which has read these tokens, ``chunk`` at a time."""
    cache = DynamicCache(config=model.config)
    use_states(cache, list(model.modules()))
    for part in ids.split(chunk, 1):
        read(model, part, cache)
    return cache


def read(model: Any, ids: Tensor, cache: Any) -> None:
    """Let a model read tokens into a cache; the logits of the last alone where it can choose."""
    chooses = "logits_to_keep" in inspect.signature(model.forward).parameters
    model(ids, past_key_values=cache, use_cache=True, **({"logits_to_keep": 1} if chooses else {}))


def cache_bytes(layers: Iterable[Any]) -> int:
    """Bytes that the layers of a cache keep alive: the storages of all their tensors."""
    storages = (x.untyped_storage() for layer in layers for x in _tensors(vars(layer)))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(vars(value))
