"""The near field beside LLN: which keys are near, and how the two branches are put together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lln.ops.common.arguments import check_positive_int, may_look_at
from lln.protocols import compute_dtype


@dataclass(frozen=True)
class Near:
    """The keys that softmax attends exactly, beside LLN over all others or over all.

    Attributes:
        block, overlap: Queries of block b see the keys C·b − overlap … C·(b+1) + overlap − 1, and
            causal ones no later key than their own.
        sinks: Number of first valid keys that every query sees, too.
        scale: Factor of q·k; None is 1/sqrt(head size).
        joint: One normaliser for both branches, softmax weights for near keys and LLN's for far
            ones (our own, docs/guide/near-and-far.md), in place of a mix of two averages.

    Example:
        >>> out = lln.attention(q, k, v, near=lln.Near(128, overlap=64, joint=True))
    """

    block: int
    _: KW_ONLY
    overlap: int = 0
    sinks: int = 0
    scale: float | None = None
    joint: bool = False

    def __post_init__(self) -> None:
        check_positive_int("block", self.block)
        _check_count("overlap", self.overlap)
        _check_count("sinks", self.sinks)
        if self.scale is not None and not _is_finite(self.scale):
            raise ValueError(
                f"scale={self.scale!r} must be a finite number; leave it out for 1/sqrt(head size)"
            )
        if not isinstance(self.joint, bool):
            raise TypeError(f"joint={self.joint!r} must be True or False")

    def __repr__(self) -> str:
        """As one writes it: without what is the default."""
        given = self.to_json()
        names = given if isinstance(given, Mapping) else {}
        beyond = [f"{name}={value!r}" for name, value in names.items() if name != "block"]
        return f"Near({', '.join([str(self.block), *beyond])})"

    @staticmethod
    def read(given: Any, head_dim: int | None = None) -> Near | None:
        """What is given as ``near``: a number, itself, what :meth:`to_json` made of it, or None.

        Args:
            head_dim: Width of q and k, from which a scale that is not given follows.
        """
        if given is None:
            return None
        if isinstance(given, Near):
            near = given
        elif isinstance(given, Mapping):
            near = _from_mapping(given)
        elif isinstance(given, int) and not isinstance(given, bool):
            near = Near(given)
        else:
            raise TypeError(
                f"near={given!r} is a {type(given).__name__}; pass the size of the blocks, such as "
                "near=128, or lln.Near(128, overlap=64)"
            )
        return near if head_dim is None else near.at(head_dim)

    def at(self, head_dim: int) -> Near:
        """The same with its scale, for queries and keys of this width."""
        if self.scale is not None:
            return self
        window = {"overlap": self.overlap, "sinks": self.sinks, "joint": self.joint}
        return Near(self.block, **window, scale=head_dim**-0.5)

    def within(self, tokens: int) -> Near:
        """The same with blocks and overlap of so many tokens at most; sinks stay."""
        return replace(self, block=min(self.block, tokens), overlap=min(self.overlap, tokens))

    def to_json(self) -> int | dict[str, Any]:
        """As JSON holds it: the size of the blocks, or the fields that differ from the defaults."""
        given = {
            own.name: value
            for own in fields(self)
            if (value := getattr(self, own.name)) != own.default
        }
        return self.block if len(given) == 1 else given

    def shown(self, head_dim: int) -> int | Near:
        """The shortest that says the same for queries and keys of this width."""
        usual = self.scale == head_dim**-0.5
        near = replace(self, scale=None) if usual else self
        short = near.to_json()
        return short if isinstance(short, int) else near

    @staticmethod
    def of_op(options: Mapping[str, Any]) -> Near:
        """The near field that the arguments of an op tell."""
        names = ("block", "overlap", "sinks", "scale")
        return Near(**{name: options[name] for name in names if name in options})

    @property
    def is_plain(self) -> bool:
        """Whether it is blocks alone, with a normaliser of their own."""
        return not (self.overlap or self.sinks or self.joint)

    @property
    def needs(self) -> frozenset[str]:
        """What an implementation must know beyond blocks."""
        return frozenset({"windows"} if self.overlap or self.sinks else ())

    @property
    def window(self) -> tuple[int, int, int]:
        """Block, overlap and sinks."""
        return self.block, self.overlap, self.sinks

    @property
    def blocks(self) -> dict[str, Any]:
        """Arguments of an op that has blocks alone."""
        return {"block": self.block, "scale": self.scale}

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of an implementation; of some only those that are asked for are known."""
        beyond = {"overlap": self.overlap, "sinks": self.sinks}
        return self.blocks | {name: count for name, count in beyond.items() if count}

    def keys(self, is_causal: bool) -> int:
        """How many keys a query may see here: the width of a mask for dropout."""
        return self.block + (1 if is_causal else 2) * self.overlap + self.sinks

    @property
    def ring(self) -> int:
        """How many of the last keys a causal query may see, its own block in full."""
        return self.block + self.overlap

    @property
    def origin(self) -> int:
        """Place in its block of a key that stands where a window begins."""
        return -self.overlap % self.block

    def check_split(self) -> None:
        """Refuse what cannot be where the tokens of a sequence are on several processes."""
        if self.sinks:
            raise ValueError(
                f"sinks={self.sinks} of near is refused where a sequence is split over processes: "
                "the first keys are on one of them alone; leave sinks out, or call lln.attention "
                "on one process"
            )

    def check_slice(self, tokens: int) -> None:
        """Refuse a slice of a sequence over whose edges a block lies, or a window too far."""
        if tokens % self.block:
            raise ValueError(
                f"this process holds {tokens} tokens, not a multiple of the blocks of near, "
                f"{self.block}, so that one would lie on two processes; split the sequence at "
                f"multiples of {self.block}, and pad its end with key_mask"
            )
        if tokens < self.overlap:
            raise ValueError(
                f"this process holds {tokens} tokens, fewer than overlap={self.overlap} of near, "
                "so that windows would reach beyond its neighbours; use fewer processes or a "
                "smaller overlap"
            )

    def first(self, position: Any) -> Any:
        """Where the window of a position begins; negative if before the first token."""
        return position - position % self.block - self.overlap


