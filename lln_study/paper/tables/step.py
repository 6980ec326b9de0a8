"""Table 2: time and memory of a training step against the length of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lln.report.numbers import three_digits
from lln.report.page import Table
from lln_study.paper.results import (
    Row,
    grouped,
    in_paper_order,
    mechanism,
    options,
    origin_text,
    record,
)

SETTING = ("recipe", "layers", "width", "heads", "batch_size", "precision", "compile", "graph")


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each model, batch size, precision and device."""
    timed = [row for row in rows if row["subject"] == "step"]
    settings = grouped(timed, lambda row: (*map(row["configuration"].get, SETTING), row["device"]))
    return [_table(own) for own in settings.values()]


def _table(rows: list[Row]) -> Table:
    lengths = sorted({_length(row) for row in rows})
    by_mechanism = grouped(sorted(rows, key=in_paper_order), lambda r: (_name(r), options(r)))
    cells = {name: {_length(row): row for row in own} for (name, _), own in by_mechanism.items()}
    lines = [
        [f"{name}: {what}", *(show(own.get(length)) for length in lengths)]
        for what, show in (("memory, GiB", _memory), ("time, ms", _time))
        for name, own in cells.items()
    ]
    lines += _ratios(cells, lengths)
    first = rows[0]["configuration"]
    what = "Table 2 on this hardware" if len(lengths) > 1 else "Alone on the device"
    title = (
        f"{what}: a training step of RoBERTa ({first['layers']} layers × "
        f"{first['width']}), batch {first['batch_size']}, {first['precision']}, "
        f"{'compiled' if first.get('compile') else 'not compiled'}, "
        f"{'replayed from CUDA graphs' if first.get('graph') else 'launched kernel by kernel'}"
    )
    notes = [
        "A step is forward, backward and update of masked language modelling on random ids; memory "
        "is the peak that torch allocated; OOM: out of memory.",
        origin_text(rows),
    ]
    columns = ["N", *(f"{length:,}" for length in lengths)]
    records = [_record(name, own) for name, own in cells.items()]
    return Table(columns, lines, title, notes, records)


def _length(row: Row) -> int:
    return row["configuration"]["length"]


def _name(row: Row) -> str:
    backend = row.get("sdpa_backend")
    return f"{mechanism(row)} (SDPA: {backend})" if backend else mechanism(row)


def _memory(row: Row | None) -> str:
    if row is None:
        return "–"
    if row["out_of_memory"]:
        return "OOM"
    return "–" if row.get("peak_mb") is None else f"{row['peak_mb'] / 1024:.1f}"


def _time(row: Row | None) -> str:
    if row is None:
        return "–"
    return "OOM" if row["out_of_memory"] else three_digits(row["step_ms"])


def _ratios(cells: dict[str, dict[int, Row]], lengths: list[int]) -> list[list[str]]:
    """How many times faster LLN is than softmax by SDPA."""

    def times(name: str) -> dict[int, float]:
        return {
            length: row["step_ms"]
            for own in cells.values()
            for length, row in own.items()
            if row["mechanism"] == name and options(row) == "{}" and row.get("step_ms")
        }

    softmax = times("softmax")
    found = []
    for name, shown in (("lln", "LLN"), ("lln_diag", "LLN+Diag")):
        own = times(name)
        if set(own) & set(softmax):
            ratios = (softmax[n] / own[n] if n in own and n in softmax else None for n in lengths)
            cells_of = ["–" if ratio is None else f"{ratio:.2f}×" for ratio in ratios]
            found.append([f"{shown} faster than SDPA", *cells_of])
    return found


def _record(name: str, own: dict[int, Row]) -> dict[str, Any]:
    rows = list(own.values())
    return {
        **record(name, rows),
        "milliseconds": {str(n): row.get("step_ms") for n, row in sorted(own.items())},
        "peak_mb": {str(n): row.get("peak_mb") for n, row in sorted(own.items())},
        "out_of_memory": [n for n, row in sorted(own.items()) if row["out_of_memory"]],
        "sdpa_backend": rows[0].get("sdpa_backend"),
        "configuration": rows[0]["configuration"],
    }
