"""One branch alone: what a converted model answers with its near keys, or with its far ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from lln.nn.levels import Level

BRANCHES = ("near", "far")
ENOUGH = 1e4  # of γ: sigmoid(±ENOUGH) is 0 or 1 in every dtype, and no logarithm of sums comes near


@contextlib.contextmanager
def only(model: nn.Module, branch: str) -> Iterator[None]:
    """Let every near/far layer of ``model`` answer with one branch inside the block.

    Near alone is softmax over the near keys, far alone LLN over the far ones, each with a
    normaliser of its own. A row without far keys takes its near ones even then: in a decoder those
    are the first tokens, whose keys are all near. Generation follows, its caches
    too. Layers that kept softmax go on as before.

    Args:
        branch: "near" or "far".

    Raises:
        ValueError: No layer of the model has the two branches under one normaliser.

    Example:
        >>> with only(student, "far"):
        ...     embeddings = embed(student, batches)
    """
    if branch not in BRANCHES:
        raise ValueError(f"branch={branch!r} is unknown; choose from {', '.join(BRANCHES)}")
    levels = levels_of(model)
    before = [level.offset for level in levels]
    for level in levels:
        level.offset = -ENOUGH if branch == "near" else ENOUGH
    try:
        yield
    finally:
        for level, offset in zip(levels, before, strict=True):
            level.offset = offset


def levels_of(model: nn.Module) -> list[Level]:
    """What sets the far keys against the near ones in every near/far layer of a model."""
    levels = [module for module in model.modules() if isinstance(module, Level)]
    if not levels:
        raise ValueError(
            f"{type(model).__name__} has no layer with near and far keys under one normaliser; "
            'make them with lln.hf.replace(model, "lln_nearfar")'
        )
    return levels
