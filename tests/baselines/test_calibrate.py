"""calibrate=True: positive features at the power that gives the rows softmax's entropy."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lln
from tests.baselines.small import DIM, HEADS, heads, make, padded
from tests.helpers import run_with_grads

NAMES = ("elu", "performer", "hedgehog")
every_name = pytest.mark.parametrize("name", NAMES)
EPS = 1e-4


def elu(core, x: Tensor, keys: bool, mask: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def hedgehog(core, x: Tensor, keys: bool, mask: Tensor) -> Tensor:
    x = torch.einsum("hij,bhnj->bhni", core.key_map if keys else core.query_map, x)
    both = torch.stack([x, -x], -2).exp()
    return (both / both.sum(-1, keepdim=True)).flatten(-2)


def performer(core, x: Tensor, keys: bool, mask: Tensor) -> Tensor:
    x = x / x.shape[-1] ** 0.25
    dots = torch.einsum("fj,bhnj->bhnf", core.projection, x)
    largest = dots.masked_fill(~mask[:, None, :, None], -torch.inf).amax((2, 3), keepdim=True)
    shift = largest if keys else dots.amax(-1, keepdim=True)
    return (dots - (x**2).sum(-1, keepdim=True) / 2 - shift.detach()).exp() + EPS


FEATURES: dict[str, Callable] = {"elu": elu, "hedgehog": hedgehog, "performer": performer}


def matrix(features: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    weights = features @ keys.mT * mask[:, None, None]
    return weights / weights.sum(-1, keepdim=True)


def row_entropy(p: Tensor) -> Tensor:
    """Bits."""
    return -torch.special.xlogy(p, p).sum(-1) / math.log(2)


def mean_entropy(p: Tensor, mask: Tensor) -> Tensor:
    """Bits of the valid rows, ``[B, H]``."""
    return (row_entropy(p) * mask[:, None]).sum(-1) / mask.sum(-1)[:, None]


def softmax(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)


@torch.no_grad()
def power(name: str, core, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """c of every sample and head by nested intervals on dense matrices."""
    phi_q, phi_k = FEATURES[name](core, q, False, mask), FEATURES[name](core, k, True, mask)
    wanted = mean_entropy(softmax(q, k, mask), mask)
    low, high = torch.full_like(wanted, 0.01), torch.full_like(wanted, 50.0)
    for _ in range(60):
        c = (low * high).sqrt()[..., None, None]
        flat = mean_entropy(matrix(phi_q**c, phi_k**c, mask), mask) > wanted
        low, high = torch.where(flat, c[..., 0, 0], low), torch.where(flat, high, c[..., 0, 0])
    return (low * high).sqrt()[..., None, None]


def mask_of(tokens: int) -> Tensor:
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[1, :3] = mask[1, 7] = mask[1, -9:] = False
    return mask


@every_name
def test_output_and_gradients_are_those_of_powers_of_the_features(name):
    """The power is a constant: its own dependence on q and k has no gradient."""
    core = make(name, calibrate=True).core.double()
    mask = mask_of(40)
    inputs = dict(zip("qkv", heads(40), strict=True))
    c = power(name, core, inputs["q"], inputs["k"], mask)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi = FEATURES[name](core, q, False, mask) ** c, FEATURES[name](core, k, True, mask) ** c
        return matrix(*phi, mask) @ v * mask[:, None, :, None]

    def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return core(q, k, v, mask) * mask[:, None, :, None]

    d_out = torch.randn_like(inputs["v"])
    expected = run_with_grads(dense, inputs, d_out)
    for label, x in run_with_grads(called, inputs, d_out).items():
        torch.testing.assert_close(x, expected[label], rtol=1e-5, atol=1e-7, msg=label)


@every_name
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_rows_are_as_concentrated_as_those_of_softmax(name, temperature):
    """Up to four deviations of a mean over 64 rows, which are measured; uncalibrated it is more."""
    options = {"dim": 128, "num_heads": 2, "max_length": 300}
    q, k = (torch.randn(2, 2, 300, 64) * temperature**-0.5 for _ in range(2))
    mask = torch.arange(300) < torch.tensor([[300], [200]])
    wanted = row_entropy(softmax(q, k, mask))

    def difference(calibrate: bool) -> list[Tensor]:
        core = lln.create(name, calibrate=calibrate, **options).core
        with torch.no_grad():
            found = row_entropy(core.attention_matrix(q, k, mask, mask))
        return [(found - wanted)[b, h, mask[b]] for b in range(2) for h in range(2)]

    off = sum(rows.mean().abs() for rows in difference(False)) / 4
    for rows in difference(True):
        assert rows.mean().abs() < 4 * rows.std() / 64**0.5
        assert rows.mean().abs() < off


@every_name
@pytest.mark.parametrize("tokens", [1, 17, 100, 257])
def test_padding_and_the_batch_change_nothing(name, tokens):
    module = make(name, calibrate=True)
    x, mask = padded(tokens, batch=3)
    with torch.no_grad():
        out = module(x, mask)
        dirty = module(x.masked_fill(~mask[..., None], torch.nan), mask)
        loud = module(torch.cat([x[:1], 5 * x[1:]]), mask)
        cut = int(mask[1].sum())
        shorter = module(x[1:2, :cut])
        late = module(x[1:2].flip(1), mask[1:2].flip(1)).flip(1)
    assert (dirty[mask] == out[mask]).all() and dirty.isfinite().all()
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(loud[:1], out[:1], **close)
    torch.testing.assert_close(shorter, out[1:2, :cut], **close)
    backwards = module(x[1:2, :cut].flip(1)).flip(1)
    torch.testing.assert_close(late[:, :cut], backwards, **close)


@every_name
def test_gradients_reach_every_parameter_and_no_masked_token(name):
    module = make(name, calibrate=True)
    x, mask = padded(40)
    mask[1] = False  # nothing to attend
    x.requires_grad_()
    module(x, mask).square().sum().backward()
    assert (x.grad[~mask] == 0).all() and (x.grad[mask].abs().sum(-1) > 0).all()
    for label, parameter in module.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 1e-8, label


@every_name
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_and_loud_inputs(name, dtype):
    module = make(name, calibrate=True).to(dtype)
    x, mask = padded(100)
    with torch.no_grad():
        out, loud = module(x.to(dtype), mask), module(30 * x.to(dtype), mask)
        exact = module.float()(x.to(dtype).float(), mask)
    assert out.dtype == dtype and loud.isfinite().all()
    error = (out.float() - exact)[mask].abs().max()
    assert error <= 30 * torch.finfo(dtype).eps * max(exact.abs().max(), 1)


@pytest.mark.slow
def test_it_compiles_in_one_graph():
    """Captured whole; how graphs of such operations are differentiated is no matter of this."""
    module = make("hedgehog", calibrate=True)
    x, mask = padded(40)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, mask), module(x, mask))


@pytest.mark.parametrize("name", ["elu", "hedgehog"])
def test_causal_attention_is_refused(name):
    with pytest.raises(ValueError, match="calibrate=True cannot serve causal attention"):
        make(name, causal=True, calibrate=True)


@every_name
def test_keys_of_another_sequence_are_refused(name):
    core = make(name, calibrate=True).core
    q, k, v = heads(9)
    with pytest.raises(ValueError, match="is for self-attention only: leave calibrate out"):
        core(q, k[:, :, :5], v[:, :, :5])


@every_name
def test_the_record_and_the_command_know_it(name):
    entry = lln.describe(name)
    assert entry.defaults["calibrate"] is False and "calibrate=True" in entry.note
    assert make(name).core(*heads(5)).shape == (2, HEADS, 5, DIM // HEADS)
