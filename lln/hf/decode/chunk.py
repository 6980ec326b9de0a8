"""Any number of new tokens of every sample: what they see of a memory, and the memory after them.

Nothing is written in place, and gradients flow. Samples stand at different places of their block,
since blocks are counted from the first real token. ``key_mask`` is None only where no token of the
stream was ever masked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.functional import prefill
from lln.hf.decode.inputs import Constants, Tokens
from lln.hf.decode.memory import Memory
from lln.hf.padding import leading, take
from lln.nn import LLNAttention
from lln.ops.common.arguments import hide
from lln.ops.linear.state import State
from lln.ops.linear.summarize import summarize
from lln.ops.taps.convolution import convolve_next, last_values
from lln.ops.window.eager_far import far_op
from lln.ops.window.eager_near import near_op
from lln.ops.window.eager_near_far import NOWHERE
from lln.ops.window.near import Near


def append(
    core: LLNAttention,
    memory: Memory,
    new: Tokens,
    constants: Constants,
    key_mask: Bool[Tensor, "B N"] | None,
) -> Memory:
    """The memory after these tokens; heads with softmax are left to the caller."""
    memory = _prepared(core, memory, key_mask)
    field, options = core.near, {"beta": constants.beta, "impl": core.impl}
    position = _positions(memory, new, key_mask)
    after = Memory(dict(memory.tensors), position[:, -1] + 1)
    if field is not None:
        _write_sinks(memory, after, new, position, key_mask)
        _write_ring(memory, after, new, key_mask, field)
    if field is None or not field.joint:
        state = memory.state.merge(summarize(new.k_far, new.v, key_mask=key_mask, **options))
    else:
        first = after.first(field)[:, None]
        gone = (position < first) & ~after.is_sink(position)
        gone = gone if key_mask is None else gone & key_mask
        left = summarize(new.k_far, new.v, key_mask=gone, **options)
        state = memory.state.merge(_of_ring(core, memory, first, constants)).merge(left)
    after.tensors.update(log_mass=state.log_mass, mean=state.mean)
    if core.conv:
        last = memory.tensors["last"]
        after.tensors["last"] = last_values(hide(new.v, key_mask).to(last.dtype), last)
    return after


def attend(
    core: LLNAttention,
    memory: Memory,
    new: Tokens,
    constants: Constants,
    key_mask: Bool[Tensor, "B N"] | None,
) -> tuple[Float[Tensor, "B H N E"], Memory]:
    """Causal attention of the new tokens to themselves and to all before, and the memory after."""
    memory = _prepared(core, memory, key_mask)
    after, field = append(core, memory, new, constants, key_mask), core.near
    near, linear = None, None
    if field is not None:
        near, far = _window(memory, after, new, constants, key_mask, field)
        linear = far if field.joint else None
    if linear is None:
        out, _ = prefill(
            *(new.q_far, new.k_far, new.v, memory.state),
            alpha=constants.alpha,
            beta=constants.beta,
            key_mask=key_mask,
            impl=core.impl,
        )
        linear = out, out  # no sum is asked for
    out = linear[0] if near is None else constants.together(near, linear)
    if core.conv_weight is not None:
        values, last = hide(new.v, key_mask), memory.tensors["last"]
        out = out + core.for_queries(convolve_next(values, core.conv_weight, last, impl=core.impl))
    return out, after


def with_pending(core: LLNAttention, memory: Memory, constants: Constants) -> Memory:
    """The same memory, ready for steps that fold a key each."""
    field = core.near
    if field is None or not field.joint or "pending_mean" in memory.tensors:
        return memory
    until = memory.position[:, None] - field.overlap
    waiting = _of_ring(core, memory, until, constants)
    pending = {"pending_log_mass": waiting.log_mass, "pending_mean": waiting.mean}
    return Memory({**memory.tensors, **pending}, memory.position)


def _prepared(core: LLNAttention, memory: Memory, key_mask: Tensor | None) -> Memory:
    """With flags where there is a mask, and nothing pending: the state has all that left."""
    memory = memory if key_mask is None else memory.with_mask(core.near)
    if core.near is None or "pending_mean" not in memory.tensors:
        return memory
    tensors = dict(memory.tensors)
    waiting = State(tensors.pop("pending_log_mass"), tensors.pop("pending_mean"))
    begins = memory.position % core.near.block == 0
    merged = memory.state.merge(waiting)
    tensors["log_mass"] = merged.log_mass.where(begins[:, None, None], memory.state.log_mass)
    tensors["mean"] = merged.mean.where(begins[:, None, None, None], memory.state.mean)
    return Memory(tensors, memory.position)


def _positions(memory: Memory, new: Tokens, key_mask: Tensor | None) -> Int[Tensor, "B N"]:
    """Of the new tokens; negative before the first real one."""
    position = memory.position[:, None] + torch.arange(new.k.shape[2], device=new.k.device)
    if key_mask is None:
        return position
    return position - torch.where(memory.position > 0, 0, leading(key_mask))[:, None]


def _write_sinks(
    memory: Memory, after: Memory, new: Tokens, position: Tensor, key_mask: Tensor | None
) -> None:
    """Each of the first real tokens of a sample is a sink."""
    if "sink_k" not in memory.tensors:
        return
    rank = position
    if key_mask is not None:
        known = (memory.tensors["sink_position"] != NOWHERE).sum(1, keepdim=True)
        rank = (key_mask.cumsum(1) - 1 + known).masked_fill(~key_mask, -1)
    own = torch.arange(memory.tensors["sink_k"].shape[2], device=position.device)
    here = rank[:, None] == own[:, None]  # [B, n, N]
    found, index = here.any(-1), here.to(torch.uint8).argmax(-1)
    for name, x in (("sink_k", new.k), ("sink_v", new.v)):
        sink = memory.tensors[name]
        after.tensors[name] = take(x, index).to(sink).where(found[:, None, :, None], sink)
    if key_mask is not None:
        stands = position.gather(1, index)
        after.tensors["sink_position"] = stands.where(found, memory.tensors["sink_position"])


def _write_ring(
    memory: Memory, after: Memory, new: Tokens, key_mask: Tensor | None, field: Near
) -> None:
    """The last of the new tokens lie in the places of their positions."""
    ring = after.ring()
    fresh, tail = ring >= memory.position[:, None], min(ring.shape[1], new.k.shape[2])
    index = (ring - after.position[:, None] + tail).clamp(min=0)
    for name, x in (("near_k", new.k), ("near_v", new.v), ("near_features", new.k_far)):
        if name in memory.tensors:
            old = memory.tensors[name]
            written = take(x[:, :, -tail:], index).to(old)
            after.tensors[name] = written.where(fresh[:, None, :, None], old)
    if key_mask is not None:
        real = key_mask[:, -tail:].gather(1, index)
        inside = ring >= after.first(field)[:, None]
        after.tensors["valid"] = real.where(fresh, memory.tensors["valid"]) & inside


def _of_ring(
    core: LLNAttention, memory: Memory, until: Int[Tensor, "B 1"], constants: Constants
) -> State:
    """The state of the near keys before a position, each of them no sink."""
    assert core.near is not None
    ring = memory.ring()
    wanted = memory.near(core.near) & (ring < until) & ~memory.is_sink(ring)
    return summarize(*memory.far_keys(), beta=constants.beta, key_mask=wanted, impl=core.impl)


def _window(
    memory: Memory,
    after: Memory,
    new: Tokens,
    constants: Constants,
    key_mask: Tensor | None,
    field: Near,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Near attention, and under one normaliser the far one: outputs and logarithms."""
    line = _Line(memory, new, key_mask, field)
    values, valid = line.join("near_v", new.v), line.valid(key_mask)
    grid, origin = (field.block, field.overlap), field.origin
    none = new.k[:, :, :0], new.v[:, :, :0], line.index[:, :0]
    always, is_sink = none, None
    if "sink_k" in after.tensors:
        position = after.sink_positions()
        position = (position - line.first).masked_fill(position == NOWHERE, NOWHERE)
        always = after.tensors["sink_k"].to(new.k), after.tensors["sink_v"].to(new.v), position
        is_sink = after.is_sink(line.position)
    near = near_op(
        *(line.queries(new.q), line.join("near_k", new.k), values, *always, valid, None),
        *(*grid, field.scale, origin, True),
    )
    near = line.back(near[0], 0), line.back(near[1], -torch.inf)
    if not field.joint:
        return near, None
    name = "near_features" if "near_features" in memory.tensors else "near_k"
    scales = (x.expand(len(values), -1) for x in (constants.alpha, constants.beta))
    far = far_op(
        *(line.queries(new.q_far), line.join(name, new.k_far), values, *scales),
        *(memory.tensors["log_mass"], memory.tensors["mean"]),
        *(valid if is_sink is None else valid & ~is_sink, None, *grid, origin, True),
    )
    return near, (line.back(far[0], 0), line.back(far[1], -torch.inf))


