"""A live monitor: measures the attention of a model while it trains."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lln.instruments.concentration import MEASURES
from lln.instruments.recording.attention_call import AttentionCall
from lln.instruments.recording.recorder import attention_calls
from lln.ops.common.arguments import check_positive_int, no_autocast
from lln.ops.reference import repeat_heads
from lln.records.rows import Row, RowFile, number

DEFAULT_MEASURES = ("entropy", "effective_tokens", "column_bias", "temperature", "log_variance")
NOTHING_FOUND = (
    "the monitor saw no attention in this forward pass of {name}; it sees "
    "F.scaled_dot_product_attention, nn.MultiheadAttention, LLN attention, the zoo's mechanisms on "
    "queries and keys, and Hugging Face models that use transformers' attention interface"
)


@runtime_checkable
class LossScaler(Protocol):
    """What is read of a ``torch.amp.GradScaler``."""

    def get_scale(self) -> float: ...


@contextlib.contextmanager
def monitor(
    model: nn.Module,
    *,
    every: int = 100,
    measures: Sequence[str | Callable[..., Any]] = DEFAULT_MEASURES,
    path: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    samples: int = 1,
    rows: int = 64,
    scaler: LossScaler | None = None,
    first_step: int = 0,
) -> Iterator[list[Row]]:
    r"""Measure the attention of ``model`` inside a ``with`` block, without changing the training.

    A step is a forward pass of ``model`` in training mode with gradients enabled; evaluation does
    not count. Every ``every``-th step, starting with the first, gives a row per layer and head, and
    one row for the step as a whole.

    Args:
        model: Any module; :mod:`lln.instruments.recording.recorder` says which attentions are
            found.
        measures: Names from :data:`lln.instruments.MEASURES`, or the functions of those names.
            ``spectral_gap`` and ``centred_singular_value`` of softmax cost O(N³): ask for them with
            a larger ``every``.
        path: JSONL file that rows are appended to, see :func:`lln.instruments.read_rows`.
        tensorboard: Folder for TensorBoard scalars (needs the package ``tensorboard``).
        samples: Measure the first so many samples of the batch; a row is their mean.
        rows: For long inputs, estimate entropy and log_variance from this many rows of the matrix.
        scaler: A ``GradScaler``: its loss scale is recorded and divided out of the gradient norm.
        first_step: Number of the first step, for a run that is resumed.

    Returns:
        A list that grows while the block runs. Rows of a head have ``step``, ``layer`` (in the
        order of the calls, from 0), ``module``, ``head``, ``kernel``, ``causal``, ``tokens``, the
        measures, ``sigma_q`` and ``sigma_k``; with LLN also ``alpha`` and ``beta``, with LLN+Diag
        ``lln_share`` and ``diag_share`` (the measures are then those of the LLN branch). The row of
        a step has ``gradient_norm`` (all parameters, after the backward pass), ``loss_scale`` and
        ``seconds`` that the measurement took. None = not measured or not finite.

    Numerics: outputs, gradients and random numbers are bit-identical with and without a monitor.
    In distributed training rank 0 measures its own batch and the others do nothing.

    Example:
        >>> with monitor(model, every=100, path="runs/a.jsonl") as rows:
        ...     train(model)
        >>> [row["entropy"] for row in rows if row.get("layer") == 0 and row["head"] == 0]
    """
    model = _unwrapped(model)
    for name, value in (("every", every), ("samples", samples), ("rows", rows)):
        check_positive_int(name, value)
    names = _measure_names(measures)
    found: list[Row] = []
    if _is_another_rank():
        yield found
        return
    with contextlib.ExitStack() as outputs:
        writers: list[Callable[[Sequence[Row]], None]] = [found.extend]
        if path is not None:
            file = RowFile(path)
            outputs.callback(file.close)
            writers.append(file.write)
        if tensorboard is not None:
            writers.append(_tensorboard(tensorboard, outputs))
        watch = _Watch(model, every, names, samples, rows, scaler, first_step, writers)
        handles = [
            model.register_forward_pre_hook(lambda module, _: watch.before(module)),
            model.register_forward_hook(
                lambda module, _, out: watch.after(module, out), prepend=True, always_call=True
            ),
        ]
        try:
            yield found
            watch.finish_step()
        finally:
            watch.stop()
            for handle in handles:
                handle.remove()


class _Watch:
    """Counts steps, records the calls of those that are due, and writes their rows."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        measures: Sequence[str],
        samples: int,
        rows: int,
        scaler: LossScaler | None,
        first_step: int,
        writers: Sequence[Callable[[Sequence[Row]], None]],
    ) -> None:
        self.model, self.every, self.measures = model, every, measures
        self.samples, self.rows, self.scaler, self.writers = samples, rows, scaler, writers
        self.step, self.first_step = first_step - 1, first_step
        self.recording: contextlib.ExitStack | None = None
        self.calls: list[AttentionCall] = []
        self.gradient: _GradientNorm | None = None
        self.warned = False

    def before(self, module: nn.Module) -> None:
        """A forward pass begins; copies of the model have our hooks too, but are not watched."""
        if module is not self.model or self.recording is not None:
            return
        if not module.training or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1:  # activation checkpointing runs it again
            return
        self.finish_step()
        self.step += 1
        if (self.step - self.first_step) % self.every == 0:
            self.recording = contextlib.ExitStack()
            collecting = attention_calls(self.model, samples=self.samples)
            self.calls = self.recording.enter_context(collecting)

    def after(self, module: nn.Module, out: object) -> None:
        """The forward pass has ended, with an exception if it gave nothing."""
        if module is not self.model or self.recording is None:
            return
        self._stop_recording()
        if out is None:
            return
        started = time.perf_counter()
        if not self.calls:
            warnings.warn(NOTHING_FOUND.format(name=type(self.model).__name__), stacklevel=2)
        rows = [row for call in self.calls for row in self._rows(call)]
        self.calls = []
        self._write(rows)
        scale = None if self.scaler is None else self.scaler.get_scale()
        self.gradient = _GradientNorm(self.model, scale)
        self.gradient.seconds = time.perf_counter() - started

    def finish_step(self) -> None:
        """Write what the backward pass of the last recorded step has left."""
        if self.gradient is None:
            return
        row: Row = {"step": self.step, "gradient_norm": self.gradient.value()}
        row |= {"loss_scale": self.gradient.scale, "seconds": self.gradient.seconds}
        self.stop()
        self._write([row])

    def stop(self) -> None:
        """Remove what was installed for the current step."""
        self._stop_recording()
        if self.gradient is not None:
            self.gradient.remove()
            self.gradient = None

    def _stop_recording(self) -> None:
        if self.recording is not None:
            self.recording.close()
            self.recording = None

    def _write(self, rows: Sequence[Row]) -> None:
        for write in self.writers:
            write(rows)

    def _rows(self, call: AttentionCall) -> list[Row]:
        """A row per head; what cannot be measured is None, since watching must not end a run."""
        with torch.no_grad(), no_autocast(call.q):
            try:
                values = _values(call, self.measures, self.rows)
            except Exception as error:
                if not self.warned:
                    message = f"layer {call.layer} ({call.module}) was not measured: {error}"
                    warnings.warn(f"step {self.step}, {message}", stacklevel=2)
                    self.warned = True
                values = {name: [None] * call.heads for name in self.measures}
        place: Row = {"step": self.step, "layer": call.layer, "module": call.module}
        about = {
            "kernel": call.kernel,
            "causal": call.is_causal,
            "tokens": round(call.keys.sum(-1, dtype=torch.float32).mean().item()),
        }
        return [
            {
                **place,
                "head": head,
                **about,
                "kernel": call.kernel_of(head),
                **{name: each[head] for name, each in values.items()},
            }
            for head in range(call.heads)
        ]


