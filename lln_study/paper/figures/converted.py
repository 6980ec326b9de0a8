"""What a converted decoder reaches with how large a cache: its perplexity, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.results import Row, grouped, read
from lln_study.paper.tables.conversion import needles_found

HEADS, KEY_HEADS, WIDTH = 9, 3, 64  # of a layer of SmolLM2-135M, by its config
CONTEXT = 8192  # tokens after which caches are compared
TITLE = "Converted SmolLM2-135M"


def panels(results: Path) -> list[Panel]:
    """Perplexity, and needles from beyond the near keys, against the size of the cache."""
    rows = [row for row in read(results, "conversion") if _is_shown(row)]
    if not rows:
        return []
    length = max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == length]
    x = Axis(f"cache after {CONTEXT:,} tokens, % of softmax", limits=(0, 105))
    drawn = [Panel(TITLE, _curves(rows, ratio, 1), x, Axis("perplexity ÷ softmax's"))]
    found = [row for row in rows if needles_found(row) is not None]
    if found:
        y = Axis("needles found beyond the near keys, %", limits=(0, 105))
        drawn.append(Panel(TITLE, _curves(found, needles_found, 100), x, y))
    return drawn


def _curves(rows: Sequence[Row], value: Callable[[Row], Any], softmax: float) -> list[Curve]:
    """A curve for each way to spend memory, from the setting that the others start from.

    Of models of a size the one of least perplexity is drawn.
    """
    ours = [row for row in rows if row["attention"] == "lln_nearfar"]
    alone = [row for row in ours if not row["kept"] and not row["kept_heads"]]
    first = min((row["near_keys"] for row in alone), default=None)
    start = [row for row in alone if row["near_keys"] == first]
    slots = [row["options"].get("slots") for row in start]
    heads = [row for row in ours if row.get("kept_key_heads")]
    whole = [row for row in heads if row["options"].get("slots") in slots]
    others = [row for row in ours if not row.get("kept_key_heads")]
    single, layers = ([row for row in others if row[name]] for name in ("kept_heads", "kept"))
    shown = {
        "more near keys": alone,
        "key heads keep softmax": whole and start + whole,
        "key heads, more slots": [row for row in heads if row not in whole],
        "query heads keep softmax": single and start + single,
        "layers keep softmax": layers and start + layers,
        "no far keys": [row for row in rows if row["attention"] != "lln_nearfar"],
    }
    curves = []
    for slot, (label, own) in enumerate(shown.items(), start=1):
        groups = grouped(own, lambda row: round(cache_share(row), 3)).values()
        best = [max(each, key=lambda row: row["agreement"]) for each in groups]
        points = sorted((100 * cache_share(row), value(row)) for row in best)
        if points:
            xs, ys = zip(*points, strict=True)
            curves.append(Curve(label, xs, ys, slot=slot, marker="o", named=True))
    return [*curves, Curve("softmax", [0, 100], [softmax, softmax], dashed=True, named=True)]


def ratio(row: Row) -> float:
    """Perplexity over that of softmax."""
    return 1 / row["agreement"]


def cache_share(row: Row) -> float:
    """The cache over that of softmax: as it was measured, of older rows by count.

    A key head of a linear layer has its near keys and values, what the feature maps make of these
    keys, and a state in float32. Kept heads have all keys and values beside it.
    """
    if told := (row.get("cache_share") or {}).get(f"{CONTEXT}"):
        return told
    slots = row["options"].get("slots", 2 * WIDTH) if row["attention"] == "lln_nearfar" else 0
    softmax = 2 * 2 * WIDTH * CONTEXT  # bytes of bfloat16
    linear = 2 * (2 * WIDTH + slots) * row["near_keys"] + 4 * (WIDTH + 1) * slots
    layers, group = row["layers"], HEADS // KEY_HEADS
    heads = sum(len({head // group for head in own}) for own in row["kept_heads"].values())
    whole = len(row["kept"])
    return (whole + (layers - whole) * linear / softmax + heads / KEY_HEADS) / layers


def _is_shown(row: Row) -> bool:
    ours = row["attention"] == "lln_nearfar" and row["options"].get("feature_map") == "learned"
    other = row["attention"] == "window_sinks"
    scratch = row.get("from_scratch")
    smol = row["model"].startswith("SmolLM2-135M") and bool(row["agreement"])
    return smol and (ours or other) and not scratch
