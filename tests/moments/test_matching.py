"""match_moments: reference values, the equation, kinds of input, degenerate statistics."""

from __future__ import annotations

import math

import pytest
import torch

from lln.moments import PAPER, MomentFit, match_moments

METHODS = ("paper", "variance", "entropy")
OWN = MomentFit(0.2, -0.4, source="a test")
EVERY = [(method, False) for method in (*METHODS, OWN)] + [(method, True) for method in METHODS]


def sigma2_of(y: float, head_dim: int, **options) -> float:
    """σ̃² that match_moments takes for the target y."""
    sigma_q, sigma_k = 1.7, math.sqrt(y) / 1.7
    alpha, beta = match_moments(sigma_q, sigma_k, head_dim, **options)
    assert alpha * sigma_q == pytest.approx(beta * sigma_k, rel=1e-12)
    return (alpha * sigma_q) ** 2 + (beta * sigma_k) ** 2


@pytest.mark.parametrize(
    ("head_dim", "values"),
    [
        (16, (2.7104, 7.0374, 21.205)),
        (64, (4.5031, 10.2872, 28.773)),
        (128, (5.5105, 12.0171, 32.705)),
    ],
)
def test_variance_reference_values(head_dim, values):
    for y, expected in zip((0.25, 1, 4), values, strict=True):
        assert sigma2_of(y, head_dim, method="variance") == pytest.approx(expected, rel=1e-4)


def test_entropy_reference_values():
    expected = {0.25: 3.786, 0.5: 5.114, 1: 6.983, 2: 9.761, 4: 14.185, 8: 21.893}
    for y, sigma2 in expected.items():  # given to three decimals
        assert sigma2_of(y, 64, method="entropy") == pytest.approx(sigma2, rel=1e-4, abs=5e-4)


@pytest.mark.parametrize("head_dim", [1, 16, 64, 5000])
def test_paper_is_equation_10_for_any_head_size(head_dim):
    sigma_q, sigma_k = 0.8, 1.3
    alpha, beta = match_moments(sigma_q, sigma_k, head_dim)
    sigma2 = (sigma_q**2 * sigma_k**2 + 0.35487039130661086) / 0.14855178144710912
    assert alpha == pytest.approx(math.sqrt(sigma2 / 2) / sigma_q, rel=1e-12)
    assert beta == pytest.approx(math.sqrt(sigma2 / 2) / sigma_k, rel=1e-12)


def test_own_line_is_used():
    fitted = match_moments(0.8, 1.3, 64, method=OWN)
    assert fitted[0] == pytest.approx(math.sqrt((0.8**2 * 1.3**2 + 0.4) / 0.2 / 2) / 0.8, rel=1e-12)
    assert match_moments(0.8, 1.3, 64, method=PAPER) == match_moments(0.8, 1.3, 64)


def test_paper_gives_the_scales_the_paper_reports():
    alpha, beta = match_moments(1.0, 1.0, 64)
    assert 2 < alpha == beta < 2.2  # A.8.5


@pytest.mark.parametrize(("method", "normalize_keys"), EVERY)
def test_score_variance_replaces_the_product(method, normalize_keys):
    options = {"method": method, "normalize_keys": normalize_keys}
    product = match_moments(0.8, 1.3, 32, **options)
    same = match_moments(0.8, 1.3, 32, score_variance=0.8**2 * 1.3**2, **options)
    assert same == pytest.approx(product, rel=1e-12)
    more = match_moments(0.8, 1.3, 32, score_variance=2.0, **options)
    assert more[0] / product[0] == pytest.approx(more[1] / product[1], rel=1e-12)
    assert more[0] > product[0]


