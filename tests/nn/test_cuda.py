"""On a GPU: the numbers of the CPU, and no hidden waiting for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lln.nn import LLNAttention, LLNMultiheadAttention
from tests.helpers import never_waiting
from tests.nn.inputs import embeddings, padding, qkv

pytestmark = pytest.mark.gpu


OPTIONS = [
    {"statistics": "sample", "near": 16},
    {"statistics": "running", "learn_scale": True},
    {"statistics": "running", "causal": True, "near": 16, "mix": "learned"},
    {"statistics": "fixed", "causal": True, "method": "entropy"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_core_matches_the_cpu(options):
    inputs = [x.requires_grad_() for x in qkv(2, 4, 77, 32, kv_heads=2)]
    valid = padding([77, 40], 77)
    core = LLNAttention(4, 32, num_kv_heads=2, **options)
    on_gpu = copy.deepcopy(core).cuda()
    copies = [x.detach().cuda().requires_grad_() for x in inputs]
    for _ in range(2):
        out, got = core(*inputs, valid, valid), on_gpu(*copies, valid.cuda(), valid.cuda())
        torch.testing.assert_close(got.cpu(), out, rtol=1e-3, atol=1e-4)
        out.square().sum().backward()
        got.square().sum().backward()
    for x, y in zip(inputs, copies, strict=True):
        torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=1e-3, atol=1e-3)
    for name, value in core.state_dict().items():
        torch.testing.assert_close(on_gpu.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("train", [True, False])
def test_core_never_waits_for_the_device(options, train):
    q, k, v = qkv(2, 4, 77, 32, kv_heads=2, device="cuda", dtype=torch.bfloat16)
    valid = padding([77, 40], 77).cuda()
    core = LLNAttention(4, 32, num_kv_heads=2, dropout=0.1, **options).cuda().train(train)
    core(q, k, v, valid, valid)  # compiles kernels, uploads tables
    with never_waiting():
        out = core(q, k, v, valid, valid)
    assert out.shape == q.shape


def test_multihead_never_waits_for_the_device():
    layer = LLNMultiheadAttention(64, 4, batch_first=True, statistics="running", device="cuda")
    x = embeddings(2, 33, 64).cuda()
    ignore = torch.zeros(2, 33, device="cuda")
    ignore[1, 20:] = -torch.inf
    mask = nn.Transformer.generate_square_subsequent_mask(33, device="cuda")
    arguments = {"key_padding_mask": ignore, "attn_mask": mask, "is_causal": True}
    layer(x, x, x, **arguments)
    with never_waiting():
        out, _ = layer(x, x, x, **arguments)
    assert out.isfinite().all()


def test_float_padding_reads_everything_but_zero_as_ignore():
    layer = LLNMultiheadAttention(64, 4, batch_first=True, device="cuda").eval()
    x = embeddings(2, 33, 64).cuda()
    ignore = ~padding([33, 20], 33).cuda()
    expected = layer(x, x, x, key_padding_mask=ignore)[0]
    additive = torch.zeros(2, 33, device="cuda").masked_fill(ignore, -1e9)
    torch.testing.assert_close(layer(x, x, x, key_padding_mask=additive)[0], expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch records around our operator
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_checkpointing_trains_as_without(mode):
    """Generated code, with CUDA graphs too, which must not replay a first run as the second."""
    torch._dynamo.reset()
    core = LLNAttention(4, 32, num_kv_heads=2, **OPTIONS[2]).cuda()
    saved = copy.deepcopy(core)
    run = torch.compile(lambda *x: checkpoint(saved, *x, use_reentrant=False), mode=mode)
    for step in range(4):
        given = qkv(2, 4, 77, 32, kv_heads=2, device="cuda", seed=step)
        inputs, copies = ([x.clone().requires_grad_() for x in given] for _ in range(2))
        core(*inputs).square().sum().backward()
        run(*copies).square().sum().backward()
        for x, y in zip(inputs, copies, strict=True):
            torch.testing.assert_close(y.grad, x.grad, rtol=1e-3, atol=1e-3)
    for name, value in core.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], value, rtol=1e-4, atol=1e-5)
