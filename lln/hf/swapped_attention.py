"""Mechanisms that make their own queries and keys, in the place of a whole attention module."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from lln.hf.cores import Place
from lln.hf.masks import packed, read_mask, starts_late
from lln.hf.packing import Groups, from_lengths, take_tokens
from lln.hf.padding import leading, take

# What output projections are called; BERT's lies outside of the attention module.
OUTPUTS = {"o_proj", "out_proj", "c_proj", "out_lin", "dense", "proj", "o", "wo"}


class SwappedAttention(nn.Module):
    """A layer of the zoo, called as the attention module whose place it takes.

    It has an output projection if and only if the module had one, except where the mechanism ends
    in a projection from other channels.
    """

    def __init__(self, mixer: nn.Module, original: nn.Module, place: Place) -> None:
        super().__init__()
        self.mixer = mixer
        self.place = place
        self.config: Any = original.config
        self.is_causal = place.causal
        self.layer_idx = getattr(original, "layer_idx", None)
        self._signature = inspect.signature(type(original).forward)
        out = getattr(mixer, "out", None)
        outside = not OUTPUTS & {name for name, _ in original.named_children()}
        if outside and isinstance(out, nn.Linear) and out.in_features == out.out_features:
            mixer.out = nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Mix the tokens; of the arguments of the original the mask and the cache are read."""
        arguments = self._signature.bind_partial(self, *args, **kwargs).arguments
        x = arguments["hidden_states"]
        self._count(x, arguments.get("past_key_values"))
        mask = arguments.get("attention_mask")
        found = packed(mask)
        others = arguments.get("kwargs", {})
        sequences = found[0] if found else from_lengths(others, *x.shape[:2])
        if sequences is not None:
            groups = Groups.of(sequences.to(x.device), together=False)
            answers = [self.mixer(take_tokens(x, index), real) for index, real in groups.parts]
            return groups.join(answers, len(x)), None
        if mask is not None and mask.dim() != 2:
            raise ValueError(
                f"{self.place.name} got a mask per query-key pair, {list(mask.shape)}, which the "
                "mechanisms of the zoo cannot apply; pass a 2-D padding mask"
            )
        key_mask = read_mask(mask, x.shape[1]).key_mask
        if key_mask is None or not starts_late(key_mask):
            return self.mixer(x, key_mask), None
        tokens = torch.arange(x.shape[1], device=x.device)
        shift = leading(key_mask)[:, None]
        turned, back = (tokens + shift) % len(tokens), (tokens - shift) % len(tokens)
        out = self.mixer(take(x[:, None], turned)[:, 0], key_mask.gather(1, turned))
        return take(out[:, None], back)[:, 0], None

    def _count(self, x: Tensor, cache: Any) -> None:
        """Tell a cache how many tokens there were; no state of them is kept."""
        if cache is None or self.layer_idx is None:
            return
        if cache.get_seq_length(self.layer_idx) > 0:
            raise ValueError(
                f"{self.place.name} keeps nothing of earlier tokens; call "
                "model.generate(..., use_cache=False)"
            )
        nothing = x.new_zeros(x.shape[0], 1, x.shape[1], 1)
        cache.update(nothing, nothing, self.layer_idx)
