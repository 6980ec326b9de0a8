"""Two pictures of the start page of results: Table 5 as bars, conversion against what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.results import Row, grouped, read
from lln_study.paper.tables import table as tables
from lln_study.paper.tables.arena import NAMES

HEADS, KEY_HEADS = 9, 3  # of a layer of SmolLM2-135M, by its config
FIRST = ("softmax", "lln_diag")  # have the colours that they have elsewhere
WIDE = 6  # most mechanisms that bars can tell apart


def arena(results: Path) -> list[Panel]:
    """Accuracy on each task of Table 5, of the mechanisms that were run on all of them."""
    drawn = []
    for table in tables.make("5", results)[:1]:
        tasks = [task for task in NAMES if task in table.records[0]]
        whole = [row for row in table.records if all(row.get(task) is not None for task in tasks)]
        first = [name for name in FIRST if any(row["mechanism"] == name for row in whole)]
        named = dict.fromkeys((*first, *(row["mechanism"] for row in whole)))
        slots = {name: slot for slot, name in enumerate(named)}
        curves = [
            Curve(
                row["name"],
                list(range(len(tasks))),
                [100 * row[task] for task in tasks],
                [100 * (row["standard_errors"][task] or 0) for task in tasks],
                slot=slots[row["mechanism"]],
            )
            for row in whole[:WIDE]
        ]
        if curves:
            names = [NAMES[task].replace(" (", "\n(") for task in tasks]
            x = Axis("", ticks=range(len(tasks)), names=names)
            accuracy = Axis("accuracy, %", limits=(0, None))
            drawn.append(Panel("Long Range Arena", curves, x, accuracy, bars=True))
    return drawn


def conversion(results: Path) -> list[Panel]:
    """Perplexity over that of softmax against the tokens whose keys and values are kept."""
    rows = [row for row in read(results, "conversion") if _is_shown(row)]
    if not rows:
        return []
    length = max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == length]
    alone = _best([row for row in rows if not row["kept"] and not _heads(row)])
    near = alone[0]["near_keys"]
    heads = _best(
        [row for row in rows if _heads(row) or (row in alone and row["near_keys"] == near)]
    )
    layers = _best(
        [row for row in rows if row["kept"] or (row in alone and row["near_keys"] == near)]
    )
    shown = {
        "more near keys": alone,
        "heads keep softmax": heads,
        "layers keep softmax": layers,
    }
    curves = [
        Curve(
            label,
            [100 * kept_tokens(row) / length for row in own],
            [1 / row["agreement"] for row in own],
            slot=slot,
            marker="o",
            named=True,
        )
        for slot, (label, own) in enumerate(shown.items(), start=1)
    ]
    curves.append(Curve("softmax", [0, 100], [1, 1], dashed=True, named=True))
    x = Axis(f"keys and values kept after {length:,} tokens, % of softmax", limits=(0, 105))
    title = "Converted SmolLM2-135M"
    return [Panel(title, curves, x, Axis("perplexity ÷ that of softmax"))]


def kept_tokens(row: Row) -> float:
    """Tokens whose keys and values a converted decoder keeps, mean over layers and key heads.

    A layer with softmax keeps all, other layers the near ones, and all for the key heads that
    their softmax heads read.
    """
    length, layers = row["length"], row["layers"]
    linear = layers - len(row["kept"])
    group = HEADS // KEY_HEADS
    read_by_heads = sum(len({h // group for h in own}) for own in row["kept_heads"].values())
    whole = len(row["kept"]) + read_by_heads / KEY_HEADS
    return (whole * length + linear * row["near_keys"]) / layers


def _is_shown(row: Row) -> bool:
    learned = row["options"].get("feature_map") == "learned"
    ours = row["attention"] == "lln_nearfar" and learned and not row.get("from_scratch")
    return ours and row["model"].startswith("SmolLM2-135M") and bool(row["agreement"])


def _heads(row: Row) -> int:
    return sum(map(len, row["kept_heads"].values()))


def _best(rows: Sequence[Row]) -> list[Row]:
    """The best of those that keep equally much, least first."""
    groups = grouped(rows, lambda row: round(kept_tokens(row)))
    best = [max(own, key=lambda row: row["agreement"]) for own in groups.values()]
    return sorted(best, key=kept_tokens)
