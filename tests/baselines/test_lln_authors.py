"""The authors' form of LLN: its formulas one number at a time, and its defects on purpose."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import lln
from lln import zoo
from lln_study.tasks import lra, mlm_recipes, vit
from lln_study.tasks.models.lra import Classifier, LRASizes
from lln_study.tasks.models.roberta import build_model
from tests.baselines.small import DIM, TOKENS, heads, make, mask_of

A, B = 0.14855178144710912, -0.35487039130661086  # as published


def core_of(**options):
    return make("lln_authors", **options).core


def deviation(x: Tensor) -> float:
    """Of all numbers of a tensor, with n − 1."""
    numbers = x.detach().flatten().tolist()
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((one - mean) ** 2 for one in numbers) / (len(numbers) - 1))


def by_formula(q: Tensor, k: Tensor, v: Tensor, eps: float) -> Tensor:
    """Eqs. (9) and (10) with one σ for all, one maximum for all keys of a head, and ε."""
    sigma_q, sigma_k = deviation(q), deviation(k)
    sigma = math.sqrt((sigma_q**2 * sigma_k**2 - B) / A)
    alpha, beta = sigma / (math.sqrt(2) * sigma_q), sigma / (math.sqrt(2) * sigma_k)
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            top_k = max(beta * number for number in k[b, h].flatten())
            for i in range(q.shape[2]):
                top_q = max(alpha * number for number in q[b, h, i])
                weights = [
                    sum(
                        torch.exp(alpha * q[b, h, i, d] - top_q)
                        * torch.exp(beta * k[b, h, j, d] - top_k)
                        for d in range(q.shape[3])
                    )
                    for j in range(k.shape[2])
                ]
                total = sum(weights) + eps
                rows.append(sum(w * v[b, h, j] for j, w in enumerate(weights)) / total)
    return torch.stack(rows).view_as(v)


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_output_and_gradients_are_those_of_the_formulas(eps):
    """α and β are constants of the backward pass, the two maxima are not: with ε it matters."""
    inputs = [x[:, :1, :5, :4].clone().requires_grad_() for x in heads(TOKENS)]
    weight = torch.randn(2, 1, 5, 4, dtype=torch.float64)
    found = {}
    for name, attend in (
        ("core", core_of(eps=eps)),
        ("formula", lambda *x: by_formula(*x, eps=eps)),
    ):
        out = attend(*inputs)
        found[name] = [out, *torch.autograd.grad((out * weight).sum(), inputs)]
    for got, expected in zip(found["core"], found["formula"], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_blocks_are_as_long_as_a_head_is_wide():
    """Two blocks of 16 and one of 8, averaged with the other branch."""
    q, k, v = heads(40)
    got = core_of(diag=True)(q, k, v)
    near = torch.zeros_like(v)
    for start, end in ((0, 16), (16, 32), (32, 40)):
        scores = torch.einsum("bhid,bhjd->bhij", q[:, :, start:end], k[:, :, start:end]) / 4
        near[:, :, start:end] = scores.softmax(-1) @ v[:, :, start:end]
    torch.testing.assert_close(got, (core_of()(q, k, v) + near) / 2, rtol=1e-10, atol=1e-12)


def test_without_eps_it_is_ours_with_their_constants():
    q, k, v = heads(50)
    alpha, beta = lln.match_moments(float(q.std()), float(k.std()), 16, method="paper")
    expected = lln.attention(q, k, v, alpha=alpha, beta=beta)
    torch.testing.assert_close(core_of(eps=0.0)(q, k, v), expected, rtol=1e-9, atol=1e-11)


def test_samples_heads_and_padding_depend_on_each_other():
    q, k, v = heads(TOKENS)
    core = core_of()
    out = core(q, k, v)
    loud = q.clone()
    loud[1] *= 3
    assert (core(loud, k, v)[0] - out[0]).abs().max() > 1e-2
    head = q.clone()
    head[:, 1] *= 3
    assert (core(head, k, v)[:, 0] - out[:, 0]).abs().max() > 1e-2
    assert torch.equal(core(q, k, v, mask_of()), out)
    with pytest.raises(TypeError, match="key_mask has dtype"):
        core(q, k, v, mask_of().long())


def test_outliers_among_the_keys_drive_rows_to_zero():
    """One key so far above the others that ε outweighs them, where ours only takes it for large."""
    q, k, _ = heads(TOKENS)
    k[:, :, 3, 5] = 30
    q[:, :, :, 5] = -30  # and nobody asks for it
    mass = core_of().attention_matrix(q, k).sum(-1)
    assert mass.max() < 1e-3
    assert make("lln").core.double().attention_matrix(q, k).sum(-1).min() > 0.999


def test_a_constant_input_is_nan():
    q, k, v = heads(TOKENS)
    assert core_of()(torch.ones_like(q), k, v).isnan().all()


def test_only_float16_is_widened():
    q, k, v = (x.float() for x in heads(200))
    for dtype, widened in ((torch.float16, True), (torch.bfloat16, False)):
        rounded = [x.to(dtype) for x in (q, k, v)]
        wide = core_of()(*(x.float() for x in rounded)).to(dtype)
        got = core_of()(*rounded)
        assert got.dtype == dtype and torch.equal(got, wide) == widened
    with torch.autocast("cpu", dtype=torch.float16):  # neither does autocast narrow it
        half = [x.half() for x in (q, k, v)]
        assert torch.equal(core_of()(*half), core_of()(*half))
        wide = core_of(eps=0.0)(*half)
    assert torch.equal(wide, core_of(eps=0.0)(*half))


def test_it_is_known_and_not_of_the_zoo():
    entry = lln.describe("lln_authors")
    assert "lln_authors" not in lln.list_mechanisms() and "lln_authors" in zoo.KNOWN
    assert "for studies only" in entry.note and entry.masks.startswith("none")
    assert entry.defaults == {"eps": 1e-8, "diag": False}
    with pytest.raises(ValueError, match="eps=-1 must be 0 or a small positive number"):
        core_of(eps=-1)
    q, k, v = heads(TOKENS)
    with pytest.raises(ValueError, match="self-attention only"):
        core_of()(q, k[:, :, :3], v[:, :, :3])


def test_runs_may_train_with_it():
    options = {"attention": "lln_authors", "options": {"diag": True, "eps": 1e-5}}
    for config in (
        mlm_recipes.configure("roberta-tiny", **options),
        vit.configure("digits", **options),
        lra.configure("listops", **options),
    ):
        assert config.train.options == options["options"]
    with pytest.raises(TypeError, match="'lln_authors' takes eps, diag"):
        lra.configure("listops", attention="lln_authors", options={"conv": 33})
    model, _ = build_model(mlm_recipes.configure("roberta-tiny", **options), 300)
    ids = torch.randint(5, 300, (2, 32))
    cores = [
        module for module in model.modules() if hasattr(module, "eps") and hasattr(module, "diag")
    ]
    assert len(cores) == 2 and all(core.eps == 1e-5 for core in cores)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    sizes = LRASizes(16, 64, 10, "lln_authors", {"eps": 1e-5})
    scores = Classifier(sizes)(torch.randint(0, 16, (2, 64)))
    assert scores.shape == (2, 10) and scores.isfinite().all()


@pytest.mark.slow
def test_compiled_in_bfloat16_it_has_the_gradients_of_eager():
    """The gradient of amax counts the numbers that equal it, of which fused code rounds none."""
    module = make("lln_authors")
    x = torch.randn(2, 4 * TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    found = []
    for run in (torch.compile(module), module):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(given).float().square().sum()
        found.append(torch.autograd.grad(loss, given)[0])
    compiled, eager = found
    assert compiled.isfinite().all()
    assert (compiled - eager).norm() < 0.05 * eager.norm()
