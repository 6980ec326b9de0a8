"""Chosen rows of a core's attention matrix are the rows of its whole matrix, gradients too."""

from __future__ import annotations

import pytest
import torch

from lln import Near
from lln.nn import LLNAttention
from lln.nn.rows import row_weights

JOINT = {"near": Near(8, joint=True)}
CASES = {
    "lln": {},
    "unbiased": {"normalize_keys": True},
    "average": {"near": 8},
    "learned": {"near": Near(8, overlap=3), "mix": "learned"},
    "joint": {"near": Near(8, overlap=4, sinks=2, joint=True)},
    "maps": {**JOINT, "feature_map": "learned", "slots": 12, "center_keys": True},
    **{kind: {**JOINT, "feature_map": kind} for kind in ("hedgehog", "t2r", "elu")},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_they_are_rows_of_the_whole_matrix(case, causal):
    torch.manual_seed(0)
    core = LLNAttention(
        4, 6, num_kv_heads=2, causal=causal, statistics="fixed", learn_scale=True, **CASES[case],
        dtype=torch.float64,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    q = torch.randn(2, 4, 30, 6, dtype=torch.float64)
    k = torch.randn(2, 2, 30, 6, dtype=torch.float64)
    mask = torch.arange(30) < torch.tensor([[30], [21]])
    k[1, :, 21:] = torch.nan
    index = torch.tensor([[0, 7, 13, 29], [3, 8, 19, 20]])
    whole = core.attention_matrix(q, k.nan_to_num(), mask, mask)
    wanted = torch.stack([whole[b][:, index[b]] for b in range(2)])
    draw = core.draw(q, k.nan_to_num(), key_mask=mask, query_mask=mask, is_causal=causal)
    found = row_weights(core, q, k, index, draw)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    direction = torch.randn_like(wanted)
    parameters = list(core.parameters())
    gradients = [
        torch.autograd.grad((rows * direction).sum(), parameters, allow_unused=True)
        for rows in (found, wanted)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_far_apart_exponents_keep_a_finite_gradient():
    core = LLNAttention(1, 4, statistics="fixed", alpha=30.0, beta=30.0, learn_scale=True, **JOINT)
    q, k = (30 * torch.randn(1, 1, 40, 4) for _ in range(2))
    draw = core.draw(q, k)
    row_weights(core, q, k, torch.tensor([[0, 39]]), draw).square().sum().backward()
    assert all(x.grad.isfinite().all() for x in core.parameters())
