"""Times against lengths, from the rows of ``lln bench`` and of timed training steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lln.report.lines import Axis
from lln.report.numbers import three_digits
from lln.report.panels import Curve, Panel
from lln_study.paper.pages.blocks import (
    NOTHING_YET,
    Blocks,
    Row,
    from_file,
    latest,
    listed,
    markdown_table,
    origin,
    picture,
)
from lln_study.paper.tables import table as tables

LOADS = (1, 2, 4, 8)  # busy processes beside a run
TRAINING = "fwd+bwd"
Case = tuple[str, str, str]  # op, implementation, pass


def by_length(cells: Mapping[tuple[Any, int], str], columns: Mapping[str, Any]) -> str:
    """A table with a line per N; ``columns`` says which cells a column has."""
    wanted = set(columns.values())
    lines = [
        [f"{N:,}", *(cells.get((case, N)) or "–" for case in columns.values())]
        for N in sorted({N for case, N in cells if case in wanted})
    ]
    return markdown_table(["N", *columns], lines)


def _ratios(content: Mapping[str, Any]) -> dict[tuple[Any, int], str]:
    """SDPA's time ÷ ours, by op and pass."""
    return {((r["op"], r["pass"]), r["N"]): f"{r['ratio']:.1f}×" for r in content["ratios"]}


def speed(results: Path) -> str:
    """Milliseconds of a call per length on a CPU, forward and in training."""
    content = latest(results, "attention")
    if content is None:
        return NOTHING_YET
    rows = content["rows"]
    cells: dict[tuple[Any, int], str] = {}
    for row in rows:
        case = (row["op"], row["impl"], row["pass"])
        cells[case, row["N"]] = three_digits(row["ms_p50"])
        cells[("peak_mb", *case), row["N"]] = three_digits(row["peak_mb"])
    cells |= _ratios(content)
    both = {
        "SDPA": ("bidirectional", "sdpa", "fwd"),
        "LLN": ("bidirectional", "eager", "fwd"),
        "ratio": ("bidirectional", "fwd"),
        "LLN, MiB": ("peak_mb", "bidirectional", "eager", "fwd"),
        "LLN+Diag": ("lln_diag", "eager", "fwd"),
        "SDPA, fwd+bwd": ("bidirectional", "sdpa", TRAINING),
        "recommended, fwd+bwd": ("recommended", "eager", TRAINING),
        "ratio, fwd+bwd": ("recommended", TRAINING),
    }
    causal = {
        "causal SDPA": ("causal", "sdpa", "fwd"),
        "causal LLN": ("causal", "eager", "fwd"),
        "ratio": ("causal", "fwd"),
    }
    drawn = picture(results, "attention", "Time of a forward pass on a CPU against N")
    made = f"{drawn}{by_length(cells, both)}\n\n{by_length(cells, causal)}"
    return f"{made}\n\n({origin(rows)}, {content['date']})"


def busy(results: Path) -> str:
    """SDPA's time ÷ ours, with the machine to itself and beside busy processes."""
    alone = latest(results, "attention")
    beside = {load: latest(results, f"attention-load-{load}") for load in LOADS}
    runs = {f"beside {load}": content for load, content in beside.items() if content is not None}
    if alone is None or not runs:
        return NOTHING_YET
    ops = {
        "LLN": ("bidirectional", "fwd"),
        "causal LLN": ("causal", "fwd"),
        "recommended, fwd+bwd": ("recommended", TRAINING),
    }
    cells = {
        ((name, case), N): ratio
        for name, content in {"alone": alone, **runs}.items()
        for (case, N), ratio in _ratios(content).items()
    }
    columns = {
        f"{words}, {name}": (name, case) for words, case in ops.items() for name in ("alone", *runs)
    }
    last = list(runs.values())[-1]
    return f"{by_length(cells, columns)}\n\n({origin(last['rows'])}, {last['date']})"


def gpu(results: Path) -> str:
    """Milliseconds of the kernels beside cuDNN at a constant number of tokens."""
    drawn = picture(results, "gpu", "Time on a GPU against N", "_time")
    return drawn + from_file("gpu", _kernels)(results)


def _kernels(rows: Sequence[Row]) -> str:
    wanted = {"D": 64, "dtype": "bfloat16", "launch": "graph"}
    rows = [
        row
        for row in rows
        if row["ms_p50"] and all(row[name] == value for name, value in wanted.items())
    ]
    tokens = max(row["B"] * row["N"] for row in rows if row["op"] == "bidirectional")
    times: dict[tuple[Case, int], float] = {}
    cells: dict[tuple[Any, int], str] = {}
    for row in rows:
        if row["B"] * row["N"] == tokens:
            place = ((row["op"], row["impl"], row["pass"]), row["N"])
            times[place] = row["ms_p50"]
            cells[place] = three_digits(row["ms_p50"])
            if row["impl"] == "triton" and row.get("floor_share"):
                cells[place] += f" ({row['floor_share']:.0%})"
    ours, theirs = (("bidirectional", impl, TRAINING) for impl in ("triton", "cudnn"))
    for case, N in times:
        if case == theirs and (ours, N) in times:
            cells["ratio", N] = f"{times[theirs, N] / times[ours, N]:.1f}×"
    columns = {
        "cuDNN SDPA fwd+bwd": theirs,
        "LLN fwd": ("bidirectional", "triton", "fwd"),
        "LLN fwd+bwd": ours,
        "SDPA ÷ LLN": "ratio",
        "LLN+Diag fwd": ("lln_diag", "triton", "fwd"),
        "LLN+Diag fwd+bwd": ("lln_diag", "triton", TRAINING),
        "causal LLN fwd+bwd": ("causal", "triton", TRAINING),
    }
    return by_length(cells, columns)


