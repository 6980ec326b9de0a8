"""Softmax attention inside blocks."""

from __future__ import annotations

from torch import Tensor

from lln.baselines.base import Core, Layer
from lln.ops.common.arguments import check_positive_int
from lln.ops.window.block_diagonal import block_diagonal


class BlockDiag(Core):
    r"""Softmax attention among the positions of one block (Fig. 3 of arXiv:2311.13541, right).

        out_i = Σ_{j: ⌊j/C⌋ = ⌊i/C⌋} softmax_j(q_iᵀk_j / √d) v_j

    O(N C d) time, O(N d) memory. The last block may be shorter.

    Args:
        block: C, positions per block.
        causal: Only keys up to the query's own position.
    """

    def __init__(self, layer: Layer, *, block: int = 64, causal: bool = False) -> None:
        super().__init__(layer)
        check_positive_int("block", block)
        self.block, self.causal = block, causal

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return block_diagonal(  # widens by itself
            q,
            k,
            v,
            block=self.block,
            scale=q.shape[-1] ** -0.5,
            key_mask=key_mask,
            is_causal=self.causal,
        )
