"""Every mechanism by name: LLN and the baselines on equal footing.

layer = lln.create("performer", dim=256, num_heads=4)
out = layer(x, key_mask)                # [B, N, 256] -> the same; key_mask True = a real token

The records are in :mod:`lln.mechanisms`; torch is loaded when a layer is made.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lln.mechanisms import HALF_PRODUCTS, KNOWN, MECHANISMS, Mechanism

if TYPE_CHECKING:
    from lln.baselines.base import Layer, TokenMixer
    from lln.nn import LLNAttention


def list_mechanisms() -> list[str]:
    """The names of the zoo, all that :func:`create` makes but what is for studies only."""
    return list(MECHANISMS)


def describe(name: str) -> Mechanism:
    """Tell what is known of a mechanism: paper, cost, forms, parameters, defaults and their source.

    Example:
        >>> lln.describe("nystromformer").defaults
        {'landmarks': 64, 'iterations': 6, 'kernel_size': 33, 'half_products': False}
    """
    if name == "recommended":
        raise ValueError(
            "name='recommended' is a choice by place, no mechanism; lln.nn.recommended(place) has "
            "its options, and lln.create and lln.hf.replace take the name"
        )
    if name not in KNOWN:
        raise unknown_name("name", name, MECHANISMS)
    return KNOWN[name]


def unknown_name(argument: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that is none of ``known``, with the nearest of them."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ValueError(f"{argument}={name!r} is unknown; {hint}There are {', '.join(names)}")


def create(
    name: str,
    *,
    dim: int,
    num_heads: int,
    max_length: int | None = None,
    layer_index: int = 0,
    num_layers: int = 1,
    **options: Any,
) -> TokenMixer:
    """Make a self-attention layer (or what replaces it) by name, projections included.

    Args:
        name: Of :func:`list_mechanisms`, or "recommended": LLN+Diag with the options of
            :func:`lln.nn.recommended`, for a decoder with ``causal=True``.
        dim, num_heads: Width of the tokens, and the heads it is divided into.
        max_length: Tokens of the longest input to come. Only the mechanisms with weights or buffers
            of that length need it, those with ``lln.describe(name).needs_length``.
        layer_index, num_layers: Where the layer stands: TransNormer changes half-way up, and random
            features differ from layer to layer.
        options: Those of the mechanism, see ``lln.describe(name).defaults``; others are errors.

    Returns:
        A module called as ``module(x, key_mask)``, x ``[B, N, dim]``, key_mask bool ``[B, N]`` with
        True = a real token, or None. ``module.core`` is the attention on q, k, v ``[B, H, N, D]``
        where the method has one; ``module.attention_matrix(x, key_mask)`` gives its weights.

    Example:
        >>> layer = lln.create("performer", dim=256, num_heads=4)
        >>> out = layer(x, key_mask)       # [8, 4096, 256] -> the same
    """
    if name == "recommended":
        from lln.nn import presets

        _, name, options = presets.choose(causal=bool(options.get("causal")), options=options)
    entry = describe(name)
    for option in options:
        if option not in entry.options:
            known = ", ".join(entry.options) or "none"
            raise TypeError(f"{name!r} has no option {option!r}; it takes {known}")
    if max_length is None and entry.needs_length:
        raise TypeError(
            f"max_length is missing: {name!r} has weights or buffers of that length; pass the "
            "number of tokens of the longest input to come"
        )
    from lln.baselines.base import Layer, SelfAttention

    layer = Layer(dim, num_heads, max_length, layer_index, num_layers)
    told = settled(name, options)
    half = told.pop(HALF_PRODUCTS, False)
    built = entry.build(layer, **told)
    if half:
        built.half_products = True
    return SelfAttention(layer, built) if entry.core else built


def settled(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a mechanism, given or its own; "lln_nearfar" always has one normaliser."""
    told = {**describe(name).options, **options}
    if name == "lln_nearfar":
        from lln.ops.window.near import Near

        near = Near.read(told["near"])
        if near is None:
            raise ValueError("near=None leaves no near field for 'lln_nearfar'; choose 'lln'")
        told["near"] = replace(near, joint=True)
    return told


def lln_core(layer: Layer, **options: Any) -> LLNAttention:
    """Make :class:`lln.nn.LLNAttention` with the heads of a layer."""
    from lln.nn import LLNAttention

    return LLNAttention(layer.num_heads, layer.head_dim, **options)
