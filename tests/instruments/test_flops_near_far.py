"""Near and far keys are counted as what they are: windows and a state."""

from __future__ import annotations

import torch

import lln
from lln.instruments import flop_counter


def test_windows_sinks_and_the_far_state_are_counted():
    q, k, v = torch.randn(3, 1, 2, 96, 16).unbind()
    options = {"alpha": 1.0, "beta": 1.0, "gamma": 0.0}
    with flop_counter() as counter:
        lln.attention(q, k, v, near=lln.Near(8, overlap=4, sinks=2, joint=True), **options)
    near = 2 * 2 * 96 * (8 + 2 * 4 + 2) * (16 + 16)
    far = 2 * 2 * 2 * 96 * 16 * 16
    assert counter.get_total_flops() == near + far
