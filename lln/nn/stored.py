"""A quantity that a module measures in batches and stores: γ of a head, the mean of the keys.

With the modes of :class:`lln.nn.statistics.RunningStatistics`, which holds those of α and β.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lln.nn import averages
from lln.protocols import HALF


class Stored(nn.Module):
    """A matrix of numbers, constant or averaged over training batches.

    Args:
        kind: "running" moves it towards what training batches measure; "fixed" leaves it alone.
        first: What it is before anything was measured.
    """

    value: Tensor
    batches: Tensor
    _runs: Tensor

    def __init__(
        self,
        kind: str,
        first: Float[Tensor, "R K"],
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.first = first.detach() if first.is_meta else first.detach().cpu()
        device = torch.get_default_device() if device is None else device
        stored = self.first.to(device, copy=True)
        self.register_buffer("value", stored)
        if kind == "running":
            self.register_buffer("batches", torch.zeros((), dtype=torch.long, device=device))
            runs = stored.expand(averages.REMEMBERED_RUNS, 2, -1, -1).clone()
            self.register_buffer("_runs", runs, persistent=False)

    def forward(
        self, measure: Callable[[], Float[Tensor, "R K"]], *, is_causal: bool
    ) -> Float[Tensor, "R K"]:
        """What this pass uses; ``measure`` is called only where a batch counts."""
        if self.kind == "fixed" or not self.training:
            return self.value
        buffers = self.value, self.batches, self._runs
        return averages.follow(measure(), *buffers, is_causal)

    @torch.no_grad()
    def calibrate_(self, name: str, measured: Float[Tensor, "R K"]) -> None:
        """Store what was measured; ``name`` is for the message if it is not finite."""
        if not bool(measured.isfinite().all()):
            raise ValueError(
                f"cannot calibrate {name} on these tensors: they hold no valid token, or NaN or "
                "infinite values"
            )
        self.value.copy_(measured)
        if self.kind == "running":
            self.batches.fill_(1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to what was stored at construction."""
        self.value.copy_(self.first)
        if self.kind == "running":
            self.batches.zero_()
            self._runs.copy_(self.value.expand_as(self._runs))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As torch's; what no state dict holds follows the averages out of the meta device."""
        super()._load_from_state_dict(*args, **kwargs)
        if self.kind == "running" and self._runs.is_meta and not self.value.is_meta:
            self._runs = torch.ones_like(self._runs, device=self.value.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        return super()._apply(keeping_precision(fn), recurse)


def keeping_precision(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of buffers that leaves them in float32 where it would halve them.

    ``module.half()`` calls it so: α in bfloat16 is off by up to 0.4 %.
    """

    def keep(x: Tensor) -> Tensor:
        moved = fn(x)
        return x.to(moved.device) if moved.dtype in HALF else moved

    return keep


def mean_of_finite(measured: Float[Tensor, "B ..."]) -> Tensor:
    """Mean over samples; those that are not finite count as little as those that are not there."""
    finite = measured.isfinite()
    return torch.where(finite, measured, 0).sum(0) / finite.sum(0)


def per_head(name: str, value: float | Sequence[float] | Tensor, heads: int) -> Tensor:
    """A float32 tensor ``[heads]`` of finite numbers."""
    given = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
    found = given.detach().to(torch.float32, copy=True)
    if found.shape not in ((), (1,), (heads,)):
        raise ValueError(
            f"{name} has shape {list(found.shape)}; give a number or one value per head, [{heads}]"
        )
    if not found.is_meta and not all(map(math.isfinite, found.flatten().tolist())):
        raise ValueError(f"{name}={value} must be finite; leave it out and call calibrate_")
    return found.expand(heads).clone()
