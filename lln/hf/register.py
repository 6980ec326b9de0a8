"""Make LLN and the cores of the zoo known to transformers as attention implementations."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lln import zoo
from lln.hf import cores
from lln.hf.cache import state_layer
from lln.hf.cores import Calibration, calibration_of
from lln.hf.masks import (
    Visible,
    linear_mask,
    mixed_mask,
    one_row,
    packed,
    read_mask,
)
from lln.hf.one_by_one import one_by_one
from lln.hf.packing import from_lengths
from lln.hf.positions import RELATIVE, check_positions
from lln.hf.refusing import (
    LEFT_OUT_BY_SDPA,
    REFUSED,
    check_alone,
    check_sizes,
    check_starts,
    name_of,
    refuse,
)
from lln.hf.rotation import HANDED_ON, Rotation, rotation_of
from lln.hf.softmax import (
    SoftmaxCall,
    added_mask,
    eager_of,
    pair_mask,
    softmax_attention,
)

MIXED = "lln_mixed"  # models in which some layers keep softmax attention


def register() -> list[str]:
    """Make every mechanism with a core an ``attn_implementation`` of any model; returns the names.

    The mask function is registered with it: without one transformers drops the mask silently, and
    padding leaks. Calling this again changes nothing. A name that transformers itself uses for
    something else gets the prefix ``"lln_"``.

    Encoders run at once. Causal models need calibrated constants, and mechanisms with weights of
    their own need a place for them: both come with :func:`lln.hf.replace`. Options of the plain way
    are read from ``model.config.lln_options``, a dictionary.

    Example:
        >>> lln.hf.register()
        >>> model = AutoModel.from_pretrained("roberta-base", attn_implementation="lln_diag")
    """
    names = []
    for attention in zoo.KNOWN:
        name = implementation_name(attention)
        AttentionInterface.register(name, partial(attention_forward, attention))
        AttentionMaskInterface.register(name, linear_mask)
        if attention in zoo.MECHANISMS and cores.is_core(zoo.describe(attention)):
            names.append(name)
    AttentionInterface.register(MIXED, partial(attention_forward, MIXED))
    AttentionMaskInterface.register(MIXED, mixed_mask)
    return names


def implementation_name(attention: str) -> str:
    """What a mechanism is called in transformers."""
    known = ALL_ATTENTION_FUNCTIONS.get(attention)
    ours = known is None or getattr(known, "func", None) is attention_forward
    return attention if ours else f"lln_{attention}"


def attention_forward(
    attention: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, called by transformers: q, k, v ``[B, H, N, D] -> [B, N, H, E]``."""
    core, found = core_of(module, attention), None
    if core is None and attention_mask is not None and attention_mask.dim() == 4:
        attention_mask = _keep_apart(module, query, key, attention_mask, others)
    else:
        found = _sequences(module, core, query, key, attention_mask, is_causal, others)
    if found is not None:
        attend = partial(attention_forward, attention, module)
        options = {"dropout": dropout, "scaling": scaling, **others}
        return one_by_one(attend, core, (query, key, value), *found, options), None
    if core is None:
        layer = state_layer(key)
        own_mask = None if layer is None else layer.visible()
        attention_mask = attention_mask if own_mask is None else own_mask
        _state_of(module, None, key)
        refuse(type(module).__name__, others, LEFT_OUT_BY_SDPA)
        return _softmax(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, others
        )
    calibration, layer_name = calibration_of(core), name_of(module, core)
    if attention_mask is not None and not core.causal:
        attention_mask = one_row(attention_mask, query.shape[2])
    if attention_mask is not None and attention_mask.dim() != 2:
        shape = list(attention_mask.shape)
        raise ValueError(
            f"{layer_name} got a mask per query-key pair, attention_mask {shape}, which no "
            "linear attention can apply: a 4-D mask, a bias of relative positions, packed "
            "sequences that lln.hf.replace was not told of (position_ids that start again in a "
            "model chosen by attn_implementation=, that jump, or without a mask in a compiled "
            "model), a sliding or chunked window, a prefix, or a static cache. Pass a 2-D padding "
            "mask, switch the bias off in the config, pad instead of packing, use the default "
            'cache, or keep softmax there with lln.hf.replace(..., layers="global"), which leaves '
            "windows alone"
        )
    refuse(layer_name, others, REFUSED)
    if calibration is not None:
        check_sizes(core, layer_name, query, key)
    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        # Moment matching and the diagonal branch assume scores of q·k/√d.
        query = query * (scaling * query.shape[-1] ** 0.5)
    rotation = rotation_of(core, others.get(HANDED_ON), key, layer_name)
    seen = read_mask(attention_mask, key.shape[2])
    causal = _is_causal(module, seen, is_causal)
    past = _state_of(module, core if causal else None, key)
    is_cross = cores.is_cross(module)
    if not (attention in RELATIVE or is_cross or _follows(core)):
        check_positions(
            module, layer_name, query.shape[2], seen.key_mask, others.get("position_ids")
        )

    def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if calibration is not None:
            measured = _measure(calibration, core, q, k, v, seen.key_mask, causal, rotation)
            if measured is not None:
                return measured
        if past is not None:
            return past.attend(core, q, k, v, seen.key_mask, rotation)
        options = {"key_mask": seen.key_mask, "is_causal": causal, "dropout": dropout}
        return cores.attend(core, q, k, v, **options, rotation=rotation, is_cross=is_cross)

    lesson = getattr(core, "lesson", None)
    if lesson is None:
        return answer(query, key, value).transpose(1, 2), None
    scale = query.shape[-1] ** -0.5
    options = {"key_mask": seen.key_mask, "is_causal": causal, "scale": scale}
    out = softmax_attention(query, key, value, **options)
    query_mask = None if seen.key_mask is None else seen.key_mask[:, -query.shape[2] :]
    call = SoftmaxCall(query, key, value, out, seen.key_mask, query_mask, causal, scale, rotation)
    if calibration is not None:
        _measure(calibration, core, query, key, value, seen.key_mask, causal, rotation)
    return lesson.answer(core, answer, call).transpose(1, 2), None


