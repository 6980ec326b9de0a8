"""Time and memory of a training step against the length: a row per length, "OOM" included."""

from __future__ import annotations

import dataclasses
import gc

import torch

from lln.study.sweep.jobs import Key, Place, Spec
from lln.study.tasks import mlm
from lln.study.train.runlog import has_row


def keys(spec: Spec, place: Place) -> list[Key]:
    found = []
    for config in _configs(spec):
        # How a step is launched does not change what it computes, but how long it takes.
        manner = {"compiled": config.train.compile, "recorded": config.train.graph}
        settings = {**mlm.Timed(config).settings, **manner}
        found.append((config.train.digest(settings), config.train.seed))
    return found


def run(spec: Spec, place: Place) -> None:
    for config, (digest, seed) in zip(_configs(spec), keys(spec, place), strict=True):
        if has_row(place.results("step"), digest, seed):
            continue
        row = mlm.throughput(config)
        place.add("step", {**row, "digest": digest, "sdpa_backend": _backend(config)})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _configs(spec: Spec) -> list[mlm.MLMConfig]:
    """One per length, as :func:`lln.study.tasks.mlm.throughput` will change them."""
    fields = {name: value for name, value in spec.items() if name != "lengths"}
    whole = [mlm.configure(**fields, length=length) for length in spec["lengths"]]
    quiet = {"eval_every": 0, "save_every": 0, "keep": 0, "monitor_every": 0}
    return [
        dataclasses.replace(config, train=dataclasses.replace(config.train, **quiet))
        for config in whole
    ]


def _backend(config: mlm.MLMConfig) -> str | None:
    """Which kernel of scaled_dot_product_attention softmax takes on this machine."""
    if config.train.attention != "softmax" or not torch.cuda.is_available():
        return None
    from torch.nn.attention import SDPBackend

    half = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    shape = (config.train.batch_size, config.heads, config.length, config.width // config.heads)
    q = torch.empty(shape, device="cuda", dtype=half[config.train.precision], requires_grad=True)
    chosen = torch._fused_sdp_choice(q, q, q)  # pyright: ignore[reportPrivateImportUsage]
    return SDPBackend(chosen).name.lower()
