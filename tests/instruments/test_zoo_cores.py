"""The monitor and the zoo: mechanisms that are neither softmax nor LLN tell their own matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lln
from lln.instruments import MEASURES, entropy, monitor, spectral_gap
from lln.instruments.recording.recorder import attention_calls
from lln.mechanisms import KNOWN
from tests.instruments.training import of_heads

DISTRIBUTIONS = ("performer", "elu", "cosformer", "relu_linear", "sliding_window")
SIGNED = ("linformer", "nystromformer", "skyformer", "rfa")


def layer(name: str, **options) -> nn.Module:
    return lln.create(name, dim=32, num_heads=4, max_length=20, **options).train()


def with_padding() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, 14:] = False
    return torch.randn(2, 20, 32), mask


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_measures_are_those_of_the_true_matrix(name):
    module = layer(name)
    x, mask = with_padding()
    with monitor(module, every=1, measures=["entropy", "spectral_gap", "temperature"]) as rows:
        module(x, mask).sum().backward()
    p = module.attention_matrix(x, mask)[0, :, :14, :14].detach()
    p = torch.where((p == 0).all(-1, keepdim=True), 1 / 14, p)  # where the kernel vanishes
    found = of_heads(rows)
    assert [(row["kernel"], row["head"], row["tokens"]) for row in found] == [
        (name, head, 14) for head in range(4)
    ]
    for measure, expected in (("entropy", entropy(p)), ("spectral_gap", spectral_gap(p))):
        values = torch.tensor([row[measure] for row in found])
        assert torch.allclose(values, expected, atol=1e-5), measure
    assert all(row["temperature"] > 0 and row["sigma_q"] > 0 for row in found)


def test_causal_cores_are_measured_as_such():
    module = layer("elu", causal=True)
    x = torch.randn(1, 20, 32)
    with monitor(module, every=1, measures=["entropy"]) as rows:
        module(x).sum().backward()
    expected = entropy(module.attention_matrix(x)[0].detach())
    assert all(row["causal"] for row in of_heads(rows))
    assert torch.allclose(torch.tensor([row["entropy"] for row in of_heads(rows)]), expected)


@pytest.mark.parametrize("name", SIGNED)
def test_weights_with_signs_have_no_entropy(name):
    module = layer(name, **({"landmarks": 4} if name == "nystromformer" else {}))
    with monitor(module, every=1, measures=list(MEASURES)) as rows:
        module(torch.randn(1, 20, 32)).sum().backward()
    assert len(of_heads(rows)) == 4
    for row in of_heads(rows):
        assert row["kernel"] == name and row["sigma_q"] > 0
        assert all(row[measure] is None for measure in MEASURES)


@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name].core])
def test_every_core_is_seen_once_under_its_name_and_not_disturbed(name):
    options = {"landmarks": 4} if name == "nystromformer" else {}
    module, x = layer(name, **options), torch.randn(1, 20, 32)
    torch.manual_seed(1)
    plain, after = module(x), torch.rand(3)
    torch.manual_seed(1)
    with attention_calls(module) as calls:
        seen = module(x)
    for call in calls:
        call.measured(["entropy"])
    assert torch.equal(seen, plain) and torch.equal(torch.rand(3), after)
    ours = {"lln": "lln", "lln_diag": "lln", "lln_nearfar": "near_far"}
    assert [call.kernel for call in calls] == [ours.get(name, name)]
    assert calls[0].module in ("", "core")
