"""Training on a GPU: the same masks, the curve of the CPU, resumed runs, compiled and recorded."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from lln.texts import bundled as data
from lln_study.data.mlm import Masking
from lln_study.tasks import mlm
from tests.lln_study.train.processes import curve, finish, start

pytestmark = pytest.mark.gpu

RUN = {"steps": 12, "batch_size": 8, "log_every": 2, "eval_every": 4, "save_every": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    whole = data.text()
    (folder / "small_train.txt").write_text(whole[:40_000])
    (folder / "small_valid.txt").write_text(whole[40_000:44_000])
    return folder


@pytest.fixture(autouse=True)
def own_cache(place, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(place / "cache"))


def run(place, folder, **changes) -> list[dict]:
    config = mlm.configure("roberta-tiny", **{**RUN, "graph": False, **changes})
    encoded = mlm.load(place, **mlm.reads(config))
    mlm.run(config, encoded, folder=folder, tensorboard=False)
    return curve(folder)


def close(rows, others, tolerance: float) -> None:
    for row, other in zip(rows, others, strict=True):
        assert row["step"] == other["step"]
        assert row["loss"] == pytest.approx(other["loss"], rel=tolerance)


def test_masks_are_those_of_the_cpu():
    ids = torch.randint(5, 1000, (8, 128), generator=torch.Generator().manual_seed(0))
    masking = Masking(1000, seed=1)
    here, there = masking.hide(ids, 3, 16), masking.hide(ids.cuda(), 3, 16)
    assert all(torch.equal(there[name].cpu(), here[name]) for name in here)


@pytest.mark.parametrize("attention", ["softmax", "lln_diag"])
@pytest.mark.parametrize("batches", ["packed", "padded"])
def test_the_curve_is_that_of_the_cpu(place, tmp_path, attention, batches):
    changes = {"attention": attention, "batches": batches}
    there = run(place, tmp_path / "cuda", **changes)
    close(run(place, tmp_path / "graph", **changes, graph=True), there, 1e-3)
    words = [f"--set={name}={value}" for name, value in {**RUN, "batches": batches}.items()]
    places = (f"--attention={attention}", f"--data={place}", f"--out={tmp_path / 'cpu'}")
    command = ("-m", "lln.cli.app", "train", "mlm", *words, *places)
    finish(start(*command, CUDA_VISIBLE_DEVICES=""))
    close(there, curve(tmp_path / "cpu"), 1e-3)


def test_half_precision_has_its_loss_scale(place, tmp_path):
    exact = run(place, tmp_path / "fp32")
    close(run(place, tmp_path / "bf16", precision="bf16"), exact, 1e-2)
    half = run(place, tmp_path / "fp16", precision="fp16", graph=True)
    close(half, exact, 1e-2)
    assert all(row["loss_scale"] >= 1 for row in half if row["kind"] == "train")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("graph", [False, True])
def test_an_update_without_a_finite_gradient_is_left_out(
    place, tmp_path, monkeypatch, precision, graph
):
    """Also by a recorded update, which cannot ask."""
    batch, loss = mlm.MLM.batch, mlm.MLM.loss

    def with_factor(self, step, rows):
        factor = math.nan if step in (1, 8, 9) else 1.0
        return {**batch(self, step, rows), "factor": torch.tensor(factor)}

    def times_factor(self, model, given):
        given = dict(given)
        factor = given.pop("factor")
        total, terms = loss(self, model, given)
        return total * factor, terms

    monkeypatch.setattr(mlm.MLM, "batch", with_factor)
    monkeypatch.setattr(mlm.MLM, "loss", times_factor)
    rows = run(place, tmp_path, precision=precision, graph=graph)
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["skipped"] for row in trained] == [1, 0, 0, 0, 2, 0]
    assert trained[4]["loss"] is None and math.isfinite(rows[-1]["loss"])
    weights = load_file(tmp_path / "last" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


def test_products_are_exact_again_after_a_run_of_half_precision(place, tmp_path):
    run(place, tmp_path / "bf16", precision="bf16")
    assert torch.get_float32_matmul_precision() == "highest"


def test_an_interrupted_run_continues(place, tmp_path):
    whole = run(place, tmp_path / "whole", graph=True)
    run(place, tmp_path / "cut", graph=True)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000012")
    close(run(place, tmp_path / "cut", graph=True), whole, 1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_run_has_the_same_curve(place, tmp_path):
    plain = run(place, tmp_path / "plain")
    close(run(place, tmp_path / "compiled", compile=True, graph=True), plain, 1e-2)
