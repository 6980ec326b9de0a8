"""The zoo on a GPU: the same numbers as on the CPU, compiled too, and finite in half precision."""

from __future__ import annotations

import pytest
import torch

import lln
from lln_study.bench import layers
from tests.baselines.small import for_compiler, make, padded
from tests.generated import check_generated_code

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", lln.list_mechanisms())
def test_cuda_equals_cpu(name):
    cases = layers.layer_cases(device="cuda", quick=True, names=[name])
    assert layers.check(cases) == len({case.impl for case in cases})


@pytest.mark.parametrize("name", lln.list_mechanisms())
def test_generated_code_has_the_gradients(name):
    check_generated_code(*for_compiler(name, "cuda"), tolerance=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", lln.list_mechanisms())
def test_training_under_autocast_is_finite(name, dtype):
    module = make(name).cuda().train()
    x, mask = padded(200)
    x = x.cuda().requires_grad_()
    with torch.autocast("cuda", dtype=dtype):
        out = module(10 * x, mask.cuda())
    out.float().square().mean().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
