"""Linear transformer: features elu(x) + 1."""

from __future__ import annotations

from torch import Tensor

from lln.baselines.linear import PositiveCore


class Elu(PositiveCore):
    r"""Linear attention of Katharopoulos et al. 2020 (arXiv:2006.16236).

        κ(q, k) = φ(q)ᵀφ(k),  φ(x) = elu(x) + 1;  no 1/√d

    O(N d²) time, O(N d) memory. Their code adds 1e-6 to the denominator; here it is exact.
    """

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return _elu_plus_one(q), _elu_plus_one(k)

    def log_features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return _log_elu_plus_one(q), _log_elu_plus_one(k)


def _elu_plus_one(x: Tensor) -> Tensor:
    """exp(x) below zero without a cancelling −1 + 1, so that small features keep their digits."""
    return x.relu() + x.clamp(max=0).exp()


def _log_elu_plus_one(x: Tensor) -> Tensor:
    return x.clamp(max=0) + x.relu().log1p()
