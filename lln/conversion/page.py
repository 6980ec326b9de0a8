"""The report of a conversion: scores of every stage, layers, heads, branches, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lln.conversion.gain import gain_lines, gain_words
from lln.conversion.ranking import ranking, recalled
from lln.report.heat_map import heat_map
from lln.report.lines import Axis
from lln.report.numbers import three_digits
from lln.report.page import Block, Page, Plot, Plots, Section, Table, Text
from lln.report.panels import Curve, Panel, as_page_plots

Found = Mapping[str, Any]
STAGES = {
    "softmax": "softmax model",
    "calibrate": "exchanged and calibrated",
    "transfer": "after transfer",
    "keep": "some heads keep softmax",
    "recover": "after recovery",
}
# name in conversion.json -> column, digits
ENCODER = {
    "cosine_mean": ("cosine", 4),
    "cosine_p5": ("5th percentile", 4),
    "cosine_min": ("least", 4),
    "similarity_correlation": ("similarities", 4),
    "token_nmse": ("token error²", 4),
}
MASKED = {"masked_loss": ("hidden, nats", 4), "masked_accuracy": ("hidden, right", 4)}
DECODER = {"perplexity": ("perplexity", 2), "nll": ("nats a token", 4)}
TEACHER, STUDENT = "softmax model", "converted"

ENCODER_TEXT = """
Cosine: of the two embeddings of a held-out article (mean over tokens) at the full length; the mean
over articles, the 5th percentile and the least. Similarities: correlation of the similarities of
all pairs of articles. Token error²: ‖difference‖² / ‖softmax's‖² of the last token states. Layer
error: ‖difference‖ / ‖softmax's‖ of the output of attention, given the same queries, keys and
values, the mean over layers. Seconds: of the stage, without judging.
"""
MASKED_TEXT = """
Hidden: 15 % of the tokens of the same articles are hidden, the same ones for every stage; −ln p of
a hidden token, and the share that is predicted.
"""
DECODER_TEXT = """
Perplexity: of held-out text in overlapping windows, every token but the first counted once;
÷ softmax: beside that of the softmax model, 1 is as good. Layer error: ‖difference‖ / ‖softmax's‖
of the output of attention, given the same queries, keys and values, the mean over layers. Seconds:
of the stage, without judging.
"""
CONTROL_TEXT = """
Nothing of this comes from the text itself: the model learns from the answers of its softmax model
alone. A softmax model with as many updates of the same kind is the softmax model, as its loss is 0
from the start.
"""
BRANCHES_TEXT = """
With near keys alone the model is softmax in windows, with far ones alone linear attention over all
else. Where near alone is as good as both, the far branch is idle, and the model reads no further
than its windows.
"""
POSITION_TEXT = """
Mean loss of tokens by how many stand before them, with the near keys shaded. A loss that still
falls to the right of them is read by the far branch (and by layer upon layer of windows).
"""
NEEDLES_TEXT = """
A five-digit number is said once in a text and asked for again at this distance: share of its
tokens that are the most likely ones, and of numbers of which all are. Never said: what guessing
gives.
"""
COST_TEXT = """
The two models were measured in turns. Time is the median of a forward pass without gradients,
memory its peak beyond weights and inputs.
"""


def build(found: Found) -> Page:
    """Put what conversion.json holds on one page."""
    sections = [
        Section("Stages", _stages(found)),
        Section("Layers", _layers(found)),
        Section("Key heads", ranking(found)),
        Section("Learning", _learning(found)),
        Section("Near and far", _branches(found)),
        Section("By position", _positions(found)),
        Section("Needles", _needles(found)),
        Section("Texts side by side", _texts(found)),
        Section("Time and memory", _costs(found)),
    ]
    return Page(
        f"{found['model']}, converted to {found['attention']}",
        _lede(found),
        [section for section in sections if section.blocks],
        _facts(found),
    )


def _lede(found: Found) -> str:
    kept = found["kept_key_heads"]
    heads = sum(map(len, kept.values()))
    said = f"{heads} of {found['key_heads']} key heads keep softmax" if heads else "no head kept"
    if found["agreement"] is None:
        what = "How well it agrees with the softmax model was not measured"
    elif found["kind"] == "encoder":
        what = f"Mean cosine to the softmax model's embeddings {found['agreement']:.4f}"
    else:
        what = f"Perplexity {1 / found['agreement']:.3f} × that of the softmax model"
    near = f", at most {found['near_keys']} near keys a query" if found["near_keys"] else ""
    begun = "; weights drawn anew, from scratch" if found.get("from_scratch") else ""
    return (
        f"{what} on held-out text; {said}{near}{begun}; {found['tokens']:,} tokens of "
        f"conversion. {gain_words(found)} Every number on this page was measured by the run that "
        "wrote it."
    )


def score_tables(found: Found) -> list[Table]:
    """The scores of every stage, and those that are measured once, beside the softmax model."""
    shown = _scores_of(found)
    columns = ["stage", *(title for title, _ in shown.values())]
    if found["kind"] == "decoder":
        columns.append("÷ softmax")
    lines = []
    for row in found["stages"]:
        line = [STAGES.get(row["stage"], row["stage"])]
        line += [_number(row.get(name), digits) for name, (_, digits) in shown.items()]
        if found["kind"] == "decoder":
            own, wanted = row.get("perplexity"), row["teacher_perplexity"]
            line.append(_number(own and wanted and own / wanted, 3))
        lines.append([*line, _error_of(found, row["stage"]), f"{row['seconds']:,.0f}"])
    title = f"{found['model']}: {_judged(found)}"
    stages = Table([*columns, "layer error", "seconds"], lines, title)
    return [stages, *_beside(found)]


def _scores_of(found: Found) -> dict[str, tuple[str, int]]:
    """Scores that a conversion of this kind has: name, column, digits."""
    if found["kind"] != "encoder":
        return DECODER
    return {**ENCODER, **(MASKED if "masked_loss" in found["stages"][0] else {})}


def _judged(found: Found) -> str:
    first = found["stages"][0]
    if found["kind"] == "encoder":
        return f"{first['texts']} held-out articles, {first['tokens']:,} tokens"
    return f"{first['tokens']:,} held-out tokens"


def _error_of(found: Found, stage: str) -> str:
    values = found["layer_errors"].get(stage)
    return f"{sum(values) / len(values):.3f}" if values else "–"


def _beside(found: Found) -> list[Table]:
    lines = []
    for name, title in (("retrieval", "first half finds second"), ("sts", "STS-B, Spearman")):
        if found.get(name):
            own = found[name]
            count = f" among {own['articles']}" if name == "retrieval" else ""
            lines.append([title + count, f"{own['teacher']:.2%}", f"{own['student']:.2%}"])
    score = "cosine_mean" if found["kind"] == "encoder" else "perplexity"
    for branch, own in found["branches"].items():
        title = f"{branch} keys alone, {'cosine' if score == 'cosine_mean' else score}"
        whole = found["stages"][0][score]
        lines.append([title, _number(whole, 4), _number(own[score], 4)])
    lines += gain_lines(found)
    return [Table(["", TEACHER, STUDENT], lines, "Beside the softmax model")] if lines else []


def _stages(found: Found) -> list[Block]:
    words = ENCODER_TEXT if found["kind"] == "encoder" else DECODER_TEXT
    tables = score_tables(found)
    notes = [Text(f"{found['text'].capitalize()}."), *(Text(note) for note in found["notes"])]
    masked = [Text(MASKED_TEXT)] if "masked_loss" in found["stages"][0] else []
    return [*tables, Text(words), *masked, Text(CONTROL_TEXT), *notes]


def _layers(found: Found) -> list[Block]:
    curves = []
    for slot, (stage, values) in enumerate(found["layer_errors"].items()):
        label = STAGES[stage]
        curves.append(
            Curve(label, list(range(len(values))), values, slot=slot, marker="os"[slot % 2])
        )
    count = max(len(curve.x) for curve in curves)
    ticks = list(range(0, count, -(-count // 16)))
    kept = ", ".join(map(str, found["kept"]))
    note = "‖difference‖ / ‖softmax's‖ of the output of attention, on text that was neither "
    note += "learned from nor judged by."
    note += f" Layers that keep softmax: {kept}." if kept else ""
    if heads := found.get("kept_heads"):
        words = "; ".join(f"{layer}: {', '.join(map(str, own))}" for layer, own in heads.items())
        note += f" Heads that do, by layer: {words}."
    panel = Panel(
        "Error of every layer",
        curves,
        Axis("layer", ticks=ticks),
        Axis("relative error", limits=(0, None)),
        note,
    )
    return [_plots("layers", [panel])]


def _learning(found: Found) -> list[Block]:
    panels = []
    titles = {
        "transfer": (
            "Transfer: squared error of layers",
            "mean over layers, on text to learn from",
        ),
        "recover": ("Recovery: loss", "disagreement with the softmax model, on text to learn from"),
    }
    for name, rows in found["curves"].items():
        title, note = titles[name]
        points = [(row["step"], row["value"]) for row in rows if row["value"]]
        if points:
            steps, values = zip(*points, strict=True)
            line = [Curve(name, steps, values, slot=len(panels) + 1)]
            panels.append(
                Panel(
                    title, line, Axis("update"), Axis("", limits=(0, None)), note.capitalize() + "."
                )
            )
    return [_plots("learning", panels)] if panels else []


def _branches(found: Found) -> list[Block]:
    blocks: list[Block] = []
    if found["branches"]:
        blocks.append(Text(BRANCHES_TEXT))
        names = _scores_of(found)
        rows = {"both": found["stages"][-1], **found["branches"]}
        lines = [
            [name, *(_number(row.get(key), digits) for key, (_, digits) in names.items())]
            for name, row in rows.items()
        ]
        blocks.append(Table(["keys", *(title for title, _ in names.values())], lines))
    if found["near_shares"]:
        cells = share_cells(found["near_shares"])
        svg = heat_map(
            "shares",
            cells,
            title="Share of the weight on near keys",
            rows="layer",
            columns="head",
            limits=(0.0, 1.0),
        )
        blocks.append(Plots([Plot(svg, "Mean over held-out tokens; grey layers keep softmax.")]))
    return blocks


def share_cells(rows: Sequence[Found]) -> list[list[float | None]]:
    """A line per layer and a column per head; None in layers without the two branches."""
    height = 1 + max(row["layer"] for row in rows)
    width = 1 + max(row["head"] for row in rows)
    cells: list[list[float | None]] = [[None] * width for _ in range(height)]
    for row in rows:
        cells[row["layer"]][row["head"]] = row["near_share"]
    return cells


def _positions(found: Found) -> list[Block]:
    if not found.get("loss_by_position"):
        return []
    curves = []
    for slot, (name, rows) in enumerate(found["loss_by_position"].items()):
        middle = [(row["from"] * row["to"]) ** 0.5 for row in rows]
        error = [row["se"] or 0.0 for row in rows]
        label = TEACHER if name == "teacher" else STUDENT
        values = [row["nll"] for row in rows]
        curves.append(Curve(label, middle, values, error, slot=slot, marker="os"[slot]))
    last = found["loss_by_position"]["teacher"][-1]["to"]
    ticks = [1 << power for power in range(last.bit_length() + 1) if 16 <= 1 << power <= last + 1]
    near = found["near_keys"]
    panel = Panel(
        "Loss by the number of tokens before",
        curves,
        Axis("tokens before", log=True, ticks=ticks or None),
        Axis("nats a token"),
        f"Shaded: the {near} near keys. Bars: standard error over windows." if near else "",
        span=(curves[0].x[0], near) if near else None,
    )
    return [Text(POSITION_TEXT), _plots("positions", [panel])]


def _needles(found: Found) -> list[Block]:
    rows = found.get("needles")
    if not rows:
        return []
    distances = list(dict.fromkeys(row["distance"] for row in rows))
    cells = {(row["model"], row["distance"]): row for row in rows}
    lines = []
    for name, label in (("teacher", TEACHER), ("student", STUDENT)):
        for key, what in (("token_accuracy", "tokens right"), ("exact", "all right")):
            values = [f"{cells[name, distance][key]:.0%}" for distance in distances]
            lines.append([f"{label}: {what}", *values])
    columns = ["distance", *("never said" if d is None else f"{d:,}" for d in distances)]
    near = f"; near keys reach {found['near_keys']} tokens" if found["near_keys"] else ""
    lengths = " or ".join(f"{length:,}" for length in dict.fromkeys(x["length"] for x in rows))
    title = f"{rows[0]['needles']} needles at each distance, in {lengths} tokens{near}"
    return [Text(NEEDLES_TEXT), Table(columns, lines, title), *recalled(found)]


def _texts(found: Found) -> list[Block]:
    blocks: list[Block] = []
    for row in found.get("texts") or ():
        blocks.append(
            Text(
                f"{_line(row['prompt'])} …\n\n{TEACHER}: {_line(row['teacher'])}\n\n"
                f"{STUDENT}: {_line(row['student'])}\n\n"
                f"The first {row['same']} of {row['tokens']} tokens are the same (greedy decoding)."
            )
        )
    return blocks


def _line(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _costs(found: Found) -> list[Block]:
    forward, decode = found["forward_cost"], found["decode_cost"]
    if not forward:
        return []
    panels = [_cost("Time of a forward pass", forward, "N", "ms", "milliseconds")]
    if all(any(_seen(row, f"{who}_mb") for row in forward) for who in ("teacher", "student")):
        panels.append(_cost("Memory of a forward pass", forward, "N", "mb", "MiB"))
    if decode:
        panels.append(_cost("Time of a generated token", decode, "context", "ms", "milliseconds"))
        panels.append(_cost("Size of the cache", decode, "context", "cache", "bytes"))
    lines = [
        [
            f"{row['N']:,}",
            *(three_digits(row[f"{who}_ms"]) for who in ("teacher", "student")),
            f"{row['ratio']:.2f}",
            *(_memory(row, f"{who}_mb") for who in ("teacher", "student")),
        ]
        for row in forward
    ]
    columns = ["N", "softmax, ms", "converted, ms", "ratio", "softmax, MiB", "converted, MiB"]
    title = f"Forward pass, batch {forward[0]['batch_size']}, {forward[0]['device']}"
    return [Text(COST_TEXT), _plots("cost", panels), Table(columns, lines, title)]


def _cost(title: str, rows: Sequence[Found], x: str, unit: str, words: str) -> Panel:
    curves = []
    for slot, (who, label) in enumerate((("teacher", TEACHER), ("student", STUDENT))):
        points = [(row[x], row[f"{who}_{unit}"]) for row in rows if _seen(row, f"{who}_{unit}")]
        places, values = zip(*points, strict=True)
        curves.append(Curve(label, places, values, slot=slot, marker="os"[slot]))
    ticks = [row[x] for row in rows]
    name = "tokens N" if x == "N" else "tokens of context"
    return Panel(title, curves, Axis(name, log=True, ticks=ticks), Axis(words, log=True))


def _seen(row: Found, name: str) -> bool:
    """Whether a quantity was large enough to be noticed; a little memory may not be."""
    return (row.get(name) or 0) > 0


def _memory(row: Found, name: str) -> str:
    return three_digits(row[name]) if _seen(row, name) else "–"


def _plots(name: str, panels: Sequence[Panel]) -> Plots:
    return Plots([Plot(svg, note) for svg, note in as_page_plots(name, panels)])


def _facts(found: Found) -> dict[str, str]:
    options = ", ".join(f"{key}={value}" for key, value in found["options"].items())
    return {
        "attention": f"{found['attention']}: {options}" if options else found["attention"],
        "updates": f"{found['transfer_steps']} of transfer, {found['recover_steps']} of recovery, "
        f"{found['batch_size']} × {found['length']} tokens each",
        "text": found["text"],
        "seed": str(found["seed"]),
        "device": f"{found['device']}, {found['precision']}",
        "torch": f"{found['torch']}, transformers {found['transformers']}",
        "commit": found["commit"],
        "date": found["date"],
        "took": f"{found['seconds']:,.0f} s",
    }


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
