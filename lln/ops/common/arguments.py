"""Argument checks shared by the public functions: what is wrong, its value, and what to do.

Shapes, dtypes and devices are always checked. Values are checked for Python numbers and CPU
tensors only: looking at a value on another device would wait for that device.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.protocols import FLOATING, compute_dtype

P = ParamSpec("P")
R = TypeVar("R")

_REMEDIES = {
    "attn_mask": "linear attention never forms the scores it would act on. Possible are key_mask "
    "(ignore keys), is_causal=True, near=64 (softmax among neighbours) and attention_varlen "
    "(packed sequences)",
    "dropout_p": "a function has no training mode to drop in; lln.nn.LLNAttention(..., dropout=) "
    "drops attention weights while training",
    "enable_gqa": "leave it out: k and v may always have fewer heads than q",
}


def explain_sdpa_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Tell who comes from scaled_dot_product_attention what to write instead."""

    @functools.wraps(function)
    def explained(*args: P.args, **options: P.kwargs) -> R:
        for name, remedy in _REMEDIES.items():
            if name in options:
                raise TypeError(f"{name} is refused: {remedy}")
        return function(*args, **options)

    return explained


def check_pair(alpha: object, beta: object, is_causal: bool) -> None:
    """Check that both scales are given or neither, and both if causal."""
    if (alpha is None) != (beta is None):
        given, missing = ("beta", "alpha") if alpha is None else ("alpha", "beta")
        raise ValueError(
            f"{given} was given without {missing}; pass both, e.g. from lln.match_moments, "
            "or neither to have them measured"
        )
    if is_causal and alpha is None:
        raise ValueError(
            "is_causal=True needs alpha and beta: measured from the whole sequence they would let "
            "the future leak into the past. Pass constants, e.g. alpha, beta = "
            "lln.match_moments(sigma_q, sigma_k, head_dim) from calibration data, or use "
            "lln.nn.LLNAttention(..., causal=True, statistics='running')"
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q ``[B,H,N,D]``, k ``[B,Hkv,M,D]``, v ``[B,Hkv,M,E]``: dtype, device, H % Hkv = 0."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; pass [batch, heads, tokens, width] "
                "(use .unflatten and .transpose(1, 2) on a projection)"
            )
    check_alike("q", q, "k", k)
    check_alike("q", q, "v", v)
    check_key_value(k, v)
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q has batch size {q.shape[0]}, k and v have {k.shape[0]}; they must be equal"
        )
    check_heads(q, k.shape[1], k.shape[3])


def check_key_value(k: Tensor, v: Tensor) -> None:
    """Check that there is one value per key: ``[B, Hkv, M]`` agree."""
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k has shape {list(k.shape)} but v has {list(v.shape)}; batch, heads and tokens "
            "must be equal, one value per key"
        )
    if k.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"k has width {k.shape[3]} and v {v.shape[3]}; both must be positive")


def check_heads(q: Tensor, key_heads: int, width: int) -> None:
    """Check that the heads of q are a multiple of the key heads, and the widths equal."""
    if key_heads == 0 or q.shape[1] % key_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads, which is not a multiple of the {key_heads} key heads; "
            "query head h reads key head h // (H / Hkv)"
        )
    if q.shape[3] != width:
        raise ValueError(f"q has width {q.shape[3]} but the keys have {width}; they must be equal")


