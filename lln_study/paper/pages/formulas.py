"""Attention computed from given queries and keys: questions, concentration, near and far keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lln_study.paper.pages.blocks import (
    Blocks,
    Row,
    cells,
    crossed,
    from_file,
    listed,
    picture,
)
from lln_study.paper.results import grouped

SCALE = {
    "": "{name}",
    "entropy (bits)": "{entropy:.2f}",
    "gap": "{spectral_gap:.2f}",
    "gradient / softmax's": "{ratio:.2f}",
}
RETRIEVAL = {
    "N, D": "{tokens:,}, {head_dim}",
    "softmax": "{softmax:.0%}",
    "LLN paper": "{LLN paper:.0%}",
    "LLN entropy": "{LLN entropy:.0%}",
    "LLN entropy, `normalize_keys`": "{LLN entropy, normalize_keys:.0%}",
    "LLN+Diag, target in the block": "{LLN+Diag near:.0%}",
    "LLN+Diag, anywhere": "{LLN+Diag far:.0%}",
}
ACTIVATIONS = {
    "": "step {step} (loss {loss:.2f}), layer {layer}",
    "σ_q²σ_k²": "{product_variance:.2f}",
    "σ² of scores": "{score_variance:.2f}",
    "within rows": "{row_variance:.2f}",
    "mean error": "{mean_error:+.2f}",
    "KS": "{kolmogorov_smirnov:.3f}",
    "skew": "{skew:+.2f}",
    "gap": "{spectral_gap:.2f}",
    "bias": "{column_bias:.2f}",
}
HEADS = {
    "mean over all heads": "{form}",
    "entropy, bits": "{entropy:.1f}",
    "near share": "{near_share:.0%}",
    "mass elsewhere": "{distance:.0%}",
}


SHOWN_AT = (0.3, 0.5, 1.0, 2.0)  # temperatures on the page of concentration
SCALES = (None, 1.0, 2.0, 2.2, 3.0, 6.0)  # α = β on the page of questions


def shape(rows: Sequence[Row]) -> str:
    own = [row for row in rows if row["attention"] in ("softmax", "LLN variance")]
    found = cells(own, "{head_dim}", "KS distance, {attention}", "{kolmogorov_smirnov:.3f}")
    found |= cells(own, "{head_dim}", "skew, {attention}", "{skew:+.2f}")
    return crossed("D", found)


def matching(rows: Sequence[Row]) -> str:
    cell = "{variance_ratio:.2f} / {entropy_difference:+.2f}"
    shown = [row for row in rows if row["head_dim"] != 32]
    return crossed("D", cells(shown, "{head_dim}, σ² = {score_variance:g}", "{attention}", cell))


def scale(rows: Sequence[Row]) -> str:
    shown = []
    for row in rows:
        name = "softmax" if row["scale"] is None else f"LLN, α = β = {row['scale']:g}"
        shown.append({**row, "name": name, "ratio": row["gradient"] / rows[0]["gradient"]})
    return listed([row for row in shown if row["scale"] in SCALES], SCALE)


def concentration(content: Mapping[str, Sequence[Row]]) -> str:
    """Entropy and spectral gap at some temperatures, and the share of targets found."""
    rows = [row for row in content["concentration"] if row["temperature"] in SHOWN_AT]
    rows.sort(key=lambda row: row["temperature"])
    found = cells(rows, "{kernel}", "τ = {temperature:g}", "{entropy:.2f} / {spectral_gap:.2f}")
    found |= cells(content["retrieval"], "{kernel}", "targets found", "{found:.0%}")
    return crossed("entropy (bits) / spectral gap", found)


def near_far(rows: Sequence[Row]) -> str:
    """Bits and share of near keys against softmax's, for every size and temperature."""
    cell = "{entropy_difference:+.2f} / {share_difference:+.3f}"
    shown = [row for row in rows if row["head_dim"] != 32]
    return crossed("N, D", cells(shown, "{tokens:,}, {head_dim}", "τ = {temperature:g}", cell))


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
    return listed(means, HEADS)


def activations(rows: Sequence[Row]) -> str:
    """The first layer of the first step, which is like the others, and the layers at the end."""
    return listed([row for row in rows if row["step"] or not row["layer"]], ACTIVATIONS)


QUESTIONS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "shape": shape,
    "matching": matching,
    "scale": scale,
    "retrieval": partial(listed, columns=RETRIEVAL),
    "activations": activations,
}
BLOCKS: Blocks = {
    **{name: from_file("questions", make, name) for name, make in QUESTIONS.items()},
    "concentration": from_file("demo", concentration, "concentration", whole=True),
    "near_far": from_file("near-far", near_far, "concentration"),
    "near_far_matrices": matrices,
    "near_far_slots": from_file("near-far", slots, "retrieval"),
}
