"""Find attention inside a running model, whichever way it is written.

While :func:`attention_calls` is open, five places are watched, and nothing that is computed there
changes:
    F.scaled_dot_product_attention      called by any module
    F.multi_head_attention_forward      nn.MultiheadAttention, with and without weights
    the ops of this package             LLN and LLN+Diag, in modules, functions and models
    transformers' attention interface   eager, flash and flex attention of Hugging Face models
    the cores of the zoo                Performer and the others, whatever they are made of
Leaving the block restores all of them, after an exception too.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lln.instruments.recording.attention_call import AttentionCall
from lln.instruments.recording.collector import Collector
from lln.ops.dispatch import IMPLEMENTATIONS

LLN_OPS = ("bidirectional", "causal", "block_causal", "lln_diag", "near_far")
SOFTMAX_OPS = ("block_diagonal", "near")  # watched, as they are made of torch's attention
# Options of attention functions that change the weights in ways not read here.
CHANGE_THE_WEIGHTS = ("s_aux", "sinks", "position_bias", "cache")


@contextlib.contextmanager
def attention_calls(model: nn.Module, *, samples: int = 1) -> Iterator[list[AttentionCall]]:
    """Collect every call of attention that ``model`` makes inside the block, in order.

    Args:
        samples: Keep the queries and keys of the first so many samples of the batch.

    Example:
        >>> with attention_calls(model) as calls:
        ...     model(x)
        >>> calls[0].measured(["entropy"])                            # {"entropy": [samples, H]}
    """
    collector = Collector(model, samples)
    with contextlib.ExitStack() as undo:
        for handle in (
            register_module_forward_pre_hook(lambda module, _: collector.enter(module)),
            register_module_forward_hook(collector.leave, with_kwargs=True, always_call=True),
        ):
            undo.callback(_remove, handle)
        undo.enter_context(_watched_ops(collector))
        undo.enter_context(_watched_interface(collector))
        undo.enter_context(_TorchFunctions(collector))
        yield collector.calls


def _remove(handle: RemovableHandle) -> None:
    """Remove a hook of all modules, and the note that torch forgets to: compile warns of it."""
    handle.remove()
    modules._global_forward_hooks_with_kwargs.pop(handle.id, None)


class _TorchFunctions(TorchFunctionMode):
    """Sees torch's own attention functions, whoever calls them."""

    def __init__(self, collector: Collector) -> None:
        super().__init__()
        self.collector = collector

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.collector.inside:
            return out
        if func is F.scaled_dot_product_attention:
            _record_sdpa(self.collector, *args, **kwargs)
        elif func is F.multi_head_attention_forward:
            bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
            bound.apply_defaults()
            _record_multihead(self.collector, **bound.arguments)
        return out


