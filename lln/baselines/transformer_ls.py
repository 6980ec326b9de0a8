"""Transformer-LS: long range by a dynamic projection, short range by a window."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.baselines.base import Layer, TokenMixer, masked_softmax, merge, valid, wide
from lln.baselines.window import half_window, segments, surroundings
from lln.ops.common.arguments import check_positive_int, hide


class TransformerLS(TokenMixer):
    r"""Long-short attention (Zhu et al. 2021, arXiv:2107.02192).

        K̄ = AᵀK, V̄ = AᵀV,  A = softmax over tokens of X W_p  (N×r per head)
        out = softmax([Q LN_S(K̄)ᵀ | Q LN_L(K_win)ᵀ] / √d) [LN_S(V̄); LN_L(V_win)]

    The window of a segment of w tokens is the segment and w/2 tokens on either side; the two layer
    norms run over the concatenated heads (DualLN). O(N (r + 2w) d) time, O(N (r + 2w)) memory.

    Args:
        landmarks: r.
        window: w, even.
    """

    def __init__(self, layer: Layer, *, landmarks: int = 32, window: int = 8) -> None:
        super().__init__(layer)
        check_positive_int("landmarks", landmarks)
        self.landmarks, self.window, self.reach = landmarks, window, half_window(window)
        self.query, self.key, self.value = (nn.Linear(layer.dim, layer.dim) for _ in range(3))
        self.out = nn.Linear(layer.dim, layer.dim)
        self.projection = nn.Linear(layer.dim, layer.num_heads * landmarks)
        self.short_norm = nn.LayerNorm(layer.dim)  # of the window, LN_L in the paper
        self.long_norm = nn.LayerNorm(layer.dim)  # of the projected keys, LN_S

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        seen = valid(x, key_mask)
        k, v = hide(self.key(x), seen), hide(self.value(x), seen)
        out = self._attend(self.split(self.query(x)), self.projection(x), k, v, seen)
        return self.out(merge(out))

    @wide
    def _attend(self, q: Tensor, project: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        weights = self._weights(q, project, k, seen)
        tokens, size = q.shape[2], self.window
        long = self._norm(self.long_norm, self._summary(project, v, seen))
        short = surroundings(self._norm(self.short_norm, v), size, reach=self.reach, dim=1)
        short = short.unflatten(-1, (q.shape[1], -1)).movedim(3, 1)  # [B, H, runs, 2w, D]
        far, near = weights[..., : self.landmarks], weights[..., self.landmarks :]
        out = far.flatten(2, 3) @ self.split(long) + (near @ short).flatten(2, 3)
        return out[:, :, :tokens]

    def _weights(self, q: Tensor, project: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        """``[B, H, runs, w, r + 2w]``: one softmax over both ranges."""
        size = self.window
        q = segments(q * q.shape[-1] ** -0.5, size)
        long = self.split(self._norm(self.long_norm, self._summary(project, k, seen)))
        short = surroundings(self._norm(self.short_norm, k), size, reach=self.reach, dim=1)
        short = short.unflatten(-1, (q.shape[1], -1)).movedim(3, 1)
        far, near = q @ long[:, :, None].mT, q @ short.mT
        there = surroundings(seen.float(), size, reach=self.reach, dim=1) > 0
        there = there[:, None, :, None].expand(-1, -1, -1, size, -1)
        some = seen.any(1)[:, None, None, None, None].expand(*there.shape[:-1], self.landmarks)
        return masked_softmax(torch.cat([far, near], dim=-1), torch.cat([some, there], dim=-1))

    def _summary(self, project: Tensor, x: Tensor, seen: Tensor) -> Float[Tensor, "B r dim"]:
        """AᵀX per head, heads concatenated."""
        a = masked_softmax(self.split(project).mT, seen[:, None, None])  # [B, H, r, N]
        return merge(a @ self.split(x))

    def _norm(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        weight, bias = norm.weight.to(x), norm.bias.to(x)
        return torch.nn.functional.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)

    def attention_matrix(
        self, x: Float[Tensor, "B N dim"], key_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B H N N"]:
        """Where a token looks: near weights, plus the weight of each landmark spread by A.

        The layer norms act on values after A, so this is not the matrix of a linear map of V.
        """
        x = self._checked(x, key_mask)
        seen = valid(x, key_mask)
        q, project = self.split(self.query(x)), self.projection(x)
        weights = self._weights(q, project, hide(self.key(x), seen), seen)
        tokens, size = x.shape[1], self.window
        a = masked_softmax(self.split(project).mT, seen[:, None, None])
        far = weights[..., : self.landmarks].flatten(2, 3) @ a
        eye = torch.eye(tokens, dtype=x.dtype, device=x.device)
        near = surroundings(eye, size, reach=self.reach, dim=0)  # [runs, 2w, N]
        return (far + (weights[..., self.landmarks :] @ near).flatten(2, 3))[:, :, :tokens]
