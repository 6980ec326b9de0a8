"""Attention transfer: every replaced layer learns what softmax answered in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lln.hf.replace import attention_modules
from lln.hf.swapped_attention import SwappedAttention

Row = dict[str, Any]


class Lesson:
    """Compares a layer's output with that of softmax in every batch, and computes its gradient."""

    def __init__(self, *, learn: bool) -> None:
        self.learn = learn
        self.errors: list[Tensor] = []

    def compare(
        self,
        answer: Callable[[Tensor, Tensor, Tensor], Tensor],
        qkv: tuple[Tensor, Tensor, Tensor],
        wanted: Tensor,
        query_mask: Tensor | None,
    ) -> None:
        """Add the error of an answer ``[B, H, N, E]`` against the one wanted, at real queries."""
        with torch.set_grad_enabled(self.learn):
            given = answer(*(x.detach() for x in qkv)).float()
            wanted = wanted.detach().float()
            if query_mask is not None:
                real = query_mask[:, None, :, None]
                given, wanted = given * real, wanted * real
            error = (given - wanted).square().sum() / wanted.square().sum().clamp(min=1e-12)
            if self.learn:
                error.backward()
        self.errors.append(error.detach())


def transfer(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], *, learning_rate: float = 5e-2
) -> list[Row]:
    """Teach the replaced layers of a trained model to answer as softmax attention did there.

    Softmax answers in every layer while the attention core learns from the same queries, keys and
    values, a layer at a time: the error is ‖core − softmax‖² / ‖softmax‖² over real tokens, and
    Adam changes the parameters of the cores alone (α and β with ``learn_scale=True``, the branches
    with ``mix="learned"``, filters, feature maps). One update per batch, with a rate that falls
    to 0 if the number of batches is known.

    Args:
        batches: Arguments of the model by name, ``{"input_ids": ids, "attention_mask": mask}``.
        learning_rate: Large, as what learns are logarithms and logits; 0 only measures.

    Returns:
        A row per batch and layer: ``step``, ``layer``, ``error``, before the update of that batch.
        Mode, other weights and their gradients are left alone; after an error the cores are as
        before.

    Example:
        >>> lln.hf.replace(model, "lln_diag", mix="learned", learn_scale=True)
        >>> rows = lln.hf.transfer(model, batches)
        >>> rows[0]["error"], rows[-1]["error"]
    """
    if learning_rate < 0:
        raise ValueError(f"learning_rate={learning_rate} is negative; pass 0 to only measure")
    cores = _cores(model)
    parameters = [x for core in cores.values() for x in core.parameters() if x.requires_grad]
    if learning_rate and not parameters:
        raise ValueError(
            "the replaced layers have nothing to learn; give replace() learn_scale=True, "
            'mix="learned" or conv=, or pass learning_rate=0 to only measure their error'
        )
    lessons = {name: Lesson(learn=learning_rate > 0) for name in cores}
    optimizer = torch.optim.Adam(parameters, lr=learning_rate) if learning_rate else None
    count = len(batches) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
    training = [module for module in model.modules() if module.training]
    before = [(x.detach().clone(), x.grad) for x in parameters]
    steps = 0
    try:
        for name, core in cores.items():
            core.lesson = lessons[name]  # pyright: ignore[reportArgumentType]
        model.eval()
        for batch in batches:
            if optimizer is not None:
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * (1 - steps / count if count else 1)
            with torch.no_grad():
                model(**batch)
            if optimizer is not None:
                optimizer.step()
            steps += 1
        if steps == 0:
            raise ValueError("batches is empty; pass at least one dictionary of model inputs")
        rows = _rows(lessons, steps)
    except BaseException:
        for parameter, (value, _) in zip(parameters, before, strict=True):
            parameter.data.copy_(value)
        raise
    finally:
        for core in cores.values():
            del core.lesson
        for module in training:
            module.training = True
        for parameter, (_, gradient) in zip(parameters, before, strict=True):
            parameter.grad = gradient
    return rows


def _cores(model: nn.Module) -> dict[str, nn.Module]:
    """The cores that take a layer's queries, keys and values, by the path of the layer."""
    places = attention_modules(model)
    found = {
        path: layer._modules["lln"] for path, layer in places.items() if "lln" in layer._modules
    }
    if not found:
        whole = any(isinstance(layer, SwappedAttention) for layer in places.values())
        reason = (
            "has layers that make their own queries and keys, which softmax cannot teach"
            if whole
            else "has no replaced layer yet"
        )
        raise ValueError(
            f"{type(model).__name__} {reason}; call lln.hf.replace(model, 'lln_diag', ...), then "
            "transfer"
        )
    return {path: core for path, core in found.items() if core is not None}


def _rows(lessons: Mapping[str, Lesson], steps: int) -> list[Row]:
    """Read the errors of all batches at the end, so that no batch waits for the device."""
    rows = []
    for name, lesson in lessons.items():
        calls = torch.stack(lesson.errors).view(steps, -1).mean(1).tolist() if lesson.errors else []
        rows += [{"step": step, "layer": name, "error": error} for step, error in enumerate(calls)]
    rows.sort(key=lambda row: row["step"])
    for row in rows:
        if not math.isfinite(row["error"]):
            raise ValueError(
                f"{row['layer']} has an error of {row['error']} in batch {row['step']}; lower "
                "learning_rate, or look for NaN in the model"
            )
    return rows
