"""``lln demo``, ``figure``, ``table`` and ``report``: what was measured, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lln.cli.places import file, folder
from lln.cli.running import let_waiting_threads_sleep


def demo(
    out: Annotated[Path, folder("Folder of the report.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, in seconds.")] = False,
    results: Annotated[Path | None, folder("Folder that also keeps the rows as JSON.")] = None,
) -> None:
    """Compare LLN with softmax in two minutes, and write a report.

    The command measures entropy and spectral gap against temperature, exact retrieval, and time and
    memory against length. It prints tables and writes one HTML page.
    """
    let_waiting_threads_sleep()
    from lln_study.demo.run import run

    run(out, quick=quick, results=results)


def figure(
    name: Annotated[
        str | None, typer.Argument(help="1, 2, 5a … 7, 8a, 8b, 9, 10a, 10b, arena.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All figures that need no training.")
    ] = False,
    out: Annotated[Path, folder("Folder of the files.")] = Path("runs/figures"),
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, in seconds.")] = False,
    results: Annotated[Path, folder("Folder of the result rows.")] = Path("results"),
) -> None:
    """Compute a figure of the paper again.

    The command writes SVG, PNG and CSV.

    Figures 2, 5a, 5b, 6a, 6b and 7 are computed, in a minute at most each. Figure 2 also has the
    exact calibrations, the unbiased variant and mutual information. The other figures come from the
    rows of training runs. "arena" is not in the paper and comes from the rows of Table 5. The
    command exits with 1 if there are no rows.
    """
    from lln_study.paper.figures import FIGURES, from_rows
    from lln_study.paper.figures.run import run

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


MOST_LINES = 8  # of a table that has its best rows first


def table(
    number: Annotated[
        str, typer.Argument(help="1 to 5 of the paper; or pretraining, conversion, sets.")
    ],
    results: Annotated[Path, folder("Folder of the result rows.")] = Path("results"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print records instead of a table.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="All rows of conversion, not only the best.")
    ] = False,
) -> None:
    """Show a table of the paper with our numbers.

    The rows come from `lln sweep`, `train` and `convert`. Rows of several scales make several
    tables. The command exits with 1 if there are no rows.
    """
    from lln_study.paper.tables import table as tables

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

        best_first = number == "conversion" and not every
        show_tables(found, most=MOST_LINES if best_first else None)


def report(
    results: Annotated[Path, folder("Folder of the result files.")] = Path("results"),
    out: Annotated[Path, file("File of the page.")] = Path("runs/report.html"),
) -> None:
    """Write a page with every table and figure beside ours.

    Our numbers come from the rows in --results, with scale, data, seeds, device and commit. A
    sentence says what differs from the paper. What has not been measured says how to measure it.
    """
    if not results.is_dir():
        raise typer.BadParameter(f"--results {results} is not a folder; pass that of the rows")
    import lln
    from lln.records import files, machine
    from lln.report.page import render
    from lln_study.paper.report import page

    about = {"lln": f"{lln.__version__}, commit {machine.commit()}", "rows from": str(results)}
    typer.echo(files.write_text(out, render(page(results, about))))
