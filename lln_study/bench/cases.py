"""What is measured: an op, an implementation and a shape.

``op`` is a key of ``OPTIONS``: the word used in ``lln/ops`` and what is special, as the block in
``lln_diag_128``; or ``"recommended"``, the module with those options, its learned parameters among
the inputs. ``impl`` is ``"eager"``, ``"triton"`` or ``"mixed"`` for ours, ``"sdpa"`` for
``torch.nn.functional.scaled_dot_product_attention`` (``"cudnn"`` and ``"flash"`` with the backend
fixed), ``"matrix"`` for softmax attention that builds its N×N matrix, ``"torch"`` for torch's
depth-wise convolution, and ``"fla"`` for the library of :mod:`lln_study.bench.peers`. Timing works
on the closure that :func:`call` returns and knows nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lln import functional, moments
from lln.nn import RECOMMENDED, LLNAttention
from lln.ops import reference
from lln.ops.taps.convolution import convolve_by_blocks
from lln.ops.window.near import Near
from lln_study.bench import peers

ALPHA = BETA = 2.0  # constants: measuring them is the business of the "measured" op
GAMMA = 0.0
DIAG_BLOCK, WIDE_BLOCK, WIDEST_BLOCK = 64, 128, 256
_OVERLAP = Near(WIDE_BLOCK, overlap=WIDE_BLOCK // 2)
_JOINT = {"near": Near(WIDE_BLOCK, joint=True), "gamma": GAMMA}
_JOINT_OVERLAP = {"near": replace(_OVERLAP, joint=True), "gamma": GAMMA}
# Of lln.attention, by op.
OPTIONS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "lln_diag": {"near": DIAG_BLOCK},
    "lln_diag_128": {"near": WIDE_BLOCK},
    "lln_diag_256": {"near": WIDEST_BLOCK},
    "lln_diag_overlap": {"near": _OVERLAP},
    "lln_diag_causal": {"near": DIAG_BLOCK, "is_causal": True},
    "near_far": _JOINT,
    "near_far_overlap": _JOINT_OVERLAP,
    "near_far_causal": {**_JOINT_OVERLAP, "is_causal": True},
    "near_far_slots": _JOINT,
}
SLOTS = 2  # times D, of the features of far keys in "near_far_slots"
TAPS = RECOMMENDED["conv"]  # of the convolution over tokens
FORWARD, TRAINING = "fwd", "fwd+bwd"


@dataclass(frozen=True)
class Case:
    """What one row measures. ``passes`` is ``"fwd"`` (no gradients recorded) or ``"fwd+bwd"``."""

    op: str
    impl: str
    N: int
    passes: str = FORWARD
    B: int = 1
    H: int = 12
    D: int = 64
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.op} {self.impl} {self.passes} N={self.N}"

    def row(self) -> dict[str, object]:
        return {
            "op": self.op,
            "impl": self.impl,
            "pass": self.passes,
            "B": self.B,
            "H": self.H,
            "N": self.N,
            "D": self.D,
            "dtype": self.dtype,
        }


def _ours(op: str, impl: str) -> Callable[..., Tensor]:
    options = {"alpha": ALPHA, "beta": BETA, "impl": impl, **OPTIONS[op]}

    def run(q: Tensor, k: Tensor, v: Tensor, *features: Tensor) -> Tensor:
        own = (features[0], features[1]) if features else None
        return functional.attention(q, k, v, features=own, **options)

    return run


def _measured(impl: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.attention(q, k, v, impl=impl)

    return run


@lru_cache
def _core(heads: int, head_dim: int, impl: str) -> LLNAttention:
    return LLNAttention(heads, head_dim, impl=impl, **RECOMMENDED)


def _recommended(impl: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, filters: Tensor, mix: Tensor) -> Tensor:
        learned = {"conv_weight": filters, "mix_logit": mix}
        return functional_call(_core(q.shape[1], q.shape[-1], impl), learned, (q, k, v))

    return run


def _convolved(v: Tensor, weight: Tensor) -> Tensor:
    from lln.ops import triton as kernels

    return kernels.convolution(v, weight)


def _depthwise(v: Tensor, weight: Tensor) -> Tensor:
    shaped = weight.to(v.dtype)[:, None, :, None]
    return F.conv2d(v, shaped, padding=(weight.shape[1] // 2, 0), groups=v.shape[1])


def _softmax_matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1) @ v


def _sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _backend(name: str, *, is_causal: bool = False) -> Callable[..., Tensor]:
    """SDPA with one backend, which runs or fails: nothing else is measured under its name."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return run


SOFTMAX = ("sdpa", "cudnn", "flash", "matrix")
# What each of our implementations is measured in.
IMPLEMENTED = {"eager": ("bidirectional", "lln_diag", "causal"), "triton": tuple(OPTIONS)}
RUNNERS: dict[tuple[str, str], Callable[..., Tensor]] = {
    **{(op, impl): _ours(op, impl) for impl, ops in IMPLEMENTED.items() for op in ops},
    **{("measured", impl): _measured(impl) for impl in ("eager", "triton")},
    **{("recommended", impl): _recommended(impl) for impl in IMPLEMENTED},
    ("bidirectional", "sdpa"): F.scaled_dot_product_attention,
    ("bidirectional", "matrix"): _softmax_matrix,
    ("bidirectional", "cudnn"): _backend("CUDNN_ATTENTION"),
    ("bidirectional", "flash"): _backend("FLASH_ATTENTION"),
    ("causal", "sdpa"): _sdpa_causal,
    ("causal", "cudnn"): _backend("CUDNN_ATTENTION", is_causal=True),
    ("causal", "flash"): _backend("FLASH_ATTENTION", is_causal=True),
    ("convolution", "eager"): convolve_by_blocks,
    ("convolution", "triton"): _convolved,
    ("convolution", "torch"): _depthwise,
    (peers.OP, peers.IMPL): peers.attend,
}


