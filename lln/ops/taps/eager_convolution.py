"""A convolution over tokens with a gradient of its own: the way on a CPU.

    out_n = Σ_t w_t v_{n+t−before},   dv_n = Σ_t w_{K−1−t} dO_{n+t−(K−1−before)},
    dw_t = Σ_n dO_n · v_{n+t−before}

Blocks of tokens are products of a band matrix and the values around them; the sums of dO vᵀ along
the diagonals of such a band are dw. Tokens go through in chunks, heads on threads; filters are
given for every sample, ``[B, H, K]``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lln.ops.common.features import Scratch, chunks
from lln.ops.common.gradients import by_heads, register_with_gradient

LEAST_BLOCK = 32


def band(weight: Tensor, block: int) -> Tensor:
    """``[H, K] -> [H, block, block + K − 1]``: w[j − i] at (i, j), zero outside the filter."""
    around = block + weight.shape[1] - 1
    rows = torch.nn.functional.pad(weight, (0, block))[:, None].expand(-1, block, -1)
    # each row is one longer than it should be, and so moves the next one on
    return rows.flatten(1)[:, : block * around].unflatten(1, (block, around))


class _Windows:
    """The values around each block of a chunk of tokens, chunk after chunk."""

    def __init__(self, v: Tensor, before: int, taps: int) -> None:
        self.v, self.before, self.taps = v, before, taps
        # a power of two, no shorter than what stands around it
        self.block = max(LEAST_BLOCK, 1 << max(taps - 2, 0).bit_length())
        self._scratch = Scratch(v, v.dtype)

    def parts(self) -> Iterator[slice]:
        """The chunks, of whole blocks but for the last."""
        return chunks(self.v, multiple=self.block)

    def around(self, part: slice) -> Tensor:
        """``[B, H, T, block + K − 1, E]``, a view; zero where nothing stands."""
        batch, heads, tokens, width = self.v.shape
        blocks = -(-(part.stop - part.start) // self.block)
        rows = blocks * self.block + self.taps - 1
        first = part.start - self.before
        here = slice(max(first, 0), min(first + rows, tokens))
        x = self._scratch("around", batch, heads, rows, width)
        x[:, :, : here.start - first] = 0
        x[:, :, here.start - first : here.stop - first] = self.v[:, :, here]
        x[:, :, here.stop - first :] = 0
        return x.unfold(2, self.block + self.taps - 1, self.block).transpose(-1, -2)


def _convolve(v: Tensor, weight: Tensor, before: int) -> Tensor:
    windows, out = _Windows(v, before, weight.shape[2]), torch.empty_like(v)
    bands = band(weight.flatten(0, 1).to(v.dtype), windows.block)
    bands = bands.unflatten(0, weight.shape[:2])[:, :, None]
    for part in windows.parts():
        found = torch.matmul(bands, windows.around(part)).flatten(2, 3)
        out[:, :, part] = found[:, :, : part.stop - part.start]
    return out


def _convolution_backward(
    d_out: Tensor, v: Tensor, weight: Tensor, before: int
) -> tuple[Tensor, Tensor]:
    taps = weight.shape[2]
    windows, d_weight = _Windows(v, before, taps), torch.zeros_like(weight)
    block, around = windows.block, windows.block + taps - 1
    for part in windows.parts():
        near = windows.around(part)  # [B, H, T, around, E]
        gradient = d_out[:, :, part]
        missing = near.shape[2] * block - gradient.shape[2]
        if missing:
            gradient = torch.nn.functional.pad(gradient, (0, 0, 0, missing))
        rows = gradient.unflatten(2, (-1, block)).transpose(2, 3).flatten(3).flatten(0, 1)
        columns = near.transpose(3, 4).flatten(2, 3).flatten(0, 1)
        product = torch.bmm(rows, columns)  # [B·H, block, around]
        diagonals = product.as_strided((len(product), block, taps), (block * around, around + 1, 1))
        d_weight += diagonals.sum(1, dtype=weight.dtype).view_as(weight)
    return _convolve(d_out, weight.flip(2), taps - 1 - before), d_weight


def _shapes(v, weight, before):
    return torch.empty_like(v)


convolution_op, _ = register_with_gradient(
    "convolution_eager(Tensor v, Tensor weight, int before) -> Tensor out",
    forward=_convolve,
    shapes=_shapes,
    backward=_convolution_backward,
    gradients=("v", "weight"),
    around=by_heads,
    batched=True,
)
