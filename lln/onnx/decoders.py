"""A whole decoder as a graph of one step: a token and the state of all layers in, both out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lln.hf.decode.memory import empty_like
from lln.hf.serving.engine import Engine
from lln.hf.serving.seat_layer import cache_of
from lln.onnx.export import export
from lln.onnx.models import session_of

CHECKED = 20  # tokens that a check decodes


class DecoderStep(nn.Module):
    """One token of every stream of a batch through a Hugging Face decoder.

    Streams may stand at different positions. A stream begins with :meth:`empty` at position 0 and
    reads its prompt token by token; the tensors that come out go in with the next token. Their
    sizes do not depend on the length.

    Args:
        model: After :func:`lln.hf.replace`, calibrated, in evaluation mode, on a CPU; what
            :class:`lln.hf.Engine` serves.
        max_length: Of streams, where layers or heads keep softmax, as there.

    Example:
        >>> step = DecoderStep(model)
        >>> lln.onnx.export_decoder(step, "decoder.onnx")
    """

    def __init__(self, model: Any, *, max_length: int | None = None) -> None:
        super().__init__()
        self.model = model
        engine = Engine(model, 1, max_length=max_length, graph=False)
        self._layers, self.max_length = engine.layers, engine.max_length
        self.eval()

    @property
    def names(self) -> list[str]:
        """What the tensors of a state are called, in their order."""
        return [
            f"layer{number}.{name}"
            for number, layer in enumerate(self._layers)
            for name in layer.tensors
        ]

    @property
    def longest_window(self) -> int:
        """Tokens after which every layer has keys that are not near."""
        near = [layer.core.near for layer in self._layers if layer.core is not None]
        return max((x.keys(True) for x in near if x is not None), default=0)

    def empty(self, batch: int) -> tuple[Tensor, ...]:
        """The state before the first token."""
        made = (empty_like(layer.tensors, batch) for layer in self._layers)
        return tuple(x for tensors in made for x in tensors.values())

    def forward(
        self, token: Int[Tensor, " B"], position: Int[Tensor, " B"], *state: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits ``[B, V]`` of what comes next, and the state after this token."""
        if len(state) != len(self.names):
            raise ValueError(f"got {len(state)} tensors of the state; pass {len(self.names)}")
        parts: Iterator[Tensor] = iter(state)
        layers = [
            layer.among({name: next(parts).clone() for name in layer.tensors}, position)
            for layer in self._layers
        ]
        out = self.model(
            input_ids=token[:, None],
            position_ids=position[:, None],
            past_key_values=cache_of(layers),
            use_cache=True,
        )
        return (out.logits[:, -1], *(x for layer in layers for x in layer.tensors.values()))


def export_decoder(step: DecoderStep, file: str | os.PathLike[str]) -> None:
    """Write a decoder's step for any batch.

    Inputs of the graph are ``token`` and ``position`` of int64 ``[B]`` and the tensors of the
    state, outputs ``logits`` and the tensors again, named ``next.…``.
    """
    batch = torch.export.Dim("batch", max=4096)
    rows = {0: batch}
    given = torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long), *step.empty(2)
    export(
        step,
        given,
        file,
        dynamic_shapes=(rows, rows, tuple(rows for _ in step.names)),
        input_names=["token", "position", *step.names],
        output_names=["logits", *(f"next.{name}" for name in step.names)],
    )


@dataclass(frozen=True)
class Checked:
    """A stream in onnxruntime beside ``generate``: its tokens, the largest difference of logits."""

    prompt: int
    tokens: int
    difference: float
    same: bool
    ms: float


@torch.no_grad()
def check_decoder(step: DecoderStep, file: str | os.PathLike[str]) -> Checked:
    """Read a seeded prompt and decode greedily by the graph, beside ``model.generate``.

    The prompt is a third longer than the windows of near keys, so that there are far ones, too, and
    no longer than learned positions allow.

    Returns:
        The difference in the largest logit, over all steps; whether the graph would have chosen the
        same tokens; milliseconds of a step.
    """
    model, generator, tokens = step.model, torch.Generator().manual_seed(0), CHECKED
    prompt = max(12, step.longest_window * 4 // 3)
    if step.max_length is not None:
        prompt = min(prompt, max(1, step.max_length - tokens))
        tokens = min(tokens, step.max_length - prompt)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (1, prompt), generator=generator)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    expected, said = torch.cat(out.logits), out.sequences[0]
    session = session_of(os.fspath(file))
    names = [entry.name for entry in session.get_inputs()]
    state: list[Any] = [x.numpy() for x in step.empty(1)]
    found, seconds = [], 0.0
    for place in range(prompt + tokens - 1):
        fed = [said[place : place + 1].numpy(), torch.tensor([place]).numpy(), *state]
        start = time.perf_counter()
        logits, *state = session.run(None, dict(zip(names, fed, strict=True)))
        seconds += time.perf_counter() - start
        found.append(torch.from_numpy(logits))
    answers = torch.cat(found[prompt - 1 :])
    difference = ((answers - expected).abs().max() / expected.abs().max()).item()
    same = bool((answers.argmax(-1) == expected.argmax(-1)).all())
    return Checked(prompt, tokens, difference, same, 1e3 * seconds / len(found))
