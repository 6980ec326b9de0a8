"""The measured blocks of conversion beside its table: the best, positions, decoding."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, markdown_table
from lln_study.paper.results import Row, grouped, origin_text, read
from lln_study.paper.tables.conversion import kept
from lln_study.paper.tables.glue import TASKS

# The pre-training whose checkpoint was converted, on the device that it was trained on.
TEACHER = {"options": {}, "recipe": "roberta-small", "length": 512, "steps": 15300, "seed": 1}


def positions(results: Path) -> str:
    """Nats a token against the tokens before it, of converted decoders and their teachers."""
    found = [row for row in _rows(results) if row.get("loss_by_position")]
    if not found:
        return NOTHING_YET
    return "\n\n".join(_table(own) for own in grouped(found, _edges).values())


def _edges(row: Row) -> tuple[tuple[int, int], ...]:
    return tuple((part["from"], part["to"]) for part in row["loss_by_position"]["teacher"])


def _table(found: list[Row]) -> str:
    edges, lines = _edges(found[0]), []
    for row in found:
        for name, words in (("teacher", "softmax"), ("student", _words(row))):
            parts = row["loss_by_position"][name]
            line = [f"{row['model']}, {words}", *(f"{part['nll']:.2f}" for part in parts)]
            lines += [line] if line not in lines else []
    names = ["tokens before", *(f"{first:,}–{last:,}" for first, last in edges)]
    words = f"Mean −ln p of a token in windows of {edges[-1][1] + 1:,}. ({origin_text(found)})"
    return f"{markdown_table(names, lines)}\n\n{words}"


def needles(results: Path) -> str:
    """How often a sentence that stands so many tokens back is repeated exactly."""
    found = [row for row in _rows(results) if row.get("needles")]
    if not found:
        return NOTHING_YET
    distances = sorted(
        {one["distance"] for row in found for one in row["needles"] if one["distance"]}
    )
    lines = []
    for row in found:
        for name, words in (("teacher", "softmax"), ("student", _words(row))):
            own = {one["distance"]: one for one in row["needles"] if one["model"] == name}
            cells = (
                f"{100 * own[each]['exact']:.0f}" if each in own else "–" for each in distances
            )
            line = [f"{row['model']}, {words}", *cells]
            lines += [line] if line not in lines else []
    names = ["tokens back", *(f"{each:,}" for each in distances)]
    first = found[0]["needles"][0]
    words = (
        f"Needles repeated exactly, %, {first['needles']} at each distance in {first['length']:,} "
        f"tokens. ({origin_text(found)})"
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


def decoding(results: Path) -> str:
    """Time of a token and size of the cache against the tokens before it."""
    found = [row for row in _rows(results) if row.get("decode_cost")]
    if not found:
        return NOTHING_YET
    lines = [
        [
            row["model"], f"{row['near_keys']:,}", f"{cost['context']:,}",
            *(f"{cost[name + '_cache'] / 1e6:,.1f}" for name in ("teacher", "student")),
            *(f"{cost[name + '_ms']:.0f}" for name in ("teacher", "student")),
        ]
        for row in found for cost in row["decode_cost"]
    ]  # fmt: skip
    sizes = ["softmax, MB", "converted, MB", "softmax, ms", "converted, ms"]
    names = ["model", "near keys", "context", *sizes]
    words = f"Cache, and time of one token with batch 1. ({origin_text(found)})"
    return f"{markdown_table(names, lines)}\n\n{words}"


def finetuned(results: Path) -> str:
    """GLUE of a converted model beside its teacher's, a mean over seeds of fine-tuning."""
    folder = results / "conversion"
    ours = read(folder, "glue") if folder.is_dir() else []
    if not ours:
        return NOTHING_YET
    given = {row["configuration"]["task"] for row in ours}
    tasks = [task for task in TASKS if task in given]
    theirs = [
        row for row in read(results, "glue")
        if row["configuration"]["task"] in tasks and _is_taught_from(row)
    ]  # fmt: skip
    lines = []
    for words, rows in (("softmax", theirs), ("converted", ours)):
        by_task = grouped(rows, lambda row: row["configuration"]["task"])
        scores = [_mean(row["score"] for row in by_task[task]) for task in tasks]
        lines.append([words, *(f"{100 * each:.1f}" for each in (*scores, _mean(scores)))])
    names = ["RoBERTa 6 × 512, %", *(TASKS[task] for task in tasks), "average"]
    words = (
        "Scores on dev, rates chosen on a part of train; correlations × 100 for CoLA and STS-B. "
        f"({origin_text([*theirs, *ours])})"
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


def _is_taught_from(row: Row) -> bool:
    """Whether a fine-tuning starts from the pre-training that was converted."""
    before = row["configuration"].get("pretrained") or {}
    return before.get("attention") == "softmax" and all(
        before.get(name) == value for name, value in TEACHER.items()
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def best(results: Path) -> str:
    """The best conversion of every model with nothing kept, and with a few layers or heads kept."""
    ours = [row for row in _rows(results) if _is_ours(row)]
    groups = grouped(ours, lambda row: (row["model"], kept(row)))
    found = [max(own, key=lambda row: row["agreement"]) for own in groups.values()]
    if not found:
        return NOTHING_YET
    lines = [
        [
            row["model"], f"{row['near_keys']:,}", kept(row), f"{row['tokens'] / 1e6:.1f}M",
            *_score(row),
        ]
        for row in sorted(found, key=lambda row: (row["model"].lower(), row["agreement"]))
    ]  # fmt: skip
    names = ["converted model", "near keys", "softmax kept", "tokens", "held-out text", "softmax"]
    return markdown_table(names, lines)


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


def _rows(results: Path) -> list[Row]:
    return read(results, "conversion") if (results / "conversion.jsonl").exists() else []


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
