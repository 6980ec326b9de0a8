"""``lln train``: pre-training and fine-tuning, one command per task."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from lln.cli.places import file, folder
from lln.cli.running import plain_errors
from lln.cli.whole_help import WholeHelp
from lln_study.cli.settings import LIST, read_settings, show_settings
from lln_study.train.runfolder import is_first_process

train_app = typer.Typer(
    cls=WholeHelp,
    help="Train a model with any attention of the zoo.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# Options that the commands share, in the order of their help.
Attention = Annotated[
    str, typer.Option(help="recommended, softmax, softmax_eager, or a name of `lln list`.")
]
Data = Annotated[Path | None, typer.Option(help="Folder or file; default LLN_DATA.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the run (steps=500, learning_rate=1e-3, seed=1) or of the mechanism "
        "(options.near=32, options=recommended). Repeat. `--set list` shows all settings with "
        "their values.",
    ),
]
Out = Annotated[Path | None, folder("Folder of the run; default runs/NAME.")]
Results = Annotated[
    Path | None, file("File the result row is appended to; default OUT/results.jsonl.")
]


def mechanism(attention: str) -> tuple[str, dict[str, Any]]:
    """A mechanism and the options it begins with: of "recommended", the preset for encoders."""
    if attention != "recommended":
        return attention, {}
    from lln.nn import presets

    chosen = presets.choose(causal=False, options={})
    if is_first_process():
        typer.echo(chosen)
    return chosen.mechanism, chosen.options


def settings(pairs: list[str] | None, start: Any, attention: str | None = None) -> dict[str, Any]:
    """Read ``--set`` as arguments of ``configure``; ``--set list`` shows the keys and ends.

    Args:
        start: The configuration that is changed.
        attention: The mechanism, if one can be chosen.
    """
    options: Mapping[str, Any] = {}
    if attention is not None:
        from lln import zoo

        name = "softmax" if attention.startswith("softmax") else attention
        known = name in zoo.KNOWN  # `configure` names the nearest if it is not
        options = zoo.describe(name).defaults if known else {}
    if pairs and LIST in pairs:
        show_settings(start, options)
        raise typer.Exit
    return read_settings(pairs, start, options=list(options))


def exit_if_diverged(row: Mapping[str, Any]) -> None:
    """Say of how many updates nothing came; with status 1 if there is no result to speak of."""
    if row.get("skipped") and is_first_process():
        typer.echo(
            f"{row['skipped']:,} of {row['steps']:,} updates were left out: their gradients were "
            "not finite",
            err=True,
        )
    if row.get("diverged"):
        raise ValueError(
            "the run diverged, and its row says so; choose a smaller learning rate (--set "
            + ("rates=…)" if "rates" in row["configuration"] else "learning_rate=…)")
            + ("" if row["configuration"]["precision"] == "fp32" else " or --set precision=fp32")
            + ", and another --out"
        )


@contextlib.contextmanager
def running(command: str) -> Iterator[None]:
    """The same as for every command, and leave the other processes of a run under torchrun."""
    with plain_errors(command):
        try:
            yield
        finally:
            from lln_study.train import processes

            processes.leave()


@train_app.callback()
def _train() -> None:
    """Train a model with any attention of the zoo.

    The same command again continues an interrupted run. Under torchrun it runs on several
    processes.
    """


@train_app.command("mlm")
def mlm(
    recipe: Annotated[
        str, typer.Option(help="roberta-base, roberta-small, roberta-tiny or figure-1.")
    ] = "roberta-tiny",
    attention: Attention = "recommended",
    data: Data = None,
    settings_given: Set = None,
    out: Out = None,
    results: Results = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json instead of training one.")
    ] = None,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Only time updates, on random ids.")
    ] = False,
) -> None:
    """Pre-train RoBERTa by masked language modelling.

    The text is .txt or .jsonl files, both also as .xz, or the official WikiText files. By default
    the model reads the bundled Tiny Shakespeare. The command writes curves, checkpoints (model
    folders for lln.hf.load) and a result row. To train on whole articles, add --set length=4096
    --set batches=padded.
    """
    with running("lln train mlm"):
        from lln.report.progress import shown
        from lln_study.tasks import experiment
        from lln_study.tasks import mlm as task

        attention, preset = mechanism(attention)
        changes = settings(settings_given, task.configure(recipe), attention)
        changes["options"] = {**preset, **changes["options"]}
        config = task.configure(recipe, attention=attention, **changes)
        name = f"mlm-{recipe}-{attention}-seed{config.train.seed}"
        folder = out or Path("runs") / name
        results = results or folder / "results.jsonl"
        if throughput:
            from lln_study.tasks import step

            row = step.run(experiment.only_updates(config), results=results)
            typer.echo(json.dumps({key: row[key] for key in row if key != "configuration"}))
            return
        encoded = task.load(data, **task.reads(config), tokenizer=tokenizer)
        bar = shown(f"{recipe} {attention}")
        row = task.run(config, encoded, folder=folder, results=results, progress=bar)
        if is_first_process():
            _print_end(row, folder, results)
        exit_if_diverged(row)


def _print_end(row: dict[str, Any], folder: Path, results: Path) -> None:
    speed = row["tokens_per_second"]
    said = [
        f"loss {row['loss']:.4f}" if row["loss"] is not None else "diverged",
        f"accuracy {row['accuracy']:.4f}" if row["accuracy"] is not None else "",
        f"{row['tokens']:,} tokens",
        f"{speed:,.0f} tokens/s" if speed else "",
        f"{row['parameters']:,} parameters (softmax {row['parameters_softmax']:,})",
    ]
    typer.echo(", ".join(filter(None, said)))
    typer.echo(f"run {folder}, row in {results}")


@train_app.command("glue")
def glue(
    task: Annotated[str, typer.Option(help="sst2, mnli, qnli, qqp, rte, mrpc, cola or stsb.")],
    source: Annotated[
        Path, typer.Option("--from", metavar="RUN", help="A run of `lln train mlm`, or a model.")
    ],
    data: Data = None,
    settings_given: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the run: epochs=3, seed=1, rates=5e-5,1e-4 (the "
            "best on held-out data wins). Repeat. `--set list` shows all of them.",
        ),
    ] = None,
    out: Out = None,
    results: Results = None,
) -> None:
    """Fine-tune a pre-trained model on a task of GLUE.

    The data are the official TSV files (SST-2/train.tsv ...) or sst2_train.jsonl.xz and the like. A
    part of train chooses learning rate and epoch. dev is the test and is looked at once.
    """
    with running("lln train glue"):
        from lln.report.progress import shown
        from lln_study.tasks import glue as tasks

        changes = settings(settings_given, tasks.configure(task))
        config = tasks.configure(task, **changes)
        folder = out or Path("runs") / f"glue-{task}-{source.name}-seed{config.seed}"
        results = results or folder / "results.jsonl"
        examples = tasks.load(data, body=source, **tasks.reads(config))
        bar = shown(f"{task} {source.name}")
        row = tasks.run(config, examples, folder=folder, results=results, progress=bar)
        if is_first_process():
            names = ("accuracy", "f1", "matthews", "pearson", "spearman")
            numbers = ", ".join(f"{name} {row[name]:.4f}" for name in names if name in row)
            typer.echo(f"dev: {numbers} (learning rate {row['learning_rate']:g})")
            if row.get("diverged_rates"):
                rates = ", ".join(f"{rate:g}" for rate in row["diverged_rates"])
                typer.echo(f"diverged with learning rate {rates}", err=True)
            typer.echo(f"run {folder}, row in {results}")
        exit_if_diverged(row)


@contextlib.contextmanager
def _ended_as_a_whole() -> Iterator[None]:
    """End the runs of this process with it, if it is told to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class OptionalAddress(typer.core.TyperCommand):
    """A command whose ``--ray`` may stand alone, for "auto"."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        for word, following in zip(args, [*args[1:], "-"], strict=True):
            words.append(word)
            if word == "--ray" and (following.startswith("-") or following.endswith(".json")):
                words.append("auto")
        return super().parse_args(ctx, words)


def sweep(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="JSON files, as in sweeps/.")
    ],
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes at once; with --ray, on each GPU.")
    ] = 1,
    out: Annotated[Path, folder("Folder of the result rows.")] = Path("results"),
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes. The same command goes on.")
    ] = None,
    data: Data = None,
    scratch: Annotated[
        Path, folder("Folder of checkpoints. A checkpoint goes when its rows are done.")
    ] = Path("runs/sweep"),
    tell: Annotated[
        bool, typer.Option("--list", help="Say what is done and what is to run. Run nothing.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]", help="Run on a Ray cluster; without ADDRESS on the one Ray finds."
        ),
    ] = None,
) -> None:
    """Train what a file lists, and skip what is done.

    A run is done when --out has its row. Fine-tunings follow their pre-training at once. Rows and
    curves are appended to files in --out. The same command again goes on where it stopped. The
    command exits with 1 if runs failed.
    """
    with running("lln sweep"):
        from lln_study.sweep.plan import plan, read
        from lln_study.sweep.run import Sweep

        contents = [(file, read(file)) for file in files]  # a bad one is found before the data
        planned = []
        for file, content in contents:
            places = {"data": data, "out": out, "scratch": scratch}
            own = plan(content, **places, need_data=not tell)
            typer.echo(f"{len(own)} runs in {file}")
            planned += own
        if tell:
            Sweep(planned, say=typer.echo).tell()
            return
        options = {"slots": jobs, "minutes": minutes, "say": typer.echo}
        if ray is None:
            runner = Sweep(planned, **options)
        else:
            from lln_study.sweep.cluster import ClusterSweep

            runner = ClusterSweep(planned, address=ray, **options)
        with _ended_as_a_whole():
            outcome = runner.run()
        counts = {name: len(labels) for name, labels in vars(outcome).items()}
        typer.echo(", ".join(f"{count} {name}" for name, count in counts.items()))
        if outcome.failed:
            raise typer.Exit(1)
