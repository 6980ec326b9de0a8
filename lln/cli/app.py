"""The ``lln`` command. Subcommands import what they need when they run: help stays instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

try:
    import typer
    from typer.core import TyperGroup
except ImportError:
    raise SystemExit(
        "the lln command needs typer and rich: pip install 'lln-attention[cli,report]'"
    ) from None

from lln.cli.bench import bench_app, let_waiting_threads_sleep
from lln.cli.classify import train_app
from lln.cli.convert import convert
from lln.cli.export import export
from lln.cli.train import OptionalAddress, sweep

# The order in which a user meets them.
COMMANDS = [
    *("demo", "list", "inspect", "convert", "export", "train", "sweep"),
    *("table", "figure", "report", "verify", "bench"),
]


class _InOrder(TyperGroup):
    """Lists the commands in the help as COMMANDS has them."""

    def list_commands(self, ctx) -> list[str]:
        return sorted(self.commands, key=COMMANDS.index)


app = typer.Typer(
    cls=_InOrder,
    help="Linear Log-Normal attention: demonstrations and measurements.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help in 0.2 s, where drawing boxes takes three times as long
)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.command()(convert)
app.command()(export)
app.command(cls=OptionalAddress)(sweep)


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
    let_waiting_threads_sleep()
    from lln.study.demo.run import run

    run(out, quick=quick, results=results)


@app.command("list")
def list_mechanisms(
    name: Annotated[str | None, typer.Argument(help="Show all that is known of this one.")] = None,
) -> None:
    """The mechanisms of the zoo: paper, time and forms; with a NAME all that is known of one."""
    from rich.console import Console
    from rich.table import Table

    from lln import zoo

    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no edge to wrap at
    if name is not None:
        try:
            entry = zoo.describe(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        console.print(_record(entry, Table(show_header=False, box=None)))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("mechanism", no_wrap=True)
    for column in ("paper", "time", "forms"):
        table.add_column(column)
    for entry in map(zoo.describe, zoo.list_mechanisms()):
        table.add_row(entry.name, entry.paper, entry.time, _forms(entry))
    console.print(table)
    console.print("More of one, with its options: lln list NAME", style="dim", highlight=False)
    others = ", ".join(name for name in zoo.KNOWN if name not in zoo.MECHANISMS)
    console.print(f"For studies only: {others}", style="dim", highlight=False)


def _forms(entry) -> str:
    offered = {"bidirectional": entry.bidirectional, "causal": entry.causal, "cross": entry.cross}
    return ", ".join(form for form, there in offered.items() if there)


def _options_text(entry) -> str:
    return ", ".join(f"{option}={value!r}" for option, value in entry.defaults.items()) or "none"


def _record(entry, table):
    """Every field of a record, a line each."""
    fields = {
        "mechanism": entry.name,
        "paper": entry.paper,
        "time": entry.time,
        "memory": entry.memory,
        "forms": _forms(entry),
        "masks": entry.masks,
        "core on q, k, v": "yes" if entry.core else "no",
        "attention matrix": entry.matrix,
        "learns in addition": entry.parameters,
        "replaces the FFN": "yes" if entry.replaces_ffn else "no",
        "needs max_length": "yes" if entry.needs_length else "no",
        "defaults": _options_text(entry),
        "source": entry.source,
        "note": entry.note,
    }
    for field, value in fields.items():
        if value:
            table.add_row(field, value)
    return table


@app.command()
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL_FOLDER", help="A local Hugging Face model.")
    ],
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 file to run it on; default Tiny Shakespeare.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("runs/inspect"),
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 256,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that are averaged.")] = 2,
) -> None:
    """Measure the attention heads of a model, and a report.

    Loads a checkpoint (safetensors only, nothing is downloaded) or makes random weights where the
    folder holds only a config.json, runs it on a text, and shows entropy, spectral gap,
    temperature, log-normality, and the heads that are biased.
    """
    let_waiting_threads_sleep()
    from lln.study.inspect.model import CannotInspect
    from lln.study.inspect.run import run

    try:
        run(folder, text=text, out=out, tokens=tokens, sequences=sequences)
    except CannotInspect as error:
        raise SystemExit(f"lln inspect: {error}") from None


@app.command()
def figure(
    name: Annotated[
        str | None, typer.Argument(help="1, 2, 5a … 7, 8a, 8b, 9, 10a, 10b, arena.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that need no training.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the files.")] = Path("runs/figures"),
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: seconds.")] = False,
    results: Annotated[Path, typer.Option(help="Folder of the result rows.")] = Path("results"),
) -> None:
    """Compute a figure of the paper again: SVG, PNG and the CSV behind them.

    Figures 2, 5a, 5b, 6a, 6b and 7, a minute at most each, and a page that shows them. Figure 2
    also has the exact calibrations, the unbiased variant and mutual information. The others come
    from the rows of training runs, "arena" (not in the paper) from those of Table 5; exits with 1
    if there are none.
    """
    from lln.study.paper.figures import FIGURES, from_rows
    from lln.study.paper.figures.run import run

    names = (*FIGURES, *from_rows.FIGURES)
    if every == (name is not None) or (name is not None and name not in names):
        given = "both" if every and name else "neither" if name is None else repr(name)
        raise typer.BadParameter(f"got {given}; pass one of {', '.join(names)}, or --all")
    if name not in from_rows.FIGURES:
        run(list(FIGURES) if name is None else [name], out, quick=quick)
        return
    written = from_rows.draw(name, results, out)
    if not written:
        typer.echo(from_rows.nothing(name, results), err=True)
        raise typer.Exit(1)
    typer.echo("\n".join(map(str, written)))


@app.command()
def verify() -> None:
    """Check the paper's theorems and the limits of LLN by computation.

    Prints a verdict per statement, with the numbers behind it and what the printed text lacks.
    Exits with 1 if a statement fails.
    """
    from lln.study.paper.verify.run import run

    if not run():
        raise typer.Exit(1)


@app.command()
def table(
    number: Annotated[
        str, typer.Argument(help="Of the paper, 1 to 5; or pretraining, conversion.")
    ],
    results: Annotated[Path, typer.Option(help="Folder of the result rows.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Records instead of a table.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As in README.")] = False,
) -> None:
    """Show a table of the paper with our numbers.

    From the rows that `lln sweep`, `train` and `convert` wrote; several tables where they were
    measured at several scales. Exits with 1 if there are no rows.
    """
    from lln.study.paper.tables import table as tables

    try:
        found = tables.make(number, results)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not found:
        typer.echo(tables.nothing(number, results), err=True)
        raise typer.Exit(1)
    if as_json:
        import json

        typer.echo(json.dumps([record for each in found for record in each.records], indent=1))
    elif markdown:
        typer.echo("\n\n".join(each.markdown() for each in found))
    else:
        from lln.cli.tables import show_tables

        show_tables(found)


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("runs/report.html"),
) -> None:
    """One page: every table and figure of the paper beside ours.

    From the rows in --results, with scale, data, seeds, device and commit, and a sentence on what
    differs. What has not been measured says how to measure it.
    """
    if not results.is_dir():
        raise typer.BadParameter(f"--results {results} is not a folder; pass that of the rows")
    import lln
    from lln.records import files, machine
    from lln.study.page import render
    from lln.study.paper.pages.overview import page

    about = {"lln": f"{lln.__version__}, commit {machine.commit()}", "rows from": str(results)}
    typer.echo(files.write_text(out, render(page(results, about))))


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
