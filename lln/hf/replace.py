"""Put another attention into a Hugging Face model, and take it out again."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lln import zoo
from lln.hf import cores
from lln.hf.cache import PREPARE, prepare_cache
from lln.hf.options_json import to_json
from lln.hf.positions import follow_padding, owner_of
from lln.hf.register import MIXED, implementation_name, register
from lln.hf.rotation import follow_rotation, let_see_before
from lln.hf.swapped_attention import SwappedAttention
from lln.nn import preset_of, presets
from lln.nn.presets import BY_PLACE

# In config.json: no such implementation exists, so that a plain from_pretrained stops there instead
# of running softmax. `from_pretrained(folder, attn_implementation="sdpa")` asks for that openly.
LOAD_WITH = "load this model with lln.hf.load"


@dataclasses.dataclass
class Replacements:
    """The replacements that hold in a model, and the implementations its configs named before."""

    current: list[Replacement] = dataclasses.field(default_factory=list)
    implementations: list[tuple[Any, str]] = dataclasses.field(default_factory=list)

    def implementation(self, config: Any) -> str:
        """The name a config held before; by identity, as configs of copied models are equal."""
        for known, name in self.implementations:
            if known is config:
                return name
        self.implementations.append((config, config._attn_implementation))
        return config._attn_implementation


def replacements_of(model: Any) -> Replacements:
    """The replacements of a model; none if it was never replaced."""
    return model.__dict__.get("_lln_replacements") or Replacements()


@dataclasses.dataclass(eq=False)
class Replacement:
    """What :func:`replace` did; calling it undoes that.

    Attributes:
        layers: Numbers of the attention layers that were changed.
        softmax_heads: Heads of these layers that keep softmax.
        before_rotation: Whether feature maps see queries and keys before their rotation.
        parameters_before, parameters_after: Of the whole model.
    """

    model: PreTrainedModel
    attention: str
    options: dict[str, Any]
    layers: list[int]
    max_length: int | None
    parameters_before: int
    parameters_after: int = 0
    originals: dict[str, nn.Module] = dataclasses.field(default_factory=dict, repr=False)
    active: bool = True
    softmax_heads: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    before_rotation: bool = False

    def __call__(self) -> None:
        """Undo: the layers attend as before, bit for bit; a second call does nothing."""
        if not self.active:
            return
        for path, original in self.originals.items():
            if original._modules.pop("lln", None) is None:
                self.model.set_submodule(path, original)
        self.active = False
        replacements_of(self.model).current.remove(self)
        _announce(self.model)

    def keep_softmax(self, layers: Iterable[int]) -> None:
        """Give some of the layers their own attention back; the others stay replaced."""
        places = list(attention_modules(self.model))
        for number in layers:
            if not self.active or number not in self.layers:
                raise ValueError(f"layer {number} is not replaced; replaced are {self.layers}")
            if self.layers == [number]:
                self()
                return
            original = self.originals.pop(places[number])
            if original._modules.pop("lln", None) is None:
                self.model.set_submodule(places[number], original)
            self.layers.remove(number)
            self.softmax_heads.pop(number, None)
        self.parameters_after = sum(x.numel() for x in self.model.parameters())
        _announce(self.model)

    def keep_softmax_heads(self, heads: Mapping[int, Iterable[int]]) -> None:
        """Let single heads of replaced layers answer with softmax; the others stay as they are.

        Generation then keeps the keys and values of these heads beside the state.

        Args:
            heads: Numbers of the heads that keep softmax, by layer; an empty list takes it back.
        """
        places, paths = attention_modules(self.model), list(attention_modules(self.model))
        chosen: dict[int, tuple[Any, list[int]]] = {}
        for number, wanted in heads.items():
            if not self.active or number not in self.layers:
                raise ValueError(f"layer {number} is not replaced; replaced are {self.layers}")
            layer = places[paths[number]]
            core = layer._modules.get("lln")
            if core is None:
                raise ValueError(
                    f"layer {number} makes its own queries and keys for {self.attention!r}, which "
                    "softmax cannot take over; keep whole layers with keep_softmax"
                )
            found, count = sorted(set(wanted)), cores.place_of(layer, paths[number]).num_heads
            if found and not 0 <= found[0] <= found[-1] < count:
                raise ValueError(f"layer {number} has heads 0 to {count - 1}, not {found}")
            chosen[number] = core, found
        for number, (core, found) in chosen.items():
            core.softmax_heads = tuple(found)
            self.softmax_heads.pop(number, None)
            if found:
                self.softmax_heads[number] = found
        record(self.model)

    def __str__(self) -> str:
        return (
            f"{self.attention} in {len(self.layers)} of {len(attention_modules(self.model))} "
            f"attention layers: {self.parameters_before:,} -> {self.parameters_after:,} parameters"
        )


def replace(
    model: PreTrainedModel,
    attention: str = BY_PLACE,
    *,
    layers: Iterable[int] | str | None = None,
    max_length: int | None = None,
    quiet: bool = False,
    before_rotation: bool = False,
    **options: Any,
) -> Replacement:
    """Let a model's self-attention layers use LLN or any mechanism of the zoo; returns the undo.

    Projections and all other weights stay. The core becomes a submodule ``lln`` of each attention
    module, so that the state dict keeps α, β, statistics and learned factors. Mechanisms that make
    their own queries and keys replace the whole attention module, with new weights. Layers left out
    and cross-attention keep softmax.

    Args:
        attention: A name of :func:`lln.list_mechanisms`, or "recommended": the preset of
            :func:`lln.nn.recommended` for an encoder or a decoder, from scratch or, if the model
            was loaded, trained with softmax. Says which one.
        layers: Which, counted over the self-attention layers from 0 (negative: from the end); all
            by default. "global": those without a sliding or chunked window, as in Gemma 3 and
            ModernBERT. Call again for other layers to mix mechanisms.
        max_length: Longest input of mechanisms with weights of that size; from the config.
        quiet: Do not print the parameter counts.
        before_rotation: In models with rotary positions, let the feature maps of LLN see queries
            and keys before these are applied; near keys are compared by the rotated ones as ever.
            Far keys then count by what they are and not by where, so that nothing the maps learn
            holds for some positions only. Needs feature maps and no ``center_keys``; with
            caches of ``generate``'s own making. σ_q and σ_k stay those of the rotated ones, which
            differ by the mean of all coordinates alone; γ is measured with what the maps see.
        options: Those of the mechanism, see ``lln.describe(attention).defaults``. For LLN
            ``statistics`` is "sample" in bidirectional layers and "fixed" in causal ones, which
            :func:`lln.hf.calibrate` then sets, unless ``alpha`` and ``beta`` are given. The filter
            of ``conv`` starts at zero in a model that was loaded, as noise would only disturb it.

    Returns:
        A callable that undoes it, with the numbers of parameters before and after.

    Example:
        >>> undo = lln.hf.replace(model, "lln_diag", layers=range(2, 12), near=64)
        >>> lln.hf.calibrate(model, batches, method="entropy")
        >>> undo()
    """
    register()
    if attention == BY_PLACE:
        chosen = presets.choose(
            causal=_is_decoder(model), trained=bool(model.name_or_path), options=options
        )
        _, attention, options = chosen
        if not quiet:
            print(chosen)
    entry = zoo.describe(attention)
    if entry.replaces_ffn:
        raise ValueError(
            f"{attention!r} takes the place of attention and feed-forward network together, which "
            "cannot be exchanged in a model of another library; use lln.create"
        )
    cores.check_options(attention, options)
    places = attention_modules(model)
    wanted = _choose(_without_windows(places) if layers == "global" else layers, list(places))
    _own_config(model)
    before = sum(parameter.numel() for parameter in model.parameters())
    numbers = [number for number, _ in wanted]
    done = Replacement(model, attention, options, numbers, max_length, before)
    done.before_rotation = before_rotation
    built = {}
    for number, path in wanted:  # all of them first: an error leaves the model as it was
        module = places[path]
        place = cores.place_of(
            module,
            f"layer {number} ({path}) of {type(model).__name__}",
            layer_index=number,
            num_layers=len(places),
            max_length=max_length or 0,
            causal=cores.is_causal(module, owner_of(model, path)),
        )
        built[path] = _build(attention, entry, place, module, model, options)
        if before_rotation:
            let_see_before(built[path], attention, module, owner_of(model, path), place.name)
    for path, new in built.items():
        done.originals[path] = places[path]
        if isinstance(new, SwappedAttention):
            model.set_submodule(path, new)
        else:
            places[path].add_module("lln", new)
    done.parameters_after = sum(parameter.numel() for parameter in model.parameters())
    replacements_of(model).current.append(done)
    _announce(model)
    if not quiet:
        print(done)
    return done


def _is_decoder(model: PreTrainedModel) -> bool:
    """Whether the first of its self-attention layers is causal."""
    path, module = next(iter(attention_modules(model).items()))
    return cores.is_causal(module, owner_of(model, path))


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The self-attention modules that go through transformers' attention interface, by path."""
    found = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, SwappedAttention)
        or (cores.is_routed(module) and not cores.is_cross(module))
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer that goes through transformers' attention "
            "interface (as longformer, big_bird, nystromformer, reformer, deberta_v2 have none)"
        )
    return found


