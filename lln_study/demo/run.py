"""Run the demonstration: measure, print, write the report."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Printed

import lln
from lln.device.threads import one_thread
from lln.records import files, machine, saved
from lln.report.page import Table, render
from lln_study.bench import sweep
from lln_study.demo import concentration, cost, page, training


def run(
    folder: Path,
    *,
    quick: bool = False,
    results: Path | None = None,
    console: Console | None = None,
) -> Path:
    """Measure everything, print tables, and write ``report.html`` and the CSV files behind it.

    With ``results`` the rows are also kept there, as ``demo_hardware_date.json``.
    """
    console = console or Console()
    started = time.perf_counter()
    setting = concentration.Setting(tokens=128, draws=2) if quick else concentration.Setting()
    bars = Progress(
        TextColumn("{task.description}", style="bold"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", style="dim"),
        console=console,
    )
    with bars:
        with one_thread():
            origin = {**machine.facts(), "configuration": setting.describe()}
            spread = _concentration(setting, bars)
            found = concentration.retrieval(setting)
        costs = _cost(quick, bars)
        trained = _training(quick, bars)

    entropies, gaps = page.concentration_tables(setting, spread)
    _print(console, entropies, "Entropy")
    _print(console, gaps, "Spectral gap")
    _print(console, page.retrieval_table(setting, found), "Exact retrieval")
    _print(console, page.cost_table(costs), "Time and peak memory of a forward call")
    _print(console, page.training_table(*trained), "A tiny language model")

    rows = {
        "concentration": [{**row, **origin} for row in spread],
        "retrieval": [{**row, **origin} for row in found],
        "cost": costs,
        "training": [{**row, **origin, "configuration": trained[2]} for row in trained[1]],
    }
    for name, listed in rows.items():
        files.write_text(folder / f"{name}.csv", saved.as_csv(listed))
    if results is not None:
        saved.save_json(rows, results, subject="demo")
    facts = {
        "lln": f"{lln.__version__}, commit {origin['commit']}",
        "device": f"{machine.device_name()} for time and memory, 1 for all else",
        "torch": origin["torch"],
        "inputs": origin["configuration"],
        "took": f"{time.perf_counter() - started:.0f} s",
    }
    html = render(page.build(setting, spread, found, costs, trained, facts))
    report = files.write_text(folder / "report.html", html)
    console.print(f"\nReport: [bold]{report}[/bold] ({facts['took']}); open it in a browser.")
    return report


def _concentration(setting: concentration.Setting, bars: Progress) -> list[dict]:
    total = len(setting.temperatures) * len(concentration.KERNELS)
    task = bars.add_task("entropy and spectral gap", total=total, now="")
    rows = []
    for row in concentration.measure(setting):
        rows.append(row)
        bars.update(task, advance=1, now=f"τ = {row['temperature']:g}, {row['kernel']}")
    bars.update(task, now="")
    return rows


def _cost(quick: bool, bars: Progress) -> list[dict]:
    cases = cost.cases(quick=quick)
    task = bars.add_task("time and memory", total=len(cases), now="")
    rows = []
    for row in sweep.measure(
        cases, min_seconds=0.02 if quick else 0.2, watch=lambda name: bars.update(task, now=name)
    ):
        rows.append(row)
        bars.update(task, advance=1)
    bars.update(task, now="")
    return rows


def _training(quick: bool, bars: Progress) -> tuple[list[dict], list[dict], str]:
    steps = training.QUICK_STEPS if quick else training.STEPS
    done = dict.fromkeys(training.RUNS, 0)
    task = bars.add_task("training", total=steps * len(done), now="")

    def watch(label: str, updates: int) -> None:
        done[label] = updates
        now = ", ".join(name for name, count in done.items() if 0 < count < steps)
        bars.update(task, completed=sum(done.values()), now=now)

    workers = None if quick else os.cpu_count() or 1
    trained = training.train(quick=quick, workers=workers, watch=watch)
    bars.update(task, now="")
    return trained


def _print(console: Console, table: Table, title: str) -> None:
    printed = Printed(title=title, caption=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        printed.add_column(column, justify="left" if index < table.words else "right")
    for line in table.lines:
        printed.add_row(*line)
    console.print()
    console.print(printed)
