"""One update: clipping, AdamW with its settings, decay of matrices only; written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lln_study.train import processes
from lln_study.train.engine import Engine
from tests.lln_study.train.toy import Toy, toy_config


class Normed(Toy):
    """With a norm, whose scale and shift must not decay."""

    def build(self):
        return nn.Sequential(super().build(), nn.LayerNorm(4))


def engine_of(task=Normed, **changes):
    config = toy_config(**changes)
    task = task(config)
    return Engine(processes.join(), task.build(), task, config)


def gradients_of(engine, step):
    """Of the mean loss at the present weights, by autograd alone."""
    batch = engine.task.batch(step, slice(0, engine.config.batch_size))
    total, terms = engine.task.loss(engine.model, batch)
    return torch.autograd.grad(total / terms, list(engine.model.parameters()))


def norm_of(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients]).norm()


def by_hand(engine, steps):
    """The weights after ``steps`` updates of AdamW, eq. for eq., from the engine's settings."""
    config, (beta1, beta2) = engine.config, engine.config.betas
    weights = [parameter.detach().clone() for parameter in engine.model.parameters()]
    first = [torch.zeros_like(weight) for weight in weights]
    second = [torch.zeros_like(weight) for weight in weights]
    for step in range(steps):
        gradients, rate = gradients_of(engine, step), config.rate(step)
        shrink = (config.clip / norm_of(gradients)).clamp(max=1.0) if config.clip else 1.0
        for i, weight in enumerate(weights):
            gradient = gradients[i] * shrink
            first[i] = beta1 * first[i] + (1 - beta1) * gradient
            second[i] = beta2 * second[i] + (1 - beta2) * gradient.square()
            mean = first[i] / (1 - beta1 ** (step + 1))
            square = second[i] / (1 - beta2 ** (step + 1))
            decay = config.weight_decay if weight.dim() == 2 else 0.0
            weight.mul_(1 - rate * decay).sub_(rate * mean / (square.sqrt() + config.epsilon))
        with torch.no_grad():
            for parameter, weight in zip(engine.model.parameters(), weights, strict=True):
                parameter.copy_(weight)
    return weights


SETTINGS = [
    {},
    {"betas": (0.5, 0.7)},
    {"epsilon": 0.1},
    {"weight_decay": 5.0},
    {"weight_decay": 0.0},
    {"clip": 0.0, "epsilon": 0.1},
    {"clip": 0.02, "epsilon": 0.1},  # without an epsilon Adam does not care how long gradients are
    {"schedule": "cosine", "warmup": 1},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_updates_are_those_of_adamw_by_hand(changes):
    expected = by_hand(engine_of(**changes), 4)
    engine = engine_of(**changes)
    for step in range(4):
        engine.update(step)
    for got, weight in zip(engine.model.parameters(), expected, strict=True):
        torch.testing.assert_close(got.detach(), weight, rtol=1e-5, atol=1e-6)


def test_no_two_settings_give_the_same_weights():
    """So that a setting that is ignored is found out above."""
    ends = [torch.cat([x.flatten() for x in by_hand(engine_of(**s), 4)]) for s in SETTINGS]
    for i, one in enumerate(ends):
        assert all((one - other).abs().max() > 1e-4 for other in ends[:i])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_gradients_are_cut_to_the_limit_and_their_norm_is_that_before(clip, precision):
    engine = engine_of(clip=clip, precision=precision)
    if precision == "fp16":  # the first scale of 2**16 is too large for this gradient
        engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 8.0})
    seen = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: seen.append([x.grad.clone() for x in engine.model.parameters()])
    )
    whole = norm_of(gradients_of(engine, 0))
    engine.update(0)
    tolerance = {"rtol": 1e-5 if precision == "fp32" else 0.05, "atol": 0.0}
    torch.testing.assert_close(torch.tensor(engine.gradient_norm()), whole, **tolerance)
    applied = torch.tensor(clip) if clip == 0.01 else whole
    torch.testing.assert_close(norm_of(seen[0]), applied, **tolerance)


def test_every_parameter_is_in_one_group_and_only_matrices_decay():
    engine = engine_of(weight_decay=0.3)
    decay = {id(x): g["weight_decay"] for g in engine.optimizer.param_groups for x in g["params"]}
    for name, parameter in engine.model.named_parameters():
        expected = 0.3 if parameter.dim() > 1 else 0.0
        assert decay.pop(id(parameter)) == expected, name
    assert not decay


def test_frozen_parameters_are_left_to_themselves():
    class Frozen(Normed):
        def build(self):
            model = super().build()
            model[1].requires_grad_(False)
            return model

    engine = engine_of(task=Frozen, weight_decay=0.3)
    before = engine.model[1].weight.clone()
    engine.update(0)
    assert torch.equal(engine.model[1].weight, before)


@pytest.mark.parametrize(
    ("schedule", "falling"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules_after_the_warm_up(schedule, falling):
    config = toy_config(steps=6, warmup=2, learning_rate=3.0, schedule=schedule)
    rates = [config.rate(step) / 3.0 for step in range(6)]
    assert rates == pytest.approx([0.5, 1.0, *falling], rel=1e-5)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *((name, (0, -1)) for name in ("steps", "batch_size", "accumulation", "log_every")),
        *((name, (-1,)) for name in ("warmup", "eval_every", "patience", "save_every", "keep")),
        *((name, (-1,)) for name in ("monitor_every", "clip")),
        ("learning_rate", (0.0, -1.0)),
    ],
)
def test_numbers_that_are_too_small_are_refused(field, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field}={value} is not possible; it must be"):
            toy_config(**{field: value})
    toy_config(**{field: 1})  # the smallest that makes sense everywhere


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_micro_batches_are_parts_of_the_batch(accumulation):
    """A first one that holds all rows has the same gradient, and saves no memory."""
    engine = engine_of(accumulation=accumulation)
    whole, seen = engine.task.batch(0, slice(0, 8))["x"], []

    def loss(model, batch):
        seen.append(batch["x"])
        return engine.task.loss(model, batch)

    engine.update(0, loss)
    assert [len(x) for x in seen] == [8 // accumulation] * accumulation
    assert torch.equal(torch.cat(seen), whole)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_without_terms_changes_nothing_and_breaks_nothing(accumulation):
    """As rows of which no token was masked: a mean over nothing, which is not to be NaN."""

    class Nothing(Normed):
        def loss(self, model, batch):
            total, terms = super().loss(model, batch)
            return 0 * total, 0 * terms

    engine = engine_of(task=Nothing, accumulation=accumulation, weight_decay=0.0)
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]
    engine.update(0)
    assert engine.gradient_norm() == 0 and engine.read_sums() == [0, 0, 0]
    for parameter, weight in zip(engine.model.parameters(), before, strict=True):
        assert torch.equal(parameter, weight)
