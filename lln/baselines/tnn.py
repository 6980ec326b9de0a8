"""TNN: a learned Toeplitz matrix in place of attention."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.baselines.base import Layer, TokenMixer, valid, wide
from lln.baselines.rms_norm import simple_rms_norm
from lln.ops.common.arguments import check_positive_int, hide


class Tnn(TokenMixer):
    r"""Gated Toeplitz unit of the Toeplitz neural network (Qin et al. 2023, arXiv:2305.04749).

        out = W_o (u ⊙ T v),  u = silu(W_u x),  v = silu(W_v x),  T_ij = γ^{|i−j|} f_θ(i − j)

    with one Toeplitz matrix per channel, applied by an FFT of length 2N; f_θ is a small network of
    the relative position. Not attention: T does not depend on the content, and heads play no part.
    O(N e log N) time, O(N e) memory for e = expansion · dim channels.

    Args:
        expansion: Channels of u and v per channel of x.
        decay: γ.
        position_dim, position_layers: Width and hidden layers of f_θ.
    """

    def __init__(
        self,
        layer: Layer,
        *,
        expansion: int = 3,
        decay: float = 0.99,
        position_dim: int = 64,
        position_layers: int = 6,
    ) -> None:
        super().__init__(layer)
        check_positive_int("expansion", expansion)
        if not 0 < decay <= 1:
            raise ValueError(f"decay={decay} must lie in (0, 1]")
        self.decay, channels = decay, expansion * layer.dim
        self.gate = nn.Linear(layer.dim, channels)
        self.value = nn.Linear(layer.dim, channels)
        self.out = nn.Linear(channels, layer.dim)
        widths = [1] + [position_dim] * (position_layers + 1) + [channels]
        self.position = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        v = hide(F.silu(self.value(x)), valid(x, key_mask))
        return self.out(F.silu(self.gate(x)) * self.toeplitz(v))

    @wide
    def toeplitz(self, v: Float[Tensor, "B N e"]) -> Float[Tensor, "B N e"]:
        """T v: a circular convolution of twice the length."""
        tokens = v.shape[1]
        coefficients = self.coefficients(tokens, v)
        spectrum = torch.fft.rfft(coefficients, dim=0) * torch.fft.rfft(v, 2 * tokens, dim=1)
        return torch.fft.irfft(spectrum, 2 * tokens, dim=1)[:, :tokens]

    def coefficients(self, tokens: int, like: Tensor) -> Float[Tensor, "offsets e"]:
        """γ^|n| f_θ(n) for n = 0 … N − 1, −N … −1; the entry at −N meets no pair of tokens."""
        offset = torch.arange(2 * tokens, device=like.device, dtype=like.dtype)
        offset = torch.where(offset < tokens, offset, offset - 2 * tokens)[:, None]
        y = _linear(self.position[0], offset)
        for layer in self.position[1:]:
            y = _linear(layer, simple_rms_norm(y).relu())
        return y * self.decay ** offset.abs()

    def attention_matrix(
        self, x: Float[Tensor, "B N dim"], key_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B e N N"]:
        """T of every channel, masked columns zero. Signed: normalise |T| for entropies."""
        x = self._checked(x, key_mask)
        tokens = x.shape[1]
        position = torch.arange(tokens, device=x.device)
        t = self.coefficients(tokens, x)[position[:, None] - position]  # negative: from the end
        return t.movedim(-1, 0) * valid(x, key_mask)[:, None, None]


def _linear(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return F.linear(x, layer.weight.to(x), layer.bias.to(x))
