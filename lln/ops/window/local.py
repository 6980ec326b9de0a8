"""The softmax branch beside LLN: which keys are near, and how the two branches are put together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lln.ops.common.arguments import check_positive_int, may_look_at
from lln.protocols import compute_dtype

#: How the branches are put together, where that is a word.
MIXES = ("average", "joint")


@dataclass(frozen=True)
class Local:
    """The near field of LLN+Diag, its arguments checked.

    Attributes:
        block, overlap: Queries of block b see the keys C·b − overlap … C·(b+1) + overlap − 1.
        sinks: Number of first valid keys that every query sees.
        scale: Factor of q·k.
        joint: Whether one normaliser holds for both branches, ``mix="joint"``.
    """

    block: int
    overlap: int
    sinks: int
    scale: float
    joint: bool

    @property
    def window(self) -> tuple[int, int, int]:
        """Block, overlap and sinks."""
        return self.block, self.overlap, self.sinks

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the ops :func:`lln_diag` and :func:`near_far`."""
        window = {"block": self.block, "overlap": self.overlap, "sinks": self.sinks}
        return {**window, "scale": self.scale}

    def columns(self, is_causal: bool) -> int:
        """How many keys a query may see here: the width of a mask for dropout."""
        return self.block + (1 if is_causal else 2) * self.overlap + self.sinks


def read_local(
    *,
    head_dim: int,
    diag_block: int | None,
    diag_overlap: int = 0,
    sinks: int = 0,
    scale: float | None = None,
    mix: Any = "average",
    gamma: Any = None,
) -> Local | None:
    """Check the options of the local branch; None without ``diag_block``.

    ``mix`` is "joint" or anything else; its other values are not looked at.

    Raises:
        ValueError: An option is wrong, or belongs to a branch that is not asked for.
        TypeError: A number is not one.
    """
    joint = isinstance(mix, str) and mix == "joint"
    averaged = isinstance(mix, str) and mix == "average"
    if diag_block is None:
        _refuse_without_block(diag_overlap, sinks, scale, mix, joint or not averaged)
    if not joint and gamma is not None:
        raise ValueError(
            f"gamma={_shown(gamma)} is of one normaliser for both branches and would be ignored "
            f"with mix={_shown(mix)}; give mix='joint' too, or leave gamma out"
        )
    if diag_block is None:
        return None
    check_positive_int("diag_block", diag_block)
    _check_count("diag_overlap", diag_overlap)
    _check_count("sinks", sinks)
    factor = head_dim**-0.5 if scale is None else scale
    if not isinstance(factor, (int, float)) or not math.isfinite(factor):
        raise ValueError(f"scale={scale!r} must be a finite number, 1/sqrt(head size) by default")
    return Local(diag_block, diag_overlap, sinks, float(factor), joint)


def read_mix(mix: object, heads: int, like: Tensor) -> Tensor | None:
    """The weight of LLN per head, ``[H]``; None for "average" and "joint"."""
    if isinstance(mix, str):
        if mix not in MIXES:
            learned = (
                " (a parameter is learned by lln.nn.LLNAttention; give its value, mix_weight())"
            )
            raise ValueError(
                f"mix={mix!r} is unknown; pass 'average', 'joint', a number or a tensor [{heads}]"
                + (learned if mix == "learned" else "")
            )
        return None
    if isinstance(mix, bool) or not isinstance(mix, (Real, Tensor)):
        raise TypeError(
            f"mix is a {type(mix).__name__}; pass 'average', 'joint', a number or a tensor [heads]"
        )
    dtype = compute_dtype(like)
    weight = mix if isinstance(mix, Tensor) else torch.tensor(float(mix), dtype=dtype)
    if weight.shape not in ((), (heads,)):
        raise ValueError(f"mix has shape {list(weight.shape)}; pass a number or [{heads}]")
    if may_look_at(weight) and not bool(((weight >= 0) & (weight <= 1)).all()):
        raise ValueError(f"mix={weight.tolist()} is not in [0, 1]; it is the weight of LLN")
    return weight.to(device=like.device, dtype=dtype).expand(heads)


def read_causal_block(
    causal_block: object, *, is_causal: bool, local: Local | None = None
) -> int | None:
    """Check the blocks of causal attention; None where they hold one token each.

    Raises:
        ValueError: It is not positive, attention is not causal, or the diagonal branch has blocks,
            windows or a normaliser that do not go with it.
        TypeError: It is not an int.
    """
    if causal_block is None:
        return None
    check_positive_int("causal_block", causal_block)
    assert isinstance(causal_block, int)
    if not is_causal:
        raise ValueError(
            f"causal_block={causal_block} is of causal attention, and would be ignored without it; "
            "give is_causal=True (causal=True in modules) too"
        )
    if causal_block == 1:
        return None
    if local is not None:
        _check_local_blocks(causal_block, local)
    return causal_block


def _check_local_blocks(causal_block: int, local: Local) -> None:
    if local.joint:
        raise ValueError(
            f"causal_block={causal_block} with mix='joint' is not possible; average the branches "
            "(mix='average', a number or, in modules, 'learned')"
        )
    if local.overlap or local.sinks:
        raise ValueError(
            f"causal_block={causal_block} with diag_overlap={local.overlap}, sinks={local.sinks} "
            "is not possible; leave both out"
        )
    if causal_block % local.block:
        raise ValueError(
            f"causal_block={causal_block} is not a multiple of diag_block={local.block}: a block "
            "of the diagonal branch would reach into a later causal block; choose a divisor of "
            "causal_block as diag_block"
        )


def check_level(is_causal: bool) -> None:
    """Refuse to measure gamma where that would let the future through."""
    if is_causal:
        raise ValueError(
            "is_causal=True and mix='joint' need gamma: measured from the whole sequence it would "
            "let the future leak into the past. Pass a constant, e.g. from "
            "lln.moments.match_level on calibration data, or use lln.nn.LLNAttention(..., "
            "causal=True, mix='joint', statistics='running')"
        )


def _refuse_without_block(
    overlap: int, sinks: int, scale: float | None, mix: Any, mixed: bool
) -> None:
    """No option of the local branch without one."""
    if scale is not None:
        raise ValueError(
            f"scale={scale!r} is of the diagonal branch and would be ignored without diag_block; "
            "give diag_block too. LLN itself is scaled by alpha and beta"
        )
    given = {"diag_overlap": overlap or None, "sinks": sinks or None, "mix": mix if mixed else None}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={_shown(value)} is of the diagonal branch and would be ignored without "
                "diag_block; give diag_block too"
            )


def _check_count(name: str, value: object) -> None:
    """An int, zero or above."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}; pass an int")
    if value < 0:
        raise ValueError(f"{name}={value} must not be negative; 0 is none")


def _shown(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
