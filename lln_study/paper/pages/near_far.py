"""The measured blocks of docs/guide/near-and-far.md that need no training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lln_study.paper.pages.blocks import Blocks, Row, cells, crossed, from_file, listed, picture
from lln_study.paper.results import grouped


def concentration(rows: Sequence[Row]) -> str:
    """Bits and share of near keys against softmax's, for every size and temperature."""
    cell = "{entropy_difference:+.2f} / {share_difference:+.3f}"
    return crossed("N, D", cells(rows, "{tokens:,}, {head_dim}", "τ = {temperature:g}", cell))


def slots(rows: Sequence[Row]) -> str:
    """Targets found against the number of slots, and by softmax, which has none."""
    ordered = sorted((row for row in rows if row["slots"]), key=lambda row: row["slots"])
    found = cells(ordered, "LLN, `{feature_map}`", "{slots}", "{found:.0%}")
    rest = [row for row in rows if not row["slots"]]
    return crossed("slots", found | cells(rest, "{feature_map}", "none", "{found:.0%}"))


def matrices(results: Path) -> str:
    """The matrices of two heads, and the mean over all heads of that model."""
    drawn = picture(results, "near-far-matrices", "Attention matrices of two heads in four forms")
    return drawn + from_file("near-far-matrices", _mean_over_heads)(results)


def _mean_over_heads(rows: Sequence[Row]) -> str:
    names = ("entropy", "near_share", "distance")
    means = [
        {"form": form, **{name: sum(row[name] for row in own) / len(own) for name in names}}
        for form, own in grouped(rows, lambda row: row["form"]).items()
    ]
    columns = {
        "mean over all heads": "{form}",
        "entropy, bits": "{entropy:.1f}",
        "near share": "{near_share:.0%}",
        "mass elsewhere": "{distance:.0%}",
    }
    return listed(means, columns)


BLOCKS: Blocks = {
    "near_far": from_file("near-far", concentration, "concentration"),
    "near_far_matrices": matrices,
    "near_far_slots": from_file("near-far", slots, "retrieval"),
}
