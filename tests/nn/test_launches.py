"""What a forward and a backward pass of the recommended module cost beside their kernels.

Counted, not timed: launches, operations of torch and nodes of the graph, with real kernels and
Triton's own binder on a device that is not there, so that nothing is compiled or computed.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.waiting import HANGS

pytestmark = pytest.mark.slow  # a process of its own

SCRIPT = """
import collections, json
import torch
from torch.profiler import ProfilerActivity, profile
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from lln.nn import LLNAttention, RECOMMENDED
from lln.ops import triton as kernels
from lln.ops.common.kernels import launching
from lln_study.bench.kernels.offline import _AbsentDevice, planned_for

launched, bound = [], []

class Nothing:
    def __getitem__(self, grid):
        return lambda *args: launched.append(grid)

def run(self, *args, **options):
    bound.append(self.__name__)
    launched.append(self.__name__)
    return Nothing()

JITFunction.run = run
driver.set_active(_AbsentDevice(90))
launching.CompiledKernel, launching._REMEMBERS = Nothing, True
launching.on_current_device = lambda x: True
kernels.refuses_device = lambda x: None

def operations(call):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        result = call()
    # those that another one of torch calls belong to that one
    outer = [e for e in seen.events() if e.name.startswith("aten::")
             and (e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::"))]
    names = (e.name.removeprefix("aten::").removesuffix("_") for e in outer)
    return result, dict(collections.Counter(names))

def nodes(out):
    found, left = set(), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [parent for parent, _ in node.next_functions]
    return sorted(node.name() for node in found if "AccumulateGrad" not in node.name())

answers = []
for key_heads, masked in ((4, False), (4, True), (2, False)):
    core = LLNAttention(4, 64, num_kv_heads=key_heads, **RECOMMENDED)
    given = [torch.randn(2, 128, h, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
             for h in (4, key_heads, key_heads)]
    mask = torch.arange(128).expand(2, -1) < 100 if masked else None
    wanted = [*given, *core.parameters()]
    with planned_for(90):
        for _ in range(2):
            launched.clear(), bound.clear()
            out, forward = operations(lambda: core(*given, mask, mask))
            count, graph, d_out = len(launched), nodes(out), torch.ones_like(out)
            _, backward = operations(lambda: torch.autograd.grad(out, wanted, d_out))
    answers.append({"launches": [count, len(launched) - count], "bound": bound, "nodes": graph,
                    "forward": forward, "backward": backward})
print(json.dumps(answers))
"""

PASSES = ("forward", "backward")
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@pytest.fixture(scope="module")
def counted() -> list[dict]:
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", range(3), ids=["plain", "masked", "grouped"])
def test_what_the_recommended_module_asks_of_torch(counted, case):
    """Moments and match, keys, queries, convolution; backwards queries, state, keys, and two."""
    found = counted[case]
    assert found["launches"] == [5, 5] and not found["bound"]
    assert found["nodes"] == ["SigmoidBackward0", "lln_diag_trainBackward"]
    forward, backward = ({k: n for k, n in found[x].items() if k not in EMPTY} for x in PASSES)
    assert forward == {"detach": 2, "sigmoid": 1}
    # the gradient of the mix and of its logit; those of v are added by a kernel
    assert backward == {"sum": 1, "sigmoid_backward": 1}


def test_what_it_allocates(counted):
    """Outputs, the state and its parts, what the backward pass wants of the queries, and ε."""
    allocated = [sum(counted[0][x].get(name, 0) for name in EMPTY) for x in PASSES]
    assert allocated == [10, 9]
