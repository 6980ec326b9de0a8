"""One process of the tests of slices.

Every process makes the whole sequence, runs lln.attention on it, runs its slice through
lln.distributed.attention, and writes how far the two are apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lln
from tests.distributed.cases import CASES, Case, tensors
from tests.helpers import run_with_grads

SCALES = ("alpha", "beta", "gamma")
SHARED = tuple(f"d_{name}" for name in SCALES)


def in_slices(case: Case, group: Any) -> dict[str, Tensor]:
    """Output and gradients of this process's slice; of the shared scales, summed over all."""
    learned, masks, d_out = tensors(case, dist.get_world_size(group))
    lengths = case.lengths(dist.get_world_size(group))
    rank = dist.get_rank(group)
    part = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    own = {name: x if name in SCALES else x[:, :, part] for name, x in learned.items()}
    masks = {name: x[:, part] for name, x in masks.items()}

    def call(**own: Tensor) -> Tensor:
        return lln.distributed.attention(**own, **masks, group=group, **case.options)

    got = run_with_grads(call, own, d_out[:, :, part])
    for name in SHARED:
        if name in got:
            dist.all_reduce(got[name], group=group)
    return got


def at_once(case: Case, group: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same by one process, cut to this process's slice."""
    learned, masks, d_out = tensors(case, dist.get_world_size(group))
    wide = {
        n: x if n in SCALES and dtype != torch.float64 else x.to(dtype) for n, x in learned.items()
    }

    def call(**learned: Tensor) -> Tensor:
        return lln.attention(**learned, **masks, **case.options)

    lengths = case.lengths(dist.get_world_size(group))
    rank = dist.get_rank(group)
    part = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    whole = run_with_grads(call, wide, d_out)
    return {name: x if name in SHARED else x[:, :, part] for name, x in whole.items()}


def compare(case: Case, group: Any) -> dict[str, list[float]]:
    """Per tensor: error of the slices, error of one process in the same dtype, largest value."""
    got = in_slices(case, group)
    plain, exact = (at_once(case, group, dtype) for dtype in (case.dtype, torch.float64))
    errors = {}
    for name, x in got.items():
        assert x.isfinite().all(), f"{case.name}: {name} is not finite"
        if x.numel() == 0:
            continue
        truth = exact[name]
        errors[name] = [
            (x - truth).abs().max().item(),
            (plain[name] - truth).abs().max().item(),
            truth.abs().max().item(),
        ]
    return errors


class Traffic:
    """Counts calls and bytes of every collective of torch.distributed while it is entered."""

    NAMES = (
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "gather",
        "isend",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    )

    def __enter__(self) -> Traffic:
        self.calls: list[int] = []
        self._before = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self._before.items():
            setattr(dist, name, self._counting(function))
        return self

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            given = [x if isinstance(x, list) else [x] for x in (*args, *kwargs.values())]
            self.calls.append(max(sum(getattr(x, "nbytes", 0) for x in xs) for xs in given))
            return function(*args, **kwargs)

        return counting

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)


def traffic(
    tokens: int, group: Any, *, measured: bool, is_causal: bool, **options: Any
) -> list[int]:
    """Bytes of each exchange of a forward and backward pass."""
    x = torch.randn(3, 2, 3, tokens, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = x.requires_grad_().unbind()
    options |= {} if measured else {"alpha": 2.0, "beta": 2.0}
    with Traffic() as seen:
        out = lln.distributed.attention(q, k, v, group=group, is_causal=is_causal, **options)
        out.sum().backward()
    return seen.calls


def refusals(group: Any, outsiders: Any) -> dict[str, str]:
    """What bad calls say; no process must be left waiting for another."""
    x = torch.randn(1, 2, 12, 8)
    calls: dict[str, dict[str, Any]] = {
        "block": {"near": 8},
        "causal lengths": {"q": x[:, :, :4], "is_causal": True, "alpha": 1.0, "beta": 1.0},
        "diag lengths": {"q": x[:, :, :4], "near": 4},
        "causal without scales": {"is_causal": True},
        "one scale": {"alpha": 1.0},
        "reference": {"impl": "reference"},
        "joint without gamma": {"near": lln.Near(4, joint=True)},
        "joint by kernels": {"near": lln.Near(4, joint=True), "gamma": 0.0, "impl": "triton"},
        "sinks": {"near": lln.Near(4, sinks=2)},
        "long overlap": {"near": lln.Near(4, overlap=13)},
        "not a member": {"group": outsiders},
    }
    said = {}
    for name, options in calls.items():
        try:
            lln.distributed.attention(**{"q": x, "k": x, "v": x, "group": group, **options})
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def apart(rank: int) -> dict[str, str]:
    """What calls say that are wrong, or other, on process 1 alone; the last one is right again."""
    x = torch.randn(1, 2, 12, 8)
    good: dict[str, Any] = {"q": x, "k": x, "v": x, "alpha": 1.5, "beta": torch.full((2,), 2.0)}
    others: dict[str, dict[str, Any]] = {
        "slice": {"v": x[:, :, :5]},
        "type": {"q": None},
        "mask": {"key_mask": torch.ones(1, 3, dtype=torch.bool)},
        "block": {"near": 8},
        "alpha": {"alpha": 1.6},
        "beta": {"beta": torch.tensor([2.0, 2.1])},
        "order of beta": {"beta": torch.tensor([2.1, 1.9])},
        "measured": {"alpha": None, "beta": None},
        "batch": {name: x.expand(2, -1, -1, -1) for name in "qkv"},
        "causal": {"is_causal": True},
        "rounded": {"alpha": 1.5 + 1e-9},
        "longer": {name: torch.cat([x, x], 2) for name in "qkv"},
    }
    said = {}
    for name, options in others.items():
        try:
            lln.distributed.attention(**{**good, **(options if rank == 1 else {})}, group=None)
            said[name] = "nothing"
        except (AttributeError, TypeError, ValueError) as error:
            said[name] = str(error)
    return said


def found(rank: int) -> dict[str, Any]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {"1": dist.new_group([0]), "2": pairs[rank // 2], "4": None}
    errors = {
        f"{case.name} on {size}": compare(case, group)
        for size, group in groups.items()
        for case in CASES
        if size != "1" or rank == 0
    }
    exchanges = {
        f"{tokens} tokens, {measured=}, {is_causal=}": traffic(
            tokens, None, measured=measured, is_causal=is_causal
        )
        for tokens in (16, 512)
        for measured, is_causal in ((False, False), (True, False), (False, True))
    }
    joint: dict[str, Any] = {"near": lln.Near(8, overlap=4, joint=True), "gamma": 0.0}
    for tokens in (16, 512):
        for is_causal in (False, True):
            sent = traffic(tokens, None, measured=False, is_causal=is_causal, **joint)
            exchanges[f"{tokens} tokens, joint, {is_causal=}"] = sent
    return {
        "errors": errors,
        "exchanges": exchanges,
        "refusals": refusals(None, pairs[1 - rank // 2]),
        "apart": apart(rank),
    }
