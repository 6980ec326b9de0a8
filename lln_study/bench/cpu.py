"""``lln bench``: the CPU sweep with a progress bar, printed ratios, files and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lln.records import files
from lln.report.lines import Axis, Series, line_plot
from lln.report.numbers import three_digits
from lln.report.progress import counting
from lln_study.bench import sweep
from lln_study.bench.cases import cpu_cases
from lln_study.bench.check import CheckFailed


def run(
    folder: Path,
    *,
    quick: bool = False,
    min_seconds: float = 1.0,
    console: Console | None = None,
) -> list[Path]:
    """Measure the CPU cases; write ``subject_hardware_date`` as .json, .csv and .svg."""
    console = console or Console()
    cases = cpu_cases(quick=quick)
    bars = counting(console)
    rows: list[sweep.Row] = []
    with bars:
        task = bars.add_task("starting", total=len(cases))
        watch = lambda name: bars.update(task, description=name)  # noqa: E731
        try:
            for row in sweep.measure(cases, min_seconds=min_seconds, watch=watch):
                rows.append(row)
                bars.update(task, advance=1)
        except CheckFailed as failure:
            console.print(f"[bold red]stopped before measuring:[/] {failure}")
            raise SystemExit(1) from None

    console.print(_rows_table(rows))
    console.print(_ratio_table(rows))
    console.print(_growth_table(rows))
    subject = "attention" + "-quick" * quick
    written = sweep.save(rows, folder, subject=subject)
    written.append(files.write_text(written[0].with_suffix(".svg"), plot(rows)))
    for path in written:
        console.print(f"wrote {path}")
    return written


def plot(rows: Sequence[sweep.Row]) -> str:
    """Time of the forward pass against N, both axes logarithmic, one curve per op and impl."""
    forward = [row for row in rows if row["pass"] == "fwd"]
    curves = dict.fromkeys((row["op"], row["impl"]) for row in forward)
    wanted = [curve for curve in curves if curve[1] != "matrix" and curve[0] != "measured"]
    series = []
    for op, impl in wanted:
        mine = [row for row in forward if (row["op"], row["impl"]) == (op, impl)]
        series.append(Series(f"{op}, {impl}", [r["N"] for r in mine], [r["ms_p50"] for r in mine]))
    lengths = sorted({row["N"] for row in forward})
    return line_plot(
        "bench",
        series,
        title="Forward pass (ms)",
        x=Axis("tokens N", log=True, ticks=lengths),
        y=Axis("milliseconds", log=True),
    )


def _rows_table(rows: Sequence[sweep.Row]) -> Table:
    table = Table(title="Measurements", title_justify="left")
    for name in ("op", "impl", "pass"):
        table.add_column(name)
    for name in ("N", "ms p20", "ms p50", "ms p80", "peak MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        peak = "" if row["peak_mb"] is None else f"{row['peak_mb']:.1f}"
        times = [three_digits(row[key]) for key in ("ms_p20", "ms_p50", "ms_p80")]
        table.add_row(row["op"], row["impl"], row["pass"], f"{row['N']:,}", *times, peak)
    return table


def _ratio_table(rows: Sequence[sweep.Row]) -> Table:
    table = Table(title="SDPA time ÷ LLN time, medians of this run", title_justify="left")
    for name in ("op", "pass", "N", "ratio"):
        table.add_column(name, justify="right" if name in ("N", "ratio") else "left")
    for ratio in sweep.ratios(rows):
        table.add_row(ratio["op"], ratio["pass"], f"{ratio['N']:,}", f"{ratio['ratio']:.1f}×")
    return table


def _growth_table(rows: Sequence[sweep.Row]) -> Table:
    table = Table(title="Growth: cost ∝ N^p, fitted", title_justify="left")
    for name in ("op", "impl", "pass", "N from", "to", "p of time", "p of memory"):
        table.add_column(name)
    for fit in sweep.growth(rows):
        memory = "" if fit["memory"] is None else f"{fit['memory']:.2f}"
        ends = [f"{fit['from']:,}", f"{fit['to']:,}"]
        table.add_row(fit["op"], fit["impl"], fit["pass"], *ends, f"{fit['time']:.2f}", memory)
    return table
