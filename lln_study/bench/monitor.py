"""``lln bench monitor``: what watching attention adds to training, in one run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lln.device.timing import quantiles
from lln.instruments import monitor
from lln.records import machine, saved
from lln.records.rows import Row
from lln_study.bench.roberta import Setting, seconds_of, training_step

SUBJECT = "monitor"
DEFAULT_RATE = 100  # of lln.instruments.monitor: every that many steps
ATTENTIONS = ("softmax", "lln_diag")


def run(
    folder: Path, *, device: str = "cpu", steps: int = 30, console: Console | None = None
) -> Path:
    """Time ordinary and watched steps in turn; write ``monitor_hardware_date.json``."""
    console = console or Console()
    rows = [measure(name, Setting(), device=device, steps=steps) for name in ATTENTIONS]
    for row in rows:
        console.print(
            f"{row['mechanism']}: {row['step_ms']:.1f} ms a step, {row['watched_ms']:.1f} ms a "
            f"watched one, {row['share']:.2%} of the time at every={DEFAULT_RATE}"
        )
    path = saved.save_json({"rows": rows}, folder, subject=SUBJECT, device=device)
    console.print(f"wrote {path}")
    return path


def measure(attention: str, setting: Setting, *, device: str, steps: int) -> Row:
    """A row: medians of both kinds of step, and the share of the time the difference takes."""
    step = training_step(attention, setting, device)
    ordinary: list[float] = []
    watched: list[float] = []
    with monitor(step.model, every=2, first_step=0) as seen:
        for number in range(2 * steps + 2):
            seconds = seconds_of(step, device)
            if number >= 2:  # the first two warm up
                (watched if number % 2 == 0 else ordinary).append(seconds)
        assert any("layer" in row for row in seen)
    plain, measured = quantiles(ordinary).ms_p50, quantiles(watched).ms_p50
    return {
        "mechanism": attention,
        "step_ms": round(plain, 3),
        "watched_ms": round(measured, 3),
        "share": round((measured - plain) / (DEFAULT_RATE * plain), 5),
        "steps": steps,
        **machine.facts(device),
        "configuration": f"{setting.words()}; {machine.conditions()}",
    }
