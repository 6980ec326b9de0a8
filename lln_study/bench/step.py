"""A training step of RoBERTa-base called from Python: no CUDA graph, no compiler.

The recommended setting beside softmax by SDPA, in one process, in turn.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lln.device.timing import quantiles
from lln.nn import RECOMMENDED
from lln_study.bench.cases import TRAINING, Case
from lln_study.bench.roberta import Setting, Step, seconds_of, training_step

OP = "roberta_step"
TOKENS = 16_384  # of a batch
LENGTHS = (512, 1024, 2048, 4096)
BASE = Setting(layers=12, width=768, heads=12, vocabulary=50_265)
WARMUP, STEPS = 3, 10
# The mechanism and its options, by implementation.
COMPARED: dict[str, tuple[str, dict[str, Any]]] = {
    "sdpa": ("softmax", {}),
    "recommended": ("lln_diag", dict(RECOMMENDED)),
}


def step_cases(lengths: Sequence[int] = LENGTHS, device: str = "cuda") -> list[Case]:
    """Both mechanisms at every length, as many tokens in all."""
    heads = {"H": BASE.heads, "D": BASE.width // BASE.heads, "dtype": "bfloat16"}
    return [
        Case(OP, impl, n, TRAINING, B=TOKENS // n, device=device, **heads)
        for n in lengths
        for impl in COMPARED
    ]


def step_of(case: Case, *, base: Setting = BASE) -> Step:
    """A model in training with the attention of a case, without dropout, in bfloat16."""
    attention, options = COMPARED[case.impl]
    setting = replace(base, tokens=case.N, batch=case.B)
    return training_step(
        attention, setting, case.device, options=options, dropout=0.0, autocast=True
    )


def milliseconds(case: Case, *, base: Setting = BASE, steps: int = STEPS) -> list[float]:
    """Of a step, forward, backward and AdamW, at 20, 50 and 80 %."""
    try:
        made = step_of(case, base=base)
        seconds = [seconds_of(made, case.device) for _ in range(WARMUP + steps)][WARMUP:]
    finally:
        made = None
        gc.collect()  # the model, whose parts know each other
        if case.device.startswith("cuda"):
            torch.cuda.empty_cache()
    found = quantiles(seconds)
    return [found.ms_p20, found.ms_p50, found.ms_p80]
