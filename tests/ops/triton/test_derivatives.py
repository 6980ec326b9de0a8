"""The kernels' gradients under torch.func; second derivatives and forward mode are errors."""

from __future__ import annotations

import pytest
import torch

import lln
from lln.ops import triton as kernels

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself


@pytest.mark.parametrize("options", [{}, {"near": 16}, {"is_causal": True}], ids=str)
def test_what_the_kernels_do_not_have_is_refused(options, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.randn(1, 1, 20, 16, device=device, requires_grad=True)

    def attention(x):
        return lln.attention(x, x, x, alpha=1.0, beta=1.0, impl="triton", **options)

    (gradient,) = torch.autograd.grad(attention(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(gradient.square().sum(), x)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(attention, (x,), (torch.ones_like(x),))


def test_of_the_convolution_too(device):
    v = torch.randn(1, 1, 20, 16, device=device, requires_grad=True)
    weight = torch.randn(1, 3, device=device)
    (gradient,) = torch.autograd.grad(
        kernels.convolution(v, weight).square().sum(), v, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(gradient.square().sum(), v)


@pytest.mark.parametrize("options", [{}, {"near": 16}, {"is_causal": True}], ids=str)
def test_grad_of_torch_func_finds_the_gradient(options, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.randn(1, 1, 20, 16, device=device)
    alpha = torch.ones(1, device=device)

    def loss(x, alpha):
        given = {"alpha": alpha, "beta": 1.0, "impl": "triton"}
        return lln.attention(x, x, x, **given, **options).square().sum()

    found = torch.func.grad(loss, (0, 1))(x, alpha)
    leaves = [x.requires_grad_(), alpha.requires_grad_()]
    torch.testing.assert_close(found, torch.autograd.grad(loss(*leaves), leaves))