def _profile(rows: Sequence[Row]) -> str:
    """Microseconds of the kernels of every op: ours by name, PyTorch's together."""
    found: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows:
        name = row["kernel"]
        short = name.removesuffix("_kernel") if name.endswith("_kernel") else "PyTorch's own"
        found.setdefault((row["op"], row["D"]), {}).setdefault(short, []).append(row)
    lines = []
    for (op, width), kernels in found.items():
        us = {name: _sum(own, "us") for name, own in kernels.items()}
        launches = {name: _sum(own, "launches") for name, own in kernels.items()}
        shown = [
            f"{name} {three_digits(us[name])}"
            + (f" ({launches[name]:.0f})" if launches[name] > 1 else "")
            for name in sorted(us, key=lambda name: -us[name])
        ]
        lines.append([f"`{op}`, heads of {width}", f"{sum(us.values()):,.0f}", ", ".join(shown)])
    return markdown_table(["op", "µs", "kernels"], lines)


def _sum(rows: Iterable[Row], name: str) -> float:
    return sum(row[name] for row in rows)


def serving(results: Path) -> str:
    """A step and the size of the seats against the length of streams: on a GPU, then on a CPU."""
    made = [from_file(f"serving_{machine}", _seats)(results) for machine in ("nvidia*", "[!n]*")]
    return "\n\n".join(table for table in made if table != NOTHING_YET) or NOTHING_YET


def _seats(rows: Sequence[Row]) -> str:
    mib = {"ours": "ours_bytes", "softmax": "softmax_bytes"}
    shown = [{**row, **{name: row[of] / 2**20 for name, of in mib.items()}} for row in rows]
    columns = {
        "seats": "{seats}",
        "tokens so far": "{tokens:,}",
        "ours, ms": "{ours_ms:.3g}",
        "softmax, ms": "{softmax_ms:.3g}",
        "softmax ÷ ours": "{ratio:.2f}×",
        "ours, MiB": "{ours:,.1f}",
        "softmax, MiB": "{softmax:,.1f}",
    }
    return listed(shown, columns)


ONNX = {
    "tokens": "{tokens:,}",
    "ms": "{ms:.0f}",
    "ms with softmax": "{softmax_ms:.0f}",
    "times faster": "{ratio:.1f}",
    "largest difference from torch": "{difference:.0e}",
    "onnxruntime": "{onnxruntime}",
}


def _onnx(rows: Sequence[Row]) -> str:
    return listed([{**row, "ratio": row["softmax_ms"] / row["ms"]} for row in rows], ONNX)


def time_panels(results: Path) -> list[Panel]:
    """README's picture: a training step on a GPU and a forward pass on a CPU against N."""
    drawn = []
    for table in tables.make("2", results)[:1]:
        shown = {"softmax": "softmax (SDPA)", "lln_diag": "LLN+Diag"}
        shown["nystromformer"] = "Nyströmformer"
        times = {
            label: {
                int(N): ms
                for row in table.records
                if row["mechanism"] == name
                for N, ms in row["milliseconds"].items()
                if ms
            }
            for name, label in shown.items()
        }
        first = table.records[0]
        size = f"{first['configuration']['layers']} × {first['configuration']['width']}"
        drawn.append(_panel(f"Training step of RoBERTa {size}, {first['device']}", times))
    content = latest(results, "attention")
    if content is not None:
        forward = [row for row in content["rows"] if row["pass"] == "fwd"]
        shown = {("bidirectional", "sdpa"): "softmax (SDPA)", ("lln_diag", "eager"): "LLN+Diag"}
        shown["bidirectional", "eager"] = "LLN"
        times = {
            label: {row["N"]: row["ms_p50"] for row in forward if (row["op"], row["impl"]) == case}
            for case, label in shown.items()
        }
        threads = forward[0]["device"].split(", ")[-1]
        drawn.append(_panel(f"Attention alone, forward, CPU with {threads}", times))
    return drawn


SLOTS = {"softmax (SDPA)": 0, "LLN+Diag": 1, "Nyströmformer": 2, "LLN": 3}  # their colours


def _panel(title: str, times: Mapping[str, Mapping[int, float]]) -> Panel:
    curves = []
    for label, own in times.items():
        slot, lengths = SLOTS[label], sorted(own)
        ms = [own[N] for N in lengths]
        curves.append(Curve(label, lengths, ms, slot=slot, marker="osD^"[slot]))
    lengths = sorted({N for own in times.values() for N in own})
    ticks = lengths if len(lengths) < 8 else lengths[::2]
    return Panel(
        title, curves, Axis("tokens N", log=True, ticks=ticks), Axis("milliseconds", log=True)
    )


BLOCKS: Blocks = {
    "speed": speed,
    "busy": busy,
    "gpu": gpu,
    "gpu_profile": from_file("profile", _profile),
    "serving": serving,
    "onnx": from_file("onnx", _onnx),
}
