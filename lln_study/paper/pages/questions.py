"""The measured blocks of docs/questions.md, from ``results/questions_…json`` and ``vit.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lln_study.paper.accuracy import is_fixed
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, Row, cells, crossed, from_file, listed
from lln_study.paper.results import Mean, grouped, origin_text, read

PLACE = "step {step} (loss {loss:.2f}), layer {layer}"
RETRIEVAL = {
    "N, D": "{tokens:,}, {head_dim}",
    "softmax": "{softmax:.0%}",
    "LLN paper": "{LLN paper:.0%}",
    "LLN entropy": "{LLN entropy:.0%}",
    "LLN entropy, `normalize_keys`": "{LLN entropy, normalize_keys:.0%}",
    "LLN+Diag, target in the block": "{LLN+Diag near:.0%}",
    "LLN+Diag, anywhere": "{LLN+Diag far:.0%}",
}
CHAIN = {
    "": "{attention}, τ = {temperature:g}",
    "\\|λ₂\\|": "{second_eigenvalue:.2f}",
    "σ₁(P̄)": "{centred_singular_value:.2f}",
    "P^1": "{distance_1:.3f}",
    "P^2": "{distance_2:.3f}",
    "P^3": "{distance_3:.3f}",
    "P^4": "{distance_4:.3f}",
    "tokens of π": "{stationary_tokens:.0f}",
}
ACTIVATIONS = {
    "": PLACE,
    "σ_q²σ_k²": "{product_variance:.2f}",
    "σ² of scores": "{score_variance:.2f}",
    "within rows": "{row_variance:.2f}",
    "mean error": "{mean_error:+.2f}",
    "KS": "{kolmogorov_smirnov:.3f}",
    "skew": "{skew:+.2f}",
    "gap": "{spectral_gap:.2f}",
    "bias": "{column_bias:.2f}",
}


def shape(rows: Sequence[Row]) -> str:
    own = [row for row in rows if row["attention"] in ("softmax", "LLN variance")]
    found = cells(own, "{head_dim}", "KS distance, {attention}", "{kolmogorov_smirnov:.3f}")
    found |= cells(own, "{head_dim}", "skew, {attention}", "{skew:+.2f}")
    found |= cells(own, "{head_dim}", "entropy, {attention}", "{entropy:.2f}")
    return crossed("D", found)


def matching(rows: Sequence[Row]) -> str:
    cell = "{variance_ratio:.2f} / {entropy_difference:+.2f}"
    return crossed("D", cells(rows, "{head_dim}, σ² = {score_variance:g}", "{attention}", cell))


def scale(rows: Sequence[Row]) -> str:
    columns = {
        "": "{name}",
        "entropy (bits)": "{entropy:.2f}",
        "gap": "{spectral_gap:.2f}",
        "gradient / softmax's": "{ratio:.2f}",
    }
    shown = []
    for row in rows:
        name = "softmax" if row["scale"] is None else f"LLN, α = β = {row['scale']:g}"
        shown.append({**row, "name": name, "ratio": row["gradient"] / rows[0]["gradient"]})
    return listed(shown, columns)


def calibration(rows: Sequence[Row]) -> str:
    """Entropy of softmax, and by how much that of LLN differs from it."""
    names = [
        f"{how}_{of}" for how in ("paper", "variance", "entropy") for of in ("product", "measured")
    ]
    shown = []
    for row in rows:
        bits = {name: row[f"entropy_{name}"] - row["entropy"] for name in names}
        shown.append({**row, **bits})
    columns = {name.replace("_", ", "): f"{{{name}:+.2f}}" for name in names}
    return listed(shown, {"": PLACE, "softmax": "{entropy:.2f}", **columns})


def trained(results: Path) -> str:
    """Fixed α = β in training: the rows of Fig. 10a (accuracy) and 10b (loss scale in fp16)."""
    rows = [row for row in read(results, "vit") if row["mechanism"] == "lln"]
    if not any(is_fixed(row) for row in rows):
        return NOTHING_YET
    found = {}
    for scale, own in sorted(grouped(rows, _fixed_at).items()):
        name = f"{scale:g}" if scale else "matched"
        scales = [(row.get("curves") or {}).get("loss_scale") for row in own]
        accuracy = Mean.of(row["accuracy"] for row, of in zip(own, scales, strict=True) if not of)
        found[name, "accuracy, %, bf16"] = accuracy.text(1, 100) if accuracy else "–"
        ends = [
            f"{of['loss_scale'][0]:,.0f} to {min(of['loss_scale']):,.0f}" for of in scales if of
        ]
        found[name, "loss scale in fp16"] = ", ".join(ends) or "–"
    return f"{crossed('α = β', found)}\n\n({origin_text(rows)})"


def _fixed_at(row: Row) -> float:
    """α, or 0 where it was matched."""
    return row["configuration"]["options"]["alpha"] if is_fixed(row) else 0.0


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "shape": ("shape", shape),
    "matching": ("matching", matching),
    "scale": ("scale", scale),
    "retrieval": ("retrieval", partial(listed, columns=RETRIEVAL)),
    "chain": ("chain", partial(listed, columns=CHAIN)),
    "activations": ("activations", partial(listed, columns=ACTIVATIONS)),
    "calibration": ("activations", calibration),
}
BLOCKS: Blocks = {
    **{name: from_file("questions", make, part) for name, (part, make) in TABLES.items()},
    "trained": trained,
}
