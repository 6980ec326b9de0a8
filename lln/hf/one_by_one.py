"""A layer's attention to packed sequences: each answers as if it had come alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from lln.hf.cores import calibration_of
from lln.hf.masks import padding_code
from lln.hf.packing import LENGTHS, Groups, take_heads, take_tokens
from lln.hf.rotation import HANDED_ON


def one_by_one(
    attend: Callable[..., tuple[Tensor, None]],
    core: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    sequences: Int[Tensor, "B N"],
    is_causal: bool,
    others: Mapping[str, Any],
) -> Float[Tensor, "B N H E"]:
    """Let a layer attend to padded batches of sequences of similar length.

    Args:
        attend: The layer's attention, ``(q, k, v, mask, ...)``.
        core: The layer's core; None where it keeps softmax.
        inputs: q, k and v, ``[B, H, N, D]``.
        sequences: The number of each token's sequence.
        others: Arguments that the layer hands on.
    """
    answers, groups = [], Groups.of(sequences, together=_learns_from_calls(core))
    for index, real in groups.parts:
        q, k, v = (take_heads(x, index) for x in inputs)
        mask = padding_code(real, len(index), is_causal=is_causal, device=q.device)
        options = _of_sequences(others, index, sequences)
        answers.append(attend(q, k, v, mask, is_causal=is_causal, **options)[0])
    return groups.join(answers, len(sequences))


def _of_sequences(
    others: Mapping[str, Any], index: Int[Tensor, "S L"], sequences: Int[Tensor, "B N"]
) -> dict[str, Any]:
    """What a layer hands on besides q, k and v, for some of the sequences."""
    rows, tokens = sequences.shape
    found = {name: value for name, value in others.items() if name not in LENGTHS}
    rotation, positions = found.get(HANDED_ON), found.get("position_ids")
    if rotation is not None:
        found[HANDED_ON] = rotation.of_sequences(index, rows)
    if positions is not None and positions.dim() == 2 and positions.shape[1] == tokens:
        found["position_ids"] = take_tokens(positions.expand(rows, -1), index.to(positions.device))
    return found


def _learns_from_calls(core: Any) -> bool:
    """Whether every call of a core counts for what it learns: all sequences must come in one."""
    calibration = calibration_of(core)
    if calibration is None:
        return getattr(core, "lesson", None) is not None
    running = calibration.kind == "running" and core.training
    return running or calibration.average is not None or getattr(core, "lesson", None) is not None
