"""Result rows of ViT and Long Range Arena runs, made up."""

from __future__ import annotations

import json
from typing import Any

FACTS: dict[str, Any] = {
    "device": "A GPU",
    "torch": "2.11",
    "triton": "3.6",
    "transformers": "5.17",
    "commit": "abc123",
    "date": "2026-11-15T08:00:00+00:00",
    "seconds": 10.0,
    "parameters": 2_500_000,
    "step_ms": 12.0,
    "peak_mb": 900.0,
}
VIT = {"recipe": "paper", "layers": 12, "width": 128, "heads": 8, "patch": 4, "side": 64}
VIT |= {"length": 257, "steps": 5000, "batch_size": 256, "precision": "bf16"}
VIT |= {"classes": ["cat", "dog"], "data": "dogs_vs_cats_64.npz"}
VIT |= {"examples": {"train": 20000, "valid": 2500, "test": 2500}}
LRA = {"layers": 2, "width": 64, "heads": 2, "pool": "padded", "precision": "bf16", "steps": 5000}
LRA |= {"batch_size": 32, "data": "generated", "examples": {"train": 9}, "compile": True}


def row(subject: str, mechanism: str, configuration: dict, seed: int = 0, **metrics) -> dict:
    digest = json.dumps([subject, mechanism, configuration], sort_keys=True)
    return {
        "subject": subject,
        "mechanism": mechanism,
        "seed": seed,
        "configuration": configuration,
        "digest": digest,
        **FACTS,
        **metrics,
    }


def vit(mechanism, accuracy, *, valid=None, rate=1e-3, options=None, seed=0, curves=None, **more):
    configuration = {**VIT, "learning_rate": rate, "options": options or {}, **more}
    metrics = {"accuracy": accuracy, "valid_accuracy": accuracy if valid is None else valid}
    return row("vit", mechanism, configuration, seed, curves=curves or {}, **metrics)


def lra(mechanism, task, accuracy, *, valid=None, rate=1e-3, options=None, seed=0, **more):
    configuration = {**LRA, "task": task, "learning_rate": rate, "options": options or {}, **more}
    metrics = {"accuracy": accuracy, "valid_accuracy": accuracy if valid is None else valid}
    return row("lra", mechanism, configuration, seed, **metrics)


def timed(mechanism, task, ms, mb=500.0, data_mb=100.0, options=None):
    configuration = {**LRA, "task": task, "options": options or {}}
    metrics = {"step_ms": ms, "peak_mb": mb, "data_mb": data_mb, "out_of_memory": ms is None}
    return row("lra_step", mechanism, configuration, **metrics)


def fixed(scale: float) -> dict[str, Any]:
    return {"statistics": "fixed", "alpha": scale, "beta": scale}


def write(folder, rows, name: str = "rows") -> None:
    text = "".join(json.dumps(each) + "\n" for each in rows)
    (folder / f"{name}.jsonl").write_text(text)
