"""What several tests of measurements need."""

from __future__ import annotations

import pytest

from lln_study.bench.kernels import offline
from lln_study.bench.kernels.offline import CannotCompile


@pytest.fixture
def toolchain() -> None:
    """Kernels can be compiled here; else the test is skipped and says why."""
    pytest.importorskip("triton")
    for name in ("ptxas", "cuobjdump"):
        try:
            offline.tool(name)
        except CannotCompile as error:
            pytest.skip(str(error))
