"""measure(): the matrix-free numbers equal those of the matrix, whatever the kernel and mask."""

from __future__ import annotations

import math

import pytest
import torch

from lln import instruments
from lln.instruments import KERNELS, MEASURES, Concentration, measure
from lln.ops import reference
from tests.instruments.matrices import gaussian

MATRIX_MEASURES = [name for name in MEASURES if name not in ("entropy_se", "temperature")]


def kernel_matrix(q, k, kernel, *, alpha=1.0, beta=1.0, normalize_keys=False):
    """P [B, H, N, M] by definition."""
    scores = q @ k.transpose(-1, -2)
    if kernel == "softmax":
        return (scores / math.sqrt(q.shape[-1])).softmax(-1)
    if kernel == "lln":
        log_k = torch.log_softmax(beta * k, -1) if normalize_keys else beta * k
        scales = {"alpha": q.new_full(q.shape[:2], alpha), "beta": k.new_ones(k.shape[:2])}
        return reference.lln_matrix(q, log_k, **scales)
    features = {"relu_linear": torch.relu, "quadratic_linear": torch.square}
    features["elu"] = lambda x: torch.nn.functional.elu(x) + 1
    if kernel in features:
        phi = features[kernel]
        weights = phi(q) @ phi(k).transpose(-1, -2)
    else:
        weights = {"relu": torch.relu, "quadratic": torch.square}[kernel](scores)
    return weights / weights.sum(-1, keepdim=True)


