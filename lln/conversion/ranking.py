"""The order of key heads in a report: what each is worth, by recall and by error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lln.hf.conversion.keep import best_first
from lln.report.page import Block, Table, Text

Found = Mapping[str, Any]
SHOWN = 20
TITLES = {"retrieval": "lost on recall, nats", "error": "part in the layer's error²"}
RANKING_TEXT = """
What each key head is worth, with all query heads that share it. Lost on recall: −ln p of generated
pairs and sayings from beyond the window, shared out among the heads on the way from softmax to
linear attention (integrated gradients), so that all add up to what is lost with none kept. Part in
the error: ‖difference‖² / ‖softmax's‖² of its layer. conversion.json has all heads.
"""


def ranking(found: Found) -> list[Block]:
    """The first key heads by the order that decided, and the place they have in the other."""
    scores = {order: dict(enumerate(own)) for order, own in found.get("scores", {}).items()}
    if not scores:
        return []
    ranks = {order: best_first(own) for order, own in scores.items()}
    first = found["settings"].get("keep_by") or next(name for name in TITLES if name in ranks)
    columns = ["", "layer", "key head", "keeps softmax"]
    for order in ranks:
        columns += [TITLES[order], f"place by {order}"]
    lines = []
    for place, (layer, head) in enumerate(ranks[first][:SHOWN], 1):
        kept = head in found["kept_key_heads"].get(str(layer), ())
        line = [f"{place}", f"{layer}", f"{head}", "yes" if kept else ""]
        for order, own in scores.items():
            line += [f"{own[layer][head]:.4f}", f"{ranks[order].index((layer, head)) + 1}"]
        lines.append(line)
    total = found["key_heads"]
    return [Text(RANKING_TEXT), Table(columns, lines, f"The first of {total} key heads by {first}")]
