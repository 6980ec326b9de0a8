"""The measured blocks of conversion beside its table: the best, positions, decoding, GLUE."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, crossed, listed, markdown_table
from lln_study.paper.results import Row, grouped, origin_text, read
from lln_study.paper.tables.conversion import kept
from lln_study.paper.tables.glue import TASKS

# The pre-training whose checkpoint was converted, on the device that it was trained on.
TEACHER = {"options": {}, "recipe": "roberta-small", "length": 512, "steps": 15300, "seed": 1}


def positions(results: Path) -> str:
    """Nats a token against the tokens before it, of converted decoders and their teachers."""
    rows = [row for row in read(results, "conversion") if row.get("loss_by_position")]
    made = []
    for own in grouped(rows, _edges).values():
        found = {
            (words, f"{part['from']:,}–{part['to']:,}"): f"{part['nll']:.2f}"
            for row in own
            for name, words in _both(row).items()
            for part in row["loss_by_position"][name]
        }
        made.append(f"{crossed('tokens before', found)}\n\n({origin_text(own)})")
    return "\n\n".join(made) or NOTHING_YET


def _edges(row: Row) -> tuple[int, ...]:
    return tuple(part["from"] for part in row["loss_by_position"]["teacher"])


def needles(results: Path) -> str:
    """How often a sentence that stands so many tokens back is repeated exactly, in per cent."""
    rows = [row for row in read(results, "conversion") if row.get("needles")]
    found = {
        (_both(row)[one["model"]], f"{one['distance']:,}"): f"{100 * one['exact']:.0f}"
        for row in rows
        for one in row["needles"]
        if one["distance"]
    }
    return f"{crossed('tokens back', found)}\n\n({origin_text(rows)})" if rows else NOTHING_YET


def _both(row: Row) -> dict[str, str]:
    """The names of a converted model and of its teacher."""
    return {"teacher": f"{row['model']}, softmax", "student": f"{row['model']}, {_words(row)}"}


def decoding(results: Path) -> str:
    """Time of a token and size of the cache against the tokens before it."""
    found = [row for row in read(results, "conversion") if row.get("decode_cost")]
    if not found:
        return NOTHING_YET
    costs = []
    for row in found:
        for cost in row["decode_cost"]:
            sizes = {name: cost[f"{name}_cache"] / 1e6 for name in ("teacher", "student")}
            costs.append({**cost, **sizes, "model": row["model"], "near_keys": row["near_keys"]})
    columns = {
        "model": "{model}",
        "near keys": "{near_keys:,}",
        "context": "{context:,}",
        "softmax, MB": "{teacher:,.1f}",
        "converted, MB": "{student:,.1f}",
        "softmax, ms": "{teacher_ms:.0f}",
        "converted, ms": "{student_ms:.0f}",
    }
    return f"{listed(costs, columns)}\n\n({origin_text(found)})"


def finetuned(results: Path) -> str:
    """GLUE of a converted model beside its teacher's, a mean over seeds of fine-tuning."""
    ours = read(results / "conversion", "glue")
    if not ours:
        return NOTHING_YET
    given = {row["configuration"]["task"] for row in ours}
    tasks = [task for task in TASKS if task in given]
    theirs = [
        row
        for row in read(results, "glue")
        if row["configuration"]["task"] in tasks and _is_taught_from(row)
    ]
    lines = []
    for words, rows in (("softmax", theirs), ("converted", ours)):
        by_task = grouped(rows, lambda row: row["configuration"]["task"])
        scores = [_mean(row["score"] for row in by_task[task]) for task in tasks]
        lines.append([words, *(f"{100 * each:.1f}" for each in (*scores, _mean(scores)))])
    names = ["RoBERTa 6 × 512, %", *(TASKS[task] for task in tasks), "average"]
    return f"{markdown_table(names, lines)}\n\n({origin_text([*theirs, *ours])})"


def _is_taught_from(row: Row) -> bool:
    """Whether a fine-tuning starts from the pre-training that was converted."""
    before = row["configuration"].get("pretrained") or {}
    wanted = {"attention": "softmax", **TEACHER}
    return all(before.get(name) == value for name, value in wanted.items())


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def best(results: Path) -> str:
    """The best conversion of every model with nothing kept, and with a few layers or heads kept."""
    ours = [row for row in read(results, "conversion") if _is_ours(row)]
    groups = grouped(ours, lambda row: (row["model"], kept(row)))
    found = [max(own, key=lambda row: row["agreement"]) for own in groups.values()]
    if not found:
        return NOTHING_YET
    columns = {
        "converted model": "{model}",
        "near keys": "{near_keys:,}",
        "softmax kept": "{kept}",
        "tokens": "{millions:.1f}M",
        "held-out text": "{ours}",
        "softmax": "{theirs}",
    }
    found.sort(key=lambda row: (row["model"].lower(), row["agreement"]))
    shown = []
    for row in found:
        ours, theirs = _score(row)
        of = {"kept": kept(row), "millions": row["tokens"] / 1e6, "ours": ours, "theirs": theirs}
        shown.append({**row, **of})
    return listed(shown, columns)


def _is_ours(row: Row) -> bool:
    learned = row["options"].get("feature_map") == "learned"
    return row["attention"] == "lln_nearfar" and learned and not row.get("from_scratch")


def _score(row: Row) -> tuple[str, str]:
    first, last = row["stages"][0], row["stages"][-1]
    if "masked_loss" in last:
        return f"hidden tokens, nats {last['masked_loss']:.3f}", f"{first['masked_loss']:.3f}"
    if row["kind"] == "encoder":
        return f"cosine of embeddings {last['cosine_mean']:.4f}", "1"
    return f"perplexity {last['perplexity']:.2f}", f"{last['teacher_perplexity']:.2f}"


def _words(row: Row) -> str:
    kept = f", {len(row['kept'])} layers kept" if row["kept"] else ""
    maps = ", maps before rotation" if row["options"].get("before_rotation") else ""
    maps += f", {row['near_keys']:,} near keys" if row["near_keys"] else ""
    return f"{row['attention']}{maps}, {row['recover_steps']} updates of recovery{kept}"


BLOCKS: Blocks = {
    "conversion_best": best,
    "conversion_positions": positions,
    "conversion_needles": needles,
    "conversion_decoding": decoding,
    "conversion_glue": finetuned,
}