def assert_equals_matrix(found: Concentration, p: torch.Tensor, tolerance: float = 1e-8):
    for name in MATRIX_MEASURES:
        expected = getattr(instruments, name)(p)
        got = getattr(found, name)
        assert torch.allclose(got, expected, rtol=0, atol=tolerance), (name, got, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_the_matrix(kernel):
    q, k = gaussian(40, 8, heads=2)
    scales = {"alpha": 1.7, "beta": 1.4} if kernel == "lln" else {}
    found = measure(q, k, kernel=kernel, **scales)
    assert_equals_matrix(found, kernel_matrix(q, k, kernel, **scales))
    assert (found.entropy_se == 0).all()
    assert found.kernel == kernel and found.note == ""


@pytest.mark.parametrize("normalize_keys", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_linear_time_numbers_of_lln_are_exact(tokens, normalize_keys):
    """Dense against linear-time to 1e-8 in float64, fewer tokens than features included."""
    q, k = gaussian(tokens, 16)
    scales = {"alpha": 2.3, "beta": 2.1, "normalize_keys": normalize_keys}
    found = measure(q, k, kernel="lln", **scales)
    assert_equals_matrix(found, kernel_matrix(q, k, "lln", **scales))


def test_blocks_and_arnoldi_equal_the_matrix(monkeypatch):
    """The path of long sequences, forced on a short one."""
    monkeypatch.setattr("lln.instruments.heads.DENSE_LIMIT", 100)
    monkeypatch.setattr("lln.instruments.heads.BLOCK_ENTRIES", 30 * 260)
    q, k = gaussian(260, 8, temperature=0.6)
    for kernel in ("softmax", "quadratic"):
        found = measure(q, k, kernel=kernel)
        assert_equals_matrix(found, kernel_matrix(q, k, kernel), tolerance=2e-5)


def test_float32_inputs():
    q, k = gaussian(64, 16, heads=2, dtype=torch.float32)
    found = measure(q, k)
    assert found.entropy.dtype == torch.float32
    assert_equals_matrix(found, kernel_matrix(q.double(), k.double(), "softmax").float(), 1e-5)


def test_key_mask_equals_leaving_tokens_out():
    q, k = (x.expand(2, -1, -1, -1).clone() for x in gaussian(20, 8, heads=2))
    key_mask = torch.ones(2, 20, dtype=torch.bool)
    key_mask[1, 3:9] = False
    q[1, :, 3:9], k[1, :, 3:9] = torch.nan, torch.nan
    for kernel in ("softmax", "lln"):
        scales = {"alpha": 2.0, "beta": 2.0} if kernel == "lln" else {}
        found = measure(q, k, kernel=kernel, key_mask=key_mask, **scales)
        kept = key_mask[1]
        whole = kernel_matrix(q[:1], k[:1], kernel, **scales)
        part = kernel_matrix(q[1:, :, kept], k[1:, :, kept], kernel, **scales)
        for name in MATRIX_MEASURES:
            function = getattr(instruments, name)
            expected = torch.cat([function(whole), function(part)])
            assert torch.allclose(getattr(found, name), expected, atol=1e-8), name


def test_sample_without_visible_token_is_nan():
    q, k = (x.expand(2, -1, -1, -1) for x in gaussian(6, 4))
    key_mask = torch.tensor([[True] * 6, [False] * 6])
    found = measure(q, k, key_mask=key_mask)
    for name in MEASURES:
        value = getattr(found, name)
        assert value[0].isfinite().all() and value[1].isnan().all(), name


def test_grouped_heads_read_their_key_head():
    q, _ = gaussian(12, 4, heads=4)
    _, k = gaussian(12, 4, heads=2)
    found = measure(q, k)
    expected = measure(q, k.repeat_interleave(2, dim=1))
    for name in MEASURES:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_cross_attention_has_no_gap():
    q, _ = gaussian(10, 4)
    _, k = gaussian(15, 4)
    found = measure(q, k)
    p = kernel_matrix(q, k, "softmax")
    assert found.spectral_gap.isnan().all()
    assert torch.allclose(found.entropy, instruments.entropy(p))
    assert torch.allclose(found.centred_singular_value, instruments.centred_singular_value(p))


@pytest.mark.parametrize("kernel", ["softmax", "lln", "relu_linear"])
def test_causal(kernel):
    q, k = gaussian(30, 8)
    scales = {"alpha": 2.0, "beta": 2.0} if kernel == "lln" else {}
    p = kernel_matrix(q, k, kernel, **scales).tril()
    p = p / p.sum(-1, keepdim=True)
    found = measure(q, k, kernel=kernel, is_causal=True, **scales)
    with pytest.warns(instruments.CausalMatrixWarning):
        assert_equals_matrix(found, p)
    assert "its eigenvalues are its diagonal" in found.note


def test_sampled_rows_estimate_the_entropy_with_its_error():
    q, k = gaussian(400, 16, heads=8)
    exact = measure(q, k, kernel="lln", alpha=2.0, beta=2.0, measures=["entropy"])
    found = measure(q, k, kernel="lln", alpha=2.0, beta=2.0, rows=50)
    deviation = (found.entropy - exact.entropy) / found.entropy_se
    assert (found.entropy_se > 0).all()
    assert 0.3 < deviation.square().mean().sqrt().item() < 2
    assert measure(q, k, rows=1000).entropy_se.eq(0).all()


def test_only_the_wanted_measures_are_taken():
    q, k = gaussian(10, 4)
    found = measure(q, k, measures=("spectral_gap",))
    assert found.spectral_gap.isfinite().all()
    assert all(getattr(found, name).isnan().all() for name in MEASURES if name != "spectral_gap")


def test_alpha_and_beta_are_matched_when_left_out():
    from lln import moments

    q, k = gaussian(64, 16, heads=2)
    alpha, beta = moments.measure_scales(q, k)
    found = measure(q, k, kernel="lln")
    expected = measure(q, k, kernel="lln", alpha=alpha, beta=beta)
    assert torch.equal(found.entropy, expected.entropy)


def test_temperature_is_measured():
    q, k = gaussian(200, 16, temperature=0.5)
    scores = (q @ k.transpose(-1, -2) / 4).flatten()
    assert measure(q, k).temperature.item() == pytest.approx(scores.std(correction=0).item() ** -1)
    lln = measure(q, k, kernel="lln", alpha=2.0, beta=2.0)
    assert torch.allclose(lln.temperature, lln.log_variance.rsqrt())


def test_kernel_that_vanishes_for_a_query():
    """No feature of the first query is positive: its row is the limit of φ + ε."""
    q, k = gaussian(6, 4)
    q[..., 0, :] = -1
    found = measure(q, k, kernel="relu_linear")
    small = 1e-9
    weights = (torch.relu(q) + small) @ torch.relu(k).transpose(-1, -2)
    p = weights / weights.sum(-1, keepdim=True)
    assert torch.allclose(found.spectral_gap, instruments.spectral_gap(p), atol=1e-6)
    k[...] = -1
    found = measure(q, k, kernel="relu_linear")
    assert torch.allclose(found.entropy, torch.full_like(found.entropy, math.log2(6)))
    q[...] = 1
    found = measure(q, k, kernel="relu")
    assert torch.allclose(found.entropy, torch.full_like(found.entropy, math.log2(6)))


def test_extreme_inputs_stay_finite():
    q, k = gaussian(50, 8)
    for kernel in ("softmax", "lln"):
        scales = {"alpha": 1.0, "beta": 1.0} if kernel == "lln" else {}
        found = measure(50 * q, 50 * k, kernel=kernel, **scales)
        assert all(getattr(found, name).isfinite().all() for name in MEASURES), kernel


def bad_calls():
    q, k = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    masked = torch.tensor([[True] * 5 + [False]])
    return {
        "kernel": ((q, k), {"kernel": "cosine"}, "kernel='cosine' is unknown; choose one of soft"),
        "shape": ((q[0], k), {}, "q has shape"),
        "width": ((q, k[..., :3]), {}, "width"),
        "heads": ((q, torch.randn(1, 3, 6, 4)), {}, "multiple"),
        "empty": ((q[:, :, :0], k[:, :, :0]), {}, "nothing to measure"),
        "nan": ((q * torch.nan, k), {}, "q has a value that is not finite"),
        "alpha": ((q, k), {"alpha": 2.0}, "leave them out, or pass kernel='lln'"),
        "alone": ((q, k), {"kernel": "lln", "alpha": 2.0}, "beta=None; pass both"),
        "rows": ((q, k), {"rows": 0}, "rows=0"),
        "measures": ((q, k), {"measures": ["gap"]}, "measures has .'gap'.; choose from entropy"),
        "mask": ((q, k), {"key_mask": torch.ones(1, 5).bool()}, "key_mask has shape"),
        "causal": ((q, k), {"is_causal": True, "query_mask": masked}, "alignment"),
    }


@pytest.mark.parametrize("case", bad_calls())
def test_bad_calls_are_explained(case):
    arguments, options, message = bad_calls()[case]
    with pytest.raises(ValueError, match=message):
        measure(*arguments, **options)


def test_concentration_is_frozen():
    found = measure(*gaussian(4, 4))
    with pytest.raises(AttributeError):
        found.entropy = None  # pyright: ignore
