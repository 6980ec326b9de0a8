"""Decoding through the public function takes the one-launch kernel and gives the causal outputs."""

from __future__ import annotations

import pytest
import torch

import lln
from lln.ops import triton as kernels


def accept_the_device(monkeypatch, device: str) -> None:
    """Let the dispatch take the kernels on a CPU; on a GPU it does, and Triton must not see it."""
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("normalize_keys", [False, True])
def test_decode_loop_equals_the_causal_op(monkeypatch, device, normalize_keys):
    accept_the_device(monkeypatch, device)
    calls, launch = [], kernels.decode
    monkeypatch.setattr(kernels, "decode", lambda *a, **o: calls.append(1) or launch(*a, **o))
    q = torch.randn(2, 4, 6, 16, device=device)
    k, v = torch.randn(2, 2, 2, 6, 16, device=device)
    mask = torch.rand(2, 6, device=device) > 0.3
    options = {"alpha": 1.5, "beta": 2.0, "normalize_keys": normalize_keys}
    whole = lln.attention(q, k, v, is_causal=True, key_mask=mask, impl="eager", **options)
    state, steps = lln.State.empty(2, 2, 16, device=device), []
    for t in range(6):
        now = slice(t, t + 1)
        out, state = lln.prefill(
            q[:, :, now], k[:, :, now], v[:, :, now], state, key_mask=mask[:, now], **options
        )
        steps.append(out)
    torch.testing.assert_close(torch.cat(steps, 2), whole, rtol=1e-5, atol=1e-5)
    assert len(calls) == 6


def test_gradients_still_flow_through_a_step(monkeypatch, device):
    accept_the_device(monkeypatch, device)
    q, k, v = (torch.randn(1, 2, 1, 16, device=device, requires_grad=True) for _ in range(3))
    state = lln.summarize(k.detach() * 2, v.detach(), beta=2.0)
    out, _ = lln.prefill(q, k, v, state, alpha=1.5, beta=2.0)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()
