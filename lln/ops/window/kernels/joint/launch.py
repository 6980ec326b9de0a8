"""Launchers of the kernels of windows, sinks and far keys: forward, and what both passes share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.ops.common.kernels.launching import (
    Launch,
    Layout,
    layout,
    planned,
    row_strides,
    rows_of,
    steps,
)
from lln.ops.common.kernels.library import contiguous_mask, floats, mask_stride, rows_contiguous
from lln.ops.common.kernels.tiles import Tile, padded, tile
from lln.ops.window.kernels.joint.near_kernels import joint_kernel
from lln.ops.window.kernels.joint.state_kernels import scan_states_kernel, segments_kernel

Strides = tuple[int, ...]
MOST_KEYS = 64  # of a tile of keys: its scores are held beside all else


class Window(NamedTuple):
    """Which keys are near, and how queries are cut into blocks and far keys into segments.

    ``overlap = −block`` leaves no key near: all of a causal block, and those before it, are far.
    """

    block: int
    overlap: int
    scale: float
    causal: bool
    tokens: int

    @property
    def near(self) -> bool:
        """Whether any key is."""
        return self.overlap > -self.block

    @property
    def slope(self) -> float:
        """The scale, never 0, which would make −inf, a key that is not there, no number."""
        return self.scale or 1e-30

    @property
    def step(self) -> int:
        """Keys of a segment: every window begins and ends between two of them."""
        return self.block if self.causal else math.gcd(self.block, 2 * self.overlap)

    @property
    def origin(self) -> int:
        """Where the first segment would begin, were it whole."""
        return -(self.overlap % self.step)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return steps(self.tokens, self.block)

    @property
    def segments(self) -> int:
        """Number of segments that hold all keys."""
        return steps(self.tokens - self.origin, self.step)

    @property
    def states(self) -> int:
        """Number of segments some block may see: causal, none after the last window begins."""
        if not self.causal:
            return self.segments
        first = (self.blocks - 1) * self.block - self.overlap
        return max(1, (first - self.origin) // self.step)

    @property
    def directions(self) -> int:
        """From which sides a block sees far keys."""
        return 1 if self.causal else 2

    def numbers(self, step: int, origin: int) -> tuple[Any, ...]:
        """What all kernels are told of a window."""
        return self.tokens, self.block, self.overlap, self.slope, step, origin

    def whole(self, rows: int, cols: int) -> bool:
        """Whether tiles of so many queries fill the blocks, and of keys windows and segments."""
        return not (self.tokens % self.block or self.block % rows or self.overlap % cols)


class Near(NamedTuple):
    """What the kernels read of the keys that are near, with contiguous rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None  # [B, n] positions, N or more where there is none
    key_mask: Tensor | None

    @staticmethod
    def prepared(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_mask: Tensor | None
    ) -> Near:
        """Copied only where the kernels could not read it."""
        positions = None
        if sinks is not None and sinks.shape[1]:
            positions = sinks.to(torch.int64).contiguous()
        q, k, v = (rows_contiguous(x) for x in (q, k, v))
        return Near(q, k, v, positions, contiguous_mask(key_mask))

    @property
    def plan(self) -> NearPlan:
        """What the launches depend on."""
        count = 0 if self.sinks is None else self.sinks.shape[1]
        return NearPlan(
            layout(self.q), layout(self.k), layout(self.v), count, mask_stride(self.key_mask)
        )


class NearPlan(NamedTuple):
    q: Layout
    k: Layout
    v: Layout
    sinks: int
    mask: int | None


class Far(NamedTuple):
    """The same of those that are far; features are None where they are q and k themselves."""

    q: Tensor | None
    k: Tensor | None
    alpha: Tensor
    beta: Tensor
    gamma: Tensor
    key_mask: Tensor | None  # which keys may be far

    @staticmethod
    def prepared(q, k, alpha, beta, gamma, key_mask) -> Far:
        """Copied only where the kernels could not read it."""
        q, k = (None if x is None else rows_contiguous(x) for x in (q, k))
        return Far(q, k, alpha, beta, gamma, contiguous_mask(key_mask))

    @property
    def plan(self) -> FarPlan:
        """What the launches depend on."""
        q, k = (None if x is None else layout(x) for x in (self.q, self.k))
        scales = self.alpha.stride(), self.beta.stride(), self.gamma.stride()
        return FarPlan(q, k, *scales, mask_stride(self.key_mask))


class FarPlan(NamedTuple):
    q: Layout | None
    k: Layout | None
    alpha: Strides
    beta: Strides
    gamma: Strides
    mask: int | None


class States(NamedTuple):
    """Merged states, from one side or from both: base-2 logarithms and means per slot."""

    logs: Tensor  # [directions · B · Hkv, states, S], float32
    means: Tensor  # [directions · B · Hkv, states, S, E]


def empty_states(v: Tensor, count: int, slots: int, directions: int = 1) -> States:
    """Uninitialised states of every key head; the means are rounded as the values are."""
    shape = directions * v.shape[0] * v.shape[1], count, slots
    return States(floats(v, *shape), v.new_empty((*shape, v.shape[-1])))


