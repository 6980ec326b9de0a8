"""torch.func over LLN in linear time: grad, vjp, jacrev, vmap, gradients per sample."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import lln
from lln.nn import LLNAttention, LLNMultiheadAttention
from tests.helpers import random_qkv
from tests.ops.test_derivatives import inputs, ops

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself

OPTIONS = [
    {},
    {"normalize_keys": True},
    {"near": 4},
    {"is_causal": True},
    {"is_causal": True, "near": 4},
]
options = pytest.mark.parametrize("options", OPTIONS, ids=str)


@ops
def test_grad_is_the_gradient(op):
    given = inputs()
    names = tuple(given)

    def loss(*values):
        return op(**dict(zip(names, values, strict=True)), impl="eager").square().sum()

    found = torch.func.grad(loss, argnums=tuple(range(len(names))))(*given.values())
    leaves = [x.detach().requires_grad_() for x in given.values()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(found, expected)


@ops
def test_second_derivatives_are_refused_here_too(op):
    given = inputs()
    rest = {name: value for name, value in given.items() if name != "q"}

    def slope(q):
        return torch.func.grad(lambda x: op(x, **rest, impl="eager").square().sum())(q).sum()

    with pytest.raises(NotImplementedError, match=r'second derivative.*impl="reference"'):
        torch.func.grad(slope)(given["q"])


def test_the_jacobian_is_that_of_the_reference():
    q, k, v = random_qkv(1, 1, 4, width=3, value_width=3)

    def attention(q, impl):
        return lln.attention(q, k, v, alpha=1.3, beta=1.1, impl=impl)

    found = torch.func.jacrev(attention)(q, "eager")
    torch.testing.assert_close(found, torch.func.jacrev(attention)(q, "reference"))


@options
def test_vmap_joins_the_batches(options):
    """One call for all samples, wherever they are in a tensor, and for tensors that all share."""
    q, k, v = random_qkv(3 * 2, 2, 9, width=4, value_width=4)
    mask = torch.arange(9) < torch.tensor([9, 5, 7, 9, 1, 8])[:, None]
    stacked = [x.unflatten(0, (3, 2)) for x in (q, k, v, mask)]

    def attention(q, k, v, mask):
        return lln.attention(q, k, v, alpha=1.3, beta=1.1, key_mask=mask, impl="eager", **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch says so where it would call once per sample
        found = torch.vmap(attention)(*stacked)
    torch.testing.assert_close(found.flatten(0, 1), attention(q, k, v, mask))
    moved = torch.vmap(attention, in_dims=(2, 0, 0, None), out_dims=1)(
        stacked[0].movedim(0, 2), stacked[1], stacked[2], stacked[3][0]
    )
    each = [attention(*x, stacked[3][0]) for x in zip(*stacked[:3], strict=True)]
    torch.testing.assert_close(moved.movedim(1, 0), torch.stack(each))


@options
def test_gradients_per_sample_are_those_of_each_sample(options):
    q, k, v = random_qkv(3, 2, 9, width=4, value_width=4)
    alpha = torch.tensor([1.2, 0.9], dtype=q.dtype)

    def loss(alpha, q, k, v):
        given = q[None], k[None], v[None]
        return lln.attention(*given, alpha=alpha, beta=alpha, impl="eager", **options).pow(3).sum()

    found = torch.vmap(torch.func.grad(loss, (0, 1, 2, 3)), (None, 0, 0, 0))(alpha, q, k, v)
    for i in range(3):
        leaves = [x.detach().requires_grad_() for x in (alpha, q[i], k[i], v[i])]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        torch.testing.assert_close(tuple(x[i] for x in found), expected)


def test_samples_may_have_scales_of_their_own():
    q, k, v = random_qkv(3, 2, 9, width=4, value_width=4)
    alpha = torch.tensor([[1.2, 0.9], [0.5, 2.0], [1.0, 1.5]], dtype=q.dtype)

    def attention(q, k, v, alpha):
        return lln.attention(q[None], k[None], v[None], alpha=alpha, beta=1.1, impl="eager")[0]

    found = torch.vmap(attention)(q, k, v, alpha)
    torch.testing.assert_close(found, lln.attention(q, k, v, alpha=alpha, beta=1.1))


@pytest.mark.parametrize(
    "settings",
    [
        {"learn_scale": True},
        {"near": 4, "mix": "learned", "learn_scale": True},
        {"near": 4, "conv": 3, "learn_scale": True},
    ],
    ids=str,
)
def test_gradients_per_sample_of_a_module(settings):
    """What differentially private training needs, projections included."""
    q, k, v = random_qkv(3, 2, 6, width=4, value_width=4)
    core = LLNAttention(2, 4, impl="eager", **settings).double()
    _check_samples(core, (q, k, v))


def test_gradients_per_sample_of_a_drop_in_layer():
    """With padding, whose values are looked at where they can be."""
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    hidden = torch.arange(6) >= torch.tensor([6, 4, 5])[:, None]

    class Self(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = LLNMultiheadAttention(8, 2, batch_first=True, near=4).double()

        def forward(self, x, hidden):
            return self.layer(x, x, x, key_padding_mask=hidden, need_weights=False)[0]

    _check_samples(Self(), (x, hidden))


def _check_samples(model: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    weights = dict(model.named_parameters())
    assert weights

    def loss(weights, *sample):
        batch = tuple(x[None] for x in sample)
        return torch.func.functional_call(model, weights, batch).square().sum()

    dims = (None, *(0 for _ in given))
    each = torch.func.vmap(torch.func.grad(loss), in_dims=dims)(weights, *given)
    for i in range(len(given[0])):
        model.zero_grad()
        model(*(x[i : i + 1] for x in given)).square().sum().backward()
        for name, weight in weights.items():
            if weight.grad is not None:
                torch.testing.assert_close(each[name][i], weight.grad)
