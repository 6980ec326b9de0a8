"""The measured blocks of docs/guide/near-and-far.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from lln_study.paper.pages.blocks import (
    NOTHING_YET,
    Blocks,
    Row,
    cells,
    crossed,
    from_file,
    listed,
    markdown_table,
    picture,
)
from lln_study.paper.pages.lln_alone import USUAL
from lln_study.paper.results import Mean, grouped, origin_text, read, read_curves

WIDE = 256  # the block that the screen chose
LONG = ("roberta-small", 15300, 512)  # recipe, updates and tokens of the long runs
COMPARED = ("softmax", "lln_diag", "lln_nearfar")
# options that the table has words for; runs that differ in others are lines of their own
SAID = frozenset({"diag_block", "diag_overlap", "mix", "method", "far", "feature_map", "slots"})
FORMS = ("softmax", "plain average", "learned mix", "one normaliser")
SETTLED = 500  # updates after which a large gradient is no start


def concentration(rows: Sequence[Row]) -> str:
    """Bits and share of near keys against softmax's, for every size and temperature."""
    cell = "{entropy_difference:+.2f} / {share_difference:+.3f}"
    return crossed("N, D", cells(rows, "{tokens:,}, {head_dim}", "τ = {temperature:g}", cell))


def slots(rows: Sequence[Row]) -> str:
    """Targets found against the number of slots, and by softmax, which has none."""
    ordered = sorted((row for row in rows if row["slots"]), key=lambda row: row["slots"])
    found = cells(ordered, "LLN, `{feature_map}`", "{slots}", "{found:.0%}")
    rest = [row for row in rows if not row["slots"]]
    return crossed("slots", found | cells(rest, "{feature_map}", "none", "{found:.0%}"))


def matrices(results: Path) -> str:
    """The matrices of two heads, and the mean over all heads of that model."""
    drawn = picture(results, "near-far-matrices", "Attention matrices of two heads in four forms")
    return drawn + from_file("near-far-matrices", _mean_over_heads)(results)


def _mean_over_heads(rows: Sequence[Row]) -> str:
    names = ("entropy", "near_share", "distance")
    means = [
        {"form": form, **{name: sum(row[name] for row in own) / len(own) for name in names}}
        for form, own in grouped(rows, lambda row: row["form"]).items()
    ]
    columns = {
        "mean over all heads": "{form}",
        "entropy, bits": "{entropy:.1f}",
        "near share": "{near_share:.0%}",
        "mass elsewhere": "{distance:.0%}",
    }
    return listed(means, columns)


def screen(results: Path) -> str:
    """Losses of short pre-trainings, with the largest norm of the gradient in brackets."""
    folder = results / "near_far"
    rows = [row for row in read(folder, "mlm") if row["mechanism"] in COMPARED and _is_usual(row)]
    norms = {
        (line["digest"], line["seed"]): max(
            (row.get("gradient_norm") or 0 for row in line["rows"] if row["step"] > SETTLED),
            default=0,
        )
        for line in read_curves(folder)
    }

    def loss(own: Sequence[Row]) -> str:
        norm = norms.get((own[-1]["digest"], own[-1]["seed"]))
        return f"{own[-1]['loss']:.2f}" + (f" ({norm:.1f})" if norm else "")

    return _by_branches(rows, loss)


def _is_usual(row: Row) -> bool:
    """Not one of those that LLN alone is compared with (docs/results/lln-alone.md)."""
    own = row["configuration"]
    return all(own.get(name, usual) == usual for name, usual in USUAL.items())


def longer(results: Path) -> str:
    """Losses of long pre-trainings: the best of the screen beside softmax and today's setting."""
    rows = [row for row in read(results, "mlm") if _size(row) == LONG and _is_compared(row)]
    if not any(row["configuration"]["options"].get("diag_block") == WIDE for row in rows):
        return NOTHING_YET

    def loss(own: Sequence[Row]) -> str:
        mean = Mean.of(row["loss"] for row in own)
        return f"{mean.text(3)} ({mean.count})" if mean else "–"

    return _by_branches(rows, loss)


def _size(row: Row) -> tuple[object, ...]:
    """What two pre-trainings must share to be compared."""
    return tuple(row["configuration"].get(name) for name in ("recipe", "steps", "length"))


def _is_compared(row: Row) -> bool:
    is_learned = row["configuration"]["options"].get("mix") == "learned"
    return row["mechanism"] in ("softmax", "lln_nearfar") or is_learned


def _by_branches(rows: Sequence[Row], loss: Callable[[Sequence[Row]], str]) -> str:
    """A line per way to put the branches together, a column per convolution."""
    if not rows:
        return NOTHING_YET
    groups = grouped(rows, lambda row: (_branches(row), _conv(row)))
    convs = sorted({_conv(row) for row in rows})
    lines = [
        [*way, *(loss(groups[way, conv]) if (way, conv) in groups else "–" for conv in convs)]
        for way in sorted({way for way, _ in groups}, key=_order)
    ]
    names = [f"conv {conv}" if conv else "no conv" for conv in convs]
    return f"{markdown_table(['branches', 'near keys', *names], lines)}\n\n({origin_text(rows)})"


def _conv(row: Row) -> int:
    return row["configuration"]["options"].get("conv", 0)


def _branches(row: Row) -> tuple[str, str]:
    """How the branches are put together, and the near keys of a query, in words."""
    given = row["configuration"]["options"]
    if row["mechanism"] == "softmax":
        return "softmax", "all"
    if row["mechanism"] == "lln_diag":
        form = "learned mix" if given.get("mix") == "learned" else "plain average"
        form += f", {given['slots']} learned slots" if given.get("slots") else ""
    else:
        form = f"one normaliser, far = {given.get('far', 'others')}"
    others = [f"{key} = {value}" for key, value in given.items() if key not in (*SAID, "conv")]
    block = given.get("diag_block", 64 if row["mechanism"] == "lln_diag" else 128)
    overlap = given.get("diag_overlap", 0)
    reach = f"block of {block}" + (f", {overlap} on either side" if overlap else "")
    return ", ".join([form, *others]), reach


def _order(way: tuple[str, str]) -> tuple[int, list[int], str, str]:
    """By form, then by its numbers: 64 slots before 128."""
    form, reach = way
    numbers = [int(number) for number in re.findall(r"\d+", form)]
    return FORMS.index(form.split(",")[0]), numbers, form, reach


BLOCKS: Blocks = {
    "near_far": from_file("near-far", concentration, "concentration"),
    "near_far_matrices": matrices,
    "near_far_slots": from_file("near-far", slots, "retrieval"),
    "near_far_screen": screen,
    "near_far_long": longer,
}
