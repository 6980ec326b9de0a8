"""Time against N, from the rows of ``lln bench`` and of timed training steps."""

from __future__ import annotations

from pathlib import Path

from lln.report.lines import Axis
from lln.report.numbers import three_digits
from lln.report.panels import Curve, Panel
from lln_study.paper.pages.blocks import NOTHING_YET, latest, markdown_table, origin, picture
from lln_study.paper.tables import table as tables


def speed(results: Path) -> str:
    """Milliseconds of a call per length, forward and in training, and how they grow."""
    content = latest(results, "attention")
    if content is None:
        return NOTHING_YET
    rows = content["rows"]
    time = {(row["op"], row["impl"], row["pass"], row["N"]): row["ms_p50"] for row in rows}
    ratios = {(r["op"], r["pass"], r["N"]): f"{r['ratio']:.1f}×" for r in content["ratios"]}

    def cell(op: str, impl: str, passes: str, N: int) -> str:
        return three_digits(time.get((op, impl, passes, N))) or "–"

    lines = [
        [
            f"{N:,}",
            cell("bidirectional", "sdpa", "fwd", N),
            cell("bidirectional", "eager", "fwd", N),
            ratios.get(("bidirectional", "fwd", N), "–"),
            cell("lln_diag", "eager", "fwd", N),
            cell("bidirectional", "sdpa", "fwd+bwd", N),
            cell("recommended", "eager", "fwd+bwd", N),
            ratios.get(("recommended", "fwd+bwd", N), "–"),
        ]
        for N in sorted({row["N"] for row in rows})
    ]
    causal_lines = [
        [
            f"{N:,}",
            cell("causal", "sdpa", "fwd", N),
            cell("causal", "eager", "fwd", N),
            ratios.get(("causal", "fwd", N), "–"),
        ]
        for N in sorted({row["N"] for row in rows if row["op"] == "causal"})
    ]
    names = ["N", "SDPA", "LLN", "ratio", "LLN+Diag"]
    names += ["SDPA, fwd+bwd", "recommended, fwd+bwd", "ratio"]
    first = rows[0]
    shape = f"batch {first['B']}, {first['H']} heads of {first['D']}, {first['dtype']}"
    growth = next(
        fit
        for fit in content["growth"]
        if (fit["op"], fit["impl"], fit["pass"]) == ("bidirectional", "eager", "fwd")
    )
    memory = "" if growth["memory"] is None else f", memory as N^{growth['memory']:.2f}"
    words = (
        f"Median milliseconds of a call, {shape}. Forward with α and β given; recommended: "
        "`lln.nn.RECOMMENDED`, α and β measured, with the gradients of the "
        "learned parameters; –: not measured. LLN's time grows as "
        f"N^{growth['time']:.2f}{memory} between N = {growth['from']:,} and {growth['to']:,}. "
        f"({first['configuration']}; {origin(first)}, {content['date']})"
    )
    drawn = picture(results, "attention", "Time of a forward pass on a CPU against N")
    causal = markdown_table(["N", "causal SDPA", "causal LLN", "ratio"], causal_lines)
    return f"{drawn}{markdown_table(names, lines)}\n\n{causal}\n\n{words}"


def busy(results: Path) -> str:
    """SDPA's time ÷ ours, with the machine to itself and beside busy processes."""
    alone = latest(results, "attention")
    beside = {load: latest(results, f"attention-load-{load}") for load in (1, 2, 4, 8)}
    runs = {load: content for load, content in beside.items() if content is not None}
    if alone is None or not runs:
        return NOTHING_YET
    shown = {
        "LLN": ("bidirectional", "fwd"),
        "causal LLN": ("causal", "fwd"),
        "recommended, fwd+bwd": ("recommended", "fwd+bwd"),
    }
    ratios = {
        load: {(r["op"], r["pass"], r["N"]): r["ratio"] for r in content["ratios"]}
        for load, content in {0: alone, **runs}.items()
    }
    columns = [(label, load) for label in shown for load in ratios]
    names = [f"{label}, {'alone' if load == 0 else f'beside {load}'}" for label, load in columns]
    lines = []
    for N in sorted({N for found in ratios.values() for _, _, N in found}):
        cells = (ratios[load].get((*shown[label], N)) for label, load in columns)
        lines.append([f"{N:,}", *("–" if ratio is None else f"{ratio:.1f}×" for ratio in cells)])
    first = next(iter(runs.values()))
    words = (
        "SDPA's time ÷ ours in the same run, the machine to itself and beside as many processes "
        f"that never rest. ({origin(first['rows'][0])}, {first['date']})"
    )
    return f"{markdown_table(['N', *names], lines)}\n\n{words}"


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
        known = [row["ms_p50"] for row in (theirs, ours) if row and row["ms_p50"]]
        return f"{known[0] / known[1]:.1f}×" if len(known) == 2 else ""

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
        f"would take. ({origin(first, rows)}, triton {first['triton']}, {content['date']})"
    )
    drawn = picture(results, "gpu", "Time on a GPU against N", "_time")
    return f"{drawn}{markdown_table(names, lines)}\n\n{words}"


def time_panels(results: Path) -> list[Panel]:
    """README's picture: a training step on a GPU and a forward pass on a CPU against N."""
    return [*_step_panel(results), *_cpu_panel(results)]


def _step_panel(results: Path) -> list[Panel]:
    shown = {"softmax": "softmax (SDPA)", "lln_diag": "LLN+Diag", "nystromformer": "Nyströmformer"}
    for table in tables.make("2", results)[:1]:
        curves = []
        for slot, (mechanism, label) in enumerate(shown.items()):
            own = [row for row in table.records if row["mechanism"] == mechanism]
            times = {int(N): ms for row in own for N, ms in row["milliseconds"].items() if ms}
            curves.append(_curve(label, times, slot))
        first = table.records[0]
        size = f"{first['configuration']['layers']} × {first['configuration']['width']}"
        return [_panel(f"Training step of RoBERTa {size}, {first['device']}", curves)]
    return []


def _cpu_panel(results: Path) -> list[Panel]:
    content = latest(results, "attention")
    if content is None:
        return []
    shown = {
        ("bidirectional", "sdpa"): ("softmax (SDPA)", 0),
        ("lln_diag", "eager"): ("LLN+Diag", 1),
        ("bidirectional", "eager"): ("LLN", 3),
    }
    forward = [row for row in content["rows"] if row["pass"] == "fwd"]
    curves = []
    for key, (label, slot) in shown.items():
        times = {row["N"]: row["ms_p50"] for row in forward if (row["op"], row["impl"]) == key}
        curves.append(_curve(label, times, slot))
    threads = forward[0]["device"].split(", ")[-1]
    return [_panel(f"Attention alone, forward, CPU with {threads}", curves)]


def _curve(label: str, times: dict[int, float], slot: int) -> Curve:
    lengths = sorted(times)
    return Curve(label, lengths, [times[N] for N in lengths], slot=slot, marker="osD^"[slot])


def _panel(title: str, curves: list[Curve]) -> Panel:
    lengths = sorted({N for curve in curves for N in curve.x})
    ticks = lengths if len(lengths) < 8 else lengths[::2]
    return Panel(
        title, curves, Axis("tokens N", log=True, ticks=ticks), Axis("milliseconds", log=True)
    )
