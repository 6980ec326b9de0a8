"""A convolution over tokens with one filter per head, as products with a band matrix.

    out_n = Σ_t w_t v_{n + t − before},   zero outside the sequence

with before = K/2, or K − 1 where a token may look at itself and those before it only.

A block of the output is the product of a band matrix [block, block + K − 1], the same for all
blocks of a head, and the values around the block: linear in N, what matrix units are made for, and
with gradients that are the same on every run. On a CUDA device one kernel does the same without
copies of the values (``lln.ops.triton.convolution``), on a CPU an operator whose heads are on
threads (``lln.ops.taps.eager_convolution``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops import triton
from lln.ops.common.arguments import exported_for_any, hide
from lln.ops.dispatch import may_launch
from lln.ops.taps.eager_convolution import LEAST_BLOCK, band, convolution_op
from lln.protocols import Call

MOST_TAPS = 65  # of the kernel, whose band matrices stay in registers


def check_conv(conv: int, *, causal: bool) -> None:
    """The width of a convolution that is added to an attention.

    Raises:
        ValueError: It is negative, or even where a token has equally many neighbours on each side.
    """
    if conv < 0 or (conv and conv % 2 == 0 and not causal):
        kind = "a width" if causal else "an odd width"
        raise ValueError(f"conv={conv} must be {kind}, or 0 for none")


def draw_filters_(weight: Tensor, taps: int) -> Tensor:
    """Fill filters of ``taps`` weights as torch does those of a depth-wise convolution."""
    return torch.nn.init.uniform_(weight, -(taps**-0.5), taps**-0.5)


def convolve_tokens(
    v: Float[Tensor, "B Hkv N E"],
    weight: Float[Tensor, "Hkv K"],
    *,
    causal: bool = False,
    onto: Float[Tensor, "B H N E"] | None = None,
    key_mask: Bool[Tensor, "B N"] | None = None,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    """v convolved over its tokens by the filter of its head, in the dtype of v.

    Args:
        causal: The last weight is that of the token itself; otherwise the one in the middle is, and
            K is odd.
        onto: What the result is added to; a head of v serves all heads of it that share one.
        key_mask: True at valid tokens; the others count as zeros, whatever they hold.
        impl: As in :func:`lln.attention`: "eager" and "reference" launch no kernel of ours.

    Numerics: the kernel adds to ``onto`` in float32 and rounds once.

    Example:
        >>> v, weight = torch.ones(1, 1, 4, 1), torch.ones(1, 3)
        >>> convolve_tokens(v, weight).flatten().tolist()
        [2.0, 3.0, 3.0, 2.0]
        >>> convolve_tokens(v, weight, causal=True).flatten().tolist()
        [1.0, 2.0, 3.0, 3.0]
    """
    if may_launch(impl) and _kernel_takes(v, weight, onto):
        return triton.convolution(v, weight, causal=causal, onto=onto, key_mask=key_mask)
    return add_shared(onto, convolve_by_blocks(hide(v, key_mask), weight, causal=causal, impl=impl))


def add_shared(onto: Tensor | None, near: Tensor) -> Tensor:
    """Return ``near``, or the sum of both, each head of ``near`` for those that share it."""
    if onto is None:
        return near
    group = onto.shape[1] // near.shape[1]
    return onto + (near if group == 1 else near.repeat_interleave(group, dim=1))


def convolve_next(
    v: Float[Tensor, "B H N E"],
    weight: Float[Tensor, "H K"],
    past: Float[Tensor, "B H before E"],
    *,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    """The causal convolution of tokens that follow others.

    Args:
        past: The K − 1 values before v; zeros at the start of a stream.
    """
    together = torch.cat([past.to(v), v], 2)
    if v.shape[2] == 1:
        return torch.einsum("hk,bhke->bhe", weight.to(v), together)[:, :, None]
    return convolve_tokens(together, weight, causal=True, impl=impl)[:, :, past.shape[2] :]


def last_values(
    v: Float[Tensor, "B H N E"], past: Float[Tensor, "B H before E"]
) -> Float[Tensor, "B H before E"]:
    """The ``past`` of what follows v, without keeping the rest of v in memory."""
    new = v[:, :, max(0, v.shape[2] - past.shape[2]) :]
    return torch.cat([past[:, :, new.shape[2] :], new], 2)


def _kernel_takes(v: Tensor, weight: Tensor, onto: Tensor | None) -> bool:
    if weight.shape[1] > MOST_TAPS or (onto is not None and onto.dtype != v.dtype):
        return False
    return triton.refuses(Call("convolution", v, v, v)) is None


def convolve_by_blocks(
    v: Float[Tensor, "B H N E"],
    weight: Float[Tensor, "H K"],
    *,
    causal: bool = False,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    """:func:`convolve_tokens` without a kernel, on any device.

    Operations of torch alone, which have all derivatives, where impl="reference" asks for them, a
    compiler looks on, or there is no CPU, which has a quicker way.
    """
    before = weight.shape[1] - 1 if causal else weight.shape[1] // 2
    if exported_for_any(v.shape[2]):
        return _depthwise(v, weight.to(v.dtype), before)
    if v.device.type != "cpu" or impl == "reference" or torch.compiler.is_compiling():
        return _by_blocks(v, weight, before)
    return convolution_op(v, weight.expand(len(v), -1, -1), before)


def _depthwise(v: Tensor, weight: Tensor, before: int) -> Tensor:
    """Convolve by torch, which needs no blocks: for programs that take any length."""
    padded = F.pad(v, (0, 0, before, weight.shape[1] - 1 - before))
    return F.conv2d(padded, weight[:, None, :, None], groups=v.shape[1])


def _by_blocks(v: Tensor, weight: Tensor, before: int) -> Tensor:
    batch, heads, tokens, width = v.shape
    taps = weight.shape[1]
    if tokens == 0:
        return v
    block = max(LEAST_BLOCK, 1 << (taps - 1).bit_length())
    blocks = -(-tokens // block)
    padded = F.pad(v, (0, 0, before, (blocks + 1) * block - tokens - before))
    # [H, block, B · (blocks + 1) · E]: a product per head, its columns all blocks of all samples
    columns = padded.unflatten(2, (blocks + 1, block)).permute(1, 3, 0, 2, 4).flatten(2)
    own, next_ = band(weight.to(v.dtype), block).split([block, taps - 1], dim=2)
    # a block of the output is a product of the block that starts with it and one of the next
    sizes = batch, blocks + 1, width
    first = torch.bmm(own, columns).unflatten(2, sizes)[..., :-1, :]
    second = torch.bmm(next_, columns[:, : taps - 1]).unflatten(2, sizes)[..., 1:, :]
    out = (first + second).permute(2, 0, 3, 1, 4)
    return out.reshape(batch, heads, blocks * block, width)[:, :, :tokens]