def read_features(
    q: Tensor, k: Tensor, features: tuple[Tensor, Tensor] | None, alpha: object
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Features of q and of k, of one width, for their tokens and heads, with scales; or neither."""
    if features is None:
        return None, None
    if not isinstance(features, (tuple, list)) or len(features) != 2:
        raise TypeError(
            f"features is a {type(features).__name__}; pass a pair, those of q and those of k"
        )
    q_features, k_features = autocast(*features)
    for name, x, like in (("features[0]", q_features, q), ("features[1]", k_features, k)):
        check_floating(name, x)
        check_alike(name, x, "q", q)
        if x.dim() != 4 or x.shape[:3] != like.shape[:3]:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; pass [batch, heads, tokens, slots] = "
                f"{[*like.shape[:3]]} and any number of slots"
            )
    if q_features.shape[-1] != k_features.shape[-1]:
        raise ValueError(
            f"features of q have {q_features.shape[-1]} slots, of k {k_features.shape[-1]}; "
            "they must be equal"
        )
    if alpha is None:
        raise ValueError(
            "features need alpha and beta: what is matched from q and k does not hold for features "
            "of your own; pass numbers, e.g. 1.0 if they are scaled already, or those of "
            "lln.moments.match_features"
        )
    return q_features, k_features


def check_features_alone(q_features: Tensor, k_features: Tensor) -> None:
    """Log-features ``[B, H, N, S]`` and ``[B, Hkv, M, S]`` of one kind."""
    for name, x in (("q_features", q_features), ("k_features", k_features)):
        check_floating(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; pass [batch, heads, tokens, slots]"
            )
    check_alike("q_features", q_features, "k_features", k_features)
    check_heads(q_features, k_features.shape[1], k_features.shape[3])


def check_floating(name: str, x: object) -> None:
    """Check that x is a floating-point tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; pass a torch.Tensor")
    if is_dtensor(x):
        raise TypeError(
            f"{name} is a DTensor, for which these operators have no rule; pass {name}.to_local() "
            "if batch or heads are sharded, and use lln.distributed.attention on the local slices "
            "if tokens are"
        )
    if x.dtype not in FLOATING:
        raise TypeError(
            f"{name} has dtype {x.dtype}; pass float16, bfloat16, float32 or float64, "
            f"e.g. {name}.float()"
        )


def is_dtensor(x: object) -> bool:
    """Whether x is spread over a mesh; by name, since its module loads all of torch.distributed."""
    return type(x).__name__ == "DTensor"


def check_alike(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two tensors have the same dtype and device."""
    if x.dtype != other.dtype:
        raise TypeError(
            f"{name} is {x.dtype} but {other_name} is {other.dtype}; "
            f"convert one of them, e.g. {other_name}.to({x.dtype})"
        )
    if x.device != other.device:
        raise ValueError(
            f"{name} is on {x.device} but {other_name} on {other.device}; "
            f"move one of them, e.g. {other_name}.to({str(x.device)!r})"
        )


def check_mask(name: str, mask: Tensor | None, batch: int, tokens: int, like: Tensor) -> None:
    """Check a bool ``[B, tokens]`` mask on the device of ``like``; True = may be attended."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is a {type(mask).__name__}; pass a bool tensor [batch, tokens]")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{name} has dtype {mask.dtype}; pass bool with True = may be attended: "
            f"{name} != 0 for a 0/1 mask, {name} == 0 for an additive one"
        )
    if mask.shape != (batch, tokens):
        hint = ""
        if mask.dim() >= 3 or (mask.dim() == 2 and mask.shape[0] == mask.shape[1] == tokens):
            hint = (
                "; a mask per query-key pair cannot be applied in linear time: "
                "use is_causal=True for a triangle, near for blocks, "
                "attention_varlen for packed sequences"
            )
        raise ValueError(
            f"{name} has shape {list(mask.shape)}; pass [batch, tokens] = [{batch}, {tokens}]{hint}"
        )
    if mask.device != like.device:
        raise ValueError(
            f"{name} is on {mask.device} but the tensors on {like.device}; "
            f"pass {name}.to({str(like.device)!r})"
        )


