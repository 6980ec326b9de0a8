"""Hidden tokens for masked language models: what they learn from, and what they are judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lln.conversion.watched import Counted, watched
from lln.hf.conversion.recover import IGNORED
from lln.records.seeds import derived_seed

SHARE = 0.15  # of the tokens that are to be predicted


@dataclass(frozen=True)
class Masking:
    """Of 15 % of the ordinary tokens 80 % become the mask token, 10 % any token, 10 % stay.

    That is how BERT and RoBERTa were trained. What is hidden depends on seed and step alone.

    Attributes:
        special: Ids that are never hidden.
    """

    mask_id: int
    special: frozenset[int]
    vocabulary: int
    seed: int = 0

    @staticmethod
    def of(tokenizer: Any, *, seed: int = 0) -> Masking | None:
        """Ask a tokenizer; None if it has no mask token."""
        if tokenizer.mask_token_id is None:
            return None
        special = frozenset(tokenizer.all_special_ids)
        return Masking(tokenizer.mask_token_id, special, len(tokenizer), seed)

    def hide(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Ids ``[B, N]`` with tokens hidden, and labels: the tokens there, −100 elsewhere."""
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "masking", step))
        drawn = torch.rand(2, *ids.shape, generator=generator)
        other = torch.randint(self.vocabulary, ids.shape, generator=generator)
        ordinary = ~torch.isin(ids, torch.tensor(sorted(self.special)))
        chosen = (drawn[0] < SHARE) & ordinary
        hidden = torch.where(chosen & (drawn[1] < 0.8), self.mask_id, ids)
        hidden = torch.where(chosen & (drawn[1] >= 0.9), other, hidden)
        return hidden, ids.masked_fill(~chosen, IGNORED)


@torch.no_grad()
def masked_scores(
    model: Any, batches: Counted[Mapping[str, Tensor]], masking: Masking, *, label: str = ""
) -> dict[str, float]:
    """Predict hidden tokens, the same ones for every model.

    Returns:
        ``masked_loss``, −ln p of a hidden token, in nats, and ``masked_accuracy``, the share of
        them that are the most likely ones.
    """
    total = right = count = 0.0
    for step, batch in enumerate(watched(batches, label)):
        hidden, labels = masking.hide(batch["input_ids"], step)
        given = {**batch, "input_ids": hidden}
        logits = model(**{name: x.to(model.device) for name, x in given.items()}).logits
        known = labels.to(logits.device) != IGNORED
        scores, wanted = logits[known].float(), labels.to(logits.device)[known]
        total += F.cross_entropy(scores, wanted, reduction="sum").item()
        right += (scores.argmax(-1) == wanted).sum().item()
        count += len(wanted)
    if not count:
        raise ValueError("no token was hidden; pass more text")
    return {"masked_loss": total / count, "masked_accuracy": right / count}
