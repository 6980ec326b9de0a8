"""Running statistics: the average by hand, what reads it, and what must leave it alone."""

from __future__ import annotations

import copy

import pytest
import torch

from lln import moments
from lln.nn import LLNAttention, averages
from lln.ops import reference
from tests.nn.inputs import padding, qkv


def running(**options) -> LLNAttention:
    return LLNAttention(2, 4, statistics="running", **options)


def batch_variances(q, k, valid=None):
    """σ_q² and σ_k² per head: variance inside each sample, averaged by its number of tokens."""
    rows = []
    for x in (q, k):
        valid = torch.ones(x.shape[0], x.shape[2], dtype=torch.bool) if valid is None else valid
        total = sum(
            x[b][:, m].var((1, 2), correction=0) * m.sum() for b, m in enumerate(valid) if m.any()
        )
        rows.append(total / valid.sum())
    return torch.stack(rows)


def test_buffers_follow_the_average_by_hand():
    core = running()
    lengths = [[9, 4], [3, 9], [9, 9], [1, 0], [5, 6]] * 3  # a plain mean of the first ten
    expected = torch.ones(2, 2)
    for step, length in enumerate(lengths, start=1):
        q, k, v = qkv(2, 2, 9, 4, seed=step)
        valid = padding(length, 9)
        core(q * step, k, v, valid, valid)
        expected += max(0.1, 1 / step) * (batch_variances(q * step, k, valid) - expected)
        torch.testing.assert_close(core.statistics.variances, expected)
    assert core.statistics.batches == len(lengths)


def test_training_uses_the_batch_and_evaluation_the_buffers():
    q, k, v = qkv(2, 2, 9, 4, dtype=torch.float64)
    core = running()
    core(*qkv(2, 2, 9, 4, seed=1))

    def expected(variances):
        alpha, beta = moments.match_moments(*variances.double().sqrt(), 4)
        scales = {"alpha": alpha.expand(2, -1), "beta": beta.expand(2, -1)}
        return reference.bidirectional(q, k, v, **scales)

    before = core.statistics.variances.clone()
    torch.testing.assert_close(core(q, k, v), expected(batch_variances(q, k)))
    assert not torch.equal(core.statistics.variances, before)

    core.eval()
    frozen = core.statistics.variances.clone()
    close = {"rtol": 1e-6, "atol": 1e-6}  # stored variances are matched in float32
    torch.testing.assert_close(core(q, k, v), expected(frozen), **close)
    assert torch.equal(core.statistics.variances, frozen)
    assert core.statistics.batches == 2


def test_evaluation_does_not_depend_on_the_batch():
    q, k, v = qkv(4, 2, 9, 4)
    core = running(near=4)
    core(q, k, v)
    core.eval()
    alone = torch.cat([core(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(4)])
    torch.testing.assert_close(core(q, k, v), alone)
    loud = core(torch.cat([q[:1], 9 * q[1:]]), torch.cat([k[:1], 9 * k[1:]]), v)
    torch.testing.assert_close(loud[:1], alone[:1])


def test_causal_training_reads_earlier_batches_only():
    q, k, v = qkv(2, 2, 9, 4)
    core = running(causal=True)
    core(*qkv(2, 2, 9, 4, seed=1))
    twin = copy.deepcopy(core)
    stored = core.statistics.variances.clone()
    alpha, beta = moments.match_moments(*stored.sqrt(), 4)
    given = LLNAttention(2, 4, causal=True, statistics="fixed", alpha=alpha, beta=beta)
    out = core(q, k, v)
    torch.testing.assert_close(out, given(q, k, v))
    assert not torch.equal(core.statistics.variances, stored)

    future = [torch.cat([x[:, :, :5], 7 * x[:, :, 5:]], dim=2) for x in (q, k, v)]
    torch.testing.assert_close(twin(*future)[:, :, :5], out[:, :, :5])


@pytest.mark.parametrize("spoil", [torch.nan, torch.inf])
def test_a_spoiled_or_empty_batch_leaves_the_buffers_alone(spoil):
    q, k, v = qkv(2, 2, 9, 4)
    core = running()
    core(q, k, v)
    before = copy.deepcopy(core.state_dict())
    bad = q.clone()
    bad[0, 0, 0, 0] = spoil
    out = core(bad, k, v)
    assert out[1].isfinite().all() and out[:, 1].isfinite().all()
    empty = torch.zeros(2, 9, dtype=torch.bool)
    assert (core(q, k, v, empty, empty) == 0).all()
    for name, value in core.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_calibrate_sets_the_buffers():
    q, k, v = qkv(2, 2, 9, 4)
    core = running(causal=True).calibrate_(q, k)
    torch.testing.assert_close(core.statistics.variances, batch_variances(q, k))
    assert core.statistics.batches == 1
    core(3 * q, k, v)  # the second batch counts one half
    expected = (batch_variances(q, k) + batch_variances(3 * q, k)) / 2
    torch.testing.assert_close(core.statistics.variances, expected)


def test_half_precision_module_keeps_averaging():
    core = running().to(torch.bfloat16)
    for seed in range(200):
        q, k, v = qkv(1, 2, 3, 4, seed=seed, dtype=torch.bfloat16)
        core(q, k, v)
    expected = torch.tensor([0.5, 1.5]).square()  # the scales of the two heads
    torch.testing.assert_close(core.statistics.variances[1], expected, rtol=0.15, atol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_averages_of_fake_tensors_look_like_those_of_real_ones(is_causal):
    """The batch may be measured in more digits than are stored."""
    stored = torch.ones(2, 3), torch.zeros((), dtype=torch.long), torch.ones(4, 2, 2, 3)
    given = torch.ones(2, 3, dtype=torch.float64), *stored
    real = averages.follow(*given, is_causal)
    fake = averages.follow(*(x.to("meta") for x in given), is_causal)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("options", [{}, {"causal": True, "center_keys": True}], ids=str)
def test_reset_it_begins_again(options):
    used, fresh = running(**options), running(**options)
    for step in range(12):
        used(*qkv(2, 2, 9, 4, seed=step))
    used.reset_parameters()
    for step in range(12, 24):
        assert used(*qkv(2, 2, 9, 4, seed=step)).equal(fresh(*qkv(2, 2, 9, 4, seed=step)))
    for name, value in fresh.named_buffers():
        assert value.equal(used.get_buffer(name)), name
