"""One more token of every sample: a memory is moved in place, and its queries attend.

A step has the same shapes and addresses whatever the samples are at, and asks nothing of the host:
a CUDA graph can hold it, and an ONNX graph. Where all samples stand at one place that the host
knows, slices do instead of masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.hf.decode.inputs import Constants, Tokens
from lln.hf.decode.memory import Memory
from lln.nn import LLNAttention
from lln.ops import triton as kernels
from lln.ops.common.arguments import hide, may_look_at
from lln.ops.linear.eager_state import merge
from lln.ops.linear.one_token import fold_, read_with_log, weighted
from lln.ops.linear.summarize import summarize
from lln.ops.taps.convolution import convolve_next, last_values
from lln.ops.window.eager_near_far import NOWHERE
from lln.ops.window.near import Near
from lln.protocols import Call

Part = tuple[Tensor, Tensor, Tensor | None]


def attend_(
    core: LLNAttention,
    memory: Memory,
    new: Tokens,
    constants: Constants,
    *,
    key_mask: Bool[Tensor, "B 1"] | None = None,
    count: int | None = None,
) -> Float[Tensor, "B H 1 E"]:
    """Causal attention of one token of every sample to itself and to all before.

    The token joins the memory; its position, and heads with softmax, are left to the caller.

    Args:
        key_mask: None only where no token of the stream was ever masked.
        count: The position of all samples, if it is the same and the host knows it.
    """
    if key_mask is None and _has_kernel(core, memory, new):
        out = _by_kernel(core, memory, new, constants)
    elif count is not None:
        out = _Together(memory, new, constants, count).attend_(core)
    else:
        out = _Step(memory, new, constants, key_mask).attend_(core)
    if core.conv_weight is not None:
        last, values = memory.tensors["last"], hide(new.v, key_mask)
        out = out + core.for_queries(convolve_next(values, core.conv_weight, last))
        last.copy_(last_values(values.to(last.dtype), last))
    return out


def write_(buffer: Tensor, new: Tensor, place: Int[Tensor, " B"]) -> Tensor:
    """The buffer ``[B, h, L, D]``, after one token of every sample was written at its place."""
    return buffer.scatter_(2, _index(place, new), new.to(buffer.dtype))


def _has_kernel(core: LLNAttention, memory: Memory, new: Tokens) -> bool:
    """Whether near and far keys are under one normaliser, and a kernel takes them."""
    if core.near is None or not core.near.joint or core.impl not in (None, "triton"):
        return False
    if torch.compiler.is_compiling():  # it writes in place, unknown to a tracer
        return False
    if "pending_mean" not in memory.tensors:
        return False
    return kernels.refuses_next_token(new.q_far, new.v, new.k_far, memory.tensors) is None


def _by_kernel(
    core: LLNAttention, memory: Memory, new: Tokens, constants: Constants
) -> Float[Tensor, "B H 1 E"]:
    assert constants.gamma is not None
    return kernels.next_token(
        *(new.q, new.k, new.v, new.q_far, new.k_far, memory.position, memory.tensors),
        alpha=constants.alpha.contiguous(),
        beta=constants.beta.contiguous(),
        gamma=constants.gamma.contiguous(),
        local=core.near,
    )


class _Step:
    """The same in PyTorch's operations, also for branches that are averaged and with masks."""

    maybe_no_far = True

    def __init__(
        self, memory: Memory, new: Tokens, constants: Constants, key_mask: Tensor | None
    ) -> None:
        self.memory, self.new, self.constants, self.key_mask = memory, new, constants, key_mask
        self.tensors, self.position = memory.tensors, memory.position
        self.folds = "pending_mean" in memory.tensors

    def attend_(self, core: LLNAttention) -> Float[Tensor, "B H 1 E"]:
        field = core.near
        near = None if field is None else softmax_over(self.new.q, self._near(field), core.scale)
        if field is not None and field.joint:
            if self.folds:
                self._leave_one_by_one(field)
            linear = self._read() if self._has_far(field) else None
        else:
            linear = self._join_and_read(core)
        leaves = field is not None and field.joint and not self.folds
        if field is not None and (leaves or self.key_mask is not None):
            self._end_block(field)
        return self._together(near, linear)

    def _together(
        self, near: tuple[Tensor, Tensor] | None, linear: tuple[Tensor, Tensor | None] | None
    ) -> Float[Tensor, "B H 1 E"]:
        if near is None:
            assert linear is not None
            return linear[0]
        if linear is None:
            return near[0]
        if self.constants.gamma is None:
            return self.constants.together(near, linear)
        assert linear[1] is not None
        share = torch.sigmoid(near[1] - linear[1] - self.constants.gamma[:, None])
        if self.key_mask is not None:
            share = share.nan_to_num(0)  # neither near nor far keys: padding
        return torch.lerp(linear[0], near[0], share[..., None])

    def _near(self, field: Near) -> list[Part]:
        """The keys of the window, in which the token is now, and the sinks before it."""
        width = field.ring
        place = self.position % width
        new, found = self.new, self.tensors
        keys, values = write_(found["near_k"], new.k, place), write_(found["near_v"], new.v, place)
        if "near_features" in found:
            write_(found["near_features"], new.k_far, place)
        first = self.memory.first(field)[:, None]
        if self.key_mask is None:
            places = torch.arange(width, device=place.device)
            position = self.position[:, None]
            seen = position - (position - places) % width >= first.clamp(min=0)
        else:
            seen = found["valid"].scatter_(1, place[:, None], self.key_mask)
        if not field.sinks:
            return [(keys, values, seen)]
        self._write_sinks(field)
        sinks = found["sink_k"], found["sink_v"], self.memory.sink_positions() < first
        return [(keys, values, seen), sinks]

    def _some_begin(self, field: Near, later: int = 0) -> bool:
        """Whether a block of some sample begins, now or with a later token.

        True also where the host may not look: steps that fold are those of graphs, too.
        """
        if self.folds or not may_look_at(self.position):
            return True
        return bool(((self.position + later) % field.block == 0).any())

    def _write_sinks(self, field: Near) -> None:
        """The first real tokens of each sample are its sinks."""
        own, position = torch.arange(field.sinks, device=self.position.device), self.position
        here = own == position[:, None]
        if self.key_mask is not None:
            stands = self.tensors["sink_position"]
            open_ = stands == NOWHERE
            if may_look_at(stands) and not bool(open_.any()):
                return
            here = (own == (~open_).sum(1, keepdim=True)) & self.key_mask
            stands.copy_(position[:, None].where(here, stands))
        for name, x in (("sink_k", self.new.k), ("sink_v", self.new.v)):
            sink = self.tensors[name]
            sink.copy_(torch.where(here[:, None, :, None], x.to(sink.dtype), sink))

    def _has_far(self, field: Near) -> bool:
        """Whether there may be keys that left the window."""
        return True

    def _end_block(self, field: Near) -> None:
        """Where the token ends a block, let those leave that are far from the next one."""
        if not self._some_begin(field, 1):
            return
        after = Memory(self.tensors, self.position + 1)
        ring, first = after.ring(), after.first(field)[:, None]
        if field.joint and not self.folds:
            gone = (ring >= (first - field.block).clamp(min=0)) & (ring < first)
            gone = gone & (after.position % field.block == 0)[:, None] & ~after.is_sink(ring)
            gone = gone if self.key_mask is None else gone & self.tensors["valid"]
            left = summarize(*after.far_keys(), beta=self.constants.beta, key_mask=gone)
            state = after.state.merge(left)
            self.tensors["log_mass"].copy_(state.log_mass)
            self.tensors["mean"].copy_(state.mean)
        if self.key_mask is not None:
            self.tensors["valid"].logical_and_(ring >= first)

    def _leave_one_by_one(self, field: Near) -> None:
        """Fold one more key, and let all that were folded leave where a block begins."""
        if self._some_begin(field):
            self._merge(self.position % field.block == 0)
        leaving, k_far, v = self.position - field.overlap, self.new.k_far, self.new.v
        place = leaving % field.ring
        if field.overlap:
            k_far, v = (_one(x, place).to(v.dtype) for x in self.memory.far_keys())
        if self.key_mask is None:
            wanted = leaving >= field.sinks
        else:
            real = self.tensors["valid"].gather(1, place[:, None])  # none before the first token
            wanted = (real & ~self.memory.is_sink(leaving[:, None]))[:, 0]
        self._fold("pending_", k_far, v, wanted)

    def _join_and_read(self, core: LLNAttention) -> tuple[Tensor, Tensor | None]:
        """Let the token join the state and read it, in one launch where a kernel takes it."""
        new, log_mass, mean = self.new, self.tensors["log_mass"], self.tensors["mean"]
        call = Call("decode", new.q_far, new.k_far, new.v)
        if core.impl not in (None, "triton") or kernels.refuses(call) is not None:
            real = None if self.key_mask is None else self.key_mask[:, 0]
            self._fold("", new.k_far, new.v, real)
            return self._read()
        alpha, beta = (x.expand(len(mean), -1) for x in (self.constants.alpha, self.constants.beta))
        out, *after = kernels.decode(
            *(new.q_far, new.k_far, new.v, log_mass, mean),
            alpha=alpha,
            beta=beta,
            key_mask=self.key_mask,
        )
        log_mass.copy_(after[0])
        mean.copy_(after[1])
        return out, None

    def _merge(self, begins: Bool[Tensor, " B"]) -> None:
        """Put the pending state into the far one."""
        parts = [self.tensors[name] for name in ("log_mass", "mean")]
        waiting = [self.tensors[name] for name in ("pending_log_mass", "pending_mean")]
        for own, merged in zip(parts, merge(*parts, *waiting), strict=True):
            own.copy_(torch.where(_like(begins, own), merged, own))
        for own, nothing in zip(waiting, (-torch.inf, 0.0), strict=True):
            own.masked_fill_(_like(begins, own), nothing)

    def _fold(self, prefix: str, k: Tensor, v: Tensor, wanted: Bool[Tensor, " B"] | None) -> None:
        """Add one key and value of every sample to a state, or of those that are wanted."""
        state = self.tensors[prefix + "log_mass"], self.tensors[prefix + "mean"]
        fold_(*state, k, v, self.constants.beta, wanted)

    def _read(self) -> tuple[Float[Tensor, "B H 1 E"], Float[Tensor, "B H 1"]]:
        """What the queries get from the state, and the logarithm of its sum."""
        state = self.tensors["log_mass"], self.tensors["mean"]
        asked = self.new.q_far, self.constants.alpha
        return read_with_log(*asked, *state, maybe_none=self.maybe_no_far)


