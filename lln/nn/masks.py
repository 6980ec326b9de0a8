"""torch's mask conventions, translated: key padding, the causal ``attn_mask``, nested tensors."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.arguments import may_look_at


def valid_keys(
    key_padding_mask: Bool[Tensor, "B M"] | Float[Tensor, "B M"] | None, shape: tuple[int, int]
) -> Bool[Tensor, "B M"] | None:
    """True = may be attended, from torch's convention (True or −inf = ignore).

    A floating mask may hold 0 and −inf only. Off the CPU the values are not read back: everything
    but 0 counts as −inf there.
    """
    if key_padding_mask is None:
        return None
    mask = key_padding_mask
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"key_padding_mask has shape {list(mask.shape)}; expected {list(shape)} "
            "[batch, keys], or [keys] for unbatched input"
        )
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise TypeError(
            f"key_padding_mask has dtype {mask.dtype}; give bool (True = ignore this key) or "
            "floating point (-inf = ignore)"
        )
    visible = mask == 0
    if may_look_at(mask) and not bool((visible | (mask == -torch.inf)).all()):
        raise ValueError(
            "key_padding_mask holds values other than 0 and -inf: LLN attention can ignore a key "
            "but not add a bias to its score; give a bool mask (True = ignore)"
        )
    return visible


def check_causal_mask(
    attn_mask: Tensor | None,
    *,
    is_causal: bool,
    queries: int,
    keys: int,
) -> None:
    """Accept no mask, or the causal one announced by ``is_causal=True``; refuse all others."""
    if is_causal and queries != keys:
        raise ValueError(
            f"is_causal=True with {queries} queries and {keys} keys is ambiguous; lln.attention "
            "and lln.nn.LLNAttention align such inputs at their last tokens"
        )
    if attn_mask is None:
        return
    if not is_causal:
        raise ValueError(
            f"attn_mask of shape {list(attn_mask.shape)} is refused: linear attention never forms "
            "the scores it would act on. Possible are key_padding_mask (ignore keys), "
            "is_causal=True (with or without the causal attn_mask) and, at construction, "
            "near=64 (softmax among neighbours)"
        )
    if tuple(attn_mask.shape) != (queries, keys):
        raise ValueError(
            f"attn_mask has shape {list(attn_mask.shape)}; with is_causal=True it must be the "
            f"square causal mask [{queries}, {keys}], or None"
        )
    if not may_look_at(attn_mask) or _is_causal(attn_mask):
        return
    raise ValueError(
        "is_causal=True, but attn_mask is not the causal mask (as made by "
        "nn.Transformer.generate_square_subsequent_mask); other masks are not possible"
    )


def _is_causal(mask: Tensor) -> bool:
    future = torch.ones(mask.shape, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, future)
    return torch.equal(mask == -torch.inf, future) and not bool(mask.masked_fill(future, 0).any())


def pad_nested(x: Tensor) -> tuple[Tensor, Bool[Tensor, "B N"]]:
    """A nested batch as ``[B, N, E]`` and its validity mask."""
    if x.layout != torch.strided:
        raise ValueError(
            f"nested input of layout {x.layout} is not supported; use x.to_padded_tensor(0.0) with "
            "key_padding_mask, or lln.attention_varlen for packed sequences"
        )
    lengths = torch.tensor([sequence.shape[0] for sequence in x.unbind()], device=x.device)
    padded = x.to_padded_tensor(0.0)
    return padded, torch.arange(padded.shape[1], device=x.device) < lengths[:, None]


def unpad_nested(x: Tensor, valid: Bool[Tensor, "B N"]) -> Tensor:
    """The inverse of :func:`pad_nested`."""
    lengths = valid.sum(-1).tolist()
    return torch.nested.as_nested_tensor(
        [sequence[:length] for sequence, length in zip(x, lengths, strict=True)]
    )
