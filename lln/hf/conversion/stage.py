"""What the stages of a conversion share: updates, processes, and going on after a kill."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lln.records.files import let_others_read

Row = dict[str, Any]


def rate_at(step: int, steps: int | None, warmup: int) -> float:
    """The share of the highest rate: linear up, then half a cosine down to 0 at ``steps``.

    Without a known number of steps it stays up.
    """
    if step < warmup:
        return (step + 1) / warmup
    if steps is None:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def check_gradients(function: str) -> None:
    """Raise where torch was told that nobody wants gradients."""
    if not torch.is_grad_enabled():
        raise ValueError(
            f"lln.hf.{function} learns and needs gradients; call it outside of torch.no_grad() or "
            "torch.inference_mode()"
        )


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is given: labels would make it compute a loss that nobody reads."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batches: a batch is a {type(batch).__name__}; pass a dictionary of model inputs, "
            '{"input_ids": ids}'
        )
    for name in ("input_ids", "attention_mask", "labels"):
        if isinstance(batch.get(name), (list, tuple)):
            raise TypeError(
                f"batches: {name} is a {type(batch[name]).__name__}; pass tensors, by "
                f'torch.tensor({name}) or return_tensors="pt" of the tokenizer'
            )
    return {name: value for name, value in batch.items() if name != "labels"}


HALVES = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def in_float32(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Hold weights and buffers of half precision in float32 inside the block.

    Updates are smaller than what half precision can tell apart, so that most would be lost.
    """
    tensors = {
        id(x): (x, x.dtype)
        for module in modules
        for x in (*module.parameters(), *module.buffers())
        if x.dtype in HALVES
    }
    try:
        for x, _ in tensors.values():
            x.data = x.data.float()
        yield
    finally:
        for x, dtype in tensors.values():
            x.data = x.data.to(dtype)


def widen(value: Any) -> Any:
    """A tensor of half precision in float32; everything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


@contextlib.contextmanager
def drawn_by(seed: int, step: int, device: torch.device) -> Iterator[None]:
    """Let random draws follow from the step alone, in every process its own, inside the block."""
    devices = [device] if device.type == "cuda" else []
    rank = dist.get_rank() if processes() > 1 else 0
    with torch.random.fork_rng(devices):
        torch.manual_seed((seed * 1_000_003 + step) * processes() + rank)
        yield


def processes() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Give all processes the mean of their gradients; each has its own batches."""
    count = processes()
    if count == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:  # a process whose batch did not reach it still takes part
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= count


def broadcast(model: nn.Module) -> None:
    """Give all processes what the first one measured."""
    if processes() > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)


def agreed(value: Any) -> Any:
    """What the first process found, in all of them: their batches and clocks differ."""
    if processes() == 1:
        return value
    found = [value]
    dist.broadcast_object_list(found, 0)
    return found[0]


class Stage:
    """Progress of one stage on disk: what has been learned, the optimiser's memory, the rows.

    Args:
        path: File that is written, as safetensors, never a pickle.
        every: Steps between two writes; 0 writes at the end only.
        belongs: What decides the result, by name. A file that was begun with something else is
            refused, and stays.

    Attributes:
        choices: What was decided on the way, kept with the progress; of the file, if there is one.

    Raises:
        ValueError: The file is of another conversion.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int = 50,
        belongs: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.every = Path(path), every
        self.belongs = json.loads(json.dumps(belongs or {}, default=str))
        said = self._said()
        self.choices: Row = said.get("choices", {})
        before = said.get("belongs", self.belongs)
        for name in {**before, **self.belongs}:
            if before.get(name) != self.belongs.get(name):
                raise ValueError(
                    f"{self.path.parent} holds another conversion: its {self.path.name} was begun "
                    f"with {name}={before.get(name)}, not {self.belongs.get(name)}; go on with "
                    "that, pass another folder, or delete this one"
                )

    def _said(self) -> Row:
        """What the file says beside its tensors; nothing if there is none."""
        from safetensors import safe_open

        if not self.path.exists():
            return {}
        with safe_open(self.path, framework="pt") as file:
            return json.loads((file.metadata() or {})["progress"])

    def load(
        self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> tuple[int, list[Row]]:
        """The step to go on at and the rows so far; 0 and none if nothing was written.

        Args:
            parameters: What learns, and buffers beside it.
        """
        from safetensors.torch import load_file

        if not self.path.exists():
            return 0, []
        said, found = self._said(), load_file(self.path)
        missing = [name for name in parameters if name not in found]
        if missing:
            raise ValueError(
                f"{self.path} is of another conversion: it has no {missing[0]!r}; go on with the "
                "options it was begun with, or remove the file to start again"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(found[name])
                state = {
                    key: found[f"{name}/{key}"].to(parameter.device if key != "step" else "cpu")
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{name}/{key}" in found
                }
                if state:
                    optimizer.state[parameter] = state
        return said["step"], said["rows"]

    def save(
        self,
        step: int,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        rows: list[Row],
        *,
        last: bool = False,
    ) -> None:
        """Write, if it is time or the ``last`` step; all of it or nothing."""
        early = not last and (not self.every or step % self.every)
        if early or (processes() > 1 and dist.get_rank()):
            return
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            tensors[name] = parameter.detach().cpu().contiguous()
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value.detach().cpu().contiguous()
        said = {"step": step, "rows": rows, "belongs": self.belongs, "choices": self.choices}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        save_file(tensors, part, metadata={"progress": json.dumps(said)})
        let_others_read(part)
        part.replace(self.path)


def learn(
    batches: Iterable[Mapping[str, Any]],
    add_gradients: Callable[[int, Sequence[Mapping[str, Any]]], Any],
    rows_of: Callable[[int, Any], list[Row]],
    *,
    measure: str,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    learning_rate: float,
    warmup: int,
    accumulation: int = 1,
    clip: float = 0.0,
    stage: Stage | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> list[Row]:
    """Update parameters batch by batch, from where ``stage`` stopped; the rows of all updates.

    Args:
        add_gradients: Called with the number of the update and its batches.
        rows_of: Called after the update, with its number and what ``add_gradients`` returned: to
            look at a tensor any earlier would let a GPU wait.
        measure: The number of a row that ``progress`` is told, the mean over the rows of an update.
        parameters: What learns, by name.
        buffers: What is kept beside it.
        optimizer: Its groups have the ``factor`` of their rate; None only measures.
        warmup: Updates with a rising rate, at most a tenth of a known number of them.
    """
    count = -(-len(batches) // accumulation) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
    warmup = warmup if count is None else min(warmup, count // 10)
    kept = {**parameters, **buffers}
    step, found = 0, []
    if stage is not None and optimizer is not None:
        step, found = stage.load(kept, optimizer)
    stream = itertools.islice(batches, step * accumulation, None)
    while pieces := list(itertools.islice(stream, accumulation)):
        if optimizer is not None:
            optimizer.zero_grad()
        result = add_gradients(step, pieces)
        if optimizer is not None:
            average_gradients(list(parameters.values()))
            if clip:
                nn.utils.clip_grad_norm_(parameters.values(), clip)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["factor"] * rate_at(step, count, warmup)
            optimizer.step()
        rows = rows_of(step, result)
        found += rows
        step += 1
        if progress is not None:
            progress(step, sum(row[measure] for row in rows) / len(rows))
        if stage is not None and optimizer is not None:
            stage.save(step, kept, optimizer, found, last=step == count)
    if step == 0:
        raise ValueError("batches is empty; pass at least one dictionary of model inputs")
    return found