def _sequences(
    module: nn.Module,
    core: nn.Module | None,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    told: bool | None,
    others: dict[str, Any],
) -> tuple[Tensor, bool] | None:
    """The number of each token's sequence and whether the call is causal, if it is packed."""
    found = packed(mask)
    if found is None:
        sequences = from_lengths(others, query.shape[0], query.shape[2])
        if sequences is None:
            return None
        name = type(module).__name__ if core is None else name_of(module, core)
        seen = None if mask is None or mask.dim() != 2 else read_mask(mask, key.shape[2])
        if (mask is not None and seen is None) or (seen and seen.key_mask is not None):
            raise ValueError(
                f"{name} got packed sequences, cu_seq_lens_q, and a mask; leave attention_mask out"
            )
        found = sequences.to(query.device), _is_causal(module, seen or Visible(None, None), told)
        check_starts(name, module, others.get("position_ids"), sequences)
    check_alone(module, core, query, key)
    return found


def _keep_apart(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor, others: dict[str, Any]
) -> Tensor:
    """The mask of a window that keeps softmax, with packed sequences apart where lengths are given.

    Those of positions are in it already, see :func:`lln.hf.masks.mixed_mask`.
    """
    sequences = from_lengths(others, query.shape[0], query.shape[2])
    if sequences is None:
        return mask
    check_alone(module, None, query, key)
    check_starts(type(module).__name__, module, others.get("position_ids"), sequences)
    sequences = sequences.to(mask.device)
    same = sequences[:, None, :, None] == sequences[:, None, None]
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, -torch.inf)


def _measure(
    calibration: Calibration,
    core: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    rotation: Rotation | None,
) -> Tensor | None:
    """Let a running calibration see a call; the output if softmax answers meanwhile.

    Outside of a calibration α and β must be set.
    """
    if is_causal and calibration.kind == "sample":
        raise ValueError(
            f"{calibration.place.name} is causal and statistics='sample' would let the future leak "
            "into the past; call lln.hf.replace(model, ...) and lln.hf.calibrate(model, batches)"
        )
    if calibration.average is None:
        calibration.check(core)
        return None
    query_mask = None if key_mask is None else key_mask[:, -q.shape[2] :]
    if not calibration.average.measure(core, q, k, v, key_mask, query_mask, rotation):
        return None
    options = {"key_mask": key_mask, "is_causal": is_causal}
    return softmax_attention(q, k, v, **options, scale=q.shape[-1] ** -0.5)


