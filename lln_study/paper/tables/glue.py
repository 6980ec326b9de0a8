"""Table 1: pre-training loss and GLUE scores of every mechanism, one table per scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lln.report.page import Table
from lln_study.paper.results import (
    SETTING,
    Mean,
    Row,
    best_rates,
    grouped,
    in_paper_order,
    mechanism,
    options,
    origin_text,
    record,
    setting,
    shown,
    value,
)

TASKS = {
    "mnli": "MNLI",
    "qnli": "QNLI",
    "qqp": "QQP",
    "sst2": "SST-2",
    "rte": "RTE",
    "mrpc": "MRPC",
    "cola": "CoLA",
    "stsb": "STS-B",
}
MEASURES = {
    "mrpc": "mean of accuracy and F1",
    "cola": "Matthews correlation",
    "stsb": "mean of Pearson and Spearman correlation",
}
PROTOCOL = (
    "Where several learning rates of pre-training were tried, the one of the best validation loss "
    "counts. Learning rate and epoch of a fine-tuning were chosen on a part of train that was held "
    "out, from the same grid for all; the numbers are of GLUE's dev, looked at once."
)


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each scale at which models were pre-trained and fine-tuned, the largest first."""
    tuned = [row for row in rows if row["subject"] == "glue"]
    trained = [row for row in rows if row["subject"] == "mlm"]
    scales = grouped(tuned, lambda row: _scale(row["configuration"].get("pretrained") or {}))
    losses = grouped(trained, lambda row: _scale(row["configuration"]))
    return [
        _table(dict(zip(SETTING, scale, strict=True)), scales[scale], losses.get(scale, []))
        for scale in sorted(scales, key=_size, reverse=True)
    ]


def _scale(configuration: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(setting(configuration).values())


def _size(scale: tuple[Any, ...]) -> tuple[int, ...]:
    known = dict(zip(SETTING, scale, strict=True))
    return tuple(known[name] or 0 for name in ("width", "layers", "steps", "length"))


def _table(scale: dict[str, Any], tuned: list[Row], trained: list[Row]) -> Table:
    rates = best_rates(trained)
    trained = [row for row in trained if _rate(row["configuration"]) == rates[_variant(row)]]
    tuned = [row for row in tuned if _of_best_rate(row, rates)]
    by_mechanism = grouped(sorted(tuned, key=in_paper_order), _variant)
    pretrained = grouped(trained, _variant)
    given = {_task(row) for row in tuned}
    # of a single task an average, and what is missing, would say nothing
    tasks = [task for task in TASKS if task in given or (len(given) > 1 and task == "qnli")]
    found = [
        _mechanism(name, own, pretrained.get((name, text), []), scale, tasks)
        for (name, text), own in by_mechanism.items()
    ]
    # what sums up a line stands first: on a narrow page the rest has to be scrolled to
    average = ["avg"] if len(tasks) > 1 else []
    columns = ["", "MLM loss", *average, *(TASKS[task] for task in tasks), "parameters"]
    everything = [*tuned, *(row for rows in pretrained.values() for row in rows)]
    return Table(
        columns,
        [line for line, _ in found],
        f"Table 1 at our scale: {_words(scale)}",
        [_measures(tasks), PROTOCOL, *_data_notes(tuned, tasks), origin_text(everything)],
        [record for _, record in found],
    )


def _variant(row: Row) -> tuple[str, str]:
    return mechanism(row), options(row)


def _rate(configuration: Mapping[str, Any]) -> float | None:
    return configuration.get("learning_rate")


def _of_best_rate(row: Row, rates: Mapping[tuple[str, str], float | None]) -> bool:
    """Whether a fine-tuning starts from the pre-training that is shown."""
    best = rates.get(_variant(row))
    return best is None or _rate(row["configuration"].get("pretrained") or {}) == best


def _task(row: Row) -> str:
    return row["configuration"]["task"]


def _mechanism(
    name: str, tuned: list[Row], trained: list[Row], scale: dict[str, Any], tasks: list[str]
) -> tuple[list[str], dict[str, Any]]:
    """The line of a mechanism, and all that is known of it at this scale."""
    by_task = grouped(tuned, _task)
    means = {task: Mean.of(row["score"] for row in own) for task, own in by_task.items()}
    known = {task: mean for task, mean in means.items() if mean is not None}
    loss = Mean.of(row["loss"] for row in trained)
    complete = all(task in known for task in tasks if task != "qnli")
    average = sum(mean.value for mean in known.values()) / len(known) if complete else None
    parameters = trained[0]["parameters"] if trained else None
    line = [
        name,
        shown(loss, 3),
        *(["–" if average is None else f"{100 * average:.1f}"] if len(tasks) > 1 else []),
        *(shown(known.get(task), 1, 100) for task in tasks),
        "–" if parameters is None else f"{parameters / 1e6:.1f}M",
    ]
    found = {
        **record(name, [*tuned, *trained]),
        "loss": value(loss),
        **{task: mean.value for task, mean in known.items()},
        "average": average,
        "standard_errors": {task: mean.error for task, mean in known.items()},
        "parameters": parameters,
        "tokens": _tokens(scale),
        "scale": scale,
        "configuration": {
            "pretraining": tuned[0]["configuration"].get("pretrained"),
            "fine_tuning": {task: _own(rows[0]) for task, rows in by_task.items()},
        },
    }
    return line, found


def _own(row: Row) -> dict[str, Any]:
    return {name: x for name, x in row["configuration"].items() if name != "pretrained"}


def _tokens(scale: dict[str, Any]) -> int | None:
    parts = [scale[name] for name in ("steps", "batch_size", "length")]
    return None if None in parts else parts[0] * parts[1] * parts[2]


def _words(scale: dict[str, Any]) -> str:
    tokens = _tokens(scale)
    if tokens is None:
        return "a model from a folder"
    size = f"{scale['layers']} layers × {scale['width']}, {scale['heads']} heads"
    amount = f"{tokens / 1e6:.0f}M tokens" if tokens >= 1e6 else f"{tokens:,} tokens"
    return (
        f"RoBERTa of {size}, N = {scale['length']}, pre-trained on {amount} of {scale['corpus']}; "
        "not the paper's setting"
    )


def _measures(tasks: Sequence[str]) -> str:
    """What the numbers of these tasks are."""
    plain = ", ".join(
        f"{TASKS[task]} matched" if task == "mnli" else TASKS[task]
        for task in tasks
        if task not in MEASURES
    )
    others = [f"{MEASURES[task]} ({TASKS[task]})" for task in tasks if task in MEASURES]
    text = ", ".join([*([f"accuracy ({plain})"] if plain else []), *others])
    return f"Per cent: {text}{'; avg: of the tasks shown' if len(tasks) > 1 else ''}."


def _data_notes(tuned: list[Row], tasks: Sequence[str]) -> list[str]:
    """What is special about the data of each task, and why one is missing."""
    special = sorted(
        {row["configuration"]["data"] for row in tuned}, key=lambda text: text.split(":")[0]
    )
    notes = [text + "." for text in special if text.split(": ", 1)[-1] != "complete"]
    notes = [note for note in notes if not note.startswith("official")]
    if "qnli" in tasks and not any(_task(row) == "qnli" for row in tuned):
        notes.append("QNLI: –, because the data folder has no training split of it.")
    return notes
