"""On the meta device: shapes without memory, and a proof that no mechanism waits for its device.

A tensor of "meta" has no values. What reads one on the host fails here, and on a GPU it would wait
for it and could not be recorded as a CUDA graph; so would a tensor that is made on the CPU.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lln
from lln_study.tasks.models.lra import Classifier, LRASizes

SIZES = {"vocabulary": 256, "length": 256, "classes": 10}


class NothingFromTheHost(TorchDispatchMode):
    """Every operator must find all of its tensors on one device, and scalars aside nothing else."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        devices = {x.device.type for x in args if isinstance(x, torch.Tensor) and x.dim()}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        assert len(devices) <= 1, f"{func} between {' and '.join(sorted(devices))}"
        return func(*args, **kwargs)


def test_the_watch_sees_what_comes_from_the_host():
    x = torch.empty(3, device="meta")
    with NothingFromTheHost():
        with pytest.raises(AssertionError, match="between cpu and meta"):
            x + torch.arange(3).to("meta")
        with pytest.raises(RuntimeError, match="meta"):
            x.sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("attention", lln.list_mechanisms())
def test_no_update_asks_anything_of_the_host(attention):
    # the curves of "entropy" come as a few numbers from the host, which waits for nothing
    options = {"method": "paper"} if attention == "lln_nearfar" else {}
    model = Classifier(LRASizes(attention=attention, options=options, **SIZES)).to("meta")
    tokens = torch.empty(2, SIZES["length"], dtype=torch.uint8, device="meta")
    with NothingFromTheHost():
        scores = model(tokens)
        scores.sum().backward()
    assert scores.shape == (2, SIZES["classes"])
    assert all(x.grad is not None and x.grad.is_meta for x in model.parameters())


@pytest.mark.parametrize(
    "options",
    [{}, {"near": 16}, {"method": "entropy"}, {"normalize_keys": True},
     {"is_causal": True, "alpha": 2.0, "beta": 2.0},
     {"is_causal": True, "near": 16, "alpha": 2.0, "beta": 2.0}],
    ids=lambda options: ",".join(options) or "plain",
)  # fmt: skip
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_attention_has_its_shapes(options, masked):
    q, k, v = (torch.empty(2, 4, 100, 32, device="meta", requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 100, dtype=torch.bool, device="meta") if masked else None
    # curves are evaluated with numbers where a graph is recorded; elsewhere a small table is sent
    quiet = contextlib.nullcontext() if "method" in options else NothingFromTheHost()
    with quiet:
        out = lln.attention(q, k, v, key_mask=mask, **options)
        found = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.is_meta and x.shape == q.shape for x in (out, *found))