def _state_of(module: nn.Module, core: nn.Module | None, key: Tensor) -> Any:
    """The cache layer these keys come from, for a core that decodes from its state."""
    layer = state_layer(key)
    calibration = calibration_of(core)
    learning = (calibration and calibration.average) or getattr(core, "lesson", None)
    if layer is None or (calibration is not None and not learning):
        return layer
    if layer.state is not None:
        name = type(module).__name__ if core is None else name_of(module, core)
        raise ValueError(
            f"{name} has a cache that holds a state of earlier tokens, which only causal LLN reads "
            "outside of calibrate and transfer; start with a new cache, or with past_key_values="
            "DynamicCache(config=model.config), which keeps all keys"
        )
    return None


_unattached: WeakKeyDictionary[nn.Module, tuple[tuple, nn.Module]] = WeakKeyDictionary()


def core_of(module: nn.Module, attention: str) -> Any:
    """The core of a layer: attached by ``replace``, or made here if it has nothing to remember.

    None means softmax: a layer that :func:`lln.hf.replace` left alone.
    """
    attached = module._modules.get("lln")
    if attached is not None or attention == MIXED:
        return attached
    entry, config = zoo.describe(attention), module.config
    if getattr(config, "lln", None) is not None:
        raise ValueError(
            f"{type(module).__name__} has the config of a model that was changed by "
            "lln.hf.replace but no attention core; load it with lln.hf.load(folder), or construct "
            "it with a config of its own and call lln.hf.replace on it"
        )
    if not cores.is_core(entry):
        raise ValueError(
            f"attn_implementation={attention!r} makes its own queries and keys; call "
            f"lln.hf.replace(model, {attention!r}), which exchanges whole attention modules"
        )
    options = dict(getattr(config, "lln_options", None) or {})
    wanted = (attention, repr(sorted(options.items())), str(next(module.parameters()).device))
    found = _unattached.get(module)
    if found is None or found[0] != wanted:
        found = _unattached[module] = (wanted, _make_unattached(module, attention, options))
    return found[1].train(module.training)


def _make_unattached(module: nn.Module, attention: str, options: dict[str, Any]) -> Any:
    index = getattr(module, "layer_idx", None) or 0
    config: Any = module.config
    place = cores.place_of(
        module,
        f"layer {index} ({type(module).__name__})",
        layer_index=index,
        num_layers=max(getattr(config, "num_hidden_layers", 1), index + 1),
    )
    core = cores.build(attention, place, **options)
    if next(core.parameters(), None) is not None:
        raise ValueError(
            f"attn_implementation={attention!r} with options {options} has weights of its own, "
            f"which would neither be trained nor saved; call lln.hf.replace(model, {attention!r})"
        )
    return core.to(next(module.parameters()).device)


def _is_causal(module: nn.Module, seen: Visible, told: bool | None) -> bool:
    """Whether a call is causal: by its mask, else by its caller, else by its module."""
    if seen.is_causal is not None:
        return seen.is_causal
    return bool(getattr(module, "is_causal", False) if told is None else told)


def _softmax(
    module, query, key, value, attention_mask, dropout, scaling, is_causal, others
) -> tuple[Tensor, None]:
    """Attend in a layer that keeps softmax, by the function of transformers that it had before."""
    mask, causal = attention_mask, bool(is_causal)
    if mask is None or mask.dim() == 2:
        seen = read_mask(mask, key.shape[2])
        causal = _is_causal(module, seen, is_causal)
        mask = pair_mask(query, key, seen.key_mask, is_causal=causal)
    options = {"dropout": dropout, "scaling": scaling, **others}
    eager = eager_of(module) if getattr(module, "_lln_before", None) == "eager" else None
    if eager is not None:
        added = added_mask(mask, query, key, is_causal=causal)
        return eager(module, query, key, value, added, **options)[0], None
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return attend(module, query, key, value, mask, is_causal=causal, **options)[0], None


def _follows(core: nn.Module) -> bool:
    """Whether the model around a core counts its positions from the first real token."""
    return getattr(core, "positions_follow", False)
