"""The measured blocks of README.md, written from the rows in ``results/``: ``make readme``.

A block stands between ``<!-- measured: NAME -->`` and ``<!-- end -->``. A test compares the file
with what this module would write, so that no number is ever typed by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lln.records.files import write_text
from lln.study.paper.figures import from_curves as training_figures
from lln.study.paper.figures import from_results as run_figures
from lln.study.paper.results import read, read_curves
from lln.study.paper.tables import table as tables
from lln.study.plots import panels
from lln.study.plots.numbers import three_digits
from lln.study.plots.panels import Panel

Row = Mapping[str, Any]


def newest(results: Path, subject: str) -> Path | None:
    """The newest ``subject_hardware_date.json``, or None if there is none."""
    found = sorted(results.glob(f"{subject}_*.json"), key=lambda path: path.stem.split("_")[-1])
    return found[-1] if found else None


def latest(results: Path, subject: str) -> dict[str, Any] | None:
    """Its content."""
    path = newest(results, subject)
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))


def picture(results: Path, subject: str, words: str, ending: str = "") -> str:
    """The plot that was saved beside the rows, as a paragraph of its own; nothing without one."""
    path = newest(results, subject)
    drawing = None if path is None else path.with_name(f"{path.stem}{ending}.svg")
    if drawing is None or not drawing.exists():
        return ""
    return f"![{words}]({results.name}/{drawing.name})\n\n"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its first column left-aligned and the others right-aligned."""
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def origin(row: Row) -> str:
    """Where a row comes from, in words."""
    return f"{row['device']}, torch {row['torch']}, commit {row['commit']}"


def speed(results: Path) -> str:
    """Milliseconds of a forward call per length, and how they grow."""
    content = latest(results, "attention")
    if content is None:
        return NOTHING_YET
    rows = [row for row in content["rows"] if row["pass"] == "fwd"]
    time = {(row["op"], row["impl"], row["N"]): row["ms_p50"] for row in rows}
    ratio = {(r["op"], r["N"]): r["ratio"] for r in content["ratios"] if r["pass"] == "fwd"}

    def times(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}×"

    lines = [
        [
            f"{N:,}",
            three_digits(time.get(("bidirectional", "sdpa", N))),
            three_digits(time.get(("bidirectional", "eager", N))),
            times(ratio.get(("bidirectional", N))),
            three_digits(time.get(("lln_diag", "eager", N))),
            three_digits(time.get(("causal", "sdpa", N))),
            three_digits(time.get(("causal", "eager", N))),
            times(ratio.get(("causal", N))),
        ]
        for N in sorted({row["N"] for row in rows})
    ]
    names = ["N", "SDPA", "LLN", "ratio", "LLN+Diag", "causal SDPA", "causal LLN", "ratio"]
    first = rows[0]
    shape = f"batch {first['B']}, {first['H']} heads of {first['D']}, {first['dtype']}"
    growth = next(
        fit
        for fit in content["growth"]
        if (fit["op"], fit["impl"], fit["pass"]) == ("bidirectional", "eager", "fwd")
    )
    memory = "" if growth["memory"] is None else f", memory as N^{growth['memory']:.2f}"
    words = (
        f"Median milliseconds of a forward call, {shape}, α and β given. LLN's time grows as "
        f"N^{growth['time']:.2f}{memory} between N = {growth['from']:,} and {growth['to']:,}. "
        f"({first['configuration']}; {origin(first)}, {content['date']})"
    )
    drawn = picture(results, "attention", "Time of a forward pass on a CPU against N")
    return f"{drawn}{markdown_table(names, lines)}\n\n{words}"


def gpu(results: Path) -> str:
    """Milliseconds of the kernels beside cuDNN at a constant number of tokens."""
    content = latest(results, "gpu")
    if content is None:
        return NOTHING_YET
    rows = [
        row
        for row in content["rows"]
        if (row["D"], row["dtype"], row["launch"]) == (64, "bfloat16", "graph")
    ]
    tokens = max(row["B"] * row["N"] for row in rows if row["op"] == "bidirectional")
    rows = [row for row in rows if row["B"] * row["N"] == tokens]
    found = {(row["op"], row["impl"], row["pass"], row["N"]): row for row in rows}

    def cell(op: str, impl: str, passes: str, N: int) -> str:
        row = found.get((op, impl, passes, N))
        if row is None or row["ms_p50"] is None:
            return ""
        share = row.get("floor_share") if impl == "triton" else None
        return three_digits(row["ms_p50"]) + (f" ({share:.0%})" if share else "")

    def times(N: int) -> str:
        ours, theirs = (
            found.get(("bidirectional", impl, "fwd+bwd", N)) for impl in ("triton", "cudnn")
        )
        return f"{theirs['ms_p50'] / ours['ms_p50']:.1f}×" if ours and theirs else ""

    lines = [
        [
            f"{N:,}",
            cell("bidirectional", "cudnn", "fwd+bwd", N),
            cell("bidirectional", "triton", "fwd", N),
            cell("bidirectional", "triton", "fwd+bwd", N),
            times(N),
            cell("lln_diag", "triton", "fwd", N),
            cell("lln_diag", "triton", "fwd+bwd", N),
            cell("causal", "triton", "fwd+bwd", N),
        ]
        for N in sorted({row["N"] for row in rows if row["op"] == "bidirectional"})
    ]
    names = [
        "N",
        "cuDNN SDPA fwd+bwd",
        "LLN fwd",
        "LLN fwd+bwd",
        "SDPA ÷ LLN",
        "LLN+Diag fwd",
        "LLN+Diag fwd+bwd",
        "causal LLN fwd+bwd",
    ]
    first = rows[0]
    words = (
        f"Median milliseconds for {tokens:,} tokens in all (batch × N), {first['H']} heads of "
        f"{first['D']}, {first['dtype']}, α and β given, launched from CUDA graphs; in brackets "
        "the share of the memory-bandwidth floor, the time a copy of the bytes that must move "
        f"would take. ({origin(first)}, triton {first['triton']}, {content['date']})"
    )
    drawn = picture(results, "gpu", "Time on a GPU against N", "_time")
    return f"{drawn}{markdown_table(names, lines)}\n\n{words}"


