"""What every mechanism shares: the sizes of its layer, its core, the projections around a core.

A *core* maps q, k, v ``[B, H, N, D]`` to an output. :class:`SelfAttention` puts projections around
it. Methods that make their queries and keys in a way of their own (Reformer, Longformer, TNN,
FLASH, Transformer-LS, PolaFormer) derive from :class:`TokenMixer` instead and have no core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.ops.common.arguments import (
    check_floating,
    check_mask,
    check_positive_int,
    check_qkv,
    hide,
    no_autocast,
)
from lln.protocols import AttentionCore, compute_dtype


@dataclass(frozen=True)
class Layer:
    """Where a mechanism stands: the sizes of the layer, and which of how many layers it is.

    ``max_length`` is None where no method needs it.
    """

    dim: int
    num_heads: int
    max_length: int | None = None
    layer_index: int = 0
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("dim", "num_heads", "num_layers"):
            check_positive_int(name, getattr(self, name))
        if self.max_length is not None:
            check_positive_int("max_length", self.max_length)
        if self.dim % self.num_heads:
            raise ValueError(f"dim={self.dim} is not a multiple of num_heads={self.num_heads}")
        if not 0 <= self.layer_index < self.num_layers:
            raise ValueError(
                f"layer_index={self.layer_index} is not a layer of num_layers={self.num_layers}; "
                "layers count from 0"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def longest(self) -> int:
        """``max_length``, for the methods that have weights or buffers of that size."""
        if self.max_length is None:
            raise TypeError(
                "max_length is missing: this mechanism has weights or buffers of that size; pass "
                "the number of tokens of the longest input to come"
            )
        return self.max_length

    def check_length(self, tokens: int) -> None:
        """Raise for inputs longer than the weights or buffers of some methods."""
        if tokens > self.longest:
            raise ValueError(
                f"the input has {tokens} tokens, more than max_length={self.max_length}; "
                "create the mechanism with a larger max_length"
            )

    def generator(self, seed: int) -> torch.Generator:
        """A source of random numbers that depend on seed and layer, never on the global state."""
        return torch.Generator().manual_seed(seed * 1_000_003 + self.layer_index)


def masked_softmax(scores: Float[Tensor, "... M"], seen: Tensor | None) -> Float[Tensor, "... M"]:
    """Softmax over the entries that are ``seen``; a row that sees nothing is zero."""
    if seen is None:
        return torch.softmax(scores, dim=-1)
    hidden = ~seen
    blind = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(blind, 0)
    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0)


def wide(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run a method in float32 or wider, outside autocast; the result has the dtype of its input.

    Sums over all keys and exponentials would leave the range of float16. A module with
    ``half_products`` leaves products to an autocast to bfloat16, whose range is that of float32.
    """

    @functools.wraps(method)
    def run(self, *tensors: Tensor | None) -> Tensor:
        first = tensors[0]
        assert first is not None
        if getattr(self, "half_products", False) and _to_bfloat16(first):
            return method(self, *tensors).to(first.dtype)
        floating = [x for x in tensors if x is not None and x.is_floating_point()]
        dtype = compute_dtype(*floating)
        cast = [x.to(dtype) if x is not None and x.is_floating_point() else x for x in tensors]
        with no_autocast(first):
            return method(self, *cast).to(first.dtype)

    return run


def _to_bfloat16(x: Tensor) -> bool:
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return False
    return torch.get_autocast_dtype(kind) == torch.bfloat16


