"""``lln bench tiles``: which tile of a kernel is fastest on the CUDA device at hand.

The table of :mod:`lln.ops.common.kernels.tiles` was measured on an H200. This compiles other tiles
of a kernel, checks each against the definition, times the op that uses it, and says which entry of
the table would be faster. Nothing is changed: what is better is for a person to write down.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lln.ops.common.kernels import tiles
from lln.ops.common.kernels.tiles import Tile
from lln.records import machine, saved
from lln.records.rows import Row
from lln_study.bench.apart.clock import time_launch
from lln_study.bench.apart.groups import in_processes
from lln_study.bench.cases import FORWARD, TRAINING, Case, call, inputs
from lln_study.bench.check import check
from lln_study.bench.shapes import SERIES, TOKENS
from lln_study.bench.terminal import wide_console

# The op and the passes in which each kernel takes part.
USED_BY = {
    "summarize": ("bidirectional", FORWARD),
    "read": ("bidirectional", FORWARD),
    "read_backward": ("bidirectional", TRAINING),
    "summarize_backward": ("bidirectional", TRAINING),
    "diag": ("lln_diag", FORWARD),
    "diag_backward": ("lln_diag", TRAINING),
    "wide": ("lln_diag_128", FORWARD),
    "wide_loop": ("lln_diag_256", FORWARD),
    "wide_dq": ("lln_diag_128", TRAINING),
    "wide_dkdv": ("lln_diag_128", TRAINING),
    "causal": ("causal", FORWARD),
    "causal_dq": ("causal", TRAINING),
    "causal_dkdv": ("causal", TRAINING),
    "statistics": ("measured", FORWARD),
    "convolution": ("convolution", TRAINING),
    "near": ("lln_diag_overlap", FORWARD),
    "near_dq": ("lln_diag_overlap", TRAINING),
    "near_dkdv": ("lln_diag_overlap", TRAINING),
    "joint": ("near_far", FORWARD),
    "joint_dq": ("near_far", TRAINING),
    "joint_dkdv": ("near_far", TRAINING),
    "joint_segments": ("near_far", FORWARD),
}
FIXED_ROWS = ("diag", "diag_backward", "causal", "causal_dq", "causal_dkdv")  # by their blocks
WIDE = ("wide", "wide_loop", "wide_dq", "wide_dkdv")
WIDE_SHAPES = ((64, 4, 32), (64, 4, 64), (64, 4, 128), (128, 8, 32), (128, 8, 64), (128, 8, 128))
ANY_VALUES = ("summarize", "read", "read_backward", "summarize_backward")
NEAR = ("near", "near_dq", "near_dkdv")
JOINT = ("joint", "joint_dq", "joint_dkdv", "joint_segments")
NO_CONVERSION = ("statistics", "convolution", *NEAR)
WIDTHS = (64, 128)
LENGTH, HEADS = 4096, 12
CONFIGURATION = f"B={TOKENS // LENGTH} H={HEADS} N={LENGTH} E=D, a tenth of a graph of ten calls"
COMPILE_SECONDS = 150


@dataclass(frozen=True)
class Trial:
    """A kernel at a width with another tile."""

    kernel: str
    width: int
    tile: Tile
    dtype: str = "bfloat16"

    @property
    def case(self) -> Case:
        op, passes = USED_BY[self.kernel]
        shape = {"N": LENGTH, "B": TOKENS // LENGTH, "H": HEADS, "D": self.width}
        impl = "mixed" if self.kernel in NEAR else "triton"
        return Case(op, impl, passes=passes, dtype=self.dtype, device="cuda", **shape)


def current(kernel: str, width: int) -> Tile:
    """The entry of the table that serves this width."""
    return tiles.tile(kernel, width, width, torch.bfloat16, _device())


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def trials(kernel: str, width: int) -> list[Trial]:
    """The tile in use first, then all others that are worth a try.

    First the same tile cut for fewer programs on a multiprocessor, and for one more. Then other
    rows, warps, stages, values and ways of conversion, with as many warps as now. Of wide heads
    also two programs at a time, with half of the registers each; of causal attention also sums
    instead of means; of large blocks also the other side of a tile, and whether it loads ahead.
    """
    if kernel not in USED_BY:
        raise ValueError(f"kernel={kernel!r} is unknown; choose from {', '.join(USED_BY)}")
    now = current(kernel, width)
    rows = (now.rows,) if kernel in FIXED_ROWS else sorted({64, now.rows})
    if kernel in (*NEAR, *JOINT):
        rows = (32, 64, 128) if kernel in JOINT and kernel != "joint_dkdv" else (32, 64)
    through = (now.through,) if kernel in NO_CONVERSION else (True, False)
    values = (None, 64) if kernel in ANY_VALUES and width > 64 else (None,)
    others = [
        Tile(r, w, s, max(1, round(now.programs * now.warps / w)), t, values=e)
        for e in values
        for r in rows
        for w in (4, 8)
        for s in (1, 2, 3, 4)
        for t in through
    ]
    if kernel in WIDE:
        others = [
            Tile(r, w, s, max(1, round(now.programs * now.warps / w)), t, columns=c, ahead=a)
            for r, w, c in WIDE_SHAPES
            for s in (1, 2, 3)
            for t in through
            for a in ((False,) if kernel == "wide_dq" else (False, True))
        ]
        others += [  # more programs with fewer registers each
            Tile(64, 4, s, p, t, registers=r, columns=c)
            for p, r in ((3, 168), (4, 128))
            for c in (32, 64)
            for s in (1, 2, 3)
            for t in through
        ]
    if kernel.startswith("causal"):
        others += [tile._replace(sums=not now.sums) for tile in [now, *others]]
    if kernel in ANY_VALUES and width > 64:
        others += [
            Tile(r, 8, s, 2, t, registers=128) for r in (32, 64) for s in (1, 2, 3) for t in through
        ]
    shared_out = [now._replace(programs=n) for n in range(1, now.programs + 2)]
    return [Trial(kernel, width, tile) for tile in dict.fromkeys([now, *shared_out, *others])]


@contextlib.contextmanager
def using(trial: Trial) -> Iterator[None]:
    """Have the ops take the tile of a trial inside the block."""
    table = tiles.HALF_BY_MEMORY[tiles.shared(_device())][trial.kernel]
    entry = min(width for width in table if width >= trial.width)
    before = table[entry]
    table[entry] = trial.tile
    tiles.forget()
    try:
        yield
    finally:
        table[entry] = before
        tiles.forget()


def _run_once(trial: Trial) -> None:
    """Compile a trial by using it; what cannot run is left to :func:`measure`."""
    with contextlib.suppress(Exception), using(trial):
        check([trial.case])
        call(trial.case, inputs(trial.case))()


def measure(trial: Trial) -> float:
    """Milliseconds of the op with the tile of a trial, after a check.

    Raises:
        Exception: It does not compile, does not fit, or computes something else.
    """
    with using(trial):
        check([trial.case])
        return time_launch(call(trial.case, inputs(trial.case)), SERIES)[1]


def rows(
    wanted: Sequence[Trial],
    timer: Callable[[Trial], float],
    *,
    end: float = math.inf,
    watch: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """A row per trial, the tile in use first; one that cannot run says why."""
    base: dict[tuple[str, int], float] = {}
    for trial in wanted:
        if time.monotonic() > end:
            watch("the time is over")
            return
        key = trial.kernel, trial.width
        row: Row = {"kernel": trial.kernel, "width": trial.width, "dtype": trial.dtype}
        row |= {**trial.tile._asdict(), "in_use": trial.tile == current(*key)}
        row |= {"op": trial.case.op, "pass": trial.case.passes, "ms": None, "gain": None}
        try:
            row["ms"] = round(timer(trial), 5)
            base.setdefault(key, row["ms"])
            row |= {"gain": round(base[key] / row["ms"], 4), "error": ""}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        watch(f"{trial.kernel} {trial.width} {tuple(trial.tile)}: {row['ms'] or row['error']}")
        yield row


def table(found: Sequence[Row], best: int = 5) -> Table:
    """The fastest tiles of every kernel, and the one in use."""
    shown = Table(title="Tiles", title_justify="left")
    names = (*("kernel", "width"), *Tile._fields, *("op", "pass"))
    for name in (*names, "ms", "gain", ""):
        shown.add_column(name)
    for key in dict.fromkeys((row["kernel"], row["width"]) for row in found):
        own = [row for row in found if (row["kernel"], row["width"]) == key and row["ms"]]
        own.sort(key=lambda row: row["ms"])
        for place, row in enumerate(own):
            if place < best or row["in_use"]:
                cells = [str(row[name]) for name in names]
                note = "in use" if row["in_use"] else ""
                shown.add_row(*cells, f"{row['ms']:.4f}", f"{row['gain']:.3f}", note)
    return shown


def run(
    folder: Path | None,
    *,
    kernels: Sequence[str] | None = None,
    widths: Sequence[int] | None = None,
    minutes: float | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Try the tiles of some kernels; rows go to ``tiles_hardware_date.json`` if there is a folder.

    Raises:
        ValueError: An unknown kernel.
    """
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    wanted = [
        trial
        for kernel in kernels or USED_BY
        for width in widths or WIDTHS
        for trial in trials(kernel, width)
    ]
    console = console or wide_console()
    if not torch.cuda.is_available():
        console.print("no CUDA device: `lln bench resources` says what tiles occupy without one")
        raise SystemExit(1)
    gc.freeze()
    console.print(f"compiling {len(wanted)} tiles")
    in_processes(_run_once, wanted, seconds=COMPILE_SECONDS)
    facts: dict[str, Any] = {**machine.facts("cuda"), "configuration": CONFIGURATION}
    found: list[Row] = []
    for row in rows(wanted, measure, end=end, watch=lambda text: console.print(text)):
        found.append({**row, **facts})
        if folder is not None and len(found) % 20 == 0:
            saved.save_json({"rows": found}, folder, subject="tiles", device="cuda")
    console.print(table(found))
    if folder is not None:
        path = saved.save_json({"rows": found}, folder, subject="tiles", device="cuda")
        console.print(f"wrote {path}")
    return found
