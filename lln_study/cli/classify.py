"""``lln train vit``, ``lra`` and ``table``: images, long sequences, sets of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lln_study.cli.train import (
    Attention,
    Data,
    Out,
    Results,
    Set,
    exit_if_diverged,
    mechanism,
    running,
    settings,
    train_app,
)
from lln_study.train.runfolder import is_first_process

OnDamaged = Annotated[
    str, typer.Option(help="stop before training if data are damaged, or skip what is damaged.")
]


@train_app.command("vit")
def vit(
    recipe: Annotated[
        str | None, typer.Option(help="paper, deit-tiny or digits; default by --data.")
    ] = None,
    attention: Attention = "lln_diag",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of JPEGs, tar or npz; default: scikit-learn's digits."),
    ] = None,
    settings_given: Set = None,
    out: Out = None,
    results: Results = None,
    on_damaged: OnDamaged = "stop",
) -> None:
    """Train a Vision Transformer on labelled images.

    The data are files named like cat.0.jpg (Kaggle's Dogs vs Cats), a folder per class, a tar of
    either, or dogs_vs_cats_64.npz. Images whose number ends in 0 are the test, in 1 the validation.
    """
    with running("lln train vit"):
        from lln.report.progress import shown
        from lln_study.tasks import vit as tasks

        name = recipe or ("digits" if data is None else "paper")
        attention, preset = mechanism(attention)
        changes = settings(settings_given, tasks.configure(name), attention)
        changes["options"] = {**preset, **changes["options"]}
        config = tasks.configure(name, attention=attention, **changes)
        pictures = tasks.load(data, **tasks.reads(config), on_damaged=on_damaged)
        folder = out or Path("runs") / f"vit-{name}-{attention}-seed{config.train.seed}"
        results = results or folder / "results.jsonl"
        bar = shown(f"{name} {attention}")
        row = tasks.run(config, pictures, folder=folder, results=results, progress=bar)
        _print_end(row, folder, results)
        exit_if_diverged(row)


@train_app.command("lra")
def lra(
    task: Annotated[
        str,
        typer.Option(
            help="listops, text, image, pathfinder, retrieval, retrieval_wiki or retrieval_short."
        ),
    ],
    attention: Attention = "recommended",
    data: Data = None,
    settings_given: Set = None,
    out: Out = None,
    results: Results = None,
    on_damaged: OnDamaged = "stop",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that generate.")] = None,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Only time updates: ms and memory.")
    ] = False,
) -> None:
    """Train the two-layer encoder on a task of the Long Range Arena.

    ListOps and Pathfinder are generated unless --data has the official files. The other tasks are
    read from --data. The published settings have 50,000 steps; give fewer to try.
    """
    with running("lln train lra"):
        from lln.report.progress import shown
        from lln_study.tasks import lra as tasks

        attention, preset = mechanism(attention)
        changes = settings(settings_given, tasks.configure(task, attention=attention), attention)
        changes["options"] = {**preset, **changes["options"]}
        config = tasks.configure(task, attention=attention, **changes)
        how = {"on_damaged": on_damaged, "workers": workers, "progress": _print_generated}
        arrays = tasks.load(data, **tasks.reads(config), **how)
        folder = out or Path("runs") / f"lra-{task}-{attention}-seed{config.train.seed}"
        results = results or folder / "results.jsonl"
        if throughput:
            from lln_study.tasks import experiment, lra_step

            row = lra_step.run(experiment.only_updates(config), arrays, results=results)
            typer.echo(f"{_cost(row) or 'out of memory'}; row in {results}")
            return
        bar = shown(f"{task} {attention}")
        row = tasks.run(config, arrays, folder=folder, results=results, progress=bar)
        _print_end(row, folder, results)
        exit_if_diverged(row)


@train_app.command("table")
def table(
    attention: Attention = "lln",
    settings_given: Set = None,
    out: Out = None,
    results: Results = None,
    fitted: Annotated[
        bool, typer.Option("--fitted", help="Only fit scikit-learn's classifiers to real tables.")
    ] = False,
) -> None:
    """Train a model to classify rows of tables from the rows beside them.

    The tables are generated. The attention must read another sequence and need no places. At the
    end the model classifies the tables of scikit-learn. --fitted gives what to compare with.
    """
    with running("lln train table"):
        from lln.report.progress import shown
        from lln_study.tasks import experiment, real_tables
        from lln_study.tasks import table as tasks

        if fitted:
            results = results or Path("results") / "table.jsonl"
            for name in real_tables.classifiers():
                row = real_tables.fitted_row(name)
                experiment.record(results, row, once=True)
                typer.echo(f"{name}: {_accuracies(row['real'])}")
            return
        changes = settings(settings_given, tasks.configure(attention=attention), attention)
        config = tasks.configure(attention=attention, **changes)
        folder = out or Path("runs") / f"table-{attention}-seed{config.train.seed}"
        results = results or folder / "results.jsonl"
        row = tasks.run(config, folder=folder, results=results, progress=shown(attention))
        _print_end(row, folder, results)
        if row["real"] and is_first_process():
            typer.echo(f"real tables: {_accuracies(row['real'])}")
        exit_if_diverged(row)


def _accuracies(real: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in real.items())


def _print_generated(done: int, total: int) -> None:
    typer.echo(f"\rgenerated {done} of {total} shards", nl=done == total)


def _cost(row: dict[str, Any]) -> str:
    time = "" if row["step_ms"] is None else f"{row['step_ms']:.1f} ms a step"
    memory = "" if row.get("peak_mb") is None else f"{row['peak_mb']:,.0f} MB"
    return ", ".join(filter(None, (time, memory)))


def _print_end(row: dict[str, Any], folder: Path, results: Path) -> None:
    if not is_first_process():
        return
    valid = row["valid_accuracy"]
    said = [
        f"test accuracy {row['accuracy']:.4f}",
        "" if valid is None else f"validation {valid:.4f} (step {row['best_step']})",
        _cost(row),
        f"{row['parameters']:,} parameters",
    ]
    typer.echo(", ".join(filter(None, said)))
    typer.echo(f"run {folder}, row in {results}")