class _Together(_Step):
    """All samples at one place, which the host knows; none was ever masked."""

    maybe_no_far = False  # a state is read only where it has keys

    def __init__(self, memory: Memory, new: Tokens, constants: Constants, count: int) -> None:
        super().__init__(memory, new, constants, None)
        self.count = count

    def _near(self, field: Near) -> list[Part]:
        found, new, width = self.tensors, self.new, field.ring
        place, first = self.count % width, self._first(field)
        for name, x in (("near_k", new.k), ("near_v", new.v), ("near_features", new.k_far)):
            if name in found:
                found[name][:, :, place] = x[:, :, 0].to(found[name].dtype)
        if self.count < field.sinks:
            found["sink_k"][:, :, self.count] = new.k[:, :, 0].to(found["sink_k"].dtype)
            found["sink_v"][:, :, self.count] = new.v[:, :, 0].to(found["sink_v"].dtype)
        start, stop = max(first, 0) % width, place + 1
        pieces = [(start, stop)] if start < stop else [(start, width), (0, stop)]
        ring, sinks = ("near_k", "near_v"), ("sink_k", "sink_v")
        taken = [(ring, *piece) for piece in pieces]
        if min(field.sinks, first) > 0:
            taken.append((sinks, 0, min(field.sinks, first)))
        return [
            (found[k][:, :, begin:end], found[v][:, :, begin:end], None)
            for (k, v), begin, end in taken
        ]

    def _has_far(self, field: Near) -> bool:
        return self._first(field) > field.sinks

    def _some_begin(self, field: Near, later: int = 0) -> bool:
        return (self.count + later) % field.block == 0

    def _first(self, field: Near) -> int:
        return field.first(self.count)


