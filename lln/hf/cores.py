"""Attention cores inside Hugging Face layers: their sizes, their construction, their call."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln import zoo
from lln.hf.masks import starts_late
from lln.hf.padding import from_first_token
from lln.hf.rotation import Rotation
from lln.hf.softmax import kept_keys, put_softmax, softmax_heads_of
from lln.mechanisms import Mechanism
from lln.nn import LLNAttention
from lln.nn.statistics import UnitScales
from lln.ops.common.arguments import autocast
from lln.protocols import AttentionCore

# Options that the model decides, in every call or by its layers.
SET_BY_THE_MODEL = ("causal", "dropout", "layer")


@dataclass(frozen=True)
class Place:
    """Where a core stands: its layer's sizes, and a name for messages."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    max_length: int
    is_cross: bool = False
    layer_index: int = 0
    num_layers: int = 1


class Calibration:
    """Whether α and β of a core in a model are set; ``core.calibration`` of cores that measure.

    ``core.calibrated`` is saved with the weights; ``average`` is what a calibration has
    measured so far, while it runs.
    """

    def __init__(self, place: Place, kind: str, *, given: bool) -> None:
        self.place = place
        self.kind = kind
        self.average: Any = None
        self._known = given

    def is_known(self, core: Any) -> bool:
        """Whether α and β were given or measured."""
        if not self._known:  # read once: looking at a tensor waits for a GPU
            stored = (core.statistics, *(part.stored for part in (core.level, core.center) if part))
            batches = next((part.batches for part in stored if hasattr(part, "batches")), 0)
            self._known = bool(core.calibrated) or bool(batches > 0)
        return self._known

    def check(self, core: Any) -> None:
        """Raise unless α and β were given, measured, or are about to be learned from batches."""
        if self._known or (self.kind == "running" and core.training):
            return
        if not self.is_known(core):
            raise ValueError(
                f"{self.place.name} has no calibrated alpha and beta (statistics={self.kind!r}); "
                "call lln.hf.calibrate(model, batches) once after lln.hf.replace, or give "
                "alpha= and beta= there"
            )


def quantities(core: LLNAttention) -> list[str]:
    """What is measured for a core, in the order in which one follows from the other.

    The mean of the keys, the variances behind α and β, and γ.
    """
    before = ["center"] if core.center is not None and core.causal else []
    matched = [] if isinstance(core.statistics, UnitScales) else ["variances"]
    return [*before, *matched, *(["level"] if core.level is not None else [])]


def calibration_of(core: nn.Module | None) -> Calibration | None:
    """The calibration of a core; None for those that measure nothing."""
    return getattr(core, "calibration", None)


def awaits_batches(model: nn.Module) -> bool:
    """Whether a core of the model learns α and β from batches and has seen none."""
    cores = ((core, calibration_of(core)) for core in model.modules())
    return any(
        found is not None and found.kind == "running" and not found.is_known(core)
        for core, found in cores
    )


def attend(
    core: AttentionCore,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    key_mask: Bool[Tensor, "B M"] | None,
    is_causal: bool,
    is_cross: bool = False,
    dropout: float = 0.0,
    rotation: Rotation | None = None,
) -> Float[Tensor, "B H N E"]:
    """Return the output of a core, independent of how a sample is padded.

    Heads that keep softmax (``core.softmax_heads``) answer with it. ``rotation`` is that of the
    call, for feature maps that see queries and keys before it.
    """
    q, k, v = autocast(q, k, v)
    heads = softmax_heads_of(core)

    def plain(
        rotation: Rotation | None, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
    ) -> Tensor:
        query_mask = None if is_cross or key_mask is None else key_mask[:, -q.shape[2] :]
        options = {"is_causal": is_causal, "dropout": dropout}
        if (rotation is not None or is_cross) and isinstance(core, LLNAttention):
            masks = {"key_mask": key_mask, "query_mask": query_mask}
            told = {**masks, **options, "is_cross": is_cross, "unrotate": rotation}
            out = core.attend(q, k, v, core.draw(q, k, **told))
        else:
            out = core.attend_in_model(q, k, v, key_mask, query_mask, **options)
        if not heads:
            return out
        seen = (kept_keys(x, heads, q.shape[1]) for x in (k, v))
        return put_softmax(
            out, heads, q, *seen, group=q.shape[1] // k.shape[1], key_mask=key_mask, **options
        )

    if key_mask is not None and core.positions_matter and not is_cross and starts_late(key_mask):
        turned = None if rotation is None else rotation.turned(key_mask)
        return from_first_token(partial(plain, turned), q, k, v, key_mask)
    return plain(rotation, q, k, v, key_mask)


