"""Times against lengths, from the rows of ``lln bench``, of ``lln export`` and of serving."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lln.report.numbers import three_digits
from lln_study.paper.pages.blocks import (
    NOTHING_YET,
    Blocks,
    Row,
    crossed,
    from_file,
    listed,
    markdown_table,
    picture,
    where,
)

TOKENS = 65_536  # of a batch on a GPU
ON_CPU = (128, 256, 512, 1024, 4096, 8192, 16_384, 262_144)  # lengths that are shown
ON_GPU = {"D": 64, "dtype": "bfloat16", "launch": "graph"}
OPS = (  # shown at one length
    *("measured", "lln_diag_128", "lln_diag_256", "recommended"),
    *("lln_diag_causal", "near_far", "near_far_causal"),
)
SERVING = {
    "seats": "{seats}",
    "tokens so far": "{tokens:,}",
    "ours, ms": "{ours_ms:.3g}",
    "softmax, ms": "{softmax_ms:.3g}",
    "softmax ÷ ours": "{ratio:.2f}×",
    "ours, MiB": "{ours:,.1f}",
    "softmax, MiB": "{softmax:,.1f}",
}
HOST = {
    "call": "{call}",
    "N": "{N:,}",
    "fwd": "{fwd_ms:.3f}",
    "fwd+bwd": "{both_ms:.3f}",
    "fwd+bwd, one thread": "{one_thread_ms:.3f}",
}
ONNX = {
    "tokens": "{tokens:,}",
    "ms": "{ms:.0f}",
    "ms with softmax": "{softmax_ms:.0f}",
    "times faster": "{ratio:.1f}",
    "largest difference from torch": "{difference:.0e}",
    "onnxruntime": "{onnxruntime}",
}


def by_length(columns: Mapping[str, Mapping[int, str]], lengths: Collection[int] = ()) -> str:
    """A table with a line per N, or for these alone; a column has its cells by N."""
    found = {N for own in columns.values() for N in own}
    lengths = sorted(found & set(lengths) or found)
    lines = [[f"{N:,}", *(own.get(N) or "–" for own in columns.values())] for N in lengths]
    return markdown_table(["N", *columns], lines)


def column(rows: Sequence[Row], case: str, show: Callable[[Row], str]) -> dict[int, str]:
    """The cells by N of a case, written as ``op pass`` or ``op pass impl``."""
    fields: dict[str, str] = dict(zip(("op", "pass", "impl"), case.split(), strict=False))
    return {row["N"]: show(row) for row in where(rows, fields)}


def _ms(row: Row) -> str:
    return three_digits(row["ms_p50"])


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.1f}×"


def on_cpu(results: Path) -> str:
    """Milliseconds of a call per length on a CPU, forward and in training."""
    drawn = picture(results, "attention", "Time of a forward pass on a CPU against N")
    return drawn + from_file("attention", _calls, whole=True)(results)


def _calls(content: Mapping[str, Any]) -> str:
    rows, ratios = content["rows"], content["ratios"]
    lln = "bidirectional fwd eager"
    both = {
        "SDPA": column(rows, "bidirectional fwd sdpa", _ms),
        "LLN": column(rows, lln, _ms),
        "ratio": column(ratios, "bidirectional fwd", _ratio),
        "LLN, MiB": column(rows, lln, lambda row: three_digits(row["peak_mb"])),
        "LLN+Diag": column(rows, "lln_diag fwd eager", _ms),
        "SDPA, fwd+bwd": column(rows, "bidirectional fwd+bwd sdpa", _ms),
        "recommended, fwd+bwd": column(rows, "recommended fwd+bwd eager", _ms),
        "ratio, fwd+bwd": column(ratios, "recommended fwd+bwd", _ratio),
    }
    causal = {
        "causal SDPA": column(rows, "causal fwd sdpa", _ms),
        "causal LLN": column(rows, "causal fwd eager", _ms),
        "ratio": column(ratios, "causal fwd", _ratio),
    }
    return f"{by_length(both, ON_CPU)}\n\n{by_length(causal, ON_CPU)}"


def on_gpu(results: Path) -> str:
    """Milliseconds of the kernels beside cuDNN at a constant number of tokens."""
    drawn = picture(results, "gpu", "Time on a GPU against N", "_time")
    return drawn + from_file("gpu", _kernels, whole=True)(results)


def _kernels(content: Mapping[str, Any]) -> str:
    rows, ratios = (
        [row for row in where(content[part], ON_GPU) if row["B"] * row["N"] == TOKENS]
        for part in ("rows", "ratios")
    )

    def ours(row: Row) -> str:
        share = f" ({row['floor_share']:.0%})" if row.get("floor_share") else ""
        return _ms(row) + share

    lengths = by_length(
        {
            "cuDNN SDPA fwd+bwd": column(rows, "bidirectional fwd+bwd cudnn", _ms),
            "LLN fwd": column(rows, "bidirectional fwd triton", ours),
            "LLN fwd+bwd": column(rows, "bidirectional fwd+bwd triton", ours),
            "SDPA ÷ LLN": column(
                where(ratios, {"against": "cudnn"}),
                "bidirectional fwd+bwd",
                lambda row: f"{row['times_faster']:.1f}×",
            ),
            "LLN+Diag fwd": column(rows, "lln_diag fwd triton", ours),
            "LLN+Diag fwd+bwd": column(rows, "lln_diag fwd+bwd triton", ours),
            "causal LLN fwd+bwd": column(rows, "causal fwd+bwd triton", ours),
        }
    )
    times = of_ops(rows)
    others = [[f"`{op}`", times[op]] for op in OPS if op in times]
    return f"{lengths}\n\n{markdown_table(['op at N = 4,096', 'fwd+bwd'], others)}"


def of_ops(rows: Sequence[Row]) -> dict[str, str]:
    """Milliseconds of a forward and backward pass of our kernels at N = 4,096, by op."""
    shape = {**ON_GPU, "impl": "triton", "pass": "fwd+bwd", "N": 4096, "B": TOKENS // 4096}
    return {row["op"]: _ms(row) for row in where(rows, shape)}


def serving(results: Path) -> str:
    """Steps and memory of streams against their length: with kept heads on a GPU, then on a CPU."""
    made = [
        from_file("serving-kept_*", _kept)(results),
        from_file("serving_*", _seats)(results),
    ]
    return "\n\n".join(table for table in made if table != NOTHING_YET) or NOTHING_YET


def _seats(rows: Sequence[Row]) -> str:
    mib = {"ours": "ours_bytes", "softmax": "softmax_bytes"}
    shown = [{**row, **{name: row[of] / 2**20 for name, of in mib.items()}} for row in rows]
    return listed(shown, SERVING)


def _kept(rows: Sequence[Row]) -> str:
    """A step of softmax, and of ours by the key heads that keep softmax."""
    line, found = "{seats} × {tokens:,}", {}
    for row in rows:
        heads = row.get("kept_key_heads", 0)
        columns = {"softmax": "softmax", f"ours, {heads or 'none'} kept": "ours"}
        for column, of in columns.items():
            cell = f"{row[f'{of}_ms']:.3g} / {row[f'{of}_bytes'] / 2**20:,.0f}"
            found.setdefault((line.format_map(row), column), cell)
    return crossed("streams × tokens so far: ms / MiB", found)


def _host(rows: Sequence[Row]) -> str:
    """Calls from Python; softmax of cuDNN is one of them."""
    return listed([{**row, "call": _name(row)} for row in rows], HOST)


def _name(row: Row) -> str:
    return "cuDNN SDPA" if row["impl"] == "cudnn" else f"`{row['op']}`"


def _onnx(rows: Sequence[Row]) -> str:
    return listed([{**row, "ratio": row["softmax_ms"] / row["ms"]} for row in rows], ONNX)


BLOCKS: Blocks = {
    "speed": on_cpu,
    "gpu": on_gpu,
    "host": from_file("host", _host),
    "serving": serving,
    "onnx": from_file("onnx", _onnx),
}