class _Line:
    """Ring and new tokens of every sample in the order of positions, from its window's start on."""

    def __init__(self, memory: Memory, new: Tokens, key_mask: Tensor | None, field: Near) -> None:
        self.memory, self.width = memory, field.ring
        total = self.width + new.k.shape[2]
        place = torch.arange(total, device=new.k.device)
        self.first = memory.first(field)[:, None]
        self.position = self.first + place
        self.own = _positions(memory, new, key_mask)
        past = self.position < memory.position[:, None]
        index = torch.where(
            past, self.position % self.width, self.width + self.position - self.own[:, :1]
        )
        self.inside = (index < total) & (self.position >= 0)
        self.index = index.clamp(max=total - 1)  # into [ring, new tokens]

    def join(self, name: str, new: Tensor) -> Tensor:
        """Keys or values of the line, in the dtype of the new ones."""
        return take(torch.cat([self.memory.tensors[name].to(new), new], 2), self.index)

    def queries(self, new: Tensor) -> Tensor:
        """The new ones in their places; others are nobody's."""
        return take(F.pad(new, (0, 0, self.width, 0)), self.index)

    def valid(self, key_mask: Tensor | None) -> Bool[Tensor, "B L"]:
        """Which keys of the line may be attended."""
        if key_mask is None:
            return self.inside
        both = torch.cat([self.memory.tensors["valid"], key_mask], 1)
        return both.gather(1, self.index) & self.inside

    def back(self, x: Tensor, empty: float) -> Tensor:
        """What belongs to the new tokens, ``empty`` at padding before the first real one."""
        flat = x if x.dim() == 4 else x[..., None]
        found = take(flat, (self.own - self.first).clamp(min=0))
        found = found.masked_fill((self.own < 0)[:, None, :, None], empty)
        return found if x.dim() == 4 else found[..., 0]
