"""Derivatives that the linear-time ops do not have are errors; the reference has them."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import lln
from lln.nn import LLNAttention
from lln.ops.causal.causal import causal
from lln.ops.linear.bidirectional import bidirectional
from lln.ops.window.lln_diag import lln_diag
from tests.helpers import random_qkv, random_scales

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself


def packed(q, k, v, *, alpha, beta, impl):
    """The same tokens as two packed sequences."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    ends = torch.tensor([0, 4, 9])
    options = {"alpha": alpha.expand(2, -1), "beta": beta.expand(2, -1), "impl": impl}
    return lln.attention_varlen(q, k, v, ends, ends, **options)


def with_block(q, k, v, **options):
    return lln_diag(q, k, v, near=lln.Near(4, scale=0.5), **options)


OPS = {"bidirectional": bidirectional, "causal": causal, "lln_diag": with_block, "varlen": packed}
ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def inputs() -> dict[str, torch.Tensor]:
    q, k, v = random_qkv(1, 2, 9, width=4, value_width=4)
    alpha, beta = random_scales(1, 2, 2)
    return {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}


@pytest.mark.parametrize("name", ["q", "v", "alpha"])
@ops
def test_forward_mode_is_refused_and_never_zero(op, name):
    given = inputs()
    with pytest.raises(NotImplementedError, match=r'forward-mode.*impl="reference"'):
        torch.func.jvp(
            lambda x: op(**{**given, name: x}, impl=None), (given[name],), (given[name],)
        )
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            op(**{**given, name: dual}, impl="eager")
        op(**given, impl="eager")  # nothing to lose here


@pytest.mark.parametrize("power", [1, 2])
@ops
def test_second_derivatives_are_refused(op, power):
    """Also where the gradient that arrives is a constant, and where another path leads to q."""
    given = inputs()
    q = given["q"].requires_grad_()
    loss = op(**given, impl=None).pow(power).sum() + q.square().sum()
    (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
    (expected,) = torch.autograd.grad(op(**given, impl=None).pow(power).sum() + q.square().sum(), q)
    assert gradient.equal(expected)
    with pytest.raises(NotImplementedError, match=r'second derivative.*impl="reference"'):
        torch.autograd.grad(gradient.square().sum(), q)


def test_a_graph_of_other_parts_may_be_differentiated_again():
    given = inputs()
    v = given["v"].requires_grad_()
    scale = torch.tensor(2.0, dtype=v.dtype, requires_grad=True)
    out = bidirectional(**given)
    (gradient,) = torch.autograd.grad((scale.pow(3) * out).sum(), scale, create_graph=True)
    (second,) = torch.autograd.grad(gradient, scale)
    assert second.item() == pytest.approx(12 * out.sum().item())


@pytest.mark.parametrize("options", [{}, {"near": 4}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_reference_has_both(options, is_causal):
    q, k, v = random_qkv(1, 2, 5, width=3, value_width=3)
    scales = {"alpha": 1.3, "beta": 1.1, "is_causal": is_causal, "impl": "reference"}

    def attention(q, k, v):
        return lln.attention(q, k, v, **scales, **options)

    x = [each.requires_grad_() for each in (q, k, v)]
    assert torch.autograd.gradgradcheck(attention, x)
    tangents = tuple(torch.randn_like(each) for each in x)
    out, moved = torch.func.jvp(attention, tuple(x), tangents)
    d_out = torch.randn_like(out)
    back = torch.autograd.grad(attention(*x), x, d_out)
    expected = sum((g * t).sum() for g, t in zip(back, tangents, strict=True))
    torch.testing.assert_close((moved * d_out).sum(), expected)


def test_the_reference_gives_gradients_per_sample():
    q, k, v = random_qkv(3, 2, 6, width=4, value_width=4)
    core = LLNAttention(2, 4, near=4, impl="reference", learn_scale=True).double()
    weights = dict(core.named_parameters())

    def loss(weights, q, k, v):
        given = (q[None], k[None], v[None])
        return torch.func.functional_call(core, weights, given).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(weights, q, k, v)
    core(q, k, v).square().sum().backward()
    for name, weight in core.named_parameters():
        torch.testing.assert_close(each[name].sum(0), weight.grad)
