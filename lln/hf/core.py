"""The attention core inside a Hugging Face layer: its sizes, its construction, its call."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln import zoo
from lln.hf.masks import starts_late
from lln.hf.padding import from_first_token
from lln.nn import LLNAttention
from lln.ops.arguments import autocast
from lln.protocols import Mechanism

LLN_NAMES = ("lln", "lln_diag")
# The model says these in every call.
TOLD_BY_THE_MODEL = ("causal", "causal_queries", "dropout", "scale", "layer")


@dataclass(frozen=True)
class Place:
    """Where a core stands: its layer's sizes, and a name for messages."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    max_length: int
    causal_queries: bool = False
    layer_index: int = 0
    num_layers: int = 1


class LLNCore(LLNAttention):
    """:class:`lln.nn.LLNAttention` that refuses to run on statistics nobody has set.

    ``calibrated`` is saved with the weights, ``pool`` holds what a calibration has measured so far.
    """

    calibrated: Tensor

    def __init__(self, place: Place, **options: Any) -> None:
        measured = not (place.causal or place.causal_queries)
        kind = options.setdefault("statistics", "sample" if measured else "fixed")
        super().__init__(
            place.num_heads,
            place.head_dim,
            num_kv_heads=place.num_kv_heads,
            causal=place.causal,
            causal_queries=place.causal_queries,
            **options,
        )
        given = kind == "sample" or options.get("alpha") is not None
        self.register_buffer("calibrated", torch.tensor(given))
        self.place = place
        self.kind = kind
        self.pool: Any = None
        self._known_calibrated = given

    def check_calibrated(self) -> None:
        """Raise unless α and β were given, measured, or are about to be learned from batches."""
        if self._known_calibrated or (self.kind == "running" and self.training):
            return
        batches = getattr(self.statistics, "batches", None)
        # Read once: looking at a tensor waits for a GPU.
        self._known_calibrated = bool(self.calibrated) or bool(batches is not None and batches > 0)
        if not self._known_calibrated:
            raise ValueError(
                f"{self.place.name} has no calibrated alpha and beta (statistics={self.kind!r}); "
                "call lln.hf.calibrate(model, batches) once after lln.hf.replace, or give "
                "alpha= and beta= there"
            )


def attend(
    core: nn.Module,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    key_mask: Bool[Tensor, "B M"] | None,
    is_causal: bool,
    is_cross: bool = False,
    dropout: float = 0.0,
) -> Float[Tensor, "B H N E"]:
    """What a core answers, independent of how a sample is padded."""
    q, k, v = autocast(q, k, v)

    def plain(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if isinstance(core, LLNAttention):
            query_mask = None if is_cross or key_mask is None else key_mask[:, -q.shape[2] :]
            masks = {"key_mask": key_mask, "query_mask": query_mask}
            draw = core.draw(q, k, **masks, is_causal=is_causal, dropout=dropout)
            return core.attend(q, k, v, draw)
        return _attend_zoo(core, q, k, v, key_mask, is_causal)

    positions_matter = not isinstance(core, LLNAttention) or core.diag_block is not None
    if key_mask is not None and positions_matter and not is_cross and starts_late(key_mask):
        return from_first_token(plain, q, k, v, key_mask)
    return plain(q, k, v, key_mask)


def _attend_zoo(core, q, k, v, key_mask, is_causal) -> Tensor:
    """A core of the zoo: equal heads, and as many queries as keys in its causal form."""
    if is_causal != getattr(core, "causal", False):
        raise ValueError(
            f"{type(core).__name__} was made for causal={not is_causal} but the model asks for "
            f"causal={is_causal} attention"
        )
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    queries, keys = q.shape[2], k.shape[2]
    if is_causal and queries < keys:
        q = nn.functional.pad(q, (0, 0, keys - queries, 0))
    return core(q, k, v, key_mask)[:, :, -queries:]


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
        causal_queries=is_cross(module),
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
    """Unknown options are errors."""
    known = [key for key in zoo.describe(attention).defaults if key not in TOLD_BY_THE_MODEL]
    for option in options:
        if option not in known:
            reason = (
                "is decided by the model" if option in TOLD_BY_THE_MODEL else "is not an option"
            )
            raise TypeError(f"{option}= {reason}; {attention!r} takes {', '.join(known) or 'none'}")


def build(attention: str, place: Place, **options: Any) -> nn.Module:
    """The core of a mechanism for one layer."""
    check_options(attention, options)
    if attention in LLN_NAMES:
        if attention == "lln_diag":
            options.setdefault("diag_block", zoo.describe(attention).defaults["diag_block"])
        return LLNCore(place, **options)
    return create(attention, place, place.num_heads * place.head_dim, **options).core


def create(attention: str, place: Place, dim: int, **options: Any) -> Any:
    """A whole layer of the zoo for this place, causal if the place is."""
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
    """What the code of a module's call refers to."""
    forward = inspect.unwrap(type(module).forward)
    return getattr(getattr(forward, "__code__", None), "co_names", ())


def is_cross(module: nn.Module) -> bool:
    """Whether the keys are those of another sequence, as far as the module tells."""
    decodes = getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True)
    named = "Cross" in type(module).__name__ or getattr(module, "is_cross_attention", False)
    return bool(named or decodes)
