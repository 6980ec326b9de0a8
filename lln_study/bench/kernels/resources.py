"""``lln bench resources``: what the kernels occupy on a multiprocessor; needs no GPU.

Every kernel is compiled as its op launches it, forward and backward, at two lengths: a short one,
whose readers merge the parts of a state for themselves, and one long enough for kernels that merge.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lln.ops import triton as kernels
from lln.ops.common.kernels import tiles
from lln.ops.window.near import Near
from lln.records import machine, saved
from lln.records.rows import Row
from lln.report.progress import counting
from lln_study.bench.cases import DIAG_BLOCK, TAPS, WIDE_BLOCK
from lln_study.bench.kernels.offline import (
    ARCHITECTURES,
    CannotCompile,
    check_toolchain,
    compiling,
    planned_for,
    usage,
)

LENGTHS = (4096, 16_384)
CUT = 6  # tokens that the masked cases have less: no tile divides what is left
HEADS = 12
SEQUENCES = 4  # that are packed
SCALE = 0.125  # of the softmax branch
SINGLE_BLOCK = 32  # the largest of LLN+Diag in float32
OVERLAP, SINKS = 32, 4  # of windows
SLOTS = {64: 128, 128: 64}  # of far keys, by width: features of their own
BLOCKS = ("lln_diag", "lln_diag_learned", "lln_diag_overlap", "block_diagonal")
WIDE = ("lln_diag_learned", "lln_diag_overlap")
NEAR_FAR = ("near_far", "near_far_causal", "near_far_slots")
WIDTHS = (64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
FORWARD, BACKWARD = "fwd", "bwd"
HERE = torch.device("cpu")  # where the tensors are that nobody touches
CONFIGURATION = f"B=1 H={HEADS} E=D block={DIAG_BLOCK}, in float32 {SINGLE_BLOCK}"

# The numbers of what does not compile.
NOTHING: Row = {
    "kernel": "", "warps": None, "stages": None, "registers": None, "spilled_bytes": None,
    "shared_bytes": None, "programs": 0, "fits": False,
}  # fmt: skip

Launched = tuple[Sequence[Tensor], Sequence[Tensor]]  # outputs, and what they are differentiated by


@dataclass(frozen=True)
class ResourceCase:
    """An op whose kernels are compiled; D = E is the width of its heads.

    ``masked`` adds a key mask and lengths that no tile divides.
    """

    op: str
    D: int
    dtype: str
    masked: bool = False

    @property
    def name(self) -> str:
        return f"{self.op} D={self.D} {self.dtype}" + (" masked" if self.masked else "")

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(length - CUT * self.masked for length in LENGTHS)

    @property
    def block(self) -> int:
        if self.dtype == "float32":
            return SINGLE_BLOCK
        return WIDE_BLOCK if self.op in WIDE else DIAG_BLOCK

    @property
    def slots(self) -> int:
        """Width of the features of far keys."""
        return SLOTS.get(self.D, self.D) if self.op == "near_far_slots" else self.D

    def tokens(self, *shape: int) -> list[Tensor]:
        """q, k, v in memory that nobody touches."""
        dtype = getattr(torch, self.dtype)
        return [torch.empty(*shape, self.D, dtype=dtype, requires_grad=True) for _ in range(3)]

    def mask(self, *shape: int) -> Tensor | None:
        """A key mask, if the case has one."""
        return torch.empty(*shape, dtype=torch.bool) if self.masked else None

    def takes(self) -> bool:
        """Whether the kernels take this width and dtype; plain PyTorch is not compiled.

        Asked inside :func:`offline.planned_for`, of an architecture.
        """
        widths = self.D, self.D, getattr(torch, self.dtype)
        if self.op == "causal":
            return tiles.causal_fits(*widths, HERE)
        if self.op in BLOCKS:
            whole = self.op != "lln_diag_overlap" or self.dtype != "float32"
            return whole and tiles.block_fits(*widths, self.block, HERE)
        if self.op == "block_causal":
            return tiles.state_fits(*widths, HERE)
        if self.op == "next_token":
            return tiles.step_fits(self.D, 2 * self.D, self.D)
        near = tiles.near_fits(self.D, self.D)
        if self.op in NEAR_FAR:
            return near and tiles.state_fits(self.slots, *widths[1:], HERE)
        return near or self.op != "near"


def _scales(batch: int = 1) -> dict[str, Tensor]:
    return {"alpha": torch.empty(batch, HEADS), "beta": torch.empty(batch, HEADS)}


def _plain(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    attend = getattr(kernels, case.op)
    return [attend(q, k, v, key_mask=case.mask(1, length), **_scales())], [q, k, v]


def _lln_diag(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    options = {"block": case.block, "scale": SCALE, "key_mask": case.mask(1, length)}
    return [kernels.lln_diag(q, k, v, **options, **_scales())], [q, k, v]


def _lln_diag_learned(case: ResourceCase, length: int) -> Launched:
    """With a weight per head and a convolution, both learned, as recommended; a large block."""
    q, k, v = case.tokens(1, HEADS, length)
    mix, conv = torch.empty(HEADS, requires_grad=True), torch.empty(HEADS, TAPS, requires_grad=True)
    options = {"block": case.block, "scale": SCALE, "key_mask": case.mask(1, length), "mix": mix}
    return [kernels.lln_diag(q, k, v, conv=conv, **options, **_scales())], [q, k, v, mix, conv]


def _lln_diag_overlap(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    options = {"block": case.block, "overlap": OVERLAP, "scale": SCALE, **_scales()}
    return [kernels.lln_diag(q, k, v, key_mask=case.mask(1, length), **options)], [q, k, v]


def _block_diagonal(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    options = {"block": case.block, "scale": SCALE, "key_mask": case.mask(1, length)}
    return [kernels.block_diagonal(q, k, v, **options)], [q, k, v]


def _near(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    window = {"block": case.block, "overlap": OVERLAP, "sinks": SINKS, "scale": SCALE}
    return [kernels.near(q, k, v, key_mask=case.mask(1, length), **window)], [q, k, v]


def _near_far(case: ResourceCase, length: int) -> Launched:
    """Far keys outside of blocks; causal ones overlap and have sinks."""
    q, k, v = case.tokens(1, HEADS, length)
    q_far, k_far = q, k
    if case.slots != case.D:
        q_far, k_far, _ = replace(case, D=case.slots).tokens(1, HEADS, length)
    options: dict[str, Any] = {"block": case.block, "scale": SCALE}
    options |= {"gamma": torch.empty(1, HEADS), "key_mask": case.mask(1, length), **_scales()}
    if case.op == "near_far_causal":
        options |= {"overlap": OVERLAP, "sinks": SINKS, "is_causal": True}
    out = kernels.near_far(q, k, v, q_far=q_far, k_far=k_far, **options)
    return [out], [q, k, v] if q_far is q else [q, k, v, q_far, k_far]


def _block_causal(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    options = {"causal_block": case.block, "key_mask": case.mask(1, length), **_scales()}
    return [kernels.block_causal(q, k, v, **options)], [q, k, v]


def _state(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(1, HEADS, length)
    scales = _scales()
    state = kernels.summarize(k, v, beta=scales["beta"], key_mask=case.mask(1, length))
    return [kernels.read(q, *state, alpha=scales["alpha"])], [q, k, v]


def _varlen(case: ResourceCase, length: int) -> Launched:
    q, k, v = case.tokens(length, HEADS)
    starts = torch.arange(SEQUENCES + 1, dtype=torch.int32) * (length // SEQUENCES)
    options = {"key_mask": case.mask(length), **_scales(SEQUENCES)}
    return [kernels.varlen(q, k, v, starts, starts, **options)], [q, k, v]


def _decode(case: ResourceCase, length: int) -> Launched:
    q, k, v = (x.detach() for x in case.tokens(1, HEADS, 1))
    state = torch.empty(1, HEADS, case.D), torch.empty(1, HEADS, case.D, case.D)
    return kernels.decode(q, k, v, *state, key_mask=case.mask(1, 1), **_scales()), []


def _next_token(case: ResourceCase, length: int) -> Launched:
    """A step of serving, with windows that overlap, sinks and twice as many slots as values."""
    q, k, v = (x.detach() for x in case.tokens(1, HEADS, 1))
    local = Near(128, overlap=128, sinks=4, scale=0.125, joint=True)
    slots = 2 * case.D
    far = q.new_empty((1, HEADS, 1, slots))
    memory = {
        name: q.new_empty((1, HEADS, tokens, width))
        for name, tokens, width in (
            *(("near_k", 256, case.D), ("near_v", 256, case.D), ("near_features", 256, slots)),
            *(("sink_k", 4, case.D), ("sink_v", 4, case.D)),
        )
    }
    for prefix in ("", "pending_"):
        memory[f"{prefix}log_mass"] = torch.empty(1, HEADS, slots)
        memory[f"{prefix}mean"] = torch.empty(1, HEADS, slots, case.D)
    constants = {name: torch.empty(HEADS) for name in ("alpha", "beta", "gamma")}
    position = torch.zeros(1, dtype=torch.long)
    return [kernels.next_token(q, k, v, far, far, position, memory, local=local, **constants)], []


def _convolution(case: ResourceCase, length: int) -> Launched:
    *_, v = case.tokens(1, HEADS, length)
    weight = torch.empty(HEADS, TAPS, requires_grad=True)
    return [kernels.convolution(v, weight)], [v, weight]


def _statistics(case: ResourceCase, length: int) -> Launched:
    q, k, _ = case.tokens(1, HEADS, length)
    masks = {name: case.mask(1, length) for name in ("key_mask", "query_mask")}
    sigmas = kernels.standard_deviations(q, k, **masks)
    alike = {"floors": (0.0, 0.0, 1.0)}
    line = {"known": (1.0, 0.0), **alike}
    kernels.match(*sigmas, None, **line)
    kernels.measure(q, k, **masks, **line)
    for root in (False, True):
        curve = {"known": (1.0,) * 6, "coefficients": (1.0,) * 23, "root": root, **alike}
        kernels.match(*sigmas, None, **curve)
        kernels.measure(q, k, **masks, **curve)
    return sigmas, []


OPS: dict[str, Callable[[ResourceCase, int], Launched]] = {
    "bidirectional": _plain,
    "lln_diag": _lln_diag,
    "lln_diag_learned": _lln_diag_learned,
    "lln_diag_overlap": _lln_diag_overlap,
    "causal": _plain,
    "block_diagonal": _block_diagonal,
    "near": _near,
    **dict.fromkeys(NEAR_FAR, _near_far),
    "block_causal": _block_causal,
    "state": _state,
    "varlen": _varlen,
    "decode": _decode,
    "next_token": _next_token,
    "convolution": _convolution,
    "statistics": _statistics,
}


def resource_cases(
    arch: int = 90,
    *,
    ops: Sequence[str] | None = None,
    widths: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    masked: bool = False,
) -> list[ResourceCase]:
    """What is compiled: every op in every dtype, at the widths that its kernels take."""
    for name, given, known in (
        ("op", ops, OPS), ("width", widths, WIDTHS), ("dtype", dtypes, DTYPES),
    ):  # fmt: skip
        if unknown := [value for value in given or () if value not in known]:
            choice = ", ".join(map(str, known))
            raise ValueError(f"{name}={unknown[0]!r} is not known; pass one of {choice}")
    wanted = [
        ResourceCase(op, width, dtype, masked)
        for op in OPS
        for width in WIDTHS
        for dtype in DTYPES
        if op in (ops or OPS) and width in (widths or WIDTHS) and dtype in (dtypes or DTYPES)
    ]
    with planned_for(arch):
        found = [case for case in wanted if case.takes()]
    if not found:
        refused = ", ".join(case.name for case in wanted)
        raise ValueError(f"there are no kernels for {refused}; take another width or dtype")
    return found


def compile_case(case: ResourceCase, arch: int) -> list[Row]:
    """A row per kernel of a case; what does not compile gives a row that says why."""
    rows: list[Row] = []
    seen: list[Any] = []
    named = {"op": case.op, "D": case.D, "dtype": case.dtype, "masked": case.masked}
    named["arch"] = f"sm_{arch}"
    for length in case.lengths:
        launched, forward, error = _launch(case, length, arch)
        for index, kernel in enumerate(launched):
            if any(kernel is known for known in seen):  # Triton keeps what it has compiled
                continue
            seen.append(kernel)
            passes = FORWARD if forward is None or index < forward else BACKWARD
            rows.append({**named, "N": length, "pass": passes, **_numbers(kernel, arch)})
        if error:
            passes = FORWARD if forward is None else BACKWARD
            rows.append({**named, "N": length, "pass": passes, **NOTHING, "error": error})
    return rows


def _launch(case: ResourceCase, length: int, arch: int) -> tuple[list[Any], int | None, str]:
    """The kernels in the order of launch, how many of them are the forward pass, and an error."""
    launched: list[Any] = []
    forward = None
    try:
        with compiling(arch) as launched:
            outputs, inputs = OPS[case.op](case, length)
            forward = len(launched)
            if inputs:
                torch.autograd.grad(outputs, inputs, [torch.empty_like(x) for x in outputs])
    except CannotCompile:
        raise
    except Exception as error:  # a row that says why, not a lost run
        return launched, forward, (str(error).strip() or type(error).__name__).splitlines()[0]
    return launched, forward, ""


def _numbers(kernel: Any, arch: int) -> Row:
    used = usage(kernel)
    return {
        "kernel": kernel.metadata.name, "warps": used.warps, "stages": kernel.metadata.num_stages,
        "registers": used.registers, "spilled_bytes": used.stack, "shared_bytes": used.shared,
        "programs": used.programs(arch), "fits": used.fits(arch), "error": "",
    }  # fmt: skip


def compile_all(
    cases: Sequence[ResourceCase], arch: int, *, jobs: int, watch: Callable[[str], None]
) -> list[Row]:
    """The rows of all cases, in their order; ``watch`` is told what is finished."""
    found: dict[ResourceCase, list[Row]] = {}
    if jobs <= 1:
        for case in cases:
            found[case] = compile_case(case, arch)
            watch(case.name)
    else:
        for case, rows in _in_processes(cases, arch, min(jobs, len(cases))):
            found[case] = rows
            watch(case.name)
    return [row for case in cases for row in found[case]]


def _in_processes(
    cases: Sequence[ResourceCase], arch: int, jobs: int
) -> Iterator[tuple[ResourceCase, list[Row]]]:
    """Every case with its rows, as they are finished."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        asked = {pool.submit(compile_case, case, arch): case for case in cases}
        try:
            for done in as_completed(asked):
                yield asked[done], done.result()
        except BrokenProcessPool:
            raise CannotCompile("a process that compiled has died; take fewer --jobs") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run(
    *,
    arch: int = 90,
    ops: Sequence[str] | None = None,
    widths: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    masked: bool = False,
    folder: Path | None = None,
    jobs: int | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Compile, print, and write ``resources-smARCH_hardware_date.json`` if a folder is given.

    Ends with status 1 if a kernel does not compile or does not fit the architecture.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no edge to wrap at
    check_toolchain(arch)
    cases = resource_cases(arch, ops=ops, widths=widths, dtypes=dtypes, masked=masked)
    with counting(console) as bars:
        task = bars.add_task("compiling", total=len(cases))
        watch = lambda name: bars.update(task, description=name, advance=1)  # noqa: E731
        rows = compile_all(cases, arch, jobs=jobs or os.cpu_count() or 1, watch=watch)
    console.print(table(rows, arch))
    spilling, bad = [r for r in rows if r["spilled_bytes"]], [r for r in rows if not r["fits"]]
    console.print(f"{len(rows)} kernels: {len(spilling)} spill registers, {len(bad)} do not fit")
    if folder is not None:
        facts = {**machine.facts(), "configuration": CONFIGURATION}
        content = {"rows": [{**row, **facts} for row in rows]}
        console.print(f"wrote {saved.save_json(content, folder, subject=f'resources-sm{arch}')}")
    if bad:
        raise SystemExit(1)
    return rows


def table(rows: Sequence[Row], arch: int) -> Table:
    """What was compiled, one line per kernel; what spills or does not fit says so."""
    name = ARCHITECTURES[arch].name
    shown = Table(title=f"Kernels on sm_{arch} ({name})", title_justify="left")
    for column in ("op", "D", "dtype", "kernel", "pass"):
        shown.add_column(column, no_wrap=True)
    for column in ("warps", "stages", "registers", "spilled B", "shared KiB", "programs"):
        shown.add_column(column, justify="right")
    shown.add_column("")
    for row in rows:
        cells = [row["op"], str(row["D"]), row["dtype"]]
        if row["error"]:
            missing = ["", row["pass"], *[""] * 6]
            shown.add_row(*cells, *missing, Text(row["error"]), style="bold red")
            continue
        numbers = [str(row[key]) for key in ("warps", "stages", "registers", "spilled_bytes")]
        numbers += [f"{row['shared_bytes'] / 1024:.1f}", str(row["programs"])]
        verdict, style = ("spills", "yellow") if row["spilled_bytes"] else ("", None)
        if not row["fits"]:
            verdict, style = "does not fit", "bold red"
        shown.add_row(*cells, row["kernel"], row["pass"], *numbers, verdict, style=style)
    return shown
