"""What earlier versions saved loads and gives the same numbers: tests/fixtures/VERSION."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import lln.nn
from lln_study.train import checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = sorted(path for path in FIXTURES.iterdir() if path.name[0].isdigit())
MODULES = [path for version in VERSIONS for path in sorted((version / "modules").iterdir())]
MODELS = [path for version in VERSIONS for path in sorted((version / "models").iterdir())]
CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # float32 on another processor, nothing more


def name(path: Path) -> str:
    return f"{path.parents[1].name}-{path.stem}"


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}


def test_files_of_every_kind_are_kept():
    assert {path.name for path in VERSIONS} >= {"0.1.0"}
    assert len(MODULES) >= 13 and len(MODELS) >= 3
    size = sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file())
    assert size < 300_000


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_modules_load_and_compute_the_same(path):
    about, tensors = metadata(path), load_file(path)
    module = getattr(lln.nn, about["class"])(**json.loads(about["options"])).eval()
    before = {key: x.clone() for key, x in module.state_dict().items()}
    module.load_state_dict(with_prefix(tensors, "state/"), strict=True)
    with torch.no_grad():
        out = module(**with_prefix(tensors, "in/"))
        out = out[0] if isinstance(out, tuple) else out
        torch.testing.assert_close(out, tensors["out"], **CLOSE)
        if before:  # the file decides, not what a new module happens to hold
            module.load_state_dict(before)
            fresh = module(**with_prefix(tensors, "in/"))
            fresh = fresh[0] if isinstance(fresh, tuple) else fresh
            assert not torch.allclose(fresh, tensors["out"], **CLOSE)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: f"{path.parents[1].name}-{path.name}")
def test_hugging_face_folders_load_and_compute_the_same(path):
    transformers = pytest.importorskip("transformers")
    import lln.hf

    expected = load_file(path / "expected.safetensors")
    kind = getattr(transformers, metadata(path / "expected.safetensors")["class"])
    model = lln.hf.load(path, kind).eval()
    batch = {key: expected[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected["logits"], rtol=1e-4, atol=1e-4)
        if "tokens" in expected:
            count = expected["tokens"].shape[1] - batch["input_ids"].shape[1]
            tokens = model.generate(batch["input_ids"], max_new_tokens=count, do_sample=False)
            assert torch.equal(tokens, expected["tokens"])


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_a_training_run_goes_on_where_it_was_killed(version, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from lln_study.tasks import mlm
    from lln_study.train.runfolder import held

    expected = json.loads((version / "training" / "expected.json").read_text())
    folder = tmp_path / "run"
    shutil.copytree(version / "training" / "run", folder)
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    config = mlm.configure("roberta-tiny", **expected["fields"])
    data = mlm.load(version / "training" / "text", **mlm.reads(config))
    assert mlm.key(config, data) == (expected["digest"], expected["seed"])
    kept = folder / "checkpoints" / "step-00000002"
    with held(folder):
        found = checkpoint.newest(folder / "checkpoints", json_identity(folder))
    assert found is not None and found.folder == kept
    row = mlm.run(config, data, folder=folder, tensorboard=False)
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    curve = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curve if line["kind"] == "train"] == [1, 2, 3, 4]
    assert kept.is_dir() and (folder / "last").resolve().name == "step-00000004"


def json_identity(folder: Path) -> str:
    return json.loads((folder / "run.json").read_text())["identity"]
