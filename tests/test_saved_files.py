"""What modules save loads into new ones, which then give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lln import Near
from lln.nn import LLNAttention, LLNMultiheadAttention

HEADS, KEY_HEADS, SIZE, TOKENS = 4, 2, 4, 12
NEAR = {"near": Near(4, joint=True)}
CORES: dict[str, dict[str, Any]] = {
    "sample": {"near": 4, "method": "entropy", "mix": "learned", "conv": 3},
    "running": {"statistics": "running", "learn_scale": True, "near": 4},
    "causal": {
        "statistics": "running",
        "causal": True,
        "normalize_keys": True,
    },
    "sharper": {"statistics": "running", "sharpness": 0.7},
    "fixed": {"statistics": "fixed", "alpha": 1.5, "beta": [1.0, 2.0], "learn_scale": True},
    "joint": {
        "statistics": "running",
        "learn_scale": True,
        "near": Near(4, overlap=2, sinks=1, joint=True),
    },
    "joint-fixed": {"statistics": "fixed", "gamma": 0.5, **NEAR},
    "signs": {"statistics": "running", "feature_map": "signs", "center_keys": True, **NEAR},
    "rotations": {"statistics": "running", "feature_map": "rotations", "slots": 8},
    "learned": {"statistics": "running", "feature_map": "learned", "slots": 6},
    "hedgehog": {"statistics": "running", "feature_map": "hedgehog", **NEAR},
}
WHOLE: dict[str, dict[str, Any]] = {
    "running": {
        "statistics": "running",
        "learn_scale": True,
        "near": 4,
        "method": "entropy",
        "mix": "learned",
        "conv": 3,
    },
    "joint": {"statistics": "running", "feature_map": "t2r", **NEAR},
}


def loud(module: nn.Module, scale: float) -> None:
    """Draw parameters so large that each of them counts."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn_like(parameter))


def check(module, fresh, inputs, path) -> None:
    """The file decides, not what a new module happens to hold."""

    def out(of: nn.Module):
        found = of.eval()(**inputs)
        return found[0] if isinstance(found, tuple) else found

    with torch.no_grad():
        wanted = out(module)
        save_file(module.state_dict(), path)
        assert not torch.allclose(out(fresh), wanted)
        fresh.load_state_dict(load_file(path))
        assert torch.equal(out(fresh), wanted)


@pytest.mark.parametrize("options", CORES.values(), ids=CORES)
def test_a_core_that_was_saved_computes_the_same(options, tmp_path):
    shape = {"num_kv_heads": KEY_HEADS, **options}
    core, fresh = (LLNAttention(HEADS, SIZE, **shape) for _ in range(2))
    loud(core, 0.3)
    q, k, v = (torch.randn(2, heads, TOKENS, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [9]])
    if options.get("statistics") == "running":
        for factor in (0.5, 2.0):
            core.train()(factor * q, factor * k, v, mask, mask)
    if options.get("statistics") == "fixed":
        core.calibrate_(q, k, mask, mask)
    inputs = {"q": q, "k": k, "v": v, "key_mask": mask, "query_mask": mask}
    check(core, fresh, inputs, tmp_path / "core.safetensors")


@pytest.mark.parametrize("options", WHOLE.values(), ids=WHOLE)
def test_a_layer_that_was_saved_computes_the_same(options, tmp_path):
    layer, fresh = (LLNMultiheadAttention(8, 2, batch_first=True, **options) for _ in range(2))
    loud(layer, 0.5)
    x = torch.randn(2, TOKENS, 8)
    hidden = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [9]])
    for seen in (0.5 * x, 2.0 * x):
        layer.train()(seen, seen, seen, key_padding_mask=hidden)
    inputs = {"query": x, "key": x, "value": x, "key_padding_mask": hidden}
    check(layer, fresh, inputs, tmp_path / "layer.safetensors")
