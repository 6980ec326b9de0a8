"""A picture of what the monitor wrote: entropy, temperature, spectral gap, gradient norm."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel, as_files

Row = Mapping[str, Any]
TITLES = {
    "entropy": ("Entropy of a row", Axis("bits")),
    "temperature": ("Temperature", Axis("τ")),
    "spectral_gap": ("Spectral gap", Axis("1 − |λ₂|")),
}
WHOLE_STEP = ("gradient_norm", "Gradient norm of all parameters", Axis("norm", log=True))
STEP = Axis("step")
MOST_NAMES = 12  # at the ends of lines; more are in the legend
NO_LAYERS = "rows holds no row of a layer; pass the list of `lln.instruments.monitor`, or read_rows"


class MonitorPicture:
    """A drawing that a notebook shows by itself; :meth:`save` writes it to a file."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``path``, which ends in .svg or .png."""
        path = Path(path)
        kind = path.suffix[1:]
        if kind not in self._files:
            raise ValueError(f"path={str(path)!r} has no picture's ending; write .svg or .png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self._files[kind])
        return path

    def _repr_svg_(self) -> str:
        return self._files["svg"].decode()


def draw_monitor(rows: Sequence[Row]) -> MonitorPicture:
    """Draw the rows of a monitor over the steps: a line per layer, the mean of its heads.

    Args:
        rows: Of :func:`lln.instruments.monitor` or :func:`lln.instruments.read_rows`. What was
            not measured has no panel: the spectral gap must be asked for in ``measures``.

    Example:
        >>> with monitor(model, every=20, measures=["entropy", "spectral_gap"]) as rows:
        ...     train(model)
        >>> draw_monitor(rows).save("watched.svg")
    """
    if not any("layer" in row for row in rows):
        raise ValueError(NO_LAYERS)
    panels = [
        Panel(title, curves, STEP, axis)
        for name, (title, axis) in TITLES.items()
        if (curves := _curves(rows, name))
    ]
    name, title, axis = WHOLE_STEP
    norms = [(row["step"], row[name]) for row in rows if row.get(name)]
    if norms:
        steps, values = map(list, zip(*norms, strict=True))
        panels.append(Panel(title, [Curve("all layers", steps, values, named=True)], STEP, axis))
    return MonitorPicture(as_files("monitor", panels))


def _curves(rows: Sequence[Row], name: str) -> list[Curve]:
    """A curve per layer: the mean of the heads that were measured, at each step."""
    found: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        if "layer" in row and row.get(name) is not None:
            found.setdefault(row["layer"], {}).setdefault(row["step"], []).append(row[name])
    return [
        Curve(
            f"layer {layer}",
            list(steps),
            [sum(heads) / len(heads) for heads in steps.values()],
            slot=slot,
            named=len(found) <= MOST_NAMES,
        )
        for slot, (layer, steps) in enumerate(sorted(found.items()))
    ]
