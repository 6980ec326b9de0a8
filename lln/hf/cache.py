"""Decoding with a constant-size state: what ``generate`` keeps of the past, per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from lln.functional import prefill
from lln.hf import next_token
from lln.hf.cores import attend, calibration_of
from lln.hf.open_block import OpenBlock
from lln.hf.open_window import OpenWindow
from lln.hf.rotation import Rotation
from lln.hf.softmax import KeptKeys, put_softmax, softmax_heads_of
from lln.nn import LLNAttention
from lln.ops.common.arguments import hide
from lln.ops.linear.state import State, summarize
from lln.ops.taps.convolution import convolve_next, last_values
from lln.ops.window.eager_near_far import combine
from lln.protocols import compute_dtype


class StateLayer(CacheLayerMixin):
    """A cache layer of O(D E) per head, whatever the length.

    LLN+Diag adds one block of K and V, with what overlaps it and sinks, and a convolution of K taps
    the last K − 1 values. Under one normaliser the state holds the keys that left the window. Heads
    that keep softmax need all their keys and values, which grow beside it.

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
        self.state: State | None = None
        super().__init__()
        self.tokens = 0
        self.block: OpenBlock | None = None
        self.window: OpenWindow | None = None
        self.last: Tensor | None = None
        self.kept: KeptKeys | None = None
        self._unread = False
        self.padded = False  # whether a mask was ever given
        self.counts: list[int] | None = None  # of the window, where the host knows them

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate nothing: there is nothing to hold before the first tokens."""
        self.is_initialized = True

    @property
    def keys(self) -> Tensor | None:
        """All keys as long as no attention has read the state."""
        if self.state is not None:
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
        if self.state is not None and self._unread:
            raise RuntimeError(
                "the last tokens given to this cache were not read by the attention that decodes "
                "from its state: that call was interrupted, or the attention was changed since. "
                "Start again with a new cache"
            )
        self.tokens += key_states.shape[2]
        if self.state is None:
            key_states, value_states = self._keep(key_states, value_states)
        self._unread = True
        return mark(key_states, self), value_states

    def _keep(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, as a plain cache has them."""
        if self.keys is not None and self.values is not None:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        self._keys, self.values = k, v
        return k, v

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
        self.padded = self.padded or key_mask is not None
        whole, key_mask = key_mask, None if key_mask is None else key_mask[:, -k.shape[2] :]
        moved = False
        heads = softmax_heads_of(core)
        kept = KeptKeys.of(heads, k, v, core.num_heads) if heads else None
        if self.state is None:
            options = {"key_mask": key_mask, "is_causal": True, "rotation": rotation}
            out = attend(core, q, k, v, **options)
        else:
            kept = KeptKeys.join(self.kept, kept)
            step = self._next(core, q, k, v, key_mask, rotation)
            moved = step is not None and step[1]
            out = self._continue(core, q, k, v, key_mask, rotation) if step is None else step[0]
            if kept is not None:
                group = core.num_heads // core.num_kv_heads
                options = {"group": group, "key_mask": whole, "is_causal": True}
                out = put_softmax(out, heads, q, kept.k, kept.v, **options)
        if not moved:
            self.counts = None
            self._remember(core, k, v, key_mask, rotation)
        self.kept = kept
        self._unread = False
        return out

    def _next(
        self,
        core: LLNAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        rotation: Rotation | None,
    ) -> tuple[Tensor, bool] | None:
        """The short way to answer one token, and whether it was read; None where there is none."""
        if k.shape[2] != 1 or not next_token.serves(core, self.window):
            return None
        assert self.window is not None and self.state is not None
        if self.counts is None:
            self.counts = next_token.counts_of(self.window, self.tokens - 1, padded=self.padded)
        if self.counts is None:
            return None
        mask = _mask(k, key_mask) if self.padded else None
        out, moved = next_token.attend_next(
            core, self.window, self.state, self.counts, q, k, v, mask, rotation
        )
        if moved:
            self.counts = [count + 1 for count in self.counts]
        return out, moved

    def _continue(
        self,
        core: LLNAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        rotation: Rotation | None,
    ) -> Tensor:
        wide = compute_dtype(q, k, v)
        own = _Step.of(core, q.to(wide), k.to(wide), v.to(wide), _mask(k, key_mask), rotation)
        if self.window is not None and core.level is not None:
            out = self._continue_jointly(core, own)
        else:
            out = self._continue_apart(core, own)
        if self.last is not None and core.conv_weight is not None:
            seen = hide(v, key_mask).to(wide)
            near = convolve_next(seen, core.conv_weight, self.last, impl=core.impl)
            out = out + core.for_queries(near)
        return out.to(q.dtype)

    def _continue_apart(self, core: LLNAttention, own: _Step) -> Tensor:
        """LLN, or its mean with the near keys, each normalised by itself."""
        assert self.state is not None
        out, _ = prefill(
            own.q_far,
            own.k_far,
            own.v,
            self.state,
            alpha=own.alpha,
            beta=own.beta,
            key_mask=own.key_mask,
            impl=core.impl,
        )
        if self.block is not None:
            local = self.block.attend(own.q, own.k, own.v, own.key_mask, scale=core.scale)
        elif self.window is not None and core.local is not None:
            (local, _), _ = self.window.attend(
                own.q, own.q_far, own.k, own.v, own.k_far, own.key_mask, core.local
            )
        else:
            return out
        weight = core.mix_weight(out.dtype)
        weight = 0.5 if weight is None else weight
        weight = torch.as_tensor(weight, dtype=out.dtype, device=out.device).expand(out.shape[1])
        return torch.lerp(local, out, weight[:, None, None])

    def _continue_jointly(self, core: LLNAttention, own: _Step) -> Tensor:
        """Near keys and far ones under one normaliser."""
        assert self.state is not None and self.window is not None and core.local is not None
        near, far = self.window.attend(
            own.q, own.q_far, own.k, own.v, own.k_far, own.key_mask, core.local
        )
        linear = far(self.state, own.alpha, own.beta)
        gamma = core.stored_level().to(own.alpha).expand(own.alpha.shape)
        return combine(near, linear, gamma)

    def _remember(
        self,
        core: LLNAttention,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        rotation: Rotation | None,
    ) -> None:
        self._keys = self.values = None
        own = _Step.of(core, None, k, v, _mask(k, key_mask), rotation)
        options = {"beta": own.beta, "impl": core.impl}
        local, gone = core.local, None
        if local is not None and (local.joint or local.overlap or local.sinks):
            window = self.window or OpenWindow.empty(own.k, v, own.k_far, local)
            self.window, gone = window.append(own.k, v, own.k_far, own.key_mask, local, **options)
        elif local is not None:
            block = self.block or OpenBlock.empty(k, v, local.block)
            self.block = block.append(own.k, v, own.key_mask)
        if gone is None or local is None or not local.joint:
            gone = summarize(own.k_far, v, key_mask=own.key_mask, **options)
        self.state = gone if self.state is None else self.state.merge(gone)
        if core.conv:
            nothing = v.new_zeros(*v.shape[:2], core.conv - 1, v.shape[3])
            past = nothing if self.last is None else self.last
            self.last = last_values(hide(v, key_mask), past)

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
        self.tokens, self.state, self.block, self.last = 0, None, None, None
        self.window = self.kept = self.counts = None
        self.padded = False
        self._keys = self.values = None
        self._unread = False

    def __copy__(self) -> StateLayer:
        """A layer that goes on alone: windows are written in place."""
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
        if self.state is not None:
            parts = (getattr(self.state, field.name) for field in dataclasses.fields(self.state))
            self.state = State(*(change(part) for part in parts))
        if self.block is not None:
            self.block = self.block.map(change)
        if self.window is not None:
            self.window, self.counts = self.window.map(change), None
        if self.last is not None:
            self.last = change(self.last)
        if self.kept is not None:
            self.kept = KeptKeys(self.kept.heads, change(self.kept.k), change(self.kept.v))
        if self._keys is not None and self.values is not None:
            self._keys, self.values = change(self._keys), change(self.values)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The new tokens as a core sees them: centred, mapped, with its constants."""

    q: Tensor
    q_far: Tensor
    k: Tensor
    v: Tensor
    k_far: Tensor
    key_mask: Tensor
    alpha: Tensor  # [B, H]
    beta: Tensor  # [B, Hkv]

    @staticmethod
    def of(
        core: LLNAttention,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        rotation: Rotation | None,
    ) -> _Step:
        """``q`` is None where only keys are remembered."""
        alpha, beta = (x.to(compute_dtype(k)).expand(len(k), -1) for x in core.scales())
        queries = k.new_zeros((len(k), core.num_heads, 0, k.shape[3])) if q is None else q
        k, q_far, k_far = core.decoding_inputs(queries, k, beta, rotation)
        return _Step(queries, q_far, k, v, k_far, mask, alpha, core.far_beta(beta))


def mark(keys: Tensor, layer: CacheLayerMixin) -> Tensor:
    """The same keys, which tell the attention that gets them where they come from."""
    announced = keys.view(keys.shape)  # what is kept by the layer carries no mark
    announced._lln_layer = layer  # pyright: ignore[reportAttributeAccessIssue]
    return announced


def state_layer(keys: Tensor) -> Any:
    """The cache layer that handed on these keys, if it may keep a state of those before."""
    return getattr(keys, "_lln_layer", None)


def _mask(k: Tensor, key_mask: Tensor | None) -> Tensor:
    if key_mask is not None:
        return key_mask
    return torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)


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
