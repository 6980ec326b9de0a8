"""Methods that make their own queries and keys, against their formulas, as in ``test_formulas``."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.baselines.small import HEADS, TOKENS, make, mask_of


def test_transformer_ls():
    module = make("transformer_ls").double()  # r = 4, w = 4
    torch.nn.init.normal_(module.short_norm.weight)
    torch.nn.init.normal_(module.long_norm.bias)
    x = torch.randn(2, TOKENS, 32, dtype=torch.float64)
    mask = mask_of()
    got = module(x, mask)
    for b in range(2):
        seen = [j for j in range(TOKENS) if mask[b, j]]
        q, k, v = (
            layer(x[b]).view(TOKENS, HEADS, 16)
            for layer in (module.query, module.key, module.value)
        )
        logits = module.projection(x[b]).view(TOKENS, HEADS, 4)
        a = torch.softmax(logits[seen], dim=0)
        far = [
            module.long_norm(torch.einsum("nhr,nhd->rhd", a, y[seen]).flatten(1)).view(4, HEADS, 16)
            for y in (k, v)
        ]
        near = [module.short_norm(y.flatten(1)).view(TOKENS, HEADS, 16) for y in (k, v)]
        for i in seen:
            first = i // 4 * 4
            window = [j for j in range(first - 2, first + 6) if j in seen]
            heads_out = []
            for h in range(HEADS):
                keys = torch.cat([far[0][:, h], near[0][window, h]])
                values = torch.cat([far[1][:, h], near[1][window, h]])
                heads_out.append(torch.softmax(keys @ q[i, h] / 4, dim=0) @ values)
            expected = module.out(torch.cat(heads_out))
            torch.testing.assert_close(got[b, i], expected, rtol=1e-8, atol=1e-9)


def test_tnn():
    module = make("tnn").double()
    x = torch.randn(2, TOKENS, 32, dtype=torch.float64)
    mask = mask_of()
    got = module(x, mask)

    def f(offset: int) -> Tensor:
        y = module.position[0](torch.tensor([float(offset)], dtype=torch.float64))
        for layer in module.position[1:]:
            y = layer((y * math.sqrt(len(y)) / (y.norm() + 1e-8)).relu())
        return y

    for b in range(2):
        seen = [j for j in range(TOKENS) if mask[b, j]]
        v = torch.nn.functional.silu(module.value(x[b]))
        for i in seen:
            mixed = sum(0.99 ** abs(i - j) * f(i - j) * v[j] for j in seen)
            expected = module.out(torch.nn.functional.silu(module.gate(x[b, i])) * mixed)
            torch.testing.assert_close(got[b, i], expected, rtol=1e-8, atol=1e-9)
    matrix = module.attention_matrix(x, mask)
    torch.testing.assert_close(matrix[1, :, 2, 7], 0.99**5 * f(-5))


def polaformer_by_its_definition(module, x: Tensor, seen: list[int]) -> Tensor:
    """One sample [N, dim]: every pair of tokens on its own, weights from signs and powers."""
    tokens = len(x)
    q, k, v = (f(x).view(tokens, HEADS, 16) for f in (module.query, module.key, module.value))
    p = 1 + module.alpha / (1 + torch.exp(-module.power[:, 0]))  # [H, D]
    s = torch.log1p(torch.exp(module.scale[:, 0]))
    out = torch.zeros(tokens, HEADS, 16, dtype=x.dtype)
    for h in range(HEADS):
        for i in range(tokens):
            for half, sign in ((slice(0, 8), 1), (slice(8, 16), -1)):
                score = torch.zeros(tokens, dtype=x.dtype)
                for j in seen:
                    product = q[i, h] * k[j, h] / s[h] ** 2
                    counts = product * sign > 0
                    score[j] = (product.abs()[counts] ** p[h][counts]).sum()
                out[i, h, half] = score @ v[:, h, half] / score.sum()
            for t in range(5):
                if (j := i + t - 2) in seen:
                    out[i, h] = out[i, h] + module.conv.weight[:, 0, t] * v[j, h]
            out[i, h] = out[i, h] + module.conv.bias
    return module.out(module.gate(x) * out.flatten(1))


def test_polaformer():
    """Output and gradients of every parameter, with tokens hidden at the end and in between."""
    module = make("polaformer").double()
    torch.nn.init.normal_(module.power)
    torch.nn.init.normal_(module.scale)
    x = torch.randn(2, TOKENS, 32, dtype=torch.float64)
    mask = mask_of()
    direction = torch.randn(2, TOKENS, 32, dtype=torch.float64) * mask[..., None]
    got = module(x, mask)
    gradients = torch.autograd.grad((got * direction).sum(), list(module.parameters()))
    expected = torch.stack(
        [
            polaformer_by_its_definition(module, x[b], mask[b].nonzero()[:, 0].tolist())
            for b in (0, 1)
        ]
    )
    torch.testing.assert_close(got[mask], expected[mask], rtol=1e-9, atol=1e-10)
    exact = torch.autograd.grad((expected * direction).sum(), list(module.parameters()))
    for ours, theirs in zip(gradients, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_polaformer_stays_finite_where_its_powers_leave_float32():
    module = make("polaformer")
    with torch.no_grad():
        module.power.fill_(20.0)  # p = 5
        module.query.weight.mul_(1e4)
        module.key.weight.mul_(1e4)
    x = torch.randn(1, 40, 32, requires_grad=True)
    out = module(x)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    rows = module.attention_matrix(x).sum(-1)
    assert rows.shape == (1, 2 * HEADS, 40)
    torch.testing.assert_close(rows, torch.ones_like(rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 32}, "gives heads of 1, but the two streams"),
        ({"alpha": -1.0}, "alpha=-1.0 is negative"),
        ({"kernel_size": 4}, "kernel_size=4 is even"),
    ],
)
def test_polaformer_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        make("polaformer", **options)
    assert make("polaformer", kernel_size=0).conv is None


def test_reformer_by_its_definition():
    """Sets P_i per round, one softmax over their union with the paper's corrections."""
    module = make("reformer", chunk=4, rounds=3).double()
    tokens = 26
    x = torch.randn(2, tokens, 32, dtype=torch.float64)
    mask = mask_of(tokens)
    matrix = module.attention_matrix(x, mask)
    for b in range(2):
        seen = [j for j in range(tokens) if mask[b, j]]
        half = math.ceil(len(seen) / 8)  # an even number of buckets, about (tokens / 4)
        qk = module.query_key(x[b]).view(tokens, HEADS, 16)
        for h in range(HEADS):
            sets = [set() for _ in range(tokens)]
            for rotation in module.rotations[:, :, :half].double():
                turned = qk[:, h] @ rotation
                bucket = torch.cat([turned, -turned], dim=1).argmax(1).tolist()
                order = sorted(seen, key=lambda j, bucket=bucket: (bucket[j], j))
                chunk = {j: place // 4 for place, j in enumerate(order)}
                for i in seen:
                    sets[i] |= {
                        j for j in seen if bucket[i] == bucket[j] and chunk[i] - chunk[j] in (0, 1)
                    }
            for i in seen:
                # Each pair counts once over all rounds; the token itself only if alone.
                others = sorted(sets[i] - {i}) or [i]
                k = qk[others, h] / qk[others, h].norm(dim=-1, keepdim=True)
                expected = torch.zeros(tokens, dtype=torch.float64)
                expected[others] = torch.softmax(k @ qk[i, h] / 4, dim=0)
                torch.testing.assert_close(matrix[b, h, i], expected, rtol=1e-6, atol=1e-8)


def test_reformer_draws_new_rotations_when_training():
    module = make("reformer").train()
    x = torch.randn(1, 100, 32)
    assert not torch.equal(module(x), module(x))
    fixed = make("reformer", resample=False).train()
    assert torch.equal(fixed(x), fixed(x))
