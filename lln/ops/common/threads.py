"""Heads side by side on the cores of a CPU: a few long tasks instead of many short regions.

Inside a loop over chunks every operation of torch is a parallel region of its own, at whose end the
threads wait for each other: on a machine with other work, for one that is not running. Heads do not
need each other, so each task here computes a few of them to the end on one thread. Loops over
tokens go by the size of one head: the numbers do not depend on how heads are cut, nor on threads
(but for outliers among causal keys, where a task is careful with all of its heads or with none).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lln.ops.common.features import CHUNK_ELEMENTS

# Elements of a task's largest tensor: with fewer, Python, which one thread runs at a time, costs
# more than is saved. A task takes as long as START of them even before its work begins.
LEAST_ELEMENTS, START = 1 << 17, 1 << 16
# Below this a call is left to torch, which hardly shares so few among threads. Above it one thread
# takes longer, by a third at most; but beside other work torch's would wait, for tenths of seconds.
SHARED_ELEMENTS = 1 << 16
# Elements that a task has in hand at once, all its heads together: about a cache.
MOST_ELEMENTS = 1 << 20

Cut = tuple[slice, slice]  # of samples and of key heads


def over_heads(
    compute: Callable[..., Any], shapes: Callable[..., Any], *, fills: bool = False
) -> Callable[..., Any]:
    """Call ``compute`` on a CPU for a few samples and heads at a time, on all of torch's threads.

    Args:
        compute: A function of tensors that begin with samples and heads, ``[B, H, ...]`` or
            ``[B, Hkv, ...]``, and results of the same kind; masks and positions, which are not of
            floating point, begin with samples only.
        shapes: The same arguments to empty results.
        fills: Whether ``compute`` writes into its result, which it then takes as its last argument
            and need not hold twice.
    """

    def computed(*args: Any) -> Any:
        cuts = _cuts([x for x in args if isinstance(x, Tensor) and x.is_floating_point()])
        if not cuts:
            return compute(*args, shapes(*args)) if fills else compute(*args)
        made = shapes(*args)
        results = made if isinstance(made, tuple) else (made,)
        heads = min(x.shape[1] for x in args if isinstance(x, Tensor) and x.is_floating_point())

        def run(cut: Cut) -> None:
            pieces = [_piece(x, cut, heads) for x in args]
            if fills:
                compute(*pieces, _piece(made, cut, heads))
                return
            found = compute(*pieces)
            parts = found if isinstance(found, tuple) else (found,)
            for whole, part in zip(results, parts, strict=True):
                _piece(whole, cut, heads).copy_(part)

        _run_all(run, cuts)
        return made

    return computed


def _cuts(tensors: Sequence[Tensor]) -> list[Cut]:
    """Samples and key heads of each task: whole samples if they are small, else heads of one.

    None if the call is left to torch as it is.
    """
    if not tensors or tensors[0].device.type != "cpu":
        return []
    samples, heads = tensors[0].shape[0], min(x.shape[1] for x in tensors)
    per_head = max(x.numel() for x in tensors) // max(samples * heads, 1)
    elements, threads = samples * heads * per_head, torch.get_num_threads()
    if elements < SHARED_ELEMENTS:
        return []
    some, few = samples, heads
    if elements >= 2 * LEAST_ELEMENTS:
        some, few = _steps(samples, heads, per_head, threads)
    if threads == 1 and (some, few) == (samples, heads):
        return []  # which is just the same
    starts = range(0, heads, few)
    return [
        (slice(b, b + some), slice(h, h + few)) for b in range(0, samples, some) for h in starts
    ]


@lru_cache(maxsize=1024)
def _steps(samples: int, heads: int, per_head: int, threads: int) -> tuple[int, int]:
    """How many samples, and how many heads of each, make a task: the quickest on these threads."""
    in_hand = min(per_head, CHUNK_ELEMENTS)

    def time(step: tuple[int, int]) -> tuple[bool, int, int]:
        work = step[0] * step[1] * per_head
        tasks = math.ceil(samples / step[0]) * math.ceil(heads / step[1])
        fits = step[0] * step[1] * in_hand <= MOST_ELEMENTS
        worth = work >= LEAST_ELEMENTS or step == (samples, heads)
        return not (fits and worth), math.ceil(tasks / threads) * (work + START), tasks

    whole = [(some, heads) for some in range(1, samples + 1)]
    return min(whole + [(1, few) for few in range(1, heads)], key=time)


def _piece(x: Any, cut: Cut, heads: int) -> Any:
    """The part of a tensor that a task works on; everything else as it is."""
    if not isinstance(x, Tensor):
        return x
    if not x.is_floating_point():
        return x[cut[0]]
    group = x.shape[1] // heads
    return x[cut[0], cut[1].start * group : cut[1].stop * group]


def _run_all(run: Callable[[Cut], None], cuts: Sequence[Cut]) -> None:
    """Run every task, in order on one thread, or as threads are free."""
    pool = _pool(torch.get_num_threads())
    if pool is None:
        for cut in cuts:
            run(cut)
        return
    inference = torch.is_inference_mode_enabled()

    def quietly(cut: Cut) -> None:  # modes of torch belong to a thread
        with torch.inference_mode() if inference else torch.no_grad():
            run(cut)

    tasks: list[Future[None]] = [pool.submit(quietly, cut) for cut in cuts]
    for task in tasks:
        task.result()


_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def _pool(threads: int) -> ThreadPoolExecutor | None:
    """Threads on which torch computes alone, as many as torch would use; None for one."""
    if threads == 1:
        return None
    with _lock:
        if threads not in _pools:
            _pools[threads] = _start(threads)
        return _pools[threads]


def _start(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads are all there, each with one thread of torch."""
    ready = threading.Barrier(threads + 1)

    def alone() -> None:
        torch.get_num_threads()  # which lets the thread take torch's setting first
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="lln", initializer=alone)
    for _ in range(threads):
        pool.submit(lambda: None)
    ready.wait()
    torch.set_num_threads(threads)  # the setting of new threads, which the above changed
    return pool


def _forget() -> None:
    """Let a forked child begin anew: it has none of these threads, nor who held the lock."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
