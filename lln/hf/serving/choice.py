"""The next token of every seat: the likeliest, or one that is drawn, each by its own options."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def likeliest(logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
    """The token of the largest logit."""
    return logits.argmax(-1)


def drawn(
    logits: Float[Tensor, "B V"],
    *,
    noise: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
) -> Int[Tensor, " B"]:
    """Tokens drawn as ``generate(do_sample=True)`` draws them, of a stream by itself.

    Args:
        noise: Exponentially distributed; the token of the largest probability / noise is taken, as
            ``torch.multinomial`` does.
        top_k: V to leave it out.
        top_p: 1 to leave it out.
    """
    scores = logits / temperature[:, None]
    order = scores.sort(-1)  # rising, as transformers has it
    least = order.values.gather(1, logits.shape[-1] - top_k[:, None])
    inside = order.values.masked_fill(order.values < least, -torch.inf)
    few = inside.softmax(-1).cumsum(-1) <= 1 - top_p[:, None]
    few = few & (torch.arange(few.shape[1], device=few.device) < few.shape[1] - 1)
    few = few & (top_p < 1)[:, None]
    hidden: Bool[Tensor, "B V"] = torch.zeros_like(few).scatter(1, order.indices, few)
    scores = scores.masked_fill(hidden | (scores < least), -torch.inf)
    return (scores.softmax(-1) / noise).argmax(-1)