def may_look_at(x: Tensor) -> bool:
    """Whether values may be checked: not where that waits for a device, nor of traced tensors."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not transforms_active()


def transforms_active() -> bool:
    """Whether a function of torch.func is at work; not where the compiler traces it."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def constant_under_compile(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.assume_constant_result`` without importing the compiler, which takes 2 s."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def as_scale(name: str, value: float | Tensor, batch: int, heads: int, like: Tensor) -> Tensor:
    """``alpha`` or ``beta`` as a tensor ``[B, heads]`` of the compute dtype; gradients flow."""
    dtype = compute_dtype(like)
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(
                f"{name} is a {type(value).__name__}; pass a number, or a tensor [{heads}] or "
                f"[{batch}, {heads}]"
            )
        _check_scale_values(name, float(value), math.isfinite(value) and value >= 0)
        return _constant(float(value), dtype, like.device).expand(batch, heads)
    check_floating(name, value)
    if value.device != like.device and value.dim() > 0:
        raise ValueError(
            f"{name} is on {value.device} but the tensors on {like.device}; "
            f"pass {name}.to({str(like.device)!r})"
        )
    if value.shape != ((), (heads,), (batch, heads))[min(value.dim(), 2)]:
        raise ValueError(
            f"{name} has shape {list(value.shape)}; pass a number, [heads] = [{heads}] or "
            f"[batch, heads] = [{batch}, {heads}]"
        )
    if may_look_at(value):
        values = value.detach()
        good = bool((values.isfinite() & (values >= 0)).all())
        _check_scale_values(name, values.tolist(), good)
    return value.to(device=like.device, dtype=dtype).expand(batch, heads)


def as_level(name: str, value: float | Tensor, batch: int, heads: int, like: Tensor) -> Tensor:
    """``gamma`` as a tensor ``[B, heads]`` of the compute dtype, of any sign; gradients flow."""
    dtype = compute_dtype(like)
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(
                f"{name} is a {type(value).__name__}; pass a number, or a tensor [{heads}] or "
                f"[{batch}, {heads}]"
            )
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be finite; leave it out to have it measured")
        return _constant(float(value), dtype, like.device).expand(batch, heads)
    check_floating(name, value)
    if value.shape != ((), (heads,), (batch, heads))[min(value.dim(), 2)]:
        raise ValueError(
            f"{name} has shape {list(value.shape)}; pass a number, [heads] = [{heads}] or "
            f"[batch, heads] = [{batch}, {heads}]"
        )
    if may_look_at(value) and not bool(value.detach().isfinite().all()):
        raise ValueError(
            f"{name}={value.tolist()} must be finite; leave it out to have it measured"
        )
    return value.to(device=like.device, dtype=dtype).expand(batch, heads)


def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[[value]]``, kept between calls: on a GPU making it costs as much as a small kernel.

    Not kept while a compiler traces or a CUDA graph records, whose memory is their own.
    """
    recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or recording:
        return torch.full((1, 1), value, dtype=dtype, device=device)
    return _kept_constant(value, dtype, device)


@functools.lru_cache(maxsize=256)
def _kept_constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1, 1), value, dtype=dtype, device=device)


def _check_scale_values(name: str, value: object, good: bool) -> None:
    if not good:
        raise ValueError(
            f"{name}={value} must be finite and not negative; "
            "take it from lln.match_moments, or about 2 for unit-variance inputs"
        )


def check_positive_int(name: str, value: object) -> None:
    """Check that a value is an int above zero."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}; pass an int")
    if value <= 0:
        raise ValueError(f"{name}={value} must be positive, e.g. 64")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as scaled_dot_product_attention does under autocast: everything but float64."""
    first = tensors[0]
    if not isinstance(first, Tensor) or first.is_meta:
        return tensors
    device = first.device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple([_cast(x, dtype) for x in tensors])


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype == dtype:
        return x
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """A context without autocast on the device of ``x``; "meta" has no autocast at all."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def exported_for_any(size: int | torch.SymInt) -> bool:
    """Whether torch.export is recording for every value of a size: what is computed may not differ.

    Sizes are numbers otherwise, in torch.compile too, which checks them and compiles again.
    """
    exporting = getattr(torch.compiler, "is_exporting", None)  # not in torch 2.6
    return exporting is not None and exporting() and isinstance(size, torch.SymInt)


def hide(x: Float[Tensor, "... N D"], mask: Bool[Tensor, "B N"] | None) -> Tensor:
    """Set ``[B,N,D]`` or ``[B,H,N,D]`` to 0 where ``mask`` is False, whatever stood there.

    NaN is hidden too. Gradients of what was hidden are zero.
    """
    if mask is None:
        return x
    return x.masked_fill(~(mask[..., None] if x.dim() == 3 else mask[:, None, :, None]), 0)
