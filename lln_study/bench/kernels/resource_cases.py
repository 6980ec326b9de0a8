"""The cases of ``lln bench resources``: every op, launched on tensors that nobody touches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lln.ops import triton as kernels
from lln.ops.common.kernels import tiles
from lln.ops.window.near import Near
from lln_study.bench.cases import DIAG_BLOCK, TAPS, WIDE_BLOCK
from lln_study.bench.kernels.offline import planned_for

LENGTHS = (4096, 16_384)
CUT = 6  # tokens that the masked cases have less: no tile divides what is left
HEADS = 12
SEQUENCES = 4  # that are packed
SCALE = 0.125  # of the softmax branch
SINGLE_BLOCK = 32  # the largest of LLN+Diag in float32
OVERLAP, SINKS = 32, 4  # of windows
SLOTS = {64: 128, 128: 64}  # of far keys, by width: features of their own
BLOCKS = ("lln_diag", "lln_diag_learned", "lln_diag_overlap", "block_diagonal")
WIDE = ("lln_diag_learned", "lln_diag_overlap")
NEAR_FAR = ("near_far", "near_far_causal", "near_far_slots")
WIDTHS = (64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
HERE = torch.device("cpu")  # where the tensors are that nobody touches
CONFIGURATION = f"B=1 H={HEADS} E=D block={DIAG_BLOCK}, in float32 {SINGLE_BLOCK}"

Launched = tuple[Sequence[Tensor], Sequence[Tensor]]  # outputs, and what they are differentiated by


@dataclass(frozen=True)
class ResourceCase:
    """An op whose kernels are compiled; D = E is the width of its heads.

    ``masked`` adds a key mask and lengths that no tile divides.
    """

    op: str
    D: int
    dtype: str
    masked: bool = False

    @property
    def name(self) -> str:
        return f"{self.op} D={self.D} {self.dtype}" + (" masked" if self.masked else "")

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(length - CUT * self.masked for length in LENGTHS)

    @property
    def block(self) -> int:
        if self.dtype == "float32":
            return SINGLE_BLOCK
        return WIDE_BLOCK if self.op in WIDE else DIAG_BLOCK

    @property
    def slots(self) -> int:
        """Width of the features of far keys."""
        return SLOTS.get(self.D, self.D) if self.op == "near_far_slots" else self.D

    def tokens(self, *shape: int) -> list[Tensor]:
        """q, k, v in memory that nobody touches."""
        dtype = getattr(torch, self.dtype)
        return [torch.empty(*shape, self.D, dtype=dtype, requires_grad=True) for _ in range(3)]

    def mask(self, *shape: int) -> Tensor | None:
        """A key mask, if the case has one."""
        return torch.empty(*shape, dtype=torch.bool) if self.masked else None

    def takes(self) -> bool:
        """Whether the kernels take this width and dtype; plain PyTorch is not compiled.

        Asked inside :func:`offline.planned_for`, of an architecture.
        """
        widths = self.D, self.D, getattr(torch, self.dtype)
        if self.op == "causal":
            return tiles.causal_fits(*widths, HERE)
        if self.op in BLOCKS:
            whole = self.op != "lln_diag_overlap" or self.dtype != "float32"
            return whole and tiles.block_fits(*widths, self.block, HERE)
        if self.op == "block_causal":
            return tiles.state_fits(*widths, HERE)
        if self.op == "next_token":
            return tiles.step_fits(self.D, 2 * self.D, self.D)
        near = tiles.near_fits(self.D, self.D)
        if self.op in NEAR_FAR:
            return near and tiles.state_fits(self.slots, *widths[1:], HERE)
        return near or self.op != "near"


def _scales(batch: int = 1) -> dict[str, Tensor]:
    return {"alpha": torch.empty(batch, HEADS), "beta": torch.empty(batch, HEADS)}


def _plain(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    attend = getattr(kernels, case.op)
    return [attend(q, k, v, key_mask=case.mask(1, length), **_scales())], [q, k, v]


def _lln_diag(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    options = {"block": case.block, "scale": SCALE, "key_mask": case.mask(1, length)}
    return [kernels.lln_diag(q, k, v, **options, **_scales())], [q, k, v]


def _lln_diag_learned(case: ResourceCase, length: int) -> Launched:
    """With a weight per head and a convolution, both learned, as recommended; a large block."""
    q, k, v = case.tokens(1, HEADS, length)
    mix, conv = torch.empty(HEADS, requires_grad=True), torch.empty(HEADS, TAPS, requires_grad=True)
    options = {"block": case.block, "scale": SCALE, "key_mask": case.mask(1, length), "mix": mix}
    return [kernels.lln_diag(q, k, v, conv=conv, **options, **_scales())], [q, k, v, mix, conv]


def _lln_diag_overlap(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    options = {"block": case.block, "overlap": OVERLAP, "scale": SCALE, **_scales()}
    return [kernels.lln_diag(q, k, v, key_mask=case.mask(1, length), **options)], [q, k, v]


def _block_diagonal(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    options = {"block": case.block, "scale": SCALE, "key_mask": case.mask(1, length)}
    return [kernels.block_diagonal(q, k, v, **options)], [q, k, v]


def _near(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    window = {"block": case.block, "overlap": OVERLAP, "sinks": SINKS, "scale": SCALE}
    return [kernels.near(q, k, v, key_mask=case.mask(1, length), **window)], [q, k, v]


def _near_far(case: ResourceCase, length: int) -> Launched:
    """Far keys outside of blocks; causal ones overlap and have sinks."""
    q, k, v = case.tokens(1, HEADS, length)
    q_far, k_far = q, k
    if case.slots != case.D:
        q_far, k_far, _ = replace(case, D=case.slots).tokens(1, HEADS, length)
    options: dict[str, Any] = {"block": case.block, "scale": SCALE}
    options |= {"gamma": torch.empty(1, HEADS), "key_mask": case.mask(1, length), **_scales()}
    if case.op == "near_far_causal":
        options |= {"overlap": OVERLAP, "sinks": SINKS, "is_causal": True}
    out = kernels.near_far(q, k, v, q_far=q_far, k_far=k_far, **options)
    return [out], [q, k, v] if q_far is q else [q, k, v, q_far, k_far]


def _block_causal(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    options = {"causal_block": case.block, "key_mask": case.mask(1, length), **_scales()}
    return [kernels.block_causal(q, k, v, **options)], [q, k, v]


def _state(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    scales = _scales()
    state = kernels.summarize(k, v, beta=scales["beta"], key_mask=case.mask(1, length))
    return [kernels.read(q, *state, alpha=scales["alpha"])], [q, k, v]


def _varlen(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(length, HEADS)
    starts = torch.arange(SEQUENCES + 1, dtype=torch.int32) * (length // SEQUENCES)
    options = {"key_mask": case.mask(length), **_scales(SEQUENCES)}
    return [kernels.varlen(q, k, v, starts, starts, **options)], [q, k, v]


def _decode(case: ResourceCase, length: int) -> Launched:
    q, k, v = (x.detach() for x in case.tokens(1, HEADS, 1))
    state = torch.empty(1, HEADS, case.D), torch.empty(1, HEADS, case.D, case.D)
    return kernels.decode(q, k, v, *state, key_mask=case.mask(1, 1), **_scales()), []


def _next_token(case: ResourceCase, length: int) -> Launched:
    """A step of serving, with windows that overlap, sinks and twice as many slots as values."""
    q, k, v = (x.detach() for x in case.tokens(1, HEADS, 1))
    local = Near(128, overlap=128, sinks=4, scale=0.125, joint=True)
    slots = 2 * case.D
    far = q.new_empty((1, HEADS, 1, slots))
    memory = {
        name: q.new_empty((1, HEADS, tokens, width))
        for name, tokens, width in (
            *(("near_k", 256, case.D), ("near_v", 256, case.D), ("near_features", 256, slots)),
            *(("sink_k", 4, case.D), ("sink_v", 4, case.D)),
        )
    }
    for prefix in ("", "pending_"):
        memory[f"{prefix}log_mass"] = torch.empty(1, HEADS, slots)
        memory[f"{prefix}mean"] = torch.empty(1, HEADS, slots, case.D)
    constants = {name: torch.empty(HEADS) for name in ("alpha", "beta", "gamma")}
    position = torch.zeros(1, dtype=torch.long)
    return [kernels.next_token(q, k, v, far, far, position, memory, local=local, **constants)], []


def _convolution(case: ResourceCase, length: int) -> Launched:
    *_, v = case.tokens(1, HEADS, length)
    weight = torch.empty(HEADS, TAPS, requires_grad=True)
    return [kernels.convolution(v, weight)], [v, weight]


def _statistics(case: ResourceCase, length: int) -> Launched:
    q, k, _ = case.tokens(1, HEADS, length)
    masks = {name: case.mask(1, length) for name in ("key_mask", "query_mask")}
    sigmas = kernels.standard_deviations(q, k, **masks)
    alike = {"floors": (0.0, 0.0, 1.0)}
    line = {"known": (1.0, 0.0), **alike}
    kernels.match(*sigmas, None, **line)
    kernels.measure(q, k, **masks, **line)
    for root in (False, True):
        curve = {"known": (1.0,) * 6, "coefficients": (1.0,) * 23, "root": root, **alike}
        kernels.match(*sigmas, None, **curve)
        kernels.measure(q, k, **masks, **curve)
    return sigmas, []


OPS: dict[str, Callable[[ResourceCase, int], Launched]] = {
    "bidirectional": _plain,
    "lln_diag": _lln_diag,
    "lln_diag_learned": _lln_diag_learned,
    "lln_diag_overlap": _lln_diag_overlap,
    "causal": _plain,
    "block_diagonal": _block_diagonal,
    "near": _near,
    **dict.fromkeys(NEAR_FAR, _near_far),
    "block_causal": _block_causal,
    "state": _state,
    "varlen": _varlen,
    "decode": _decode,
    "next_token": _next_token,
    "convolution": _convolution,
    "statistics": _statistics,
}


def resource_cases(
    arch: int = 90,
    *,
    ops: Sequence[str] | None = None,
    widths: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    masked: bool = False,
) -> list[ResourceCase]:
    """What is compiled: every op in every dtype, at the widths that its kernels take."""
    for name, given, known in (
        ("op", ops, OPS), ("width", widths, WIDTHS), ("dtype", dtypes, DTYPES),
    ):  # fmt: skip
        if unknown := [value for value in given or () if value not in known]:
            choice = ", ".join(map(str, known))
            raise ValueError(f"{name}={unknown[0]!r} is not known; pass one of {choice}")
    wanted = [
        ResourceCase(op, width, dtype, masked)
        for op in OPS
        for width in WIDTHS
        for dtype in DTYPES
        if op in (ops or OPS) and width in (widths or WIDTHS) and dtype in (dtypes or DTYPES)
    ]
    with planned_for(arch):
        found = [case for case in wanted if case.takes()]
    if not found:
        refused = ", ".join(case.name for case in wanted)
        raise ValueError(f"there are no kernels for {refused}; take another width or dtype")
    return found
