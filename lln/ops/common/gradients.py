"""An operator and its gradient from two functions: what every pair of them shares.

The forward function gives results and what its gradient wants to know again; the backward one takes
that and gives the gradients. Around them stand the same things for every family: the schema of the
gradient, empty inputs, shapes for tracing, what is saved, and which gradients anybody asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.ops.common.registration import register, without_autocast
from lln.ops.common.threads import over_heads

Compute = Callable[..., Any]


def each_like(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised gradients, each in the memory order of its input."""
    return tuple(map(torch.empty_like, inputs))


def contiguous_like(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised gradients that are contiguous, whatever their inputs are."""
    return tuple(x.new_empty(x.shape) for x in inputs)


def by_heads(compute: Compute, shapes: Compute, fills: bool = False) -> Compute:
    """How a CPU runs a function: heads on threads, products in the dtype of their factors."""
    return without_autocast(over_heads(compute, shapes, fills=fills))


def register_with_gradient(
    schema: str,
    *,
    forward: Compute,
    shapes: Compute,
    backward: Compute,
    gradients: Sequence[str] = ("q", "k", "v"),
    slopes: Sequence[str] = (),
    like: Callable[..., tuple[Tensor, ...]] = each_like,
    outputs: int = 1,
    saved_from: int | None = None,
    empty: Sequence[float] = (),
    around: Callable[[Compute, Compute], Compute] | None = None,
    batched: bool = False,
) -> tuple[Callable[..., Any], Callable[..., tuple[Tensor, ...]]]:
    """Define an operator and its gradient; return what gives the outputs, and the gradient.

    Of ``<name>``, ``<name>_train`` or ``<name>_eager`` it is ``<name>_backward``, or
    ``<name>_backward_eager``. Without an element in one of the first three tensors all results are
    constants, and neither function is called.

    Args:
        schema: As for :func:`register`. Tensors come first; they are saved for the gradient.
        forward, shapes: The inputs to the results, and to empty ones.
        backward: ``(*d_outputs, *tensors, *saved, *options, *flags)`` to the gradients of
            ``gradients`` and ``slopes``.
        gradients: Names of inputs that have gradients.
        slopes: More of them, whose gradients cost something by themselves: ``flags`` say which are
            wanted. They are float32; those not wanted may be None.
        like: The inputs ``gradients`` to what their gradients look like, uninitialised.
        outputs: How many results have gradients; those after them only serve ``backward``.
        saved_from: The first result that ``backward`` wants; the first after the outputs if None.
        empty: What the results hold without an element, if not 0.
        around: ``(compute, shapes)`` to what runs, in place of the guard against empty inputs.
        batched: As for :func:`register`.
    """
    name, tensors, options, results = _parsed(schema)
    inputs = _names(tensors)
    places = [inputs.index(x) for x in gradients]
    priced = [inputs.index(x) for x in slopes]
    first = outputs if saved_from is None else saved_from
    gradient_shapes = _shapes(like, [outputs + i for i in places], [outputs + i for i in priced])
    pull = _only_wanted(backward, len(slopes)) if slopes else backward
    if around is None:
        run = _constant_if_empty(forward, shapes, 0, empty)
        run_backward = _constant_if_empty(pull, gradient_shapes, outputs)
    else:
        run, run_backward = around(forward, shapes), around(pull, gradient_shapes)
    given = *(f"Tensor d_{x}" for x in _names(results[:outputs])), *tensors, *results[first:]
    flags = (f"bool need_{slope}" for slope in slopes)
    found = ", ".join(["Tensor"] * len(places + priced))
    gradient = register(
        f"{_of_gradient(name)}({', '.join((*given, *options, *flags))}) -> ({found})",
        run_backward,
        gradient_shapes,
        batched=batched,
    )
    save, differentiate = _halves(gradient, len(tensors), places, priced, outputs, first)
    attend = register(
        schema, run, shapes, save=save, differentiate=differentiate, batched=batched
    )  # fmt: skip
    if outputs == len(results):
        return attend, gradient
    chosen = 0 if outputs == 1 else slice(outputs)
    return lambda *args: attend(*args)[chosen], gradient


def _halves(
    gradient: Compute, count: int, places: list[int], priced: list[int], outputs: int, first: int
) -> tuple[Callable[..., None], Callable[..., tuple[Tensor | None, ...]]]:
    """What saves ``count`` tensors and the results from ``first`` on, and what differentiates."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*inputs[:count], *results[first:])
        ctx.options = inputs[count:]
        ctx.mark_non_differentiable(*results[outputs:])
        ctx.set_materialize_grads(outputs > 1)

    def differentiate(ctx: Any, *d_results: Tensor | None) -> tuple[Tensor | None, ...]:
        need = ctx.needs_input_grad
        found: list[Tensor | None] = [None] * len(need)
        if d_results[0] is not None:
            flags = [need[i] for i in priced]
            pulled = gradient(*d_results[:outputs], *ctx.saved_tensors, *ctx.options, *flags)
            for i, x in zip((*places, *priced), pulled, strict=True):
                found[i] = x if need[i] else None
        return tuple(found)

    return save, differentiate


def _shapes(
    like: Callable[..., tuple[Tensor, ...]], places: list[int], priced: list[int]
) -> Compute:
    """Uninitialised gradients of the arguments at ``places``, and float32 of those ``priced``."""

    def shapes(*args: Any) -> tuple[Tensor, ...]:
        flags = args[len(args) - len(priced) :]
        sizes = (args[i].shape if flag else (0,) for i, flag in zip(priced, flags, strict=True))
        floats = (args[0].new_empty(size, dtype=torch.float32) for size in sizes)
        return *like(*(args[i] for i in places)), *floats

    return shapes


def _only_wanted(backward: Compute, count: int) -> Compute:
    """None for those of the last ``count`` gradients that nobody wants."""

    def pull(*args: Any) -> tuple[Tensor | None, ...]:
        found = backward(*args)
        slopes = (
            x if flag else None for x, flag in zip(found[-count:], args[-count:], strict=True)
        )
        return *found[:-count], *slopes

    return pull


def _parsed(schema: str) -> tuple[str, list[str], list[str], list[str]]:
    """Name, tensors, options and results of an operator."""
    found = re.fullmatch(r"(\w+)\((.*)\) -> \(?(.*?)\)?", schema)
    assert found, schema
    arguments, results = found[2].split(", "), found[3].split(", ")
    tensors = [x for x in arguments if x.startswith("Tensor")]
    return found[1], tensors, arguments[len(tensors) :], results


def _names(parts: Sequence[str]) -> list[str]:
    return [part.split()[-1] for part in parts]


def _of_gradient(name: str) -> str:
    base, eager = name.removesuffix("_train"), name.endswith("_eager")
    return f"{base.removesuffix('_eager')}_backward{'_eager' if eager else ''}"


def _constant_if_empty(
    compute: Compute, shapes: Compute, skipped: int, values: Sequence[float] = ()
) -> Compute:
    """``compute``; but ``values``, or 0, if one of three tensors behind ``skipped`` is empty."""

    def computed(*args: Any) -> Any:
        if 0 in map(Tensor.numel, args[skipped : skipped + 3]):
            made = shapes(*args)
            return tuple(
                x.fill_(value)
                for x, value in zip(made, (*values, *[0.0] * len(made)), strict=False)
            )
        return compute(*args)

    return computed