def _softmax_reference(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    seen = reference.visible(q.shape[2], k.shape[2], is_causal=is_causal, device=q.device)
    scores = reference.softmax_scores(q, k, scale=1 / math.sqrt(q.shape[-1]))
    return reference.attend(reference.normalize_rows(scores, seen), v)


def _recommended_reference(q: Tensor, k: Tensor, v: Tensor, filters: Tensor, mix: Tensor) -> Tensor:
    alpha, beta = moments.measure_scales(q, k, method=RECOMMENDED["method"])
    block, scale = RECOMMENDED["near"], 1 / math.sqrt(q.shape[-1])
    local = reference.block_diagonal(q, k, v, block=block, scale=scale)
    linear = reference.bidirectional(q, k, v, alpha=alpha, beta=beta)
    share = mix.sigmoid()[:, None, None]
    return torch.lerp(local, linear, share) + _depthwise(v, filters)


def expected(case: Case, *tensors: Tensor) -> Tensor:
    """The O(N²) definition of what ``case`` computes, in the dtype of the inputs."""
    if case.op == "convolution":
        return _depthwise(*tensors)
    if case.op == "recommended":
        return _recommended_reference(*tensors)
    q, k, v, *features = tensors
    if case.impl == peers.IMPL:
        return peers.expected(q, k, v)
    if case.impl in SOFTMAX:
        return _softmax_reference(q, k, v, is_causal=case.op == "causal")
    if case.op == "measured":
        alpha, beta = moments.measure_scales(q, k)
        return reference.bidirectional(q, k, v, alpha=alpha, beta=beta)
    return _ours(case.op, "reference")(q, k, v, *features)


def inputs(case: Case, *, seed: int = 0) -> list[Tensor]:
    """q, k, v of standard normal numbers, the same for every implementation of a shape.

    The convolution has v and its filters instead, "recommended" filters and a weight per head
    besides: parameters, and therefore float32. Far keys with slots have features of their own, and
    fla gets positive features for q and k.
    """
    generator = torch.Generator(case.device).manual_seed(seed)
    shape = (case.B, case.H, case.N, case.D)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=case.device)

    dtype = getattr(torch, case.dtype)
    made = [normal(*shape).to(dtype) for _ in range(1 if case.op == "convolution" else 3)]
    if case.impl == peers.IMPL:
        made = peers.prepared(*made)
    if case.op == "near_far_slots":
        made += [normal(*shape[:3], SLOTS * case.D).to(dtype) for _ in range(2)]
    if case.op in ("convolution", "recommended"):
        made.append(normal(case.H, TAPS))
    if case.op == "recommended":
        made.append(normal(case.H))
    return [x.requires_grad_(case.passes == TRAINING) for x in made]


def call(case: Case, tensors: Iterable[Tensor]) -> Callable[[], object]:
    """The closure to be timed: one forward pass, or one forward and backward pass."""
    key = (case.op, case.impl)
    if key not in RUNNERS:
        known = ", ".join(f"{op}/{impl}" for op, impl in RUNNERS)
        raise ValueError(f"no runner for op={case.op!r} impl={case.impl!r}; there are {known}")
    run, tensors = RUNNERS[key], list(tensors)
    if case.passes == FORWARD:

        def forward() -> Tensor:
            with torch.no_grad():
                return run(*tensors)

        return forward
    upstream = torch.ones_like(tensors[0])  # which has the shape of the output

    def forward_and_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(*tensors), tensors, upstream)

    return forward_and_backward


def powers(first: int, last: int) -> list[int]:
    """List first, 2·first, … up to last."""
    return [first * 2**n for n in range(int(math.log2(last / first)) + 1)]


def cpu_cases(*, quick: bool = False) -> list[Case]:
    """The CPU sweep: 12 heads of 64, float32; softmax as far as it is bearable, LLN to the end.

    What is recommended is measured in training, beside softmax.
    """
    softmax_end, linear_end, causal_end, matrix_end = (
        (2048, 32_768, 2048, 1024) if quick else (16_384, 262_144, 8192, 4096)
    )
    sweep = {
        ("bidirectional", "sdpa"): powers(512, softmax_end),
        ("bidirectional", "matrix"): powers(512, matrix_end),
        ("bidirectional", "eager"): powers(512, linear_end),
        ("measured", "eager"): powers(512, softmax_end),
        ("lln_diag", "eager"): powers(512, softmax_end),
        ("causal", "sdpa"): powers(512, causal_end),
        ("causal", "eager"): powers(512, causal_end),
    }
    cases = [Case(op, impl, N) for (op, impl), lengths in sweep.items() for N in lengths]
    trained = [("bidirectional", "sdpa"), ("recommended", "eager")]
    cases += [Case(*key, N, TRAINING) for key in trained for N in powers(128, causal_end)]
    # rivals side by side, under equal conditions
    return sorted(cases, key=lambda case: (case.passes, case.N, case.op))
