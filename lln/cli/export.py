"""``lln export``: a model as an ONNX file, checked against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lln.cli.options import mechanism_options
from lln.cli.places import file, folder
from lln.cli.running import let_waiting_threads_sleep, plain_errors


def export(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL_FOLDER", help="A local Hugging Face text model.")
    ],
    out: Annotated[Path, file("File of the graph, FILE.onnx.")],
    length: Annotated[
        int | None, typer.Option(min=8, help="Most tokens of the check; default 512.")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="A name of `lln list` that takes the place of softmax.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the attention. Repeat."),
    ] = None,
    decoder: Annotated[
        bool,
        typer.Option("--decoder", help="One step of decoding: the state goes in and comes out."),
    ] = False,
    results: Annotated[Path | None, folder("Folder that gets the rows of the check.")] = None,
    check: Annotated[
        bool, typer.Option(help="Compare with torch, and time beside softmax, in onnxruntime.")
    ] = True,
) -> None:
    """Write a model as an ONNX graph for any batch and length.

    The model comes from `lln convert` or from `save_pretrained` after `lln.hf.replace`. With
    --attention it may be any model. At the end onnxruntime runs the graph at other lengths, beside
    torch and beside the softmax model. The command exits with 1 if the graph differs from torch.
    With --decoder the graph is one step of a causal model, and is compared with `generate`.
    """
    with plain_errors("lln export"):
        let_waiting_threads_sleep()
        from lln.onnx import models

        ours, softmax = models.load(model, attention, mechanism_options(option, "--set"))
        if decoder:
            if length is not None or results is not None:
                raise ValueError("--length and --results are of whole sequences; leave them out")
            return _decoder(model, ours, out, check)
        typer.echo(f"exporting {model} for any batch and up to {models.most(ours):,} tokens")
        models.export_model(ours, out)
        typer.echo(f"wrote {out}, {out.stat().st_size / 1e6:.1f} MB")
        if not check:
            return
        longest = min(length or 512, models.most(ours))
        lengths = tuple(sorted({max(2, longest // 4 + 1), longest // 2 + 1, longest}))
        rows = list(models.check(ours, out, lengths, softmax, typer.echo))
        _show(rows)
        if results is not None:
            typer.echo(f"wrote {_save(rows, results, models.configuration(ours))}")
        worst = max(row.difference for row in rows)
        if not worst <= models.ALLOWED:
            typer.echo(f"the graph differs from torch by {worst:.1e} of its outputs", err=True)
            raise typer.Exit(1)


def _decoder(folder: Path, ours: Any, out: Path, check: bool) -> None:
    """Write the graph of one step, and compare a stream with ``generate``."""
    from lln.onnx import decoders, models

    step = decoders.DecoderStep(ours.model)
    typer.echo(f"exporting a step of {folder} for any batch, {len(step.names)} tensors of state")
    decoders.export_decoder(step, out)
    typer.echo(f"wrote {out}, {out.stat().st_size / 1e6:.1f} MB")
    if not check:
        return
    found = decoders.check_decoder(step, out)
    typer.echo(
        f"{found.tokens} tokens after a prompt of {found.prompt}: largest difference from generate "
        f"{found.difference:.1e}, {'the same' if found.same else 'other'} tokens, "
        f"{found.ms:.1f} ms a step of one stream"
    )
    if not found.difference <= models.ALLOWED:
        typer.echo(f"the graph differs from torch by {found.difference:.1e}", err=True)
        raise typer.Exit(1)


def _save(rows: list[Any], folder: Path, configuration: str) -> Path:
    """Keep the rows of a check as a result."""
    import dataclasses

    from lln.records import machine, saved

    facts = {
        **machine.facts(),
        "onnxruntime": machine.version("onnxruntime"),
        "configuration": f"{configuration}; {machine.conditions()}",
    }
    lines = [{**dataclasses.asdict(row), **facts} for row in rows]
    return saved.save_json({"rows": lines}, folder, subject="onnx")


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
