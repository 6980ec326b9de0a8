"""What a CUDA graph asks of a step: fixed shapes and addresses, and nothing of the host."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lln.hf
from lln.hf import Engine
from tests.hf.serving.test_engine import alone, prompts, ready
from tests.hf.tiny import make, text

# Operators that wait for values, have sizes by values, or copy from the host.
WAITING = (
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "item"),
    *("_unique2", "repeat_interleave.Tensor", "bincount", "lift_fresh"),
)


class Watch(TorchDispatchMode):
    """Raises for operators of the list; notes shapes of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        assert not any(name == x or name.startswith(f"{x}.") for x in WAITING), name
        if name.startswith("index"):
            assert not any(
                getattr(x, "dtype", None) == torch.bool for x in args[1] if x is not None
            )
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, (tuple, list)) else [out]
        self.calls.append((name, *(tuple(x.shape) for x in found if isinstance(x, torch.Tensor))))
        return out


def addresses(engine: Engine) -> list[int]:
    return [x.data_ptr() for x in (*engine._moved(), engine.live, *engine._choice.options.values())]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "lln_nearfar before"), ("gpt2", "lln_diag learned"), ("qwen3", "lln_diag windows")],
)
def test_a_step_waits_for_nothing_and_is_the_same_every_time(family, name, sampled):
    engine = Engine(ready(family, name), 3)
    before, calls = addresses(engine), []
    for step in range(6):
        if step in (0, 2, 3):
            engine.add(prompts()[step], max_new_tokens=20)
        with Watch() as watch, torch.no_grad():
            engine._forward(sampled=sampled)
        calls.append(watch.calls)
        if step == 4:
            engine.end(engine.streams[1])
    assert calls[0] == calls[1] == calls[2] == calls[5] and len(calls[0]) > 100
    assert addresses(engine) == before


def test_softmax_beside_it_waits_for_nothing_either():
    model = make("llama")
    done = lln.hf.replace(model, "lln_nearfar", quiet=True, near=4)
    lln.hf.calibrate(model, [{"input_ids": text(4, 30, seed=5)}])
    done.keep_softmax([0])
    done.keep_softmax_heads({1: [1]})
    engine = Engine(model, 2, max_length=40)
    engine.add(prompts()[1], max_new_tokens=20)
    with Watch(), torch.no_grad():
        engine._forward(sampled=False)


def test_the_watch_sees_what_it_must():
    for wrong in (
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: bool(x.any()),
    ):
        with pytest.raises(AssertionError), Watch():
            wrong(torch.ones(2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lln", "lln_diag windows", "lln_nearfar", "lln_nearfar before"])
def test_a_graph_gives_the_tokens_of_the_eager_step_and_of_generate(name):
    model = ready("llama", name).cuda()
    how = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 30, "seed": 5}
    for options in ({}, how):
        streams = {
            graph: Engine(model, 2, graph=graph).generate(prompts(), max_new_tokens=14, **options)
            for graph in (True, False)
        }
        found = [[stream.tokens for stream in streams[graph]] for graph in (True, False)]
        assert found[0] == found[1]
    assert found[0] == [alone(model, prompt.cuda(), 14, **how) for prompt in prompts()]


@pytest.mark.gpu
def test_a_graph_that_is_captured_late_leaves_live_streams_alone():
    """The step that draws is captured when the first stream samples."""
    model = ready("llama", "lln_nearfar").cuda()
    engine = Engine(model, 2)
    greedy = engine.add(prompts()[1], max_new_tokens=14)
    for _ in range(5):
        engine.step()
    engine.add(prompts()[2], max_new_tokens=3, do_sample=True)
    while not greedy.ended:
        engine.step()
    assert greedy.tokens == alone(model, prompts()[1].cuda(), 14)
