"""The attention of a module on DTensors: by :func:`lln.attention`, with what the module stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lln import functional
from lln.nn.statistics import (
    CROSS_NEEDS_STORED_STATISTICS,
    RunningStatistics,
    SampleStatistics,
)
from lln.ops.common.arguments import hide
from lln.ops.taps.convolution import convolve_tokens

if TYPE_CHECKING:
    from lln.nn.attention import LLNAttention


def attend(
    module: LLNAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    is_cross: bool,
    dropout: float,
) -> Tensor:
    """Attend with q, k and v that are split alike over batch, heads or tokens.

    Parameters are whole on every process, and so are their gradients.
    """
    _check_possible(module, dropout)
    if is_cross and module.statistics.per_sample:
        raise ValueError(CROSS_NEEDS_STORED_STATISTICS)
    matching, near = module.statistics.matching, module.near
    options: dict[str, Any] = {
        "key_mask": key_mask,
        "query_mask": query_mask,
        "is_causal": is_causal,
        "normalize_keys": matching.normalize_keys,
        "method": matching.method,
        "impl": module.impl,
    }
    if isinstance(module.statistics, RunningStatistics) and module.training:
        ordered = is_causal or is_cross
        options["alpha"], options["beta"] = _running(module, q, k, key_mask, query_mask, ordered)
    elif not isinstance(module.statistics, SampleStatistics):
        options["alpha"], options["beta"] = module.scales()
    if module.features is not None:
        options["features"] = _features(module, q, k)
    if near is not None:
        options["near"] = near
        if module.level is not None and module.level.stored is not None:
            options["gamma"] = module.stored_level()
        elif (weight := module.mix_weight()) is not None:
            options["mix"] = weight
    out = functional.attention(q, k, v, **options)
    return out if module.conv_weight is None else out + _convolution(module, q, k, v, **options)


def _running(
    module: LLNAttention, q: Tensor, k: Tensor, key_mask, query_mask, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Measure the whole batch, and let the averages of every process move alike."""
    from lln.distributed.scales import whole_variances

    assert isinstance(module.statistics, RunningStatistics)
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    batch = whole_variances(q, k, **masks, impl=module.statistics.matching.impl)
    return module._learned(*module.statistics.follow(batch, is_causal))


def _features(module: LLNAttention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """What LLN sees of queries and keys: each process maps those of its own heads."""
    from lln.distributed.layout import HEADS, QKV, WIDTH, Layout

    features, layout = module.features, Layout.of(q, k, k)
    assert features is not None

    def part(weight: Tensor | None) -> Tensor | None:
        """Of maps ``[H, D, S]`` and biases ``[H, S]``; one map for all heads is whole."""
        if weight is None or "map" in features._buffers:
            return weight
        return layout.local(weight, (HEADS, WIDTH, WIDTH)[: weight.dim()])

    found = []
    maps = features._maps() or (None, None)
    biases = features.bias, features.k_bias
    for x, weight, bias in zip((q, k), maps, biases, strict=True):
        own = features._of(layout.local(x, QKV), part(weight), part(bias))
        found.append(layout.whole(own, (*x.shape[:3], module.slots)))
    return found[0], found[1]


def _convolution(
    module: LLNAttention, q: Tensor, k: Tensor, v: Tensor, *, key_mask, is_causal, **_: Any
) -> Tensor:
    """Return what ``conv`` adds."""
    from lln.distributed.layout import HEADS, MASK, QKV, WIDTH, Layout

    assert module.conv_weight is not None
    layout = Layout.of(q, k, v)
    if layout.over_tokens is not None:
        raise ValueError(
            f"conv={module.conv} looks at neighbours of a token, which may be on another process; "
            "split batch or heads, or leave conv out"
        )
    if q.shape[2] != v.shape[2]:
        raise ValueError(f"conv={module.conv} is for self-attention; leave conv out")
    mask = None if key_mask is None else layout.local(key_mask, MASK)
    weight = layout.local(module.conv_weight, (HEADS, WIDTH))
    seen = hide(layout.local(v, QKV), mask)
    near = module.for_queries(convolve_tokens(seen, weight, causal=is_causal, impl=module.impl))
    return layout.whole(near, (*q.shape[:3], v.shape[3]))


def _check_possible(module: LLNAttention, dropout: float) -> None:
    """Refuse what would need numbers of other processes."""
    measured = isinstance(module.statistics, SampleStatistics)
    running = isinstance(module.statistics, RunningStatistics) and module.training
    matching = module.statistics.matching
    offset = 0 if module.level is None else module.level.offset
    refused = {
        "dropout": module.training and dropout > 0,
        "near with joint=True and statistics='running' while training": running
        and module.level is not None,
        "feature_map with statistics='sample'": measured and module.features is not None,
        "before_rotation": getattr(module.features, "before_rotation", False),
        "center_keys": module.center is not None,
        "sharpness with statistics='sample'": measured and matching.sharpness != 1,
        "learn_scale with statistics='sample'": measured and module.learn_scale,
        "an offset of gamma with statistics='sample'": measured and offset != 0,
    }
    for name, wrong in refused.items():
        if wrong:
            raise ValueError(
                f"{name} is refused for DTensors; leave it out, or pass .to_local() of q, k and v "
                "to a module of this process's heads"
            )
