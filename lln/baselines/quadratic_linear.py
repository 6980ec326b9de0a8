"""The quadratic kernel of Fig. 2, linearised."""

from __future__ import annotations

from torch import Tensor

from lln.baselines.linear import LinearCore


class QuadraticLinear(LinearCore):
    r"""The linear counterpart of the quadratic kernel (Fig. 2 of arXiv:2311.13541).

        κ(q, k) = Σ_l q_l² k_l²

    O(N d²) time, O(N d) memory. See :class:`lln.baselines.relu_linear.ReluLinear`.
    """

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return q.square(), k.square()
