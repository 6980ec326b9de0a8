"""Python functions as torch operators: opaque to the compiler, with a gradient of their own.

They know one derivative, the first, backwards. torch.library passes by forward-mode derivatives
without a word, and calls an operator without a gradient a constant: both would be wrong numbers.
Here they are errors.

Under torch.func, torch.library would call an operator once per sample of a vmap, and the
autograd.Function that it makes of a gradient has no ``setup_context``, without which
torch.func.grad refuses it. Here samples join the batch, and grad finds the gradient.

Where nobody watches (:mod:`lln.ops.common.unwatched`) the function is called as it is: the
dispatcher and the autograd layer of torch.library cost more than the launches of a training step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lln.ops.common.arguments import no_autocast, transforms_active
from lln.ops.common.unwatched import argument_types, unwatched

REMEDY = 'impl="reference" has it, in O(N²) time and memory'
# torch.library.custom_op would load the compiler at the first call, and cost more at each.
_LIBRARY = torch.library.Library("lln", "FRAGMENT")


def register(
    schema: str,
    compute: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
    batched: bool = False,
) -> Callable[..., Any]:
    """Define the operator ``lln::<schema>``, and return what calls it.

    Args:
        schema: Name, arguments and results, as torch.library writes them.
        compute, shapes: The operator itself, and one that gives empty results for tracing. A result
            of several that nobody asked for may be None, and is an empty float32 tensor to torch.
        save, differentiate: The halves of the gradient, as for ``torch.library.register_autograd``.
        batched: All tensors begin with the batch, so that vmap may join its samples to it.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _only_tensors(compute), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lln::{name}", shapes, lib=_LIBRARY)
    op = getattr(torch.ops.lln, name).default
    if batched:
        torch.library.register_vmap(f"lln::{name}", _join_batches(op), lib=_LIBRARY)
    transformable, gradient = op, None
    if save is not None and differentiate is not None:
        backward = _once(differentiate)
        torch.library.register_autograd(f"lln::{name}", backward, setup_context=save, lib=_LIBRARY)
        transformable = _transformable(op, save, backward)
        gradient = _function(name, compute, save, backward)
    return _caller(op, transformable, _direct(op, compute, gradient), argument_types(op))


def _only_tensors(compute: Callable[..., Any]) -> Callable[..., Any]:
    """``compute`` as torch.library knows it, which has no results that are None."""

    def computed(*args: Any) -> Any:
        found = compute(*args)
        if not isinstance(found, tuple) or all(x is not None for x in found):
            return found
        first = next(x for x in args if isinstance(x, Tensor))
        empty = functools.partial(first.new_empty, 0, dtype=torch.float32)
        return tuple(empty() if x is None else x for x in found)

    return computed


def without_autocast(compute: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors whose products keep the dtype of their factors under autocast."""

    def computed(*args: Any) -> Any:
        with no_autocast(next(arg for arg in args if isinstance(arg, Tensor))):
            return compute(*args)

    return computed


def _caller(
    op: Callable[..., Any],
    transformable: Callable[..., Any],
    direct: Callable[..., Any],
    types: tuple[frozenset[type], ...],
) -> Callable[..., Any]:
    """Call what the moment asks for; raise at tangents, which all of them would drop.

    ``op`` where a compiler, a mode or a subclass of tensors has to see it, ``transformable`` under
    torch.func, ``direct`` everywhere else.
    """

    def call(*args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
            raise NotImplementedError(
                f"LLN in linear time has no forward-mode derivative (jvp, dual tensors); {REMEDY}"
            )
        if not torch.compiler.is_compiling() and unwatched(args, types):
            return direct(*args)
        return transformable(*args) if transforms_active() else op(*args)

    return call


def _direct(
    op: Callable[..., Any], compute: Callable[..., Any], gradient: Callable[..., Any] | None
) -> Callable[..., Any]:
    """What calls ``compute`` without the dispatcher, recording ``gradient`` where one is wanted."""

    def direct(*args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return op(*args) if gradient is None else gradient(*args)
        with torch._C._AutoDispatchBelowAutograd():  # so that no result is a view of anything
            return compute(*args)

    return direct


def _function(
    name: str,
    compute: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """``compute`` with its gradient as the plainest autograd.Function, the one that costs least."""

    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out = compute(*args)
            save(ctx, args, out)
        return out

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), methods)
    # Function.apply itself looks for torch.func and its wrappers first, which are not here
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _once(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient ``(ctx, *d_out)`` whose results raise where they are differentiated again."""

    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return differentiate(ctx, *gradients)
        with torch.no_grad():
            found = differentiate(ctx, *gradients)
        known = [x for x in (*ctx.saved_tensors, *gradients) if x is not None and x.requires_grad]
        several = isinstance(found, tuple)
        last = tuple(
            x if x is None or not known else _Last.apply(x, *known)
            for x in (found if several else (found,))
        )
        return last if several else last[0]

    return backward


class _Last(torch.autograd.Function):
    """Its first input, as if it came from the others by a function without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, *known: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(f"LLN in linear time has no second derivative; {REMEDY}")


def _transformable(
    op: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """``op`` with its gradient in the form that torch.func takes."""

    class Transformable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            save(ctx, inputs, output)

    Transformable.backward = staticmethod(backward)
    return Transformable.apply


def _join_batches(op: Callable[..., Any]) -> Callable[..., Any]:
    """The vmap rule of an operator all of whose tensors begin with the batch."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        count = info.batch_size
        joined = [
            _join(x, dim, count) if isinstance(x, Tensor) else x
            for x, dim in zip(args, in_dims, strict=True)
        ]
        out = op(*joined)
        if isinstance(out, Tensor):
            return out.unflatten(0, (count, -1)), 0
        return tuple(x.unflatten(0, (count, -1)) for x in out), (0,) * len(out)

    return rule


def _join(x: Tensor, dim: int | None, count: int) -> Tensor:
    """``[count, B, ...]`` to ``[count·B, ...]``, whichever dimension the samples are in."""
    stacked = x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
    return stacked.flatten(0, 1)
