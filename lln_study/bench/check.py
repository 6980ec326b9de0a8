"""The correctness check that stands before every measurement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from lln_study.bench.cases import TRAINING, Case, call, expected, inputs

LENGTH = 257  # off every tile size
# On a GPU a multiple of every tile, as all lengths that are measured there: kernels are compiled
# for whole tiles, and these are the ones to be checked. Tests hold the others.
WHOLE = 512
ALLOWED = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


class CheckFailed(RuntimeError):
    """An implementation does not compute what its definition says; nothing may be measured."""


def check(cases: Iterable[Case]) -> int:
    """Compare every implementation among ``cases`` with the float64 definition at a small size.

    Returns how many were compared; raises :class:`CheckFailed` naming the first that is off.
    """
    found = {small(case) for case in cases}
    for case in sorted(found, key=lambda case: case.name):
        _check_one(case)
    return len(found)


def small(case: Case) -> Case:
    """The case at the size that is checked."""
    return replace(case, N=WHOLE if case.device == "cuda" else LENGTH, H=2, B=2)


def _check_one(case: Case) -> None:
    tensors = inputs(case, seed=1)
    exact_inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
    exact = expected(case, *exact_inputs)
    got = call(case, tensors)()
    if case.passes == TRAINING:
        exact = torch.autograd.grad(exact, exact_inputs, torch.ones_like(exact))
    for index, (result, answer) in enumerate(zip(_listed(got), _listed(exact), strict=True)):
        error = float((result.double() - answer).norm() / answer.norm())
        allowed = ALLOWED[case.dtype]
        if not error <= allowed:  # a NaN must fail too
            names = ("v", "the filter") if case.op == "convolution" else (*"qkv", "mix", "filters")
            what = "output" if case.passes != TRAINING else f"gradient of {names[index]}"
            raise CheckFailed(
                f"{case.name}: relative error {error:.1e} of the {what} exceeds {allowed:.0e}; "
                "run `make test` and fix the implementation before measuring it"
            )


def _listed(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, tuple)
    return list(result)
