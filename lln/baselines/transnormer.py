"""TransNormer: what its two variants share, diagonal blocks below and normalised linear above."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lln.baselines.base import Core, Layer
from lln.baselines.rms_norm import simple_rms_norm
from lln.baselines.window import segments
from lln.ops.common.arguments import check_positive_int

KINDS = ("diag", "norm")


class TransNormer(Core):
    r"""TransNormer (Qin et al. 2022, arXiv:2210.10340): a schedule over the layers.

        first half of the layers, DiagAttention: attention inside blocks of C tokens
        second half, NormAttention:              out = RMSNorm(φ(Q) (φ(K)ᵀ V)), no denominator

    Both with LRPE: a fixed random reflection, then a rotation by learned frequencies, so that
    scores depend on i − j. RMSNorm runs over the concatenated heads and has no gain. O(N C d) and
    O(N d²) time, O(N (C + d)) memory. The paper's feed-forward blocks are GLUs, which is the
    network's business.

    Args:
        block: C.
        kind: "diag" or "norm"; None follows the schedule (a single layer is a NormAttention).
        seed: Of the reflection.
    """

    crosses = False
    reflection: Tensor

    def __init__(
        self, layer: Layer, *, block: int = 64, kind: str | None = None, seed: int = 0
    ) -> None:
        super().__init__(layer)
        check_positive_int("block", block)
        if kind not in (None, *KINDS):
            raise ValueError(f"kind={kind!r} is unknown; choose from {', '.join(KINDS)} or None")
        if layer.head_dim % 2:
            raise ValueError(
                f"head size {layer.head_dim} = dim / num_heads is odd; rotations need pairs"
            )
        scheduled = "diag" if layer.layer_index < layer.num_layers // 2 else "norm"
        self.block, self.kind = block, kind or scheduled
        normal = torch.randn(layer.head_dim, generator=layer.generator(seed))
        self.register_buffer("reflection", normal / normal.norm())
        pairs = torch.arange(layer.head_dim // 2)
        self.theta = nn.Parameter(10_000.0 ** (-2 * pairs / layer.head_dim))

    def feature(self, x: Tensor) -> Tensor:
        """φ of the NormAttention."""
        raise NotImplementedError

    def blocks(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Weights of the DiagAttention from scores inside blocks."""
        raise NotImplementedError

    def finish(self, out: Float[Tensor, "B H N E"]) -> Float[Tensor, "B H N E"]:
        """RMSNorm over the concatenated heads."""
        heads, tokens = out.shape[1:3]
        return (
            simple_rms_norm(out.movedim(1, 2).flatten(2))
            .view(-1, tokens, heads, out.shape[-1])
            .movedim(2, 1)
        )

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """The sum of values before any norm."""
        if self.kind == "norm":
            phi_q, phi_k = self.rotate(self.feature(q)), self.rotate(self.feature(k))
            if key_mask is not None:
                phi_k = phi_k.masked_fill(~key_mask[:, None, :, None], 0)
            return phi_q @ (phi_k.mT @ v)
        tokens = q.shape[2]
        q, k = self.rotate(q) * q.shape[-1] ** -0.5, self.rotate(k)
        seen = q.new_ones(q.shape[0], tokens) if key_mask is None else key_mask.to(q.dtype)
        seen = segments(seen, self.block, dim=1)[:, None, :, None] > 0
        q, k, v = (segments(x, self.block) for x in (q, k, v))
        return (self.blocks(q @ k.mT, seen) @ v).flatten(2, 3)[:, :, :tokens]

    def rotate(self, x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
        """LRPE: reflect by I − 2nnᵀ, then turn pair l of token i by the angle i θ_l."""
        normal = self.reflection.to(x)
        x = x - 2 * (x @ normal)[..., None] * normal
        position = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)
        angle = position[:, None] * self.theta.to(x)
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
        return torch.stack(turned, dim=-1).flatten(-2)

    def attention_matrix(
        self,
        q: Tensor,
        k: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Float[Tensor, "B H N N"]:
        """The weights before RMSNorm, which is not linear in v: signed, rows of any sum."""
        keys = k.shape[2]
        eye = torch.eye(keys, dtype=k.dtype, device=k.device).expand(*k.shape[:2], keys, keys)
        if key_mask is not None:
            hidden = ~key_mask[:, None, :, None]
            q, k, eye = (x.masked_fill(hidden, 0) for x in (q, k, eye))
        return self.weigh(q, k, eye, key_mask)
