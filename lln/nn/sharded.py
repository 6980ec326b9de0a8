"""The attention of a module on DTensors: by :func:`lln.attention`, with what the module stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lln import functional
from lln.nn.statistics import SampleStatistics
from lln.ops.arguments import hide
from lln.ops.convolution import convolve_tokens

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
    dropout: float,
) -> Tensor:
    """Attend with q, k and v that are split alike over batch, heads or tokens.

    Parameters are whole on every process, and so are their gradients.
    """
    _check_possible(module, dropout)
    matching, local = module.statistics.matching, module.local
    options: dict[str, Any] = {
        "key_mask": key_mask,
        "query_mask": query_mask,
        "is_causal": is_causal,
        "normalize_keys": matching.normalize_keys,
        "method": matching.method,
        "impl": module.impl,
    }
    if not isinstance(module.statistics, SampleStatistics):
        options["alpha"], options["beta"] = module.scales()
    if local is not None:
        window = {"diag_overlap": local.overlap, "sinks": local.sinks, "scale": local.scale}
        options |= {"diag_block": local.block, **window}
        if local.joint:
            options |= {"mix": "joint", "far": local.far}
            if module.level is not None and module.level.stored is not None:
                options["gamma"] = module.stored_level()
        elif module.mix_logit is not None:
            options["mix"] = module.mix_logit.sigmoid()
    out = functional.attention(q, k, v, **options)
    return out if module.conv_weight is None else out + _convolution(module, q, k, v, **options)


def _convolution(
    module: LLNAttention, q: Tensor, k: Tensor, v: Tensor, *, key_mask, is_causal, **_: Any
) -> Tensor:
    """Return what ``conv`` adds."""
    from lln.distributed.sharded import HEADS, MASK, QKV, WIDTH, Layout

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
    matching = module.statistics.matching
    offset = 0 if module.level is None else module.level.offset
    refused = {
        "dropout": module.training and dropout > 0,
        "diag_dropout": module.training and module.diag_dropout > 0,
        "statistics='running' while training": not measured and module.statistics.measures,
        "feature_map": module.features is not None,
        "center_keys": module.center is not None,
        "target='measured' with statistics='sample'": measured and matching.target != "product",
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
