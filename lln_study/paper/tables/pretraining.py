"""Pre-training: validation loss at equal tokens and at equal time, speed, memory, branches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from lln.report.page import Table
from lln_study.paper.results import (
    Mean,
    Row,
    best_rates,
    grouped,
    in_paper_order,
    mechanism,
    options,
    origin_text,
    record,
    setting,
    shown,
    value,
    was_alone,
)

SINUSOIDS = (
    "The learned embeddings of positions start from sines and cosines, for all alike: from random "
    "ones softmax is still at the plateau of its start after 66M tokens (docs/guide/training.md)."
)
EQUAL_TIME = (
    "Equal time: after the {:,.0f} s that the fastest run takes; the others are still on their way "
    "then, with a higher learning rate."
)
NOT_SHOWN = (
    "No speed of runs that shared their GPU with others, and no peak where attention was measured "
    "during the run (monitor_every), which takes memory."
)


def tables(rows: Sequence[Row], curves: Sequence[Row] = ()) -> list[Table]:
    """One for each scale at which at least two mechanisms were pre-trained, the largest first.

    Fig. 1 has a model of its own, trained to be looked at and not to the end.
    """
    trained = [
        row
        for row in rows
        if row["subject"] == "mlm" and row["configuration"].get("recipe") != "figure-1"
    ]
    scales = grouped(trained, _scale)
    found = [own for own in scales.values() if len({_variant(row) for row in own}) > 1]
    return [_table(own, curves) for own in sorted(found, key=_size, reverse=True)]


def _scale(row: Row) -> tuple[Any, ...]:
    return (*setting(row["configuration"]).values(), row["device"])


def _size(rows: list[Row]) -> tuple[int, ...]:
    configuration = rows[0]["configuration"]
    return tuple(configuration.get(name) or 0 for name in ("width", "layers", "length", "steps"))


def _variant(row: Row) -> tuple[str, str]:
    return mechanism(row), options(row)


def _table(rows: list[Row], curves: Sequence[Row]) -> Table:
    of_run = grouped(curves, lambda line: (line["digest"], line["seed"]))
    rates = best_rates(rows)
    tried = sorted({row["configuration"].get("learning_rate") or 0 for row in rows})
    rows = [
        row for row in rows if row["configuration"].get("learning_rate") == rates[_variant(row)]
    ]
    by_variant = grouped(sorted(rows, key=in_paper_order), _variant)
    seconds = min((row["train_seconds"] for row in rows if was_alone(row)), default=None)
    found = [_mechanism(own, of_run, seconds) for own in by_variant.values()]
    first = rows[0]["configuration"]
    amount = first["steps"] * first["batch_size"] * first["length"] / 1e6
    title = (
        f"Pre-training: RoBERTa of {first['layers']} layers × {first['width']}, "
        f"N = {first['length']:,}, {amount:,.0f}M tokens of {first['corpus']}, {first['precision']}"
    )
    notes = [
        *([SINUSOIDS] if first.get("positions") == "sinusoid" else []),
        "Loss: of validation, nats per hidden token, after equally many tokens.",
        *([EQUAL_TIME.format(seconds)] if seconds is not None else []),
        NOT_SHOWN,
        f"Learning rates tried, the best by this loss shown: {', '.join(f'{x:g}' for x in tried)}.",
        "LLN share: of the output of LLN+Diag, mean over layers and heads, last measured.",
        origin_text(rows),
    ]
    columns = ["", "loss", "at equal time", "tokens/s", "peak GiB", "parameters", "LLN share"]
    return Table(columns, [line for line, _ in found], title, notes, [each for _, each in found])


def _mechanism(
    rows: list[Row], curves: dict[tuple[str, int], list[Row]], seconds: float | None
) -> tuple[list[str], dict[str, Any]]:
    def measured(rows: list[Row]) -> list[Sequence[Row]]:
        own = [line for row in rows for line in curves.get((row["digest"], row["seed"]), [])]
        return [line["rows"] for line in own]

    alone = [row for row in rows if was_alone(row)]
    values = {
        "loss": Mean.of(row["loss"] for row in rows),
        "loss_at_equal_time": Mean.of(loss_after(run, seconds) for run in measured(alone)),
        "tokens_per_second": Mean.of(row["tokens_per_second"] for row in alone),
        "peak_gib": Mean.of(map(_peak, rows)),
        "lln_share": Mean.of(map(last_share, measured(rows))),
    }
    digits = {"loss": 3, "loss_at_equal_time": 3, "peak_gib": 1, "lln_share": 2}
    cells = {name: shown(mean, digits.get(name, 0)) for name, mean in values.items()}
    speed = values["tokens_per_second"]
    cells["tokens_per_second"] = "–" if speed is None else f"{speed.value:,.0f}"
    name, parameters = mechanism(rows[0]), rows[0]["parameters"]
    diverged = sum(bool(row.get("diverged")) for row in rows)
    line = [
        f"{name} ({diverged} of {len(rows)} diverged)" if diverged else name,
        *(cells[key] for key in ("loss", "loss_at_equal_time", "tokens_per_second", "peak_gib")),
        f"{parameters / 1e6:.1f}M",
        cells["lln_share"],
    ]
    found = {
        **record(name, rows),
        **{key: value(mean) for key, mean in values.items()},
        "standard_errors": {key: mean and mean.error for key, mean in values.items()},
        "seconds_at_equal_time": seconds,
        "parameters": parameters,
        "diverged": diverged,
        "configuration": rows[0]["configuration"],
    }
    return line, found


def _peak(row: Row) -> float | None:
    """GiB, unless attention was measured in the run, which takes memory of its own."""
    watched = row["configuration"].get("monitor_every")
    return None if watched or row.get("peak_mb") is None else row["peak_mb"] / 1024


def loss_after(rows: Sequence[Row], seconds: float | None) -> float | None:
    """Validation loss after some time of training, on a straight line between evaluations."""
    points = [(row["seconds"], row["loss"]) for row in rows if row.get("kind") == "eval"]
    points = [point for point in points if point[1] is not None]
    if seconds is None or not points or points[-1][0] < seconds - 1:
        return None
    for (start, before), (end, after) in itertools.pairwise(points):
        if start <= seconds <= end:
            share = 0.0 if end == start else (seconds - start) / (end - start)
            return before + share * (after - before)
    return points[-1][1]


def last_share(rows: Sequence[Row]) -> float | None:
    """Mean share of the LLN branch at the last step that was measured."""
    measured = [row for row in rows if row.get("lln_share") is not None]
    if not measured:
        return None
    last = max(row["step"] for row in measured)
    shares = [row["lln_share"] for row in measured if row["step"] == last]
    return sum(shares) / len(shares)
