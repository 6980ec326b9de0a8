"""Running statistics when a forward pass runs twice: activation checkpointing, compiled or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import lln
from lln.nn import LLNAttention, LLNMultiheadAttention
from lln.nn.averages import REMEMBERED_RUNS
from tests.hf.tiny import make, padded, text
from tests.nn.inputs import embeddings, qkv

Run = Callable[..., Tensor]


def saving(run: Run, **options) -> Run:
    """The same function with activation checkpointing."""
    return lambda *inputs: checkpoint(run, *inputs, **{"use_reentrant": False, **options})


def compiled(run: Run, backend: str = "aot_eager", **options) -> Run:
    torch._dynamo.reset()
    return torch.compile(run, backend=backend, **options)


WAYS = {
    "eager": saving,
    "compiled around": lambda run, **options: compiled(saving(run, **options), fullgraph=True),
    "compiled inside": lambda run, **options: saving(compiled(run, fullgraph=True), **options),
}


def running(**options) -> LLNAttention:
    return LLNAttention(2, 4, statistics="running", **options)


def gradients(run: Run, seeds: list[int]) -> list[Tensor]:
    """Of all inputs, when every run comes before the only backward pass."""
    inputs = [[x.requires_grad_() for x in qkv(2, 2, 9, 4, seed=seed)] for seed in seeds]
    losses = [weight * run(*x).square().sum() for weight, x in enumerate(inputs, start=1)]
    torch.stack(losses).sum().backward()
    return [x.grad for each in inputs for x in each]


def assert_same_training(module: nn.Module, saved: nn.Module, run: Run, *, steps: int = 3) -> None:
    """Equal gradients in every step, equal statistics after them."""
    for step in range(steps):
        expected, got = gradients(module, [step]), gradients(run, [step])
        # generated code takes sums of float32 in another order: a few roundings of small numbers
        torch.testing.assert_close(
            got, expected, rtol=1e-5, atol=3e-5, msg=lambda m, step=step: f"step {step}: {m}"
        )
    assert_same_state(saved, module)


def assert_same_state(module: nn.Module, expected: nn.Module) -> None:
    state = expected.state_dict()
    assert any(name.endswith("batches") for name in state)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state[name], msg=lambda m, name=name: f"{name}: {m}")


def ways(*, slow: tuple[str, ...] = ("compiled around", "compiled inside")):
    """All of them; those that take seconds to compile are marked."""
    return pytest.mark.parametrize(
        "way", [pytest.param(way, marks=[pytest.mark.slow] * (way in slow)) for way in WAYS]
    )


@pytest.mark.slow
@ways(slow=())
def test_causal_training_is_that_without_checkpointing(way):
    core = running(causal=True)
    twin = copy.deepcopy(core)
    assert_same_training(core, twin, WAYS[way](twin))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@ways()
def test_a_batch_counts_once_with_equal_gradients(way, causal, use_reentrant):
    core = running(causal=causal)
    twin = copy.deepcopy(core)
    assert_same_training(core, twin, WAYS[way](twin, use_reentrant=use_reentrant))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["compiled around", "compiled inside"])
def test_generated_code_has_the_gradients(way, causal):
    core = running(causal=causal)
    twin = copy.deepcopy(core)
    generated = partial(compiled, backend="inductor")
    run = generated(saving(twin)) if way == "compiled around" else saving(generated(twin))
    assert_same_training(core, twin, run)


@pytest.mark.slow
def test_compiled_without_checkpointing():
    core = running(causal=True)
    twin = copy.deepcopy(core)
    assert_same_training(core, twin, compiled(twin, backend="inductor"))


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled inside", marks=pytest.mark.slow)])
def test_runs_that_wait_for_one_backward_pass_use_their_own_statistics(way):
    core = running(causal=True)
    twin = copy.deepcopy(core)
    seeds = list(range(5))
    torch.testing.assert_close(gradients(WAYS[way](twin), seeds), gradients(core, seeds))
    assert_same_state(twin, core)


def test_a_run_that_measured_nothing_usable_does_not_confuse_the_others():
    core = running(causal=True)
    twin = copy.deepcopy(core)
    q, k, v = qkv(2, 2, 9, 4, seed=9)
    expected = []
    for module, run in ((core, core), (twin, saving(twin))):
        waiting = [x.requires_grad_() for x in qkv(2, 2, 9, 4)]
        loss = run(*waiting).square().sum()
        module(torch.full_like(q, torch.nan), k, v)
        loss.backward()
        expected.append([x.grad for x in waiting])
    torch.testing.assert_close(expected[1], expected[0])


def test_as_many_runs_as_are_remembered():
    core = running(causal=True)
    twin = copy.deepcopy(core)
    seeds = list(range(REMEMBERED_RUNS))
    torch.testing.assert_close(gradients(saving(twin), seeds), gradients(core, seeds))


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled around", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing(way, policy):
    """Matrix products are saved or computed again, everything else is computed again."""

    def choose(ctx, op, *args, **kwargs):
        product = op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return policy if product else CheckpointPolicy.PREFER_RECOMPUTE

    core = running(causal=True)
    twin = copy.deepcopy(core)
    contexts = partial(create_selective_checkpoint_contexts, choose)
    assert_same_training(core, twin, WAYS[way](twin, context_fn=contexts))


@ways()
def test_training_a_causal_layer_with_accumulated_gradients(way):
    torch.manual_seed(0)
    layer = LLNMultiheadAttention(8, 2, batch_first=True, statistics="running", learn_scale=True)
    twin = copy.deepcopy(layer)

    def attend(module: nn.Module) -> Run:
        return lambda x: module(x, x, x, is_causal=True, need_weights=False)[0]

    for module, run in ((layer, attend(layer)), (twin, WAYS[way](attend(twin)))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            for part in range(2):
                x = embeddings(2, 7, 8, seed=2 * step + part).requires_grad_()
                run(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert layer.attention.statistics.batches == 6
    assert_same_state(twin, layer)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_decoder_that_transformers_checkpoints_and_torch_compiles(use_reentrant):
    found = []
    for how in ("plain", "checkpointed and compiled"):
        model = make("llama").train()
        lln.hf.replace(model, "lln_diag", near=4, statistics="running", quiet=True)
        model.config.use_cache = False
        run = model
        if how != "plain":
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            run = compiled(model)
        for step in range(2):
            batch = padded(text(seed=step), 4, "right")
            run(**batch, labels=batch["input_ids"]).loss.backward()
        found.append((model, [parameter.grad for parameter in model.parameters()]))
    (plain, expected), (saved, got) = found
    assert_same_state(saved, plain)
    for exact, again in zip(expected, got, strict=True):
        torch.testing.assert_close(again, exact)
