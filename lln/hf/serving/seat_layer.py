"""One layer's memory of a fixed number of streams, each at its own position, moved in place.

Every tensor is allocated once, its first axis the seats. A step has the same shapes and addresses
whatever the streams are at, and asks nothing of the host: a CUDA graph can hold it.

Near keys lie in a ring of W = C + overlap places, the token at position p in place p mod W. A block
of them leaves the window at once, when the next block begins; so that no step has more to do than
another, each folds the key at p − overlap, which will leave with this block, into a pending state,
and the first step of a block merges it into the far one.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lln.hf.cache import mark
from lln.hf.next_token import softmax_over
from lln.hf.rotation import Rotation
from lln.hf.softmax import kept_keys, put_softmax, softmax_heads_of
from lln.nn import LLNAttention
from lln.ops import triton as kernels
from lln.ops.linear.eager_state import merge
from lln.ops.taps.convolution import convolve_next, last_values
from lln.ops.window.eager_near_far import combine
from lln.ops.window.local import Local
from lln.protocols import compute_dtype


class SeatLayer(CacheLayerMixin):
    """A cache layer for one token of every seat at a time.

    Args:
        core: The attention of the layer; None where it keeps softmax.
        tensors: By name, as :func:`lln.hf.serving.seating.tensors_of` makes them, one row a seat.
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
            self.beta, self.constants = _constants(core, tensors["mean"])

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
            key_states = self._write("kept_k", key_states, self.position)
            value_states = self._write("kept_v", value_states, self.position)
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
        wide = compute_dtype(q, k, v)
        queries, values = q.to(wide), v.to(wide)
        keys, q_far, k_far = core.decoding_inputs(queries, k.to(wide), self.beta, rotation)
        if self._has_kernel(core, q_far, k_far, values):
            out = self._by_kernel(core, queries, keys, values, q_far, k_far)
        else:
            out = self._step(core.local, queries, keys, values, q_far, k_far)
        if core.conv_weight is not None:
            last = self.tensors["last"]
            out = out + core.for_queries(convolve_next(values, core.conv_weight, last))
            last.copy_(last_values(v, last))
        heads = softmax_heads_of(core)
        if heads:
            group = core.num_heads // core.num_kv_heads
            seen = [
                self._write(name, kept_keys(x, heads, core.num_heads), self.position)
                for name, x in (("kept_k", k), ("kept_v", v))
            ]
            options = {"group": group, "key_mask": self._so_far(), "is_causal": True}
            out = put_softmax(out, heads, q, *seen, **options)
        return out.to(q.dtype)

    def _has_kernel(self, core: LLNAttention, q_far: Tensor, k_far: Tensor, values: Tensor) -> bool:
        """Whether near and far keys are under one normaliser, and a kernel takes them."""
        if core.local is None or not core.local.joint or core.impl not in (None, "triton"):
            return False
        if torch.compiler.is_compiling():  # it writes in place, unknown to a tracer
            return False
        return kernels.refuses_next_token(q_far, values, k_far, self.tensors) is None

    def _by_kernel(
        self,
        core: LLNAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_far: Tensor,
        k_far: Tensor,
    ) -> Float[Tensor, "B H 1 E"]:
        assert core.local is not None
        memory = self.position, self.tensors
        return kernels.next_token(
            q, k, v, q_far, k_far, *memory, local=core.local, **self.constants
        )

    def _step(
        self, local: Local | None, q: Tensor, k: Tensor, v: Tensor, q_far: Tensor, k_far: Tensor
    ) -> Float[Tensor, "B H 1 E"]:
        """The same in PyTorch's operations, and for branches that are averaged."""
        near = None if local is None else self._near(q, k, v, local)
        if local is not None and local.joint:
            linear = self._read(q_far, self._leave(k_far, v, local))
        else:
            self._fold("", k_far, v, None)
            linear = self._read(q_far, None)
        return self._together(near, linear)

    def _together(
        self, near: tuple[Tensor, Tensor] | None, linear: tuple[Tensor, Tensor]
    ) -> Tensor:
        if near is None:
            return linear[0]
        if "gamma" in self.constants:
            gamma = self.constants["gamma"]
            return combine(near, linear, gamma.expand(linear[1].shape[0], -1))
        return torch.lerp(near[0], linear[0], self.constants["mix"][:, None, None])

    def _near(
        self, q: Tensor, k: Tensor, v: Tensor, local: Local
    ) -> tuple[Float[Tensor, "B H 1 E"], Float[Tensor, "B H 1"]]:
        """Softmax over the window and the sinks before it: output and logarithm of its sum."""
        width, position = local.block + local.overlap, self.position[:, None]
        place = self.position % width
        keys, values = self._write("near_k", k, place), self._write("near_v", v, place)
        first = position - position % local.block - local.overlap  # of the window
        places = torch.arange(width, device=k.device)
        seen = position - (position - places) % width >= first.clamp(min=0)
        parts = [(keys, values, seen)]
        if local.sinks:
            own = torch.arange(local.sinks, device=k.device)
            new = (own == position)[:, None, :, None]
            for name, x in (("sink_k", k), ("sink_v", v)):
                sink = self.tensors[name]
                sink.copy_(torch.where(new, x.to(sink.dtype), sink))
            parts.append((self.tensors["sink_k"], self.tensors["sink_v"], own < first))
        out, log = softmax_over(q, parts, local.scale)
        return out.flatten(1, 2)[:, :, None], log.flatten(1, 2)[..., None]

    def _leave(self, k_far: Tensor, v: Tensor, local: Local) -> Bool[Tensor, " B"]:
        """Let keys leave the window; returns which seats have far ones at all."""
        parts = [self.tensors[name] for name in ("log_mass", "mean")]
        waiting = [self.tensors[name] for name in ("pending_log_mass", "pending_mean")]
        begins = self.position % local.block == 0
        for own, merged in zip(parts, merge(*parts, *waiting), strict=True):
            own.copy_(torch.where(_like(begins, own), merged, own))
        for own, nothing in zip(waiting, (-torch.inf, 0.0), strict=True):
            own.masked_fill_(_like(begins, own), nothing)
        leaving = self.position - local.overlap
        if local.overlap:
            width = local.block + local.overlap
            if "near_features" in self.tensors:
                self._write("near_features", k_far, self.position % width)
            name = "near_features" if "near_features" in self.tensors else "near_k"
            place = leaving % width
            k_far, v = (_one(self.tensors[x], place).to(v.dtype) for x in (name, "near_v"))
        self._fold("pending_", k_far, v, leaving >= local.sinks)
        first = self.position - self.position % local.block - local.overlap
        return first > local.sinks

    def _fold(self, prefix: str, k: Tensor, v: Tensor, wanted: Bool[Tensor, " B"] | None) -> None:
        """Add one key and value of every seat to a state, or of those that are wanted."""
        log_mass, mean = (self.tensors[prefix + name] for name in ("log_mass", "mean"))
        weight = (self.constants["beta"][:, None] * k[:, :, 0]).to(mean.dtype)
        after = torch.logaddexp(log_mass, weight)
        share = torch.exp(weight - after)[..., None]
        if wanted is not None:
            after = torch.where(_like(wanted, after), after, log_mass)
            share = share.masked_fill(~_like(wanted, share), 0)
        mean.lerp_(v.to(mean.dtype).expand_as(mean), share.expand_as(mean))
        log_mass.copy_(after)

    def _read(
        self, q: Tensor, there: Bool[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B H 1 E"], Float[Tensor, "B H 1"]]:
        """What the queries get from the state, and the logarithm of its sum; −inf for no key."""
        log_mass, mean = self.tensors["log_mass"], self.tensors["mean"]
        rows = (self.constants["alpha"][:, None, None] * q).to(mean.dtype)
        rows = rows.unflatten(1, (mean.shape[1], -1)).flatten(3)  # [B, Hkv, G, S]
        if there is not None:
            log_mass = log_mass.masked_fill(~_like(there, log_mass), 0)
        scores = rows + log_mass[:, :, None]
        log = torch.logsumexp(scores, -1)
        out = torch.exp(scores - log[..., None]) @ mean
        if there is not None:
            log = log.masked_fill(~_like(there, log), -torch.inf)
        return out.flatten(1, 2)[:, :, None], log.flatten(1, 2)[..., None]

    def _write(self, name: str, new: Tensor, place: Int[Tensor, " B"]) -> Tensor:
        """The tensor, after one token of every seat was written at its place."""
        buffer = self.tensors[name]
        return buffer.scatter_(2, _index(place, new), new.to(buffer.dtype))

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
            other.beta, other.constants = self.beta, self.constants
        return other

    def copy_(self, seat: int, stream: dict[str, Tensor]) -> None:
        """Put the memory of one stream, tensors of one row, into a seat."""
        for name, own in self.tensors.items():
            own[seat].copy_(stream[name][0])


def cache_of(layers: list[SeatLayer]) -> Cache:
    """The cache of a model with these layers."""
    return Cache(layers=list(layers))


def _constants(core: LLNAttention, mean: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What evaluation takes from a core's statistics, read once: β for its features, and theirs."""
    with torch.no_grad():
        alpha, beta = (x.to(mean.dtype).clone() for x in core.scales())
        found: dict[str, Any] = {"alpha": alpha, "beta": core.far_beta(beta)}
        if core.level is not None:
            found["gamma"] = core.stored_level().to(mean.dtype).clone()
        else:
            weight = core.mix_weight(mean.dtype)
            found["mix"] = mean.new_full((core.num_heads,), 0.5) if weight is None else weight
    return beta, found


def _like(flags: Bool[Tensor, " B"], x: Tensor) -> Tensor:
    """Flags per seat, with as many axes as x."""
    return flags.view(-1, *(1,) * (x.dim() - 1))


def _index(place: Int[Tensor, " B"], like: Tensor) -> Tensor:
    return place[:, None, None, None].expand(-1, like.shape[1], 1, like.shape[3])


def _one(x: Tensor, place: Int[Tensor, " B"]) -> Float[Tensor, "B Hkv 1 D"]:
    """The token at a place of every seat."""
    return x.gather(2, _index(place, x))
