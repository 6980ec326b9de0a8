"""Judges of a conversion: what is measured after every stage, and at the end."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lln.conversion import branches, decoders, encoders, needles
from lln.conversion.masking import Masking, masked_scores
from lln.conversion.recall import recall_rows
from lln.conversion.shares import near_shares
from lln.conversion.subject import Subject, Texts
from lln.conversion.texts import Batches, TooShort, encoder_batches
from lln.hf.conversion.recover import copy_teacher
from lln.texts import glue

Row = dict[str, Any]
WINDOW = 2048  # tokens of perplexity and needles
LONGEST_ON_GPU = (
    8192  # tokens of the loss by position, of needles further back, of perplexity again
)
FURTHEST = 6000  # tokens back to a needle
SHARE_BATCHES = 2
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 48, 48


@dataclass
class Remembered:
    """A teacher whose states of the same inputs are computed once, for :mod:`.encoders`."""

    teacher: Any
    states: dict[bytes, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.teacher.device

    @property
    def base_model(self) -> Remembered:
        return self

    def __call__(self, **given: Tensor) -> Any:
        key = given["input_ids"].cpu().numpy().tobytes()
        if key not in self.states:
            self.states[key] = self.teacher.base_model(**given).last_hidden_state.cpu()
        return SimpleNamespace(last_hidden_state=self.states[key].to(self.device))


class EncoderJudge:
    """Compares embeddings with the teacher's at the full length, on articles that are held out.

    Where fewer than three articles are long enough, as in a text without headings, they are cut
    into pieces, and these judge. A masked language model predicts hidden tokens of the same
    articles, too.

    Args:
        articles: How many; fewer if the text has fewer.
    """

    kind = "encoder"

    def __init__(
        self, subject: Subject, texts: Texts, *, length: int, batch_size: int, articles: int
    ) -> None:
        self.subject, self.texts = subject, texts
        self.length, self.batch_size, self.articles = length, batch_size, articles
        self.notes: list[str] = []
        self.teacher = copy_teacher(subject.model)
        self.remembered = Remembered(self.teacher)
        self.in_pieces = False
        self.judged = self._choose()

    def _choose(self) -> Batches:
        """Full articles; else full pieces of them; else whatever there is."""
        found = self._sequences(fill=1.0)
        if len(found) < encoders.PAIRED:
            self.in_pieces = True
            found = self._sequences(fill=1.0, every_piece=True)
            words = f"is cut into pieces of {self.length} tokens"
            if len(found) < encoders.PAIRED:
                found = self._sequences(every_piece=True)
                words += ", and shorter ones judge, too"
            self.notes.append(
                f"The held-out text has fewer than {encoders.PAIRED} articles of {self.length} "
                f"tokens: it {words}."
            )
        if len(found) < self.articles:
            what = "pieces" if self.in_pieces else "articles"
            self.notes.append(
                f"Judged by {len(found)} held-out {what}: there are not {self.articles}."
            )
        if len(found) < encoders.PAIRED:
            self.notes.append(
                "Their similarities are not judged: similarities are compared among three texts "
                "or more. Pass more text, --held-out FILE, or a smaller --length."
            )
        pad = self.subject.tokenizer.pad_token_id
        return Batches(found, self.batch_size, 0 if pad is None else pad)

    def _sequences(self, **options: Any) -> Sequence[np.ndarray]:
        """Held-out sequences, as :func:`encoder_batches` makes them; none of a text too short."""
        given = (self.subject.tokenizer, self.texts.held(), self.length)
        sizes = {"batch_size": self.batch_size, "limit": self.articles}
        try:
            return encoder_batches(*given, **sizes, **options).sequences
        except TooShort:
            return ()

    @property
    def sequences(self) -> Sequence[np.ndarray]:
        """The ids that judge."""
        return self.judged.sequences

    @property
    def tokens(self) -> int:
        """Tokens of one pass over what is judged."""
        return sum(map(len, self.judged.sequences))

    def work(self, stages: int) -> tuple[float, float]:
        """About how many tokens the teacher and the student read, with so many stages."""
        passes = 2 if self.subject.predicts_hidden_tokens else 1
        halves = 2
        alone = len(branches.BRANCHES)
        return (passes + halves) * self.tokens, (passes * (stages + alone) + halves) * self.tokens

    def measure(self, model: Any) -> Row:
        """Scores after a stage; those of the untouched model are its agreement with itself."""
        untouched = not getattr(model.config, "lln", None)
        student = self.remembered if untouched else model
        found: Row = encoders.compare_embeddings(
            self.remembered, student, self.judged, label="judging"
        )
        masking = Masking.of(self.subject.tokenizer)
        if self.subject.predicts_hidden_tokens and masking is not None:
            found |= masked_scores(model, self.judged, masking, label="hidden tokens")
        return found

    def agreement(self, scores: Row) -> float | None:
        """What ``--require`` compares: 1 is as good as the teacher; None if it is not known."""
        return scores.get("cosine_mean")

    def finish(self, student: Any) -> Row:
        """Everything else: branches alone, near shares, retrieval, STS-B."""
        found: Row = {
            "branches": _alone(student, self.measure),
            "near_shares": near_shares(student, list(self.judged.between(0, self._few()))),
        }
        models = {"teacher": self.teacher, "student": student}
        if pairs := self._halves():
            found["retrieval"] = {
                name: encoders.retrieval(model, pairs, label=f"halves, {name}")
                for name, model in models.items()
            } | {"articles": len(pairs.first.sequences), "length": self.length}
        if _has_sts():
            found["sts"] = {
                name: encoders.sts(model, self.subject.tokenizer, label=f"STS-B, {name}")
                for name, model in models.items()
            }
        return found

    def _few(self) -> int:
        return min(SHARE_BATCHES, len(self.judged))

    def _halves(self) -> encoders.Halves | None:
        options: dict[str, Any] = {"batch_size": self.batch_size, "every_piece": self.in_pieces}
        for count in (self.articles, None):
            try:
                held = self.texts.held()
                return encoders.halves(
                    self.subject.tokenizer, held, self.length, count=count, **options
                )
            except TooShort:
                continue
        what = "pieces" if self.in_pieces else "articles"
        self.notes.append(f"No retrieval: fewer than two {what} have {2 * self.length} tokens.")
        return None


class DecoderJudge:
    """Measures perplexity, loss by position, needles and generation on text that is held out.

    Args:
        articles: How many make the text; fewer if there are fewer.
    """

    kind = "decoder"

    def __init__(
        self, subject: Subject, texts: Texts, *, length: int, batch_size: int, articles: int
    ) -> None:
        self.subject, self.texts, self.length = subject, texts, length
        self.notes: list[str] = []
        self.teacher = copy_teacher(subject.model)
        text = texts.judged_text(articles)
        given = subject.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        self.ids = torch.tensor(given)
        self.window = subject.at_most(WINDOW)
        if len(self.ids) < self.window:
            self.notes.append(
                f"The held-out text has {len(self.ids)} tokens, less than a window of "
                f"{self.window}: perplexity is uncertain, and positions end there."
            )

    @property
    def sequences(self) -> Sequence[np.ndarray]:
        """The ids that judge."""
        return [self.ids.numpy()]

    @property
    def tokens(self) -> int:
        """Tokens of one pass over what is judged: windows share half of it."""
        return 2 * len(self.ids)

    def work(self, stages: int) -> tuple[float, float]:
        """About how many tokens the teacher and the student read, with so many stages."""
        length = min(self.window, len(self.ids))
        distances = max(length.bit_length() - 4, 1)
        both = len(self.ids) + self._needle_count() * distances * length  # positions, needles
        if self.teacher.device.type == "cuda":  # both again, in longer windows
            both += 2 * len(self.ids) + self._needle_count() * 3 * LONGEST_ON_GPU
        return self.tokens + both, (stages + len(branches.BRANCHES)) * self.tokens + both

    def _needle_count(self) -> int:
        return 32 if self.teacher.device.type == "cuda" else 8

    def measure(self, model: Any) -> Row:
        """Perplexity after a stage."""
        options = {"window": self.window, "stride": self.window // 2}
        return decoders.perplexity(model, self.ids, **options, label="judging")

    def agreement(self, scores: Row) -> float | None:
        """What ``--require`` compares: the teacher's perplexity over that of the student."""
        own, wanted = scores.get("perplexity"), scores.get("teacher_perplexity")
        return None if own is None or wanted is None else wanted / own

    def finish(self, student: Any) -> Row:
        """Everything else: branches alone, near shares, positions, needles, texts."""
        models = {"teacher": self.teacher, "student": student}
        on_gpu = student.device.type == "cuda"
        most = self.subject.at_most(LONGEST_ON_GPU if on_gpu else WINDOW)
        longest = min(most, len(self.ids))
        return {
            "branches": _alone(student, self.measure),
            "near_shares": near_shares(student, self._windows()),
            "loss_by_position": {
                name: decoders.loss_by_position(
                    model, self.ids, length=longest, label=f"positions, {name}"
                )
                for name, model in models.items()
            },
            "perplexity_long": self._long(models, longest),
            "needles": self._needles(models, longest),
            "recall": self._recall(models),
            "texts": decoders.side_by_side(
                self.teacher,
                student,
                self.subject.tokenizer,
                self._prompts(),
                max_new_tokens=min(NEW_TOKENS, self.subject.at_most(4 * NEW_TOKENS) // 4),
            ),
        }

    def _windows(self) -> list[dict[str, Tensor]]:
        """The first windows of the text, as long as those that were learned from."""
        length = min(self.length, len(self.ids))
        count = min(SHARE_BATCHES, len(self.ids) // length)
        return [{"input_ids": own[None]} for own in self.ids[: count * length].view(count, length)]

    def _long(self, models: dict[str, Any], longest: int) -> Row:
        """Perplexity in longer windows, where text and model have them."""
        if longest <= self.window:
            return {}
        options = {"window": longest, "stride": longest // 2, "label": "longer windows"}
        found = {
            name: decoders.perplexity(x, self.ids, **options)["perplexity"]
            for name, x in models.items()
        }
        return {**found, "window": longest}

    def _needles(self, models: dict[str, Any], longest: int) -> list[Row]:
        """Needles in texts of a window, and in longer ones where they are further back."""
        length = min(self.window, len(self.ids))
        near = self._possible([1 << power for power in range(4, length.bit_length())], length)
        if not near:
            self.notes.append(f"No needles: {length} tokens are too few.")
            return []
        further = [1 << power for power in range(4, longest.bit_length())]
        far = self._possible([x for x in (*further, FURTHEST) if x > near[-1]], longest)
        given = (models, self.subject.tokenizer, self.ids)
        options = {"count": self._needle_count(), "label": "needles"}
        return [
            *needles.find_needles(*given, [None, *near], length=length, **options),
            *(needles.find_needles(*given, far, length=longest, **options) if far else ()),
        ]

    def _possible(self, distances: Sequence[int], length: int) -> list[int]:
        """The distances at which the sentence and the text have room."""
        found = []
        for distance in distances:
            with contextlib.suppress(ValueError):
                needles.needle(self.subject.tokenizer, self.ids, distance, length=length)
                found.append(distance)
        return found

    def _recall(self, models: dict[str, Any]) -> list[Row]:
        """Generated recall beyond the window; none where there is no window, or no room."""
        try:
            return recall_rows(models, models["student"])
        except ValueError as error:
            self.notes.append(f"No recall: {error}")
            return []

    def _prompts(self) -> list[str]:
        tokens = min(PROMPT_TOKENS, self.subject.at_most(2 * PROMPT_TOKENS) // 2)
        held = list(itertools.islice(self.texts.held(), PROMPTS))
        tokenizer = self.subject.tokenizer
        ids = (
            tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in held
        )
        return [tokenizer.decode(own[:tokens]) for own in ids]


Judge = EncoderJudge | DecoderJudge


def judge_of(
    subject: Subject, texts: Texts, *, length: int, batch_size: int, articles: int
) -> Judge:
    """The judge of an encoder or a decoder; it copies the model as it is now."""
    kind = DecoderJudge if subject.kind == "decoder" else EncoderJudge
    return kind(subject, texts, length=length, batch_size=batch_size, articles=articles)


def _alone(student: Any, measure: Any) -> dict[str, Row]:
    """Scores with one branch at a time; none of a model without two under one normaliser."""
    try:
        branches.levels_of(student)
    except ValueError:
        return {}
    found = {}
    for branch in branches.BRANCHES:
        with branches.only(student, branch):
            found[branch] = measure(student)
    return found


def _has_sts() -> bool:
    try:
        return bool(glue.find("stsb"))
    except ValueError:  # LLN_DATA is not set, or has no such files
        return False
