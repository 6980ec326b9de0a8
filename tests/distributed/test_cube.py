"""FSDP2, tensor and context parallel on one mesh of eight processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cube_worker import PROCESSES, WAYS
from tests.distributed.processes import run

pytestmark = pytest.mark.slow  # eight processes import torch


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cube")
    return run("tests.distributed.cube_worker", folder, PROCESSES)


@pytest.mark.parametrize("way", WAYS)
def test_all_three_have_the_gradients_of_one_process(results, way):
    assert len(results) == 8
    for result in results:
        assert result[way] < 1e-12
