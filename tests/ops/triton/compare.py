"""One comparison for every kernel: outputs and gradients against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.helpers import random_qkv, random_scales, run_with_grads

# Relative error in the Frobenius norm: a few roundings of the dtype of the factors of each dot.
LIMITS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}

# Lengths off every tile, each in one dtype; the GPU suite has the full product.
CASES = [
    (1, torch.float32),
    (1, torch.float16),
    (17, torch.float16),
    (63, torch.float32),
    (100, torch.float16),
    (257, torch.float32),
]


def inputs(
    batch=2, heads=2, queries=100, keys=None, width=32, values=None, *, key_heads=None, device
) -> dict[str, Tensor]:
    """q, k, v, alpha, beta in float64 on the device."""
    q, k, v = random_qkv(batch, heads, queries, keys, width, values, key_heads=key_heads)
    alpha, beta = random_scales(batch, heads, k.shape[1])
    tensors = {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}
    return {name: x.to(device) for name, x in tensors.items()}


def rounded(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What the op is given: queries, keys and values in ``dtype``, the rest in float32."""
    return {n: x.to(dtype if n[0] in "qkv" else torch.float32) for n, x in tensors.items()}


def _largest_product(tensors: dict[str, Tensor]) -> float:
    """The largest |q·k|.

    The backward pass of the softmax branch subtracts a logarithm of the forward pass from scores
    that it sums in another order: at 10⁶ both are off by a quarter.
    """
    q, k = tensors["q"], tensors["k"]
    if not (q.numel() and k.numel()):
        return 0.0
    return (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT).abs().max().item()


def compare(
    op: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    floor: float = 0.0,
    **options,
) -> None:
    """Each result within LIMITS[dtype], or within twice the error of the plain formula.

    ``floor`` is the size per entry below which a result counts as zero: the result of operands of
    order one that cancel. The slopes dα, dβ and that of the mix are sums of terms that nearly
    cancel, each with a factor q or k: they are allowed 20 max(|q|, |k|) times the error.
    """
    given = rounded(tensors, dtype)
    exact_in = {name: x.double() for name, x in given.items()}
    d_out = torch.randn_like(oracle(**exact_in, **options)).to(dtype)
    exact = run_with_grads(lambda **t: oracle(**t, **options), exact_in, d_out.double())
    plain = run_with_grads(lambda **t: oracle(**t, **options), given, d_out)
    got = run_with_grads(lambda **t: op(**t, **options), given, d_out)
    largest = max(
        1.0, *(x.abs().max().item() for n, x in exact_in.items() if n in "qk" and x.numel())
    )
    rounding = torch.finfo(torch.float32).eps  # exponents round too: of features, and of scores
    limit = max(LIMITS[dtype], 32 * rounding * largest)
    if "scale" in options:
        limit = max(limit, rounding / 4 * options["scale"] * _largest_product(exact_in))
    for name in exact:
        # dk, of far keys too: B (v·dM + g), which nearly cancel, and dM has half precision
        rounds = 2 if name in ("d_k", "d_k_far") and dtype.itemsize == 2 else 1
        assert got[name].shape == exact[name].shape, name
        assert got[name].dtype == plain[name].dtype, name
        size = max(exact[name].norm().item(), floor * exact[name].numel() ** 0.5)
        plain_error = (plain[name].double() - exact[name]).norm().item()
        allowed = max(rounds * limit * size, 2 * plain_error)
        if name in ("d_alpha", "d_beta", "d_mix"):
            allowed *= 20 * largest
        error = (got[name].double() - exact[name]).norm().item()
        assert error <= allowed, (
            f"{name}: error {error:.1e} exceeds {allowed:.1e} (size {size:.1e})"
        )