@torch.no_grad()
def _record_sdpa(
    collector: Collector,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    collector.softmax(query, key, attn_mask, is_causal=is_causal, scale=scale)


@torch.no_grad()
def _record_multihead(
    collector: Collector,
    query: Tensor,
    key: Tensor,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    add_zero_attn: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    use_separate_proj_weight: bool,
    q_proj_weight: Tensor | None,
    k_proj_weight: Tensor | None,
    static_k: Tensor | None,
    is_causal: bool,
    **_: Any,
) -> None:
    """Queries and keys of torch's layer, projected again for the samples that are kept."""
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        q_proj_weight, k_proj_weight = in_proj_weight.chunk(3)[:2]
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    batched = query.dim() == 3
    n = collector.samples

    def heads(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        x = F.linear(x[:, :n] if batched else x[:, None], weight, bias)  # [tokens, S, H·D]
        return x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)

    q = heads(query, q_proj_weight, biases[0])
    k = heads(key, k_proj_weight, biases[1])
    samples = q.shape[0]
    if static_k is not None:
        k = static_k.unflatten(0, (-1, num_heads))[:n]
    masks = []
    if attn_mask is not None:
        mask = attn_mask.unflatten(0, (-1, num_heads))[:n] if attn_mask.dim() == 3 else attn_mask
        masks.append(mask)
    if key_padding_mask is not None:
        padding = key_padding_mask[:n] if batched else key_padding_mask[None]
        masks.append(padding[:, None, None])
    extra = (bias_k is not None) + add_zero_attn
    if bias_k is not None:
        row = bias_k.expand(1, samples, -1).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        k = torch.cat([k, row], dim=2)
    if add_zero_attn:
        k = torch.cat([k, torch.zeros_like(k[:, :, :1])], dim=2)
    mask = _added(masks, q, extra)
    collector.softmax(q, k, mask, is_causal=is_causal and attn_mask is None, scale=None)


def _added(masks: list[Tensor], like: Tensor, extra: int) -> Tensor | None:
    """torch's masks (True or −inf = hidden) as one additive mask; extra keys are seen by all."""
    total: Tensor | None = None
    for mask in masks:
        if mask.dtype == torch.bool:
            mask = like.new_zeros(mask.shape, dtype=torch.float32).masked_fill(mask, -torch.inf)
        total = mask.float() if total is None else total + mask.float()
    return total if total is None else F.pad(total, (0, extra))


@contextlib.contextmanager
def _watched_ops(collector: Collector) -> Iterator[None]:
    """Record the ops of every implementation that dispatch looks up inside the block."""
    kept = dict(IMPLEMENTATIONS)
    for name, module in kept.items():
        IMPLEMENTATIONS[name] = _WatchedOps(module, collector)
    try:
        yield
    finally:
        IMPLEMENTATIONS.update(kept)


class _WatchedOps(ModuleType):
    """An implementation whose attention ops are recorded when they have run."""

    def __init__(self, module: ModuleType, collector: Collector) -> None:
        super().__init__(module.__name__)
        self._module, self._collector = module, collector

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._module, name)
        if name not in (*LLN_OPS, *SOFTMAX_OPS):
            return op

        def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            if not self._collector.active:
                return op(q, k, v, **options)
            self._collector.inside = True
            try:
                out = op(q, k, v, **options)
            finally:
                self._collector.inside = False
            if name in LLN_OPS:
                self._collector.lln(name, q, k, v, options)
            return out

        return recorded


@contextlib.contextmanager
def _watched_interface(collector: Collector) -> Iterator[None]:
    """Wrap the attention functions that transformers hands out, if it is loaded at all."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    interface = modeling.AttentionInterface
    kept = {name: interface.__dict__.get(name) for name in ("get_interface", "__getitem__")}
    find, lookup = interface.get_interface, interface.__getitem__

    def get_interface(self, attn_implementation: str, default: Callable) -> Callable:
        found = find(self, attn_implementation, default)
        return _watched_function(found, attn_implementation or "eager", collector)

    def getitem(self, key: str) -> Callable:
        return _watched_function(lookup(self, key), key, collector)

    interface.get_interface, interface.__getitem__ = get_interface, getitem
    try:
        yield
    finally:
        for name, function in kept.items():
            if function is None:
                delattr(interface, name)
            else:
                setattr(interface, name, function)


def _watched_function(function: Callable, name: str, collector: Collector) -> Callable:
    """Record a call unless something inside it, SDPA or an op of this package, was recorded."""

    def recorded(module, query, key, value, attention_mask=None, *args, **options):
        before = len(collector.calls)
        out = function(module, query, key, value, attention_mask, *args, **options)
        if collector.active and len(collector.calls) == before:
            _record_interface(collector, name, module, query, key, attention_mask, options)
        return out

    return recorded


@torch.no_grad()
def _record_interface(
    collector: Collector,
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: object,
    options: dict[str, Any],
) -> None:
    """Record softmax of transformers: eager hides by its mask, flash by padding [B, M] and a flag.

    A mask [B, 0] is that of :mod:`lln.hf` where nothing is padded; one [B, 1, N] has the numbers of
    packed sequences, int32 where they are causal.
    """
    eager, flash = name.endswith("eager"), "flash" in name
    if isinstance(mask, Tensor) and mask.dim() == 2:
        mask = (mask != 0)[:, None, None] if mask.shape[1] else None
    elif isinstance(mask, Tensor) and mask.dim() == 3 and not mask.is_floating_point():
        same = mask[:, :, :, None] == mask[:, :, None]
        mask = same.tril() if mask.dtype == torch.int32 else same
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    window = options.get("sliding_window")
    collector.softmax(
        query,
        key,
        mask,
        is_causal=bool(causal) and flash and query.shape[2] > 1,
        scale=options.get("scaling"),
        kernel="softmax" if eager or flash or name == "flex_attention" else name,
        softcap=options.get("softcap"),
        unreadable=any(options.get(option) is not None for option in CHANGE_THE_WEIGHTS)
        or (flash and window is not None and window < key.shape[2]),
    )
