"""The ReLU kernel of Fig. 2, linearised."""

from __future__ import annotations

from torch import Tensor

from lln.baselines.linear import LinearCore


class ReluLinear(LinearCore):
    r"""The linear counterpart of the ReLU kernel (Fig. 2 of arXiv:2311.13541).

        κ(q, k) = ReLU(q)ᵀReLU(k)

    O(N d²) time, O(N d) memory. The paper does not write the kernel; this homogeneous form shows
    the indifference to temperature that its figure shows.
    """

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return q.relu(), k.relu()
