"""Tiny models whose attention matters: linear attention is visibly wrong in them at first."""

from __future__ import annotations

from tests.hf.tiny import make


def loud(family: str, head: str | None = None, factor: float = 3.0):
    model = make(family, head=head)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("query.weight", "key.weight", "q_proj", "k_proj")):
            parameter.data.mul_(factor)
        if any(part in name for part in ("value.weight", "v_proj")):
            parameter.data.mul_(4)
    return model
