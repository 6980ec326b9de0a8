"""Figures that need training, from result rows, the paper's and one of our own: :data:`FIGURES`.

Each is a function from rows to panels, none without the rows it needs. What is drawn is also what
:func:`points` lists for the CSV file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.accuracy import is_fixed
from lln_study.paper.figures import arena as arena_figure
from lln_study.paper.figures import sets as sets_figure
from lln_study.paper.figures.loss_scale import once
from lln_study.paper.results import NAMES, Mean, Row, grouped, options
from lln_study.paper.values import FIGURE_9_RANGE

SYMBOLS = {"alpha": "α", "beta": "β"}
SETTING = ("recipe", "layers", "width", "length", "steps", "batch_size", "data", "precision")


def _vit(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["subject"] == "vit"]


def _largest(rows: Sequence[Row]) -> list[Row]:
    """Runs of one model, data set and number of steps: those that there are most of."""
    same = grouped(rows, lambda row: str(_fields(row, SETTING)))
    return max(same.values(), key=len) if same else []


def _fields(row: Row, names: Sequence[str]) -> list[Any]:
    return [row["configuration"].get(name) for name in names]


def scales_in_training(rows: Sequence[Row]) -> list[Panel]:
    """Fig. 9: α and β of every layer while the ViT trains, from the monitor."""
    own = [
        row
        for row in _vit(rows)
        if row["mechanism"] in ("lln_diag", "lln")
        and not is_fixed(row)
        and (row.get("curves") or {}).get("scales")
        and row["configuration"]["recipe"] != "deit-tiny"
    ]
    chosen = sorted(
        _largest(own),
        key=lambda row: (row["mechanism"] != "lln_diag", len(options(row)), row["seed"]),
    )
    if not chosen:
        return []
    scales = chosen[0]["curves"]["scales"]
    return [_scale_panel(name, scales, chosen[0]) for name in ("alpha", "beta")]


def _scale_panel(name: str, scales: dict[str, Any], row: Row) -> Panel:
    steps, layers = scales["step"], scales["layers"]
    curves = [
        Curve("one layer", steps, [values[i] for values in scales[name]])
        for i in range(len(layers))
    ]
    means = [sum(values) / len(values) for values in scales[name]]
    curves.append(Curve("mean of the layers", steps, means, slot=1))
    low, high = FIGURE_9_RANGE
    for value in (low, high):
        curves.append(
            Curve("range in the paper", [steps[0], steps[-1]], [value] * 2, slot=2, dashed=True)
        )
    about = row["configuration"]
    note = (
        f"{SYMBOLS[name]} of the heads' mean in each layer, {means[-1]:.2f} at the end on average; "
        f"heads of {about['width'] // about['heads']}. The paper reports 2 to 2.2."
    )
    symbol = SYMBOLS[name]
    return Panel(f"{symbol} during training", curves, Axis("step"), Axis(symbol), note)


def accuracy_of_scales(rows: Sequence[Row]) -> list[Panel]:
    """Fig. 10a: accuracy against fixed α = β, moment matching beside it."""
    fixed = _largest(
        [
            row
            for row in _vit(rows)
            if is_fixed(row) and row["configuration"]["recipe"] != "deit-tiny"
        ]
    )
    if not fixed:
        return []
    curves, notes = [], []
    for slot, (name, own) in enumerate(grouped(fixed, lambda row: row["mechanism"]).items()):
        by_scale = sorted(grouped(own, lambda r: r["configuration"]["options"]["alpha"]).items())
        means = [(scale, Mean.of(row["accuracy"] for row in found)) for scale, found in by_scale]
        known = [(scale, mean) for scale, mean in means if mean is not None]
        x = [scale for scale, _ in known]
        y = [100 * mean.value for _, mean in known]
        several = any(mean.error is not None for _, mean in known)
        errors = [100 * (mean.error or 0) for _, mean in known] if several else None
        label = "LLN+Diag" if name == "lln_diag" else "LLN"
        curves.append(Curve(f"{label}, fixed α = β", x, y, errors, slot=slot + 1, marker="o"))
        matched = Mean.of(row["accuracy"] for row in _like(rows, own[0]))
        if matched is not None:
            line = [100 * matched.value] * 2
            curves.append(
                Curve(f"{label}, matched", [x[0], x[-1]], line, slot=slot + 1, dashed=True)
            )
            notes.append(f"{label} with moment matching: {matched.text(2, 100)} %.")
    softmax = Mean.of(row["accuracy"] for row in _like(rows, fixed[0], "softmax"))
    if softmax is not None:
        x = [row["configuration"]["options"]["alpha"] for row in fixed]
        curves.append(Curve("softmax", [min(x), max(x)], [100 * softmax.value] * 2, dashed=True))
    axes = Axis("α = β"), Axis("accuracy, %")
    return [Panel("Accuracy against α = β", curves, *axes, " ".join(notes))]


def _like(rows: Sequence[Row], example: Row, mechanism: str | None = None) -> list[Row]:
    """Runs in the setting of ``example`` with default options."""
    names = (*SETTING, "learning_rate")
    return [
        row
        for row in _vit(rows)
        if row["mechanism"] == (mechanism or example["mechanism"])
        and not row["configuration"].get("options")
        and _fields(row, names) == _fields(example, names)
    ]


def loss_scale(rows: Sequence[Row]) -> list[Panel]:
    """Fig. 10b: inverse loss scale of deit-tiny in fp16."""
    own = [
        row
        for row in _vit(rows)
        if row["configuration"]["recipe"] == "deit-tiny"
        and (row.get("curves") or {}).get("loss_scale")
    ]
    own = sorted(_largest(own), key=_scale_of)
    if not own:
        return []
    curves = []
    for slot, (label, found) in enumerate(grouped(own, _scale_label).items()):
        curve = min(found, key=lambda row: row["seed"])["curves"]["loss_scale"]
        inverse = [1 / value for value in curve["loss_scale"]]
        curves.append(Curve(label, curve["step"], inverse, slot=slot + 1))
    axes = Axis("step"), Axis("1 / loss scale", log=True)
    return [Panel("Inverse loss scale, deit-tiny in fp16", once(curves), *axes)]


def _scale_of(row: Row) -> float:
    return row["configuration"]["options"]["alpha"] if is_fixed(row) else 0.0


def _scale_label(row: Row) -> str:
    name: str = NAMES.get(row["mechanism"]) or row["mechanism"]
    if is_fixed(row):
        return f"{name}, α = β = {row['configuration']['options']['alpha']:g}"
    return f"{name}, matched" if row["mechanism"].startswith("lln") else name


@dataclass(frozen=True)
class RunFigure:
    """A figure from rows; ``command`` is how to get them."""

    title: str
    panels: Callable[[Sequence[Row]], list[Panel]]
    command: str


FIGURES: dict[str, RunFigure] = {
    "9": RunFigure("α and β while the ViT trains", scales_in_training, "lln sweep sweeps/vit.json"),
    "10a": RunFigure(
        "Accuracy against fixed α = β", accuracy_of_scales, "lln sweep sweeps/figure_10.json"
    ),
    "10b": RunFigure("Inverse loss scale in fp16", loss_scale, "lln sweep sweeps/figure_10.json"),
    "arena": RunFigure(
        "Accuracy while training on the Long Range Arena",
        arena_figure.panels,
        "lln sweep sweeps/lra.json",
    ),
    "sets": RunFigure("Tables as sets of rows", sets_figure.panels, "lln sweep sweeps/tables.json"),
}


def points(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """What is drawn, a row per point."""
    return [
        {
            "panel": panel.title,
            "curve": curve.label,
            "x": x,
            "y": y,
            "error": None if curve.error is None else curve.error[i],
        }
        for panel in panels
        for curve in panel.curves
        for i, (x, y) in enumerate(zip(curve.x, curve.y, strict=True))
    ]
