"""Trials of tiles: what is tried, that nothing stays changed, how rows compare."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from lln.cli.app import app
from lln.ops.common.kernels import tiles
from lln_study.bench.kernels import tiles as trials

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kernel", trials.USED_BY)
def test_the_tile_in_use_comes_first_and_every_tile_once(kernel, width):
    found = [trial.tile for trial in trials.trials(kernel, width)]
    assert found[0] == trials.current(kernel, width)
    assert len(found) == len(set(found)) > 4
    now = found[0]
    assert now._replace(programs=now.programs + 1) in found[1:]
    if kernel in trials.FIXED_ROWS:
        assert {tile.rows for tile in found} == {found[0].rows}


def test_every_kernel_of_the_table_can_be_tried():
    assert set(trials.USED_BY) == set(tiles.HALF)


def test_a_tile_is_used_inside_and_gone_afterwards():
    before = {name: dict(table) for name, table in tiles.HALF.items()}
    other = trials.Trial("read", 48, tiles.Tile(32, 2, 1, 1))
    with pytest.raises(RuntimeError, match="broken"), trials.using(other):
        assert tiles.tile("read", 48, 64, torch.float16, CPU) == other.tile
        assert tiles.tile("read", 128, 128, torch.float16, CPU) == before["read"][128]
        raise RuntimeError("broken")
    assert before == tiles.HALF
    assert tiles.tile("read", 48, 64, torch.float16, CPU) == before["read"][64]


def test_rows_compare_with_the_tile_in_use_and_say_why_one_failed():
    wanted = trials.trials("diag_backward", 64)[:4]
    times = dict(zip(wanted, (0.4, 0.2, None, 0.8), strict=True))

    def timer(trial):
        if times[trial] is None:
            raise ValueError("out of resource: shared memory")
        return times[trial]

    found = list(trials.rows(wanted, timer))
    assert [row["gain"] for row in found] == [1.0, 2.0, None, 0.5]
    assert [row["in_use"] for row in found] == [True, False, False, False]
    assert "shared memory" in found[2]["error"]
    shown = trials.table(found, best=1)
    assert shown.row_count == 2  # the fastest, and the one in use


def test_an_unknown_kernel_is_named():
    done = CliRunner().invoke(app, ["bench", "tiles", "--kernel", "write"])
    assert done.exit_code == 2
    assert "diag_backward" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_there_is_instead():
    done = CliRunner().invoke(app, ["bench", "tiles", "--kernel", "read"])
    assert done.exit_code == 1
    assert "lln bench resources" in done.output


@pytest.mark.gpu
def test_a_trial_on_a_gpu():
    first, *_ = trials.trials("read", 64)
    assert trials.measure(first) > 0
