"""Set the constants of each layer and head from a model's own activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lln import zoo
from lln.hf.cores import calibration_of, quantities
from lln.hf.replace import record, replacements_of
from lln.hf.rotation import Rotation
from lln.moments import MomentFit
from lln.moments.output_levels import OutputTerms
from lln.nn.levels import mean_key
from lln.nn.stored import mean_of_finite

ACTIVATIONS = ("softmax", "lln")
LEVELS = ("output", "share")
ORDER = ("center", "variances", "level")


@dataclasses.dataclass(frozen=True)
class Seen:
    """Queries, keys and values of one call of a layer; masks are True at real tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    query_mask: Tensor | None
    rotation: Rotation | None

    @property
    def masks(self) -> dict[str, Tensor | None]:
        return {"key_mask": self.key_mask, "query_mask": self.query_mask}

    def centered(self, core: Any) -> Seen:
        """The same without the mean of the keys, where the core subtracts it."""
        if core.center is None:
            return self
        mean = core.center(self.k, self.key_mask, is_causal=core.causal)
        return dataclasses.replace(self, k=self.k - mean)

    def level_options(self, core: Any) -> dict[str, Any]:
        """What a level is measured with, beside queries, keys and values."""
        alpha, beta = (x.expand(len(self.q), -1) for x in core.scales())
        q_far, k_far = core.far_inputs(self.q, self.k, beta, self.key_mask, self.rotation)
        scales = {"alpha": alpha, "beta": core.far_beta(beta), "q_far": q_far, "k_far": k_far}
        return {**scales, "is_causal": core.causal, **self.masks}


class Average:
    """One quantity of a layer's queries and keys, averaged over tokens and batches.

    Args:
        quantity: "center" (the mean of the keys), "variances" (for α and β) or "level" (γ), each of
            which takes those before it.
    """

    def __init__(self, quantity: str, *, stay_softmax: bool) -> None:
        self.quantity = quantity
        self.stay_softmax = stay_softmax
        self.total: Tensor | None = None
        self.tokens = 0.0

    def measure(self, core: Any, *seen: Any) -> bool:
        """Add a batch, what :class:`Seen` holds; returns whether softmax answers meanwhile."""
        self._add(core, Seen(*seen))
        if not self.stay_softmax:
            self.store(core)
        return self.stay_softmax

    def _add(self, core: Any, seen: Seen) -> None:
        found = self._of_batch(core, seen).cpu().double()  # not every device has float64
        k, mask = seen.k, seen.key_mask
        tokens = k.shape[0] * k.shape[2] if mask is None else int(mask.sum())
        if bool(found.isfinite().all()):
            total = found * tokens
            self.total = total if self.total is None else self.total + total
            self.tokens += tokens

    def _of_batch(self, core: Any, seen: Seen) -> Tensor:
        if self.quantity == "center":
            return mean_of_finite(mean_key(seen.k, seen.key_mask))
        seen = seen.centered(core)
        if self.quantity == "variances":
            return core.statistics.matching.pooled_variances(seen.q, seen.k, **seen.masks)
        return mean_of_finite(core.level.measure(seen.q, seen.k, **seen.level_options(core)))

    @torch.no_grad()
    def store(self, core: Any) -> None:
        """Make what was measured a constant of the layer."""
        if self.total is None:
            raise ValueError(
                f"{core.calibration.place.name} saw no valid token, or NaN or infinite activations "
                "only; calibrate on other batches"
            )
        mean = (self.total / self.tokens).float()
        if self.quantity == "center":
            core.center.stored.calibrate_("the mean of the keys", mean)
        elif self.quantity == "level":
            core.level.stored.calibrate_("gamma", mean[None])
        else:
            core.statistics.store_variances_(mean)


class Waiting:
    """In the place of an average, for a layer of which a pass over the batches measures nothing."""

    def __init__(self, *, stay_softmax: bool) -> None:
        self.stay_softmax = stay_softmax

    def measure(self, core: Any, *seen: Any) -> bool:
        """Measure nothing; returns whether softmax answers meanwhile."""
        return self.stay_softmax


