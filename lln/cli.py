"""The ``lln`` command. Subcommands import what they need when they run: help stays instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError:
    raise SystemExit(
        "the lln command needs typer and rich: pip install 'lln-attention[cli,report]'"
    ) from None

app = typer.Typer(
    help="Linear Log-Normal attention: demonstrations and measurements.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help in 0.2 s, where drawing boxes takes three times as long
)
bench_app = typer.Typer(invoke_without_command=True)
app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        import lln

        typer.echo(f"lln {lln.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: seconds.")] = False,
    results: Annotated[
        Path | None, typer.Option(help="Folder that also keeps the rows as JSON.")
    ] = None,
) -> None:
    """Two minutes of LLN beside softmax, and a report.

    Measures entropy and spectral gap against temperature, exact retrieval, and time and memory
    against length; prints tables and writes a self-contained HTML page.
    """
    from lln.demo.run import run

    run(out, quick=quick, results=results)


@bench_app.callback()
def bench(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("results"),
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths only.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Also fwd+bwd.")] = False,
    min_seconds: Annotated[float, typer.Option(help="Least time per case.")] = 1.0,
) -> None:
    """Measure speed and memory on this CPU.

    LLN against softmax in one run; checks first that every implementation is right and stops if
    not. Writes rows as JSON and CSV and a plot, named subject_hardware_date.
    """
    if context.invoked_subcommand is not None:
        return
    from lln.bench.cpu import run

    run(out, quick=quick, backward=backward, min_seconds=min_seconds)


@bench_app.command("gpu")
def bench_gpu(
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("results"),
    quick: Annotated[bool, typer.Option("--quick", help="Two lengths only.")] = False,
) -> None:
    """Measure the kernels on a CUDA device.

    Time and share of the memory-bandwidth floor for LLN, LLN+Diag, causal LLN and decoding, beside
    softmax by cuDNN and FlashAttention; checks first and stops if a kernel is wrong.
    """
    from lln.bench.gpu import run

    run(out, quick=quick)


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