def place_of(
    module: nn.Module,
    name: str,
    *,
    layer_index: int = 0,
    num_layers: int = 1,
    max_length: int = 0,
    causal: bool | None = None,
) -> Place:
    """Read a layer's sizes from the attention module, and from its configuration."""
    config: Any = module.config
    heads = _size((module, "num_heads"), (module, "num_attention_heads"))
    heads = heads or config.num_attention_heads
    width = _size(
        (module, "qk_head_dim"),  # of latent attention: the config's is that of the rotated part
        (module, "head_dim"),
        (module, "attention_head_size"),
        (config, "head_dim"),
    )
    return Place(
        name=name,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=width or config.hidden_size // heads,
        causal=bool(getattr(module, "is_causal", False)) if causal is None else causal,
        max_length=max_length or longest_input(config),
        is_cross=is_cross(module),
        layer_index=layer_index,
        num_layers=num_layers,
    )


def _size(*places: tuple[Any, str]) -> int | None:
    """The first of these attributes that is a number."""
    values = (getattr(owner, key, None) for owner, key in places)
    return next((value for value in values if isinstance(value, int)), None)


def is_causal(module: nn.Module, owner: nn.Module) -> bool:
    """Whether a layer is causal: it says so, or (in CLIP's text tower) the model around it does."""
    if getattr(module, "is_causal", False):
        return True
    used = _names_in_forward(owner)
    return "create_causal_mask" in used and "create_bidirectional_mask" not in used


def longest_input(config: Any) -> int:
    """The number of positions a model has: of text, or of image patches and special tokens."""
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        return positions
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(image, int) and isinstance(patch, int):
        return (image // patch) ** 2 + 2
    return 512


def is_core(entry: Mechanism) -> bool:
    """Whether a mechanism can take the queries, keys and values that a model makes."""
    return entry.core and "feature_dim" not in entry.defaults


def check_options(attention: str, options: dict[str, Any]) -> None:
    """Raise for options that a mechanism does not have, or that the model decides."""
    known = [key for key in zoo.describe(attention).defaults if key not in SET_BY_THE_MODEL]
    for option in options:
        if option not in known:
            reason = "is decided by the model" if option in SET_BY_THE_MODEL else "is not an option"
            taken = ", ".join(known) or "none"
            raise TypeError(f"{option}= {reason}; {attention!r} takes {taken}")


def build(attention: str, place: Place, **options: Any) -> Any:
    """Make the core of a mechanism for one layer."""
    check_options(attention, options)
    if place.is_cross and options.get("calibrate"):
        raise ValueError(
            f"calibrate=True cannot serve {place.name}, cross-attention: it measures over all "
            "queries, so that in a decoder each would see the ones after it; leave calibrate out"
        )
    if zoo.describe(attention).measures:
        return _build_measuring(attention, place, options)
    return create(attention, place, place.num_heads * place.head_dim, **options).core


def _build_measuring(attention: str, place: Place, options: dict[str, Any]) -> LLNAttention:
    """Make a core with α and β, which in causal layers must be set before they are used."""
    ordered = place.causal or place.is_cross
    kind = options.get("statistics", "fixed" if ordered else "sample")
    told = {"causal": place.causal, "statistics": kind}
    core: Any = LLNAttention(
        place.num_heads,
        place.head_dim,
        num_kv_heads=place.num_kv_heads,
        **{**zoo.settled(attention, options), **told},
    )
    given = kind == "sample" or options.get("alpha") is not None or not quantities(core)
    core.register_buffer("calibrated", torch.tensor(given))
    core.calibration = Calibration(place, kind, given=given)
    return core


def create(attention: str, place: Place, dim: int, **options: Any) -> Any:
    """Make a whole layer of the zoo for this place, causal if the place is."""
    entry = zoo.describe(attention)
    if place.causal and not entry.causal:
        raise ValueError(
            f"{attention!r} has no causal form and {place.name} is causal; choose one that has: "
            + ", ".join(key for key, other in zoo.MECHANISMS.items() if other.causal)
        )
    return zoo.create(
        attention,
        dim=dim,
        num_heads=place.num_heads,
        max_length=place.max_length,
        layer_index=place.layer_index,
        num_layers=place.num_layers,
        **({"causal": True} if place.causal else {}),
        **options,
    )


def is_routed(module: nn.Module) -> bool:
    """Whether a module attends through transformers' attention interface."""
    return "ALL_ATTENTION_FUNCTIONS" in _names_in_forward(module) and hasattr(module, "config")


def _names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """The names that the code of a module's ``forward`` refers to."""
    forward = inspect.unwrap(type(module).forward)
    return getattr(getattr(forward, "__code__", None), "co_names", ())


def is_cross(module: nn.Module) -> bool:
    """Whether the keys are those of another sequence, as far as the module tells."""
    decodes = getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True)
    named = "Cross" in type(module).__name__ or getattr(module, "is_cross_attention", False)
    return bool(named or decodes)
