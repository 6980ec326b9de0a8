"""Small expressions that the translations share: shapes of open sizes, masks, dtypes.

A translation is called once, while the graph is built: what it calls on ``op`` becomes nodes. Its
inputs know their dtype and shape, what it computes does not. Batch and length are open, heads and
widths are fixed, so a Reshape copies the batch (0) and finds the length (−1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, TypeVar, Union

from onnxscript import BFLOAT16, BOOL, DOUBLE, FLOAT, FLOAT16, ir, opset18

op: Any = opset18  # the opset that torch.onnx builds with, whichever it writes

# What a translation's inputs are annotated with: onnxscript reads it to tell them from options.
if TYPE_CHECKING:
    Floats = MaybeFloats = MaybeBools = Any
else:
    Floats = TypeVar("Floats", bound=Union[FLOAT, FLOAT16, BFLOAT16, DOUBLE])  # noqa: UP007
    MaybeFloats, MaybeBools = Optional[Floats], Optional[BOOL]  # noqa: UP045
NOTHING = float("-inf")


def wide(x: Any, *others: Any) -> Any:
    """An input in the compute dtype: float64 if it or another input is, else float32."""
    wanted = _compute_dtype(x, *others)
    return x if x.dtype == wanted else op.Cast(x, to=wanted)


def narrow(x: Any, inputs: tuple[Any, ...], keep: bool) -> Any:
    """A result in the dtype of the first input, unless it is to ``keep`` its own."""
    wanted = inputs[0].dtype
    return x if keep or wanted == _compute_dtype(*inputs) else op.Cast(x, to=wanted)


def _compute_dtype(*inputs: Any) -> Any:
    double = any(x.dtype == ir.DataType.DOUBLE for x in inputs)
    return ir.DataType.DOUBLE if double else ir.DataType.FLOAT


def reshaped(x: Any, *sizes: int) -> Any:
    """x in another shape: 0 copies a size, −1 finds the one that is left."""
    return op.Reshape(x, op.Constant(value_ints=list(sizes)))


def axes(*numbers: int) -> Any:
    """Numbers of axes, as nodes take them."""
    return op.Constant(value_ints=list(numbers))


def length(x: Any, axis: int = 2) -> Any:
    """The size of one axis, ``[1]``."""
    return op.Shape(x, start=axis, end=axis + 1)


def missing(tokens: Any, block: int) -> Any:
    """How many tokens the last block lacks, ``[1]``."""
    return op.Mod(op.Neg(tokens), axes(block))


def cut(x: Any, start: Any, stop: Any, axis: int = 2) -> Any:
    """Part of an axis; the ends are ``[1]``."""
    return op.Slice(x, start, stop, axes(axis))


def end() -> Any:
    """A stop beyond every length."""
    return axes(1 << 62)


def padded(x: Any, before: Any, after: Any, value: float = 0.0) -> Any:
    """More tokens on either side of ``[B, H, n, D]``; the numbers of tokens are ``[1]``."""
    none = axes(0, 0)
    pads = op.Concat(none, before, axes(0, 0, 0), after, axes(0), axis=0)
    return op.Pad(x, pads, op.CastLike(op.Constant(value_float=value), x))


def hidden(x: Any, key_mask: Any | None, value: float = 0.0) -> Any:
    """``[B, H, n, D]`` with ``value`` where ``key_mask [B, n]`` is False, whatever stood there."""
    if key_mask is None:
        return x
    return filled(x, op.Unsqueeze(op.Not(key_mask), axes(1, 3)), value)


def filled(x: Any, where: Any, value: float) -> Any:
    """x with ``value`` where ``where`` is True."""
    return op.Where(where, op.CastLike(op.Constant(value_float=value), x), x)


def is_nothing(x: Any) -> Any:
    """Where x is −inf, the logarithm of no key."""
    return op.Equal(x, op.CastLike(op.Constant(value_float=NOTHING), x))


def finite_or_zero(x: Any) -> Any:
    """0 for −inf, where it is a shift inside exp()."""
    return filled(x, is_nothing(x), 0.0)


def per_head(scale: Any) -> Any:
    """``[B, H] -> [B, H, 1, 1]``."""
    return op.Unsqueeze(scale, axes(2, 3))


def repeated(x: Any, of: int, heads: int, width: int) -> Any:
    """Key heads repeated for the query heads that share them, ``[B, Hkv, n, D] -> [B, H, n, D]``.

    ``of`` is the number of key heads.
    """
    if of == heads:
        return x
    many = op.Tile(op.Unsqueeze(x, axes(2)), axes(1, 1, heads // of, 1, 1))
    return reshaped(many, 0, heads, -1, width)


def swapped(x: Any, rank: int) -> Any:
    """The last two axes exchanged."""
    return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def without_dropout(*masks: Any) -> None:
    """Raise where a mask of dropout came with the call: graphs are for evaluation."""
    if any(mask is not None for mask in masks):
        raise ValueError("dropout cannot be exported; call module.eval() first")
