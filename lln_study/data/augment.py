"""Changed images on the device: a pure function of (seed, step), the same for any split of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from lln.records.seeds import generator

MEAN, DEVIATION = 0.5, 0.25  # of the values a network gets
_DRAWS = 6


@dataclass(frozen=True)
class Augmentation:
    """What training changes in an image.

    Attributes:
        flip: Mirror half of the images.
        shift: Move by up to so many pixels; what enters at the edge is mirrored.
        jitter: Brightness, contrast and saturation change by factors in 1 ± jitter.
    """

    flip: bool = True
    shift: int = 4
    jitter: float = 0.2


def augment(
    pixels: UInt8[Tensor, "B side side channels"],
    how: Augmentation,
    *,
    seed: int,
    step: int,
    rows: slice,
    batch_size: int,
) -> Float[Tensor, "B channels side side"]:
    """Values for the network: flipped, moved and recoloured.

    Args:
        rows: Which rows of the global batch of ``step`` these images are.
    """
    drawn = torch.rand(batch_size, _DRAWS, generator=generator(seed, "augment", step))
    drawn = drawn[rows].to(pixels.device, non_blocking=True)
    side = pixels.shape[1]
    moved = torch.arange(side, device=pixels.device)
    shift = torch.floor(drawn[:, :2] * (2 * how.shift + 1)).long() - how.shift
    down, across = (mirror(moved + shift[:, axis, None], side) for axis in (0, 1))
    if how.flip:
        across = torch.where(drawn[:, 2, None] < 0.5, across, across.flip(1))
    batch = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    values = pixels[batch, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2).float() / 255
    return standardized(_recoloured(values, 1 + how.jitter * (2 * drawn[:, 3:] - 1)))


def mirror(index: Tensor, side: int) -> Tensor:
    """Reflect indices beyond an edge: -1 -> 1, side -> side - 2."""
    index = index.abs()
    return torch.where(index < side, index, 2 * (side - 1) - index)


def _recoloured(values: Tensor, factor: Float[Tensor, "B 3"]) -> Tensor:
    brightness, contrast, saturation = (factor[:, i, None, None, None] for i in range(3))
    values = values * brightness
    values = torch.lerp(values.mean((1, 2, 3), keepdim=True), values, contrast)
    if values.shape[1] > 1:
        values = torch.lerp(values.mean(1, keepdim=True), values, saturation)
    return values.clamp(0, 1)


def plain(pixels: UInt8[Tensor, "B side side channels"]) -> Float[Tensor, "B channels side side"]:
    """Values for the network, unchanged: for evaluation."""
    return standardized(pixels.permute(0, 3, 1, 2).float() / 255)


def standardized(values: Tensor) -> Tensor:
    return (values - MEAN) / DEVIATION
