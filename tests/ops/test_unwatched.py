"""Calls that nobody watches pass by the dispatcher; all others meet the registered operator."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lln
from lln.ops.common.unwatched import argument_types, unwatched

SCALES = {"alpha": 1.3, "beta": 1.1}
OPTIONS = [{}, {"near": 4}, {"is_causal": True}, {"near": lln.Near(4, joint=True)}]
options = pytest.mark.parametrize("options", OPTIONS, ids=str)


class Seen(TorchDispatchMode):
    """Notes the operators of ours that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lln":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def inputs(requires_grad: bool = True) -> list[torch.Tensor]:
    return [torch.randn(2, 9, 3, 8).transpose(1, 2).requires_grad_(requires_grad) for _ in "qkv"]


def attend(q, k, v, options):
    level = {"gamma": 0.3} if "mix" in options else {}
    return lln.attention(q, k, v, **SCALES, **level, **options, impl="eager")


def nodes(out: torch.Tensor) -> set[str]:
    """Names of the nodes of a graph."""
    found, left = set(), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [parent for parent, _ in node.next_functions]
    return {node.name() for node in found}


@options
def test_a_mode_sees_what_is_passed_by_without_one(options):
    """The same numbers to the last bit; a node of torch.library only where somebody watches."""
    given = inputs()
    plain = attend(*given, options)
    with Seen() as seen:
        watched = attend(*given, options)
    assert seen.names and watched.equal(plain)
    assert not any("Generated" in name for name in nodes(plain))
    assert any("GeneratedBackwardFor_lln" in name for name in nodes(watched))
    d_out = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, given, d_out, retain_graph=True)
    count = len(seen.names)
    with seen:
        found = torch.autograd.grad(plain, given, d_out)  # the graph of a call that nobody watched
    assert len(seen.names) > count
    registered = torch.autograd.grad(watched, given, d_out)
    for one, other, another in zip(found, expected, registered, strict=True):
        assert one.equal(other) and another.equal(other)
    with torch.no_grad():
        assert attend(*given, options).equal(plain)
    with torch.inference_mode():
        assert attend(*given, options).equal(plain)


@options
def test_results_are_no_views(options):
    """What a forward pass takes a view of may be changed in place all the same."""
    out = attend(*inputs(), options)
    out.mul_(2).sum().backward()
    with torch.no_grad():
        assert not attend(*inputs(), options)._is_view()


def test_a_negated_view_is_read_as_its_values():
    """Of such a view the memory holds the opposite: only the dispatcher knows."""
    _, k, v = inputs(requires_grad=False)
    q = torch.view_as_complex(torch.randn(2, 3, 9, 8, 2)).conj().imag
    assert q.is_neg()
    assert attend(q, k, v, {}).equal(attend(q.resolve_neg(), k, v, {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Renamed(torch.Tensor):
    pass


def test_who_watches():
    attend(*inputs(), {})  # registers the operator
    types = argument_types(torch.ops.lln.read_eager.default)
    x = torch.randn(2, 3)
    given = (x, torch.nn.Parameter(x), x, x, None, False)
    assert unwatched(given, types)
    assert not unwatched(given[:-1], types)
    for other in (
        x.to("meta"), torch.view_as_complex(torch.randn(2, 2)).conj().imag, x.to_sparse(),
        torch._efficientzerotensor(2), Renamed(x), 1.0, None,
    ):  # fmt: skip
        assert not unwatched((other, *given[1:]), types)
    for mode in (Function(), Seen(), torch.device("cpu")):
        with mode:
            assert not unwatched(given, types)
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with context:
            assert unwatched(given, types)
    seen = []

    def look(x):
        seen.append(unwatched(given, types))
        return x + 1

    torch.vmap(look)(x)
    torch.func.grad(lambda x: look(x).sum())(x)
    assert seen == [False, False]


def test_numbers_are_not_converted():
    """An int for a float is the dispatcher's to convert."""
    attend(*inputs(), {"near": 4})
    op = torch.ops.lln.near_eager.default
    types = argument_types(op)
    x = torch.randn(1, 1, 4, 4)
    sinks = {"sink_k": x[:, :, :0], "sink_v": x[:, :, :0], "sink_position": torch.zeros(1, 0)}
    rest = {"block": 4, "overlap": 0, "origin": 0, "causal": False, **sinks}
    names = [argument.name for argument in op._schema.arguments]

    def given(scale):
        known = {**rest, "scale": scale, "q": x, "k": x, "v": x}
        return tuple(known.get(name) for name in names)

    assert unwatched(given(0.5), types)
    assert not unwatched(given(1), types)
