"""The kernels run in Triton's interpreter where there is no GPU; nothing is skipped."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import lln.ops.triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def import_interpreted() -> None:
    """Triton reads the variable when it is imported and when a kernel is decorated, not later."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with suppress(ImportError):  # imported at the first launch otherwise
            importlib.import_module("triton.experimental.gluon")
        for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
            importlib.import_module(module.name)
    finally:
        del os.environ["TRITON_INTERPRET"]  # the dispatch of other tests must not see it


if DEVICE == "cpu":
    import_interpreted()


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def no_kernel_leaves_its_tensors() -> Iterator[None]:
    """Of the interpreter; a GPU would notice only by chance."""
    if DEVICE != "cpu":
        yield
        return
    from tests.ops.triton.bounds import guarded

    with guarded():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """NumPy warns of the infinities that the interpreter meets on purpose; where there is a GPU the
    same tests belong to ``make test-gpu``."""
    quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
    # the first backward pass of a process may meet a thread that has no context yet
    context = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(quiet)
            if DEVICE == "cuda":
                item.add_marker(pytest.mark.gpu)
                item.add_marker(context)
