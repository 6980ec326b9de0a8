"""Compiling Triton kernels for a CUDA device that is not here, and what the binaries occupy.

Inside :func:`compiling` every launch of a kernel compiles it and runs nothing. The tensors stay on
the CPU, CUDA is never initialised; ptxas and cuobjdump come with Triton.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from lln.ops.common.kernels import tiles

KIB = 1024
INSTALL = "pip install 'lln-attention[triton]' (Linux), which brings ptxas and cuobjdump"


class CannotCompile(RuntimeError):
    """Kernels cannot be compiled in this process, and why."""


class Architecture(NamedTuple):
    """What a CUDA architecture has, per multiprocessor if nothing else is said.

    The numbers stand in the tables of compute capabilities of NVIDIA's CUDA programming guide.
    """

    name: str
    multiprocessors: int  # of the device named
    shared: int  # bytes of shared memory
    shared_of_program: int  # bytes that one program can ask for
    registers: int = 65_536
    warps: int = 64
    programs: int = 32


ARCHITECTURES = {
    80: Architecture("A100", 108, 164 * KIB, 163 * KIB),
    86: Architecture("A10", 72, 100 * KIB, 99 * KIB, warps=48, programs=16),
    89: Architecture("L40S", 142, 100 * KIB, 99 * KIB, warps=48, programs=24),
    90: Architecture("H200", 132, 228 * KIB, 227 * KIB),
    100: Architecture("B200", 148, 228 * KIB, 227 * KIB),
}
RESERVED = 1 * KIB  # of shared memory, by the driver for every program
TENSOR_MEMORY = 512  # columns of sm_100, which earlier architectures do not have


class Usage(NamedTuple):
    """What a program of a compiled kernel occupies."""

    registers: int  # per thread
    stack: int  # bytes per thread, which is where registers are spilled to
    shared: int  # bytes
    warps: int
    tensor_memory: int = 0  # columns

    def fits(self, arch: int) -> bool:
        """Whether a single program can run at all."""
        has = ARCHITECTURES[arch]
        return (
            self.shared <= has.shared_of_program
            and self.registers * self.warps * 32 <= has.registers
            and self.tensor_memory <= TENSOR_MEMORY
        )

    def programs(self, arch: int) -> int:
        """Programs that run on one multiprocessor at a time.

        Registers are handed out to a warp in units of 256 and to four warps at a time, shared
        memory in units of 128 bytes.
        """
        if not self.fits(arch):
            return 0
        has = ARCHITECTURES[arch]
        registers_of_warp = max(1, -(-self.registers * 32 // 256)) * 256
        by_registers = has.registers // registers_of_warp // 4 * 4 // self.warps
        by_shared = has.shared // (-(-(self.shared + RESERVED) // 128) * 128)
        by_tensor_memory = TENSOR_MEMORY // max(1, self.tensor_memory)
        by_warps = has.warps // self.warps
        return min(by_registers, by_shared, by_tensor_memory, by_warps, has.programs)


def check_toolchain(arch: int) -> None:
    """Raise :class:`CannotCompile` if kernels cannot be compiled here for ``sm_<arch>``."""
    if arch not in ARCHITECTURES:
        known = ", ".join(map(str, ARCHITECTURES))
        raise CannotCompile(f"arch={arch} is not known; pass one of {known}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise CannotCompile("TRITON_INTERPRET=1 interprets the kernels; unset it to compile them")
    try:
        import triton.language as tl
        from triton.runtime.jit import JITFunction
    except ImportError:
        raise CannotCompile(f"triton is not installed; {INSTALL}") from None
    if not isinstance(tl.cdiv, JITFunction):
        raise CannotCompile(
            "triton was imported under TRITON_INTERPRET=1; start a process without that variable"
        )
    for name in ("ptxas", "cuobjdump"):
        tool(name)


def tool(name: str) -> str:
    """Path of a program of the CUDA toolkit: as the environment says, Triton's own, or on PATH."""
    import triton

    variable = f"TRITON_{name.upper()}_PATH"
    beside = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    for path in (os.environ.get(variable), str(beside), name):
        if path and (found := shutil.which(path)):
            return found
    raise CannotCompile(
        f"{name} is neither in the triton package nor on PATH; {INSTALL}, or set {variable}"
    )


class _AbsentDevice:
    """A driver of Triton that knows its target and nothing else."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> str:
        return f"sm_{self.arch}, absent"  # kernels are cached by it: those of real devices stay

    def get_current_stream(self, device: object = None) -> int:
        return 0


@contextlib.contextmanager
def planned_for(arch: int) -> Iterator[None]:
    """Take tiles, splits and what fits from the device in ``ARCHITECTURES`` inside the block."""
    there = ARCHITECTURES[arch]
    memory = there.shared_of_program // KIB
    with contextlib.ExitStack() as undo:
        undo.callback(tiles.forget)  # tiles and splits follow from the device
        tiles.forget()
        undo.enter_context(patch.object(tiles, "multiprocessors", lambda _: there.multiprocessors))
        undo.enter_context(patch.object(tiles, "shared", lambda _: memory))
        yield


@contextlib.contextmanager
def compiling(arch: int) -> Iterator[list[Any]]:
    """Compile what is launched inside the block; yield the list that the kernels are added to.

    Launches are planned as in :func:`planned_for`. What is changed in Triton and in
    :mod:`lln.ops.triton` is as before after the block.
    """
    check_toolchain(arch)
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launched: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        try:
            launched.append(run(self, *args, grid=grid, warmup=True, **options))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise RuntimeError(f"{self.__name__} does not compile: {reason}") from error
        return launched[-1]

    before = dict(vars(driver))  # reading driver.active would look for a device
    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        undo.callback(vars(driver).update, before)
        undo.callback(vars(driver).clear)
        undo.enter_context(planned_for(arch))
        driver.set_active(_AbsentDevice(arch))  # pyright: ignore[reportArgumentType]
        undo.enter_context(patch.object(JITFunction, "run", compile_only))
        yield launched


def usage(kernel: Any) -> Usage:
    """What a kernel that :func:`compiling` found occupies."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [tool("cuobjdump"), "-res-usage", cubin.name]
        answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise CannotCompile(f"cuobjdump failed: {answer.stderr.strip() or answer.stdout.strip()}")
    metadata = kernel.metadata
    registers, stack = registers_and_stack(answer.stdout, metadata.name)
    columns = getattr(metadata, "tmem_size", None) or 0
    return Usage(registers, stack, metadata.shared, metadata.num_warps, columns)


def registers_and_stack(text: str, function: str) -> tuple[int, int]:
    """Registers and bytes of stack per thread, from the output of ``cuobjdump -res-usage``."""
    pattern = rf"Function {re.escape(function)}:\s+REG:(\d+) STACK:(\d+)"
    found = re.search(pattern, text)
    if found is None:
        raise CannotCompile(f"cuobjdump says nothing about {function}: {text.strip()!r}")
    return int(found[1]), int(found[2])