class OutputLevel(Average):
    """γ of a layer by which its output is closest to that of softmax, over all batches."""

    def __init__(self, *, stay_softmax: bool) -> None:
        super().__init__("level", stay_softmax=stay_softmax)
        self.terms: list[OutputTerms] = []

    def _add(self, core: Any, seen: Seen) -> None:
        seen = seen.centered(core)
        found = core.level.output_terms(seen.q, seen.k, seen.v, **seen.level_options(core))
        self.terms.append(found.to_cpu())

    @torch.no_grad()
    def store(self, core: Any) -> None:
        """Make what was measured a constant of the layer."""
        found = OutputTerms.join(self.terms)
        core.level.stored.calibrate_("gamma", found.level().float()[None])


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    method: str | MomentFit | None = None,
    activations: str = "softmax",
    level: str = "output",
) -> nn.Module:
    """Set α and β of every LLN layer, per head, from the activations of real inputs.

    Eq. (10) of arXiv:2311.13541 with σ_q², σ_k² averaged over all valid tokens of all batches.
    γ of near and far keys and the stored mean of ``center_keys`` take a pass over the batches each.
    Feature maps that set their own scale ("hedgehog", "t2r", "elu") keep α = β = 1. Layers with
    ``statistics="sample"``, as encoders have by default, go on measuring every sample, by
    ``method``: nothing is stored there.

    Args:
        batches: Arguments of the model by name, ``{"input_ids": ids, "attention_mask": mask}``.
        method: "paper", "variance", "entropy" or a fitted line; as given to ``replace`` by default.
        activations: Those of the model with "softmax" attention in the LLN layers, which trained
            weights know, or those with "lln", each layer already using what was measured so far.
        level: γ of near and far keys: "output" brings the output of every head closest to that of
            softmax (:func:`lln.moments.match_output_level`), "share" gives its near keys the share
            of softmax (:func:`lln.moments.match_level`).

    Returns:
        The model. Its mode, gradients and random state are left alone; running statistics count
        this as their first batch.

    Example:
        >>> lln.hf.calibrate(model, [tokenizer(text, return_tensors="pt") for text in texts])
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations={activations!r} is unknown; choose 'softmax' or 'lln'")
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is unknown; choose 'output' or 'share'")
    layers: list[Any] = [core for core in model.modules() if calibration_of(core) is not None]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no LLN layer yet; call lln.hf.replace(model, 'lln_diag', "
            "...), then calibrate"
        )
    stored = [core for core in layers if core.calibration.kind != "sample"]
    training = [module for module in model.modules() if module.training]
    previous = [core.statistics.matching for core in layers]
    count = 0
    try:
        for core in layers:
            if method is not None:
                _set_method(core, method)
        model.eval()
        wanted = {id(core): quantities(core) for core in stored}
        passes = [q for q in ORDER if any(q in known for known in wanted.values())]
        if len(passes) > 1:
            batches = list(batches)
        for number, quantity in enumerate(passes):
            measured = [core for core in stored if quantity in wanted[id(core)]]
            for core in layers:
                later = any(q in wanted.get(id(core), ()) for q in passes[number + 1 :])
                core.calibration.average = Waiting(stay_softmax=activations == "softmax" or later)
            for core in measured:
                core.calibration.average = _average(quantity, level, activations == "softmax")
            for batch in batches:
                model(**batch)
                count += 1
            if count == 0:
                raise ValueError("batches is empty; pass at least one dictionary of model inputs")
            for core in measured:
                core.calibration.average.store(core)
        for core in stored:
            core.calibrated.fill_(True)
    except BaseException:
        for core, matching in zip(layers, previous, strict=True):
            core.statistics.matching = matching
        raise
    finally:
        for core in layers:
            core.calibration.average = None
        for module in training:
            module.training = True
    if method is not None:
        _remember_method(model, method)
    return model


def _average(quantity: str, level: str, stay_softmax: bool) -> Average:
    if quantity == "level" and level == "output":
        return OutputLevel(stay_softmax=stay_softmax)
    return Average(quantity, stay_softmax=stay_softmax)


def _set_method(core: Any, method: str | MomentFit) -> None:
    core.statistics.matching = dataclasses.replace(core.statistics.matching, method=method)


def _remember_method(model: Any, method: str | MomentFit) -> None:
    """Write the method into the config: running statistics need it after loading, too."""
    for done in replacements_of(model).current:
        if zoo.describe(done.attention).measures:
            done.options["method"] = method
    record(model)