def slots_of(near: NearPlan, far: FarPlan | None) -> int:
    """Width of the features of far keys; that of the keys where there are none."""
    return (near.q if far is None or far.q is None else far.q)[0][-1]


def chosen(name: str, near: NearPlan, far: FarPlan | None) -> tuple[Tile, dict[str, Any]]:
    """The tile of a kernel, named by whether there are far keys, and what follows from it."""
    d, e, s = near.q[0][-1], near.v[0][-1], slots_of(near, far)
    t = tile(("near" if far is None else "joint") + name, max(d, s), e, *near.q[2:])
    widths = {"D": d, "E": e, "S": s, "SINKS": near.sinks}
    return t, {**widths, **t.options}


def tensors_of(far: Far | None, states: States | None) -> tuple[Tensor | None, ...]:
    """Merged states, α and γ, for a kernel of queries."""
    if far is None or states is None:
        return None, None, None, None
    return *states, far.alpha, far.gamma


def of_queries(
    near: NearPlan, far: FarPlan | None, window: Window, rows: int, strides: tuple[Strides, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a kernel of queries after its tensors, and its constants."""
    heads, kv_heads = near.q[0][1], near.k[0][1]
    scales = ((0, 0), (0, 0)) if far is None else (far.alpha, far.gamma)
    numbers = (
        (*row_strides(*strides), near.mask or 0, *scales),
        (*window.numbers(window.step, window.origin), steps(window.block, rows), window.states),
        heads,
        heads // kv_heads,
    )
    cols = min(rows, MOST_KEYS)
    constants = {
        "ROWS": rows, "COLS": cols, "CAUSAL": window.causal,
        "NEAR": window.near, "FULL": window.whole(rows, cols) and near.mask is None,
    }  # fmt: skip
    return numbers, constants


def forward(near: Near, far: Far | None, window: Window) -> tuple[Tensor, Tensor, States | None]:
    """(out, logarithm of the normaliser, merged states of far keys)."""
    q, k, v, sinks, key_mask = near
    plan, far_plan = near.plan, None if far is None else far.plan
    states = None if far is None else summaries(near, far, window)
    rows, launch = _forward_plan(plan, far_plan, window)
    out, lse = q.new_empty_strided(*rows), floats(q, *q.shape[:3])
    q_far = None if far is None else far.q
    launch(q, k, v, q_far, key_mask, sinks, *tensors_of(far, states), out, lse)
    return out, lse, states


@planned
def _forward_plan(near: NearPlan, far: FarPlan | None, window: Window) -> tuple[Any, Launch]:
    (b, heads, *_), e = near.q[0], near.v[0][-1]
    t, constants = chosen("", near, far)
    rows = min(t.rows, padded(window.block))
    out = rows_of(near.q, e)
    features = near.q if far is None or far.q is None else far.q
    strides = near.q[1], near.k[1], near.v[1], features[1], out[1]
    numbers, more = of_queries(near, far, window, rows, strides)
    return out, Launch(
        joint_kernel, (window.blocks * steps(window.block, rows), b * heads), numbers,
        FLIP=window.scale < 0, **constants, **more,
    )  # fmt: skip


def summaries(near: Near, far: Far, window: Window) -> States:
    """States of far keys before each segment's end, and after its beginning unless causal."""
    k, v = near.k if far.k is None else far.k, near.v
    parts = empty_states(v, window.states, k.shape[-1])
    launch = _segments_plan(layout(k), layout(v), far.plan, window)
    launch(k, v, far.beta, far.key_mask, *parts)
    return scan(parts, None, window.directions, backward=False)[0]


@planned
def _segments_plan(k: Layout, v: Layout, far: FarPlan, window: Window) -> Launch:
    ((b, heads, keys, s), k_strides, dtype, device), ((*_, e), v_strides, *_) = k, v
    t = tile("joint_segments", s, e, dtype, device)
    rows = min(t.rows, padded(window.step))
    return Launch(
        segments_kernel, (window.states, b * heads),
        ((*row_strides(k_strides, v_strides), far.beta, far.mask or 0), heads, keys, window.step,
         window.origin),
        S=s, E=e, ROWS=rows, FULL=window.whole(rows, rows),
        **t.options,
    )  # fmt: skip


def scan(
    parts: States, extra: Tensor | None, directions: int, *, backward: bool
) -> tuple[States, Tensor | None]:
    """Merge the parts of each head along the sequence, from one side or from both."""
    heads, count, slots, e = parts.means.shape
    logs = floats(parts.logs, directions * heads, count, slots)
    means = parts.means.new_empty((directions * heads, count, slots, e))
    extras = None if extra is None else torch.empty_like(logs)
    launch = _scan_plan(parts.means.shape, directions, backward, parts.means.device)
    launch(*parts, extra, logs, means, extras)
    return States(logs, means), extras


@planned
def _scan_plan(shape: torch.Size, directions: int, backward: bool, _: torch.device) -> Launch:
    heads, count, slots, e = shape
    rows = min(8, 512 // padded(e))
    return Launch(
        scan_states_kernel, (heads, steps(slots, rows), directions), (count,),
        S=slots, E=e, BS=rows, BE=padded(e), BACKWARD=backward, num_warps=1,
    )  # fmt: skip
