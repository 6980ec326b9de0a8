"""Recording attention with one normaliser: its matrix, its measures, the share of near keys."""

from __future__ import annotations

import pytest
import torch

import lln
import lln.hf
from lln.instruments import entropy
from lln.instruments.recording.recorder import attention_calls
from lln.nn import LLNAttention
from lln.ops import reference
from tests.helpers import random_qkv

OPTIONS = [
    {},
    {"near": lln.Near(8, overlap=3, sinks=2, joint=True)},
    {"feature_map": "signs", "center_keys": True},
    {"near": lln.Near(8, sinks=1, joint=True), "statistics": "fixed", "causal": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_matrix_is_that_of_the_module(options):
    q, k, v = random_qkv(2, 4, 40, width=8, key_heads=2)
    mask = torch.arange(40) < torch.tensor([[40], [29]])
    options = {"near": lln.Near(8, joint=True), **options}
    core = LLNAttention(4, 8, num_kv_heads=2, **options).double().eval()
    with attention_calls(core, samples=2) as calls, torch.no_grad():
        core(q, k, v, mask, mask)
    (call,) = calls
    assert call.kernel == "near_far"
    expected = core.attention_matrix(q, k, mask, mask)
    for sample, tokens in ((0, 40), (1, 29)):
        matrix = expected[sample, :, :tokens, :tokens]
        torch.testing.assert_close(call.matrix(sample), matrix, rtol=1e-9, atol=1e-12)
        found = call.measured(["entropy"])["entropy"][sample]
        torch.testing.assert_close(found.double(), entropy(matrix), rtol=1e-5, atol=1e-5)
    share = call.near_share()
    causal = bool(options.get("causal"))
    near = reference.near_field(40, 40, options["near"], key_mask=mask, is_causal=causal)
    mass = (expected * near).sum(-1)
    wanted = torch.stack([mass[0].mean(-1), mass[1, :, :29].mean(-1)])
    torch.testing.assert_close(share, wanted, rtol=1e-9, atol=1e-12)


def test_shares_of_averaged_windows_are_those_of_the_branches():
    q, k, v = random_qkv(1, 2, 40, width=8)
    options = {"near": lln.Near(8, overlap=3, sinks=1), "feature_map": "signs"}
    core = LLNAttention(2, 8, **options).double().eval()
    with attention_calls(core, samples=2) as calls, torch.no_grad():
        core(q, k, v)
    q_far, k_far = core.features(q, k)
    draw = core.draw(q, k)
    linear = lln.attention(q_far, k_far, v, alpha=draw.alpha, beta=draw.beta)
    local = reference.near(q, k, v, block=8, overlap=3, sinks=1, scale=8**-0.5)
    norms = [x.norm(dim=(-2, -1)) for x in (linear, local)]
    torch.testing.assert_close(calls[0].lln_share(), norms[0] / (norms[0] + norms[1]))


def test_the_monitor_tells_the_share_of_near_keys():
    layer = lln.create("lln_nearfar", dim=16, num_heads=2, max_length=40, near=8)
    with lln.instruments.monitor(layer, every=1, measures=["entropy"]) as rows:
        layer(torch.randn(2, 40, 16)).sum().backward()
    assert rows and all(0 < row["near_share"] < 1 for row in rows if row.get("head") is not None)
