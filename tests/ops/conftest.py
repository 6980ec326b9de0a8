"""Uninitialised memory is NaN under the tests of the ops: an entry nobody wrote is seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    if torch.cuda.is_available():
        yield  # deterministic mode refuses some CUDA ops of the reference
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
