"""What a layer remembers of the past while it decodes: tensors of one size, whatever the length.

Near keys lie in a ring of W = C + overlap places, the token at position p in place p mod W. A block
of them leaves the window at once, when the next block begins. Where the host does not know when
that is, no step may have more to do than another: each folds the key at p − overlap, which will
leave with this block, into a pending state, and the first step of a block merges it into the far
one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.hf.softmax import kept_keys, softmax_heads_of
from lln.nn import LLNAttention
from lln.ops.linear.state import State
from lln.ops.window.eager_near_far import NOWHERE
from lln.ops.window.near import Near
from lln.protocols import compute_dtype


@dataclass
class Memory:
    """The past of every sample of a layer, by name, one row a sample.

    ``log_mass`` and ``mean``: the state. ``near_k``, ``near_v``: the ring of near keys.
    ``near_features``: what LLN sees of them, where keys leave the window. ``pending_…``: the state
    of those that leave with the open block, where steps fold them. ``sink_k``, ``sink_v``.
    ``last``: values before a convolution. ``kept_k``, ``kept_v``: keys of heads with softmax. Where
    a mask was ever given: ``valid``, which places of the ring hold real keys of the open block's
    window, and ``sink_position``.

    Attributes:
        position: Of the token that comes next, counted from the first real one of its sample.
    """

    tensors: dict[str, Tensor]
    position: Int[Tensor, " B"]

    @staticmethod
    def empty(core: LLNAttention, k: Tensor, v: Tensor, k_far: Tensor) -> Memory:
        """Before the first token; sizes, dtypes and device are those of the tensors."""

        def room(x: Tensor, places: int) -> Tensor:
            return x.new_zeros((*x.shape[:2], places, x.shape[3]))

        batch, key_heads, _, slots = k_far.shape
        options = {"dtype": compute_dtype(k_far, v), "device": v.device}
        state = State.empty(batch, key_heads, slots, v.shape[3], **options)
        made = {"log_mass": state.log_mass, "mean": state.mean}
        field, heads = core.near, softmax_heads_of(core)
        if field is not None:
            width = field.ring
            made |= {"near_k": room(k, width), "near_v": room(v, width)}
            if field.joint and core.has_features:
                made["near_features"] = room(k_far, width)
            if field.sinks:
                made |= {"sink_k": room(k, field.sinks), "sink_v": room(v, field.sinks)}
        if core.conv:
            made["last"] = room(v, core.conv - 1)
        if heads:
            nothing = {"kept_k": k[:, :, :0], "kept_v": v[:, :, :0]}
            made |= {name: kept_keys(x, heads, core.num_heads) for name, x in nothing.items()}
        return Memory(made, torch.zeros(len(k), dtype=torch.long, device=k.device))

    @property
    def state(self) -> State:
        """Of the keys that LLN sees now."""
        return State(self.tensors["log_mass"], self.tensors["mean"])

    @property
    def masked(self) -> bool:
        """Whether a mask was ever given."""
        return "valid" in self.tensors

    def map(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """The same change to all tensors, e.g. a choice of samples."""
        changed = {name: change(x) for name, x in self.tensors.items()}
        return Memory(changed, change(self.position))

    def with_mask(self, field: Near | None) -> Memory:
        """The same memory, which also knows what is valid; all was, so far."""
        if self.masked or field is None:
            return self
        added = {"valid": self.near(field)}
        if "sink_k" in self.tensors:
            own = torch.arange(self.tensors["sink_k"].shape[2], device=self.position.device)
            added["sink_position"] = own.where(own < self.position[:, None], NOWHERE)
        return Memory({**self.tensors, **added}, self.position)

    def writable(self) -> Memory:
        """The same memory, or a copy of it where in-place changes would be refused or seen."""
        mean = self.tensors["mean"]
        foreign = mean.is_inference() and not torch.is_inference_mode_enabled()
        if foreign or mean.requires_grad:
            return self.map(lambda x: x.detach().clone())
        return self

    def advance_(self, key_mask: Bool[Tensor, "B 1"] | None) -> None:
        """Move on by one token; padding before the first real one does not count."""
        self.position.add_(1 if key_mask is None else key_mask[:, 0] | (self.position > 0))

    def first(self, field: Near) -> Int[Tensor, " B"]:
        """Where the window of the open block begins; negative if before the first token."""
        return field.first(self.position)

    def ring(self) -> Int[Tensor, "B W"]:
        """The position of the last token that each place of the ring may hold; negative: none."""
        width, last = self.tensors["near_k"].shape[2], self.position[:, None] - 1
        return last - (last - torch.arange(width, device=last.device)) % width

    def near(self, field: Near) -> Bool[Tensor, "B W"]:
        """Which places of the ring hold real keys of the open block's window."""
        if self.masked:
            return self.tensors["valid"]
        return self.ring() >= self.first(field).clamp(min=0)[:, None]

    def far_keys(self) -> tuple[Float[Tensor, "B Hkv W S"], Float[Tensor, "B Hkv W E"]]:
        """What LLN sees of the keys in the ring, and their values."""
        features = self.tensors.get("near_features", self.tensors["near_k"])
        return features, self.tensors["near_v"]

    def sink_positions(self) -> Int[Tensor, "#B n"]:
        """Where the sinks stand, or will; NOWHERE if a mask decides."""
        if "sink_position" in self.tensors:
            return self.tensors["sink_position"]
        return torch.arange(self.tensors["sink_k"].shape[2], device=self.position.device)[None]

    def is_sink(self, position: Int[Tensor, "B n"]) -> Bool[Tensor, "B n"]:
        """Whether sinks stand at these positions."""
        if "sink_k" not in self.tensors:
            return torch.zeros_like(position, dtype=torch.bool)
        if not self.masked:
            return position < self.tensors["sink_k"].shape[2]
        return (self.sink_positions()[:, :, None] == position[:, None]).any(1)


def empty_like(tensors: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Memory of nothing, for so many samples."""
    return {
        name: x.new_full((rows, *x.shape[1:]), -torch.inf if name.endswith("log_mass") else 0)
        for name, x in tensors.items()
    }
