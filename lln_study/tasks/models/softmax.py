"""Softmax attention in models of transformers: by its fast kernels, and by its matrix.

While a step is compiled or recorded transformers (5.17) builds a mask even if nothing is masked:
SDPA with a mask takes slow kernels that store it, and its eager attention cannot be recorded. The
implementations here are called with no mask, or with a row per sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("softmax", "softmax_eager")
MATRIX = "lln_softmax_matrix"


def implementation(attention: str) -> str:
    """What transformers calls it; mechanisms of the zoo start from "sdpa", which they replace."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from lln.hf.masks import linear_mask
    from lln.hf.register import implementation_name, register

    register()
    AttentionInterface.register(MATRIX, matrix_attention)
    AttentionMaskInterface.register(MATRIX, linear_mask)
    return {"softmax": implementation_name("softmax"), "softmax_eager": MATRIX}.get(
        attention, "sdpa"
    )


def matrix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attend by the N x N matrix as transformers' eager attention does, softmax in float32.

    Raises:
        ValueError: A mask per query-key pair: encoders only.
    """
    from lln.hf.masks import read_mask

    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} is one per query-key pair; "
            "'softmax_eager' is for encoders with padding, use 'softmax'"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(2, 3) * scale
    visible = read_mask(attention_mask, key.shape[2]).key_mask
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def is_replaced(attention: str, options: Mapping[str, Any]) -> bool:
    """Whether modules of the zoo take its place: any other mechanism, and softmax with options.

    Raises:
        ValueError: Options of softmax by its matrix, which has none.
    """
    if attention == "softmax_eager" and options:
        raise ValueError(f"options={dict(options)}: 'softmax_eager' has none")
    return attention not in NAMES or bool(options)
