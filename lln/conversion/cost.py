"""Time and memory of teacher and student against the number of tokens, measured in turns."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln.conversion.watched import watched
from lln.device import memory
from lln.device.timing import MIN_SAMPLES
from lln.hf.conversion.cache_size import cache_bytes, filled_cache, read

Row = dict[str, Any]
NAMES = ("teacher", "student")
SHORT = 64  # tokens of a call before the measured one, which loads code


def forward_cost(
    teacher: Any,
    student: Any,
    lengths: Sequence[int],
    *,
    batch_size: int = 1,
    min_seconds: float = 1.0,
    with_memory: bool = True,
    label: str = "",
) -> list[Row]:
    """Time and peak memory of a forward pass without gradients, a row per length.

    The two models run in turns, so that a busy machine slows both. Decoders compute the logits of
    the last token alone. Encoders with fewer positions than tokens count them from 0 again, which
    costs the same.

    Args:
        min_seconds: Least time that both together run at a length.
        with_memory: Measure memory too; on a CPU that takes a process, which gets the models as
            files.
        label: Shows progress under this name.

    Returns:
        ``N``, ``batch_size``, ``device``, ``teacher_ms`` and ``student_ms`` (medians), ``ratio``
        (median of student / teacher over the turns), ``teacher_mb`` and ``student_mb``: peak beyond
        weights and inputs in 2**20 bytes; None where the system cannot tell.
    """
    models: dict[str, Any] = {"teacher": teacher, "student": student}
    rows = []
    for length in watched(lengths, label):
        runs = {name: _forward(model, length, batch_size) for name, model in models.items()}
        row = {"N": length, "batch_size": batch_size, "device": str(teacher.device)}
        rows.append(row | _in_turns(runs, teacher.device, min_seconds))
    if with_memory:
        on_gpu = teacher.device.type == "cuda"
        peaks = _cuda_peaks if on_gpu else _resident_peaks
        for name, values in peaks(models, lengths, batch_size).items():
            for row, value in zip(rows, values, strict=True):
                row[f"{name}_mb"] = value
    return rows


@torch.no_grad()
def decode_cost(
    teacher: Any,
    student: Any,
    contexts: Sequence[int],
    *,
    batch_size: int = 1,
    new_tokens: int = 16,
    chunk: int = 2048,
    label: str = "",
) -> list[Row]:
    """Time of a generated token and size of the cache, a row per context.

    Each model reads the same random tokens, ``chunk`` at a time, and then decodes, a token in turn.

    Returns:
        ``context``, ``batch_size``, ``device``, ``teacher_ms``, ``student_ms`` (medians over
        tokens), ``ratio`` (student / teacher), ``teacher_cache`` and ``student_cache`` in bytes,
        after the context was read.
    """
    rows = []
    for context in watched(contexts, label):
        ids = _ids(teacher, context, batch_size)
        caches = [filled_cache(model, ids.to(model.device), chunk) for model in (teacher, student)]
        sizes = {
            f"{name}_cache": cache_bytes(x.layers) for name, x in zip(NAMES, caches, strict=True)
        }
        runs = {
            name: functools.partial(read, model, ids[:, -1:].to(model.device), cache)
            for name, model, cache in zip(NAMES, (teacher, student), caches, strict=True)
        }
        row = {"context": context, "batch_size": batch_size, "device": str(teacher.device)}
        rows.append(row | _in_turns(runs, teacher.device, 0.0, turns=new_tokens) | sizes)
    return rows


def _last_logit(model: Any) -> dict[str, int]:
    chooses = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if chooses else {}


def _forward(model: Any, length: int, batch_size: int) -> Callable[[], object]:
    """A forward pass over random ids."""
    given: dict[str, Any] = {"input_ids": _ids(model, length, batch_size).to(model.device)}
    if model.can_generate():
        given |= {"use_cache": False, **_last_logit(model)}
    elif length > (limit := getattr(model.config, "max_position_embeddings", length)):
        again = torch.arange(length, device=model.device) % limit
        given["position_ids"] = again.expand(batch_size, -1)
        if "token_type_ids" in inspect.signature(model.base_model.forward).parameters:
            given["token_type_ids"] = torch.zeros_like(given["input_ids"])

    def run() -> None:
        with torch.no_grad():
            model(**given)

    return run


def _ids(model: Any, length: int, batch_size: int) -> Tensor:
    size = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    return torch.randint(size, (batch_size, length), generator=generator)


def _in_turns(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    min_seconds: float,
    turns: int = MIN_SAMPLES,
) -> Row:
    """Median times of two calls that alternate, and of their ratio; the first turn is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    warm = False
    while not warm or sum(map(sum, seconds.values())) < min_seconds or _turns(seconds) < turns:
        for name, run in runs.items():
            took = _seconds(run, device)
            if warm:
                seconds[name].append(took)
        warm = True
    first, second = seconds.values()
    row: Row = {f"{name}_ms": 1e3 * statistics.median(took) for name, took in seconds.items()}
    return row | {"ratio": statistics.median(b / a for a, b in zip(first, second, strict=True))}


def _turns(seconds: dict[str, list[float]]) -> int:
    return min(map(len, seconds.values()))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cuda_peaks(
    models: dict[str, Any], lengths: Sequence[int], batch_size: int
) -> dict[str, list[float | None]]:
    """MB that each model takes on a GPU beyond what is there before, by length."""
    found: dict[str, list[float | None]] = {}
    for name, model in models.items():
        found[name] = []
        for length in lengths:
            run = _forward(model, length, batch_size)
            torch.cuda.reset_peak_memory_stats(model.device)
            before = torch.cuda.memory_allocated(model.device)
            run()
            peak = torch.cuda.max_memory_allocated(model.device)
            found[name].append((peak - before) / memory.MB)
    return found


@dataclasses.dataclass(frozen=True)
class Case:
    """A forward pass of a model that lies in a file."""

    path: str
    N: int
    batch_size: int

    @property
    def name(self) -> str:
        return f"{Path(self.path).stem} at N = {self.N}"


def _resident_peaks(
    models: dict[str, Any], lengths: Sequence[int], batch_size: int
) -> dict[str, list[float | None]]:
    """The same on a CPU, in a process that gets the models as files."""
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for name, model in models.items():
            path = Path(folder) / f"{name}.pt"
            torch.save(model, path)
            cases += [Case(str(path), length, batch_size) for length in lengths]
        values = list(memory.peaks(cases, server=__name__))
    count = len(lengths)
    return {name: values[i * count : (i + 1) * count] for i, name in enumerate(models)}


@functools.lru_cache(maxsize=1)
def _loaded(path: str) -> Any:
    import lln.hf

    lln.hf.register()
    return torch.load(path, weights_only=False)  # of the process that asks


def _measure(fields: dict[str, Any]) -> float:
    case = Case(**fields)
    model = _loaded(case.path)
    _forward(model, SHORT, case.batch_size)()
    return memory.resident_peak(_forward(model, case.N, case.batch_size))


if __name__ == "__main__":
    memory.serve(_measure)