def _from_mapping(value: Mapping[str, Any]) -> Near:
    known = [own.name for own in fields(Near)]
    for name in value:
        if name not in known:
            raise TypeError(f"near has {name!r}, which it has not; it takes {', '.join(known)}")
    if "block" not in value:
        raise TypeError(f"near={dict(value)!r} has no 'block'; add the size of the blocks")
    return Near(**value)


def read_near(near: Any, head_dim: int, mix: Any = "average", gamma: Any = None) -> Near | None:
    """Read what is given as ``near``, to which ``mix`` and ``gamma`` must belong.

    Raises:
        ValueError: A field is wrong, or an option belongs to a branch that is not asked for.
        TypeError: A number is not one.
    """
    found = Near.read(near, head_dim)
    joint = found is not None and found.joint
    mixed = not (isinstance(mix, str) and mix == "average")
    if found is None and mixed:
        raise ValueError(
            f"mix={_shown(mix)} is of the near field and would be ignored without it; give near, "
            "the size of its blocks, too"
        )
    if joint and mixed:
        raise ValueError(
            f"mix={_shown(mix)} would be ignored: near has one normaliser for both branches; leave "
            "mix or joint=True out"
        )
    if not joint and gamma is not None:
        raise ValueError(
            f"gamma={_shown(gamma)} is of one normaliser for both branches and would be ignored "
            "without it; give near=lln.Near(…, joint=True), or leave gamma out"
        )
    return found


def read_mix(mix: object, heads: int, like: Tensor) -> Tensor | None:
    """The weight of LLN per head, ``[H]``; None for "average"."""
    if isinstance(mix, str):
        if mix != "average":
            learned = (
                " (a parameter is learned by lln.nn.LLNAttention; give its value, mix_weight())"
            )
            raise ValueError(
                f"mix={mix!r} is unknown; pass 'average', a number or a tensor [{heads}]"
                + (learned if mix == "learned" else "")
            )
        return None
    if isinstance(mix, bool) or not isinstance(mix, (Real, Tensor)):
        raise TypeError(
            f"mix is a {type(mix).__name__}; pass 'average', a number or a tensor [heads]"
        )
    dtype = compute_dtype(like)
    weight = mix if isinstance(mix, Tensor) else torch.tensor(float(mix), dtype=dtype)
    if weight.shape not in ((), (heads,)):
        raise ValueError(f"mix has shape {list(weight.shape)}; pass a number or [{heads}]")
    if may_look_at(weight) and not bool(((weight >= 0) & (weight <= 1)).all()):
        raise ValueError(f"mix={weight.tolist()} is not in [0, 1]; it is the weight of LLN")
    return weight.to(device=like.device, dtype=dtype).expand(heads)


def read_causal_block(
    causal_block: object, *, is_causal: bool, near: Near | None = None
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
    if near is not None:
        _check_blocks(causal_block, near)
    return causal_block


def _check_blocks(causal_block: int, near: Near) -> None:
    if near.joint:
        raise ValueError(
            f"causal_block={causal_block} with one normaliser for both branches is not possible; "
            "leave joint=True out"
        )
    if near.needs:
        raise ValueError(
            f"causal_block={causal_block} with overlap={near.overlap}, sinks={near.sinks} of near "
            "is not possible; leave both out"
        )
    if causal_block % near.block:
        raise ValueError(
            f"causal_block={causal_block} is not a multiple of the blocks of near, {near.block}: "
            "one of them would reach into a later causal block; choose a divisor of causal_block"
        )


def check_level(is_causal: bool) -> None:
    """Refuse to measure gamma where that would let the future through."""
    if is_causal:
        raise ValueError(
            "is_causal=True and near with joint=True need gamma: measured from the whole sequence "
            "it would let the future leak into the past. Pass a constant, e.g. from "
            "lln.moments.match_level on calibration data, or use lln.nn.LLNAttention(..., "
            "causal=True, statistics='running')"
        )


def _check_count(name: str, value: object) -> None:
    """An int, zero or above."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}; pass an int")
    if value < 0:
        raise ValueError(f"{name}={value} must not be negative; 0 is none")


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
