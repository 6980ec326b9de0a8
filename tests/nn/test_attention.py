"""LLNAttention against the O(N²) reference, and what its options promise."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from lln import Near, moments
from lln.nn import RECOMMENDED, LLNAttention
from lln.ops import reference
from tests.generated import check_generated_code
from tests.nn.inputs import padding, qkv


@pytest.mark.parametrize("normalize_keys", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sample_statistics_match_the_reference(kv_heads, normalize_keys):
    q, k, v = qkv(2, 4, 13, 8, kv_heads=kv_heads, dtype=torch.float64)
    key_mask, query_mask = padding([13, 9], 13), padding([13, 5], 13)
    core = LLNAttention(4, 8, num_kv_heads=kv_heads, normalize_keys=normalize_keys)
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    alpha, beta = moments.measure_scales(q, k, normalize_keys=normalize_keys, **masks)
    if normalize_keys:
        k_far, beta = torch.log_softmax(beta[..., None, None] * k, -1), torch.ones_like(beta)
    else:
        k_far = k
    expected = reference.bidirectional(q, k_far, v, alpha=alpha, beta=beta, key_mask=key_mask)
    torch.testing.assert_close(core(q, k, v, **masks), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_fixed_scales_with_diagonal_branch_match_the_reference(causal, scale):
    q, k, v = qkv(2, 3, 11, 4, dtype=torch.float64)
    key_mask = padding([11, 7], 11)
    alpha, beta = [1.0, 2.0, 3.0], [0.5, 1.0, 1.5]
    core = LLNAttention(
        3, 4, causal=causal, near=Near(4, scale=scale), statistics="fixed", alpha=alpha, beta=beta
    )
    expected = reference.lln_diag(
        q,
        k,
        v,
        alpha=torch.tensor(alpha, dtype=q.dtype).expand(2, -1),
        beta=torch.tensor(beta, dtype=q.dtype).expand(2, -1),
        block=4,
        scale=0.5 if scale is None else scale,
        key_mask=key_mask,
        is_causal=causal,
    )
    torch.testing.assert_close(core(q, k, v, key_mask), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"near": 4, "mix": "learned"}])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_times_values_are_the_output(options, causal):
    q, k, v = qkv(2, 4, 9, 8, kv_heads=2, dtype=torch.float64)
    key_mask = padding([9, 4], 9)
    core = LLNAttention(4, 8, num_kv_heads=2, causal=causal, statistics="fixed", **options).eval()
    if core.mix_logit is not None:
        torch.nn.init.normal_(core.mix_logit)
    weights = core.attention_matrix(q, k, key_mask)
    expected = core(q, k, v, key_mask)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, dim=1), expected)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(4, 9, dtype=torch.float64))
    assert (weights[1, :, :, 4:] == 0).all()
    assert not causal or (weights.triu(1) == 0).all()


def test_sample_output_does_not_depend_on_the_batch():
    q, k, v = qkv(3, 2, 10, 4)
    core = LLNAttention(2, 4, near=4)
    loud = [torch.cat([x[:1], 5 * x[1:]]) for x in (q, k, v)]
    torch.testing.assert_close(core(*loud)[:1], core(q[:1], k[:1], v[:1]))


@pytest.mark.parametrize("statistics", ["sample", "running", "fixed"])
def test_padding_content_changes_nothing(statistics):
    q, k, v = qkv(2, 2, 12, 4)
    valid = padding([12, 7], 12)
    core = LLNAttention(2, 4, statistics=statistics, near=4)
    junk = [x.masked_fill(~valid[:, None, :, None], torch.nan) for x in (q, k, v)]
    clean, dirty = core(q, k, v, valid, valid), core(*junk, valid, valid)
    torch.testing.assert_close(clean[0], dirty[0])
    torch.testing.assert_close(clean[1, :, :7], dirty[1, :, :7])


def test_fully_masked_sample_gives_zero_and_finite_gradients():
    q, k, v = (x.requires_grad_() for x in qkv(2, 2, 6, 4))
    valid = padding([6, 0], 6)
    out = LLNAttention(2, 4, near=4)(q, k, v, valid, valid)
    out.square().sum().backward()
    assert (out[1] == 0).all() and out[0].abs().min() > 0
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_learned_scale_starts_neutral_and_learns():
    q, k, v = qkv(2, 4, 9, 8, kv_heads=2, dtype=torch.float64)
    plain = LLNAttention(4, 8, num_kv_heads=2)
    core = LLNAttention(4, 8, num_kv_heads=2, learn_scale=True).double()
    torch.testing.assert_close(core(q, k, v), plain(q, k, v))

    core(q, k, v).square().sum().backward()
    step = 1e-5
    for name in ("log_alpha", "log_beta"):
        parameter = getattr(core, name)
        for head in range(parameter.numel()):
            losses = []
            for sign in (step, -step):
                moved = copy.deepcopy(core)
                with torch.no_grad():
                    getattr(moved, name)[head] += sign
                losses.append(moved(q, k, v).square().sum())
            slope = (losses[0] - losses[1]) / (2 * step)
            torch.testing.assert_close(parameter.grad[head], slope.detach(), rtol=1e-5, atol=1e-8)


def test_learned_mix_is_a_sigmoid_per_head():
    q, k, v = qkv(2, 3, 9, 4, dtype=torch.float64)
    core = LLNAttention(3, 4, near=4, mix="learned").double()
    average = LLNAttention(3, 4, near=4)(q, k, v)
    torch.testing.assert_close(core(q, k, v), average)

    with torch.no_grad():
        core.mix_logit.copy_(torch.tensor([-40.0, 0.0, 40.0]))
    out = core(q, k, v)
    linear = LLNAttention(3, 4)(q, k, v)
    torch.testing.assert_close(out[:, 0], 2 * average[:, 0] - linear[:, 0])
    torch.testing.assert_close(out[:, 1], average[:, 1])
    torch.testing.assert_close(out[:, 2], linear[:, 2])

    with torch.no_grad():
        core.mix_logit.zero_()
    loss = core(q, k, v).square().sum()
    loss.backward()
    local = 2 * average - linear
    slope = (2 * average * (linear - local)).sum((0, 2, 3)) / 4  # sigmoid' = 1/4 at zero
    torch.testing.assert_close(core.mix_logit.grad, slope)


def test_calibrate_sets_fixed_scales_from_valid_tokens():
    q, k, _ = qkv(2, 4, 50, 8, kv_heads=2)
    valid = padding([50, 20], 50)
    core = LLNAttention(4, 8, num_kv_heads=2, causal=True, statistics="fixed")
    junk = [x.masked_fill(~valid[:, None, :, None], 1e4) for x in (q, k)]
    assert core.calibrate_(*junk, valid, valid) is core

    def pooled(x, heads):
        samples = zip(x, valid, strict=True)
        variances = [(s[heads][:, m].var(correction=0) * m.sum()) for s, m in samples]
        return sum(variances) / valid.sum()

    for head in range(2):
        sigma_q = pooled(q, slice(2 * head, 2 * head + 2)).sqrt()
        sigma_k = pooled(k, slice(head, head + 1)).sqrt()
        alpha, beta = moments.match_moments(sigma_q, sigma_k, 8)
        torch.testing.assert_close(core.statistics.alpha[2 * head : 2 * head + 2], alpha.expand(2))
        torch.testing.assert_close(core.statistics.beta[head], beta)


def test_uncalibrated_fixed_and_running_assume_unit_deviations():
    q, k, v = qkv(1, 2, 9, 8)
    alpha, beta = moments.match_moments(1.0, 1.0, 8)
    given = LLNAttention(2, 8, statistics="fixed", alpha=alpha, beta=beta)(q, k, v)
    for statistics in ("fixed", "running"):
        core = LLNAttention(2, 8, statistics=statistics).eval()
        torch.testing.assert_close(core(q, k, v), given)


@pytest.mark.parametrize("statistics", ["sample", "running", "fixed"])
def test_state_dict_and_deepcopy_keep_the_output(statistics):
    q, k, v = qkv(2, 2, 9, 4)
    options = {"statistics": statistics, "near": 4, "mix": "learned", "learn_scale": True}
    core = LLNAttention(2, 4, **options)
    for parameter in core.parameters():
        torch.nn.init.normal_(parameter)
    if statistics != "sample":
        core.calibrate_(3 * q, 2 * k)
    core.eval()
    file = io.BytesIO()
    torch.save(core.state_dict(), file)
    file.seek(0)
    other = LLNAttention(2, 4, **options).eval()
    assert not torch.equal(other(q, k, v), core(q, k, v))
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(q, k, v), core(q, k, v))
    assert torch.equal(copy.deepcopy(core)(q, k, v), core(q, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_statistics_in_float32(dtype):
    q, k, v = qkv(2, 2, 33, 16)
    core = LLNAttention(2, 16, statistics="fixed", alpha=2.123456, beta=1.98765).to(dtype)
    assert core.statistics.alpha.dtype == torch.float32
    assert core.statistics.alpha[0].item() == pytest.approx(2.123456, rel=1e-6)
    out = core(*(x.to(dtype) for x in (q, k, v)))
    assert out.dtype == dtype
    error = (out.float() - core(q, k, v)).abs().max()
    assert error < 4 * torch.finfo(dtype).eps * v.abs().max()


def test_runs_under_autocast():
    q, k, v = (x.requires_grad_() for x in qkv(2, 2, 33, 16))
    core = LLNAttention(2, 16, near=8, mix="learned", learn_scale=True, dropout=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = core(q, k, v)
    out.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, *core.parameters()))
    core.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = core(q, k, v)
    assert (half.float() - core(q, k, v)).abs().max() < 0.05


def test_reset_given_scales_are_those_of_the_start():
    core = LLNAttention(2, 4, statistics="fixed", alpha=[1.5, 2.0], beta=3.0)
    core.calibrate_(*(9 * torch.randn(2, 2, 5, 4) for _ in range(2)))
    assert core.statistics.alpha.tolist() != [1.5, 2.0]
    core.reset_parameters()
    assert (core.statistics.alpha.tolist(), core.statistics.beta.tolist()) == (
        [1.5, 2.0],
        [3.0] * 2,
    )


def test_repr_shows_what_differs_from_the_defaults():
    text = repr(LLNAttention(4, 8, statistics="running", near=16, dropout=0.1))
    assert "4, 8, near=16, dropout=0.1" in text
    assert "mix" not in text and "conv" not in text and "scale" not in text
    assert "scale=0.2" in repr(LLNAttention(4, 8, near=Near(16, scale=0.2)))
    assert LLNAttention(4, 8).extra_repr() == "4, 8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistics": "batch"}, "statistics='batch'.*sample, running, fixed"),
        ({"mix": "max", "near": 4}, "mix='max'.*average, learned"),
        ({"method": "guess"}, "method='guess'"),
        ({"causal": True}, "causal.*running.*fixed"),
        ({"num_kv_heads": 3}, "num_heads=4.*num_kv_heads=3"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"mix": "learned"}, "give near"),
        ({"near": 0}, "block=0"),
        ({"alpha": 2.0, "beta": 2.0}, "statistics='fixed'"),
        ({"alpha": 2.0, "statistics": "fixed"}, "both or neither"),
        ({"alpha": -1.0, "beta": 2.0, "statistics": "fixed"}, "alpha=-1.0.*not negative"),
        ({"alpha": [1.0, 2.0], "beta": 2.0, "statistics": "fixed"}, r"alpha has shape \[2\]"),
        ({"alpha": 1.0, "beta": float("nan"), "statistics": "fixed"}, "beta=nan"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLNAttention(4, 8, **options)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="diag_blok"):
        LLNAttention(4, 8, diag_blok=4)


def test_bad_inputs_are_refused():
    q, k, v = qkv(2, 4, 9, 8)
    core = LLNAttention(4, 8)
    with pytest.raises(ValueError, match=r"q has shape \[2, 9, 4, 8\].*heads before tokens"):
        core(q.transpose(1, 2), k, v)
    with pytest.raises(ValueError, match=r"k has shape \[2, 2, 9, 8\]"):
        core(q, k[:, :2], v[:, :2])
    with pytest.raises((ValueError, TypeError), match="key_mask"):
        core(q, k, v, key_mask=torch.ones(2, 9))
    with pytest.raises(ValueError, match="key_mask"):
        core(q, k, v, key_mask=torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="query_mask"):
        core(q, k, v, query_mask=torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="v"):
        core(q, k, v[:, :, :5])
    with pytest.raises(ValueError, match="stores nothing"):
        core.calibrate_(q, k)
    empty = torch.zeros(2, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match="no valid token"):
        LLNAttention(4, 8, statistics="fixed").calibrate_(q, k, empty, empty)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"near": 8, "mix": "learned", "learn_scale": True},
        pytest.param({"statistics": "running", "dropout": 0.1}, marks=pytest.mark.slow),
        pytest.param(
            {"statistics": "running", "causal": True, "near": 8},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_compiles_to_one_graph(options):
    q, k, v = (x.requires_grad_() for x in qkv(2, 2, 24, 8))
    valid = padding([24, 11], 24)
    torch._dynamo.reset()
    core = LLNAttention(2, 8, **options)
    compiled = torch.compile(copy.deepcopy(core), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(q, k, v, valid, valid).sum().backward()
        core(q, k, v, valid, valid)
    state, expected = compiled.state_dict(), core.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[f"_orig_mod.{name}"], value)
    core.eval(), compiled.eval()
    torch.testing.assert_close(compiled(q, k, v, valid, valid), core(q, k, v, valid, valid))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        RECOMMENDED,
        {"causal": True, "near": 32, "conv": 33, "alpha": 2.0, "beta": 2.0},
    ],
)
def test_generated_code_has_the_gradients(options):
    """More tokens than a block and a filter: windows of neighbours are where compilers err."""
    fixed = {"statistics": "fixed"} if "alpha" in options else {}
    core = LLNAttention(2, 16, **options, **fixed)
    torch.nn.init.normal_(core.conv_weight)
    check_generated_code(core, *qkv(2, 2, 200, 16), tolerance=1e-5)
