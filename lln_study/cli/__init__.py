"""The commands that need a clone: experiments, measurements, tables and figures."""

from __future__ import annotations

import typer

from lln_study.cli import paper
from lln_study.cli.bench import bench_app
from lln_study.cli.classify import train_app
from lln_study.cli.train import OptionalAddress, sweep


def add_to(app: typer.Typer) -> None:
    """Add them to the ``lln`` command, which asks once whether this package is there."""
    app.add_typer(bench_app, name="bench")
    app.add_typer(train_app, name="train")
    app.command(cls=OptionalAddress)(sweep)
    for command in (paper.demo, paper.figure, paper.table, paper.report):
        app.command()(command)
