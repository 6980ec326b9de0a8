"""DTensors on a 2 × 2 mesh equal one process, output and gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.mesh_worker import CASES, MODULES, TENSOR_PARALLEL, TRAINED
from tests.distributed.processes import run

pytestmark = pytest.mark.slow  # starts eight processes

ROUNDING = 1e-12  # of sums in float64, in another order


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    return run("tests.distributed.mesh_worker", tmp_path_factory.mktemp("mesh"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shards_equal_one_process(results, case):
    for result in results:
        assert result["errors"][case.name] < ROUNDING


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_the_gradients_of_one_process(results, name):
    for result in results:
        assert result["modules"][name] < ROUNDING


@pytest.mark.parametrize("name", TRAINED)
def test_running_statistics_are_those_of_the_whole_batch(results, name):
    """They are kept in float32."""
    for result in results:
        assert result["trained"][name] < 1e-6


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_layers_are_parallelized_by_torch(results, name):
    for result in results:
        assert result["tensor parallel"][name] < ROUNDING


def test_nobody_waits_for_a_process_that_needs_no_gradient(results):
    assert max(result["frozen"] for result in results) < ROUNDING


REFUSALS = {
    "plain": "k is a plain tensor and another of q, k, v is a DTensor",
    "partial": "q is a Partial sum on dimension 'inner' of the mesh; add it up first",
    "width": "the width of q is split on dimension 'inner'",
    "others": "batch, heads or tokens must be split alike: k.redistribute",
    "key heads": "1 key heads cannot be split over 2 processes beside 4 query heads",
    "blocks": "16 tokens are split into [8, 8] with near=Near(16",
    "scale": "alpha has shape [2, 4, 16, 8]; pass a number",
    "dropout": "dropout is refused for DTensors",
    "running": "joint=True and statistics='running' while training is refused for DTensors",
    "map": "feature_map with statistics='sample' is refused for DTensors",
    "conv": "conv=3 looks at neighbours of a token",
    "weights": "leave them out, with need_weights=False",
    "linear": "HeadParallel is for lln.nn.LLNMultiheadAttention, not Linear",
    "odd heads": "1 heads cannot be split over a mesh of (2,) processes",
    "mesh": "group is a mesh of 2 dimensions ('outer', 'inner')",
}


def test_layouts_that_cannot_work_are_refused_on_every_process(results):
    for result in results:
        assert result["refusals"].keys() == REFUSALS.keys()
        for name, words in REFUSALS.items():
            assert words in result["refusals"][name], name
