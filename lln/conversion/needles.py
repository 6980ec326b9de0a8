"""Needle in a text: a number said once, asked for again at distances within and beyond a window."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lln.conversion.decoders import last_logits, parts, rows_at_once
from lln.conversion.texts import Frame
from lln.conversion.watched import watched
from lln.records.seeds import generator

Row = dict[str, Any]
DIGITS = 5
NAMES = ("Oslo", "Paris", "Madrid", "Berlin", "Vienna", "London", "Athens", "Dublin", "Rome")
SAYING = "\nThe magic number of {name} is"
END = ".\n"


@dataclass(frozen=True)
class Needle:
    """A text that says a number, goes on, and begins to say it again.

    Attributes:
        ids: The whole text, the answer at its end.
        answer: How many tokens that is.
        distance: Tokens from the answer's first token back to where it was said; None if it never
            was.
    """

    ids: Int[Tensor, " N"]
    answer: int
    distance: int | None


def needle(
    tokenizer: Any,
    text: Int[Tensor, " n"],
    distance: int | None,
    *,
    length: int,
    seed: int = 0,
    number: int = 0,
) -> Needle:
    """Put a sentence with a random number into a random place of a text.

    Args:
        text: Ids of real text, at least ``length`` of them.
        distance: From the answer back to the number that was said; None leaves the sentence out,
            which tells what is guessed.
        length: Tokens in all.
        number: Of this needle; others have other numbers, names and places.
    """
    draw = generator(seed, "needle", number)

    def random(high: int) -> int:
        return int(torch.randint(high, (), generator=draw))

    def ids(words: str) -> list[int]:
        return tokenizer(words, add_special_tokens=False)["input_ids"]

    start = list(Frame.of(tokenizer).before)
    saying = ids(SAYING.format(name=NAMES[random(len(NAMES))]))
    answer = ids(f" {10 ** (DIGITS - 1) + random(9 * 10 ** (DIGITS - 1))}")
    said = [] if distance is None else [*saying, *answer, *ids(END)]
    rest = length - len(start) - len(said) - len(saying) - len(answer)  # tokens of the text
    after = 0 if distance is None else distance - len(said)  # those behind the sentence
    if not 0 <= after <= rest:
        raise ValueError(
            f"distance={distance} is not possible in length={length}; choose from {len(said)} to "
            f"{len(said) + rest}, or another length"
        )
    if len(text) < rest:
        raise ValueError(f"the text has {len(text)} tokens, {rest} are needed for length={length}")
    first = random(len(text) - rest + 1)
    words = text[first : first + rest].tolist()
    cut = rest - after
    whole = [*start, *words[:cut], *said, *words[cut:], *saying, *answer]
    return Needle(torch.tensor(whole), len(answer), distance)


@torch.no_grad()
def find_needles(
    models: dict[str, Any],
    tokenizer: Any,
    text: Int[Tensor, " n"],
    distances: Sequence[int | None],
    *,
    length: int,
    count: int = 32,
    seed: int = 0,
    label: str = "",
) -> list[Row]:
    """Ask models for the same needles at each distance.

    Args:
        models: By name, e.g. ``{"teacher": teacher, "student": student}``.
        distances: None stands for texts without the sentence.
        count: Needles at each distance; number i has the same words at all of them.

    Returns:
        A row per model and distance: ``model``, ``distance``, ``exact`` (share of needles that
        greedy decoding gets right), ``token_accuracy`` (share of their tokens, given the right ones
        before), ``log_probability`` of an answer (mean, in nats), ``needles``, ``length``.
    """
    rows = []
    for distance in watched(distances, label):
        options = {"length": length, "seed": seed}
        asked = [needle(tokenizer, text, distance, number=i, **options) for i in range(count)]
        for name, model in models.items():
            right, told = zip(*_answers(model, asked), strict=True)
            rows.append(
                {
                    "model": name,
                    "distance": distance,
                    "exact": sum(all(each) for each in right) / count,
                    "token_accuracy": sum(sum(each) / len(each) for each in right) / count,
                    "log_probability": sum(told) / count,
                    "needles": count,
                    "length": length,
                }
            )
    return rows


def _answers(model: Any, asked: Sequence[Needle]) -> Iterator[tuple[list[bool], float]]:
    """Which tokens of each answer are the most likely ones, and the logarithm of its probability.

    Answers of one length are read together, the shortest first.
    """
    alike = itertools.groupby(sorted(asked, key=_size), _size)
    for (tokens, answer), group in alike:
        for part in parts(list(group), rows_at_once(model, tokens)):
            ids = torch.stack([each.ids for each in part]).to(model.device)
            logits = last_logits(model, ids, answer + 1)[:, :-1].float()
            wanted = ids[:, -answer:]
            told = logits.log_softmax(-1).gather(2, wanted[..., None]).sum((1, 2))
            right = logits.argmax(-1) == wanted
            yield from zip(right.tolist(), told.tolist(), strict=True)


def _size(each: Needle) -> tuple[int, int]:
    return len(each.ids), each.answer
