"""Seeds for every test, profiles for the property tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.in_shards import shard_of

if not torch.cuda.is_available():
    # Triton decides at its import whether kernels can be interpreted; transformers may import it
    # while tests are collected, so it is imported here, before all of them.
    os.environ["TRITON_INTERPRET"] = "1"
    with suppress(ImportError):
        import triton.language  # noqa: F401
    del os.environ["TRITON_INTERPRET"]

settings.register_profile(
    "quick", max_examples=15, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "default", max_examples=40, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "fuzz", max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def memory_for_the_others() -> Iterator[None]:
    """Shards share a GPU: what a large test has taken goes back."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only the tests of this shard; those of the GPU say why they do not run without one."""
    items[:] = items[shard_of(len(items))]
    if torch.cuda.is_available():
        return
    missing = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(missing)
