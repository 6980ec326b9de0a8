"""The measured block of docs/guide/export.md, from ``results/onnx…json``."""

from __future__ import annotations

from pathlib import Path

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, latest, markdown_table, origin


def onnx(results: Path) -> str:
    """Time of a pass in onnxruntime against the length, beside softmax."""
    content = latest(results, "onnx")
    if content is None:
        return NOTHING_YET
    rows = content["rows"]
    names = ["tokens", "ms", "ms with softmax", "times faster", "largest difference from torch"]
    lines = [
        [
            f"{row['tokens']:,}",
            f"{row['ms']:.0f}",
            f"{row['softmax_ms']:.0f}",
            f"{row['softmax_ms'] / row['ms']:.1f}",
            f"{row['difference']:.0e}",
        ]
        for row in rows
    ]
    first = rows[0]
    words = (
        f"({first['configuration']}; onnxruntime {first['onnxruntime']}, {origin(first)}, "
        f"{content['date']})"
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


BLOCKS: Blocks = {"onnx": onnx}