def concentration(results: Path) -> str:
    """Entropy and spectral gap at some temperatures, and the share of targets found."""
    content = latest(results, "demo")
    if content is None:
        return NOTHING_YET
    rows = content["concentration"]
    cells = {
        (row["kernel"], row["temperature"]): f"{row['entropy']:.2f} / {row['spectral_gap']:.2f}"
        for row in rows
    }
    temperatures = sorted({row["temperature"] for row in rows})
    lines = [
        [
            row["kernel"].replace("normalize_keys", "`normalize_keys`"),
            *(cells[row["kernel"], temperature] for temperature in temperatures),
            f"{row['found']:.0%}",
        ]
        for row in content["retrieval"]
    ]
    names = [
        "entropy (bits) / spectral gap",
        *(f"τ = {t:g}" for t in temperatures),
        "targets found",
    ]
    first = rows[0]
    words = (
        "τ is the softmax temperature 1/σ(scores). *Targets found*: share of queries whose largest "
        "weight falls on the key they are a copy of, τ = 1. "
        f"({first['configuration']}; {origin(first)}, {content['date']})"
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


def paper_table(number: str, results: Path) -> str:
    """A table of the paper with our numbers, as ``lln table NUMBER --markdown`` prints it."""
    return _markdown(tables.make(number, results))


def pretraining(results: Path) -> str:
    """The same of pre-trainings, without those in float16: they are for Fig. 8b."""
    found = [
        table
        for table in tables.make("pretraining", results)
        if table.records[0]["configuration"].get("precision") != "fp16"
    ]
    return _markdown(found)


def _markdown(found: Sequence[tables.Table]) -> str:
    return "\n\n".join(table.markdown() for table in found) or NOTHING_YET


def drawing(name: str, results: Path) -> str:
    """The drawing of a figure that :func:`main` has made."""
    path = results / f"{name}.svg"
    return f"![{DRAWINGS[name][0]}]({results.name}/{path.name})" if path.exists() else NOTHING_YET


def _of_runs(number: str, results: Path) -> list[Panel]:
    return run_figures.FIGURES[number].panels(read(results))


NOTHING_YET = "*No rows in `results/` yet.*"
DRAWINGS: Mapping[str, tuple[str, Callable[[Path], list[Panel]]]] = {
    "figure_8a": (
        "Loss of pre-training against updates and against time",
        lambda results: training_figures.losses(read_curves(results)),
    ),
    "figure_9": ("α and β of every layer while the ViT trains", partial(_of_runs, "9")),
    "figure_10a": ("Accuracy of the ViT against fixed α = β", partial(_of_runs, "10a")),
    "figure_arena": (
        "Accuracy on validation while training on the Long Range Arena",
        partial(_of_runs, "arena"),
    ),
}
Blocks = Mapping[str, Callable[[Path], str]]
BLOCKS: Blocks = {
    "speed": speed,
    "gpu": gpu,
    "concentration": concentration,
    **{name: partial(drawing, name) for name in DRAWINGS},
    **{f"table_{number}": partial(paper_table, number) for number in tables.TABLES},
    "table_pretraining": pretraining,
}


def rewrite(text: str, results: Path, blocks: Blocks = BLOCKS) -> str:
    """A page with every measured block made anew."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in blocks:
            raise ValueError(f"unknown measured block {name!r}; there are {', '.join(blocks)}")
        return f"<!-- measured: {name} -->\n{blocks[name](results)}\n<!-- end -->"

    return re.sub(r"<!-- measured: (\w+) -->\n.*?<!-- end -->", block, text, flags=re.S)


def main(root: Path) -> None:
    """Rewrite ``root/README.md`` from ``root/results``, and draw what it shows."""
    results, readme = root / "results", root / "README.md"
    for name, (_, figure) in DRAWINGS.items():
        drawn = figure(results)
        if drawn:
            write_text(results / f"{name}.svg", panels.as_files(name, drawn)["svg"].decode())
    write_text(readme, rewrite(readme.read_text("utf-8"), results))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd())
