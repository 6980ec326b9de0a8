"""The paper's figures about training, from curves that runs have left in ``results/*.jsonl``.

A line of curves has the ``configuration`` of its run and its ``rows``: of kind "train" and "eval",
or, measured by the monitor, one per step, layer and head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lln.nn import RECOMMENDED
from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.figures.from_results import RunFigure
from lln_study.paper.figures.loss_scale import once
from lln_study.paper.results import Row, grouped, in_paper_order, mechanism, was_alone

# What may differ between runs that are compared: the attention, and what was chosen for each.
COMPARED = frozenset(
    {
        *("attention", "options", "learning_rate", "seed", "log_every", "save_every", "keep"),
        *("compile", "graph", "accumulation", "checkpointing", "shard", "measures"),
        *("monitor_every", "eval_every"),
    }
)
UPDATES, SECONDS = Axis("updates"), Axis("seconds of training")
NATS = Axis("nats per hidden token")
MOST = 6  # lines of a panel that can be told apart
# Mechanisms with their options that are drawn where there are more.
SHOWN: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("softmax", {}),
    ("softmax", {"conv": RECOMMENDED["conv"]}),
    ("block_diag", {}),
    ("lln", {}),
    ("lln_diag", {}),
    ("lln_diag", RECOMMENDED),
)
NEAR = 1.5  # times the best last loss: up to there the ends of curves can be told apart


def measured(lines: Sequence[Row]) -> list[Panel]:
    """Fig. 1: temperature, entropy and spectral gap of every layer while a model trains."""
    own = [
        line
        for line in lines
        if line["configuration"].get("recipe") == "figure-1" and "layer" in line["rows"][0]
    ]
    shown = {
        "temperature": ("Temperature", Axis("τ", log=True)),
        "entropy": ("Entropy", Axis("bits")),
        "spectral_gap": ("Spectral gap 1 − |λ₂|", Axis("gap", limits=(0, 1.03))),
    }
    panels = []
    for line in _first_seeds(own):
        name = mechanism(line)
        for quantity, (title, axis) in shown.items():
            layers = grouped(line["rows"], lambda row: row["layer"])
            curves = [
                _curve(f"layer {layer + 1}", own, quantity, slot=layer)
                for layer, own in sorted(layers.items())
            ]
            branch = "The LLN branch alone. " if line["mechanism"] == "lln_diag" else ""
            note = branch + _scale(line)
            panels.append(Panel(f"{title}, {name}", curves, UPDATES, axis, note))
    return panels


def losses(lines: Sequence[Row]) -> list[Panel]:
    """Fig. 8a: training and validation loss against updates, and validation against time.

    Of longer inputs than those of the largest comparison only the last, one for each length. Of
    more than six mechanisms those of :data:`SHOWN`, named at their lines; the table has all.
    """
    wide = [line for line in lines if line["configuration"].get("precision") != "fp16"]
    chosen = _comparable(wide)
    if not chosen:
        return []
    length = chosen[0]["configuration"].get("length") or 0
    longer = grouped(wide, lambda line: line["configuration"].get("length") or 0)
    others = [_comparable(own) for known, own in sorted(longer.items()) if known > length]
    others = [own for own in others if len(own) > 1]
    chosen, left_out = _few(chosen)
    others = [_few(own)[0] for own in others]
    names = dict.fromkeys(label(line) for own in (chosen, *others) for line in own)
    slots = {name: slot for slot, name in enumerate(names)}
    drawn = [replace(panel, note=panel.note + left_out) for panel in _losses(chosen, slots)]
    return drawn + [
        replace(panel, title=f"{panel.title}, N = {own[0]['configuration']['length']:,}")
        for own in others
        for panel in _losses(own, slots)
        if panel.x == SECONDS
    ]


def _few(chosen: list[Row]) -> tuple[list[Row], str]:
    """Few enough lines to be told apart, and which are left out, in words."""
    if len(chosen) <= MOST:
        return chosen, ""
    kept = [line for line in chosen if _is_shown(line)]
    names = ", ".join(mechanism(line) for line in chosen if not _is_shown(line))
    return (kept, f" Not drawn: {names}.") if len(kept) > 1 else (chosen, "")


def _is_shown(line: Row) -> bool:
    own = line["configuration"].get("options") or {}
    return any(line["mechanism"] == name and own == options for name, options in SHOWN)


def label(line: Row) -> str:
    """The name of a mechanism, short for the options that we recommend."""
    own = line["configuration"].get("options") or {}
    return "LLN+Diag, recommended" if own == RECOMMENDED else mechanism(line)


def _losses(chosen: Sequence[Row], slots: Mapping[str, int]) -> list[Panel]:
    note = timed = _scale(chosen[0])
    if not all(was_alone(line) for line in chosen):
        timed = f"Without runs that shared their GPU. {note}"
    wanted = (
        ("train", "step", "Training loss", UPDATES, note),
        ("eval", "step", "Validation loss", UPDATES, note),
        ("eval", "seconds", "Validation loss against time", SECONDS, timed),
    )
    panels = []
    for kind, x, title, axis, about in wanted:
        curves = []
        for line in chosen:
            if x == "seconds" and not was_alone(line):
                continue
            own = [row for row in line["rows"] if row.get("kind") == kind and row["step"] > 0]
            name = label(line)
            curve = _curve(name, own, "loss", slot=slots[name], x=x)
            curves.append(replace(curve, named=True))
        if curves:
            panel = Panel(title, curves, axis, NATS, about)
            panels.append(_near_the_end(panel) if (kind, x) == ("eval", "step") else panel)
    return panels


def _near_the_end(panel: Panel) -> Panel:
    """Drop what is far above the best end, which would press the rest together."""
    ends = [curve.y[-1] for curve in panel.curves if curve.y]
    if not ends:
        return panel
    highest = NEAR * min(ends)
    inside, far = [], []
    for curve in panel.curves:
        kept = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y <= highest]
        if kept:
            inside.append(replace(curve, x=[x for x, _ in kept], y=[y for _, y in kept]))
        else:
            far.append(curve.label)
    above = f"Always above: {', '.join(far)}. " if far else ""
    title = f"{panel.title} up to {highest:.1f}"
    return replace(panel, title=title, curves=inside, note=above + panel.note)


def loss_scale(lines: Sequence[Row]) -> list[Panel]:
    """Fig. 8b: the inverse of the loss scale in float16, and the loss."""
    chosen = _comparable(
        [line for line in lines if line["configuration"].get("precision") == "fp16"]
    )
    if not chosen:
        return []
    inverse, loss = [], []
    for slot, line in enumerate(chosen):
        own = [row for row in line["rows"] if row.get("kind") == "train" and row["loss_scale"]]
        turned = [{**row, "inverse": 1 / row["loss_scale"]} for row in own]
        for quantity, rows, curves in (("inverse", turned, inverse), ("loss", own, loss)):
            curve = _curve(mechanism(line), rows, quantity, slot=slot)
            curves.append(replace(curve, named=True))
    note, scale = _scale(chosen[0]), Axis("1 / loss scale", log=True)
    overflow = f"A step up would be gradients that overflowed. {note}"
    return [
        Panel("Inverse loss scale, float16", once(inverse), UPDATES, scale, overflow),
        Panel("Training loss, float16", loss, UPDATES, NATS, note),
    ]


FIGURES: dict[str, RunFigure] = {
    "1": RunFigure(
        "Temperature, entropy and spectral gap during training",
        measured,
        "lln sweep sweeps/figure1.json",
    ),
    "8a": RunFigure("Loss during pre-training", losses, "lln sweep sweeps/tier_a.json"),
    "8b": RunFigure(
        "Inverse loss scale during pre-training in float16",
        loss_scale,
        "lln sweep sweeps/fp16.json",
    ),
}


def _comparable(lines: Sequence[Row]) -> list[Row]:
    """One line per mechanism of the longest runs that differ in nothing else.

    Of a mechanism the learning rate with the best last validation loss, then the first seed.
    """
    own = [line for line in lines if line.get("subject") == "mlm" and line["rows"][0].get("kind")]
    groups = grouped(own, _setting)
    if not groups:
        return []

    def size(group: Sequence[Row]) -> tuple[bool, int, int]:
        names = {mechanism(line) for line in group}
        return len(names) > 1, group[0]["rows"][-1].get("tokens", 0), len(names)

    largest = max(groups.values(), key=size)
    chosen = []
    for own in grouped(sorted(largest, key=in_paper_order), mechanism).values():
        best = min(own, key=_last_loss)["configuration"].get("learning_rate")
        same = [line for line in own if line["configuration"].get("learning_rate") == best]
        chosen.append(min(same, key=lambda line: line["seed"]))
    return chosen


def _setting(line: Row) -> str:
    kept = {key: value for key, value in line["configuration"].items() if key not in COMPARED}
    return json.dumps(kept, sort_keys=True)


def _last_loss(line: Row) -> float:
    known = [row["loss"] for row in line["rows"] if row.get("kind") == "eval"]
    return known[-1] if known and known[-1] is not None else float("inf")


def _first_seeds(lines: Sequence[Row]) -> list[Row]:
    by_name = grouped(sorted(lines, key=in_paper_order), mechanism)
    return [min(own, key=lambda line: line["seed"]) for own in by_name.values()]


def _curve(label: str, rows: Sequence[Row], quantity: str, *, slot: int, x: str = "step") -> Curve:
    known = [row for row in rows if row.get(quantity) is not None]
    return Curve(label, [row[x] for row in known], [row[quantity] for row in known], slot=slot)


def _scale(line: Row) -> str:
    """Describe the run behind a curve: size, data, precision."""
    of = line["configuration"]
    return (
        f"{of['layers']} layers of {of['width']}, {of['heads']} head(s), N = {of['length']}, batch "
        f"{of['batch_size']}, {of['corpus']}, {of['precision']}, seed {line['seed']}."
    )
