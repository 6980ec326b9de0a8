"""Products left to an autocast to bfloat16: close to float64, and only where asked.

The measure is what float32 products make of the same autocast, which rounds queries, keys, values
and the output in any case: output and gradients may be twice as far from float64, and a rounding.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import lln
from tests.baselines.small import make, padded

MAY = [name for name in lln.list_mechanisms() if "half_products" in lln.describe(name).defaults]
FACTOR, ROUNDING = 2.0, torch.finfo(torch.bfloat16).eps


def run(module: nn.Module, x: Tensor, mask: Tensor, weight: Tensor, dtype=torch.bfloat16):
    """Output and gradient of x under an autocast; without one in float64."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=x.dtype != torch.float64):
        out = module(x, mask)
    (out.double() * weight).sum().backward()
    assert x.grad is not None
    return (out.double() * mask[..., None]).detach(), x.grad.double()


@pytest.mark.parametrize("name", MAY)
def test_the_error_is_that_of_the_rounding_around_it(name):
    module = make(name)
    x, mask = padded(100)
    x = 3 * x  # scores that are not all alike
    weight = torch.randn_like(x).double() * mask[..., None]
    exact = run(copy.deepcopy(module).double(), x.double(), mask, weight)
    plain = run(copy.deepcopy(module), x, mask, weight)
    halved = make(name, half_products=True)
    halved.load_state_dict(module.state_dict())
    for got, wide, true in zip(run(halved, x, mask, weight), plain, exact, strict=True):
        size = true.abs().max()
        allowed = FACTOR * (wide - true).abs().max() + ROUNDING * size
        assert (got - true).abs().max() <= allowed


@pytest.mark.parametrize("name", MAY)
def test_only_bfloat16_and_only_when_asked(name):
    """float16 has not the range, without autocast nothing is rounded: the same bits as before."""
    module, x, mask = make(name), *padded(40)
    halved = make(name, half_products=True)
    halved.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.equal(halved(x, mask), module(x, mask))
        with torch.autocast("cpu", dtype=torch.float16):
            assert torch.equal(halved(x, mask), module(x, mask))


def test_it_is_a_difference():
    module, x, mask = make("elu"), *padded(200)
    halved = make("elu", half_products=True)
    halved.load_state_dict(module.state_dict())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal(halved(x, mask), module(x, mask))


@pytest.mark.parametrize(
    "name", ["reformer", "knn", "tnn", "transnormer_t1", "skyformer", "softmax"]
)
def test_who_may_not_says_so(name):
    with pytest.raises(TypeError, match="has no option 'half_products'"):
        make(name, half_products=True)
