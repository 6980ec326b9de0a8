"""What every key head is worth to a decoder that looks far back, on tasks that are generated.

A task says pieces of random tokens, goes on, and asks for each again: its cue is repeated, and the
loss is −ln p of the tokens that had followed it. Between the two lie more tokens than any window
holds, so that linear layers lose, and the loss is shared out among the heads.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lln.hf import cores
from lln.hf.conversion.transfer import cores_of
from lln.hf.replace import attention_modules
from lln.hf.softmax import SoftmaxCall

ROOM = 768  # tokens of a sequence beyond the window
WINDOW = 64  # tokens that count as near where attention has no window
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Task:
    """How a piece is made: tokens that are repeated, that are asked for, and that only follow."""

    cue: int
    answer: int
    filler: int

    @property
    def size(self) -> int:
        """Tokens of a piece."""
        return self.cue + self.answer + self.filler


#: Many pairs of a key and a value, and a few longer sayings with other words between them.
TASKS = {"pairs": Task(2, 1, 0), "needles": Task(4, 4, 8)}


@dataclass(frozen=True)
class Recall:
    """Sequences of one layout.

    Attributes:
        ids: The sequences.
        asked: Places of the tokens whose probability counts, the same in every sequence.
        beyond: Each was said more than so many tokens before.
    """

    ids: Int[Tensor, "B N"]
    asked: Int[Tensor, " n"]
    beyond: int

    def one_by_one(self) -> list[Recall]:
        """The sequences by themselves, which take the memory of one."""
        return [Recall(ids, self.asked, self.beyond) for ids in self.ids.split(1)]


def recall(
    task: Task,
    vocabulary: Int[Tensor, " V"],
    *,
    start: Sequence[int] = (),
    beyond: int,
    length: int,
    count: int,
    seed: int = 0,
) -> Recall:
    """Draw sequences of a task.

    Args:
        vocabulary: Tokens that may stand in them.
        start: Tokens before everything else.
        beyond: Least distance between an answer and where it was said.
        length: Most tokens of a sequence.
        count: Sequences.
    """
    pieces = min((length - len(start) - beyond) // (2 * task.size), len(vocabulary) // 2)
    if pieces < 1:
        least = len(start) + beyond + 2 * task.size
        raise ValueError(
            f"length={length} has no room for a piece that is asked for more than {beyond} tokens "
            f'later; give at least {least} tokens, fewer near keys, or keep_by="error"'
        )
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return vocabulary[torch.randint(len(vocabulary), shape, generator=generator)]

    rows = []
    for _ in range(count):
        said = draw(pieces, task.size)
        order = torch.randperm(len(vocabulary), generator=generator)
        said[:, 0] = vocabulary[order[:pieces]]  # no two pieces begin alike
        again = said[torch.randperm(pieces, generator=generator)]
        parts = torch.tensor(start), said.flatten(), draw(beyond), again.flatten()
        rows.append(torch.cat(parts).long())
    first = len(start) + pieces * task.size + beyond
    answers = torch.arange(task.cue, task.cue + task.answer)
    places = first + task.size * torch.arange(pieces)[:, None] + answers
    return Recall(torch.stack(rows), places.flatten(), beyond)


def answers(model: Any, asked: Recall) -> Float[Tensor, "B n V"]:
    """Logits of the tokens that are asked for."""
    ids, places = (x.to(model.device) for x in (asked.ids, asked.asked))
    count = ids.shape[1] - int(asked.asked[0]) + 1
    chooses = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": count} if chooses else {}
    logits = model(ids, use_cache=False, **options).logits[:, -count:]
    return logits[:, places - (ids.shape[1] - count) - 1].float()


def losses(model: Any, asked: Recall) -> Float[Tensor, " B"]:
    """−ln p of what is asked for, the mean of each sequence, in nats."""
    found = answers(model, asked)
    wanted = asked.ids[:, asked.asked].to(found.device)
    return F.cross_entropy(found.mT, wanted, reduction="none").mean(1)


def can_retrieve(model: Any) -> bool:
    """Whether a model predicts the next token of a text."""
    reads = model.main_input_name == "input_ids" and not model.config.is_encoder_decoder
    return bool(reads and model.can_generate())


def tasks_for(
    model: Any, *, length: int | None = None, count: int = 4, seed: int = 0
) -> dict[str, Recall]:
    """The ``TASKS`` at distances beyond the window of a converted decoder, in its own tokens.

    Args:
        length: Tokens of a sequence; by default 768 more than the window.
        count: Sequences of each task.
    """
    config = model.config.get_text_config()
    fields = [getattr(core, "near", None) for core in cores_of(model).values()]
    beyond = max(WINDOW if field is None else field.keys(True) for field in fields)
    if length is None:
        length = min(beyond + ROOM, getattr(config, "max_position_embeddings", beyond + ROOM))
    special = torch.tensor([x for x in map(config.to_dict().get, SPECIAL) if isinstance(x, int)])
    known = torch.arange(model.get_input_embeddings().num_embeddings)
    options = {
        "start": [] if config.bos_token_id is None else [config.bos_token_id],
        "beyond": beyond,
        "length": length,
        "count": count,
        "seed": seed,
    }
    vocabulary = known[~torch.isin(known, special)]
    return {name: recall(task, vocabulary, **options) for name, task in TASKS.items()}


def worth_of_key_heads(
    model: Any, *, length: int | None = None, count: int = 4, points: int = 4, seed: int = 0
) -> dict[int, list[float]]:
    """Nats that a decoder loses on generated recall by each key head that is linear, by layer.

    All key heads go from softmax to their linear answer together, in ``points`` steps, and every
    head is credited with its part of the way: the integral of the derivative of −ln p by its share
    of the linear answer (integrated gradients). The parts add up to what the model loses in all,
    so heads that stand in for each other share it, and heads that need each other both have it.
    Ablating one head at a time sees neither, and takes a pass a head in place of one a point.

    Args:
        model: A decoder after :func:`lln.hf.replace` and calibration; taught or not, a linear head
            copies from no further than its window.
        length: Tokens of a sequence; by default 768 more than the window.
        count: Sequences of each of the ``TASKS``.
        seed: Of their tokens.
    """
    tasks = tasks_for(model, length=length, count=count, seed=seed)
    with _mixed(model) as trials:
        shares = [trial.linear for trial in trials.values()]
        totals = [torch.zeros_like(share) for share in shares]
        for point in range(points):
            for share in shares:
                share.data.fill_((point + 0.5) / points)
            for asked in (one for task in tasks.values() for one in task.one_by_one()):
                found = torch.autograd.grad(losses(model, asked).sum(), shares)
                totals = [total + part for total, part in zip(totals, found, strict=True)]
    parts = points * count * len(tasks)
    return {number: (total / parts).tolist() for number, total in zip(trials, totals, strict=True)}


@dataclass
class Trial:
    """What a layer answers in place of a lesson: softmax in part.

    Attributes:
        linear: Share of the core's answer in each key head; the rest is softmax's.
    """

    linear: Float[Tensor, " Hkv"]

    def answer(
        self, core: object, answer: Callable[..., Tensor], call: SoftmaxCall
    ) -> Float[Tensor, "B H N E"]:
        """The mixture of both."""
        given = answer(call.q, call.k, call.v).to(call.wanted.dtype)
        share = self.linear.repeat_interleave(given.shape[1] // len(self.linear))
        return torch.lerp(call.wanted, given, share[:, None, None].to(given.dtype))


@contextlib.contextmanager
def _mixed(model: Any) -> Iterator[dict[int, Trial]]:
    """Let a trial answer in every replaced layer, by its number; afterwards all is as before."""
    training = [module for module in model.modules() if module.training]
    trials: dict[int, Trial] = {}
    found = cores_of(model)
    try:
        model.eval()
        for number, (path, layer) in enumerate(attention_modules(model).items()):
            if path in found:
                heads = cores.place_of(layer, path).num_kv_heads
                share = torch.zeros(heads, device=model.device, requires_grad=True)
                trials[number] = found[path].lesson = Trial(share)  # pyright: ignore
        yield trials
    finally:
        for core in found.values():
            core.__dict__.pop("lesson", None)
        for module in training:
            module.training = True
