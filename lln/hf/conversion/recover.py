"""Recovery: the whole converted model learns to answer as its softmax teacher does."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lln.hf.conversion import short_windows as windows
from lln.hf.conversion.adapters import adapters
from lln.hf.conversion.stage import (
    Row,
    Stage,
    check_gradients,
    in_float32,
    learn,
    widen,
    without_labels,
)
from lln.hf.conversion.transfer import buffers_of, cores_of

#: What is compared: logits by their divergence, or token states and their mean over the text.
OBJECTIVES = ("logits", "states")
POOLED = 3.0  # factor of 1 − cosine of the pooled states
IGNORED = -100  # label of a token that is not asked for
CHUNK = 4096  # tokens whose logits are compared at once


def recover(
    model: PreTrainedModel,
    teacher: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    objective: str | None = None,
    learning_rate: float = 2e-5,
    core_rate: float = 10.0,
    lora: int = 0,
    embeddings: bool = False,
    short_windows: float = 0.0,
    accumulation: int = 1,
    seed: int = 0,
    precision: torch.dtype | None = None,
    warmup: int = 10,
    clip: float = 1.0,
    stage: Stage | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> list[Row]:
    """Tune a converted model on its teacher's answers, with AdamW, dropout off.

    A model of half precision learns in float32 and is rounded at the end: its updates would be too
    small for its weights.

    Objectives: "logits" is KL(teacher ‖ model) over the vocabulary, for language models, at every
    real token, or where the ``labels`` of a batch ask; "states" is ‖h − h*‖² / ‖h*‖² of the last
    token states and 3 (1 − cosine) of their mean over the text, for encoders. Gradients are
    averaged over the processes of torch.distributed, where there are several.

    Args:
        teacher: The softmax model, as it was before :func:`lln.hf.replace`.
        batches: Arguments of both models by name. Of ``labels``, as data collators make them, only
            the place counts: −100 is not compared. A masked language model should have them, for
            its answers at tokens that are not hidden were never trained.
        objective: By default "logits" for models that have them.
        learning_rate: Of all weights; more than 1e-4 damages what transfer has reached.
        core_rate: Factor of the rate for what is new: maps, levels, scales.
        lora: Rank of adapters (peft) of all linear layers, which learn in place of the weights and
            are merged at the end; 0 for all weights.
        embeddings: Whether embeddings learn, too. A short recovery sees few of their rows, so that
            they stay as they are; weights that were drawn anew need them.
        short_windows: Share of the updates in which near windows end after a few tokens. Keys
            beyond become far ones, so that the far branch is not bypassed.
        accumulation: Batches per update.
        seed: Of what is drawn: adapters, and the updates of ``short_windows``.
        precision: ``torch.bfloat16`` computes both models under autocast; None the teacher as it
            is, the model in float32 at least.
        stage: Where progress is kept; the same call again goes on where it was killed.
        progress: Called after each update with the number done and the loss.

    Returns:
        A row per update: ``step``, ``loss``. After an error the weights are as before.

    Example:
        >>> teacher = copy.deepcopy(model)
        >>> lln.hf.replace(model, "lln_nearfar", **lln.nn.recommended("convert-encoder"))
        >>> lln.hf.calibrate(model, batches[:4])
        >>> lln.hf.transfer(model, batches)
        >>> lln.hf.recover(model, teacher, batches)
    """
    if objective not in (None, *OBJECTIVES):
        raise ValueError(f"objective={objective!r} is unknown; choose from {OBJECTIVES}")
    if not (learning_rate > 0 and accumulation >= 1 and lora >= 0):
        raise ValueError(
            f"learning_rate={learning_rate}, accumulation={accumulation}, lora={lora}: give a "
            "positive rate, at least one batch per update, and a rank of at least 0"
        )
    if lora and embeddings:
        raise ValueError(
            f"lora={lora} leaves all weights but its adapters alone, embeddings=True does not; "
            "pass lora=0, or leave embeddings out"
        )
    windows.check_short_windows(short_windows)
    check_gradients("recover")
    cores = cores_of(model)
    if any(x is y for x, y in zip(model.parameters(), teacher.parameters(), strict=False)):
        raise ValueError(
            "teacher shares its weights with the model, so it would change with it; take "
            "copy.deepcopy(model) before lln.hf.replace"
        )
    device = next(model.parameters()).device
    ahead = getattr(model, "loss_type", None) in (None, "ForCausalLM")

    def add_gradients(step: int, pieces: Sequence[Mapping[str, Any]]) -> Tensor:
        total = torch.zeros((), device=device)
        short = windows.short_windows(cores.values(), short_windows, seed=seed, step=step)
        with short:
            for batch in pieces:
                inputs = without_labels(batch)
                with torch.autocast(device.type, precision, enabled=precision is not None):
                    with torch.no_grad():
                        wanted = teacher(**inputs)
                    given = model(**{name: widen(x) for name, x in inputs.items()})
                    loss = disagreement(given, wanted, batch, objective, ahead=ahead)
                    loss = loss / len(pieces)
                loss.backward()
                total = total + loss.detach()
        return total

    def rows_of(step: int, total: Tensor) -> list[Row]:
        loss = float(total)
        if math.isnan(loss):
            raise ValueError(
                f"the loss is NaN at update {step + 1}; lower learning_rate={learning_rate}"
            )
        return [{"step": step, "loss": loss}]

    with _trainable(model, cores, lora, embeddings, seed) as named:
        new = {name for name in named if ".lln." in name}
        groups = [
            {"params": [x for name, x in named.items() if (name in new) == own], "factor": factor}
            for own, factor in ((False, 1.0), (True, core_rate))
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0)
        return learn(
            batches, add_gradients, rows_of, measure="loss", optimizer=optimizer, parameters=named,
            buffers=buffers_of(cores), learning_rate=learning_rate, warmup=warmup,
            accumulation=accumulation, clip=clip, stage=stage, progress=progress,
        )  # fmt: skip


def asked_tokens(batch: Mapping[str, Any], *, ahead: bool) -> Tensor | None:
    """Where logits are compared, ``[B, N]``: at real tokens that labels, if any, ask for.

    Args:
        ahead: Whether logits are those of the next token, as in a decoder.
    """
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if labels is None or labels.dim() != 2:
        return mask
    asked = labels != IGNORED
    if ahead:
        asked = F.pad(asked[:, 1:], (0, 1))
    if mask is not None and mask.shape == asked.shape:
        asked = asked & mask.bool()
    return asked


def disagreement(
    given: Any,
    wanted: Any,
    batch: Mapping[str, Any],
    objective: str | None = None,
    *,
    ahead: bool,
) -> Tensor:
    """The loss of a model's output beside its teacher's; over real tokens.

    Args:
        ahead: Whether logits are those of the next token: where labels ask for them.
    """
    mask = batch.get("attention_mask")
    has_logits = getattr(wanted, "logits", None) is not None
    if objective == "logits" and not has_logits:
        raise ValueError('objective="logits", but the model has no logits; choose "states"')
    if objective == "logits" or (objective is None and has_logits):
        return divergence_of_logits(given.logits, wanted.logits, asked_tokens(batch, ahead=ahead))
    states, goal = (_states(out).float() for out in (given, wanted))
    if mask is None or mask.shape != goal.shape[:2]:
        mask = torch.ones(goal.shape[:2], device=goal.device)
    real = mask[..., None].to(goal.dtype)
    tokens = ((states - goal) * real).square().sum() / (goal * real).square().sum()
    pooled, aim = ((x * real).sum(1) for x in (states, goal))
    return tokens + POOLED * (1 - F.cosine_similarity(pooled, aim, dim=-1)).mean()


def divergence_of_logits(given: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    """KL(wanted ‖ given) in nats, the mean over real tokens."""
    if mask is not None and mask.shape == given.shape[:-1]:
        real = mask.bool()
        given, wanted = given[real], wanted[real]
    given, wanted = given.reshape(-1, given.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
    parts = [
        F.kl_div(
            F.log_softmax(ours.float(), -1), F.log_softmax(theirs.float(), -1),
            reduction="sum", log_target=True,
        )
        for ours, theirs in zip(given.split(CHUNK), wanted.split(CHUNK), strict=True)
    ]  # fmt: skip
    return torch.stack(parts).sum() / max(len(given), 1)


def _states(out: Any) -> Tensor:
    found = getattr(out, "last_hidden_state", None)
    if found is None:
        raise ValueError(
            'objective="states" needs last_hidden_state, which this model does not return; pass '
            "its base model (AutoModel), or choose the logits"
        )
    return found


@contextlib.contextmanager
def _trainable(
    model: PreTrainedModel,
    cores: Mapping[str, nn.Module],
    lora: int,
    embeddings: bool,
    seed: int,
) -> Iterator[dict[str, nn.Parameter]]:
    """The parameters that learn, by name; afterwards mode, flags and gradients are as before."""
    training = [module for module in model.modules() if module.training]
    flags = [(x, x.requires_grad, x.grad) for x in model.parameters()]
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    model.eval()
    try:
        for x, _, _ in flags:
            x.grad = None  # of another dtype than the weight will be
            x.requires_grad_(not lora)
        with in_float32([model]), adapters(model, lora, seed) as new:
            if not lora and not embeddings:
                _freeze_embeddings(model)
            for x in (*new, *(x for core in cores.values() for x in core.parameters())):
                x.requires_grad_(True)
            yield {name: x for name, x in model.named_parameters() if x.requires_grad}
    except BaseException:
        with torch.no_grad():
            for name, x in model.named_parameters():
                x.copy_(weights[name])
        raise
    finally:
        model.eval()
        for module in training:
            module.training = True
        for x, flag, gradient in flags:
            x.requires_grad_(flag)
            x.grad = gradient


def _freeze_embeddings(model: PreTrainedModel) -> None:
    """Embeddings stay: few of their rows would be seen."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)


def copy_teacher(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of a softmax model."""
    teacher = copy.deepcopy(model).eval()
    return teacher.requires_grad_(False)
