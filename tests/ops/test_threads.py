"""Heads on several threads: the same numbers as on one, whatever the thread that asks."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import lln
from lln.ops import eager
from lln.ops.common import threads
from lln.ops.common.features import CHUNK_ELEMENTS, CHUNK_ELEMENTS_OF_A_GPU, chunks
from tests.helpers import relative_error
from tests.waiting import HANGS

FORMS = {
    "lln": {},
    "causal": {"is_causal": True},
    "diag": {"near": 16},
    "joint": {
        "near": lln.Near(16, overlap=8, sinks=2, joint=True), "gamma": 0.3,
        "is_causal": True,
    },
}  # fmt: skip
# Elements of one head that a loop over tokens takes at once: here so few that each takes turns.
LOOPS = {
    "common.features.CHUNK_ELEMENTS": 128 * 16,
    "causal.segments.SEGMENT_ELEMENTS": 128 * 16,
    "window.eager_near._GROUP_ELEMENTS": 64 * 32,
    "window.eager_far._GROUP_ELEMENTS": 64 * 16,
}


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    """Several tasks and two threads, even for the small tensors of a test."""
    monkeypatch.setattr(threads, "LEAST_ELEMENTS", 1 << 11)
    monkeypatch.setattr(threads, "START", 1 << 10)
    monkeypatch.setattr(threads, "SHARED_ELEMENTS", 1 << 10)
    threads._steps.cache_clear()
    before = torch.get_num_threads()
    yield torch.set_num_threads(2)
    torch.set_num_threads(before)
    threads._steps.cache_clear()


def _inputs(dtype=torch.float32, tokens=70):
    generator = torch.Generator().manual_seed(5)
    shapes = (3, 6, tokens, 16), (3, 2, tokens, 16), (3, 2, tokens, 16)
    q, k, v = (torch.randn(s, generator=generator, dtype=dtype) for s in shapes)
    mask = torch.rand(3, tokens, generator=generator) > 0.2
    return [x.requires_grad_() for x in (q, k, v)], mask


def _run(form, tensors, mask, **options):
    out = lln.attention(*tensors, alpha=1.1, beta=0.9, key_mask=mask, **FORMS[form], **options)
    return out, *torch.autograd.grad(out.square().sum(), tensors)


@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_do_not_depend_on_the_number_of_threads(form, monkeypatch):
    """Heads are cut otherwise for every number of threads, the loops over tokens are not."""
    for name, size in LOOPS.items():
        module, constant = name.rsplit(".", 1)
        monkeypatch.setattr(sys.modules[f"lln.ops.{module}"], constant, size)
    tensors, mask = _inputs(tokens=300)
    found, cuts = [], []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        cuts.append(len(threads._cuts(tensors)))
        found.append(_run(form, tensors, mask))
    assert cuts == [0, 6, 3]  # none on one thread: the call as it is
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_heads_apart_are_heads_together(form):
    tensors, mask = _inputs(torch.float64)
    expected = _run(form, tensors, mask, impl="reference")
    for mine, exact in zip(_run(form, tensors, mask), expected, strict=True):
        assert relative_error(mine, exact) < 1e-13


def test_dropout_falls_on_the_heads_it_was_drawn_for():
    (q, k, v), mask = _inputs()
    generator = torch.Generator().manual_seed(1)
    drops = {
        "slot_dropout": torch.rand(q.shape, generator=generator),
        "probability_dropout": torch.rand(*q.shape[:3], 16, generator=generator),
    }
    scales = {"alpha": torch.ones(3, 6), "beta": torch.ones(3, 2)}

    def run():
        options = {"block": 16, "scale": 0.25, "key_mask": mask, **scales, **drops}
        out = eager.lln_diag(q, k, v, **options)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    cut, threads.SHARED_ELEMENTS = run(), 1 << 30
    for apart, together in zip(cut, run(), strict=True):
        assert relative_error(apart, together) < 1e-6


def test_work_is_cut_into_whole_samples_or_heads_of_one():
    def cuts(*shape, keys=None):
        return threads._cuts([torch.empty(shape), torch.empty(keys or shape)])

    assert cuts(4, 2, 8, 8) == []  # 512 elements in all: not worth a task
    assert cuts(8, 2, 8, 8) == [(slice(0, 8), slice(0, 2))]  # not worth two
    assert cuts(64, 2, 8, 8) == [(slice(b, b + 32), slice(0, 2)) for b in (0, 32)]
    assert cuts(1, 8, 64, 16, keys=(1, 4, 64, 16)) == [
        (slice(0, 1), slice(h, h + 2))
        for h in (0, 2)  # of keys; two heads read each
    ]
    assert cuts(3, 4, 128, 16) == [  # three samples would keep one of two threads waiting
        (slice(b, b + 1), slice(h, h + 2)) for b in range(3) for h in (0, 2)
    ]
    assert cuts(0, 4, 64, 16) == cuts(2, 0, 64, 16) == []


def test_a_task_has_heads_in_hand_that_a_cache_holds(monkeypatch):
    """However many samples there are, and on one thread, too."""
    monkeypatch.setattr(threads, "MOST_ELEMENTS", 1 << 13)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        cuts = threads._cuts([torch.empty(40, 6, 64, 16)])
        heads = [(b.stop - b.start) * (h.stop - h.start) for b, h in cuts]
        assert max(heads) * 64 * 16 <= 1 << 13 and min(heads) * 64 * 16 >= 1 << 11
        seen = {(b, h) for bs, hs in cuts for b in range(bs.start, bs.stop) for h in range(6)[hs]}
        assert len(seen & {(b, h) for b in range(40) for h in range(6)}) == 240


@pytest.mark.parametrize("heads", [1, 6])
def test_loops_over_tokens_go_by_the_size_of_one_head_on_a_cpu(heads):
    size = CHUNK_ELEMENTS // 64
    found = list(chunks(torch.empty(2, heads, 2 * size + 1, 64)))
    assert found == [slice(0, size), slice(size, 2 * size), slice(2 * size, 2 * size + 1)]
    elsewhere = torch.empty(2, heads, 1 << 20, 64, device="meta")
    assert next(chunks(elsewhere)) == slice(
        0, CHUNK_ELEMENTS_OF_A_GPU // (2 * heads * 64 * 128) * 128
    )


def test_threads_follow_the_modes_of_the_thread_that_asks():
    tensors, mask = _inputs()
    with torch.inference_mode():
        inside = lln.attention(*tensors, alpha=1.1, beta=0.9, key_mask=mask, is_causal=True)
        assert inside.is_inference()
    with torch.no_grad():
        outside = lln.attention(*tensors, alpha=1.1, beta=0.9, key_mask=mask, is_causal=True)
    assert torch.equal(inside, outside) and not outside.is_inference()


def test_torch_keeps_its_number_of_threads(monkeypatch):
    """Threads of the pool have one; whoever asked, and threads that come later, have theirs."""
    monkeypatch.setattr(threads, "_pools", {})  # so that one is started here
    tensors, mask = _inputs()
    _run("lln", tensors, mask)
    seen = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert torch.get_num_threads() == 2 and seen == [2]
    pool = threads._pool(2)
    assert pool is not None and pool.submit(torch.get_num_threads).result() == 1


def test_an_error_in_a_thread_reaches_the_caller():
    def fail(x):
        raise ValueError("no such head")

    with pytest.raises(ValueError, match="no such head"):
        threads.over_heads(fail, torch.empty_like)(torch.zeros(8, 8, 16, 16))


def test_many_threads_may_ask_at_once():
    tensors, mask = _inputs()
    expected = _run("causal", tensors, mask)
    found = {}

    def ask(name):
        found[name] = _run("causal", tensors, mask)

    asking = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(found) == 6
    for results in found.values():
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


FORKED = """
import os, torch, lln
from lln.ops.common import threads
threads.SHARED_ELEMENTS = threads.LEAST_ELEMENTS = 1 << 10
torch.set_num_threads(2)
q = torch.ones(2, 4, 32, 16)
lln.attention(q, q, q, alpha=1.0, beta=1.0)
assert threads._pools
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    torch.set_num_threads(2)
    threads.over_heads(lambda x: x + 1, torch.empty_like)(q)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_begins_anew():
    """A pool without its threads would wait for ever."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], timeout=HANGS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
