"""What torch.compile makes of a module, compared with the module itself."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn


def check_generated_code(
    module: nn.Module, *inputs: Tensor, tolerance: float, backend: str = "inductor"
) -> None:
    """Output and every gradient are equal; inputs with floats have one, too."""
    torch.compiler.reset()
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, e.g. about complex numbers in TNN
        for run in (torch.compile(module, backend=backend), module):
            own = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
            out = run(*own)
            weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
            wanted = {f"input {i}": x for i, x in enumerate(own) if x.requires_grad}
            wanted |= dict(module.named_parameters())
            gradients = torch.autograd.grad((weights * out).sum(), wanted.values())
            found.append({"out": out.detach(), **dict(zip(wanted, gradients, strict=True))})
    compiled, eager = found
    largest = max(gradient.norm() for gradient in eager.values())
    for what, exact in eager.items():
        error = (compiled[what] - exact).norm() / (exact.norm() + 1e-4 * largest)
        assert error < tolerance, f"{what}: {error:.1e}"
