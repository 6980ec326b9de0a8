"""An attention operator and its gradient from two functions: what every pair of them shares.

The forward function gives an output and what its gradient wants to know again; the backward one
takes that and gives the gradients. Around them stand the same things for every family: the schemas,
empty inputs, shapes for tracing, what is saved, and which gradients anybody asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.ops.common.registration import register


def register_attention(
    name: str,
    *,
    tensors: str,
    saved: str,
    options: str = "",
    slopes: Sequence[str],
    forward: Callable[..., tuple[Tensor, ...]],
    shapes: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor | None, ...]],
    like: Callable[..., tuple[Tensor, ...]],
    saves_out: bool = False,
    suffix: str = "",
) -> Callable[..., Tensor]:
    """Define ``lln::<name><suffix>`` and ``lln::<name>_backward``; return what gives the output.

    Inputs are ``q, k, v``, tensors like them, then ``slopes``, then what has no gradient. Without
    an element in q, k or v all results are zero, and neither function is called.

    Args:
        tensors, saved, options: Parts of a schema: the inputs, what else ``forward`` returns after
            its output, and numbers.
        slopes: Names of inputs whose gradients cost something by themselves: ``backward`` ends with
            a flag for each that says whether it is wanted.
        forward: ``(*inputs, *options)`` to ``(out, *saved)``.
        shapes: The same, uninitialised.
        backward: ``(dout, *inputs, [out,] *saved, *options, *flags)`` to the gradients of all
            inputs up to the last slope; None where there is none.
        like: ``(*inputs)`` to uninitialised gradients of the inputs before the slopes.
        saves_out: Whether ``backward`` wants the output, too.
        suffix: Where the plain name is taken by an operator that saves nothing.
    """
    names = [part.split()[-1] for part in tensors.split(", ")]
    count, first = len(names), names.index(slopes[0]) if slopes else 3
    end = first + len(slopes)
    kept = f"Tensor out, {saved}" if saves_out else saved

    def backward_shapes(*args: Any) -> tuple[Tensor, ...]:
        given, flags = args[1 : 1 + count], args[len(args) - len(slopes) :]
        sizes = (x.shape if flag else (0,) for x, flag in zip(given[first:end], flags, strict=True))
        return *like(*given), *(given[0].new_empty(size, dtype=torch.float32) for size in sizes)

    def wanted(*args: Any) -> tuple[Tensor | None, ...]:
        found, flags = backward(*args), args[len(args) - len(slopes) :]
        slopes_found = (x if flag else None for x, flag in zip(found[first:], flags, strict=True))
        return *found[:first], *slopes_found

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:count], *(output if saves_out else output[1:]))
        ctx.options = inputs[count:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        none = (None,) * (len(ctx.needs_input_grad) - end)
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        need = ctx.needs_input_grad[:end]
        found = gradient(dout, *ctx.saved_tensors, *ctx.options, *need[first:])
        return *(x if flag else None for x, flag in zip(found, need, strict=True)), *none

    flags = [f"bool need_{slope}" for slope in slopes]
    results = ", ".join(["Tensor"] * end)
    gradient = register(
        f"{name}_backward({_joined('Tensor dout', tensors, kept, options, *flags)}) -> ({results})",
        _zero_if_empty(wanted, backward_shapes, skipped=1),
        backward_shapes,
    )
    attend = register(
        f"{name}{suffix}({_joined(tensors, options)}) -> (Tensor out, {saved})",
        _zero_if_empty(forward, shapes),
        shapes,
        save=save,
        differentiate=differentiate,
    )
    return lambda *args: attend(*args)[0]


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _zero_if_empty(
    compute: Callable[..., Any], shapes: Callable[..., Any], skipped: int = 0
) -> Callable[..., Any]:
    """``compute``, or zeros where q, k or v, behind ``skipped`` arguments, has no element."""

    def computed(*args: Any) -> Any:
        if any(x.numel() == 0 for x in args[skipped : skipped + 3]):
            return tuple(x.zero_() for x in shapes(*args))
        return compute(*args)

    return computed
