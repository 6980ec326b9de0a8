"""The window of near keys that decoding stands in, and the state of the keys that left it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.hf.padding import leading, take
from lln.ops.linear.state import State, summarize
from lln.ops.window.eager_far import far_op
from lln.ops.window.eager_near import near_op
from lln.ops.window.eager_near_far import NOWHERE, read_with_normaliser
from lln.ops.window.local import Local


@dataclass(frozen=True)
class OpenWindow:
    """The last C + overlap positions of every sample, and its sinks.

    Samples stand at different places of their block, since blocks are counted from the first real
    token. The buffer begins where the window of the open block does, ``overlap`` positions before
    the block, and holds ``overlap + count % C`` of them.

    Attributes:
        valid: True = a key that may be attended.
        count: Positions since the first real token; 0 as long as there was none.
        sink_position: Counted from the first real token; NOWHERE if there is none yet.
    """

    k: Float[Tensor, "B Hkv W D"]
    v: Float[Tensor, "B Hkv W E"]
    k_far: Float[Tensor, "B Hkv W S"]
    valid: Bool[Tensor, "B W"]
    count: Int[Tensor, " B"]
    sink_k: Float[Tensor, "B Hkv n D"]
    sink_v: Float[Tensor, "B Hkv n E"]
    sink_position: Int[Tensor, "B n"]

    @staticmethod
    def empty(k: Tensor, v: Tensor, k_far: Tensor, local: Local) -> OpenWindow:
        """Before the first token; sizes, dtypes and device are those of the tensors."""
        batch, width = len(k), local.block + local.overlap

        def zeros(x: Tensor, tokens: int) -> Tensor:
            return x.new_zeros((*x.shape[:2], tokens, x.shape[3]))

        return OpenWindow(
            zeros(k, width),
            zeros(v, width),
            zeros(k_far, width),
            torch.zeros(batch, width, dtype=torch.bool, device=k.device),
            torch.zeros(batch, dtype=torch.long, device=k.device),
            zeros(k, local.sinks),
            zeros(v, local.sinks),
            torch.full((batch, local.sinks), NOWHERE, device=k.device),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> OpenWindow:
        """The same change to all tensors, e.g. a choice of samples."""
        return OpenWindow(*(change(getattr(self, field.name)) for field in fields(self)))

    def attend(
        self,
        q: Float[Tensor, "B H N D"],
        q_far: Float[Tensor, "B H N S"],
        k: Float[Tensor, "B Hkv N D"],
        v: Float[Tensor, "B Hkv N E"],
        k_far: Float[Tensor, "B Hkv N S"],
        key_mask: Bool[Tensor, "B N"],
        local: Local,
    ) -> tuple[tuple[Tensor, Tensor], Callable[..., tuple[Tensor, Tensor]]]:
        """Near attention of new tokens, output and logarithm, and a function for the far one.

        That function takes ``state, alpha, beta``.
        """
        window = self.with_sinks(k, v, key_mask)
        line = _Line.of(self, key_mask, local)
        if k.shape[2] == 1:
            return window._attend_one(q, q_far, k, v, key_mask, line, local)
        queries = line.take(F.pad(q, (0, 0, line.width, 0)))
        keys, values = line.join(self.k, k), line.join(self.v, v)
        valid = line.join_mask(self.valid, key_mask)
        position = window._sinks_in_line(local)
        sinks = window.sink_k.to(k), window.sink_v.to(v), position
        grid = local.block, local.overlap
        near = near_op(
            *(queries, keys, values, *sinks, valid, None),
            *(*grid, local.scale, _origin(local), True),
        )

        def far(state: State, alpha: Tensor, beta: Tensor):
            is_sink = line.positions_of(position)
            found = far_op(
                *(line.take(F.pad(q_far, (0, 0, line.width, 0))), line.join(self.k_far, k_far)),
                *(values, alpha, beta, state.log_mass, state.mean, valid & ~is_sink, None),
                *(*grid, _origin(local), True),
            )
            return line.back(found[0], 0), line.back(found[1], -torch.inf)

        return (line.back(near[0], 0), line.back(near[1], -torch.inf)), far

    def _attend_one(self, q, q_far, k, v, key_mask, line: _Line, local: Local):
        """One token: the query sees what its window holds, itself and the sinks before it."""
        keys, values = line.join(self.k, k), line.join(self.v, v)
        here = torch.arange(keys.shape[2], device=k.device) <= line.fill
        valid = line.join_mask(self.valid, key_mask) & here
        sinks = self.sink_k.to(k), self.sink_v.to(v), self._sinks_in_line(local)
        everything = keys.shape[2], 0  # one block
        near = near_op(q, keys, values, *sinks, valid, None, *everything, local.scale, 0, False)

        def far(state: State, alpha: Tensor, beta: Tensor):
            return read_with_normaliser(q_far, alpha, state.log_mass, state.mean)

        return near, far

    def _sinks_in_line(self, local: Local) -> Int[Tensor, "B n"]:
        """Positions of the sinks, counted from the start of the window."""
        first = self.count // local.block * local.block - local.overlap
        inside = self.sink_position - first[:, None]
        return inside.masked_fill(self.sink_position == NOWHERE, NOWHERE)

    def with_sinks(self, k: Tensor, v: Tensor, key_mask: Bool[Tensor, "B N"]) -> OpenWindow:
        """The same window, after the first real ones among new tokens became sinks."""
        wanted = self.sink_k.shape[2]
        if wanted == 0:
            return self
        known = (self.sink_position != NOWHERE).sum(1, keepdim=True)
        rank = key_mask.cumsum(1) - 1 + known  # place among the sinks
        start = torch.where(self.count > 0, 0, leading(key_mask))[:, None]
        position = torch.arange(k.shape[2], device=k.device) - start + self.count[:, None]
        sink_k, sink_v, sink_position = self.sink_k, self.sink_v, self.sink_position
        for slot in range(wanted):
            here = key_mask & (rank == slot)
            found = here.any(1)
            index = here.to(torch.uint8).argmax(1)[:, None]
            own = (torch.arange(wanted, device=k.device) == slot) & found[:, None]
            place = own[:, None, :, None]
            sink_k = torch.where(place, take(k, index).to(sink_k), sink_k)
            sink_v = torch.where(place, take(v, index).to(sink_v), sink_v)
            sink_position = torch.where(own, position.gather(1, index), sink_position)
        return replace(self, sink_k=sink_k, sink_v=sink_v, sink_position=sink_position)

    def append(
        self,
        k: Tensor,
        v: Tensor,
        k_far: Tensor,
        key_mask: Bool[Tensor, "B N"],
        local: Local,
        *,
        beta: Tensor,
        impl: str | None,
    ) -> tuple[OpenWindow, State]:
        """After these tokens, and the state of the keys that left the window with them."""
        window = self.with_sinks(k, v, key_mask)
        line = _Line.of(self, key_mask, local)
        keys, values, far = line.join(self.k, k), line.join(self.v, v), line.join(self.k_far, k_far)
        valid = line.join_mask(self.valid, key_mask)
        count = self.count + k.shape[2] - line.lead[:, 0]
        # Positions of the line begin at the window of the block that was open before.
        moved = (count // local.block - self.count // local.block) * local.block
        place = torch.arange(keys.shape[2], device=k.device)
        gone = place < moved[:, None]
        is_sink = line.positions_of(window._sinks_in_line(local))
        state = summarize(far, values, beta=beta, key_mask=valid & gone & ~is_sink, impl=impl)
        kept = moved[:, None] + torch.arange(line.width, device=k.device)
        index = kept.clamp(max=keys.shape[2] - 1)
        inside = kept < line.stop
        after = OpenWindow(
            take(keys, index),
            take(values, index),
            take(far, index),
            valid.gather(1, index) & inside,
            count,
            window.sink_k,
            window.sink_v,
            window.sink_position,
        )
        return after, state


@dataclass(frozen=True)
class _Line:
    """Buffer and new tokens of every sample in one line, from the start of its window on."""

    index: Int[Tensor, "B L"]  # into [buffer, new tokens]
    inside: Bool[Tensor, "B L"]
    width: int  # of the buffer
    fill: Int[Tensor, "B 1"]  # positions that the buffer holds
    lead: Int[Tensor, "B 1"]  # padding before the first real token, among the new ones
    tokens: int

    @staticmethod
    def of(window: OpenWindow, key_mask: Tensor, local: Local) -> _Line:
        width, tokens = window.k.shape[2], key_mask.shape[1]
        lead = torch.where(window.count > 0, 0, leading(key_mask))[:, None]
        fill = (local.overlap + window.count % local.block)[:, None]
        place = torch.arange(width + tokens, device=key_mask.device)
        index = torch.where(place < fill, place, width + place - fill + lead)
        inside = index < width + tokens
        return _Line(index.clamp(max=width + tokens - 1), inside, width, fill, lead, tokens)

    @property
    def stop(self) -> Int[Tensor, "B 1"]:
        """Where the line ends in each sample."""
        return self.fill + self.tokens - self.lead

    def take(self, x: Tensor) -> Tensor:
        """``[buffer, new tokens]`` in the order of the line."""
        return take(x, self.index)

    def join(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Buffer and new tokens in the order of the line, in the dtype of the latter."""
        return self.take(torch.cat([buffer.to(new), new], 2))

    def join_mask(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Which keys of the line may be attended."""
        return torch.cat([buffer, new], 1).gather(1, self.index) & self.inside

    def positions_of(self, positions: Int[Tensor, "B n"]) -> Bool[Tensor, "B L"]:
        """Which places of the line these are."""
        place = torch.arange(self.index.shape[1], device=self.index.device)
        return (positions[:, :, None] == place).any(1)

    def back(self, x: Tensor, empty: float) -> Tensor:
        """What belongs to the new tokens, ``empty`` at padding before the first real one."""
        step = torch.arange(self.tokens, device=x.device)
        index = (self.fill + step - self.lead).clamp(min=0)
        flat = x if x.dim() == 4 else x[..., None]
        found = take(flat, index).masked_fill((step < self.lead)[:, None, :, None], empty)
        return found if x.dim() == 4 else found[..., 0]


def _origin(local: Local) -> int:
    """A position of the line's first key that puts blocks where they are."""
    return -local.overlap % local.block
