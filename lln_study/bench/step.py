"""A training step of RoBERTa-base called from Python: no CUDA graph, no compiler.

The recommended setting beside softmax by SDPA, in one process, in turn.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lln.device.timing import quantiles
from lln.nn import RECOMMENDED
from lln_study.bench.cases import TRAINING, Case


@dataclass(frozen=True)
class Setting:
    """Sizes of RoBERTa-base."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_265


BASE = Setting()
OP = "roberta_step"
TOKENS = 16_384  # of a batch
LENGTHS = (512, 1024, 2048, 4096)
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


def update_of(case: Case, *, base: Setting = BASE) -> Callable[[], None]:
    """One update of a model with the attention of a case, without dropout, in bfloat16."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    from lln import hf

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": base.vocabulary,
        "hidden_size": base.width,
        "num_hidden_layers": base.layers,
        "num_attention_heads": base.heads,
        "intermediate_size": 4 * base.width,
        "max_position_embeddings": case.N + 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    with torch.device(case.device):  # where drawing the weights takes no time on a GPU
        model: Any = RobertaForMaskedLM(RobertaConfig(**sizes))
    model.train()
    attention, options = COMPARED[case.impl]
    if attention != "softmax":
        hf.replace(model, attention, quiet=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(5, base.vocabulary, (case.B, case.N), device=case.device)

    def update() -> None:
        with torch.autocast(torch.device(case.device).type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def seconds_of(run: Callable[[], object], device: str) -> float:
    """How long a call takes, to the end of its work on the device."""
    started = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started


def milliseconds(case: Case, *, base: Setting = BASE, steps: int = STEPS) -> list[float]:
    """Of a step, forward, backward and AdamW, at 20, 50 and 80 %."""
    try:
        update = update_of(case, base=base)
        seconds = [seconds_of(update, case.device) for _ in range(WARMUP + steps)][WARMUP:]
    finally:
        update = None
        gc.collect()  # the model, whose parts know each other
        if case.device.startswith("cuda"):
            torch.cuda.empty_cache()
    found = quantiles(seconds)
    return [found.ms_p20, found.ms_p50, found.ms_p80]
