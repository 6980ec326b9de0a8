"""The measured blocks of docs/guide/near-and-far.md, from ``results/near-far…json``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lln_study.paper.pages.blocks import (
    NOTHING_YET,
    Blocks,
    latest,
    markdown_table,
    origin,
    picture,
)
from lln_study.paper.pages.lln_alone import USUAL
from lln_study.paper.results import Mean, origin_text, read, read_curves

Row = dict[str, Any]
WIDE = 256  # the block that the screen chose
LONG = ("roberta-small", 15300, 512)  # recipe, updates and tokens of the long runs
COMPARED = ("softmax", "lln_diag", "lln_nearfar")
# options that the table has words for; runs that differ in others are lines of their own
SAID = frozenset({"diag_block", "diag_overlap", "mix", "method", "far", "feature_map", "slots"})
SETTLED = 500  # updates after which a large gradient is no start
COLLAPSED = 1.0  # nats above its own best at the end: what was learned is gone


def concentration(results: Path) -> str:
    """Bits and share of near keys against softmax's, for every size and temperature."""
    content = latest(results, "near-far")
    if content is None:
        return NOTHING_YET
    rows: Sequence[Row] = content["concentration"]
    temperatures = sorted({row["temperature"] for row in rows})
    cells = {(row["tokens"], row["head_dim"], row["temperature"]): row for row in rows}
    lines = []
    for tokens, head_dim in dict.fromkeys((row["tokens"], row["head_dim"]) for row in rows):
        line = [f"{tokens:,}, {head_dim}"]
        for temperature in temperatures:
            row = cells[tokens, head_dim, temperature]
            line.append(f"{row['entropy_difference']:+.2f} / {row['share_difference']:+.3f}")
        lines.append(line)
    names = ["N, D", *(f"τ = {t:g}" for t in temperatures)]
    words = (
        "Difference to softmax, mean of 20 draws: entropy of a row in bits / share of the mass on "
        f"near keys (blocks of 128). ({origin(rows[0])}, {content['date']})"
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


def matrices(results: Path) -> str:
    """The matrices of two heads, and the mean over all heads of that model."""
    content = latest(results, "near-far-matrices")
    if content is None:
        return NOTHING_YET
    rows: Sequence[Row] = content["rows"]
    lines = []
    for form in dict.fromkeys(row["form"] for row in rows):
        own = [row for row in rows if row["form"] == form]
        bits, share, distance = (
            sum(row[name] for row in own) / len(own)
            for name in ("entropy", "near_share", "distance")
        )
        lines.append([form, f"{bits:.1f}", f"{share:.0%}", f"{distance:.0%}"])
    names = ["mean over all heads", "entropy, bits", "near share", "mass elsewhere"]
    first = rows[0]
    words = (
        f"{first['model']} on {first['tokens']} tokens of {first['text']}, blocks of "
        f"{first['block']}; {len(rows) // len(lines)} heads. ({origin(first)}, {content['date']})"
    )
    drawn = picture(results, "near-far-matrices", "Attention matrices of two heads in four forms")
    return f"{drawn}{markdown_table(names, lines)}\n\n{words}"


def slots(results: Path) -> str:
    """Targets found against the number of slots."""
    content = latest(results, "near-far")
    if content is None:
        return NOTHING_YET
    rows: Sequence[Row] = content["retrieval"]
    counts = sorted({row["slots"] for row in rows if row["slots"]})
    found = {(row["feature_map"], row["slots"]): f"{row['found']:.0%}" for row in rows}
    lines = [
        [f'LLN, `"{name}"`', *(found.get((name, count), "–") for count in counts)]
        for name in ("rotations", "signs")
    ]
    lines.append(["softmax", *([found["softmax", None]] * len(counts))])
    words = (
        "Targets found: share of 512 queries (D = 64, τ = 1) whose largest weight is on the key "
        f"that they are a copy of. ({origin(rows[0])}, {content['date']})"
    )
    return f"{markdown_table(['slots', *map(str, counts)], lines)}\n\n{words}"


def screen(results: Path) -> str:
    """Losses of short pre-trainings: how the branches are put together, and how far they reach."""
    rows = read(results / "near_far", "mlm") if (results / "near_far").exists() else []
    rows = [row for row in rows if row["mechanism"] in COMPARED and _plain(row)]
    if not rows:
        return NOTHING_YET
    norms = _norms(results / "near_far")
    losses: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        given = dict(row["configuration"]["options"])
        conv = given.pop("conv", 0)
        norm = norms.get((row["digest"], row["seed"]))
        shown = f"{row['loss']:.2f}" + (f" ({norm:.1f})" if norm else "")
        losses.setdefault(_form(row["mechanism"], given), {})[conv] = shown
    convs = sorted({conv for found in losses.values() for conv in found})
    lines = [
        [form, reach, *(found.get(conv, "–") for conv in convs)]
        for (form, reach), found in sorted(losses.items(), key=lambda entry: _order(entry[0]))
    ]
    names = ["branches", "near keys", *(f"conv {conv}" if conv else "no conv" for conv in convs)]
    tokens = rows[0]["tokens"] / 1e6
    words = (
        f"Loss on held-out text after {tokens:.0f}M tokens of wiki2015, RoBERTa with 6 layers × "
        f"512, N = 512, one seed each; two equal runs may differ by 0.1. In brackets the largest "
        f"norm of the gradient after {SETTLED} updates. ({origin_text(rows)})"
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


def _plain(row: Mapping[str, Any]) -> bool:
    """Not one of those that LLN alone is compared with (docs/results/lln-alone.md)."""
    own = row["configuration"]
    return all(own.get(name, usual) == usual for name, usual in USUAL.items())


def _norms(folder: Path) -> dict[tuple[str, int], float]:
    """The largest norm of the gradient of every run that has a curve, by digest and seed."""
    return {
        (line["digest"], line["seed"]): max(
            (row.get("gradient_norm") or 0 for row in line["rows"] if row["step"] > SETTLED),
            default=0,
        )
        for line in read_curves(folder)
    }


def longer(results: Path) -> str:
    """Losses of long pre-trainings: the best of the screen beside softmax and today's setting."""
    rows = read(results, "mlm")
    wide = [row for row in rows if _given(row).get("diag_block") == WIDE and _size(row) == LONG]
    if not wide:
        return NOTHING_YET
    rows = [row for row in rows if _size(row) == _size(wide[0]) and _is_compared(row)]
    losses: dict[tuple[str, str], dict[int, list[float]]] = {}
    lost = []
    for row in rows:
        given = _given(row)
        conv = given.pop("conv", 0)
        form = _form(row["mechanism"], {"diag_block": 64, **given})
        losses.setdefault(form, {}).setdefault(conv, []).append(row["loss"])
        if row["loss"] > row["best"] + COLLAPSED:
            lost.append(
                f" {form[0].capitalize()}, {form[1]}: it collapsed; the best loss was "
                f"{row['best']:.2f}, after {row['best_step']:,} updates."
            )
    convs = sorted({conv for found in losses.values() for conv in found})
    lines = [
        [form, reach, *(_mean(found.get(conv, [])) for conv in convs)]
        for (form, reach), found in sorted(losses.items(), key=lambda entry: _order(entry[0]))
    ]
    names = ["branches", "near keys", *(f"conv {conv}" if conv else "no conv" for conv in convs)]
    words = (
        f"Loss on held-out text after {wide[0]['tokens'] / 1e6:.0f}M tokens, the same models; one "
        f"seed unless a number of seeds and a standard error are given.{''.join(lost)} "
        f"({origin_text(rows)})"
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


def _given(row: Mapping[str, Any]) -> dict[str, Any]:
    return dict(row["configuration"]["options"])


def _size(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two pre-trainings must share to be compared."""
    given = row["configuration"]
    return tuple(given.get(name) for name in ("recipe", "steps", "length"))


def _is_compared(row: Mapping[str, Any]) -> bool:
    return row["mechanism"] in ("softmax", "lln_nearfar") or _given(row).get("mix") == "learned"


def _mean(losses: Sequence[float]) -> str:
    mean = Mean.of(losses)
    if mean is None:
        return "–"
    return mean.text(3) + (f" ({mean.count} seeds)" if mean.count > 1 else "")


def first_level(results: Path) -> str:
    """The losses of the runs whose level came from mean and variance of the scores."""
    folder = results / "near_far" / "first_level"
    rows = read(folder, "mlm") if folder.exists() else []
    if not rows:
        return NOTHING_YET
    words = []
    for conv in sorted({row["configuration"]["options"].get("conv", 0) for row in rows}):
        own = [r["loss"] for r in rows if r["configuration"]["options"].get("conv", 0) == conv]
        name = f"with conv {conv}" if conv else "without conv"
        words.append(f"{min(own):.2f} to {max(own):.2f} {name}")
    return f"Losses of those {len(rows)} runs: {', '.join(words)}. ({origin_text(rows)})"


def _form(mechanism: str, options: dict[str, Any]) -> tuple[str, str]:
    """How the branches are put together, and the near keys of a query, in words."""
    if mechanism == "softmax":
        return "softmax", "all"
    block, overlap = options.get("diag_block", 128), options.get("diag_overlap", 0)
    reach = f"block of {block}" + (f", {overlap} on either side" if overlap else "")
    if mechanism == "lln_diag":
        slots = options.get("slots")
        mix = "learned mix" if options.get("mix") == "learned" else "plain average"
        form = mix + (f", {slots} learned slots" if slots else "")
    else:
        form = f"one normaliser, far = {options.get('far', 'others')}"
    others = [f"{key} = {value}" for key, value in options.items() if key not in SAID]
    return ", ".join([form, *others]), reach


def _order(entry: tuple[str, str]) -> tuple[int, list[int], str, str]:
    """By form, then by its numbers: 64 slots before 128."""
    form, reach = entry
    forms = ("softmax", "plain average", "learned mix")
    first = form.split(",")[0]
    place = forms.index(first) if first in forms else len(forms)
    return place, [int(number) for number in re.findall(r"\d+", form)], form, reach


BLOCKS: Blocks = {
    "near_far": concentration,
    "near_far_matrices": matrices,
    "near_far_slots": slots,
    "near_far_screen": screen,
    "near_far_long": longer,
    "near_far_first_level": first_level,
}
