"""``lln bench``: measurements on a CPU or a GPU, and of kernels without one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lln.cli.places import folder
from lln.cli.running import let_waiting_threads_sleep
from lln.cli.whole_help import WholeHelp

bench_app = typer.Typer(cls=WholeHelp, invoke_without_command=True)


@bench_app.callback()
def bench(
    context: typer.Context,
    out: Annotated[Path, folder("Folder of the result files.")] = Path("runs/bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths only.")] = False,
    min_seconds: Annotated[float, typer.Option(help="Least time per case.")] = 1.0,
) -> None:
    """Measure speed and memory on this CPU.

    LLN and softmax are timed in one run. Every implementation is checked first; a wrong result
    stops the run. The command writes rows as JSON and CSV and a plot, named subject_hardware_date.
    """
    if context.invoked_subcommand is not None:
        return
    let_waiting_threads_sleep()
    from lln_study.bench.cpu import run

    run(out, quick=quick, min_seconds=min_seconds)


@bench_app.command("gpu")
def bench_gpu(
    out: Annotated[Path, folder("Folder of the result files.")] = Path("runs/bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Two lengths only.")] = False,
    op: Annotated[list[str] | None, typer.Option(help="Only this one. Repeat.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after so many minutes. The cases of the targets come first."),
    ] = None,
) -> None:
    """Measure the kernels on a CUDA device.

    Every kernel is checked first; a wrong result stops the run. Each is timed from Python and from
    CUDA graphs, beside the softmax of cuDNN and FlashAttention, and beside fla where it is
    installed. The rows also say how near a kernel comes to the memory bandwidth. Decoding and a
    training step of RoBERTa-base are timed, too.
    """
    from lln_study.bench.gpu import run

    try:
        run(out, quick=quick, ops=op, minutes=minutes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@bench_app.command("targets")
def bench_targets(
    results: Annotated[Path, folder("Folder of the result files.")] = Path("results"),
) -> None:
    """Show the goals of the kernels beside the measurements.

    The measurements are the newest rows of `lln bench gpu`. A dash stands for no measurement.
    """
    from lln_study.paper.pages import targets

    typer.echo(targets.newest(results))


@bench_app.command("resources")
def bench_resources(
    arch: Annotated[
        int, typer.Option(help="80, 86, 89, 90 or 100: A100, A10, L40S, H200, B200.")
    ] = 90,
    op: Annotated[list[str] | None, typer.Option(help="Only this one. Repeat.")] = None,
    width: Annotated[list[int] | None, typer.Option(help="64, 128 or 256. Repeat.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16, float16 or float32. Repeat.")
    ] = None,
    masked: Annotated[
        bool,
        typer.Option("--masked", help="Compile for key masks and lengths that no tile divides."),
    ] = False,
    out: Annotated[Path | None, folder("Folder that also keeps the rows.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile; default one per core.")
    ] = None,
) -> None:
    """Compile the kernels without a GPU and show what they occupy.

    The table has registers, spilled bytes and shared memory of every kernel, and how many programs
    run on a multiprocessor at a time. The command exits with 1 if a kernel does not fit.
    """
    from lln_study.bench.kernels.offline import CannotCompile
    from lln_study.bench.kernels.resources import run

    chosen = {"ops": op, "widths": width, "dtypes": dtype, "masked": masked}
    try:
        run(arch=arch, folder=out, jobs=jobs, **chosen)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except CannotCompile as error:
        raise SystemExit(f"lln bench resources: {error}") from None


@bench_app.command("tiles")
def bench_tiles(
    kernel: Annotated[
        list[str] | None, typer.Option(help="Only this one, e.g. diag_backward. Repeat.")
    ] = None,
    width: Annotated[list[int] | None, typer.Option(help="64 or 128. Repeat.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so many minutes.")] = None,
    out: Annotated[Path | None, folder("Folder that keeps the rows.")] = None,
) -> None:
    """Try other tiles of the kernels on a CUDA device.

    Each tile is compiled, checked and timed beside the tile in use. The command says which would be
    faster and changes nothing.
    """
    from lln_study.bench.kernels.tiles import run

    try:
        run(out, kernels=kernel, widths=width, minutes=minutes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@bench_app.command("commits")
def bench_commits(
    tree: Annotated[Path, typer.Argument(help="A clone of another commit.", exists=True)],
    op: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    minutes: Annotated[float, typer.Option(help="Stop after, compiling not included.")] = 60.0,
    out: Annotated[Path, folder("Folder of the result files.")] = Path("runs/bench"),
) -> None:
    """Compare the kernels with those of another commit on a CUDA device.

    Both commits prepare a call as a CUDA graph and replay it in turns. Shows how many times as long
    this commit takes.
    """
    from lln_study.bench import commits

    try:
        commits.run(tree, out, cases=commits.graphs(op), minutes=minutes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@bench_app.command("host")
def bench_host(
    out: Annotated[Path, folder("Folder of the result files.")] = Path("runs/bench"),
) -> None:
    """Measure short calls from Python on a CUDA device.

    Few tokens, so that the host sets the time; with autograd in a thread of its own and without.
    """
    from lln_study.bench.host import run

    run(out)


@bench_app.command("serve")
def bench_serve(
    out: Annotated[Path, folder("Folder of the result files.")] = Path("runs/bench"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seats: Annotated[list[int] | None, typer.Option(min=1, help="Streams at once. Repeat.")] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=600, help="Tokens so far. Repeat.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Steps per case.")] = 20,
    keep: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Key heads that keep softmax in our model; may be repeated."),
    ] = None,
) -> None:
    """Measure a step of serving against the length of the streams.

    The preset for converted decoders and softmax with its cache run in lln.hf.Engine. On a GPU a
    step is a CUDA graph. The tokens are first compared with those of `generate`.
    """
    from lln_study.bench.serving import run

    run(
        out, device=device, seats=seats or (1, 8), lengths=length or (2048, 8192, 65_536),
        steps=steps, keep=keep or (0,),
    )  # fmt: skip


@bench_app.command("zoo")
def bench_zoo(
    out: Annotated[Path, folder("Folder of the result files.")] = Path("runs/bench"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths only.")] = False,
    mechanism: Annotated[list[str] | None, typer.Option(help="Only this one. Repeat.")] = None,
    min_seconds: Annotated[float, typer.Option(help="Least time per case on a CPU.")] = 0.3,
) -> None:
    """Measure every mechanism of the zoo against N.

    Time and peak memory of a layer, forward and forward + backward, and the fitted exponents of
    their growth. Softmax runs with its matrix and by SDPA. The command writes rows as JSON and CSV
    and a plot.
    """
    from lln_study.bench.zoo import run

    run(out, device=device, quick=quick, names=mechanism, min_seconds=min_seconds)
