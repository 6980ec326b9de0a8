"""Recall and key heads in a report: what is found again, and what each head is worth for it."""

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
RECALL_TEXT = """
Recall: pieces of random tokens are said, and asked for again from beyond the window. Pairs have a
key of two tokens and a value of one, needles a cue and an answer of four with others between.
−ln p of the tokens asked for, in nats, and the share that is the most likely one.
"""


def recalled(found: Found) -> list[Block]:
    """Loss and accuracy of generated recall, of both models."""
    rows = found.get("recall")
    if not rows:
        return []
    lines = [
        [f"{row['task']}, {row['model']}", f"{row['beyond']:,}", f"{row['tokens']:,}",
         f"{row['loss']:.3f}", f"{row['accuracy']:.0%}"]
        for row in rows
    ]  # fmt: skip
    columns = ["", "tokens back, at least", "asked for", "nats a token", "right"]
    return [Text(RECALL_TEXT), Table(columns, lines)]


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