def _without_windows(places: dict[str, nn.Module]) -> list[int]:
    """Numbers of the layers that see the whole input."""
    found = [number for number, module in enumerate(places.values()) if not window_of(module)]
    if not found:
        module = next(iter(places.values()))
        raise ValueError(
            f'layers="global": all {len(places)} attention layers have a window, '
            f"{window_of(module)!r}; set config.sliding_window = None before the model is made if "
            "they are to see the whole input"
        )
    return found


def window_of(module: Any) -> Any:
    """What a layer says of its window, in the words of its model; None without one."""
    kinds, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is not None and index is not None:
        return None if kinds[index] == "full_attention" else kinds[index]
    window = getattr(module, "sliding_window", None)
    return window or getattr(module.config, "sliding_window", None)


def _choose(layers: Iterable[int] | str | None, paths: list[str]) -> list[tuple[int, str]]:
    """Numbers and paths of the layers asked for."""
    if isinstance(layers, str):
        raise ValueError(f'layers={layers!r} is unknown; pass numbers, "global", or leave it out')
    numbers = range(len(paths)) if layers is None else layers
    chosen = {}
    for number in numbers:
        if not -len(paths) <= number < len(paths):
            raise ValueError(
                f"layers={number} does not exist; the model has {len(paths)} self-attention "
                "layers, counted from 0"
            )
        chosen[number % len(paths)] = paths[number]
    if not chosen:
        raise ValueError("layers is empty; leave it out to replace all")
    return sorted(chosen.items())


