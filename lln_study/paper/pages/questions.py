"""The measured blocks of docs/questions.md, from ``results/questions_…json`` and ``vit.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lln_study.paper.accuracy import is_fixed
from lln_study.paper.pages.blocks import NOTHING_YET, latest, markdown_table, origin
from lln_study.paper.results import origin_text, read

Row = dict[str, Any]


def _block(results: Path, name: str, make: Callable[[Sequence[Row]], str]) -> str:
    content = latest(results, "questions")
    if content is None:
        return NOTHING_YET
    rows = content[name]
    return f"{make(rows)}\n\n({origin(rows[0])}, {content['date']})"


def shape(rows: Sequence[Row]) -> str:
    cells = {(row["head_dim"], row["attention"]): row for row in rows}
    lines = []
    for head_dim in sorted({row["head_dim"] for row in rows}):
        pair = [cells[head_dim, name] for name in ("softmax", "LLN variance")]
        line = [str(head_dim)]
        for name, form in (("kolmogorov_smirnov", ".3f"), ("skew", "+.2f"), ("entropy", ".2f")):
            line += [format(row[name], form) for row in pair]
        lines.append(line)
    names = ["D"]
    for name in ("KS distance", "skew", "entropy"):
        names += [f"{name}, softmax", "LLN"]
    return markdown_table(names, lines)


def matching(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(row["attention"] for row in rows))
    cells = {(row["head_dim"], row["score_variance"], row["attention"]): row for row in rows}
    lines = []
    for head_dim, variance in dict.fromkeys((r["head_dim"], r["score_variance"]) for r in rows):
        line = [f"{head_dim}, σ² = {variance:g}"]
        for name in names:
            row = cells[head_dim, variance, name]
            line.append(f"{row['variance_ratio']:.2f} / {row['entropy_difference']:+.2f}")
        lines.append(line)
    return markdown_table(["D", *(name.removeprefix("LLN ") for name in names)], lines)


def scale(rows: Sequence[Row]) -> str:
    reference = rows[0]["gradient"]
    lines = [
        [
            "softmax" if row["scale"] is None else f"LLN, α = β = {row['scale']:g}",
            f"{row['entropy']:.2f}",
            f"{row['spectral_gap']:.2f}",
            f"{row['gradient'] / reference:.2f}",
        ]
        for row in rows
    ]
    return markdown_table(["", "entropy (bits)", "gap", "gradient / softmax's"], lines)


def retrieval(rows: Sequence[Row]) -> str:
    shown = {
        "softmax": "softmax",
        "LLN paper": "LLN paper",
        "LLN entropy": "LLN entropy",
        "LLN entropy, normalize_keys": "LLN entropy, `normalize_keys`",
        "LLN+Diag near": "LLN+Diag, target in the block",
        "LLN+Diag far": "LLN+Diag, anywhere",
    }
    lines = [
        [f"{row['tokens']:,}, {row['head_dim']}", *(f"{row[name]:.0%}" for name in shown)]
        for row in rows
    ]
    return markdown_table(["N, D", *shown.values()], lines)


def chain(rows: Sequence[Row]) -> str:
    lines = [
        [
            f"{row['attention']}, τ = {row['temperature']:g}".replace(
                "normalize_keys", "`normalize_keys`"
            ),
            f"{row['second_eigenvalue']:.2f}",
            f"{row['centred_singular_value']:.2f}",
            *(f"{row[f'distance_{step}']:.3f}" for step in (1, 2, 3, 4)),
            f"{row['stationary_tokens']:.0f}",
        ]
        for row in rows
    ]
    steps = [f"P^{step}" for step in (1, 2, 3, 4)]
    return markdown_table(["", "\\|λ₂\\|", "σ₁(P̄)", *steps, "tokens of π"], lines)


def _place(row: Row) -> str:
    return f"step {row['step']} (loss {row['loss']:.2f}), layer {row['layer']}"


def activations(rows: Sequence[Row]) -> str:
    lines = [
        [
            _place(row),
            f"{row['product_variance']:.2f}",
            f"{row['score_variance']:.2f}",
            f"{row['row_variance']:.2f}",
            f"{row['mean_error']:+.2f}",
            f"{row['kolmogorov_smirnov']:.3f}",
            f"{row['skew']:+.2f}",
            f"{row['spectral_gap']:.2f}",
            f"{row['column_bias']:.2f}",
        ]
        for row in rows
    ]
    names = [
        "",
        "σ_q²σ_k²",
        "σ² of scores",
        "within rows",
        "mean error",
        "KS",
        "skew",
        "gap",
        "bias",
    ]
    return markdown_table(names, lines)


def calibration(rows: Sequence[Row]) -> str:
    methods = [(m, t) for m in ("paper", "variance", "entropy") for t in ("product", "measured")]
    lines = []
    for row in rows:
        bits = [row[f"entropy_{method}_{target}"] - row["entropy"] for method, target in methods]
        lines.append([_place(row), f"{row['entropy']:.2f}", *(f"{value:+.2f}" for value in bits)])
    return markdown_table(["", "softmax", *(f"{m}, {t}" for m, t in methods)], lines)


def trained(results: Path) -> str:
    """Fixed α = β in training: the rows of Fig. 10a (accuracy) and 10b (loss scale in fp16)."""
    rows = [row for row in read(results, "vit") if row["mechanism"] == "lln"]
    fixed = [row for row in rows if is_fixed(row)]
    if not fixed:
        return NOTHING_YET
    lines, used = [], []
    for scale in (None, *sorted({row["configuration"]["options"]["alpha"] for row in fixed})):
        own = [row for row in rows if _fixed_at(row) == scale]
        scales = [row["curves"]["loss_scale"]["loss_scale"] for row in own if _has_scale(row)]
        words = [f"{own[0]:,.0f} to {min(own):,.0f}" for own in scales]
        accuracies = [f"{100 * row['accuracy']:.1f}" for row in own if not _has_scale(row)]
        name = "matched" if scale is None else f"{scale:g}"
        lines.append([name, ", ".join(accuracies) or "–", ", ".join(words) or "–"])
        used += own
    table = markdown_table(["α = β", "accuracy, %, bf16", "loss scale in fp16"], lines)
    return f"{table}\n\n({origin_text(used)})"


def _fixed_at(row: Mapping[str, Any]) -> float | None:
    return row["configuration"]["options"]["alpha"] if is_fixed(row) else None


def _has_scale(row: Mapping[str, Any]) -> bool:
    return bool((row.get("curves") or {}).get("loss_scale"))


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "shape": ("shape", shape),
    "matching": ("matching", matching),
    "scale": ("scale", scale),
    "retrieval": ("retrieval", retrieval),
    "chain": ("chain", chain),
    "activations": ("activations", activations),
    "calibration": ("activations", calibration),
}
BLOCKS: dict[str, Callable[[Path], str]] = {
    name: partial(_block, name=rows, make=make) for name, (rows, make) in TABLES.items()
}
BLOCKS["trained"] = trained
