"""The report of an inspection: heat maps, predictions beside measurements, biased heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from lln.inspect.heads import COLUMN_BIAS, EXCESS_GAP, SINK
from lln.records.rows import Row
from lln.report.heat_map import heat_map, limits_of
from lln.report.lines import Axis, Series, scatter_plot
from lln.report.page import Page, Plot, Plots, Section, Table, Text

# quantity -> title, format of a cell, what to see
MAPS = {
    "entropy": (
        "Entropy of a row (bits)",
        ".1f",
        "Dark heads attend to few tokens, bright ones to many; uniform attention over n keys has "
        "log₂ n bits.",
    ),
    "spectral_gap": (
        "Spectral gap 1 − |λ₂|",
        ".2f",
        "1 means that all queries attend alike, 0 that groups of tokens never mix.",
    ),
    "temperature": (
        "Temperature 1/σ(scores)",
        ".2f",
        "Eq. (5) with the measured variance of the scores: a low temperature lets a head "
        "concentrate.",
    ),
    "top_key": (
        "Attention on the most attended key",
        ".2f",
        "Mean over the queries: a head that sends much of its attention to one key is biased.",
    ),
    "kolmogorov_smirnov": (
        "Distance of ln P from a normal law",
        ".2f",
        "Kolmogorov–Smirnov distance from the law with the fitted mean and variance: 0 is "
        "log-normal; below about 0.05 the fit is good.",
    ),
    "skew": (
        "Skewness of ln P",
        ".1f",
        "0 for a log-normal law; negative where few keys are almost excluded, positive where few "
        "are preferred.",
    ),
}

# Ends of the colour scales where they are not those of the numbers.
LOWEST = {"entropy": 0.0, "spectral_gap": 0.0, "top_key": 0.0, "kolmogorov_smirnov": 0.0}
HIGHEST_AT_LEAST = {"spectral_gap": 1.0, "top_key": SINK, "kolmogorov_smirnov": 0.1}

MAPS_TEXT = """
Rows are layers, columns are heads. Where cells are too narrow for their numbers, rest the pointer
on one.
"""

CAUSAL_TEXT = """
This model is causal. A causal matrix is triangular, so its eigenvalues are its diagonal and the
spectral gap says nothing about the other entries: judge these heads by entropy and by the attention
on the most attended key. The fits and that share are taken from the second half of the rows, which
see about equally many keys.
"""

LAW_TEXT = """
Proposition 3.1 says that the logarithm of an attention weight is normal, with variance σ² equal to
that of the scores and mean −ln n − σ²/2. Fenton's approximation of the denominator corrects the
mean for a finite number n of keys. Both assume Gaussian queries and keys, independent of each
other, and a moderate variance: as σ² approaches ln n, Fenton's mean stops at −1.5 ln n and that of
the proposition overshoots. The points show how far the activations of this model are from all that.
The variance is measured within rows. `product` leaves out the correlation of queries and keys,
C_cross in eq. (5), and the means of their features.
"""

BIASED_TEXT = """
A head is called biased when some keys are preferred whatever the query. Temperature cannot explain
that: such a head has a high spectral gap at a low temperature. Listed are heads whose gap exceeds
by more than {excess} the gap that Gaussian queries and keys of the same size give at the same
temperature, and whose mean row is at least {bits} bits away from uniform. Causal heads are listed
if one key gets more than {sink:.0%} of the attention.
"""


def build(rows: Sequence[Row], name: str, lede: str, facts: Mapping[str, str]) -> Page:
    """Put the measured rows and the words about them on one page."""
    return Page(
        title=f"Attention of {name}",
        lede=lede,
        sections=[
            Section("Heads at a glance", _maps(rows)),
            Section("Theory against activations", _law(rows)),
            Section("Biased heads", _biased(rows)),
            Section("All heads", [all_heads(rows)]),
        ],
        facts=facts,
    )


def cells_of(rows: Sequence[Row], quantity: str) -> list[list[float | None]]:
    """Arrange a quantity in a line per layer and a column per head."""
    lines: dict[int, list[float | None]] = {}
    for row in rows:
        lines.setdefault(row["layer"], []).append(row[quantity])
    return list(lines.values())


def colour_limits(quantity: str, cells: Sequence[Sequence[float | None]]) -> tuple[float, float]:
    """Return the ends of the colour scale, which starts at zero where it can.

    So the same colour means about the same in every report.
    """
    low, high = limits_of(cells)
    return LOWEST.get(quantity, low), max(high, HIGHEST_AT_LEAST.get(quantity, high))


def _maps(rows: Sequence[Row]) -> list:
    plots = []
    for quantity, (title, form, caption) in MAPS.items():
        cells = cells_of(rows, quantity)
        if quantity == "spectral_gap" and all(row["causal"] for row in rows):
            continue
        if any(value is not None for line in cells for value in line):
            options = {"form": form, "limits": colour_limits(quantity, cells)}
            svg = heat_map(quantity, cells, title=title, rows="layer", columns="head", **options)
            plots.append(Plot(svg, caption))
    causal = [Text(CAUSAL_TEXT)] if any(row["causal"] for row in rows) else []
    return [Text(MAPS_TEXT), *causal, Plots(plots)]


def _law(rows: Sequence[Row]) -> list:
    rows = [row for row in rows if row["mu"] is not None]
    if not rows:
        return [Text("No head has weights that could be read.")]
    variance = [
        Series("σ² of the scores", *_points(rows, "sigma2_predicted", "sigma2"), slot=2),
        Series("product σ_q²σ_k²", *_points(rows, "sigma2_product", "sigma2"), slot=1),
    ]
    mean = [
        Series("Prop. 3.1", *_points(rows, "mu_predicted", "mu"), slot=2),
        Series("Fenton", *_points(rows, "mu_fenton", "mu"), slot=1),
    ]
    plots = [
        ("variance", variance, "Variance of ln P", "within rows"),
        ("mean", mean, "Mean of ln P", "over all entries"),
    ]
    drawn = [
        Plot(
            scatter_plot(
                name, groups, title=title, x=Axis("predicted"), y=Axis(f"measured, {how}")
            ),
            "A point per head; on the line prediction and measurement agree.",
        )
        for name, groups, title, how in plots
    ]
    return [Text(LAW_TEXT), Plots(drawn), law_table(rows)]


def _points(rows: Sequence[Row], x: str, y: str) -> tuple[list[float], list[float]]:
    pairs = [(row[x], row[y]) for row in rows if row[x] is not None and row[y] is not None]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def law_table(rows: Sequence[Row]) -> Table:
    """Medians over the heads of a layer."""
    quantities = (
        *("mu", "mu_predicted", "mu_fenton"),
        *("sigma2", "sigma2_predicted", "sigma2_product", "kolmogorov_smirnov"),
    )
    lines = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        own = [row for row in rows if row["layer"] == layer]
        values = [[row[name] for row in own if row[name] is not None] for name in quantities]
        lines.append([str(layer), *(_number(median(v) if v else None) for v in values)])
    heads = ["μ", "μ Prop. 3.1", "μ Fenton", "σ²", "σ² of scores", "σ² product", "KS distance"]
    return Table(["layer", *heads], lines, title="Medians over the heads of a layer.")


def _biased(rows: Sequence[Row]) -> list:
    words = Text(BIASED_TEXT.format(excess=EXCESS_GAP, bits=COLUMN_BIAS, sink=SINK))
    table = biased_table(rows)
    if not table.lines:
        return [words, Text("No head of this model meets that criterion on this text.")]
    return [words, table]


def biased_table(rows: Sequence[Row]) -> Table:
    """The biased heads, the most biased first."""
    listed = sorted(
        (row for row in rows if row["biased"]),
        key=lambda row: (row["spectral_gap"] or 0) - (row["gap_unbiased"] or 0) + row["top_key"],
        reverse=True,
    )
    names = ("temperature", "spectral_gap", "gap_unbiased", "column_bias", "top_key")
    lines = [
        [f"{row['layer']}.{row['head']}", *(_number(row[name]) for name in names)] for row in listed
    ]
    heads = ["τ", "gap", "gap without bias", "column bias (bits)", "top key"]
    total = f"{len(lines)} of {len(rows)} heads. A head is named layer.head."
    return Table(["head", *heads], lines, title=total)


def all_heads(rows: Sequence[Row], *, most: int = 400) -> Table:
    """A line per head, up to ``most``."""
    names = {
        "entropy": "entropy",
        "effective_tokens": "eff. tokens",
        "spectral_gap": "gap",
        "temperature": "τ",
        "column_bias": "bias",
        "mutual_information": "MI",
        "kolmogorov_smirnov": "KS",
        "skew": "skew",
    }
    lines = [
        [f"{row['layer']}.{row['head']}", row["kernel"], *(_number(row[name]) for name in names)]
        for row in rows[:most]
    ]
    caption = "Entropy, bias and mutual information (MI) in bits. All columns are in heads.csv"
    caption += f", and the heads beyond the first {most}." if len(rows) > most else "."
    return Table(["head", "kernel", *names.values()], lines, title=caption, words=2)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"
