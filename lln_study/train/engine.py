"""One update of a model: its processes, precision, gradients and optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lln.records.seeds import derived_seed, seed_everything
from lln_study.train.config import TrainConfig
from lln_study.train.graph import ORDINARY_FIRST, Graphs
from lln_study.train.processes import Processes

Loss = Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Batches(Protocol):
    """What an engine needs of a task."""

    def batch(self, step: int, rows: slice) -> Mapping[str, Tensor]: ...
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]: ...


class _Root(nn.Module):
    """The module that is wrapped: calls a function of the model, so that tasks need no forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


class Engine:
    """A model on its device(s), and :meth:`update`.

    Attributes:
        model: As the task built it; its parameters are the ones that are trained.
        sums: float64 ``[3]`` on the device: losses, terms and updates left out since last read.
        norm: Of the last gradient, before clipping.
        untimed: First updates, which compile, allocate and record.
    """

    def __init__(self, processes: Processes, model: nn.Module, task: Batches, config: TrainConfig):
        self.model, self.task, self.config = model, task, config
        self.rank, self.world, self.device = processes.rank, processes.world, processes.device
        part = self.world * config.accumulation
        if config.batch_size % part:
            raise ValueError(
                f"batch_size={config.batch_size} cannot be shared by {self.world} processes with "
                f"accumulation={config.accumulation}; choose a multiple of {part}"
            )
        if config.checkpointing:
            _checkpoint_activations(model)
        self.root = _Root(model).to(self.device)
        self.wrapped = self._wrapped()
        self.loss: Loss = torch.compile(task.loss, dynamic=False) if config.compile else task.loss
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            _groups(model, config.weight_decay),
            lr=torch.tensor(config.learning_rate, device=self.device)
            if on_gpu
            else config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            fused=on_gpu,
            capturable=on_gpu,
        )
        half = config.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)  # pyright: ignore[reportPrivateImportUsage]
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.norm = torch.zeros((), device=self.device)
        self.graphs = None
        if on_gpu and config.graph and self.world == 1:
            self.graphs = Graphs(self._update, self.optimizer.zero_grad)
        self.untimed = 1 if self.graphs is None else ORDINARY_FIRST + 1

    def _wrapped(self) -> Any:
        if self.world == 1:
            return self.root
        if self.config.shard:
            return _sharded(self.root)
        own = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(self.root, device_ids=own)

    @contextlib.contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        """Leave gradients with their process, since more micro-batches follow."""
        if self.world == 1:
            yield
        elif self.config.shard:
            self.wrapped.set_requires_gradient_sync(False)
            yield
            self.wrapped.set_requires_gradient_sync(True)
        else:
            with self.wrapped.no_sync():
                yield

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision of the run."""
        dtype = AUTOCAST[self.config.precision]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def update(self, step: int, loss: Loss | None = None) -> None:
        """The update after ``step`` updates; waits for nothing on a GPU.

        The gradient is that of the mean loss over all terms of the global batch, whatever their
        number in each micro-batch and process.

        Args:
            loss: Instead of the task's, compiled if the run is.
        """
        config = self.config
        self._set_rate(config.rate(step))
        seed_everything(derived_seed(config.seed, "step", step, self.rank), self.device)  # dropout
        if not self.wrapped.training:
            self.wrapped.train()
        batches = [self._rows(step, turn) for turn in range(config.accumulation)]
        if loss is None and self.graphs is not None:
            self.norm = self.graphs(batches)
        else:
            self.norm = self._update(batches, loss)

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # where a recorded update reads it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _update(self, batches: Sequence[Mapping[str, Tensor]], loss: Loss | None = None) -> Tensor:
        """Gradients of all micro-batches and a step of the optimizer; the norm of the gradient."""
        planned = count = self.sums.new_zeros(())
        for turn, batch in enumerate(batches):
            last = turn == len(batches) - 1
            with contextlib.nullcontext() if last else self._unsynchronised():
                with self.autocast():
                    total, terms = self.wrapped(loss or self.loss, batch)
                if turn == 0:  # a forecast for all; what it is off by is corrected below
                    planned = (self._over_ranks(terms) * len(batches)).clamp(min=1)
                # Gradients are averaged over the processes.
                mean = total * (self.world / planned).to(total.dtype)
                self.scaler.scale(mean).backward()
            count = count + terms
            self._note(total.detach(), terms)
        if len(batches) > 1:
            self._scale_gradients(planned / self._over_ranks(count).clamp(min=1))
        self.scaler.unscale_(self.optimizer)
        limit = self.config.clip or float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self._step(_whole(norm))
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _step(self, norm: Tensor) -> None:
        """Change the weights, unless the gradient is not finite: they would be NaN for ever.

        A GPU is not waited for: the fused optimizer looks for itself, as it does for GradScaler.
        """
        broken = ~torch.isfinite(norm)
        self.sums[2] += broken / self.world
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.optimizer.defaults["fused"]:
            # read by each step, so it may stay there
            self.optimizer.found_inf = broken.float()  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.step()
        elif not broken:
            self.optimizer.step()

    def _rows(self, step: int, turn: int) -> dict[str, Tensor]:
        own = self.config.batch_size // self.world
        size = own // self.config.accumulation
        start = self.rank * own + turn * size
        batch = self.task.batch(step, slice(start, start + size))
        return {name: x.to(self.device, non_blocking=True) for name, x in batch.items()}

    def _note(self, total: Tensor, terms: Tensor) -> None:
        both = torch.stack([total.double(), terms.double()])
        self.sums[:2] += torch.where(torch.isfinite(total), both, 0)

    def _over_ranks(self, value: Tensor) -> Tensor:
        value = value.to(torch.float64)
        if self.world > 1:
            value = value.clone()
            torch.distributed.all_reduce(value)
        return value

    @torch.no_grad()
    def _scale_gradients(self, factor: Tensor) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                gradient = _local(parameter.grad)
                gradient.mul_(factor.to(gradient.dtype))

    def read_sums(self) -> list[float]:
        """The sums over all processes; a GPU is waited for."""
        return self._over_ranks(self.sums).tolist()

    def set_sums(self, values: Iterable[float]) -> None:
        """Continue from sums of :meth:`read_sums`, which one process then carries for all."""
        values = list(values)
        keep = values if self.rank == 0 else [0.0] * len(values)
        self.sums.copy_(torch.tensor(keep, dtype=torch.float64))

    def gradient_norm(self) -> float:
        """The norm of the last gradient, before clipping."""
        return float(_whole(self.norm))

    @torch.no_grad()
    def evaluate(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(model, *arguments)`` in evaluation mode; every process does the same."""
        self.wrapped.eval()
        with self.autocast():
            return self.root(function, *arguments)

    def end_training(self) -> None:
        """Let go of moments and recorded updates; the model can still be evaluated."""
        self.optimizer.state.clear()
        self.graphs = None

    # What a checkpoint holds. Every process must call these: shards are put together.

    def model_tensors(self) -> dict[str, Tensor]:
        """Parameters and stored buffers by name; a shared parameter once."""
        return {name: _whole(value).cpu() for name, value in stored(self.model).items()}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Moments by "parameter name/moment"."""
        return {
            f"{name}/{moment}": _whole(value).cpu()
            for name, parameter in self.model.named_parameters()
            for moment, value in self.optimizer.state.get(parameter, {}).items()
        }

    def copied_weights(self) -> dict[str, Tensor]:
        """Copies of what :meth:`model_tensors` gives, left in place and in their shards."""
        return {name: value.detach().clone() for name, value in stored(self.model).items()}

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take weights from :meth:`model_tensors`, :meth:`copied_weights` or another model."""
        own = stored(self.model)
        if set(own) != set(tensors):
            wrong = sorted(set(own) ^ set(tensors))[:3]
            raise ValueError(f"the checkpoint is of another model: {', '.join(wrong)} differ")
        for name, value in own.items():
            value.copy_(_like(value, tensors[name]))

    @torch.no_grad()
    def load_moments(self, optimizer: Mapping[str, Tensor]) -> None:
        """Take moments from tensors of :meth:`optimizer_tensors`."""
        parameters = dict(self.model.named_parameters())
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in optimizer.items():
            name, moment = key.rsplit("/", 1)
            parameter = parameters[name]
            if value.dim() == 0:
                place = self.device if self.device.type == "cuda" else "cpu"
                placed = value.to(place)
            else:
                placed = torch.empty_like(parameter, dtype=value.dtype)
                placed.copy_(_like(placed, value))
            moments.setdefault(name, {})[moment] = placed
        for name, own in moments.items():
            self.optimizer.state[parameters[name]] = own


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters by their decay: matrices have it; biases, norms and scales do not."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in learned if parameter.dim() > 1]
    others = [parameter for parameter in learned if parameter.dim() <= 1]
    groups = [(matrices, weight_decay), (others, 0.0)]
    return [{"params": own, "weight_decay": decay} for own, decay in groups if own]


