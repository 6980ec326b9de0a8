"""``lln train vit`` and ``lln train lra``: images and long sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lln.cli.train import (
    Attention,
    BatchSize,
    Compile,
    Data,
    Every,
    Option,
    Out,
    Precision,
    Rate,
    Results,
    Seed,
    Steps,
    exit_if_diverged,
    given,
    mechanism_options,
    plain_errors,
    train_app,
)
from lln.study.train.runfolder import is_first_process

OnDamaged = Annotated[
    str, typer.Option(help="stop before training if data are damaged, or skip those.")
]
MonitorEvery = Annotated[int | None, typer.Option(min=0, help="Steps; 0 = never.")]


@train_app.command("vit")
def vit(
    recipe: Annotated[
        str | None, typer.Option(help="paper, deit-tiny or digits; default by --data.")
    ] = None,
    attention: Attention = "lln_diag",
    option: Option = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of JPEGs, tar or npz; default: scikit-learn's digits."),
    ] = None,
    on_damaged: OnDamaged = "stop",
    out: Out = None,
    results: Results = None,
    patch: Annotated[int | None, typer.Option(min=1, help="Its side sets the length.")] = None,
    side: Annotated[int | None, typer.Option(min=8, help="Of the images.")] = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    lr: Rate = None,
    precision: Precision = None,
    compile: Compile = None,
    eval_every: Every = None,
    save_every: Every = None,
    monitor_every: MonitorEvery = None,
    seed: Seed = None,
) -> None:
    """Train a Vision Transformer on labelled images.

    Files named like cat.0.jpg (Kaggle's Dogs vs Cats), a folder per class, a tar of either, or
    dogs_vs_cats_64.npz. Numbers ending in 0 are the test images, in 1 those for validation.
    """
    with plain_errors("lln train vit"):
        from lln.study.tasks import vit as tasks
        from lln.study.train.progress import shown

        name = recipe or ("digits" if data is None else "paper")
        changes = given(
            patch=patch,
            side=side,
            steps=steps,
            batch_size=batch_size,
            learning_rate=lr,
            precision=precision,
            compile=compile,
            eval_every=eval_every,
            save_every=save_every,
            monitor_every=monitor_every,
            seed=seed,
        )
        options = mechanism_options(option)
        config = tasks.configure(name, attention=attention, options=options, **changes)
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
        typer.Option(help="listops, text, image, pathfinder, retrieval or retrieval_wiki."),
    ],
    attention: Attention = "lln_diag",
    option: Option = None,
    data: Data = None,
    on_damaged: OnDamaged = "stop",
    train_size: Annotated[
        int | None, typer.Option(min=1, help="Examples that are generated for training.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that generate.")] = None,
    out: Out = None,
    results: Results = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    lr: Rate = None,
    precision: Precision = None,
    compile: Compile = None,
    eval_every: Every = None,
    save_every: Every = None,
    monitor_every: MonitorEvery = None,
    seed: Seed = None,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Only time updates: ms and memory.")
    ] = False,
) -> None:
    """Train the two-layer encoder on a task of the Long Range Arena.

    ListOps and Pathfinder are generated unless --data has the official files; the others are read
    from --data. Settings are the published ones: 50,000 steps; give fewer to try.
    """
    with plain_errors("lln train lra"):
        from lln.study.tasks import lra as tasks
        from lln.study.train.progress import shown

        changes = given(
            train_size=train_size,
            steps=steps,
            batch_size=batch_size,
            learning_rate=lr,
            precision=precision,
            compile=compile,
            eval_every=eval_every,
            save_every=save_every,
            monitor_every=monitor_every,
            seed=seed,
        )
        options = mechanism_options(option)
        config = tasks.configure(task, attention=attention, options=options, **changes)
        how = {"on_damaged": on_damaged, "workers": workers, "progress": _print_generated}
        arrays = tasks.load(data, **tasks.reads(config), **how)
        folder = out or Path("runs") / f"lra-{task}-{attention}-seed{config.train.seed}"
        results = results or folder / "results.jsonl"
        if throughput:
            from lln.study.tasks import experiment, lra_step

            row = lra_step.run(experiment.only_updates(config), arrays, results=results)
            typer.echo(f"{_cost(row) or 'out of memory'}; row in {results}")
            return
        bar = shown(f"{task} {attention}")
        row = tasks.run(config, arrays, folder=folder, results=results, progress=bar)
        _print_end(row, folder, results)
        exit_if_diverged(row)


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
