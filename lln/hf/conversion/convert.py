"""A trained softmax model, made linear: replace, calibrate, transfer, keep, recover."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from lln.hf import cores
from lln.hf.calibrate import calibrate
from lln.hf.conversion.cache_size import CacheShare
from lln.hf.conversion.digest import digest_of_batches, digest_of_model
from lln.hf.conversion.errors import head_errors, layer_errors, of_layers
from lln.hf.conversion.keep import (
    Heads,
    Scores,
    check_keep,
    choose_kept,
    count_heads,
    of_key_heads,
    order_of,
    query_heads,
)
from lln.hf.conversion.recover import copy_teacher, recover
from lln.hf.conversion.retrieval import worth_of_key_heads
from lln.hf.conversion.stage import (
    Row,
    Stage,
    agreed,
    broadcast,
    check_gradients,
    without_labels,
)
from lln.hf.conversion.transfer import transfer
from lln.hf.conversion.usual import usual_options
from lln.hf.replace import Replacement, attention_modules, replace, replacements_of
from lln.ops.window.near import Near

Batch = Mapping[str, Any]
EVERY = 50  # updates between two writes of a stage


@dataclass
class Conversion:
    """What :func:`convert` did.

    Attributes:
        model: The converted model.
        replacement: Its undo.
        options: Those of the attention.
        kept: Numbers of the layers that keep softmax as a whole.
        kept_heads: Query heads of the other layers that keep softmax, by layer.
        kept_key_heads: Key heads that keep softmax, by layer, whole layers included.
        key_heads: How many key heads the model has.
        scores: By the name of an order, "error" and in decoders "retrieval", what the key heads of
            every layer are worth; the largest are kept first.
        errors: ‖core − softmax‖ / ‖softmax‖ of each layer's attention on held-out batches, given
            the teacher's activations: after "calibrate", after "transfer", and after "keep" where
            single heads keep softmax.
        head_errors: ‖core_h − softmax_h‖² / ‖softmax‖² of the heads of each layer, before any keeps
            softmax; they add up to the square of the layer's error.
        stages: A row per stage: its name, its seconds, and what ``measure`` returned.
        curves: Rows of "transfer" and "recover".
    """

    model: PreTrainedModel
    replacement: Replacement
    options: dict[str, Any]
    kept: list[int] = field(default_factory=list)
    kept_heads: Heads = field(default_factory=dict)
    kept_key_heads: Heads = field(default_factory=dict)
    key_heads: int = 0
    scores: dict[str, Scores] = field(default_factory=dict)
    errors: dict[str, dict[int, float]] = field(default_factory=dict)
    head_errors: dict[int, list[float]] = field(default_factory=dict)
    stages: list[Row] = field(default_factory=list)
    curves: dict[str, list[Row]] = field(default_factory=dict)


class Cycle(Sequence[Batch]):
    """``count`` batches of a sequence from a place on, again from its start where it ends."""

    def __init__(self, batches: Sequence[Batch], start: int, count: int) -> None:
        self.batches, self.start, self.number = batches, start, count

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.number:
            raise IndexError(index)
        return self.batches[(self.start + index) % len(self.batches)]


def convert(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    attention: str = "lln_nearfar",
    options: Mapping[str, Any] | None = None,
    teacher: PreTrainedModel | None = None,
    calibration: int = 4,
    transfer_steps: int = 300,
    transfer_options: Mapping[str, Any] | None = None,
    keep: int | CacheShare | Mapping[int, Sequence[int]] = 0,
    keep_by: str | None = None,
    recover_steps: int = 100,
    recover_options: Mapping[str, Any] | None = None,
    held_out: Sequence[Batch] | None = None,
    folder: str | Path | None = None,
    measure: Callable[[PreTrainedModel], Row] | None = None,
    progress: Callable[[str, int, int, float], None] | None = None,
) -> Conversion:
    """Give a trained softmax model linear attention that answers as softmax did.

    Stages: :func:`lln.hf.replace`, :func:`lln.hf.calibrate` on the first batches,
    :func:`lln.hf.transfer` layer by layer, the choice of key heads that keep softmax, and
    :func:`lln.hf.recover` of the whole model on a frozen copy of itself. Each can be called alone.
    The model is changed in place; ``conversion.model.save_pretrained(folder)`` and
    :func:`lln.hf.load` work as after ``replace``. After an error it is as before.

    Args:
        batches: Arguments of the model by name; long inputs, at the length that matters. A
            sequence, which may be made as it is read: ``batches[i]`` is asked for once per use and
            must be the same each time. Used in order, and again from the start if they run out.
        attention, options: See :func:`lln.hf.replace`; by default near/far attention with learned
            slots, see :func:`usual_options`. Given options change single ones.
        teacher: Softmax model in evaluation mode whose answers are recovered, left as it is; by
            default a frozen copy of ``model``. Beside another one ``model`` has weights of its own,
            such as freshly drawn ones: pass ``transfer_steps=0`` then, as transfer imitates the
            softmax of ``model``, and ``recover_options={"embeddings": True}``.
        calibration: Number of first batches from which α, β and γ are measured.
        transfer_steps, transfer_options: Updates, and arguments of :func:`lln.hf.transfer`.
        keep: How many key heads keep softmax, each with all query heads that share it: those that
            are worth most; as many as a :class:`lln.hf.CacheShare` holds; or the key heads by
            layer, ``{3: [0, 2]}``. A layer whose key heads are all kept gets its softmax back.
        keep_by: What a key head is worth. "retrieval", the default in decoders: what the model
            loses on generated recall beyond its windows when the head becomes linear, see
            :func:`lln.hf.conversion.retrieval.worth_of_key_heads`. "error": its part in the error
            of its layer.
        recover_steps, recover_options: Updates, and arguments of :func:`lln.hf.recover`; 0 leaves
            all weights but the new ones as they were.
        held_out: Batches whose error decides and is reported; the last four of ``batches``
            otherwise, which should then not be reached.
        folder: Progress is written here; the same call again, with the model as it was at first,
            goes on where it was killed. A folder with progress of another model, of other options
            or of other batches (by their number, the first one and the held out) is refused.
        measure: Called with the softmax model first, and with the changed one after every stage.
        progress: Called with the stage, updates done, updates in all, and error or loss.

    Example:
        >>> model = AutoModel.from_pretrained("all-MiniLM-L6-v2")
        >>> done = lln.hf.convert(model, batches)
        >>> done.errors["transfer"]
        >>> model.save_pretrained("minilm-linear")
    """
    if not isinstance(batches, Sequence) and not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"batches is a {type(batches).__name__}; pass a sequence, such as a list: batches are "
            "used several times"
        )
    if len(batches) < 1:
        raise ValueError("batches is empty; pass at least one dictionary of model inputs")
    if transfer_steps < 0 or recover_steps < 0 or calibration < 1:
        raise ValueError(
            f"transfer_steps={transfer_steps}, recover_steps={recover_steps} must not be negative, "
            f"and calibration={calibration} at least 1"
        )
    if teacher is model:
        raise ValueError(
            "teacher is the model that changes; leave it out, or pass copy.deepcopy(model)"
        )
    check_gradients("convert")
    sizes = heads_of_layers(model)
    check_keep(keep, {layer: size.keys for layer, size in sizes.items()})
    order = order_of(model, keep_by)
    chosen = options
    if attention == "lln_nearfar":
        chosen = usual_options(model, options)
    held = list(Cycle(batches, len(batches) - 4, 4) if held_out is None else held_out)
    decisive = {
        "attention": attention,
        **_flat("options", chosen),
        "calibration": calibration,
        "transfer_steps": transfer_steps,
        **_flat("transfer_options", transfer_options),
    }
    later = {
        "keep": dataclasses.asdict(keep) if isinstance(keep, CacheShare) else keep,
        "keep_by": order,
        "recover_steps": recover_steps,
        **_flat("recover_options", recover_options),
    }
    stage_of = _open_stages(folder, model, teacher, batches, held, decisive, later)
    own = copy_teacher(model) if recover_steps else None
    wanted = own if teacher is None else teacher
    stages: list[Row] = []
    clock = _Clock(stages, model, measure)
    clock.done("softmax", of=teacher)
    with _given_back(model, own):
        replacement = replace(model, attention, quiet=True, **(chosen or {}))
        done = Conversion(model, replacement, dict(chosen or {}), stages=stages)
        done.key_heads = sum(size.keys for size in sizes.values())
        if any(cores.calibration_of(core) is not None for core in model.modules()):
            calibrate(model, [without_labels(x) for x in Cycle(batches, 0, calibration)])
        broadcast(model)
        done.head_errors = head_errors(model, held)
        done.errors["calibrate"] = of_layers(done.head_errors)
        clock.done("calibrate")
        chosen_heads = count_heads(model, keep, order)
        if transfer_steps:
            done.curves["transfer"] = transfer(
                model,
                Cycle(batches, calibration, transfer_steps),
                stage=stage_of.get("transfer"),
                progress=_told(progress, "transfer", transfer_steps),
                **(transfer_options or {}),
            )
            done.head_errors = head_errors(model, held)
            done.errors["transfer"] = of_layers(done.head_errors)
            clock.done("transfer")
        before = stage_of["recover"].choices if folder is not None else {}
        if before:  # rounding might decide otherwise now
            kept, done.scores = _read_choice(before)
        else:
            if isinstance(chosen_heads, int) and chosen_heads:
                done.scores = agreed(_scores(model, done.head_errors, sizes, order))
            kept = agreed(choose_kept(chosen_heads, done.scores.get(order, {})))
        if folder is not None:
            stage_of["recover"].choices = {"kept": kept, "scores": done.scores}
        if kept:
            _keep(done, kept, sizes)
            if done.kept_heads:
                done.errors["keep"] = layer_errors(model, held)
            clock.done("keep")
        if wanted is not None and recover_steps and replacement.active:
            extra = dict(recover_options or {})
            used = recover_steps * extra.get("accumulation", 1)
            done.curves["recover"] = recover(
                model,
                wanted,
                Cycle(batches, calibration + transfer_steps, used),
                stage=stage_of.get("recover"),
                progress=_told(progress, "recover", recover_steps),
                **extra,
            )
            clock.done("recover")
    return done


class HeadCount(NamedTuple):
    """Heads of a layer."""

    queries: int
    keys: int


def heads_of_layers(model: nn.Module) -> dict[int, HeadCount]:
    """How many heads every layer has, by its number."""
    places = [cores.place_of(x, path) for path, x in attention_modules(model).items()]
    return {n: HeadCount(place.num_heads, place.num_kv_heads) for n, place in enumerate(places)}


def _scores(
    model: PreTrainedModel,
    errors: Mapping[int, Sequence[float]],
    sizes: Mapping[int, HeadCount],
    order: str,
) -> dict[str, Scores]:
    """What key heads are worth by their error, and by recall if that is to decide."""
    found = {"error": of_key_heads(errors, {layer: size.keys for layer, size in sizes.items()})}
    return found if order == "error" else {order: worth_of_key_heads(model), **found}


def _keep(done: Conversion, kept: Heads, sizes: Mapping[int, HeadCount]) -> None:
    """Let key heads of a converted model keep softmax, and layers in which all of them do."""
    done.kept = [layer for layer, heads in kept.items() if len(heads) == sizes[layer].keys]
    done.kept_heads = {
        layer: query_heads(heads, sizes[layer].queries // sizes[layer].keys)
        for layer, heads in kept.items()
        if layer not in done.kept
    }
    done.kept_key_heads = kept
    done.replacement.keep_softmax_heads(done.kept_heads)
    done.replacement.keep_softmax(done.kept)


def _read_choice(choices: Row) -> tuple[Heads, dict[str, Scores]]:
    """What was kept and why, from JSON, whose names are strings."""
    kept = {int(layer): heads for layer, heads in choices["kept"].items()}
    scores = {
        order: {int(layer): values for layer, values in found.items()}
        for order, found in choices["scores"].items()
    }
    return kept, scores


@contextlib.contextmanager
def _given_back(model: PreTrainedModel, copied: PreTrainedModel | None) -> Iterator[None]:
    """After an error the model attends as before, with the weights it had.

    Args:
        copied: A copy of the model, where its weights learn.
    """
    before = len(replacements_of(model).current)
    try:
        yield
    except BaseException:
        for replacement in replacements_of(model).current[before:]:
            replacement()
        if copied is not None:
            with torch.no_grad():
                for x, value in zip(model.parameters(), copied.parameters(), strict=True):
                    x.copy_(value)
        raise


class _Clock:
    """Ends a stage: measures the model, and notes the seconds without those of measuring."""

    def __init__(
        self,
        stages: list[Row],
        model: PreTrainedModel,
        measure: Callable[[PreTrainedModel], Row] | None,
    ) -> None:
        self.stages, self.model, self.measure = stages, model, measure
        self.start = time.perf_counter()

    def done(self, name: str, of: PreTrainedModel | None = None) -> None:
        seconds = time.perf_counter() - self.start
        with torch.no_grad():
            found = self.measure(of or self.model) if self.measure is not None else {}
        self.stages.append({"stage": name, "seconds": seconds, **found})
        self.start = time.perf_counter()


def _flat(argument: str, options: Mapping[str, Any] | None) -> Row:
    """Options by their full names, so that a single one can be told."""
    found = {}
    for name, value in (options or {}).items():
        if isinstance(value, torch.Tensor):
            value = digest_of_batches([{name: value}])
        found[f"{argument}.{name}"] = value.to_json() if isinstance(value, Near) else value
    return found


def _open_stages(
    folder: str | Path | None,
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    batches: Sequence[Batch],
    held: Sequence[Batch],
    decisive: Row,
    later: Row,
) -> dict[str, Stage]:
    """Both stages by name, checked to be of this conversion; none without a folder.

    Args:
        decisive: What decides the result of transfer, and with it that of recovery.
        later: What decides recovery alone.
    """
    if folder is None:
        return {}
    found = {
        "model": digest_of_model(model),
        "batches": f"{len(batches)}, the first {digest_of_batches([without_labels(batches[0])])}",
        **decisive,
    }
    teacher_digest = None if teacher is None else digest_of_model(teacher)
    both = {**found, "teacher": teacher_digest, "held_out": digest_of_batches(held), **later}
    both, found = agreed((both, found))
    return {
        name: Stage(Path(folder) / f"{name}.safetensors", EVERY, belongs)
        for name, belongs in (("transfer", found), ("recover", both))
    }


def _told(
    progress: Callable[[str, int, int, float], None] | None, stage: str, steps: int
) -> Callable[[int, float], None] | None:
    """The progress of one stage, as its function calls it."""
    if progress is None:
        return None
    return lambda step, value: progress(stage, step, steps, value)