def stored(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a checkpoint holds; a shared parameter once."""
    kept = model.state_dict(keep_vars=True)
    buffers = {name: value for name, value in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def _sharded(root: nn.Module) -> Any:
    """Shard by FSDP2: every repeated layer is a unit, what is left another."""
    from torch.distributed.fsdp import fully_shard

    for module in reversed(list(root.modules())):  # what is inside comes first
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer)
    return fully_shard(root)


def _checkpoint_activations(model: Any) -> None:
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(
            f"checkpointing=True is not possible: {type(model).__name__} has no "
            "gradient_checkpointing_enable(); leave it out"
        )
    # its name since transformers 5.23; other modules may have the old one
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def _is_sharded(value: Tensor) -> bool:
    return hasattr(value, "full_tensor")


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if _is_sharded(value) else value  # pyright: ignore[reportAttributeAccessIssue]


def _local(value: Tensor) -> Tensor:
    return value.to_local() if _is_sharded(value) else value  # pyright: ignore[reportAttributeAccessIssue]


def _like(value: Tensor, full: Tensor) -> Tensor:
    """``full`` placed as ``value`` is: on its device, and cut into its shards."""
    full = full.to(value.device)
    if not _is_sharded(value) or _is_sharded(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = value.device_mesh, value.placements  # pyright: ignore[reportAttributeAccessIssue]
    return distribute_tensor(full, mesh, placements)
