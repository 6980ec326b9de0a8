"""The unfinished block of LLN+Diag while decoding: one of keys and values per sample."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.hf.padding import leading, take
from lln.ops.window.block_diagonal import block_diagonal


@dataclass(frozen=True)
class OpenBlock:
    """The unfinished block of every sample.

    Samples stand at different places of their block, since blocks are counted from the first real
    token. Slots from ``count % C`` on hold nothing.

    Attributes:
        valid: True = a key that may be attended.
        count: Positions since the first real token; 0 as long as there was none.
    """

    k: Float[Tensor, "B Hkv C D"]
    v: Float[Tensor, "B Hkv C E"]
    valid: Bool[Tensor, "B C"]
    count: Int[Tensor, " B"]

    @staticmethod
    def empty(k: Tensor, v: Tensor, block: int) -> OpenBlock:
        """A block without tokens; sizes, dtype and device are those of k and v."""
        batch, heads = k.shape[:2]
        return OpenBlock(
            k.new_zeros(batch, heads, block, k.shape[3]),
            v.new_zeros(batch, heads, block, v.shape[3]),
            torch.zeros(batch, block, dtype=torch.bool, device=k.device),
            torch.zeros(batch, dtype=torch.long, device=k.device),
        )

    def map(self, change) -> OpenBlock:
        """Apply the same change to all tensors, e.g. a choice of samples."""
        return OpenBlock(*(change(getattr(self, field.name)) for field in fields(self)))

    def append(self, k: Tensor, v: Tensor, key_mask: Bool[Tensor, "B N"]) -> OpenBlock:
        """The block after these tokens."""
        lead, fill, total = self._lengths(key_mask)
        block = self.k.shape[2]
        rest = total % block
        slots = torch.arange(block, device=k.device)
        index, inside = self._line(total - rest + slots, lead, fill, k.shape[2])
        valid = torch.cat([self.valid, key_mask], 1).gather(1, index)
        return OpenBlock(
            take(torch.cat([self.k, k], 2), index),
            take(torch.cat([self.v, v], 2), index),
            valid & inside & (slots < rest),
            self.count + k.shape[2] - lead[:, 0],
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Bool[Tensor, "B N"], *, scale: float
    ) -> Float[Tensor, "B H N E"]:
        """Softmax attention of the new tokens inside their blocks; 0 before the first real one."""
        block, tokens = self.k.shape[2], k.shape[2]
        if tokens == 1:
            return self._attend_one(q, k, v, key_mask, scale)
        lead, fill, _ = self._lengths(key_mask)
        line = torch.arange(block + tokens, device=k.device).expand(len(k), -1)
        index, inside = self._line(line, lead, fill, tokens)
        out = block_diagonal(
            take(F.pad(q, (0, 0, block, 0)), index),
            take(torch.cat([self.k.to(k), k], 2), index),
            take(torch.cat([self.v.to(v), v], 2), index),
            block=block,
            scale=scale,
            key_mask=torch.cat([self.valid, key_mask], 1).gather(1, index) & inside,
            is_causal=True,
        )
        step = torch.arange(tokens, device=k.device)
        out = take(out, (fill + step - lead).clamp(min=0))
        return out.masked_fill((step < lead)[:, None, :, None], 0)

    def _attend_one(self, q, k, v, key_mask, scale: float) -> Tensor:
        """Attend with one token: the query sees what its block holds, and itself."""
        fill = (self.count % self.k.shape[2])[:, None]
        slots = torch.arange(self.k.shape[2], device=k.device)
        own = slots == fill
        here = own[:, None, :, None]
        return block_diagonal(
            q,
            torch.where(here, k, self.k.to(k)),
            torch.where(here, v, self.v.to(v)),
            block=self.k.shape[2],
            scale=scale,
            key_mask=torch.where(own, key_mask, self.valid & (slots < fill)),
        )

    def _lengths(self, key_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Leading padding among the new tokens, tokens in the block, and both together: [B, 1]."""
        lead = torch.where(self.count > 0, 0, leading(key_mask))[:, None]
        fill = (self.count % self.k.shape[2])[:, None]
        return lead, fill, fill + key_mask.shape[1] - lead

    def _line(
        self, position: Tensor, lead: Tensor, fill: Tensor, tokens: int
    ) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Where the token at a position, counted from the start of the block, lies in [block, new].

        Also whether there is one.
        """
        block = self.k.shape[2]
        index = torch.where(position < fill, position, block + position - fill + lead)
        return index.clamp(max=block + tokens - 1), index < block + tokens
