"""Several processes with the same global batch have the curve of one."""

from __future__ import annotations

import pytest
import torch

from lln_study.train.loop import train
from tests.lln_study.train.processes import curve, finish_all, start_ranks, weights
from tests.lln_study.train.toy import Toy, toy_config
from tests.waiting import HANGS

# The thread of the exchange is the last to hold x, and takes a while to let go of it.
LEAVING = """
import time, torch
from lln_study.train import processes
class Slow:
    def __del__(self):
        time.sleep(0.6)
def exchange():
    group = processes.join()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    x = torch.ones(3)
    if group.rank == 0:
        x.slow = Slow()
        torch.distributed.all_reduce(x, async_op=True)
        del x
        time.sleep(0.5)
    else:
        time.sleep(0.3)
        torch.distributed.all_reduce(x)
        time.sleep(0.6)
exchange()
processes.leave()
"""
TOY = ("-m", "tests.lln_study.train.toy")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train(Toy(toy_config()), toy_config(), folder, tensorboard=False)
    return folder


def close(folder, other) -> None:
    mine, theirs = curve(folder), curve(other)
    assert len(mine) == len(theirs) > 6
    for row, wanted in zip(mine, theirs, strict=True):
        assert row["step"] == wanted["step"] and row["kind"] == wanted["kind"]
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        if row["kind"] == "train":
            assert row["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-4)
    a, b = weights(folder), weights(other)
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        pytest.param(("accumulation=2",), marks=pytest.mark.slow),
        pytest.param(("shard=True",), marks=pytest.mark.slow),
        pytest.param(("shard=True", "accumulation=2"), marks=pytest.mark.slow),
    ],
    ids=["ddp", "ddp-accumulation", "fsdp2", "fsdp2-accumulation"],
)
def test_two_processes_equal_one(alone, tmp_path, settings):
    said = finish_all(start_ranks(2, *TOY, str(tmp_path), *settings))
    assert f"done 12 on 2 sharded={'shard=True' in settings}" in said
    close(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("shard=True",)], ids=["ddp", "fsdp2"])
def test_two_processes_continue_what_one_began(alone, tmp_path, settings):
    import shutil

    shutil.copytree(alone, tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000012")
    finish_all(start_ranks(2, *TOY, str(tmp_path / "run"), *settings))
    close(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_is_refused(tmp_path):
    for process in start_ranks(2, *TOY, str(tmp_path), "batch_size=7"):
        said, _ = process.communicate(timeout=HANGS)
        assert process.returncode != 0
        assert "batch_size=7 cannot be shared by 2 processes" in said
        assert "choose a multiple of 2" in said


@pytest.mark.slow
def test_leaving_waits_for_threads_that_still_hold_tensors():
    """Else the interpreter ends under them and aborts: the end of a good run read as a failure."""
    finish_all(start_ranks(2, "-c", LEAVING))
