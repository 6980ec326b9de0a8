"""Linear attention of other libraries beside ours, where they are installed: never a dependency.

Both get features that are positive already, which ours makes itself. flash-linear-attention
(``fla``) has no normaliser in the call that is measured, its fastest one.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

MODULES = {"fla": "fla", "flash_bla": "flash_bla"}  # by implementation


def installed(impl: str) -> bool:
    """Whether the library of an implementation can be imported."""
    return importlib.util.find_spec(MODULES[impl]) is not None


def prepared(impl: str, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Features ELU + 1 of q and k, and v; in the memory order that the library takes as it is."""
    made = [F.elu(q) + 1, F.elu(k) + 1, v]
    if impl == "fla":  # [B, N, H, D]
        made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    return made


def _fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; the library's axes are [B, N, H, D]."""
    from fla.ops.linear_attn import (  # pyright: ignore[reportMissingImports]
        fused_chunk_linear_attn,
    )

    rows = (x.transpose(1, 2) for x in (q, k, v))
    return fused_chunk_linear_attn(*rows, normalize=False)[0].transpose(1, 2)


def _fla_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).tril() @ v


def _flash_bla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_bla.ops.linear_attn.fused import (  # pyright: ignore[reportMissingImports]
        linear_attention,
    )

    return linear_attention(q, k, v)


def _flash_bla_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    return scores @ v / scores.sum(-1, keepdim=True)


OPS = {"fla": "causal", "flash_bla": "bidirectional"}
RUNNERS: dict[tuple[str, str], Callable[..., Tensor]] = {
    (OPS["fla"], "fla"): _fla,
    (OPS["flash_bla"], "flash_bla"): _flash_bla,
}
EXPECTED: dict[str, Callable[..., Tensor]] = {
    "fla": _fla_reference,
    "flash_bla": _flash_bla_reference,
}
