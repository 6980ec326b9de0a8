"""What ``lln bench gpu`` measures: ops, shapes and launches, and the bytes each must move.

LLN moves few bytes and computes little per byte, so its floor is memory traffic: u is the size of
one ``[B, H, N, D]`` tensor, and an op that must read and write n of them cannot be faster than
n·u / bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lln_study.bench import decoding, peers, step
from lln_study.bench.cases import FORWARD, SLOTS, TRAINING, Case

TOKENS, WIDE_TOKENS = 65_536, 32_768  # of heads of 64 and of 128
EAGER, HOST, GRAPH, SERIES = "eager", "host", "graph", "series"
LAUNCHES = (EAGER, HOST, GRAPH)
OURS = ("triton", "mixed", "eager")
PASSES = (FORWARD, TRAINING)

# Tensors of [B, H, N, D] that must be read or written: (forward, forward and backward). Both
# branches of LLN+Diag, or near and far keys, in two passes: k, v; q, k, v, out. Backwards: q, dO;
# q, k, v, dO, dq, dk, dv.
_TWO_BRANCHES = (6, 15)
_MEASURED, _CONVOLUTION = (2, 2), (2, 5)
_RECOMMENDED = (6 + _MEASURED[0] + _CONVOLUTION[0], 15 + _MEASURED[1] + _CONVOLUTION[1])
FLOORS: dict[str, tuple[float, float]] = {
    "bidirectional": (4, 11),
    "causal": (4, 11),
    "measured": (4 + _MEASURED[0], 11 + _MEASURED[1]),
    "convolution": _CONVOLUTION,
    "lln_diag": _TWO_BRANCHES,
    "lln_diag_128": _TWO_BRANCHES,
    "lln_diag_256": _TWO_BRANCHES,
    "lln_diag_overlap": _TWO_BRANCHES,
    "lln_diag_causal": _TWO_BRANCHES,
    "near_far": _TWO_BRANCHES,
    "near_far_overlap": _TWO_BRANCHES,
    "near_far_causal": _TWO_BRANCHES,
    # q and k of their own for far keys: k_far, v; q, k, v, q_far, out. Backwards: q_far, dO; q, k,
    # v, dO, dq, dk, dv, q_far, k_far and their gradients.
    "near_far_slots": (5 + 2 * SLOTS, 5 + 2 * SLOTS + 8 + 5 * SLOTS),
    "recommended": _RECOMMENDED,
}


@dataclass(frozen=True)
class Timed:
    """A case and how it is launched.

    From Python (``EAGER``), as a captured CUDA graph (``GRAPH``), or as one tenth of a graph of ten
    calls in a row (``SERIES``, for tiles): what a call costs inside a captured step, without its
    launch. The time that Python alone takes to launch it is ``HOST``.
    """

    case: Case
    launch: str


def floor_share(case: Case, milliseconds: float, bandwidth: float) -> float | None:
    """Bytes that must move ÷ (time × copy bandwidth); 1 is the physical limit."""
    if case.op not in FLOORS or case.impl not in OURS:
        return None
    unit = case.B * case.H * case.N * case.D * getattr(torch, case.dtype).itemsize
    units = FLOORS[case.op][0 if case.passes == FORWARD else 1]
    return round(units * unit / (milliseconds * 1e-3 * bandwidth), 4)


BASE = Case("bidirectional", "triton", 4096, H=12, D=64, dtype="bfloat16", device="cuda")


def _cases(op: str, impl: str, lengths: Sequence[int], tokens: int = TOKENS, **change: Any):
    return [
        replace(BASE, op=op, impl=impl, N=n, B=tokens // n, passes=p, **change)
        for n in lengths
        for p in PASSES
    ]


def gpu_cases(*, quick: bool = False, ops: Sequence[str] | None = None) -> list[Timed]:
    """All that is measured, in order, or only these ops.

    What the targets are about comes first, one length of everything before the next, so that a run
    that is cut short has a row for each of them.

    Raises:
        ValueError: An op that is not measured.
    """
    found = sorted(_all_cases(quick), key=_rank)  # cases of one rank stay in their order
    known = sorted({timed.case.op for timed in found})
    for op in ops or ():
        if op not in known:
            raise ValueError(f"op={op!r} is not measured; choose from {', '.join(known)}")
    return [timed for timed in found if not ops or timed.case.op in ops]


LENGTH_RANKS = {4096: 0, 512: 1, 16_384: 1}  # 2 for others
DECODE_RANKS = {8192: 0, 65_536: 1}
# Of which the targets speak: by launch, implementations and ops.
_TARGETS = {
    GRAPH: {
        "triton": (
            *("bidirectional", "lln_diag", "lln_diag_128", "lln_diag_overlap", "lln_diag_causal"),
            *("causal", "near_far", "near_far_overlap", "decode"),
        ),
        "cudnn": ("bidirectional",),
        "sdpa": ("decode",),
        "fla": ("causal",),
    },
    EAGER: {
        "triton": ("bidirectional", "decode"),
        "cudnn": ("bidirectional",),
        "sdpa": ("decode", step.OP),
        "recommended": (step.OP,),
    },
    HOST: {"triton": ("bidirectional", "measured")},
}


def _rank(timed: Timed) -> tuple[bool, int]:
    """What is measured earlier has a lower one."""
    case = timed.case
    is_target = case.op in _TARGETS[timed.launch].get(case.impl, ()) and case.dtype == "bfloat16"
    if case.op == "decode":
        return not is_target, DECODE_RANKS.get(case.N, 2)
    return not is_target, LENGTH_RANKS.get(case.N, 2)


def _all_cases(quick: bool) -> list[Timed]:
    """65,536 tokens in sequences of every length, other settings, widths and dtypes, and batch 1.

    Then what is not a call of attention: steps of decoding and of training.
    """
    lengths = (4096, 16_384) if quick else (512, 2048, 4096, 16_384, 65_536)
    main = ("bidirectional", "lln_diag", "causal")
    ours = [case for op in main for case in _cases(op, "triton", lengths)]
    softmax = [n for n in lengths if n != 2048]
    cudnn = _cases("bidirectional", "cudnn", softmax) + _cases("causal", "cudnn", (4096, 16_384))
    timed = [Timed(c, launch) for c in ours + cudnn for launch in (GRAPH, EAGER)]
    timed += _settings(quick) + _batch_one(quick) + _wide_heads()
    timed += _measured_scales(quick) + _other_libraries(quick)
    # Plain PyTorch reads sizes on the host, which a graph cannot capture.
    plain = [Timed(case, EAGER) for op in main[:2] for case in _cases(op, "eager", (4096,))]
    half = [c for op in main for c in _cases(op, "triton", (4096,), dtype="float16")]
    more = _cases("bidirectional", "flash", (4096,)) + _cases("causal", "flash", (4096,))
    more += [c for i in ("triton", "eager", "torch") for c in _cases("convolution", i, (4096,))]
    timed += [Timed(case, GRAPH) for case in half + more] + plain + _steps(quick)
    return list(dict.fromkeys(timed))


def _steps(quick: bool) -> list[Timed]:
    """Steps of decoding, and of training."""
    decoded = decoding.decode_cases()
    found = [Timed(case, launch) for case in decoded for launch in (GRAPH, EAGER)]
    trained = step.step_cases(step.LENGTHS[-1:] if quick else step.LENGTHS)
    return found + [Timed(case, EAGER) for case in trained]


def _settings(quick: bool) -> list[Timed]:
    """Large blocks, windows that overlap, near and far under one normaliser, the recommended."""
    lengths = (4096,) if quick else (512, 4096, 16_384)
    ops = (
        *("recommended", "lln_diag_128", "lln_diag_256", "lln_diag_overlap", "lln_diag_causal"),
        *("near_far", "near_far_overlap", "near_far_causal", "near_far_slots"),
    )
    cases = [case for op in ops for case in _cases(op, "triton", lengths)]
    return [Timed(case, launch) for case in cases for launch in (GRAPH, EAGER)]


def _batch_one(quick: bool) -> list[Timed]:
    """Twelve heads of one sequence, where Python and the number of programs set the time."""
    lengths = (512, 4096, 16_384) if quick else (512, 1024, 2048, 4096, 8192, 16_384)
    return [
        Timed(replace(BASE, N=n, B=1, impl=impl, passes=p), launch)
        for n in lengths
        for impl in ("triton", "cudnn", "flash")
        for p in PASSES
        for launch in (EAGER, GRAPH)
    ]


def _wide_heads() -> list[Timed]:
    """Heads of 128, 32,768 tokens."""
    ops = (
        *("bidirectional", "lln_diag", "lln_diag_128", "causal", "lln_diag_causal", "near_far"),
        "recommended",
    )
    wide = {"tokens": WIDE_TOKENS, "D": 128}
    cases = [case for op in ops for case in _cases(op, "triton", (4096,), **wide)]
    cases += _cases("bidirectional", "cudnn", (4096,), **wide)
    cases += _cases("causal", "cudnn", (4096,), **wide)
    return [Timed(case, launch) for case in cases for launch in (GRAPH, EAGER)]


def _measured_scales(quick: bool) -> list[Timed]:
    """α and β measured, beside the same with both given: what they add, on the host, too."""
    lengths = (4096, 16_384) if quick else (512, 4096, 16_384)
    cases = _cases("measured", "triton", lengths)
    timed = [Timed(case, launch) for case in cases for launch in (GRAPH, EAGER, HOST)]
    given = [Timed(replace(case, op="bidirectional"), HOST) for case in cases]
    return timed + given


def _other_libraries(quick: bool) -> list[Timed]:
    """Linear attention of another library, where it is installed."""
    lengths = (4096, 16_384) if quick else (512, 4096, 16_384)
    cases = _cases(peers.OP, peers.IMPL, lengths) if peers.installed() else []
    return [Timed(case, launch) for case in cases for launch in (GRAPH, EAGER)]
