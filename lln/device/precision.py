"""TF32 where it is wanted, and exact products of float32 everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32_products(wanted: bool) -> Iterator[None]:
    """Products of float32 matrices in TF32 inside the block if ``wanted``; as before after it."""
    before = torch.get_float32_matmul_precision()
    if wanted:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
