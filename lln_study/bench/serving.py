"""``lln bench serve``: a step of :class:`lln.hf.Engine` against the length of its streams.

Both models sit in the same engine, with seats allocated once: ours, of constant size, and softmax
by SDPA, whose keys and values are allocated for the length that is measured. On a GPU the step of
either is a CUDA graph. Steps of the two alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lln.nn import recommended
from lln.records import machine, saved
from lln.records.rows import Row
from lln.report.numbers import three_digits
from lln_study.bench.check import CheckFailed
from lln_study.bench.terminal import wide_console

SUBJECT = "serving"
PROMPT = 600  # tokens, so that keys have left the window when streams are moved on
WARM = 3  # steps: the first allocates, and captures


@dataclass(frozen=True)
class Setting:
    """A decoder of random weights; what a step takes does not depend on them."""

    layers: int = 4
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    vocabulary: int = 512
    dtype: str = "float32"

    def model(self) -> Any:
        """A Llama of these sizes."""
        from transformers import LlamaConfig, LlamaForCausalLM

        width = self.heads * self.head_dim
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=1 << 20,
            eos_token_id=None,
            bos_token_id=None,
        )
        return LlamaForCausalLM(config).eval()

    def spread(self, keep: int) -> dict[int, list[int]]:
        """The query heads of so many key heads, by layer: the layers in turn, evenly apart."""
        total, group = self.layers * self.kv_heads, self.heads // self.kv_heads
        if keep > total:
            raise ValueError(f"keep={keep} of {total} key heads: give 0 to {total}")
        found: dict[int, list[int]] = {}
        for number in range(keep):
            layer, head = divmod(number * total // keep, self.kv_heads)
            found.setdefault(layer, []).extend(range(head * group, (head + 1) * group))
        return found

    def words(self) -> str:
        """For the configuration of a row."""
        heads = f"{self.heads} heads ({self.kv_heads} of keys) of {self.head_dim}"
        return f"Llama, {self.layers} layers, {heads}, {self.vocabulary} words, {self.dtype}"


#: SmolLM2-135M's sizes.
SMOLLM2 = Setting(30, 9, 3, 64, 49_152, "bfloat16")
OURS = "convert-decoder"  # the preset


def run(
    folder: Path,
    *,
    device: str = "cpu",
    seats: Sequence[int] = (1, 8),
    lengths: Sequence[int] = (2048, 8192, 65_536),
    steps: int = 20,
    keep: Sequence[int] = (0,),
    setting: Setting | None = None,
    console: Console | None = None,
) -> Path:
    """Check, then measure; write ``serving_hardware_date.json``, ``serving-kept_…`` with ``keep``.

    Args:
        keep: Numbers of key heads of our model that keep softmax.
    """
    console = console or wide_console()
    setting = setting or (SMOLLM2 if device.startswith("cuda") else Setting())
    cases = [(kept, count, length) for kept in keep for count in seats for length in lengths]
    models: dict[int, dict[str, Any]] = {}
    table = Table(title="A step of the engine", title_justify="left")
    for name in (
        "key heads kept",
        "seats",
        "tokens so far",
        "ours, ms",
        "softmax, ms",
        "softmax ÷ ours",
    ):
        table.add_column(name, justify="right")
    for name in ("ours, MiB", "softmax, MiB"):
        table.add_column(name, justify="right")
    rows = []
    for kept, count, length in track(cases, "serving", console=console, transient=True):
        if kept not in models:  # one pair at a time
            models = {kept: make(setting, device, keep=kept)}
            check(models[kept])
        row = measure(models[kept], count, length, steps=steps)
        rows.append({**row, **({"kept_key_heads": kept} if kept else {}), **machine.facts(device)})
        rows[-1]["configuration"] = f"{setting.words()}; preset {OURS}; {machine.conditions()}"
        times = [three_digits(row[name]) for name in ("ours_ms", "softmax_ms")]
        sizes = [f"{row[name] / 2**20:,.1f}" for name in ("ours_bytes", "softmax_bytes")]
        table.add_row(f"{kept}", f"{count}", f"{length:,}", *times, f"{row['ratio']:.2f}×", *sizes)
    console.print(table)
    subject = f"{SUBJECT}-kept" if any(keep) else SUBJECT
    path = saved.save_json({"rows": rows}, folder, subject=subject, device=device)
    console.print(f"wrote {path}")
    return path


def make(setting: Setting, device: str, *, keep: int = 0) -> dict[str, Any]:
    """The two models, with the same weights; so many key heads keep softmax, layers apart."""
    import lln.hf

    torch.manual_seed(0)
    ours, softmax = setting.model(), setting.model()
    softmax.load_state_dict(ours.state_dict())
    done = lln.hf.replace(ours, "lln_nearfar", quiet=True, **recommended(OURS))
    done.keep_softmax_heads(setting.spread(keep))
    lln.hf.calibrate(ours, [{"input_ids": torch.randint(setting.vocabulary, (1, PROMPT))}])
    softmax.set_attn_implementation("lln_mixed")  # transformers' SDPA, in seats
    dtype = getattr(torch, setting.dtype)
    return {name: x.to(device, dtype) for name, x in (("ours", ours), ("softmax", softmax))}


def check(models: dict[str, Any], *, new_tokens: int = 4) -> None:
    """Raise unless the engine finds the tokens that ``generate`` finds for a prompt alone.

    In half precision ties may be broken differently, so only the first token is compared there.
    """
    from lln.hf import Engine

    prompt = torch.arange(PROMPT) % models["ours"].config.vocab_size
    for name, model in models.items():
        engine = Engine(model, 2, max_length=PROMPT + new_tokens + 1)
        (stream,) = engine.generate([prompt], max_new_tokens=new_tokens, eos_token_id=())
        ids = prompt[None].to(model.device)
        options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        whole = model.generate(ids, max_new_tokens=new_tokens, **options)[0, PROMPT:].tolist()
        compared = new_tokens if model.dtype == torch.float32 else 1
        if stream.tokens[:compared] != whole[:compared]:
            raise CheckFailed(f"the engine's tokens of {name} are {stream.tokens}, not {whole}")


def measure(models: dict[str, Any], seats: int, length: int, *, steps: int) -> Row:
    """A row: medians of a step of each, their ratio step by step, and what the seats hold.

    Streams read a short prompt and are moved to their place: the keys between are zeros there,
    which cost what others do.
    """
    if length < PROMPT:
        raise ValueError(f"length={length} is shorter than the prompt; pass at least {PROMPT}")
    most = length + steps + WARM + 1
    engines = {name: _seated(model, seats, length, most) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(steps + WARM):
        for name, engine in engines.items():
            started = time.perf_counter()
            engine.step()  # waits for its tokens
            if number >= WARM:
                seconds[name].append(time.perf_counter() - started)
    pairs = zip(seconds["softmax"], seconds["ours"], strict=True)
    return {
        "seats": seats,
        "tokens": length,
        "steps": steps,
        **{f"{name}_ms": round(1e3 * statistics.median(x), 4) for name, x in seconds.items()},
        "ratio": round(statistics.median(theirs / ours for theirs, ours in pairs), 3),
        **{f"{name}_bytes": engine.nbytes for name, engine in engines.items()},
    }


def _seated(model: Any, seats: int, length: int, most: int) -> Any:
    """An engine all of whose streams are at this length."""
    from lln.hf import Engine

    engine = Engine(model, seats, max_length=most)
    for _ in range(seats):
        engine.add(torch.full((PROMPT,), 7), max_new_tokens=most - PROMPT, eos_token_id=())
    engine.position.fill_(length)
    return engine
