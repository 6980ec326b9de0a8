"""README's picture: the time of a training step on a GPU and of attention on a CPU against N."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lln.report.lines import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.results import latest
from lln_study.paper.tables import table as tables

SLOTS = {"softmax (SDPA)": 0, "LLN+Diag": 1, "Nyströmformer": 2, "LLN": 3}  # their colours
MECHANISMS = {"softmax": "softmax (SDPA)", "lln_diag": "LLN+Diag", "nystromformer": "Nyströmformer"}
CASES = {
    ("bidirectional", "sdpa"): "softmax (SDPA)",
    ("lln_diag", "eager"): "LLN+Diag",
    ("bidirectional", "eager"): "LLN",
}


def panels(results: Path) -> list[Panel]:
    """A panel for each of the two that has rows."""
    drawn = []
    for table in tables.make("2", results)[:1]:
        times = {
            label: {
                int(N): ms
                for row in table.records
                if row["mechanism"] == name
                for N, ms in row["milliseconds"].items()
                if ms
            }
            for name, label in MECHANISMS.items()
        }
        first = table.records[0]
        size = f"{first['configuration']['layers']} × {first['configuration']['width']}"
        drawn.append(_panel(f"Training step of RoBERTa {size}, {first['device']}", times))
    content = latest(results, "attention")
    if content is not None:
        forward = [row for row in content["rows"] if row["pass"] == "fwd"]
        times = {
            label: {row["N"]: row["ms_p50"] for row in forward if (row["op"], row["impl"]) == case}
            for case, label in CASES.items()
        }
        threads = forward[0]["device"].split(", ")[-1]
        drawn.append(_panel(f"Attention alone, forward, CPU with {threads}", times))
    return drawn


def _panel(title: str, times: Mapping[str, Mapping[int, float]]) -> Panel:
    curves = []
    for label, own in times.items():
        slot, lengths = SLOTS[label], sorted(own)
        ms = [own[N] for N in lengths]
        curves.append(Curve(label, lengths, ms, slot=slot, marker="osD^"[slot], named=True))
    lengths = sorted({N for own in times.values() for N in own})
    ticks = lengths if len(lengths) < 8 else lengths[::2]
    return Panel(
        title, curves, Axis("tokens N", log=True, ticks=ticks), Axis("milliseconds", log=True)
    )
