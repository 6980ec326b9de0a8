"""Keys in a window around each query, without an N×N matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def segments(x: Tensor, size: int, *, dim: int = 2, value: float = 0) -> Tensor:
    """Cut the tokens along ``dim`` into runs of ``size``, the last one padded with ``value``."""
    rest = -x.shape[dim] % size
    x = F.pad(x, [0, 0] * (x.dim() - dim - 1) + [0, rest], value=value)
    return x.unflatten(dim, (-1, size))


def surroundings(x: Tensor, size: int, *, reach: int, dim: int = 2, value: float = 0) -> Tensor:
    """For each run of ``size`` tokens the run and ``reach`` tokens on either side, along ``dim``.

    ``[..., N, D] -> [..., runs, reach + size + reach, D]``; ``value`` where there is no token.

    Numerics: put together from shifted pieces. ``Tensor.unfold`` would say the same in a line, but
    torch.compile gives its overlapping windows a wrong gradient (PyTorch issues 171370, 172064).
    """
    runs, width = -(-x.shape[dim] // size), size + 2 * reach
    shifts = range(0, width, size)
    tokens = shifts[-1] + runs * size
    before_and_after = [reach, tokens - reach - x.shape[dim]]
    x = F.pad(x, [0, 0] * (x.dim() - dim - 1) + before_and_after, value=value)
    pieces = [
        x.narrow(dim, shift, runs * size)
        .unflatten(dim, (runs, size))
        .narrow(dim + 1, 0, min(size, width - shift))
        for shift in shifts
    ]
    return torch.cat(pieces, dim=dim + 1)


def band(
    size: int, reach: int, *, causal: bool, device: torch.device
) -> Bool[Tensor, "size around"]:
    """Which of the surrounding tokens lie within ``reach`` of each token of a run."""
    own = torch.arange(size, device=device)[:, None]
    other = torch.arange(-reach, size + reach, device=device)
    distance = own - other
    return (distance <= reach) & (distance >= (0 if causal else -reach))


def banded(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H N D"],
    valid: Bool[Tensor, "B N"],
    *,
    reach: int,
    causal: bool = False,
) -> tuple[Float[Tensor, "B H runs size around"], Bool[Tensor, "B 1 runs size around"]]:
    """Scores qᵀk of each query with the keys around its run, and which of them it may see.

    Runs are as long as the reach, so a third to a half of what is computed lies outside the band.
    """
    size = max(reach, 1)
    scores = segments(q, size) @ surroundings(k, size, reach=reach).mT
    there = surroundings(valid.float(), size, reach=reach, dim=1) > 0  # [B, runs, around]
    near = band(size, reach, causal=causal, device=q.device)
    return scores, (there[:, :, None] & near)[:, None]


def half_window(window: int) -> int:
    """Keys on either side."""
    if window < 2 or window % 2:
        raise ValueError(f"window={window} must be even and positive: window/2 keys on either side")
    return window // 2
