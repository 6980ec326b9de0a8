"""Seeds: a function of purpose, and of nothing that was drawn before."""

from __future__ import annotations

import pytest
import torch

from lln.records.seeds import derived_seed, seed_everything


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", [0, derived_seed(3, "step", 7, 0)])
def test_a_device_is_seeded_as_torch_does_it(device, seed):
    def draw():
        return [torch.rand(5, device=place) for place in ("cpu", device)]

    torch.manual_seed(seed)
    expected = draw()
    torch.manual_seed(1)
    seed_everything(seed, torch.device(device))
    assert all(torch.equal(x, y) for x, y in zip(draw(), expected, strict=True))
