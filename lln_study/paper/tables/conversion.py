"""Conversions of trained softmax models: every stage beside the model that it began with."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from lln.report.page import Table
from lln_study.paper.results import Row, grouped, origin, origin_text

NOTES = {
    "encoder": (
        "Cosine of the embeddings of held-out articles to those of the softmax model, mean / 5th "
        "percentile; halves: how often the first half of an article finds its second; near and far "
        "alone: mean cosine with one branch.",
        "STS-B: Spearman × 100 on dev, whose sentences mostly fit into one block; hidden tokens "
        "(masked language models): −ln p of 15 % of the tokens, hidden, in nats.",
    ),
    "decoder": (
        "Perplexity of held-out text, and how many times that of the softmax model it is; near and "
        "far alone: perplexity with one branch.",
    ),
}
FOUND = (
    "In longer windows: perplexity beside softmax's there. Needles: those beyond the near keys, at "
    "distances where softmax misses one of 32 at most. Pairs, sayings: −ln p of what generated "
    "recall asks for from beyond them, in nats, softmax → converted. Cache: its share of softmax's "
    "after so many tokens."
)
# A softmax model with the same updates is itself: its loss is 0 from the start.
CONTROL = (
    "The converted model learns from the softmax model's answers alone, so softmax after the same "
    "updates is the softmax model itself."
)
MASKED = "hidden tokens"
COLUMNS = ("attention", "near keys", "kept", "tokens")
STAGES = ("calibrate", "transfer", "keep", "recover")
LONG_CONTEXT = 8192  # tokens
SURE = 31 / 32  # of the needles: softmax misses one at most where a distance counts


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each model, text and length; rows that agree best with the softmax model first."""
    found = [row for row in rows if row["subject"] == "conversion"]
    found.sort(key=lambda row: -(row["agreement"] or 0))
    return [_table(own) for own in grouped(found, _setting).values()]


def _setting(row: Row) -> tuple[Any, ...]:
    configuration = row["configuration"]
    judged = (configuration["held_out"], configuration["judge_articles"])
    return row["model"], row["kind"], row["length"], configuration["data"], *judged


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    encoder = first["kind"] == "encoder"
    stages = [name for name in STAGES if any(_stage(row, name) for row in rows)]
    if encoder:
        masked = [MASKED] if any("masked_loss" in row["stages"][0] for row in rows) else []
        columns = [*COLUMNS, *stages, "near alone", "far alone", "halves", "STS-B", *masked]
        columns.append("seconds")
        lines = [
            _softmax(first, columns), *(_line(row, stages, encoder, masked) for row in rows)
        ]  # fmt: skip
    else:
        found = {name: [tell(row) for row in rows] for name, tell in FINDS.items()}
        found = {name: cells for name, cells in found.items() if set(cells) != {"–"}}
        columns = [*COLUMNS, "softmax", *stages, "÷ softmax", "near alone", "far alone"]
        columns += [*found, "seconds"]
        lines = [
            [*line[:-1], *(cells[i] for cells in found.values()), line[-1]]
            for i, line in enumerate(_line(row, ["softmax", *stages], encoder) for row in rows)
        ]
    last = first["stages"][-1]
    judged = f"{last['texts']} held-out articles" if encoder else f"{last['tokens']:,} tokens"
    title = (
        f"{first['model']} converted on {first['configuration']['data']}, N = {first['length']:,}; "
        f"judged by {judged}"
    )
    extra = [FOUND] if set(FINDS) & set(columns) else []
    notes = [*NOTES[first["kind"]], *extra, CONTROL, origin_text(rows)]
    return Table(columns, lines, title, notes, [_record(row) for row in rows])


def _softmax(row: Row, columns: Sequence[str]) -> list[str]:
    """The line of the encoder that was converted."""
    known = {"attention": "softmax", "near keys": "all"}
    known |= {"halves": _percent(row, "retrieval", "teacher")}
    known |= {"STS-B": _percent(row, "sts", "teacher")}
    known |= {MASKED: _masked(row["stages"][0])}
    return [known.get(name, "–") for name in columns]


def _line(row: Row, stages: Sequence[str], encoder: bool, masked: Sequence[str] = ()) -> list[str]:
    line = [_name(row), str(row["near_keys"] or "–"), kept(row), f"{row['tokens'] / 1e6:.2f}M"]
    for name in stages:
        stage = _stage(row, name)
        line.append(_score(stage, encoder) if stage else "–")
    if not encoder:
        line.append(f"{1 / row['agreement']:.3f}×" if row["agreement"] else "–")
    for branch in ("near", "far"):
        own = row["branches"].get(branch)
        line.append(_plain(own, encoder) if own else "–")
    if encoder:
        line += [_percent(row, name, "student") for name in ("retrieval", "sts")]
        line += [_masked(row["stages"][-1]) for _ in masked]
    return [*line, f"{sum(stage['seconds'] for stage in row['stages']):,.0f}"]