def softmax_over(
    q: Float[Tensor, "B H 1 D"], parts: Sequence[Part], scale: float
) -> tuple[Float[Tensor, "B H 1 E"], Float[Tensor, "B H 1"]]:
    """Softmax of one query over keys in several tensors, which are not copied into one.

    Args:
        parts: Keys ``[B, Hkv, W, D]``, values, and which may be attended, ``[B, W]``; None is all.

    Returns:
        The output and the logarithm of its normaliser; 0 and −inf for no key.
    """
    rows = scale * q.unflatten(1, (parts[0][0].shape[1], -1)).flatten(3)  # [B, Hkv, G, D]
    scores = []
    for keys, _, seen in parts:
        found = rows @ keys.to(q.dtype).mT
        hidden = None if seen is None else ~seen[:, None, None]
        scores.append(found if hidden is None else found.masked_fill(hidden, -torch.inf))
    together = torch.cat(scores, -1) if len(scores) > 1 else scores[0]
    values = [values.to(q.dtype) for _, values, _ in parts]
    return weighted(together, values, maybe_none=parts[0][2] is not None)


def _like(flags: Bool[Tensor, " B"], x: Tensor) -> Tensor:
    """Flags per sample, with as many axes as x."""
    return flags.view(-1, *(1,) * (x.dim() - 1))


def _index(place: Int[Tensor, " B"], like: Tensor) -> Tensor:
    return place[:, None, None, None].expand(-1, like.shape[1], 1, like.shape[3])


def _one(x: Tensor, place: Int[Tensor, " B"]) -> Float[Tensor, "B Hkv 1 D"]:
    """The token at a place of every sample."""
    return x.gather(2, _index(place, x))
