"""Is a converted decoder as good: perplexity, loss by position, generation beside the teacher."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lln.conversion.watched import watched

Row = dict[str, Any]
AT_ONCE = 1024  # positions whose logits are turned to float32 together
ON_GPU = 1 << 13  # tokens of a pass there, as in the longest windows; fewer leave it waiting


def parts(whole: Sequence[Any], most: int) -> list[Sequence[Any]]:
    """A sequence cut into parts of so many, and what is left."""
    return [whole[start : start + most] for start in range(0, len(whole), most)]


def rows_at_once(model: Any, length: int) -> int:
    """Sequences of so many tokens that are read together; on a CPU that gains nothing."""
    return max(1, ON_GPU // length) if model.device.type == "cuda" else 1


@torch.no_grad()
def losses(model: Any, ids: Int[Tensor, "B N"], scored: int) -> Float[Tensor, "B n"]:
    """−ln p of the last ``scored`` tokens of each row given all before, float32 on the CPU."""
    ids = ids.to(model.device)
    logits = last_logits(model, ids, scored + 1)[:, :-1]
    wanted = ids[:, -scored:]
    pieces = zip(logits.split(AT_ONCE, 1), wanted.split(AT_ONCE, 1), strict=True)
    found = [F.cross_entropy(x.float().mT, y, reduction="none") for x, y in pieces]
    return torch.cat(found, 1).cpu()


def last_logits(model: Any, ids: Tensor, count: int) -> Tensor:
    """Logits at the last ``count`` positions; the others are not even computed where possible."""
    can_choose = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": count} if can_choose else {}
    return model(ids, use_cache=False, **options).logits[:, -count:]


@dataclass(frozen=True)
class Window:
    """Tokens ``begin`` to ``end`` − 1 of a text, of which the last ``scored`` count."""

    begin: int
    end: int
    scored: int


def windows(tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Windows that score every token but the first once, with window − stride tokens before it.

    Fewer stand before the tokens of the first window alone.
    """
    if not 0 < stride < window:
        raise ValueError(
            f"stride={stride} must be positive and less than window={window}: the first token of a "
            "window has nothing before it"
        )
    done = 1
    for begin in range(0, tokens - 1, stride):
        end = min(begin + window, tokens)
        yield Window(begin, end, end - done)
        done = end
        if end == tokens:
            return


def _alike(found: Iterable[Window], most: int) -> list[Sequence[Window]]:
    """Neighbours of one size that score as many tokens, so many of them together."""
    groups = itertools.groupby(found, lambda own: (own.end - own.begin, own.scored))
    return [part for _, group in groups for part in parts(list(group), most)]


def perplexity(
    model: Any,
    ids: Int[Tensor, " n"],
    *,
    window: int = 2048,
    stride: int = 1024,
    batch_size: int | None = None,
    label: str = "",
) -> Row:
    """Perplexity of a text by the strided windows of Hugging Face's guide for fixed lengths.

    exp of the mean of −ln p over all tokens but the first. The guide averages over means of
    windows; here every token has the same weight.

    Args:
        ids: The text as the model's own tokenizer writes it.
        window: Tokens that the model sees at once.
        stride: Tokens that a window moves on.
        batch_size: Windows that are read together; by default what suits the device.
        label: Shows progress under this name.

    Returns:
        ``perplexity``, ``nll`` (in nats a token), ``tokens`` that were scored.
    """
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; at least 2 are needed")
    total, count = 0.0, 0
    together = batch_size or rows_at_once(model, window)
    for each in watched(_alike(windows(len(ids), window, stride), together), label):
        rows = torch.stack([ids[own.begin : own.end] for own in each])
        found = losses(model, rows, each[0].scored)
        total += found.sum(dtype=torch.float64).item()
        count += found.numel()
    return {"perplexity": math.exp(total / count), "nll": total / count, "tokens": count}


def loss_by_position(
    model: Any,
    ids: Int[Tensor, " n"],
    *,
    length: int,
    edges: Sequence[int] | None = None,
    batch_size: int | None = None,
    label: str = "",
) -> list[Row]:
    """Mean −ln p of tokens by how many stand before them: does more context keep helping?

    The text is cut into windows of ``length`` side by side; the rest at the end is left out.

    Args:
        edges: Bins are edges[i] … edges[i+1] − 1 tokens of context, from 1 to ``length`` − 1; by
            default every bin is twice as long as what is before it, from 32 on.
        batch_size: Windows that are read together; by default what suits the device.

    Returns:
        A row per bin: ``from``, ``to`` (inclusive), ``nll``, ``tokens``, and ``se``, the standard
        error of ``nll`` over windows (None with one window).
    """
    count = len(ids) // length
    if count < 1 or length < 2:
        raise ValueError(
            f"the text has {len(ids)} tokens, which fill no window of length={length}; pass more "
            "text or a smaller length (2 at least)"
        )
    edges = _doubling(length) if edges is None else list(edges)
    if edges != sorted(set(edges)) or edges[0] != 1 or edges[-1] != length:
        raise ValueError(f"edges={edges} must rise from 1 to length={length}")
    together = batch_size or rows_at_once(model, length)
    batches = ids[: count * length].view(count, length).split(together)
    found = [losses(model, batch, length - 1) for batch in watched(batches, label)]
    table = torch.cat(found).double()  # [windows, length − 1]; column c has c + 1 tokens before it
    rows = []
    for low, high in itertools.pairwise(edges):
        means = table[:, low - 1 : high - 1].mean(1)
        error = None if count < 2 else (means.std() / math.sqrt(count)).item()
        tokens = count * (high - low)
        rows.append(
            {"from": low, "to": high - 1, "nll": means.mean().item(), "se": error, "tokens": tokens}
        )
    return rows


def _doubling(length: int) -> list[int]:
    """1, 32, 64, 128 … and ``length``."""
    inside = [32 << power for power in range(length.bit_length()) if 32 << power < length]
    return [1, *inside, length]


@torch.no_grad()
def side_by_side(
    teacher: Any, student: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 64
) -> list[Row]:
    """Let both models continue the same prompts, greedily, each from its own kind of cache.

    Returns:
        A row per prompt: ``prompt``, ``teacher`` and ``student`` (texts), ``same`` (first tokens
        that are equal), ``tokens`` (those of the teacher).
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad}
    rows = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        answers = []
        for model in (teacher, student):
            given = ids.to(model.device)
            mask = torch.ones_like(given)
            out = model.generate(given, attention_mask=mask, **options)[0, ids.shape[1] :].tolist()
            answers.append(out)
        pairs = zip(*answers, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, answers)))
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        facts = {"same": same, "tokens": len(answers[0])}
        rows.append({"prompt": prompt, "teacher": texts[0], "student": texts[1], **facts})
    return rows
