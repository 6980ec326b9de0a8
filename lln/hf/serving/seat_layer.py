"""One layer's memory of a fixed number of streams, each at its own position, moved in place.

Every tensor is allocated once, its first axis the seats. A step has the same shapes and addresses
whatever the streams are at, and asks nothing of the host: a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lln.hf.cache import StateLayer, mark
from lln.hf.decode import chunk, step
from lln.hf.decode.inputs import Constants, Tokens
from lln.hf.decode.memory import Memory
from lln.hf.rotation import Rotation
from lln.hf.softmax import kept_keys, put_softmax, softmax_heads_of
from lln.nn import LLNAttention
from lln.protocols import compute_dtype


class SeatLayer(CacheLayerMixin):
    """A cache layer for one token of every seat at a time.

    Args:
        core: The attention of the layer; None where it keeps softmax.
        tensors: Those of a :class:`~lln.hf.decode.memory.Memory`, one row a seat; where keys of
            softmax are kept, with room for the longest stream.
        position: Position of the token that comes next, per seat; shared by all layers, and moved
            by whoever calls the model.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(
        self, core: LLNAttention | None, tensors: dict[str, Tensor], position: Int[Tensor, " B"]
    ) -> None:
        super().__init__()
        self.core, self.tensors, self.position = core, tensors, position
        self.is_initialized = True
        if core is not None:
            with torch.no_grad():
                self.constants = Constants.of(core, tensors["mean"].dtype)

    @property
    def state(self) -> object:
        """Not None where the keys are gone; what it is belongs to this layer."""
        return self.tensors.get("mean")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate nothing: all is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand on the new keys, of which the attention reads; all of them where it is softmax."""
        if key_states.shape[2] != 1:
            raise ValueError(
                f"got {key_states.shape[2]} tokens a seat; a step takes one. Give prompts to "
                "Engine.add"
            )
        if self.core is None:
            key_states = step.write_(self.tensors["kept_k"], key_states, self.position)
            value_states = step.write_(self.tensors["kept_v"], value_states, self.position)
        return mark(key_states, self), value_states

    def visible(self) -> Bool[Tensor, "B 1 1 L"]:
        """The keys that a layer with softmax may see."""
        return self._so_far()[:, None, None]

    def attend(
        self,
        core: LLNAttention,
        q: Float[Tensor, "B H 1 D"],
        k: Float[Tensor, "B Hkv 1 D"],
        v: Float[Tensor, "B Hkv 1 E"],
        key_mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Float[Tensor, "B H 1 E"]:
        """Causal attention of one token of every seat to all before; moves the tensors."""
        assert key_mask is None, "the tokens of seats are all real"
        wide, memory = compute_dtype(q, k, v), Memory(self.tensors, self.position)
        given = q.to(wide), k.to(wide), v.to(wide)
        new = Tokens.of(core, *given, self.constants, rotation)
        out = step.attend_(core, memory, new, self.constants)
        heads = softmax_heads_of(core)
        if heads:
            group = core.num_heads // core.num_kv_heads
            seen = [
                step.write_(self.tensors[name], kept_keys(x, heads, core.num_heads), self.position)
                for name, x in (("kept_k", k), ("kept_v", v))
            ]
            options = {"group": group, "key_mask": self._so_far(), "is_causal": True}
            out = put_softmax(out, heads, q, *seen, **options)
        return out.to(q.dtype)

    def _so_far(self) -> Bool[Tensor, "B L"]:
        length = self.tensors["kept_k"].shape[2]
        return torch.arange(length, device=self.position.device) <= self.position[:, None]

    def get_seq_length(self) -> int:
        """0: seats are at different positions, which the caller of the model gives."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask of a step says nothing: what a seat may see is known here."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No limit that transformers would have to know."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.17

    def among(self, tensors: dict[str, Tensor], position: Int[Tensor, " B"]) -> SeatLayer:
        """The same layer with other seats."""
        other = SeatLayer(None, tensors, position)
        other.core = self.core
        if self.core is not None:
            other.constants = self.constants
        return other

    def copy_(self, seat: int, stream: dict[str, Tensor]) -> None:
        """Put the memory of one stream, tensors of one row, into a seat."""
        for name, own in self.tensors.items():
            own[seat].copy_(stream[name][0])


def cache_of(layers: list[SeatLayer]) -> Cache:
    """The cache of a model with these layers."""
    return Cache(layers=list(layers))


def tensors_of(layer: Any, core: LLNAttention | None, length: int) -> dict[str, Tensor]:
    """The row of a seat from a cache layer that has read one prompt without padding.

    Args:
        layer: A :class:`StateLayer`, or any that keeps all keys.
        core: Of the layer; None where it keeps softmax.
        length: Places for the keys of layers and heads with softmax.
    """
    if core is None:
        found = {"kept_k": layer.keys, "kept_v": layer.values}
    else:
        assert isinstance(layer, StateLayer) and layer.memory is not None
        constants = Constants.of(core, layer.memory.tensors["mean"].dtype)
        found = chunk.with_pending(core, layer.memory, constants).tensors
    return {
        name: F.pad(x, (0, 0, 0, length - x.shape[2])) if name.startswith("kept_") else x
        for name, x in found.items()
    }
