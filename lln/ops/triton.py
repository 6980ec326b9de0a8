"""Triton kernels; importing this package does not import triton, calling an op does.

Same op names as :mod:`lln.ops`, plus ``standard_deviations``, ``match``, ``measure``,
``convolution`` and ``next_token``. Each but the last, which writes in place, is registered with
``torch.library``: torch.compile keeps it whole, CUDA graphs capture it, and the same input gives
bit-identical outputs and gradients on every run.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from lln.ops.common.kernels.tiles import (
    MOST_SHARED,
    block_fits,
    causal_fits,
    near_fits,
    shared,
    state_elements,
    state_fits,
    step_fits,
)
from lln.protocols import HALF, Call

_MODULES = {
    "bidirectional": "linear.kernels.bidirectional",
    "summarize": "linear.kernels.state",
    "read": "linear.kernels.state",
    "varlen": "linear.kernels.varlen",
    "decode": "linear.kernels.decode",
    "causal": "causal.kernels.causal",
    "block_causal": "window.kernels.joint.near_far",
    "block_diagonal": "window.kernels.blocks.block_diagonal",
    "lln_diag": "window.kernels.blocks.lln_diag",
    "near": "window.kernels.joint.near_far",
    "near_and_log": "window.kernels.joint.near_far",
    "near_far": "window.kernels.joint.near_far",
    "next_token": "window.kernels.joint.next_token",
    "convolution": "taps.kernels.convolution",
    "standard_deviations": "moments.kernels.statistics",
    "match": "moments.kernels.matching",
    "measure": "moments.kernels.matching",
}
INSTALLED = importlib.util.find_spec("triton") is not None  # a constant, for torch.compile
WIDTHS = (16, 32, 48, 64, 80, 96, 128, 256)
MOST_SINKS = 64  # columns of a tile
LEAST_SEGMENT = 16  # keys between the edges of two windows: the rows of a tensor core


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        ops = ", ".join(_MODULES)
        raise AttributeError(f"module {__name__!r} has no op {name!r}; it has {ops}")
    value = getattr(importlib.import_module(f"lln.ops.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def refuses_device(x: torch.Tensor) -> str | None:
    """Why no kernel can be launched on the device of a tensor, or None."""
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {x.device.type}; move them to a CUDA device"
    if not INSTALLED:
        return "triton is not installed; pip install 'lln-attention[triton]'"
    return None


def refuses(call: Call) -> str | None:
    """Why these tensors cannot be taken, or None."""
    q, v = call.q, call.v
    if call.op not in _MODULES:
        return f"there is no kernel for {call.op}"
    if (reason := refuses_device(q)) is not None:
        return reason
    if q.dtype not in (*HALF, torch.float32):
        return f"q is {q.dtype}; the kernels take float16, bfloat16 and float32"
    if call.op != "read" and not q.dtype == call.k.dtype == v.dtype:
        return f"q, k, v are {q.dtype}, {call.k.dtype}, {v.dtype}; they must be of one dtype"
    if q.shape[-1] not in WIDTHS or v.shape[-1] not in WIDTHS:
        return f"widths D={q.shape[-1]}, E={v.shape[-1]}; the kernels take {WIDTHS}"
    if "dropout" in call.needs:
        return "dropout of attention weights is not fused"
    if call.op == "lln_diag" and (call.sinks or "features" in call.needs):
        return "sinks and features of their own are not fused with LLN"
    if call.op == "lln_diag" and call.causal_block is not None:
        return "causal blocks are not fused with the diagonal branch"
    if call.op == "varlen":
        return _refuses_packed(call)
    if call.op == "block_causal":
        return _refuses_causal_blocks(call) or _refuses_states(call)
    if call.op in ("near", "near_far"):
        return _refuses_near(call) or (_refuses_far(call) if call.op == "near_far" else None)
    return _refuses_causal(call) or _refuses_blocks(call)


def refuses_next_token(
    q: torch.Tensor, v: torch.Tensor, k_far: torch.Tensor, memory: Mapping[str, torch.Tensor]
) -> str | None:
    """Why the kernels of a step of decoding cannot take these tensors, or None."""
    if (reason := refuses_device(q)) is not None:
        return reason
    if memory["mean"].dtype != torch.float32 or q.dtype not in (*HALF, torch.float32):
        return f"q is {q.dtype}, the state {memory['mean'].dtype}; states must be float32"
    d, e, slots = q.shape[-1], v.shape[-1], k_far.shape[-1]
    if not step_fits(d, slots, e):
        return f"D={d}, E={e} and {slots} slots are more than a program of a step holds"
    if not all(x.is_contiguous() for x in memory.values()):
        return "the memory of the seats is not contiguous"
    return None


def _refuses_near(call: Call) -> str | None:
    """Why the kernels of windows and sinks cannot take a call that passes otherwise, or None."""
    q, k, v = call.q, call.k, call.v
    if call.sinks > MOST_SINKS:
        return f"sinks={call.sinks}; the kernels of windows take up to {MOST_SINKS}"
    if q.shape[2] != k.shape[2]:
        return f"{q.shape[2]} queries of {k.shape[2]} keys; the kernels of windows want as many"
    if not near_fits(q.shape[-1], v.shape[-1]):
        return f"widths D={q.shape[-1]}, E={v.shape[-1]}; the kernels of windows take up to 128"
    return None


def _refuses_causal_blocks(call: Call) -> str | None:
    q, k = call.q, call.k
    if q.shape[2] != k.shape[2]:
        return f"{q.shape[2]} queries of {k.shape[2]} keys; the kernels of blocks take equally many"
    if (call.causal_block or 0) < LEAST_SEGMENT:
        return f"causal_block={call.causal_block}; the kernels take {LEAST_SEGMENT} and more"
    return None


def _refuses_far(call: Call) -> str | None:
    segment = math.gcd(call.block or 0, call.overlap)
    if segment < LEAST_SEGMENT:
        return (
            f"blocks of {call.block} that overlap by {call.overlap}: the kernels of far keys want "
            f"a common divisor of at least {LEAST_SEGMENT}"
        )
    return _refuses_states(call)


def _refuses_states(call: Call) -> str | None:
    slots, values = call.slots or call.q.shape[-1], call.v.shape[-1]
    if slots not in WIDTHS or not state_fits(slots, values, call.q.dtype, call.q.device):
        return (
            f"{slots} slots by {values} values; the kernels of far keys take {WIDTHS} slots, and "
            f"{state_elements(call.q.dtype)} numbers in all{_with_less(call.q.device)}"
        )
    return None


def _with_less(device: torch.device) -> str:
    """Why a device may refuse what those messages allow."""
    kib = shared(device)
    return "" if kib == MOST_SHARED else f"; less on this device, of {kib} KiB a program"


def _refuses_packed(call: Call) -> str | None:
    if call.is_causal:
        return "the kernels for packed sequences are not causal"
    if call.block is not None:
        return "the kernels for packed sequences have no diagonal branch"
    return None


def _refuses_causal(call: Call) -> str | None:
    d, e = call.q.shape[-1], call.v.shape[-1]
    asked = call.op == "causal" or (call.op == "lln_diag" and call.is_causal)
    if not asked or causal_fits(d, e, call.q.dtype, call.q.device):
        return None
    return (
        f"widths D={d}, E={e} in {call.q.dtype} need more shared memory than "
        "there is; the causal kernels take up to 128, in float32 up to 128 by 64"
        f"{_with_less(call.q.device)}"
    )


def _refuses_blocks(call: Call) -> str | None:
    if call.block is None:
        return None
    q, k, d, e = call.q, call.k, call.q.shape[-1], call.v.shape[-1]
    if q.shape[2] != k.shape[2]:
        return f"{q.shape[2]} queries of {k.shape[2]} keys; the kernels of blocks take equally many"
    if call.overlap and (call.is_causal or q.dtype not in HALF):
        return f"overlap={call.overlap}: fused with LLN in half precision only, and not if causal"
    if block_fits(d, e, q.dtype, call.block, q.device):
        return None
    return (
        f"blocks of {call.block} with widths D={d}, E={e} in {q.dtype} need more shared memory "
        "than there is; the kernels take widths up to 128, or blocks up to 32 in float32 with "
        f"widths up to 64{_with_less(q.device)}"
    )
