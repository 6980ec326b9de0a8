"""Feature maps that see queries and keys as they were before rotary positions were applied.

Softmax sees rotated queries and keys by their products alone, functions of i − j. A feature map
sees every coordinate, so that what it learned holds at the positions it was taught. Models hand
rotated tensors to their attention function; here the rotation travels with them, and is taken back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface

from lln.hf.packing import take_tokens
from lln.hf.padding import from_the_first, take
from lln.hf.positions import is_rotary
from lln.nn import LLNAttention
from lln.protocols import compute_dtype

APPLY = "apply_rotary_pos_emb"  # what the files of transformers' models call their rotation
HANDED_ON = "lln_rotation"  # argument with which a layer's rotation reaches its attention function
PROBE = "lln_probe"  # attention that stops a layer once its queries and keys are made
ROUNDINGS = 8  # of the largest coordinate: a rotation and back; another convention is off by all


@dataclass(frozen=True)
class Rotation:
    """The rotary positions of one call of a layer, and how they are taken back.

    Attributes:
        cos, sin: Of the tokens of the call, as the model made them; the first R coordinates of
            queries and keys are rotated.
        apply: ``(q, k, cos, sin) -> (q, k)``, the model's own rotation.
    """

    cos: Float[Tensor, "#B N R"]
    sin: Float[Tensor, "#B N R"]
    apply: Callable[..., tuple[Tensor, Tensor]]

    def __call__(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B Hkv m D"]
    ) -> tuple[Float[Tensor, "B H n D"], Float[Tensor, "B Hkv m D"]]:
        """Return q and k, each of the last tokens of the call, as they were before."""
        if q.shape[2] == k.shape[2]:
            return self._undo(q, k)
        return self._undo(q, q[:, :0])[0], self._undo(k, k[:, :0])[0]  # beside no heads

    def _undo(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate back as many tokens of both."""
        first = self.cos.shape[1] - q.shape[2]
        cos, sin = (angle[:, first:].to(q.device) for angle in self._inverse(q))
        width = cos.shape[-1]
        turned = (x[..., :width].to(cos.dtype) for x in (q, k))
        back = (
            found.to(x.dtype)
            if x.shape[-1] == width
            else torch.cat([found.to(x), x[..., width:]], -1)
            for x, found in zip((q, k), self.apply(*turned, cos, sin), strict=True)
        )
        return tuple(back)  # pyright: ignore[reportReturnType]

    def _inverse(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the opposite angle, over the square of what scaled rotations add.

        All layers of a model get the same angles, so they are inverted once.
        """
        dtype = compute_dtype(like, self.cos)
        kept = not torch.compiler.is_compiling()
        known = getattr(self.cos, "_lln_inverse", None) if kept else None
        if known is None or known[0].dtype != dtype or known[2] is not self.sin:
            cos, sin = self.cos.to(dtype), self.sin.to(dtype)
            square = cos.square() + sin.square()
            known = cos / square, -sin / square, self.sin
            if kept:
                self.cos._lln_inverse = known  # pyright: ignore[reportAttributeAccessIssue]
        return known[0], known[1]

    def turned(self, key_mask: Bool[Tensor, "B N"]) -> Rotation:
        """Return the same for samples that :func:`~lln.hf.padding.from_first_token` turned."""
        index = from_the_first(key_mask)
        cos, sin = (
            take(angle.expand(len(index), -1, -1)[:, None], index.to(angle.device))[:, 0]
            for angle in (self.cos, self.sin)
        )
        return replace(self, cos=cos, sin=sin)

    def of_sequences(self, index: Int[Tensor, "S L"], rows: int) -> Rotation:
        """Return the same for sequences of a packed batch of so many rows."""
        cos, sin = (
            take_tokens(angle.expand(rows, -1, -1), index.to(angle.device))
            for angle in (self.cos, self.sin)
        )
        return replace(self, cos=cos, sin=sin)


def sees_before(core: object) -> bool:
    """Whether the feature maps of a core see queries and keys before their rotation."""
    return getattr(getattr(core, "features", None), "before_rotation", False)


def rotation_of(
    core: object, given: Rotation | None, key: Tensor, layer_name: str
) -> Rotation | None:
    """Return the rotation of a call, for a core whose feature maps need it; None for others."""
    if not sees_before(core):
        return None
    if given is None:
        raise ValueError(
            f"{layer_name} sees queries and keys before their rotation (before_rotation=True), but "
            "was called without position_embeddings; call the model around it"
        )
    if given.cos.shape[-2] != key.shape[2]:
        raise ValueError(
            f"{layer_name} got {key.shape[2]} keys, of which the call has rotated the last "
            f"{given.cos.shape[-2]}: with before_rotation=True the others cannot be rotated back. "
            "Let generate make its own cache, which keeps a state and no earlier keys; assisted "
            "decoding, and caches that keep all keys, need before_rotation=False"
        )
    return given


def let_see_before(
    new: nn.Module, attention: str, module: nn.Module, owner: nn.Module, layer_name: str
) -> None:
    """Let the feature maps of a new core see queries and keys before their rotation."""
    if not isinstance(new, LLNAttention):
        raise ValueError(
            f"before_rotation=True is for the feature maps of LLN, which {attention!r} does not "
            "have; choose 'lln_nearfar', or leave it out"
        )
    if new.features is None:
        raise ValueError(
            "before_rotation=True is for feature maps, and feature_map='identity' has none; give "
            "feature_map='learned', or leave it out"
        )
    if new.center is not None:
        raise ValueError(
            "before_rotation=True with center_keys=True: near keys are rotated and far ones are "
            "not, so that no mean can be taken from both; give center_keys=False"
        )
    check_rotation(module, owner, layer_name)
    new.features.before_rotation = True


def follow_rotation(model: nn.Module, paths: Iterable[str]) -> None:
    """Let those layers at these paths whose maps need it hand on their rotation; no others."""
    for part in model.modules():
        handle = part.__dict__.pop("_lln_rotation", None)
        if handle is not None:
            handle.remove()
    for path in paths:
        layer = model.get_submodule(path)
        if sees_before(layer._modules.get("lln")):
            names = tuple(inspect.signature(type(layer).forward).parameters)[1:]
            hook = functools.partial(hand_on, names, _function(layer))
            layer.__dict__["_lln_rotation"] = layer.register_forward_pre_hook(
                hook, with_kwargs=True
            )


def hand_on(
    names: tuple[str, ...], apply: Callable, layer: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Add the rotation of a call to the arguments that a layer hands to its attention function."""
    angles = {**dict(zip(names, args, strict=False)), **kwargs}.get("position_embeddings")
    if angles is None:
        return None
    cos, sin = angles
    return args, {**kwargs, HANDED_ON: Rotation(cos, sin, apply)}


def _function(layer: nn.Module) -> Any:
    """The function by which a layer rotates, from the file of its model; None if it has none."""
    forward = inspect.unwrap(type(layer).forward)
    called = APPLY in getattr(getattr(forward, "__code__", None), "co_names", ())
    return getattr(forward, "__globals__", {}).get(APPLY) if called else None


def check_rotation(layer: nn.Module, owner: nn.Module, layer_name: str) -> None:
    """Raise unless what a layer rotates can be rotated back, which is tried on its own weights.

    Args:
        owner: The model that makes the layer's positions.

    A model without values, as one that is being loaded, was tried when it was replaced.
    """
    start = f"before_rotation=True: {layer_name}, {type(layer).__name__},"
    if not is_rotary(layer):
        raise ValueError(
            f"{start} does not rotate queries and keys by their positions; leave before_rotation "
            "out"
        )
    parameters = inspect.signature(type(layer).forward).parameters
    hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if _function(layer) is None or "position_embeddings" not in parameters or not hands_on:
        raise ValueError(
            f"{start} does not rotate by {APPLY}(q, k, cos, sin) with the position_embeddings it "
            "is given, so that nobody can take it back; leave before_rotation out"
        )
    if any(parameter.is_meta for parameter in layer.parameters()):
        return
    try:
        found = _try(layer, owner)
    except Exception as error:  # of foreign code, whatever it may be
        raise ValueError(
            f"{start} cannot be tried alone ({type(error).__name__}: {error}), so that nobody "
            "knows whether its rotation can be taken back; leave before_rotation out"
        ) from error
    if found == "unrotated":
        raise ValueError(
            f"{start} leaves its queries and keys as they are, so that feature maps see them "
            "unrotated anyway; replace it in another call without before_rotation, see layers="
        )
    if found == "different":
        raise ValueError(
            f"{start} does more to its queries and keys than {APPLY} on their first coordinates, "
            "so that it cannot be taken back; leave before_rotation out"
        )


@torch.no_grad()
def _try(layer: Any, owner: nn.Module) -> str:
    """Compare queries and keys at some positions, rotated back, with those at none."""
    like = next(p for p in layer.parameters() if p.is_floating_point())
    seeded = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    x = torch.randn(1, 3, layer.config.hidden_size, **seeded).to(like)
    cos, sin = _angles(layer, owner, x, torch.tensor([[1, 5, 60]], device=like.device))
    rotation = Rotation(cos, sin, _function(layer))
    rotated = _queries_and_keys(layer, x, rotation)
    plain = _queries_and_keys(layer, x, replace(rotation, cos=cos * 0 + 1, sin=sin * 0))
    if all(torch.equal(a, b) for a, b in zip(rotated, plain, strict=True)):
        return "unrotated"
    # Some models rotate in float32, whatever their weights are.
    allowed = ROUNDINGS * max(torch.finfo(x).eps for x in (like.dtype, torch.float32))
    close = (
        bool((back - wanted).abs().max() <= allowed * wanted.abs().max())
        for back, wanted in zip(rotation(*rotated), plain, strict=True)
    )
    return "undone" if all(close) else "different"


def _angles(layer: Any, owner: nn.Module, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, as the model makes them for this layer."""
    rotary = next(part for part in owner.children() if "Rotary" in type(part).__name__)
    kinds = getattr(layer.config, "layer_types", None)
    if kinds is None or "layer_type" not in inspect.signature(rotary.forward).parameters:
        return rotary(x, positions)
    return rotary(x, positions, layer_type=kinds[layer.layer_idx])


class _Reached(Exception):
    """Carries what a layer hands to its attention function."""


def _stop(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **others: Any) -> None:
    raise _Reached(query, key, others.get(HANDED_ON))


def _queries_and_keys(layer: Any, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """What a layer would attend with."""
    AttentionInterface.register(PROBE, _stop)
    config, training = layer.config, [part for part in layer.modules() if part.training]
    before = config._attn_implementation_internal
    try:
        config._attn_implementation_internal = PROBE
        for part in training:
            part.training = False
        angles = {"position_embeddings": (rotation.cos, rotation.sin), HANDED_ON: rotation}
        layer.forward(hidden_states=x, attention_mask=None, **angles)
    except _Reached as reached:
        query, key, handed_on = reached.args
        if handed_on is None:
            raise TypeError(f"{HANDED_ON} is not handed on") from None
        return query, key
    finally:
        config._attn_implementation_internal = before
        for part in training:
            part.training = True
    raise TypeError("it does not attend by transformers' attention interface")
