"""Nyströmformer: softmax attention through landmarks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.baselines.base import Core, Layer, masked_softmax, valid
from lln.baselines.pseudoinverse import pseudoinverse
from lln.ops.common.arguments import check_positive_int
from lln.ops.taps.convolution import convolve_tokens, draw_filters_


class Nystromformer(Core):
    r"""Nyströmformer (Xiong et al. 2021, arXiv:2102.03902).

        out = softmax(Q K̃ᵀ) softmax(Q̃ K̃ᵀ)⁺ softmax(Q̃ Kᵀ) V + conv(V),  scores divided by √d

    Q̃, K̃ are means over m segments, ⁺ a pseudoinverse by six iterations, conv a depthwise
    convolution over tokens, one kernel per head. O(N m d) time, O(N m) memory.

    Args:
        landmarks: m, below ``max_length``: with as many landmarks as tokens this is exact softmax.
        iterations: Of the pseudoinverse.
        kernel_size: Of the convolution, odd; 0 leaves it out.

    Numerics: a sample's *valid* tokens are cut into m segments of (almost) equal size, so padding
    enters no mean and changes nothing; fewer than m tokens make as many landmarks.
    """

    crosses = False

    def __init__(
        self, layer: Layer, *, landmarks: int = 64, iterations: int = 6, kernel_size: int = 33
    ) -> None:
        super().__init__(layer)
        check_positive_int("landmarks", landmarks)
        if layer.max_length is not None and landmarks >= layer.max_length:
            raise ValueError(
                f"landmarks={landmarks} with max_length={layer.max_length} would run exact softmax "
                "attention; choose fewer landmarks, or the mechanism 'softmax'"
            )
        if kernel_size and kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} is even; pass an odd number or 0")
        self.landmarks, self.iterations, self.kernel_size = landmarks, iterations, kernel_size
        self.conv = None
        if kernel_size:
            self.conv = nn.Parameter(torch.empty(layer.num_heads, 1, kernel_size, 1))
            draw_filters_(self.conv, kernel_size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        seen = valid(q, key_mask)
        means, full = segments(seen, self.landmarks)  # [B, m, N], [B, m]
        q = q * q.shape[-1] ** -0.5
        q_mean, k_mean = means.to(q)[:, None] @ q, means.to(k)[:, None] @ k
        full = full[:, None]  # [B, 1, m]
        left = masked_softmax(q @ k_mean.mT, full[:, :, None])
        middle = masked_softmax(q_mean @ k_mean.mT, full[..., None] & full[:, :, None])
        right = masked_softmax(q_mean @ k.mT, full[..., None] & seen[:, None, None])
        out = left @ (pseudoinverse(middle, steps=self.iterations) @ (right @ v))
        if self.conv is None:
            return out
        return out + convolve_tokens(v, self.conv[:, 0, :, 0])


def segments(
    seen: Bool[Tensor, "B N"], count: int
) -> tuple[Float[Tensor, "B m N"], Bool[Tensor, "B m"]]:
    """Weights that average each of ``count`` runs of valid tokens, and which runs hold a token.

    The r-th of n valid tokens belongs to run ⌊r m / n⌋, or to run r if n < m.
    """
    rank = seen.cumsum(1) - 1
    total = seen.sum(1, keepdim=True)
    own = torch.where(total < count, rank, rank * count // total.clamp(min=1))
    runs = torch.arange(count, device=seen.device)[:, None]
    member = (own[:, None] == runs) & seen[:, None]  # [B, m, N]
    size = member.sum(-1, keepdim=True)
    return member.float() / size.clamp(min=1), size[..., 0] > 0
