"""What ``lln bench zoo`` measures: a whole layer of the zoo, projections included, and a shape.

``op`` of a case is the mechanism; ``impl`` is for softmax and LLN, the others have "eager" only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lln import zoo
from lln.functional import which
from lln_study.bench.cases import FORWARD, TRAINING, Case, powers
from lln_study.bench.check import CheckFailed

SEED = 0
CHECK_LENGTH = 257
# Relative to float64. A rounded score may send a token to another bucket or neighbour.
ALLOWED, ALLOWED_IN_HALF = 1e-3, 2e-2
ALLOWED_BY_NAME = {"reformer": 0.1, "knn": 0.1}
SOFTMAX = ("sdpa", "matrix")
OURS = ("lln", "lln_diag")


def build(case: Case) -> nn.Module:
    """The layer with its defaults, in evaluation mode: nothing is redrawn between two calls."""
    torch.manual_seed(SEED)
    chosen: dict[str, Any] = {}
    if case.op in ("softmax", *OURS):
        chosen["impl"] = case.impl
    layer = zoo.create(case.op, dim=case.H * case.D, num_heads=case.H, max_length=case.N, **chosen)
    return layer.to(case.device, getattr(torch, case.dtype)).eval()


def call(case: Case) -> Callable[[], object]:
    """The closure to be timed: a forward pass, or gradients for the input and every parameter."""
    layer = build(case)
    x = torch.randn(case.B, case.N, case.H * case.D)
    x = x.to(case.device, getattr(torch, case.dtype)).requires_grad_(case.passes == TRAINING)
    if case.passes == FORWARD:

        def forward() -> Tensor:
            with torch.no_grad():
                return layer(x)

        return forward
    upstream = torch.ones_like(x)
    leaves = [x, *layer.parameters()]

    def forward_and_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x), leaves, upstream)

    return forward_and_backward


def check(cases: Iterable[Case]) -> int:
    """Compare each layer on its device, padding included, with itself in float64 on the CPU.

    The formulas themselves are compared by the tests; this sees a device that computes something
    else. Our own are compared in the dtype that is measured, since kernels depend on it, the
    others in float32.

    Returns how many were compared; raises :class:`CheckFailed` naming the first that is off.
    """
    small = {
        replace(case, N=CHECK_LENGTH, B=2, H=2, passes=FORWARD, dtype=_checked_dtype(case))
        for case in cases
    }
    for case in sorted(small, key=lambda case: case.name):
        layer = build(case)
        x = torch.randn(2, CHECK_LENGTH, 2 * case.D).to(getattr(torch, case.dtype))
        mask = torch.arange(CHECK_LENGTH) < torch.tensor([[CHECK_LENGTH], [150]])
        exact_impl = {"impl": "eager"} if case.op in OURS else {}
        exact_layer = build(replace(case, device="cpu", **exact_impl))
        exact_layer.load_state_dict(copy.deepcopy(layer.state_dict()))
        with torch.no_grad():
            got = layer(x.to(case.device), mask.to(case.device)).cpu()[mask]
            exact = exact_layer.double()(x.double(), mask)[mask]
        error = float((got.double() - exact).norm() / exact.norm())
        usual = ALLOWED if case.dtype == "float32" else ALLOWED_IN_HALF
        allowed = ALLOWED_BY_NAME.get(case.op, usual)
        if not error <= allowed:  # a NaN must fail too
            raise CheckFailed(
                f"{case.name}: relative error {error:.1e} exceeds {allowed:.0e}; "
                "run `make test` and fix the mechanism before measuring it"
            )
    return len(small)


def _checked_dtype(case: Case) -> str:
    return case.dtype if case.op in OURS else "float32"


def layer_cases(
    *, device: str = "cpu", quick: bool = False, names: Iterable[str] | None = None
) -> list[Case]:
    """Every mechanism at lengths it can bear; 12 heads of 64 in bfloat16 on a GPU, 2 on a CPU."""
    wanted = list(names or zoo.list_mechanisms())
    on_gpu = device.startswith("cuda")
    shape = {"H": 12, "dtype": "bfloat16"} if on_gpu else {"H": 2, "dtype": "float32"}
    first, last, last_quadratic = (1024, 32_768, 8192) if on_gpu else (512, 8192, 4096)
    if quick:
        first, last, last_quadratic = (256, 1024, 1024)
    cases = []
    for name in wanted:
        growth = zoo.describe(name).growth
        for impl in _implementations(name, device, shape):
            end = last_quadratic if growth == 2 or impl == "matrix" else last
            base = Case(name, impl, first, device=device, **shape)
            cases += [
                replace(base, N=N, passes=passes)
                for passes in (FORWARD, TRAINING)
                for N in powers(first, end)
            ]
    return cases


def _implementations(name: str, device: str, shape: dict[str, Any]) -> tuple[str, ...]:
    if name == "softmax":
        return SOFTMAX
    if name not in OURS:
        return ("eager",)
    probe = torch.empty(1, shape["H"], 1, 64, dtype=getattr(torch, shape["dtype"]), device=device)
    fastest = which(probe, probe, probe, near=zoo.describe(name).defaults.get("near"))
    return tuple(dict.fromkeys((fastest, "eager")))
