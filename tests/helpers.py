"""What the tests of the ops share: inputs, the float64 oracle, and one rule for tolerances."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lln.ops.window.near import Near
from lln.protocols import compute_dtype

LENGTHS = (1, 17, 63, 100, 257)


def windowed(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An op of the near field that takes block, overlap, sinks and scale, as implementations do."""

    @functools.wraps(op)
    def run(*args, near: Near | None = None, **options):
        names = ("block", "overlap", "sinks", "scale")
        given = {name: options.pop(name) for name in names if name in options}
        return op(*args, near=near or Near.of_op(given), **options)

    return run


def assert_matches(
    name: str, got: Tensor, plain: Tensor, exact: Tensor, factor: float = 2.0
) -> None:
    """`got` may be `factor` times worse than the plain formula in its own dtype, plus rounding."""
    assert got.shape == exact.shape, f"{name}: shape {got.shape} instead of {exact.shape}"
    assert got.isfinite().all(), f"{name}: not finite"
    if exact.numel() == 0:
        return
    # Operands are of order one: even an exact zero is computed from them to a few roundings.
    accumulated = 16 * torch.finfo(compute_dtype(got)).eps * max(1.0, exact.abs().max().item())
    rounding = torch.finfo(got.dtype).eps * exact.abs().max().item()
    allowed = factor * ((plain - exact).abs().max().item() + accumulated) + rounding
    error = (got - exact).abs().max()
    assert error <= allowed, f"{name}: max error {error:.2e} exceeds {allowed:.2e}"


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """Whatever waits for the CUDA device raises."""

    def switch(mode: str) -> None:
        with warnings.catch_warnings():  # that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode(mode)

    switch("error")
    try:
        yield
    finally:
        switch("default")


def relative_error(got: Tensor, exact: Tensor) -> float:
    """‖got − exact‖ / ‖exact‖ in float64; not finite in `got` counts as infinite."""
    if not got.isfinite().all():
        return float("inf")
    norm = exact.double().norm()
    return ((got.double() - exact).norm() / norm).item() if norm > 0 else got.double().norm().item()


def random_qkv(
    batch=2,
    heads=2,
    queries=17,
    keys=None,
    width=8,
    value_width=None,
    *,
    key_heads=None,
    dtype=torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    keys = queries if keys is None else keys
    key_heads = heads if key_heads is None else key_heads
    return (
        torch.randn(batch, heads, queries, width, dtype=dtype),
        torch.randn(batch, key_heads, keys, width, dtype=dtype),
        torch.randn(batch, key_heads, keys, value_width or width, dtype=dtype),
    )


def random_scales(batch: int, heads: int, key_heads: int, dtype=torch.float64):
    """alpha [B, H], beta [B, Hkv] of the size that moment matching gives."""
    return (
        1 + 2 * torch.rand(batch, heads, dtype=dtype),
        1 + 2 * torch.rand(batch, key_heads, dtype=dtype),
    )


def run_with_grads(
    op: Callable[..., Tensor], tensors: dict[str, Tensor], d_out: Tensor
) -> dict[str, Tensor]:
    """`out` and the gradient of every tensor, for op(**tensors)."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out = op(**leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), d_out.to(out.dtype))
    named = zip((f"d_{name}" for name in leaves), grads, strict=True)
    return {"out": out.detach(), **dict(named)}


def adversarial(name: str, queries: int, width: int, heads: int = 2) -> tuple[Tensor, ...]:
    """Inputs in float64 that break the obvious implementations."""
    q, k, v = random_qkv(1, heads, queries, width=width)
    if name == "outlier_channel":
        k[..., 0] += 60
        q[..., 0] -= 60
    elif name == "outlier_entry":
        k[:, :, queries // 3, 1] += 60
    elif name == "late_outlier_key":
        k[:, :, queries * 4 // 5] += 60
    elif name == "drifting_keys":
        k = k + torch.linspace(0, 80, queries, dtype=k.dtype)[:, None]
    elif name == "scale_1e2":
        q, k = q * 1e2, k * 1e2
    elif name == "scale_1e3":
        q, k = q * 1e3, k * 1e3
    elif name != "gaussian":
        raise ValueError(name)
    return q, k, v


ADVERSARIAL = (
    "gaussian",
    "outlier_channel",
    "outlier_entry",
    "late_outlier_key",
    "drifting_keys",
    "scale_1e2",
    "scale_1e3",
)