def _values(call: AttentionCall, measures: Sequence[str], rows: int) -> dict[str, list]:
    """Means over the samples, a number per head."""
    sigma_q, sigma_k = call.deviations()
    table: dict[str, Tensor] = {**call.measured(measures, rows=rows)}
    table |= {"sigma_q": sigma_q, "sigma_k": sigma_k}
    if call.alpha is not None and call.beta is not None:
        scales = {"alpha": call.alpha, "beta": repeat_heads(call.beta, call.heads)}
        table |= {name: call.without_kept(values) for name, values in scales.items()}
    share = call.lln_share()
    if share is not None:
        table |= {"lln_share": share, "diag_share": 1 - share}
    near = call.near_share()
    if near is not None:
        table["near_share"] = near
    return {
        name: [number(value) for value in values.nanmean(0).tolist()]
        for name, values in table.items()
    }


class _GradientNorm:
    """Norms of the gradients as the backward pass leaves them; nothing is done until it comes."""

    def __init__(self, model: nn.Module, scale: float | None) -> None:
        self.scale, self.seconds = scale, 0.0
        self.norms: dict[int, Tensor] = {}
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._keep)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    @torch.no_grad()
    def _keep(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            self.norms[id(parameter)] = torch.linalg.vector_norm(values, dtype=torch.float32)

    def value(self) -> float | None:
        """√Σ‖g‖² with the loss scale divided out; None without a backward pass."""
        if not self.norms:
            return None
        norms = torch.stack([norm.cpu() for norm in self.norms.values()])
        return number(norms.norm().item() / (self.scale or 1.0))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _measure_names(measures: Sequence[str | Callable[..., Any]]) -> tuple[str, ...]:
    if isinstance(measures, str):
        raise TypeError(f"measures={measures!r} is a str; pass a list, [{measures!r}]")
    names = tuple(getattr(each, "__name__", str(each)) for each in measures)
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        raise ValueError(f"measures has {unknown}; choose from {', '.join(MEASURES)}")
    return names


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel; compiled modules are refused."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError(
            f"{type(model).__name__} is compiled, and compiled code does not pass by the monitor; "
            "monitor an uncompiled run"
        )
    return model


def _is_another_rank() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0
    )


def _tensorboard(
    folder: str | os.PathLike[str], outputs: contextlib.ExitStack
) -> Callable[[Sequence[Row]], None]:
    """A function that writes rows as scalars named measure/layer/head."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("tensorboard= needs: pip install 'lln-attention[train]'") from error
    writer = SummaryWriter(str(folder))
    outputs.callback(writer.close)

    def write(rows: Sequence[Row]) -> None:
        for row in rows:
            place = f"/layer {row['layer']}/head {row['head']}" if "layer" in row else ""
            for name, value in row.items():
                if isinstance(value, float):
                    writer.add_scalar(f"{name}{place}", value, row["step"])
        writer.flush()

    return write
