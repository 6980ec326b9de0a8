"""Methods that make their own queries and keys, against their formulas, as in ``test_formulas``."""

from __future__ import annotations

import math

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
