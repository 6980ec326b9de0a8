"""The ``lln`` command. Subcommands import what they need when they run: help stays instant."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError:
    raise SystemExit(
        "the lln command needs typer and rich: pip install 'lln-attention[cli,report]'"
    ) from None

from lln.cli.convert import convert
from lln.cli.export import export
from lln.cli.places import folder
from lln.cli.running import let_waiting_threads_sleep
from lln.cli.whole_help import WholeHelp

# The order in which a user meets them.
COMMANDS = [
    *("demo", "list", "inspect", "convert", "export", "train", "sweep"),
    *("table", "figure", "report", "bench"),
]
STUDY = "lln_study"  # the package of a clone that has the other commands


class _InOrder(WholeHelp):
    """Lists the commands in the help as COMMANDS has them."""

    def list_commands(self, ctx) -> list[str]:
        return sorted(self.commands, key=COMMANDS.index)

    def get_command(self, ctx, cmd_name: str):
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in COMMANDS:
            raise SystemExit(f"lln {cmd_name} needs a clone of the repository: make install there")
        return found


app = typer.Typer(
    cls=_InOrder,
    help="Linear Log-Normal attention: models, demonstrations and measurements.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help in 0.2 s, where drawing boxes takes three times as long
)
app.command()(convert)
app.command()(export)
if importlib.util.find_spec(STUDY) is not None:
    importlib.import_module(f"{STUDY}.cli").add_to(app)


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


@app.command("list")
def list_mechanisms(
    name: Annotated[str | None, typer.Argument(help="The mechanism that is shown in full.")] = None,
) -> None:
    """List the mechanisms of the zoo, or show one in full."""
    from rich.console import Console
    from rich.table import Table

    from lln import zoo
    from lln.cli.tables import IN_A_PIPE

    console = Console()
    if not console.is_terminal:
        console.width = IN_A_PIPE
    if name == "recommended":
        console.print(_presets(Table(box=None, pad_edge=False)))
        return
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
    line = "The name recommended chooses one by its place: lln list recommended"
    console.print(line, style="dim", highlight=False)
    others = ", ".join(name for name in zoo.KNOWN if name not in zoo.MECHANISMS)
    console.print(f"For studies only: {others}", style="dim", highlight=False)


def _presets(table):
    """What the name "recommended" stands for: a line for each place."""
    from lln.nn.presets import PRESETS

    for column in ("place", "a model that is", "mechanism", "options"):
        table.add_column(column)
    for place, (mechanism, options) in PRESETS.items():
        start = "trained with softmax" if place.startswith("convert") else "trained from scratch"
        table.add_row(place, start, mechanism, _assigned(options))
    return table


def _forms(entry) -> str:
    offered = {"bidirectional": entry.bidirectional, "causal": entry.causal, "cross": entry.cross}
    return ", ".join(form for form, there in offered.items() if there)


def _assigned(options) -> str:
    return ", ".join(f"{option}={value!r}" for option, value in options.items()) or "none"


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
        "defaults": _assigned(entry.defaults),
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
        Path | None, typer.Option(help="UTF-8 file that the model reads; default Tiny Shakespeare.")
    ] = None,
    out: Annotated[Path, folder("Folder of the report.")] = Path("runs/inspect"),
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 256,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in the averages.")] = 2,
) -> None:
    """Measure the attention heads of a model and write a report.

    The folder holds a checkpoint (safetensors only, nothing is downloaded). With a config.json
    alone the weights are random. The model runs on a text. The report shows entropy, spectral gap,
    temperature, log-normality, and the heads that are biased.
    """
    let_waiting_threads_sleep()
    from lln.inspect.model import CannotInspect
    from lln.inspect.run import run

    try:
        run(folder, text=text, out=out, tokens=tokens, sequences=sequences)
    except CannotInspect as error:
        raise SystemExit(f"lln inspect: {error}") from None


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
