"""The paper's figures as panels made from rows: :data:`PANELS`.

Rows are what ``lln figure`` writes to CSV, so a figure can be drawn again without computing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lln.records.rows import Row
from lln.report.canvas import MARKERS, Axis
from lln.report.panels import Curve, Panel

# Order, colour and marker of the attentions, the same in every figure.
STYLES: dict[str, tuple[int | None, str]] = {
    "softmax": (0, "o"),
    "LLN paper": (1, "s"),
    "LLN variance": (2, "D"),
    "LLN entropy": (3, "^"),
    "LLN entropy, normalize_keys": (4, "v"),
    "LLN α = β = 1": (5, "P"),
    "(qᵀk)²": (None, "x"),
    "ReLU(qᵀk)": (None, "+"),
    "φ = x²": (None, "*"),
    "φ = ReLU": (None, "h"),
}
SCORE_VARIANCE = Axis("variance of the scores σ²", log=True, ticks=(0.25, 0.5, 1, 2, 4, 8, 16))
TERM_VARIANCE = Axis("variance σ² of the logarithm of a term")
PAPER_RANGE, IN_PAPER = (0.2, 1.2), "the paper's\nrange"


def column(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows]


def by_attention(rows: Sequence[Row], x: str, y: str, error: str | None = None) -> list[Curve]:
    curves = []
    for name, (slot, marker) in STYLES.items():
        own = [row for row in rows if row["attention"] == name]
        if own:
            bars = column(own, error) if error and slot is not None else None
            points = column(own, x), column(own, y)
            curves.append(Curve(name, *points, bars, slot, marker, named=slot is None))
    return curves


def by_terms(rows: Sequence[Row]) -> dict[int, list[Row]]:
    sizes = sorted({row["terms"] for row in rows})
    return {terms: [row for row in rows if row["terms"] == terms] for terms in sizes}


def concentration(rows: Sequence[Row]) -> list[Panel]:
    """Fig. 2, and two measures the paper does not have."""
    tau = Axis("temperature τ", log=True, ticks=sorted({row["temperature"] for row in rows}))
    bars = f"Bars: standard deviation over {rows[0]['draws']} draws."
    shown = {
        "entropy": ("Entropy of a row", Axis("bits"), f"Mean over the rows. {bars}"),
        "spectral_gap": (
            "Spectral gap 1 − |λ₂|",
            Axis("gap", limits=(0, 1.03)),
            f"Large where all queries attend alike. {bars}",
        ),
        "mutual_information": (
            "Mutual information of query and key",
            Axis("bits"),
            f"The part of the concentration that depends on the query; not in the paper. {bars}",
        ),
        "column_bias": (
            "Column bias",
            Axis("bits"),
            f"Divergence of the mean row from uniform; not in the paper. {bars}",
        ),
    }
    return [
        Panel(title, by_attention(rows, "temperature", name, f"{name}_sd"), tau, axis, note)
        for name, (title, axis, note) in shown.items()
    ]


def softmax_law(rows: Sequence[Row]) -> list[Panel]:
    """Fig. 5a: measured and predicted variance and mean of ln P, and the relative errors."""
    x = column(rows, "score_variance")

    def curve(label: str, name: str, slot: int, marker: str) -> Curve:
        return Curve(label, x, column(rows, name), column(rows, f"{name}_sd"), slot, marker)

    def theory(label: str, name: str) -> Curve:
        return Curve(label, x, column(rows, name), slot=2, dashed=True)

    def error(label: str, name: str, predicted: str, slot: int, marker: str) -> Curve:
        per_cent = [100 * abs(row[name] / row[predicted] - 1) for row in rows]
        return Curve(label, x, per_cent, slot=slot, marker=marker)

    within, everywhere = "variance within rows", "variance of all entries"
    variance = [
        curve(within, "variance_within_rows", 0, "o"),
        curve(everywhere, "variance_all", 1, "s"),
        theory("Proposition 3.1", "variance_predicted"),
    ]
    mean = [curve("mean", "mean", 3, "^"), theory("Proposition 3.1", "mean_predicted")]
    errors = [
        error(within, "variance_within_rows", "variance_predicted", 0, "o"),
        error(everywhere, "variance_all", "variance_predicted", 1, "s"),
        error("mean", "mean", "mean_predicted", 3, "^"),
        Curve("1 %", x, [1.0] * len(x), dashed=True),
    ]
    what = f"Softmax attention, N = {rows[0]['tokens']}, D = {rows[0]['head_dim']}."
    note = (
        "The variance within rows follows the theory everywhere; the mean only while σ² is small "
        "against 2 ln N."
    )
    per_cent = Axis("per cent", log=True)
    return [
        Panel(
            "Variance of ln P, softmax", variance, SCORE_VARIANCE, Axis("variance", log=True), what
        ),
        Panel("Mean of ln P, softmax", mean, SCORE_VARIANCE, Axis("mean"), what),
        Panel("Error of Proposition 3.1", errors, SCORE_VARIANCE, per_cent, note),
    ]


def matched_variance(rows: Sequence[Row]) -> list[Panel]:
    """Fig. 5b: the variance that calibration is meant to equate."""
    shown = {
        "variance_within_rows": (
            "Variance of ln P within rows",
            "The exact calibration lies on softmax; the published line crosses it.",
        ),
        "variance_all": (
            "Variance of ln P, all entries",
            "As the paper measures it: differences between the normalisers of rows count too.",
        ),
    }
    panels = []
    for name, (title, note) in shown.items():
        curves = by_attention(rows, "score_variance", name, f"{name}_sd")
        panels.append(Panel(title, curves, SCORE_VARIANCE, Axis("variance", log=True), note))
    return panels


def sums(rows: Sequence[Row], theory: str, label: str) -> list[Curve]:
    """Measured variances of ln Σ exp and their theory, a pair of curves per number of terms."""
    curves = []
    for slot, (terms, own) in enumerate(by_terms(rows).items()):
        x = column(own, "input_variance")
        measured = column(own, "variance")
        curves.append(Curve(f"D = {terms}", x, measured, slot=slot, marker=MARKERS[slot]))
        predicted = column(own, theory)
        curves.append(Curve(f"{label}, D = {terms}", x, predicted, slot=slot, dashed=True))
    return curves


def moderate_sum(rows: Sequence[Row]) -> list[Panel]:
    """Fig. 6a: Fenton's law, and its error within and beyond the paper's range."""
    errors = [
        Curve(
            f"D = {terms}",
            column(own, "input_variance"),
            [100 * row["error"] for row in own],
            slot=slot,
            marker=MARKERS[slot],
        )
        for slot, (terms, own) in enumerate(by_terms(rows).items())
    ]
    variance = Axis("variance", log=True)
    return [
        Panel(
            "Variance of ln Σ exp",
            sums(rows, "fenton", "Fenton"),
            TERM_VARIANCE,
            variance,
            "Shaded: the range of the paper's figure.",
            span=PAPER_RANGE,
            span_label=IN_PAPER,
        ),
        Panel(
            "Error of Fenton's law",
            errors,
            TERM_VARIANCE,
            Axis("per cent"),
            "Good to a few per cent up to σ² of about 1, useless at 4.",
            span=PAPER_RANGE,
            span_label=IN_PAPER,
        ),
    ]


def broad_sum(rows: Sequence[Row]) -> list[Panel]:
    """Fig. 6b: linear growth in the broad case."""
    visible = [{**row, "line": max(row["line"], 0) or float("nan")} for row in rows]
    return [
        Panel(
            "Variance of ln Σ exp, broad case",
            sums(visible, "line", "line"),
            TERM_VARIANCE,
            Axis("variance", limits=(0, None)),
            f"Lines fitted from σ² = {rows[0]['fitted_from']:g} on.",
        )
    ]


def histogram(rows: Sequence[Row]) -> list[Panel]:
    """Fig. 7: the histograms, and the normal laws with the same mean and variance."""
    after, before = [], []
    for name, (slot, _) in STYLES.items():
        own = [row for row in rows if row["attention"] == name]
        if not own:
            continue
        x = column(own, "log_p")
        pair = [
            Curve(name, x, column(own, "density"), slot=slot),
            Curve(f"{name}: normal law", x, column(own, "normal_density"), slot=slot, dashed=True),
        ]
        if name != "LLN α = β = 1":
            after += pair
        if name in ("softmax", "LLN α = β = 1"):
            before += pair
    axes = (Axis("ln P"), Axis("density"))
    note = (
        "LLN's ln P is skewed to the right: equal variance is not yet an equal law. "
        "Dashed: normal laws of the same mean and variance."
    )
    return [
        Panel("Before matching", before, *axes, "α = β = 1 leaves attention nearly uniform."),
        Panel("After matching", after, *axes, note),
    ]


PANELS: dict[str, Callable[[Sequence[Row]], list[Panel]]] = {
    "2": concentration,
    "5a": softmax_law,
    "5b": matched_variance,
    "6a": moderate_sum,
    "6b": broad_sum,
    "7": histogram,
}
