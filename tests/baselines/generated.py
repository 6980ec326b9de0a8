"""What torch.compile makes of a mechanism, compared with the mechanism itself."""

from __future__ import annotations

import warnings

import torch

from tests.baselines.small import SMALL, make, padded


def check_generated_code(name: str, device: str) -> None:
    """Output and every gradient are equal, for scores that are not all alike.

    Windows are wide: a wrong gradient of overlapping ones showed from 32 tokens on.
    """
    wide = {"window": 32} if "window" in SMALL.get(name, {}) else {}
    module = make(name, **wide).to(device)
    x, mask = (part.to(device) for part in padded(100))
    torch.compiler.reset()
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, e.g. about complex numbers in TNN
        for run in (torch.compile(module), module):
            leaf = (3 * x).requires_grad_()
            out = run(leaf, mask)
            weights = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
            wanted = {"x": leaf, **dict(module.named_parameters())}
            gradients = torch.autograd.grad((weights * out).sum(), wanted.values())
            found.append({"out": out.detach(), **dict(zip(wanted, gradients, strict=True))})
    compiled, eager = found
    largest = max(gradient.norm() for gradient in eager.values())
    for what, exact in eager.items():
        error = (compiled[what] - exact).norm() / (exact.norm() + 1e-4 * largest)
        assert error < 1e-3, f"{what}: {error:.1e}"
