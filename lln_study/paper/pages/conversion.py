"""The measured blocks of conversion beside its table: the best, needles, positions, GLUE."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, crossed, listed, sourced, where
from lln_study.paper.results import Row, grouped, read
from lln_study.paper.tables.conversion import kept
from lln_study.paper.tables.glue import TASKS

Cells = dict[tuple[str, str], str]  # by line and column
USUAL, SLOTS = "lln_nearfar", 128  # of a converted decoder

# The pre-training whose checkpoint was converted, on the device that it was trained on.
TEACHER = {"options": {}, "recipe": "roberta-small", "length": 512, "steps": 15300, "seed": 1}
BEST = {
    "converted model": "{model}",
    "near keys": "{near_keys:,}",
    "slots": "{slots}",
    "softmax kept": "{kept}",
    "tokens": "{millions:.1f}M",
    "held-out text": "{ours}",
    "softmax": "{theirs}",
}


def positions(results: Path) -> str:
    """Nats a token against the tokens before it, for the windows that were measured first."""
    windows = grouped(_with(results, "loss_by_position"), _edges)
    rows = next(iter(windows.values()), [])
    return _by_model(rows, "tokens before", _losses)


def _losses(row: Row) -> Cells:
    return {
        (words, f"{part['from']:,}–{part['to']:,}"): f"{part['nll']:.2f}"
        for name, words in _both(row).items()
        for part in row["loss_by_position"][name]
    }


def _edges(row: Row) -> tuple[int, ...]:
    return tuple(part["from"] for part in row["loss_by_position"]["teacher"])


def needles(results: Path) -> str:
    """How often a sentence that stands so many tokens back is repeated exactly, in per cent."""
    return _by_model(_with(results, "needles"), "tokens back", _found)


def _found(row: Row) -> Cells:
    return {
        (_both(row)[one["model"]], f"{one['distance']:,}"): f"{100 * one['exact']:.0f}"
        for one in row["needles"]
        if one["distance"]
    }


def _by_model(rows: list[Row], columns: str, cells: Callable[[Row], Cells]) -> str:
    """A table for each model, of the cells by line and column of its rows, the worst first."""
    rows = sorted(rows, key=lambda row: row["agreement"])
    tables = [
        crossed(f"{model}: {columns}", dict(cell for row in own for cell in cells(row).items()))
        for model, own in grouped(rows, lambda row: row["model"]).items()
    ]
    return sourced("\n\n".join(tables), rows)


def _with(results: Path, column: str) -> list[Row]:
    return [row for row in read(results, "conversion") if row.get(column)]


def _both(row: Row) -> dict[str, str]:
    """The names of a converted model, without what is usual, and of its teacher."""
    given = row["options"]
    words = [] if row["attention"] == USUAL else [row["attention"]]
    words += [f"{row['near_keys']:,} near keys"] if row["near_keys"] else []
    what, *how = kept(row).split(", ")
    words += [" ".join([what, "kept", *how])] if what != "none" else []
    words += [f"{given['slots']} slots"] if given.get("slots", SLOTS) != SLOTS else []
    if row["attention"] == USUAL and not given.get("before_rotation"):
        words.append("maps after rotation")
    if (row["configuration"].get("recover_options") or {}).get("short_windows"):
        words.append("short windows")
    words.append(f"{row['recover_steps']} updates of recovery")
    return {"teacher": "softmax", "student": ", ".join(words)}


def finetuned(results: Path) -> str:
    """GLUE of a converted model beside its teacher's, a mean over seeds of fine-tuning."""
    ours = read(results / "conversion", "glue")
    if not ours:
        return NOTHING_YET
    given = {row["configuration"]["task"] for row in ours}
    taught = {"attention": "softmax", **TEACHER}
    theirs = [
        row
        for row in read(results, "glue")
        if row["configuration"]["task"] in given
        and where([row["configuration"].get("pretrained") or {}], taught)
    ]
    found = {}
    for words, rows in (("softmax", theirs), ("converted", ours)):
        by_task = grouped(rows, lambda row: row["configuration"]["task"])
        means = {TASKS[task]: _mean(by_task[task]) for task in TASKS if task in given}
        means["average"] = sum(means.values()) / len(means)
        found |= {(words, name): f"{100 * mean:.1f}" for name, mean in means.items()}
    return sourced(crossed("RoBERTa 6 × 512, %", found), [*theirs, *ours])


def _mean(rows: list[Row]) -> float:
    return sum(row["score"] for row in rows) / len(rows)


def best(results: Path) -> str:
    """The best conversion of every model with nothing kept, with key heads kept, with layers."""
    ours = [row for row in read(results, "conversion") if _is_ours(row)]
    groups = grouped(ours, lambda row: (row["model"], kept(row).split(",")[0]))
    found = [max(own, key=lambda row: row["agreement"]) for own in groups.values()]
    found.sort(key=lambda row: (row["model"].lower(), row["agreement"]))
    shown = [
        {**row, **_scores(row), "slots": row["options"].get("slots", "–"), "kept": kept(row)}
        | {"millions": row["tokens"] / 1e6}
        for row in found
    ]
    return listed(shown, BEST) if shown else NOTHING_YET


def _is_ours(row: Row) -> bool:
    learned = row["options"].get("feature_map") == "learned"
    single = row.get("kept_heads") and not row.get("kept_key_heads")  # as no option keeps them now
    return (
        row["attention"] == "lln_nearfar" and learned and not single and not row.get("from_scratch")
    )


def _scores(row: Row) -> dict[str, str]:
    first, last = row["stages"][0], row["stages"][-1]
    if "masked_loss" in last:
        ours, theirs = f"hidden tokens, nats {last['masked_loss']:.3f}", first["masked_loss"]
        return {"ours": ours, "theirs": f"{theirs:.3f}"}
    if row["kind"] == "encoder":
        return {"ours": f"cosine of embeddings {last['cosine_mean']:.4f}", "theirs": "1"}
    ours, theirs = f"perplexity {last['perplexity']:.2f}", last["teacher_perplexity"]
    return {"ours": ours, "theirs": f"{theirs:.2f}"}


BLOCKS: Blocks = {
    "conversion_best": best,
    "conversion_positions": positions,
    "conversion_needles": needles,
    "conversion_glue": finetuned,
}