class Core(nn.Module):
    """Attention on ``[B, H, N, D]``: a subclass writes :meth:`attend`, in float32 or wider.

    ``k`` and ``v`` arrive there with masked content already zero, so that NaN cannot spread;
    keeping masked keys out of denominators, means and buckets is the subclass's business.

    Fulfils :class:`lln.protocols.AttentionCore`; ``query_mask`` is ignored: what measures nothing
    does not need it, and what measures does so on the tokens of ``key_mask``.

    Attributes:
        crosses: Whether the keys may be those of another sequence. Otherwise ``key_mask`` is the
            mask of the queries, too.
    """

    causal = False
    crosses = True
    positions_matter = True

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.key_dim = layer.head_dim

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
    ) -> Float[Tensor, "B H N E"]:
        raise NotImplementedError

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B H M D"],
        v: Float[Tensor, "B H M E"],
        key_mask: Bool[Tensor, "B M"] | None = None,
        query_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B H N E"]:
        """Attend; ``key_mask`` True = may be attended. No visible key gives 0."""
        check_qkv(q, k, v)
        self._check_inputs(q, k)
        check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k)
        q = q if self.crosses else hide(q, key_mask)
        return self._attend(q, hide(k, key_mask), hide(v, key_mask), key_mask)

    @wide
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return self.attend(q, k, v, key_mask)

    def remember(
        self,
        k: Float[Tensor, "B H M D"],
        v: Float[Tensor, "B H M E"],
        key_mask: Bool[Tensor, "B M"] | None = None,
    ) -> Any:
        """Read a context for as many queries as come: without a better way, keep all of it."""
        return k, v, key_mask

    def recall(self, q: Float[Tensor, "B H N D"], kept: Any) -> Float[Tensor, "B H N E"]:
        """What queries find in a context that was read."""
        return self(q, *kept)

    def attention_matrix(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B H M D"],
        key_mask: Bool[Tensor, "B M"] | None = None,
        query_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B H N M"]:
        """P with P v = output for every v: the output for v = identity. O(N M), for looking at."""
        keys = k.shape[2]
        eye = torch.eye(keys, dtype=k.dtype, device=k.device)
        return self(q, k, eye.expand(*k.shape[:2], keys, keys), key_mask)

    def attend_in_model(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        v: Float[Tensor, "B Hkv M E"],
        key_mask: Bool[Tensor, "B M"] | None,
        query_mask: Bool[Tensor, "B N"] | None,
        *,
        is_causal: bool,
        dropout: float | None = None,
    ) -> Float[Tensor, "B H N E"]:
        """Attend with key heads repeated and the queries of all keys; nothing is dropped."""
        if is_causal != self.causal:
            raise ValueError(
                f"{type(self).__name__} was made for causal={not is_causal} but the model asks for "
                f"causal={is_causal} attention"
            )
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
        queries, keys = q.shape[2], k.shape[2]
        if is_causal and queries < keys:
            q = nn.functional.pad(q, (0, 0, keys - queries, 0))
        return self(q, k, v, key_mask)[:, :, -queries:]

    def _check_inputs(self, q: Tensor, k: Tensor) -> None:
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"q has {q.shape[1]} heads but k has {k.shape[1]}; the mechanisms of the zoo take "
                "equal numbers: repeat the key heads with repeat_interleave(dim=1)"
            )
        if not self.crosses and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"q has {q.shape[2]} tokens but k has {k.shape[2]}; {type(self).__name__} is "
                "defined for self-attention only"
            )


class TokenMixer(nn.Module):
    """A mechanism as a layer sees it: ``module(x, key_mask)`` with x ``[B, N, dim]``.

    A subclass writes :meth:`mix`. Masked tokens arrive there as zeros.

    Attributes:
        core: The attention on ``[B, H, N, D]`` inside, None where the method is not one.
    """

    core: Any  # an AttentionCore or None, which the subclass knows

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.core = None

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Float[Tensor, "B N dim"]:
        raise NotImplementedError

    def forward(
        self, x: Float[Tensor, "B N dim"], key_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B N dim"]:
        """Mix the tokens; ``key_mask`` True = a real token. Masked content changes nothing."""
        return self.mix(self._checked(x, key_mask), key_mask)

    def _checked(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        check_floating("x", x)
        if x.dim() != 3 or x.shape[2] != self.layer.dim:
            raise ValueError(
                f"x has shape {list(x.shape)}; pass [batch, tokens, dim] with dim={self.layer.dim}"
            )
        check_mask("key_mask", key_mask, x.shape[0], x.shape[1], x)
        return hide(x, key_mask)

    def split(self, x: Float[Tensor, "B N HD"]) -> Float[Tensor, "B H N D"]:
        return x.unflatten(-1, (self.layer.num_heads, -1)).transpose(1, 2)

    def extra_repr(self) -> str:
        layer = self.layer
        shown = f"dim={layer.dim}, num_heads={layer.num_heads}"
        return shown if layer.max_length is None else f"{shown}, max_length={layer.max_length}"


def identity(x: Float[Tensor, "B N dim"], heads: int) -> Float[Tensor, "B N HN"]:
    """Values which make an output its own weights: the unit vector of each token, in every head."""
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    return eye.repeat(1, heads).expand(x.shape[0], -1, -1)


def valid(x: Tensor, key_mask: Bool[Tensor, "B N"] | None) -> Bool[Tensor, "B N"]:
    """``key_mask``, or all True for x ``[B, N, dim]`` or ``[B, H, N, D]``."""
    if key_mask is not None:
        return key_mask
    return torch.ones(x.shape[0], x.shape[-2], dtype=torch.bool, device=x.device)


def merge(x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B N HD"]:
    """Concatenate the heads."""
    return x.transpose(1, 2).flatten(2)


class SelfAttention(TokenMixer):
    """Projections around a core: out = W_o · core(W_q x, W_k x, W_v x).

    Masked tokens count neither as keys nor in what a core measures.
    """

    def __init__(self, layer: Layer, core: AttentionCore, *, bias: bool = True) -> None:
        super().__init__(layer)
        width = layer.num_heads * core.key_dim
        self.query = nn.Linear(layer.dim, width, bias=bias)
        self.key = nn.Linear(layer.dim, width, bias=bias)
        self.value = nn.Linear(layer.dim, layer.dim, bias=bias)
        self.out = nn.Linear(layer.dim, layer.dim, bias=bias)
        self.core = core

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of every token."""
        return self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return self.out(merge(self.core(*self.heads(x), key_mask, key_mask)))

    def attention_matrix(
        self, x: Float[Tensor, "B N dim"], key_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B H N N"]:
        """The weights with which every token takes the values of the others. O(N²)."""
        q, k, _ = self.heads(self._checked(x, key_mask))
        return self.core.attention_matrix(q, k, key_mask, key_mask)
