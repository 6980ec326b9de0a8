"""Set the constants of each layer and head from a model's own activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lln import zoo
from lln.hf.cores import calibration_of
from lln.hf.replace import record, replacements_of
from lln.moments import MomentFit
from lln.nn.statistics import FixedScales, RunningStatistics

ACTIVATIONS = ("softmax", "lln")


class AverageVariances:
    """Variances of one layer's queries and keys, averaged over tokens and batches."""

    def __init__(self, *, stay_softmax: bool) -> None:
        self.stay_softmax = stay_softmax
        self.total: Tensor | None = None
        self.tokens = 0.0

    def measure(
        self,
        core: Any,
        q: Tensor,
        k: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
    ) -> bool:
        """Add a batch; returns whether the layer answers with softmax meanwhile."""
        variances = core.statistics.matching.pooled_variances(
            q, k, key_mask=key_mask, query_mask=query_mask
        )
        variances = variances.cpu().double()  # not every device has float64
        tokens = k.shape[0] * k.shape[2] if key_mask is None else int(key_mask.sum())
        if bool(variances.isfinite().all()):
            total = variances * tokens
            self.total = total if self.total is None else self.total + total
            self.tokens += tokens
        if not self.stay_softmax:
            self.store(core)
        return self.stay_softmax

    @torch.no_grad()
    def store(self, core: Any) -> None:
        """Make what was measured the constants of the layer."""
        if self.total is None:
            raise ValueError(
                f"{core.calibration.place.name} saw no valid token, or NaN or infinite activations "
                "only; calibrate on other batches"
            )
        variances = (self.total / self.tokens).float()
        if isinstance(core.statistics, RunningStatistics):
            core.statistics.variances.copy_(variances)
            core.statistics.batches.fill_(1)
        elif isinstance(core.statistics, FixedScales):
            alpha, beta = core.statistics.matching.scales(variances)
            core.statistics.alpha.copy_(alpha)
            core.statistics.beta.copy_(beta)
        core.calibrated.fill_(True)


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    method: str | MomentFit | None = None,
    activations: str = "softmax",
) -> nn.Module:
    """Set α and β of every LLN layer, per head, from the activations of real inputs.

    Eq. (10) of arXiv:2311.13541 with σ_q², σ_k² averaged over all valid tokens of all batches.

    Args:
        batches: Arguments of the model by name, ``{"input_ids": ids, "attention_mask": mask}``.
        method: "paper", "variance", "entropy" or a fitted line; as given to ``replace`` by default.
        activations: Those of the model with "softmax" attention in the LLN layers, which trained
            weights know, or those with "lln", each layer already using what was measured so far.

    Returns:
        The model. Its mode, gradients and random state are left alone; running statistics count
        this as their first batch.

    Example:
        >>> lln.hf.calibrate(model, [tokenizer(text, return_tensors="pt") for text in texts])
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations={activations!r} is unknown; choose 'softmax' or 'lln'")
    layers: list[Any] = [core for core in model.modules() if calibration_of(core) is not None]
    stored = [core for core in layers if core.calibration.kind != "sample"]
    if not stored:
        reason = (
            "measures every sample anew (statistics='sample'); use statistics='fixed' or 'running'"
            if layers
            else "has no LLN layer yet"
        )
        raise ValueError(
            f"{type(model).__name__} {reason} in lln.hf.replace(model, 'lln_diag', ...), then "
            "calibrate"
        )
    training = [module for module in model.modules() if module.training]
    previous = [core.statistics.matching for core in stored]
    count = 0
    try:
        for core in stored:
            if method is not None:
                _set_method(core, method)
            core.calibration.variances = AverageVariances(stay_softmax=activations == "softmax")
        model.eval()
        for batch in batches:
            model(**batch)
            count += 1
        if count == 0:
            raise ValueError("batches is empty; pass at least one dictionary of model inputs")
        for core in stored:
            core.calibration.variances.store(core)
    except BaseException:
        for core, matching in zip(stored, previous, strict=True):
            core.statistics.matching = matching
        raise
    finally:
        for core in stored:
            core.calibration.variances = None
        for module in training:
            module.training = True
    if method is not None:
        _remember_method(model, method)
    return model


def _set_method(core: Any, method: str | MomentFit) -> None:
    core.statistics.matching = dataclasses.replace(core.statistics.matching, method=method)


def _remember_method(model: Any, method: str | MomentFit) -> None:
    """Write the method into the config: running statistics need it after loading, too."""
    for done in replacements_of(model).current:
        if zoo.describe(done.attention).measures:
            done.options["method"] = method
    record(model)
