"""``lln export``: a model as an ONNX file, checked against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lln.cli.bench import let_waiting_threads_sleep
from lln.cli.train import mechanism_options, plain_errors


def export(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL_FOLDER", help="A local Hugging Face text model.")
    ],
    out: Annotated[Path, typer.Option(help="File of the graph, FILE.onnx.")],
    length: Annotated[
        int | None, typer.Option(min=8, help="Most tokens of the check; default 512.")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="A name of `lln list`, for a model that has softmax.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Option of the attention; repeat."),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Compare with torch, and time beside softmax, in onnxruntime.")
    ] = True,
) -> None:
    """Write a model as an ONNX graph for any batch and length.

    Takes a folder that `lln convert` or `save_pretrained` after `lln.hf.replace` wrote, or with
    --attention any model. At the end the graph runs in onnxruntime at lengths that were not traced,
    beside torch and beside the softmax model; exits with 1 if it differs from torch.
    """
    with plain_errors("lln export"):
        let_waiting_threads_sleep()
        from lln.onnx import models

        ours, softmax = models.load(model, attention, mechanism_options(option, "--set"))
        typer.echo(f"exporting {model} for any batch and up to {models.most(ours):,} tokens")
        models.export_model(ours, out)
        typer.echo(f"wrote {out}, {out.stat().st_size / 1e6:.1f} MB")
        if not check:
            return
        longest = min(length or 512, models.most(ours))
        lengths = tuple(sorted({max(2, longest // 4 + 1), longest // 2 + 1, longest}))
        rows = list(models.check(ours, out, lengths, softmax, typer.echo))
        _show(rows)
        worst = max(row.difference for row in rows)
        if not worst <= models.ALLOWED:
            typer.echo(f"the graph differs from torch by {worst:.1e} of its outputs", err=True)
            raise typer.Exit(1)


def _show(rows: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="onnxruntime, a batch of 2 on the CPU", title_justify="left")
    for column in ("tokens", "largest difference from torch", "ms", "ms with softmax"):
        table.add_column(column, justify="right")
    for row in rows:
        other = "" if row.softmax_ms is None else f"{row.softmax_ms:.1f}"
        table.add_row(f"{row.tokens:,}", f"{row.difference:.1e}", f"{row.ms:.1f}", other)
    Console().print(table)
