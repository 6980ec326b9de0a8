"""A training step of RoBERTa-base called from Python: no CUDA graph, no compiler.

The recommended setting beside softmax by SDPA, in one process, in turn.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lln.nn import RECOMMENDED
from lln.study.bench import sweep
from lln.study.bench.cases import TRAINING
from lln.study.bench.roberta import Setting, seconds_of, training_step
from lln.study.bench.timing import quantiles

TOKENS = 16_384  # of a batch
LENGTHS = (512, 1024, 2048, 4096)
BASE = Setting(layers=12, width=768, heads=12, vocabulary=50_265)
WARMUP, STEPS = 3, 10
# The mechanism and its options, by implementation.
COMPARED: dict[str, tuple[str, dict[str, Any]]] = {
    "sdpa": ("softmax", {}),
    "recommended": ("lln_diag", dict(RECOMMENDED)),
}


def rows(
    watch: Callable[[str], None] = lambda _: None,
    *,
    base: Setting = BASE,
    tokens: int = TOKENS,
    lengths: Sequence[int] = LENGTHS,
    device: str = "cuda",
    steps: int = STEPS,
) -> Iterator[sweep.Row]:
    """A row per length and mechanism: milliseconds of a step, forward, backward and AdamW."""
    for length in lengths:
        setting = replace(base, tokens=length, batch=max(1, tokens // length))
        for impl, (attention, options) in COMPARED.items():
            watch(f"RoBERTa-base step {impl} N={length} B={setting.batch}")
            yield measure(impl, attention, options, setting, device=device, steps=steps)


def measure(
    impl: str, attention: str, options: dict[str, Any], setting: Setting, *, device: str, steps: int
) -> sweep.Row:
    """One row; a step that cannot run gives one that says why."""
    row: sweep.Row = {
        "op": "roberta_step", "impl": impl, "pass": TRAINING, "B": setting.batch,
        "H": setting.heads, "N": setting.tokens, "D": setting.width // setting.heads,
        "dtype": "bfloat16", "launch": "eager", "ms_p20": None, "ms_p50": None, "ms_p80": None,
        "peak_mb": None, "floor_share": None, "error": "",
    }  # fmt: skip
    try:
        made = training_step(
            attention, setting, device, options=options, dropout=0.0, autocast=True
        )
        seconds = [seconds_of(made, device) for _ in range(WARMUP + steps)][WARMUP:]
        found = quantiles(seconds)
        times = {"ms_p20": found.ms_p20, "ms_p50": found.ms_p50, "ms_p80": found.ms_p80}
        row |= {name: round(ms, 3) for name, ms in times.items()}
    except Exception as error:  # a row that says why, not a lost run
        row["error"] = (str(error) or type(error).__name__).splitlines()[0][:200]
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return row
