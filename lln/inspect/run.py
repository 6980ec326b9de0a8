"""Run an inspection: load, run the model once, measure its heads, print, write the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.style import Style
from rich.table import Table as Printed
from rich.text import Text

import lln
from lln.device.threads import one_thread
from lln.inspect import heads, page
from lln.inspect.model import CannotInspect, Inputs, Loaded, load, prepare
from lln.instruments.recording.attention_call import AttentionCall
from lln.instruments.recording.recorder import attention_calls
from lln.records import files, machine, saved
from lln.report.heat_map import colour, ink_on, share_of
from lln.report.page import render
from lln.report.progress import counting
from lln.texts import bundled as data

CELL_WIDTH = 6  # of a printed cell, with the space between columns
NO_ATTENTION = (
    "no attention was seen in {name}; models that do not use scaled_dot_product_attention or "
    "transformers' attention interface cannot be inspected"
)


def run(
    folder: Path,
    *,
    text: Path | None = None,
    out: Path = Path("runs/inspect"),
    tokens: int = 256,
    sequences: int = 2,
    console: Console | None = None,
) -> Path:
    """Inspect the model in ``folder`` and write ``report.html`` and ``heads.csv`` to ``out``.

    Args:
        text: A UTF-8 file; Tiny Shakespeare, which comes with the package, if left out.
    """
    console = console or Console()
    started = time.perf_counter()
    loaded = load(folder)
    inputs = prepare(folder, loaded, read_text(text), tokens=tokens, sequences=sequences)
    name = f"{folder.resolve().name} ({loaded.config.model_type})"
    console.print(
        f"[bold]{name}[/bold]: weights {loaded.weights}; {inputs.words}.", highlight=False
    )
    calls = calls_of(loaded, inputs)
    with one_thread():
        rows = _measure(calls, console)

    _print_maps(console, rows)
    _print_biased(console, rows)
    facts = {
        "lln": f"{lln.__version__}, commit {machine.commit()}",
        "device": f"{machine.device_name()} for the model, 1 for the measurements",
        "torch": torch.__version__,
        "transformers": machine.version("transformers"),
        "weights": loaded.weights,
        "input": inputs.words,
        "text": "Tiny Shakespeare" if text is None else text.name,
        "took": f"{time.perf_counter() - started:.0f} s",
    }
    files.write_text(out / "heads.csv", saved.as_csv(rows))
    html = render(page.build(rows, name, _lede(loaded, inputs), facts))
    report = files.write_text(out / "report.html", html)
    console.print(f"\nReport: [bold]{report}[/bold] ({facts['took']}); open it in a browser.")
    return report


def read_text(text: Path | None) -> str:
    if text is None:
        return data.text()
    if text.exists() and not text.is_file():  # a pipe would wait for ever
        raise CannotInspect(f"--text {text} is no regular file; pass one of text")
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotInspect(f"--text {text} is not readable as UTF-8: {error}") from error


def calls_of(loaded: Loaded, inputs: Inputs) -> list[AttentionCall]:
    """Run one forward pass without gradients; return its attention calls, all samples kept."""
    count = next(iter(inputs.arguments.values())).shape[0]
    name = type(loaded.model).__name__
    with torch.no_grad(), attention_calls(loaded.model, samples=count) as calls:
        try:
            loaded.model(**inputs.arguments)
        except (IndexError, RuntimeError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise CannotInspect(
                f"{name} cannot be run on {inputs.words}: {reason}; do its files belong together?"
            ) from error
    if not calls:
        raise CannotInspect(NO_ATTENTION.format(name=name))
    for call in calls:
        if not (call.q.isfinite().all() and call.k.isfinite().all()):
            raise CannotInspect(
                f"queries or keys of {call.module} are not finite: activations overflow, or the "
                "training diverged; pass another checkpoint"
            )
    return calls


def _measure(calls: Sequence[AttentionCall], console: Console) -> list[heads.Row]:
    bars = counting(console, transient=True)
    rows = []
    with bars:
        task = bars.add_task("layers", total=len(calls))
        for layer in heads.head_rows(calls):
            rows += layer
            bars.update(task, advance=1)
    return rows


def _lede(loaded: Loaded, inputs: Inputs) -> str:
    return (
        f"How concentrated, how biased and how log-normal the attention of this model is, head by "
        f"head. Weights: {loaded.weights}. Input: {inputs.words}. Every number was measured by the "
        "run that wrote this page."
    )


def _print_maps(console: Console, rows: Sequence[heads.Row]) -> None:
    """Print layers × heads, coloured as in the report; wide models in several parts."""
    causal = any(row["causal"] for row in rows)
    for quantity in ("entropy", "top_key" if causal else "spectral_gap"):
        title, form, _ = page.MAPS[quantity]
        cells = page.cells_of(rows, quantity)
        limits, width = page.colour_limits(quantity, cells), max(map(len, cells))
        part = max(1, (console.width - 8) // (CELL_WIDTH + 1))
        for first in range(0, width, part):
            shown = range(first, min(first + part, width))
            table = Printed(box=None, pad_edge=False)
            table.add_column("layer", justify="right", style="dim")
            for head in shown:
                table.add_column(str(head), justify="right")
            for layer, line in enumerate(cells):
                values = [line[head] if head < len(line) else None for head in shown]
                table.add_row(str(layer), *(_cell(value, form, limits) for value in values))
            console.print(f"\n[italic]{title}[/italic]", highlight=False)
            console.print(table)


def _cell(value: float | None, form: str, limits: tuple[float, float]) -> Text:
    if value is None:
        return Text("–", style="dim")
    background = colour(share_of(value, limits))
    style = Style(color=ink_on(background), bgcolor="rgb({},{},{})".format(*background))
    return Text(f"{value:{form}}".rjust(5), style=style)


def _print_biased(console: Console, rows: Sequence[heads.Row]) -> None:
    biased = page.biased_table(rows)
    if not biased.lines:
        console.print("\nNo biased head.")
        return
    table = Printed(title="Biased heads", caption=biased.title, title_justify="left")
    for index, column in enumerate(biased.columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for line in biased.lines[:20]:
        table.add_row(*line)
    console.print()
    console.print(table)