def _build(
    attention: str, entry: Any, place: cores.Place, module: Any, model: Any, options: dict
) -> nn.Module:
    if isinstance(module, SwappedAttention) or "lln" in module._modules:
        raise ValueError(f"{place.name} was replaced already; undo that first, or choose layers=")
    if getattr(module, "indexer", None) is not None:
        raise ValueError(
            f"{place.name} chooses the keys of every query by an indexer, which no other attention "
            "can apply; keep the model as it is"
        )
    like: Tensor = next(module.parameters())
    if cores.is_core(entry):
        new = cores.build(attention, place, **options)
        if model.name_or_path and getattr(new, "conv_weight", None) is not None:
            nn.init.zeros_(new.conv_weight)  # pyright: ignore[reportArgumentType]
    else:
        new = cores.create(attention, place, module.config.hidden_size, **options)
        new.apply(model._init_weights)  # as the layers around it
        new = SwappedAttention(new, module, place)
    return new.to(device=like.device, dtype=like.dtype).train(module.training)


def _own_config(model: PreTrainedModel) -> None:
    """A copy of the config for this model alone: others made from the same object keep theirs."""
    if "_lln_replacements" in model.__dict__:
        return
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.__dict__["config"] = copy.deepcopy(config, memo)
    model.__dict__["_lln_replacements"] = Replacements()


def _announce(model: Any) -> None:
    """Tell transformers what the modules of a model now are: implementation, record, cache."""
    replacements = replacements_of(model).current
    names = {path: done.attention for done in replacements for path in done.originals}
    by_config: dict[int, tuple[Any, set[str | None]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, SwappedAttention) or cores.is_routed(module):
            _, used = by_config.setdefault(id(module.config), (module.config, set()))
            used.add(names.get(path))
            before = replacements_of(model).implementation(module.config)
            module.__dict__["_lln_before"] = before  # of layers that keep softmax
    for config, used in by_config.values():
        original = replacements_of(model).implementation(config)
        name = MIXED if len(used) > 1 else next(iter(used))
        # Not by the property, which would change sub-configs as well.
        config._attn_implementation_internal = (
            original if name is None else MIXED if name == MIXED else implementation_name(name)
        )
    record(model)
    follow_padding(model, names)
    follow_rotation(model, names)
    for part in model.modules():  # of composite models several can generate
        part.__dict__.pop(PREPARE, None)
        if replacements and hasattr(type(part), PREPARE):
            part.__dict__[PREPARE] = functools.partial(prepare_cache, part)


def record(model: Any) -> None:
    """Write into the config what :func:`lln.hf.load` reads from config.json."""
    config, replacements = model.config, replacements_of(model).current
    if not replacements:
        for name in ("lln", "attn_implementation"):
            config.__dict__.pop(name, None)
        return
    config.lln = [
        {
            "attention": done.attention,
            "layers": done.layers,
            "max_length": done.max_length,
            "options": to_json(done.options),
            **({"preset": preset} if (preset := preset_of(done.attention, done.options)) else {}),
            **({"before_rotation": True} if done.before_rotation else {}),
            **_kept_in_json(done),
        }
        for done in replacements
    ]
    config.attn_implementation = LOAD_WITH


def _kept_in_json(done: Replacement) -> dict[str, Any]:
    """The heads that keep softmax, by layer; nothing where there is none, as in older folders."""
    heads = {str(number): found for number, found in sorted(done.softmax_heads.items())}
    return {"softmax_heads": heads} if heads else {}
