"""Launches: the compiled kernel gets what Triton's binder would give it, and only where it fits."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from lln.ops.common.kernels import launching, tiles
from lln.ops.common.kernels.launching import Launch, layout, planned, rows_of
from lln.ops.common.kernels.library import empty_rows
from tests.waiting import HANGS


class Compiled:
    """What a kernel was compiled to."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getitem__(self, grid):
        return lambda *args: self.calls.append((grid, args))


class Kernel:
    """Compiles anew at every launch."""

    arg_names = ("X", "Y", "step", "WIDTH", "ROWS")

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []
        self.bound: list[tuple] = []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.bound.append((grid, args, constants))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return run


@pytest.fixture
def launch(monkeypatch) -> Launch:
    monkeypatch.setattr(launching, "CompiledKernel", Compiled)
    monkeypatch.setattr(launching, "_REMEMBERS", True)
    monkeypatch.setattr(launching, "on_current_device", lambda _: True)
    return Launch(Kernel(), (2, 3), (7,), ROWS=16, WIDTH=8, num_warps=4)


def aligned(*shape: int, dtype=torch.float32) -> torch.Tensor:
    x = torch.zeros(*shape, dtype=dtype)
    assert x.data_ptr() % 16 == 0
    return x


def test_the_second_launch_needs_no_binder(launch):
    x, y = aligned(8), aligned(8)
    for _ in range(3):
        launch(x, y)
    assert launch.kernel.bound == [((2, 3, 1), (x, y, 7), {"ROWS": 16, "WIDTH": 8, "num_warps": 4})]
    again = ((2, 3, 1), (x.data_ptr(), y.data_ptr(), 7, 8, 16))  # in the order of the source
    assert launch.kernel.compiled[0].calls == [again, again]


def test_what_triton_compiles_apart_is_kept_apart(launch):
    """None, another dtype; and an address that is no multiple of 16 is never remembered."""
    x, half = aligned(8), aligned(8, dtype=torch.float16)
    for tensors in ((x, x), (x, None), (x, half)):
        launch(*tensors)
        launch(*tensors)
    assert [len(found.calls) for found in launch.kernel.compiled] == [1, 1, 1]
    assert launch.kernel.compiled[1].calls[0][1][1] is None
    for _ in range(2):
        launch(x, x[1:])
    assert len(launch.kernel.bound) == 5
    launch(x, x[4:])  # 16 bytes further
    assert len(launch.kernel.bound) == 5


@pytest.mark.parametrize("name, value", [("_REMEMBERS", False), ("CompiledKernel", int)])
def test_what_is_not_known_to_fit_goes_to_the_binder(launch, name, value, monkeypatch):
    """An AMD device, or the interpreter, which gives back nothing."""
    monkeypatch.setattr(launching, name, value)
    for _ in range(3):
        launch(aligned(8), aligned(8))
    assert len(launch.kernel.bound) == 3


def test_tensors_elsewhere_go_to_the_binder(launch, monkeypatch):
    monkeypatch.setattr(launching, "on_current_device", lambda _: False)
    for _ in range(3):
        launch(aligned(8), aligned(8))
    assert len(launch.kernel.bound) == 3


def test_plans_are_made_once_and_forgotten_with_the_tiles():
    made = []
    plan = planned(lambda *key: made.append(key))
    try:
        for x in (torch.empty(2, 3), torch.empty(2, 3), torch.empty(3, 2).T):
            plan(layout(x))
        assert len(made) == 2
        tiles.forget()
        plan(layout(torch.empty(2, 3)))
        assert len(made) == 3
    finally:
        tiles.REMEMBERED.remove(plan)


@pytest.mark.parametrize("transposed", [False, True])
def test_planned_rows_are_those_that_tracing_expects(transposed):
    x = torch.empty(2, 5, 3, 8).transpose(1, 2) if transposed else torch.empty(2, 3, 5, 8)
    expected = empty_rows(x, 16)
    assert rows_of(layout(x), 16) == (expected.shape, expected.stride())


# Real kernels with Triton's own binder, on a device that is not there. Nothing is compiled: a
# kernel is what notes its arguments.
SCRIPT = """
import json, os
os.environ.pop("LLN_DIRECT_LAUNCH", None)
import torch, lln
from lln.ops import triton as kernels
from lln.ops.common.kernels import launching
from lln_study.bench.kernels.offline import _AbsentDevice, planned_for
from triton.runtime import driver
from triton.runtime.jit import JITFunction
import triton.compiler

binders, launches = [], []

class Noted:
    function = packed_metadata = None
    def launch_metadata(self, grid, stream, *args):
        pass
    def run(self, *given):
        launches.append((given[:3], given[9:]))
    def __getitem__(self, grid):
        return lambda *args: self.run(*grid, *[None] * 6, *args)

def compiled(self, key, signature, device, *rest):
    return self.device_caches[device][0].setdefault(key, Noted())

run = JITFunction.run
def bound(self, *args, **options):
    binders.append(self)
    return run(self, *args, **options)

def alike(bound, direct):
    # where the binder passed a tensor, its address: another one, but for 0, where it is empty
    (grid, args), (other_grid, others) = bound, direct
    pairs = list(zip(args, others, strict=True))
    addresses = [(x.data_ptr(), y) for x, y in pairs if isinstance(x, torch.Tensor)]
    numbers = [(str(x), str(y)) for x, y in pairs if not isinstance(x, torch.Tensor)]
    fit = all(isinstance(y, int) and bool(x) == bool(y) for x, y in addresses)
    return fit and grid == other_grid and all(x == y for x, y in numbers)

JITFunction._do_compile, JITFunction.run = compiled, bound
driver.set_active(_AbsentDevice(90))
launching.CompiledKernel = Noted
launching.on_current_device = lambda x: True
kernels.refuses_device = lambda x: None
scales = {"alpha": 2.0, "beta": 2.0}
cases = [scales, {}, {**scales, "near": 64}, {**scales, "is_causal": True},
         {**scales, "near": lln.Near(64, joint=True), "gamma": 0.0}]
found = []
with planned_for(90):
    for number, options in enumerate(cases):
        shape = 2, 600 + number, 4, 64  # none with the plans of another
        given = [torch.randn(shape, dtype=torch.bfloat16).transpose(1, 2) for _ in "qkv"]
        given = [x.requires_grad_() for x in given]
        keep = []  # so that no address is used twice
        counts = []
        for _ in range(2):
            binders.clear(); launches.clear()
            out = lln.attention(*given, **options, impl="triton")
            forward = len(launches)
            keep.append(torch.autograd.grad(out, given, torch.ones_like(out)))
            counts.append((forward, len(launches), len(binders), list(launches)))
        found.append(counts)
same = [all(map(alike, one[3], other[3])) for one, other in found]
print(json.dumps([[one[:3], other[:3]] for one, other in found])); print(json.dumps(same))
"""


def test_compiled_kernels_get_what_the_binder_gave_them():
    """Grids and all arguments but the addresses; the launches of a call, none bound twice."""
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert answer.returncode == 0, answer.stderr
    counts, same = map(json.loads, answer.stdout.splitlines())
    launched = [(2, 4), (4, 6), (2, 4), (3, 7), (3, 6)]
    for (first, second), (forward, both), equal in zip(counts, launched, same, strict=True):
        assert first[:2] == second[:2] == [forward, both]
        assert first[2] == both and second[2] == 0
        assert equal
