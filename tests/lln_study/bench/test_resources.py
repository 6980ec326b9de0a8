"""What kernels occupy, compiled without a GPU.

Compiling needs a process of its own: without a GPU the kernels of this one are interpreted.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lln_study.bench.kernels import offline
from lln_study.bench.kernels.offline import ARCHITECTURES, CannotCompile, Usage
from lln_study.bench.kernels.resource_cases import NEAR_FAR, resource_cases
from tests.lln_study.bench.outside import outside

TRITON = Path(__file__).resolve().parents[3] / "lln" / "ops"
HALVES = ("bfloat16", "float16")
PRINTED = """
Fatbin elf code:
================
arch = sm_90a

Resource usage:
 Common:
  GLOBAL:0
 Function helper:
  REG:12 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:0 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function read_kernel:
  REG:255 STACK:352 SHARED:1024 LOCAL:0 CONSTANT[0]:700 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_registers_and_stack_are_those_of_the_kernel():
    assert offline.registers_and_stack(PRINTED, "read_kernel") == (255, 352)
    assert offline.registers_and_stack(PRINTED, "helper") == (12, 8)


@pytest.mark.parametrize("text", ["", PRINTED])
def test_what_cuobjdump_does_not_say_is_an_error(text):
    with pytest.raises(CannotCompile, match="nothing about kernel"):
        offline.registers_and_stack(text, "kernel")


@pytest.mark.parametrize(
    ("used", "programs"),
    [
        (Usage(registers=32, stack=0, shared=0, warps=1), 32),  # no more at a time
        (Usage(registers=32, stack=0, shared=0, warps=8), 8),  # 64 warps
        (Usage(registers=255, stack=0, shared=0, warps=4), 2),  # 8 warps have all the registers
        (Usage(registers=168, stack=0, shared=0, warps=4), 3),
        (Usage(registers=169, stack=0, shared=0, warps=4), 2),  # rounded up to 176
        (Usage(registers=32, stack=0, shared=75 * 1024, warps=4), 3),  # 3 · (75 + 1) = 228 KiB
        (Usage(registers=32, stack=0, shared=75 * 1024 + 1, warps=4), 2),
        (Usage(registers=32, stack=0, shared=227 * 1024, warps=4), 1),
        (Usage(registers=32, stack=0, shared=227 * 1024 + 1, warps=4), 0),
        (Usage(registers=255, stack=0, shared=0, warps=8), 1),
        (Usage(registers=129, stack=0, shared=0, warps=16), 0),
        (Usage(registers=32, stack=0, shared=0, warps=4, tensor_memory=256), 2),
    ],
)
def test_programs_of_a_multiprocessor(used, programs):
    assert used.programs(90) == programs
    assert used.fits(90) == (programs > 0)


def test_every_architecture_has_its_own_shared_memory():
    used = Usage(registers=64, stack=0, shared=200 * 1024, warps=4)
    assert [arch for arch in ARCHITECTURES if used.fits(arch)] == [90, 100]


def test_cases_are_those_asked_for():
    with pytest.raises(ValueError, match=r"op='softmax' is not known; pass one of bidirectional"):
        resource_cases(ops=["softmax"])
    with pytest.raises(ValueError, match=r"width=65 is not known; pass one of 64, 128, 256"):
        resource_cases(widths=[65])
    with pytest.raises(ValueError, match=r"causal D=256 .*take another width"):
        resource_cases(ops=["causal"], widths=[256])
    found = resource_cases(ops=["causal", "decode"], widths=[128], dtypes=["float32"])
    assert [case.name for case in found] == ["decode D=128 float32"]
    joint = ["near", *NEAR_FAR, "block_causal"]
    found = resource_cases(ops=joint, widths=[128, 256], dtypes=["float32"])
    assert [case.name for case in found] == ["near D=128 float32", "near_far_slots D=128 float32"]
    found = resource_cases(86, ops=["causal", "lln_diag"], widths=[64, 128])
    kept = [f"{op} D=64 {dtype}" for op in ("lln_diag", "causal") for dtype in HALVES]
    assert [case.name for case in found] == [*kept, "causal D=64 float32"]
    masked = resource_cases(ops=["causal"], widths=[64], masked=True)
    assert len(masked) == 3 and all(length % 4 for length in masked[0].lengths)


