"""``lln bench``: measurements on a CPU or a GPU, and of kernels without one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lln.cli.running import let_waiting_threads_sleep
from lln.cli.whole_help import WholeHelp

bench_app = typer.Typer(cls=WholeHelp, invoke_without_command=True)


@bench_app.callback()
def bench(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("runs/bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths only.")] = False,
    min_seconds: Annotated[float, typer.Option(help="Least time per case.")] = 1.0,
    load: Annotated[
        int, typer.Option(min=0, help="Busy processes beside it, as on a machine with other work.")
    ] = 0,
) -> None:
    """Measure speed and memory on this CPU.

    LLN against softmax in one run; checks first that every implementation is right and stops if
    not. Writes rows as JSON and CSV and a plot, named subject_hardware_date.
    """
    if context.invoked_subcommand is not None:
        return
    let_waiting_threads_sleep()
    from lln_study.bench.cpu import run

    run(out, quick=quick, min_seconds=min_seconds, load=load)


@bench_app.command("gpu")
def bench_gpu(
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("runs/bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Two lengths only.")] = False,
    op: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after, compiling included; what the targets are about is first."),
    ] = None,
) -> None:
    """Measure the kernels on a CUDA device.

    Time called from Python and from CUDA graphs, and share of the memory-bandwidth floor, for LLN,
    LLN+Diag, causal LLN, near and far keys, the recommended setting and decoding, beside softmax by
    cuDNN and FlashAttention, and beside fla where it is installed; checks first
    and stops if a kernel is wrong. A training step of RoBERTa-base, too.
    """
    from lln_study.bench.gpu import run

    try:
        run(out, quick=quick, ops=op, minutes=minutes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@bench_app.command("targets")
def bench_targets(
    results: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("results"),
) -> None:
    """Show what the kernels were to reach beside what was measured.

    From the newest rows of `lln bench gpu`, as Markdown; – for what was not measured.
    """
    from lln_study.paper.pages.targets import BLOCKS

    typer.echo(BLOCKS["gpu_targets"](results))


@bench_app.command("resources")
def bench_resources(
    arch: Annotated[
        int, typer.Option(help="80, 86, 89, 90 or 100: A100, A10, L40S, H200, B200.")
    ] = 90,
    op: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    width: Annotated[list[int] | None, typer.Option(help="64, 128 or 256; repeatable.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16, float16 or float32; repeatable.")
    ] = None,
    masked: Annotated[
        bool, typer.Option("--masked", help="With key masks and lengths that no tile divides.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder that also keeps the rows.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile; default one per core.")
    ] = None,
) -> None:
    """Compile the kernels and show what they occupy; needs no GPU.

    Registers, spilled bytes and shared memory of every kernel, and how many of its programs run on
    a multiprocessor at a time. Exits with 1 if a kernel does not fit.
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
        list[str] | None, typer.Option(help="Only this one, e.g. diag_backward; repeatable.")
    ] = None,
    width: Annotated[list[int] | None, typer.Option(help="64 or 128; repeatable.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder that keeps the rows.")] = None,
) -> None:
    """Try other tiles of the kernels on a CUDA device.

    Each is compiled, checked and timed in its op beside the one in use; says which would be faster,
    changes nothing.
    """
    from lln_study.bench.kernels.tiles import run

    try:
        run(out, kernels=kernel, widths=width, minutes=minutes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@bench_app.command("profile")
def bench_profile(
    op: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("runs/bench"),
) -> None:
    """Show which kernels a call consists of on a CUDA device.

    Microseconds and launches of every kernel of a forward and backward pass, by op.
    """
    from lln_study.bench.kernels.profile import run

    try:
        run(out, ops=op)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@bench_app.command("monitor")
def bench_monitor(
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("runs/bench"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(min=3, help="Of each kind.")] = 30,
) -> None:
    """Measure what the monitor adds to training.

    Ordinary and watched steps of a small RoBERTa in turn; the share of the time that watching takes
    at the default rate.
    """
    from lln_study.bench.monitor import run

    run(out, device=device, steps=steps)


@bench_app.command("serve")
def bench_serve(
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("runs/bench"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seats: Annotated[
        list[int] | None, typer.Option(min=1, help="Streams at once; may be repeated.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=600, help="Tokens so far; may be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Steps per case.")] = 20,
) -> None:
    """Measure a step of serving against the length of the streams.

    The preset for converted decoders beside softmax with its cache, both in lln.hf.Engine; on a GPU
    a step is a CUDA graph. Checks first that tokens are those of generate.
    """
    from lln_study.bench.serving import run

    run(
        out, device=device, seats=seats or (1, 8), lengths=length or (2048, 8192, 65_536),
        steps=steps,
    )  # fmt: skip


@bench_app.command("zoo")
def bench_zoo(
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("runs/bench"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths only.")] = False,
    mechanism: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be repeated.")
    ] = None,
    min_seconds: Annotated[float, typer.Option(help="Least time per case on a CPU.")] = 0.3,
) -> None:
    """Measure every mechanism of the zoo against N.

    Forward and forward + backward time and peak memory of a layer, and the fitted exponents of
    their growth; softmax with its matrix and by SDPA. Writes rows as JSON and CSV and a plot.
    """
    from lln_study.bench.zoo import run

    run(out, device=device, quick=quick, names=mechanism, min_seconds=min_seconds)
