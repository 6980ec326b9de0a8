"""Is a converted encoder as good: its embeddings beside the teacher's, retrieval, STS-B."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lln.conversion.texts import Batches, Frame, TooShort, encoder_batches, token_ids
from lln.conversion.watched import Counted, watched
from lln.texts import glue

Batch = Mapping[str, Tensor]
PAIRED = 3  # texts that have more than one pair, so that similarities can be compared


def token_states(model: Any, batch: Batch) -> Float[Tensor, "B N D"]:
    """The last hidden states, in float32, on the model's device."""
    given = {name: x.to(model.device) for name, x in batch.items()}
    return model.base_model(**given).last_hidden_state.float()


def pooled(states: Float[Tensor, "B N D"], mask: Int[Tensor, "B N"] | None) -> Float[Tensor, "B D"]:
    """Mean over real tokens, of length 1, as sentence-transformers computes it."""
    real = states.new_ones(states.shape[:2]) if mask is None else mask.to(states)
    mean = (states * real[..., None]).sum(1) / real.sum(1).clamp(min=1e-9)[:, None]
    return F.normalize(mean, dim=-1)


@torch.no_grad()
def embed(model: Any, batches: Counted[Batch], *, label: str = "") -> Float[Tensor, "n D"]:
    """Embeddings of all texts, float32 on the CPU; the model runs in its own dtype and mode.

    Args:
        label: Shows progress under this name.
    """
    parts = [
        pooled(token_states(model, batch), batch.get("attention_mask")).cpu()
        for batch in watched(batches, label)
    ]
    return torch.cat(parts)


@torch.no_grad()
def compare_embeddings(
    teacher: Any, student: Any, batches: Counted[Batch], *, label: str = ""
) -> dict[str, float]:
    """Compare two encoders on the same texts; judge at the full length the student is meant for.

    Args:
        batches: ``input_ids`` and ``attention_mask``, as of
            :func:`lln.conversion.texts.encoder_batches`.

    Returns:
        ``cosine_mean``, ``cosine_p5`` (5th percentile), ``cosine_min`` of a text's two embeddings;
        ``similarity_correlation``, Pearson's, of the similarities of all pairs of texts (NaN for
        fewer than ``PAIRED`` texts); ``token_nmse`` = Σ‖student − teacher‖² / Σ‖teacher‖² over the
        last hidden states of real tokens; ``texts``, ``tokens``.
    """
    found: list[tuple[Tensor, Tensor]] = []
    error = size = tokens = 0.0
    for batch in watched(batches, label):
        mask = batch.get("attention_mask")
        wanted = token_states(teacher, batch)
        given = token_states(student, batch).to(wanted.device)
        found.append((pooled(wanted, mask).cpu(), pooled(given, mask).cpu()))
        real = wanted.new_ones(wanted.shape[:2]) if mask is None else mask.to(wanted)
        error += ((given - wanted).square().sum(-1) * real).sum(dtype=torch.float64).item()
        size += (wanted.square().sum(-1) * real).sum(dtype=torch.float64).item()
        tokens += real.sum().item()
    first, second = (torch.cat(parts) for parts in zip(*found, strict=True))
    cosine = (first * second).sum(-1)
    return {
        "cosine_mean": cosine.mean().item(),
        "cosine_p5": torch.quantile(cosine, 0.05).item(),
        "cosine_min": cosine.min().item(),
        "similarity_correlation": similarity_correlation(first, second),
        "token_nmse": error / size,
        "texts": len(cosine),
        "tokens": int(tokens),
    }


def similarity_correlation(first: Float[Tensor, "n D"], second: Float[Tensor, "n D"]) -> float:
    """Pearson correlation of the similarities of all pairs, in one space and in the other."""
    if len(first) < PAIRED:
        return float("nan")
    above = torch.triu_indices(len(first), len(first), 1)
    similarities = ((x.double() @ x.double().T)[above[0], above[1]] for x in (first, second))
    return torch.corrcoef(torch.stack(list(similarities)))[0, 1].item()


@dataclass(frozen=True)
class Halves:
    """The first and second halves of articles, as batches in the same order."""

    first: Batches
    second: Batches


def halves(
    tokenizer: Any,
    texts: Iterable[str],
    length: int,
    *,
    batch_size: int,
    count: int | None = None,
    every_piece: bool = False,
) -> Halves:
    """Cut articles into halves of ``length`` tokens each, special ones included.

    What follows in an article is left out, and so are articles that do not fill both halves.

    Args:
        count: Articles that are wanted; there must be as many. All that fit by default.
        every_piece: What follows is cut in the same way, as if it were another article.

    Raises:
        TooShort: Fewer articles fill both halves than are wanted, or than two.
    """
    frame = Frame.of(tokenizer)
    room = frame.room(length)
    long_enough = _pieces(tokenizer, texts, 2 * room, every_piece=every_piece)
    found = itertools.islice(long_enough, count)
    pairs = [(frame.around(ids[:room]), frame.around(ids[room : 2 * room])) for ids in found]
    if len(pairs) < (count or 2):
        raise TooShort(
            f"{len(pairs)} articles have {2 * room} tokens, {count or 2} are wanted; pass more or "
            "longer ones, or a smaller length or count"
        )
    first, second = zip(*pairs, strict=True)
    return Halves(Batches(first, batch_size), Batches(second, batch_size))


def _pieces(
    tokenizer: Any, texts: Iterable[str], size: int, *, every_piece: bool
) -> Iterator[np.ndarray]:
    """The first ``size`` tokens of each text that has as many, and of what follows if wanted."""
    for ids in token_ids(tokenizer, texts):
        starts = range(0, len(ids) - size + 1, size)
        for start in starts if every_piece else starts[:1]:
            yield ids[start : start + size]


def retrieval(model: Any, pairs: Halves, *, label: str = "") -> float:
    """Share of articles whose first half is nearer to its second half than to all others."""
    first = embed(model, pairs.first, label=label)
    second = embed(model, pairs.second, label=label)
    nearest = (first @ second.T).argmax(1)
    return (nearest == torch.arange(len(nearest))).double().mean().item()


def sts(
    model: Any,
    tokenizer: Any,
    data: str | os.PathLike[str] | None = None,
    *,
    batch_size: int = 64,
    label: str = "",
) -> float:
    """Spearman correlation of cosines with the human scores of STS-B dev, between −1 and 1.

    Most of its sentences fit into one block, so it says little of far keys.

    Args:
        data: Folder of the GLUE files; default ``LLN_DATA``.
    """
    examples = glue.read(glue.find("stsb", data)).test
    by_size = sorted(range(len(examples)), key=lambda row: len("".join(examples.texts[row])))
    examples = examples.take(by_size)  # less padding
    sides = (
        encoder_batches(tokenizer, side, _longest_input(model), batch_size=batch_size)
        for side in zip(*examples.texts, strict=True)
    )
    first, second = (embed(model, side, label=label) for side in sides)
    cosines = (first * second).sum(-1).double().numpy()
    from scipy import stats

    return float(stats.spearmanr(examples.labels, cosines).statistic)  # type: ignore[attr-defined]


def _longest_input(model: Any) -> int:
    return getattr(model.config, "max_position_embeddings", None) or 512
