"""The report of the demonstration: what was measured, how to read it, what it does not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lln.records.rows import Row
from lln.report.lines import Axis, Series, line_plot
from lln.report.numbers import three_digits
from lln.report.page import Page, Plot, Plots, Section, Table, Text
from lln_study.demo.concentration import KERNELS, Setting
from lln_study.demo.cost import LABELS, SHORT, label

LEDE = (
    "Linear Log-Normal attention replaces the softmax by exponential features whose scales α and β "
    "are chosen so that attention stays as concentrated as softmax attention would be, at a cost "
    "that grows with the number of tokens instead of its square. Every number on this page was "
    "measured by the run that wrote it."
)

CONCENTRATION = """
Entropy says how many tokens a query spreads its attention over, in bits; the spectral gap says how
alike the rows are. A linear attention that emulates softmax should follow its curve down as the
temperature falls. Without calibration (α = β = 1) LLN stays nearly uniform at every temperature.

`paper` uses the two constants published with the method, `variance` matches the variance of the
log-weights exactly for the head size, `entropy` matches the mean entropy of long rows. Matching the
variance, in either way, concentrates more than softmax at low temperature, because the logarithm of
an LLN weight is skewed; matching the entropy follows softmax closely for τ of about 0.8 and more
and leaves it below. `normalize_keys` removes most of the bias towards particular keys.
Which of them trains best is a question for experiments, not for this page.
"""

RETRIEVAL = """
Each query is an exact copy of one key; the table shows how often the largest weight falls on that
key, and how much weight the key gets on average. Softmax finds it and attends to it. LLN does not:
its matrix has rank at most the head size, so it can emulate how widely attention is spread, but not
the lookup of one token among many. Uncalibrated LLN "finds" more targets than calibrated LLN,
but attends to none of them: its weights are nearly equal, the largest is hardly larger than the
others, and the target gets next to no weight.
Tasks that live on exact recall need some softmax layers or another mechanism; the block-diagonal
branch (`near`) helps only where the target is near.
"""

COST = """
One forward call, 12 heads of 64, float32, random inputs. Time is the median of repeated calls.
Memory is the growth of resident memory at its peak during one call, inputs not counted, as the
operating system reports it in a process of its own; it holds the output and every buffer.

torch's SDPA on a CPU works in tiles and needs no N×N matrix, so both have memory linear in N; only
the textbook form of softmax, shown for comparison, has quadratic memory. What differs from SDPA is
the time. At short lengths a linear method gains little, and other machines give other ratios.
"""

TRAINING = """
Masked language modelling on Tiny Shakespeare with a network that a CPU trains in seconds.
All runs start from the same weights and see the same tokens in the same order, hidden in the same
places; they differ in the attention only.

