"""One step of decoding: a token joins the state of LLN, or the cache of softmax attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lln.functional import prefill
from lln.ops import reference
from lln.ops.linear.summarize import summarize
from lln_study.bench.cases import ALPHA, Case
from lln_study.bench.check import ALLOWED, CheckFailed

BATCHES = (64, 1)
CONTEXTS = (2048, 8192, 65_536)
OURS, SOFTMAX = "triton", "sdpa"
CHECKED = 257  # keys, off every tile


@dataclass(frozen=True)
class Step:
    """The call to be timed, the bytes that it must move, and its inputs."""

    run: Callable[[], Tensor]
    moved: int
    keys: Tensor  # [B, H, N + 1, D], that of the token last
    values: Tensor
    query: Tensor  # [B, H, 1, D]


def build(case: Case, *, seed: int = 0) -> Step:
    """A step after ``case.N`` keys.

    LLN reads and writes its state; softmax writes a key and a value and reads all of them.
    """
    generator = torch.Generator(case.device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(tokens: int) -> Tensor:
        shape = case.B, case.H, tokens, case.D
        made = torch.empty(shape, device=case.device, dtype=dtype)
        return made.normal_(generator=generator)

    q, cache_k, cache_v = normal(1), normal(case.N + 1), normal(case.N + 1)
    k, v = (x[:, :, case.N :].clone() for x in (cache_k, cache_v))
    given = cache_k, cache_v, q
    if case.impl == SOFTMAX:

        def attend() -> Tensor:
            with torch.no_grad():
                cache_k[:, :, case.N :] = k
                cache_v[:, :, case.N :] = v
                return F.scaled_dot_product_attention(q, cache_k, cache_v)

        return Step(attend, cache_k.nbytes + cache_v.nbytes, *given)
    scale = torch.full((case.B, case.H), ALPHA, device=case.device)
    state = summarize(cache_k[:, :, : case.N], cache_v[:, :, : case.N], beta=scale)

    def step() -> Tensor:
        with torch.no_grad():
            return prefill(q, k, v, state, alpha=scale, beta=scale)[0]

    return Step(step, 2 * (state.log_mass.nbytes + state.mean.nbytes), *given)


def check(case: Case) -> None:
    """Compare a step with the float64 definition, after few keys.

    Raises:
        CheckFailed: It computes something else.
    """
    made = build(replace(case, N=CHECKED, B=2, H=2), seed=1)
    q, k, v = made.query.double(), made.keys.double(), made.values.double()
    if case.impl == SOFTMAX:
        exact = torch.softmax(q @ k.transpose(-1, -2) / case.D**0.5, dim=-1) @ v
    else:
        scale = q.new_full(q.shape[:2], ALPHA)
        exact = reference.bidirectional(q, k, v, alpha=scale, beta=scale)
    error = float((made.run().double() - exact).norm() / exact.norm())
    if not error <= ALLOWED[case.dtype]:  # a NaN must fail too
        raise CheckFailed(f"{case.name}: relative error {error:.1e} of a step of decoding")


def decode_cases(device: str = "cuda") -> list[Case]:
    """Batch 1 and 64, 12 heads of 64, after three lengths of context; softmax beside ours."""
    return [
        Case("decode", impl, N=context, B=batch, dtype="bfloat16", device=device)
        for batch in BATCHES
        for context in CONTEXTS
        for impl in (OURS, SOFTMAX)
    ]