@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize(("method", "normalize_keys"), EVERY)
def test_numbers_and_tensors_agree(method, normalize_keys, head_dim):
    options = {"method": method, "normalize_keys": normalize_keys}
    sigma_q = torch.tensor([0.01, 0.3, 1.0, 2.5, 30.0])
    sigma_k = torch.tensor([[0.5], [1.1]])
    alpha, beta = match_moments(sigma_q, sigma_k, head_dim, **options)
    assert alpha.shape == beta.shape == (2, 5)
    assert alpha.dtype == beta.dtype == torch.float32
    for i in range(2):
        for j in range(5):
            expected = match_moments(sigma_q[j].item(), sigma_k[i, 0].item(), head_dim, **options)
            assert isinstance(expected[0], float) and isinstance(expected[1], float)
            assert alpha[i, j].item() == pytest.approx(expected[0], rel=1e-5)
            assert beta[i, j].item() == pytest.approx(expected[1], rel=1e-5)


def test_numbers_mix_with_tensors():
    sigma = torch.tensor([0.5, 1.0], dtype=torch.float64)
    both = match_moments(sigma, torch.tensor(1.2, dtype=torch.float64), 64)
    for mixed in (match_moments(sigma, 1.2, 64), match_moments(sigma, 1.2, 64, method=PAPER)):
        torch.testing.assert_close(mixed, both)
    alpha, beta = match_moments(1, 2, 64)  # ints are numbers
    assert (alpha, beta) == match_moments(1.0, 2.0, 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_dtype_is_kept_and_half_is_computed_in_float32(dtype, method):
    sigma = torch.tensor([0.02, 0.5, 1.0, 3.0]).to(dtype)
    alpha, beta = match_moments(sigma, sigma, 64, method=method)
    assert alpha.dtype == beta.dtype == dtype
    exact, _ = match_moments(sigma.double(), sigma.double(), 64, method=method)
    tolerance = max(2 * torch.finfo(dtype).eps, 5e-6 if dtype != torch.float64 else 0)
    torch.testing.assert_close(alpha.double(), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize(("method", "normalize_keys"), EVERY)
def test_monotone_in_the_target(method, normalize_keys):
    y = torch.logspace(-14, 8, 3000, dtype=torch.float64)
    options = {"method": method, "normalize_keys": normalize_keys}
    alpha, _ = match_moments(1.0, torch.ones_like(y), 64, score_variance=y, **options)
    assert (alpha.diff() >= 0).all()
    assert (alpha[y > 1e-4].diff() > 0).all()


@pytest.mark.parametrize("method", ["variance", "entropy"])
def test_small_inputs_keep_alpha_finite(method):
    """σ̃² → 2D σ_q²σ_k², so alpha → √D σ_k; the published line sends it to infinity."""
    for sigma in (1e-2, 1e-3):
        alpha, beta = match_moments(sigma, 2 * sigma, 64, method=method)
        assert alpha == pytest.approx(8 * 2 * sigma, rel=1e-2)
        assert beta == pytest.approx(8 * sigma, rel=1e-2)
        assert match_moments(sigma, 2 * sigma, 64)[0] > 1 / sigma


@pytest.mark.parametrize(("method", "normalize_keys"), EVERY)
@pytest.mark.parametrize(
    ("sigma_q", "sigma_k"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1e-30, 1e-30), (1e15, 1e15)]
)
def test_degenerate_statistics_give_finite_positive_scales(
    sigma_q, sigma_k, method, normalize_keys
):
    options = {"method": method, "normalize_keys": normalize_keys}
    for scale in match_moments(sigma_q, sigma_k, 16, **options):
        assert math.isfinite(scale) and scale > 0
    for dtype in (torch.float32, torch.float64):
        tensors = (torch.tensor(s, dtype=dtype) for s in (sigma_q, sigma_k))
        for scale in match_moments(*tensors, 16, **options):
            assert scale.isfinite() and scale > 0
    zero = match_moments(0.5, 0.5, 16, score_variance=0.0, **options)
    assert all(math.isfinite(scale) and scale >= 0 for scale in zero)


def test_deviations_below_the_floor_are_taken_for_it():
    found = match_moments(torch.tensor([0.0, 1e-5, 1e-4, 1.5e-4]), 1.0, 16)[0].tolist()
    assert found[0] == found[1] == found[2] > found[3]


@pytest.mark.parametrize(("method", "normalize_keys"), EVERY)
def test_nan_stays_in_its_entry(method, normalize_keys):
    sigma = torch.tensor([[1.0, float("nan")], [0.5, 2.0]])
    options = {"method": method, "normalize_keys": normalize_keys}
    alpha, beta = match_moments(sigma, torch.ones(2, 2), 16, **options)
    clean, _ = match_moments(sigma.nan_to_num(1.0), torch.ones(2, 2), 16, **options)
    assert alpha.isnan().tolist() == beta.isnan().tolist() == [[False, True], [False, False]]
    torch.testing.assert_close(alpha[~alpha.isnan()], clean[~alpha.isnan()])


@pytest.mark.parametrize(("method", "normalize_keys"), EVERY)
def test_differentiable(method, normalize_keys):
    sigma = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    options = {"method": method, "normalize_keys": normalize_keys}
    assert torch.autograd.gradcheck(lambda s: match_moments(s, 1.3 * s, 32, **options), sigma)


@pytest.mark.parametrize(
    ("method", "normalize_keys", "dynamic"),
    [("paper", False, None), (OWN, True, True), ("variance", False, True), ("entropy", True, None)],
)
def test_compile_keeps_one_graph(method, normalize_keys, dynamic):
    torch.compiler.reset()
    options = {"method": method, "normalize_keys": normalize_keys}

    def scales(q, sigma):
        return match_moments(sigma, 1.2, q.shape[-1], score_variance=sigma, **options)

    compiled = torch.compile(scales, fullgraph=True, dynamic=dynamic, backend="eager")
    sigma = torch.tensor([[0.4, 1.0]])
    for head_dim in (16, 24):  # a second size must not reuse the first one's curve
        q = torch.zeros(3, head_dim)
        torch.testing.assert_close(compiled(q, sigma), scales(q, sigma), rtol=1e-6, atol=0)


def test_compile_folds_numbers():
    torch.compiler.reset()

    def scaled(x):
        return x * match_moments(1.0, 0.7, 16, method="entropy")[0]

    compiled = torch.compile(scaled, fullgraph=True, backend="eager")
    x = torch.ones(3)
    torch.testing.assert_close(compiled(x), scaled(x))


def test_works_on_the_meta_device():
    """Nothing reads a value: what runs without data cannot wait for a device."""
    sigma = torch.empty(2, 3, device="meta")
    for method, normalize_keys in EVERY:
        alpha, beta = match_moments(sigma, sigma, 64, method=method, normalize_keys=normalize_keys)
        assert alpha.shape == beta.shape == (2, 3)
        assert alpha.device.type == "meta"


BAD = {
    "negative": ((-1.0, 1.0, 64), {}, ValueError, r"sigma_q=-1\.0.*standard_deviations"),
    "nan": ((1.0, float("nan"), 64), {}, ValueError, "sigma_k=nan.*finite"),
    "infinite": ((1.0, float("inf"), 64), {}, ValueError, "sigma_k=inf.*finite"),
    "text": (("1", 1.0, 64), {}, TypeError, "sigma_q is a str; pass a number or a tensor"),
    "int tensor": ((torch.ones(2).long(), 1.0, 64), {}, TypeError, r"sigma_q.*int64"),
    "variance": ((1.0, 1.0, 64), {"score_variance": -2.0}, ValueError, r"score_variance=-2\.0"),
    "head_dim": ((1.0, 1.0, 64.0), {}, TypeError, "head_dim is a float; pass an int"),
    "no features": ((1.0, 1.0, 0), {}, ValueError, "head_dim=0 must be positive"),
    "method": ((1.0, 1.0, 64), {"method": "exact"}, ValueError, "'exact'.*'entropy'.*MomentFit"),
    "method type": ((1.0, 1.0, 64), {"method": (0.1, -0.3)}, TypeError, "method is a tuple"),
    "size": ((1.0, 1.0, 2048), {"method": "entropy"}, ValueError, "head_dim=2048.*paper"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_is_explained(case):
    args, options, error, message = BAD[case]
    with pytest.raises(error, match=message):
        match_moments(*args, **options)