def test_interpreted_kernels_are_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CannotCompile, match="unset it"), offline.compiling(90):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
def test_a_process_that_imported_triton_to_interpret_is_refused():
    pytest.importorskip("triton")
    with pytest.raises(CannotCompile, match="start a process without"):
        offline.check_toolchain(90)


def test_unknown_architectures_are_refused():
    with pytest.raises(
        CannotCompile, match=r"arch=91 is not known; pass one of 80, 86, 89, 90, 100"
    ):
        offline.check_toolchain(91)


def test_missing_packages_and_programs_are_named(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(CannotCompile, match=r"cuobjdump is neither .* TRITON_CUOBJDUMP_PATH"):
        offline.tool("cuobjdump")
    monkeypatch.setitem(sys.modules, "triton.language", None)
    with pytest.raises(CannotCompile, match=r"pip install 'lln-attention\[triton\]'"):
        offline.check_toolchain(90)


RESTORES = """
import torch, triton, warnings
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from lln_study.bench.kernels.offline import compiling
from lln.ops.causal.kernels import launch as launch_causal
from lln.ops.common.kernels import tiles

cpu = torch.device("cpu")
q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
split = lambda: tiles.split(16_384, 12, tiles.HALF["read"][64], cpu)
wide = lambda: tiles.tile("joint_segments", 128, 128, q.dtype, cpu)
look = lambda: (
    dict(vars(driver)), JITFunction.run, tiles.multiprocessors, tiles.multiprocessors(cpu),
    split(), list(warnings.filters),
)
before, tile_before = look(), wide()
for arch, count in ((80, 108), (86, 72), (90, 132)):
    try:
        with compiling(arch):
            inside = look()
            assert inside[3] == count and launch_causal.factors(q.dtype)["TERMS"] == 1, inside
            assert driver.active.get_current_target().arch == arch
            assert (wide() == tile_before) == (arch != 86), wide()
            assert all(a != b for a, b in zip(before, inside)), (before, inside)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert look() == before and wide() == tile_before
assert not torch.cuda.is_initialized()
"""


def test_everything_is_as_before_after_compiling(toolchain):
    done = outside("-c", RESTORES)
    assert done.returncode == 0, done.stderr


def test_only_known_places_ask_where_the_tensors_are():
    """A launcher that plans otherwise for a CPU must be told so by ``offline.compiling``."""
    asking = {p.name for p in TRITON.rglob("*.py") if "is_cuda" in p.read_text(encoding="utf-8")}
    assert asking == {"triton.py", "launching.py", "library.py"}


def test_a_small_op_is_compiled_and_its_rows_are_written(toolchain, tmp_path):
    done = outside(
        *("-m", "lln.cli.app", "bench", "resources", "--op", "statistics", "--dtype", "bfloat16"),
        *("--width", "64", "--jobs", "1", "--out", str(tmp_path / "rows")),
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    assert "0 do not fit" in done.stdout
    (path,) = (tmp_path / "rows").glob("resources-sm90_*.json")
    rows = json.loads(path.read_text())["rows"]
    kernels = {row["kernel"] for row in rows}
    assert kernels == {"moments_kernel", "deviation_kernel", "match_kernel", "measure_kernel"}
    assert all(row["fits"] and row["programs"] > 0 and row["commit"] for row in rows)
    assert all(0 < row["registers"] <= 255 for row in rows)


BROKEN = """
import triton, triton.language as tl
from lln_study.bench.kernels import resources

@triton.jit
def broken_kernel(x):
    tl.store(x, tl.no_such_function())

def op(case, length):
    x = case.tokens(length)[0]
    broken_kernel[(1,)](x)
    return [x], []

resources.OPS["broken"] = op
(row, again) = resources.compile_case(resources.ResourceCase("broken", 64, "float32"), 90)
assert row["fits"] is False and row["programs"] == 0, row
assert "broken_kernel does not compile" in row["error"] and "no_such_function" in row["error"], row
"""


def test_a_kernel_that_does_not_compile_gives_a_row_that_says_why(toolchain, tmp_path):
    script = tmp_path / "broken.py"  # Triton reads the source of its kernels
    script.write_text(BROKEN)
    done = outside(str(script))
    assert done.returncode == 0, done.stderr


# Ops that together launch every kernel, but for those of large blocks.
EVERY_KERNEL = (
    *("lln_diag_learned", "causal", "block_diagonal", "near_far_slots", "block_causal", "state"),
    *("bidirectional", "varlen", "decode", "next_token", "convolution", "statistics"),
)
LARGEST = ("lln_diag_learned", "lln_diag_overlap", "causal", "near_far_slots")


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, width, ops", [("float32", 64, EVERY_KERNEL), ("bfloat16", 128, LARGEST)]
)
def test_every_kernel_fits_the_device_its_tiles_were_measured_on(
    dtype, width, ops, toolchain, tmp_path
):
    """What does not is refused on a GPU at the first call: OutOfResources.

    float32 has the largest tiles in shared memory, 128 the most registers; the command itself
    compiles the rest.
    """
    chosen = [part for op in ops for part in ("--op", op)]
    done = outside(
        *("-m", "lln.cli.app", "bench", "resources", "--width", str(width), "--dtype", dtype),
        *(*chosen, "--out", str(tmp_path), "--jobs", "1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert all(row["fits"] for row in rows)
    compiled = {row["kernel"] for row in rows}
    sources = "".join(p.read_text(encoding="utf-8") for p in TRITON.rglob("*_kernels.py"))
    written = set(re.findall(r"^def (\w+_kernel)\(", sources, flags=re.M))
    wide = {name for name in written if name.startswith("wide_")}  # in half precision alone
    never = (wide if ops is LARGEST else written - wide) - compiled
    assert not never, f"no op of resource_cases.OPS launches {sorted(never)}"


PROGRAMS = """
import torch
from lln.ops import triton as kernels
from lln.ops.common.kernels import tiles
from lln_study.bench.kernels.offline import compiling, planned_for, usage

kernels.refuses_device = lambda x: None
for block, overlap, kernel in ((128, 0, "wide"), (128, 64, "wide_loop"), (256, 0, "wide_loop")):
    q, k, v = (torch.empty(4, 2, 1024, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    scales = {"alpha": torch.ones(4, 2), "beta": torch.ones(4, 2), "scale": 0.125}
    with planned_for(90), compiling(90) as launched:
        kernels.lln_diag(q, k, v, block=block, overlap=overlap, **scales)
    [found] = [usage(x) for x in launched if x.metadata.name == "wide_kernel"]
    wanted = tiles.HALF[kernel][64].programs
    assert found.programs(90) == wanted and not found.stack, (block, overlap, wanted, found)
"""


@pytest.mark.slow
def test_as_many_programs_of_large_blocks_run_as_they_are_split_for(toolchain):
    """Blocks of 256 once had two windows in memory: one program where two were planned."""
    done = outside("-c", PROGRAMS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, dtype, width, ops",
    [
        (80, "float32", 128, ["near_far_slots"]),
        (80, "bfloat16", 128, ["lln_diag_learned"]),
        (86, "float32", 64, ["causal", "block_causal"]),
        (86, "bfloat16", 256, ["bidirectional"]),
        (89, "bfloat16", 128, ["bidirectional", "near_far"]),
        (89, "bfloat16", 64, ["lln_diag_learned"]),
    ],
)
def test_tiles_fit_devices_with_less_shared_memory(arch, dtype, width, ops, toolchain, tmp_path):
    """What comes closest to the limits; the command compiles the rest."""
    chosen = [part for op in ops for part in ("--op", op)]
    done = outside(
        *("-m", "lln.cli.app", "bench", "resources", "--arch", str(arch), "--width", str(width)),
        *(*chosen, "--dtype", dtype, "--out", str(tmp_path), "--jobs", "1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob(f"resources-sm{arch}_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert all(row["fits"] for row in rows) and {row["op"] for row in rows} == set(ops)
