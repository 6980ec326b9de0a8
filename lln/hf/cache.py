"""Decoding with a constant-size state: what ``generate`` keeps of the past, per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.generation.configuration_utils import GenerationMode

from lln.hf.cores import attend, calibration_of
from lln.hf.decode import chunk, step
from lln.hf.decode.inputs import Constants, Tokens
from lln.hf.decode.memory import Memory
from lln.hf.rotation import Rotation
from lln.hf.softmax import kept_keys, put_softmax, softmax_heads_of
from lln.nn import LLNAttention
from lln.ops.common.arguments import may_look_at
from lln.protocols import compute_dtype

PREPARE = "_prepare_cache_for_generation"  # what transformers calls to make a cache


class StateLayer(CacheLayerMixin):
    """A cache layer of O(D E) per head, whatever the length.

    What it keeps is a :class:`~lln.hf.decode.memory.Memory`: a state, near keys, the last
    values before a convolution. Heads that keep softmax need all their keys and values, which grow
    beside it.

    transformers updates a cache before it attends, and only the attention knows the queries. So
    ``update`` marks the keys it hands on, and the attention call that gets them reads the state and
    moves it. Nothing here belongs to a model: copies, pickles and choices of samples go on alone.

    Until a first attention call has read it the layer keeps all keys. Where none ever does (a
    softmax layer of another decoder with the same number, a model that caches something else than
    its keys) it stays the plain cache.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        self.memory: Memory | None = None
        super().__init__()
        self.tokens = 0
        self.heads: tuple[int, ...] = ()  # that keep softmax
        self._unread = False

    @property
    def state(self) -> object:
        """Not None where the keys are gone."""
        return self.memory

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate nothing: there is nothing to hold before the first tokens."""
        self.is_initialized = True

    @property
    def keys(self) -> Tensor | None:
        """All keys as long as no attention has read the state."""
        if self.memory is not None:
            raise AttributeError(
                "this cache holds a state, which has no keys; copy it with copy.deepcopy(cache), "
                "or generate with past_key_values=DynamicCache(config=model.config), which keeps "
                "all keys"
            )
        return self._keys

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._keys = keys

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Announce new tokens; the attention call that follows reads them into the state."""
        self.lazy_initialization(key_states, value_states)
        if self.memory is not None and self._unread:
            raise RuntimeError(
                "the last tokens given to this cache were not read by the attention that decodes "
                "from its state: that call was interrupted, or the attention was changed since. "
                "Start again with a new cache"
            )
        self.tokens += key_states.shape[2]
        if self.memory is None:
            key_states, value_states = self._keep(key_states, value_states)
        self._unread = True
        return mark(key_states, self), value_states

    def _keep(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, as a plain cache has them."""
        if self.keys is not None and self.values is not None:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        self._keys, self.values = k, v
        return k, v

    def visible(self) -> None:
        """What a layer with softmax may see of these keys: the mask of the call says it."""

    def attend(
        self,
        core: LLNAttention,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv N D"],
        v: Float[Tensor, "B Hkv N E"],
        key_mask: Tensor | None,
        rotation: Rotation | None = None,
    ) -> Float[Tensor, "B H N E"]:
        """Causal attention of the new tokens to themselves and to all before; moves the state.

        Args:
            q: Queries ``[B, H, N, D]``, any floating dtype.
            k: Keys ``[B, Hkv, N, D]``.
            v: Values ``[B, Hkv, N, E]``.
        """
        if not self._unread:
            calibration = calibration_of(core)
            assert calibration is not None
            raise ValueError(
                f"{calibration.place.name} attends to keys of another layer, whose state has read "
                "them already; generate with past_key_values=DynamicCache(config=model.config), "
                "which keeps all keys"
            )
        new_mask = None if key_mask is None else key_mask[:, -k.shape[2] :]
        heads = softmax_heads_of(core)
        if self.memory is None:
            options = {"key_mask": new_mask, "is_causal": True, "rotation": rotation}
            out = attend(core, q, k, v, **options)
            self._begin(core, k, v, new_mask, rotation)
            self._keep_heads(heads, k, v, core.num_heads)
        else:
            out = self._continue(core, q, k, v, new_mask, rotation).to(q.dtype)
            self._keep_heads(heads, k, v, core.num_heads)
            if heads:
                seen = (self.memory.tensors[name] for name in ("kept_k", "kept_v"))
                group = core.num_heads // core.num_kv_heads
                options = {"group": group, "key_mask": key_mask, "is_causal": True}
                out = put_softmax(out, heads, q, *seen, **options)
        self._unread = False
        return out

    def _begin(
        self,
        core: LLNAttention,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        rotation: Rotation | None,
    ) -> None:
        """Remember the first tokens."""
        constants = Constants.of(core, compute_dtype(k))
        none = k.new_zeros((len(k), core.num_heads, 0, k.shape[3]))
        new = Tokens.of(core, none, k, v, constants, rotation)
        empty = Memory.empty(core, new.k, v, new.k_far)
        self.memory = chunk.append(core, empty, new, constants, key_mask)
        self.heads = softmax_heads_of(core)
        self._keys = self.values = None

    def _continue(
        self,
        core: LLNAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        rotation: Rotation | None,
    ) -> Tensor:
        """Read new tokens: one in place where that is possible, any number otherwise."""
        assert self.memory is not None
        wide = compute_dtype(q, k, v)
        constants = Constants.of(core, wide)
        new = Tokens.of(core, q.to(wide), k.to(wide), v.to(wide), constants, rotation)
        if key_mask is None and self.memory.masked:
            key_mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
        if k.shape[2] > 1 or torch.is_grad_enabled():
            out, self.memory = chunk.attend(core, self.memory, new, constants, key_mask)
            return out
        memory = self.memory.writable()
        memory = memory if key_mask is None else memory.with_mask(core.near)
        if not may_look_at(k):  # kernels fold, and where blocks begin only the device knows
            memory = chunk.with_pending(core, memory, constants)
        count = self.tokens - 1 if key_mask is None else None
        out = step.attend_(core, memory, new, constants, key_mask=key_mask, count=count)
        memory.advance_(key_mask)
        self.memory = memory
        return out

    def _keep_heads(self, heads: tuple[int, ...], k: Tensor, v: Tensor, num_heads: int) -> None:
        """Add the keys and values that heads with softmax see."""
        assert self.memory is not None
        if heads != self.heads:
            raise ValueError(
                f"heads {list(heads)} keep softmax, but this cache was begun with "
                f"{list(self.heads)}; start with a new cache"
            )
        for name, x in (("kept_k", k), ("kept_v", v)) if heads else ():
            new = kept_keys(x, heads, num_heads)
            self.memory.tensors[name] = torch.cat([self.memory.tensors[name], new], 2)

    def get_seq_length(self) -> int:
        """Tokens read so far."""
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers every token: softmax layers of the same model need it."""
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.17

    def reset(self) -> None:
        """Go back to the start of a stream."""
        self.tokens, self.memory, self.heads = 0, None, ()
        self._keys = self.values = None
        self._unread = False

    def __copy__(self) -> StateLayer:
        """A layer that goes on alone: memory is written in place."""
        other = type(self)()
        vars(other).update(vars(self))
        other._map(torch.clone)
        return other

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the chosen beams."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these samples."""
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sample this many times."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise: a sum does not know its last terms."""
        if tokens_to_remove != 0:
            raise ValueError(
                f"a state cannot forget its last {abs(tokens_to_remove)} tokens; generate with "
                "past_key_values=DynamicCache(config=model.config), which keeps all keys"
            )

    def offload(self) -> None:
        """Do nothing: the state is small and stays where it is."""

    def prefetch(self) -> None:
        """Do nothing: nothing was moved away."""

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.memory is not None:
            self.memory = self.memory.map(change)
        if self._keys is not None and self.values is not None:
            self._keys, self.values = change(self._keys), change(self.values)


def mark(keys: Tensor, layer: CacheLayerMixin) -> Tensor:
    """The same keys, which tell the attention that gets them where they come from."""
    announced = keys.view(keys.shape)  # what is kept by the layer carries no mark
    announced._lln_layer = layer  # pyright: ignore[reportAttributeAccessIssue]
    return announced


def state_layer(keys: Tensor) -> Any:
    """The cache layer that handed on these keys, if it may keep a state of those before."""
    return getattr(keys, "_lln_layer", None)


def use_states(cache: object, modules: list[nn.Module]) -> None:
    """Let the causal LLN layers of a fresh DynamicCache keep a state instead of all keys."""
    cache = getattr(cache, "self_attention_cache", cache)
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return
    shared = any(getattr(module, "is_kv_shared_layer", False) for module in modules)
    for module in modules:
        core: Any = module._modules.get("lln")
        index = getattr(module, "layer_idx", None)
        if calibration_of(core) is None or not core.causal or index is None:
            continue
        if shared and getattr(module, "store_full_length_kv", False):
            continue  # other layers attend to its keys, with scales of their own
        while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
            cache.layers.append(DynamicLayer())
        if index < len(cache.layers) and type(cache.layers[index]) is DynamicLayer:
            cache.layers[index] = StateLayer()


def prepare_cache(
    model: Any, generation_config: Any, model_kwargs: dict, generation_mode: Any, *args, **kwargs
) -> Any:
    """Prepare the model's own cache, with states in the layers that can decode from one.

    Assisted decoding takes tokens back, which a state cannot; it keeps all keys, and is right too.
    """
    given = model_kwargs.get("past_key_values") is not None
    prepare = getattr(type(model), PREPARE)
    result = prepare(model, generation_config, model_kwargs, generation_mode, *args, **kwargs)
    takes_back = generation_mode == GenerationMode.ASSISTED_GENERATION or getattr(
        generation_config, "is_assistant", False
    )
    if not given and not takes_back:
        use_states(model_kwargs.get("past_key_values"), list(model.modules()))
    return result