def kept(row: Row) -> str:
    """Say what keeps softmax: "none", "9 of 90 key heads, by error"; of older rows "27 heads"."""
    if keys := sum(map(len, row.get("kept_key_heads", {}).values())):
        by_error = ", by error" if row["configuration"].get("keep_by") == "error" else ""
        return f"{keys} of {row['key_heads']} key heads{by_error}"
    heads = sum(map(len, row.get("kept_heads", {}).values()))
    words = [f"{len(row['kept'])} of {row['layers']} layers"] if row["kept"] else []
    words += [f"{heads} heads"] if heads else []
    return " and ".join(words) or "none"


def _long(row: Row) -> str:
    """Perplexity beside softmax's in longer windows."""
    own = row.get("perplexity_long")
    return f"{own['student'] / own['teacher']:.3f}× ({own['window']:,})" if own else "–"


def needles_found(row: Row) -> float | None:
    """Needles that are found beyond the near keys, %, where softmax finds them; None if unasked."""
    exact = {(x["model"], x["distance"]): x["exact"] for x in row.get("needles") or ()}
    far = [
        exact["student", distance]
        for (model, distance), share in exact.items()
        if model == "teacher" and distance and distance > (row["near_keys"] or 0) and share >= SURE
    ]
    return 100 * sum(far) / len(far) if far else None


def _needles(row: Row) -> str:
    found = needles_found(row)
    return "–" if found is None else f"{found:.0f}"


def _recall(task: str, row: Row) -> str:
    own = {x["model"]: x["loss"] for x in row.get("recall") or () if x["task"] == task}
    return f"{own['teacher']:.2f} → {own['student']:.2f}" if own else "–"


def _cache(row: Row) -> str:
    """Size of the cache beside softmax's at a long context."""
    if told := (row.get("cache_share") or {}).get(f"{LONG_CONTEXT}"):
        return f"{told:.3f} ({LONG_CONTEXT:,})"
    known = [x for x in row.get("decode_cost") or () if x["context"] <= LONG_CONTEXT]
    if not known:
        return "–"
    last = max(known, key=lambda x: x["context"])
    return f"{last['student_cache'] / last['teacher_cache']:.3f} ({last['context']:,})"


#: What a decoder finds of what it has read, and at what size; columns of rows that have them.
FINDS = {
    "in longer windows": _long,
    "needles, %": _needles,
    "pairs": functools.partial(_recall, "pairs"),
    "sayings": functools.partial(_recall, "needles"),
    "cache": _cache,
}


def _name(row: Row) -> str:
    given = row["configuration"].get("options") or {}
    kind = given.get("feature_map", "learned")
    words = ["from scratch"] if row.get("from_scratch") else []
    words += [] if kind == "learned" else [f"{kind} maps"]
    words += [f"slots {given['slots']}"] if "slots" in given else []
    words += ["before rotation"] if given.get("before_rotation") else []
    words += ["learned mix"] if given.get("mix") == "learned" else []
    learned = row["configuration"].get("recover_options") or {}
    words += ["short windows"] if learned.get("short_windows") else []
    if row["recover_steps"] and "learning_rate" in learned:
        words.append(f"recovered at {learned['learning_rate']:g}")
    return f"{row['attention']} ({', '.join(words)})" if words else row["attention"]


def _stage(row: Row, name: str) -> Mapping[str, Any] | None:
    return next((stage for stage in row["stages"] if stage["stage"] == name), None)


def _score(stage: Mapping[str, Any], encoder: bool) -> str:
    if encoder:
        return f"{stage['cosine_mean']:.4f} / {stage['cosine_p5']:.4f}"
    return f"{stage['perplexity']:.2f}"


def _plain(stage: Mapping[str, Any], encoder: bool) -> str:
    return f"{stage['cosine_mean']:.4f}" if encoder else f"{stage['perplexity']:.2f}"


def _masked(stage: Mapping[str, Any]) -> str:
    return f"{stage['masked_loss']:.3f}" if "masked_loss" in stage else "–"


def _percent(row: Row, name: str, who: str) -> str:
    own = row.get(name)
    return f"{100 * own[who]:.1f}" if own else "–"


def _record(row: Row) -> dict[str, Any]:
    left_out = ("forward_cost", "decode_cost", "needles", "notes", "subject")
    return {**{name: row[name] for name in row if name not in left_out}, **origin([row])}