At first every network learns how frequent each token is, the plateau of the curves, and only then
to use context. LLN+Diag leaves the plateau earlier here: softmax inside short blocks has only
neighbours to choose from. A convolution over 33 neighbouring values (`conv`) takes either attention
well beyond it; it is part of `lln.nn.RECOMMENDED`. This is the beginning of the training of a toy,
not a verdict; which attention ends up better has to be judged at real sizes, long after the
plateau. At these lengths LLN saves no time.
"""


def build(
    setting: Setting,
    concentration: Sequence[Row],
    found: Sequence[Row],
    cost: Sequence[Row],
    trained: tuple[Sequence[Row], Sequence[Row], str],
    facts: Mapping[str, str],
) -> Page:
    """Put the measured rows and the words about them on one page."""
    return Page(
        title="LLN attention: a demonstration",
        lede=LEDE,
        sections=[
            Section("Concentration", _concentration(setting, concentration)),
            Section(
                "Exact retrieval: what LLN does not do",
                [Text(RETRIEVAL), retrieval_table(setting, found)],
            ),
            Section("Time and memory", _cost(cost)),
            Section("A tiny language model", _training(*trained)),
        ],
        facts=facts,
    )


def _concentration(setting: Setting, rows: Sequence[Row]) -> list:
    temperature = Axis("temperature τ = 1 / σ(scores)", ticks=setting.temperatures)
    inputs = (
        f"Gaussian queries and keys, N = {setting.tokens}, d = {setting.head_dim}; "
        f"mean and standard deviation over {setting.draws} draws."
    )
    return [
        Text(CONCENTRATION),
        Plots(
            [
                Plot(
                    line_plot(
                        "entropy",
                        _curves(rows, "entropy"),
                        title="Mean entropy of a row (bits)",
                        x=temperature,
                        y=Axis("bits"),
                    ),
                    f"{inputs} A uniform row has log₂ N bits.",
                ),
                Plot(
                    line_plot(
                        "gap",
                        _curves(rows, "spectral_gap"),
                        title="Spectral gap 1 − |λ₂|",
                        x=temperature,
                        y=Axis("gap", limits=(0, 1.03)),
                    ),
                    "1 means that all queries attend alike, 0 that groups of tokens never mix.",
                ),
            ]
        ),
        *concentration_tables(setting, rows),
    ]


def _curves(rows: Sequence[Row], quantity: str) -> list[Series]:
    return [
        Series(
            kernel,
            [row["temperature"] for row in rows if row["kernel"] == kernel],
            [row[quantity] for row in rows if row["kernel"] == kernel],
            [row[f"{quantity}_sd"] for row in rows if row["kernel"] == kernel],
            slot=slot,
        )
        for slot, kernel in enumerate(KERNELS)
    ]


def concentration_tables(setting: Setting, rows: Sequence[Row]) -> list[Table]:
    """Entropy and spectral gap: a line per kernel and a column per temperature."""
    captions = {
        "entropy": "Mean entropy of a row in bits.",
        "spectral_gap": "Spectral gap 1 − |λ₂|.",
    }
    columns = ["attention", *(f"τ = {temperature:g}" for temperature in setting.temperatures)]
    tables = []
    for quantity, caption in captions.items():
        cells = {(row["kernel"], row["temperature"]): f"{row[quantity]:.2f}" for row in rows}
        lines = [[name, *(cells[name, t] for t in setting.temperatures)] for name in KERNELS]
        tables.append(Table(columns, lines, title=caption))
    return tables


def retrieval_table(setting: Setting, found: Sequence[Row]) -> Table:
    """How often the target is found, and how much weight it gets."""
    return Table(
        ["attention", "targets found", "weight on the target"],
        [[row["kernel"], f"{row['found']:.0%}", f"{row['weight']:.3f}"] for row in found],
        title=f"N = {setting.tokens}, d = {setting.head_dim}, τ = 1, {setting.draws} draws.",
    )


def _cost(rows: Sequence[Row]) -> list:
    lengths = sorted({row["N"] for row in rows})
    tokens = Axis("tokens N", log=True, ticks=lengths)
    plots = [
        Plot(
            line_plot(
                "time",
                _cost_curves(rows, "ms_p50"),
                title="Time of a forward call (ms)",
                x=tokens,
                y=Axis("milliseconds", log=True),
            ),
            "Both axes are logarithmic: slope 1 is linear, slope 2 quadratic.",
        )
    ]
    if all(row["peak_mb"] is not None for row in rows):
        plots.append(
            Plot(
                line_plot(
                    "memory",
                    _cost_curves(rows, "peak_mb"),
                    title="Peak memory beyond the inputs (MiB)",
                    x=tokens,
                    y=Axis("megabytes (2²⁰ bytes)", log=True),
                ),
                "Below about 10 MiB the reading is coarse.",
            )
        )
    return [Text(COST), Plots(plots), cost_table(rows)]


def _cost_curves(rows: Sequence[Row], quantity: str) -> list[Series]:
    return [
        Series(
            name,
            [row["N"] for row in rows if label(row) == name],
            [row[quantity] for row in rows if label(row) == name],
            slot=slot,
        )
        for name, slot in zip(LABELS.values(), (4, 0, 2), strict=True)
    ]


def cost_table(rows: Sequence[Row]) -> Table:
    """Milliseconds and megabytes per length; empty cells were not run."""
    cells = {(row["impl"], row["N"]): row for row in rows}
    lines = []
    for length in sorted({row["N"] for row in rows}):
        line = [f"{length:,}"]
        for impl in SHORT:
            row = cells.get((impl, length), {"ms_p50": None, "peak_mb": None})
            line += [three_digits(row["ms_p50"]), three_digits(row["peak_mb"])]
        both = [
            cells[impl, length]["ms_p50"] for impl in ("sdpa", "eager") if (impl, length) in cells
        ]
        lines.append([*line, f"{both[0] / both[1]:.1f}×" if len(both) == 2 else ""])
    heads = [f"{name} {unit}" for name in SHORT.values() for unit in ("ms", "MiB")]
    return Table(
        ["N", *heads, "ratio"],
        lines,
        title="Matrix: softmax with its N×N matrix. Ratio: SDPA ÷ LLN time. Empty: not run.",
    )


def _training(results: Sequence[Row], curves: Sequence[Row], about: str) -> list:
    update, tokens = Axis("updates"), Axis("nats per hidden token")
    plots = []
    for kind, title, note in (
        ("train", "Training loss", "Mean since the point before."),
        ("eval", "Validation loss", "Text that was held out, always the same hidden tokens."),
    ):
        series = [
            Series(
                row["attention"],
                [each["step"] for each in _of(curves, row, kind)],
                [each["loss"] for each in _of(curves, row, kind)],
                slot=slot,
            )
            for row, slot in zip(results, (0, 2, 1, 3), strict=True)
        ]
        plot = line_plot(f"training-{kind}", series, title=title, x=update, y=tokens)
        plots.append(Plot(plot, note))
    return [Text(TRAINING), Plots(plots), training_table(results, curves, about)]


def _of(curves: Sequence[Row], result: Row, kind: str) -> list[Row]:
    return [
        row
        for row in curves
        if row["attention"] == result["attention"]
        and row["kind"] == kind
        and row["loss"] is not None
    ]


def training_table(results: Sequence[Row], curves: Sequence[Row], about: str) -> Table:
    """Validation loss before, halfway and at the end, and what it took."""
    lines = []
    for row in results:
        losses = [each["loss"] for each in _of(curves, row, "eval")]
        shown = [losses[0], losses[len(losses) // 2], losses[-1]]
        lines.append(
            [
                row["attention"],
                *(f"{loss:.2f}" for loss in shown),
                f"{row['accuracy']:.1%}",
                f"{row['parameters']:,}",
                three_digits(row["step_ms"]),
            ]
        )
    columns = ["attention", "first", "halfway", "last", "found", "parameters", "ms/update"]
    what = "Validation loss in nats per hidden token: first, halfway, last; share of them found."
    return Table(columns, lines, title=f"{what} {about}.")
