"""Attention transfer: every replaced layer learns what softmax answered in its place."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lln.hf.conversion import short_windows as windows
from lln.hf.conversion.lessons import Lesson
from lln.hf.conversion.stage import (
    Row,
    Stage,
    check_gradients,
    in_float32,
    learn,
    without_labels,
)
from lln.hf.replace import attention_modules
from lln.hf.swapped_attention import SwappedAttention


def transfer(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    learning_rate: float = 2e-2,
    warmup: int = 10,
    rows: int = 64,
    weights: float = 0.3,
    short_windows: float = 0.0,
    seed: int = 0,
    precision: torch.dtype | None = None,
    stage: Stage | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> list[Row]:
    """Teach the replaced layers of a trained model to answer as softmax attention did there.

    Softmax answers in every layer while the attention core learns from the same queries, keys and
    values, a layer at a time, so that nothing is propagated through the model: Adam changes the
    parameters of the cores alone (feature maps, factors of α and β, levels, mix, filters). LLN
    learns from ``rows`` queries of each sample, from the squared error of their outputs beside the
    variance of the head, and from the divergence of their attention weights; other mechanisms from
    the error of all outputs. Cores of half precision learn in float32 and are rounded at the end.
    One update per batch, with a rate that rises for ``warmup`` batches
    and falls to 0 along a cosine if their number is known. Gradients are averaged over the
    processes of torch.distributed, where there are several.

    Args:
        batches: Arguments of the model by name, ``{"input_ids": ids, "attention_mask": mask}``.
        learning_rate: Large, as what learns are logarithms and maps; 0 only measures, all queries.
        warmup: At most a tenth of a known number of batches.
        rows: 0 compares all queries, and the outputs alone.
        weights: Factor of KL(softmax ‖ LLN) of the attention weights.
        short_windows: Share of the updates in which near windows end after the last few tokens, so
            that the far branch is not bypassed.
        seed: Of the choice of rows, and of updates with short windows.
        precision: ``torch.bfloat16`` computes the model under autocast; the comparison stays as it
            is. None as it is.
        stage: Where progress is kept; the same call again goes on where it was killed. ``batches``
            then starts from the beginning: what was done is skipped.
        progress: Called after each batch with the number done and the mean error of the layers.

    Returns:
        A row per batch and layer: ``step``, ``layer``, ``error`` = ‖core − softmax‖² / ‖softmax‖²
        before the update of that batch; with ``learning_rate=0`` also ``heads``, the part of each
        head in it (they add up). Mode, other weights and their gradients are left alone;
        after an error the cores are as before.

    Example:
        >>> lln.hf.replace(model, "lln_nearfar", feature_map="learned", learn_scale=True)
        >>> lln.hf.calibrate(model, batches[:4])
        >>> found = lln.hf.transfer(model, batches)
        >>> found[0]["error"], found[-1]["error"]
    """
    if learning_rate < 0:
        raise ValueError(f"learning_rate={learning_rate} is negative; pass 0 to only measure")
    windows.check_short_windows(short_windows)
    cores = cores_of(model)
    named = {
        f"{path}.{name}": parameter
        for path, core in cores.items()
        for name, parameter in core.named_parameters()
        if parameter.requires_grad
    }
    learns = learning_rate > 0
    if learns:
        check_gradients("transfer")
    if learns and not named:
        raise ValueError(
            'the replaced layers have nothing to learn; give replace() feature_map="learned", '
            'learn_scale=True, mix="learned" or conv=, or pass learning_rate=0 to only measure '
            "their error"
        )
    parameters = list(named.values())
    groups = [{"params": parameters, "factor": 1.0}]
    optimizer = torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.98)) if learns else None
    device = next(iter(model.parameters())).device.type
    generator = torch.Generator()
    options = {"rows": rows, "weights": weights} if learns else {}
    lessons = {path: Lesson(**options, learn=learns, generator=generator) for path in cores}

    def add_gradients(step: int, pieces: Sequence[Mapping[str, Any]]) -> None:
        generator.manual_seed(seed * 1_000_003 + step + 1)
        short = windows.short_windows(cores.values(), short_windows, seed=seed, step=step)
        autocast = torch.autocast(device, precision, enabled=precision is not None)
        with torch.no_grad(), autocast, short:
            model(**without_labels(pieces[0]))

    def rows_of(step: int, _: None) -> list[Row]:
        return _read(lessons, step, by_head=not learns)

    with _taught(model, cores, lessons, parameters), in_float32(cores.values() if learns else ()):
        return learn(
            batches, add_gradients, rows_of, measure="error", optimizer=optimizer, parameters=named,
            buffers=buffers_of(cores), learning_rate=learning_rate, warmup=warmup, stage=stage,
            progress=progress,
        )  # fmt: skip


@contextlib.contextmanager
def _taught(
    model: nn.Module,
    cores: Mapping[str, nn.Module],
    lessons: Mapping[str, Lesson],
    parameters: list[nn.Parameter],
) -> Iterator[None]:
    """Let softmax answer in every layer; after an error the cores are as before."""
    training = [module for module in model.modules() if module.training]
    before = [(x.detach().clone(), x.grad) for x in parameters]
    try:
        for path, core in cores.items():
            core.lesson = lessons[path]  # pyright: ignore[reportArgumentType]
        model.eval()
        yield
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


def cores_of(model: nn.Module) -> dict[str, nn.Module]:
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


def buffers_of(cores: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """What the cores measured or drew, by path and name."""
    return {f"{path}.{name}": x for path, core in cores.items() for name, x in core.named_buffers()}


def _read(lessons: Mapping[str, Lesson], step: int, *, by_head: bool) -> list[Row]:
    """The errors of one batch, a row per layer; a layer that was called twice gives their mean."""
    called = {path: lesson.errors for path, lesson in lessons.items() if lesson.errors}
    if not called:
        return []
    parts = [torch.stack(found).mean(0) for found in called.values()]
    flat = iter(torch.cat(parts).tolist())  # looking at a tensor waits for a GPU: once
    heads = [list(itertools.islice(flat, len(part))) for part in parts]
    errors = [sum(each) for each in heads]
    for path, error in zip(called, errors, strict=True):
        lessons[path].errors.clear()
        if not math.isfinite(error):
            raise ValueError(
                f"{path} has an error of {error} in batch {step}; lower learning_rate, or look for "
                "NaN in the model"
            )
    return [
        {"step": step, "layer": path, "error": error, **({"heads": each} if by_head else {})}
        for path, error, each in zip(called, errors, heads, strict=True)
    ]
