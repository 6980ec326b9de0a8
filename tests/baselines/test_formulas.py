"""Mechanisms without a package to compare with, against their formulas: loops over single numbers.

Each reference is written from the equation in the docstring, in float64, one query and one key at a
time, over the visible keys only; nothing is shared with the implementation.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.baselines.small import HEADS, MAX_LENGTH, TOKENS, heads, make, mask_of


def by_pairs(
    weight: Callable[[Tensor, Tensor, int, int, int], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    normalised: bool = True,
) -> Tensor:
    """Σ_j w v_j, divided by Σ_j w; ``weight`` takes q_i, k_j, i, j and the head."""
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = [j for j in range(k.shape[2]) if mask[b, j]]
                weights = torch.stack([weight(q[b, h, i], k[b, h, j], i, j, h) for j in seen])
                out[b, h, i] = weights @ v[b, h, seen]
                if normalised and weights.sum() != 0:
                    out[b, h, i] /= weights.sum()
    return out


def assert_same(core, weight, *, width: int = 16, normalised: bool = True, finish=None) -> None:
    q, k, _ = heads(TOKENS, width=width)
    v, mask = heads(TOKENS)[2], mask_of()
    expected = by_pairs(weight, q, k, v, mask, normalised=normalised)
    expected = expected if finish is None else finish(expected)
    got = core.double()(q, k, v, mask)
    valid = mask[:, None, :, None].expand_as(got)  # outputs of masked queries are nobody's business
    torch.testing.assert_close(got[valid], expected[valid], rtol=1e-9, atol=1e-10)


def elu1(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


WEIGHTS = {
    "softmax": lambda q, k, *_: (q @ k / 4).exp(),
    "elu": lambda q, k, *_: elu1(q) @ elu1(k),
    "relu": lambda q, k, *_: (q @ k).clamp(min=0),
    "quadratic": lambda q, k, *_: (q @ k) ** 2,
    "relu_linear": lambda q, k, *_: q.clamp(min=0) @ k.clamp(min=0),
    "quadratic_linear": lambda q, k, *_: (q**2) @ (k**2),
    "cosformer": lambda q, k, i, j, _: (
        q.clamp(min=0) @ k.clamp(min=0) * math.cos(math.pi / 2 * (i - j) / MAX_LENGTH)
    ),
    "block_diag": lambda q, k, i, j, _: (q @ k / 4).exp() * (i // 8 == j // 8),
    "sliding_window": lambda q, k, i, j, _: (q @ k / 4).exp() * (abs(i - j) <= 4),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_kernels(name):
    assert_same(make(name).core, WEIGHTS[name])


def test_softmax_with_its_matrix():
    assert_same(make("softmax", impl="matrix").core, WEIGHTS["softmax"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["sdpa", "matrix"])
def test_softmax_with_a_convolution(impl, causal):
    options = {"impl": impl, "causal": causal}
    core, plain = (make("softmax", conv=taps, **options).core.double() for taps in (5, 0))
    (q, k, v), mask = heads(TOKENS), mask_of()
    near = torch.zeros_like(v)
    for n in range(TOKENS):
        for t, m in enumerate(range(n - 4, n + 1) if causal else range(n - 2, n + 3)):
            if 0 <= m < TOKENS:
                seen = v[:, :, m] * mask[:, None, m, None]
                near[:, :, n] += core.conv_weight.detach()[:, t, None] * seen
    valid = mask[:, None, :, None].expand_as(v)
    expected = plain(q, k, v, mask) + near
    torch.testing.assert_close(core(q, k, v, mask)[valid], expected[valid])


def test_softmax_refuses_a_convolution_it_cannot_serve():
    with pytest.raises(ValueError, match="conv=4 must be an odd width"):
        make("softmax", conv=4)


def test_hedgehog():
    core = make("hedgehog").core.double()
    torch.nn.init.normal_(core.query_map, std=0.3)
    torch.nn.init.normal_(core.key_map, std=0.3)

    def features(matrix: Tensor, x: Tensor) -> Tensor:
        up, down = (matrix @ x).exp(), (-(matrix @ x)).exp()
        return torch.cat([up / up.sum(), down / down.sum()])

    assert_same(
        core,
        lambda q, k, i, j, h: features(core.query_map[h], q) @ features(core.key_map[h], k),
    )


def test_rebased():
    core = make("rebased").core.double()
    torch.nn.init.normal_(core.gamma)
    torch.nn.init.normal_(core.beta)

    def affine(x: Tensor, which: int) -> Tensor:
        x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()
        return core.gamma[which] * x + core.beta[which]

    assert_same(core, lambda q, k, *_: (affine(q, 0) @ affine(k, 1)) ** 2, width=4)


def test_rfa():
    core = make("rfa", floor=0.0).core.double()
    torch.nn.init.uniform_(core.sigma, 0.3, 0.8)

    def weight(q: Tensor, k: Tensor, i: int, j: int, h: int) -> Tensor:
        omega = core.gaussian[h] * core.sigma[h]
        difference = omega @ (q / q.norm() - k / k.norm())  # sin·sin + cos·cos
        return difference.cos().mean()

    assert_same(core, weight)


def test_rfa_approaches_the_gaussian_kernel():
    """With many features the weights are exp(−|q̂ − k̂|²/2) normalised."""
    core = make("rfa", num_features=20_000).core.double()
    q, k, _ = heads(6)
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    exact = torch.softmax(unit[0] @ unit[1].mT, dim=-1)
    torch.testing.assert_close(core.attention_matrix(q, k), exact, rtol=0, atol=0.02)


def test_performer_approaches_softmax():
    core = make("performer", num_features=20_000, eps=0.0).core.double()
    q, k = (x * 0.5 for x in heads(6)[:2])  # the variance grows with exp(|q + k|²)
    exact = torch.softmax(q @ k.mT / 4, dim=-1)
    torch.testing.assert_close(core.attention_matrix(q, k), exact, rtol=0, atol=0.02)


def test_performer_features_are_orthogonal_and_as_long_as_gaussian_ones():
    omega = make("performer", num_features=24).core.projection
    for block in (omega[:16], omega[16:]):
        gram = block @ block.T
        off = gram - torch.diag(gram.diagonal())
        torch.testing.assert_close(off, torch.zeros_like(off), atol=1e-4, rtol=0)
    wide = make("performer", num_features=2000).core
    assert abs(wide.projection.square().sum(1).mean() - 16) < 0.5  # E χ²₁₆
    before = wide.projection.clone()
    assert not torch.equal(wide.redraw_(3).projection, before)
    assert torch.equal(wide.redraw_(0).projection, before)


def test_efficient():
    core = make("efficient").core.double()
    q, k, v = heads(TOKENS)
    mask = mask_of()
    got = core(q, k, v, mask)
    for b in range(2):
        seen = [j for j in range(TOKENS) if mask[b, j]]
        for h in range(HEADS):
            total = k[b, h, seen].exp().sum(0)
            for i in range(TOKENS):
                rho_q = q[b, h, i].exp() / q[b, h, i].exp().sum()
                out = sum(rho_q @ (k[b, h, j].exp() / total) * v[b, h, j] for j in seen)
                torch.testing.assert_close(got[b, h, i], out)


@pytest.mark.parametrize(("count", "ridge"), [(4, 0.1), (11, 0.1), (11, 1e-3), (4, 1e9)])
def test_landmarks(count, ridge):
    """The formula key by key; the second sample has fewer keys than 11 landmarks."""
    core = make("landmarks", landmarks=count, ridge=ridge).core.double()
    q, k, v = heads(TOKENS)
    mask = mask_of()
    got = core(q, k, v, mask)

    def look(at: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        weights = [(at @ key / 4).exp() for key in keys]
        return sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)

    for b in range(2):
        seen = [j for j in range(TOKENS) if mask[b, j]]
        n, m = len(seen), min(count, len(seen))
        for h in range(HEADS):
            order = sorted(seen, key=lambda j, b=b, h=h: float(k[b, h, j].sum()))
            marks = k[b, h, [order[int((place + 0.5) * n / m)] for place in range(m)]]
            keys, values = k[b, h, seen], v[b, h, seen]
            read = torch.stack([look(x, keys, values) for x in marks])
            each = torch.eye(m, dtype=torch.float64)
            blur = torch.stack([look(x, marks, each) for x in marks])
            kept = torch.linalg.inv(blur + ridge * each) @ ((1 + ridge) * read)
            for i in range(TOKENS):
                torch.testing.assert_close(got[b, h, i], look(q[b, h, i], marks, kept))


def test_queries_at_landmarks_find_what_softmax_finds():
    """With as many landmarks as keys and next to no ridge, all queries do."""
    q, k, v = heads(TOKENS)
    core = make("landmarks", landmarks=TOKENS, ridge=1e-9).core.double()
    softmax = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(core(q, k, v), softmax(q, k, v), rtol=1e-5, atol=1e-5)
    few = make("landmarks", ridge=1e-9).core.double()
    marks = few.remember(k, v).landmarks
    torch.testing.assert_close(few(marks, k, v), softmax(marks, k, v), rtol=1e-5, atol=1e-5)


def test_many_landmarks_on_several_threads():
    """Batches of so large matrices hang in torch, or come out wrong; in a process of its own."""
    code = """
import torch, lln
torch.set_num_threads(4)
q, k, v = torch.randn(3, 2, 2, 300, 16, dtype=torch.float64).requires_grad_()
core = lln.create("landmarks", dim=32, num_heads=2, landmarks=300, ridge=1e-9).core.double()
softmax = torch.nn.functional.scaled_dot_product_attention
found, expected = (torch.cat([x, *torch.autograd.grad(x.square().sum(), (q, k, v))])
                   for x in (core(q, k, v), softmax(q, k, v)))
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("ridge", [0, -1.0, float("inf"), float("nan")])
def test_bad_ridge_of_landmarks(ridge):
    with pytest.raises(ValueError, match=r"ridge=.*above 0 and finite"):
        make("landmarks", ridge=ridge)


@pytest.mark.parametrize("name", ["softmax", "elu", "knn"])
def test_mechanisms_remember_a_context(name):
    core = make(name).core.double()
    q, k, v = heads(TOKENS)
    mask = mask_of()
    assert torch.equal(core.recall(q, core.remember(k, v, mask)), core(q, k, v, mask))


def test_landmarks_read_a_context_once():
    """The order of its keys does not matter; what is kept has one size."""
    core = make("landmarks").core.double()
    q, k, v = heads(60)
    expected = core(q, k, v)
    order = torch.randperm(60)
    kept = core.remember(k[:, :, order], v[:, :, order])
    found = torch.cat([core.recall(part, kept) for part in q.split(7, dim=2)], dim=2)
    torch.testing.assert_close(found, expected)
    assert kept.landmarks.shape == kept.values.shape == (2, HEADS, 8, 16)
    blind = core(q, k, v, torch.zeros(2, 60, dtype=torch.bool))
    assert torch.equal(blind, torch.zeros_like(q))


def test_knn_keeps_the_largest_scores():
    core = make("knn").core.double()  # 5 neighbours
    q, k, _ = heads(TOKENS)
    mask = mask_of()
    matrix = core.attention_matrix(q, k, mask)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (2, HEADS, TOKENS))).tolist():
        seen = [j for j in range(TOKENS) if mask[b, j]]
        nearest = sorted(seen, key=lambda j: -float(q[b, h, i] @ k[b, h, j]))[:5]
        weights = torch.zeros(TOKENS, dtype=torch.float64)
        weights[nearest] = torch.softmax(k[b, h, nearest] @ q[b, h, i] / 4, dim=0)
        torch.testing.assert_close(matrix[b, h, i], weights)


@pytest.mark.parametrize("name", ["elu", "relu", "hedgehog", "rfa"])
def test_causal_forms_are_the_lower_triangle(name):
    """Over more than one chunk: the weights of all pairs, cut and divided again."""
    tokens, options = 150, {"floor": 0.0} if name == "rfa" else {}
    core = make(name, causal=True, **options).core.double()
    q, k, v = heads(tokens, batch=1)
    whole = make(name, **options).core.double()
    whole.load_state_dict(core.state_dict())
    cut = whole.attention_matrix(q, k).tril()
    expected = (cut / cut.sum(-1, keepdim=True)).nan_to_num() @ v  # a row without weight gives 0
    torch.testing.assert_close(core(q, k, v), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("variant", ["t1", "t2"])
@pytest.mark.parametrize("kind", ["diag", "norm"])
def test_transnormer(variant, kind):
    core = make(f"transnormer_{variant}", kind=kind).core.double()
    with torch.no_grad():
        core.theta.mul_(1.3)
    normal = core.reflection

    def place(x: Tensor, i: int) -> Tensor:
        """Reflect, then rotate pair l by i θ_l."""
        x = (torch.eye(16, dtype=x.dtype) - 2 * torch.outer(normal, normal)) @ x
        pairs = torch.view_as_complex(x.view(8, 2)) * torch.exp(1j * i * core.theta)
        return torch.view_as_real(pairs).flatten()

    def phi(x: Tensor) -> Tensor:
        return elu1(x) - (1 if variant == "t1" else 0)

    def weight(q: Tensor, k: Tensor, i: int, j: int, _: int) -> Tensor:
        if kind == "norm":
            return place(phi(q), i) @ place(phi(k), j)
        score = place(q, i) @ place(k, j) / 4
        inside = i // 8 == j // 8
        return (score.clamp(min=0) if variant == "t1" else score.exp()) * inside

    def rms_norm(out: Tensor) -> Tensor:
        for b, i in torch.cartesian_prod(torch.arange(2), torch.arange(TOKENS)).tolist():
            length = out[b, :, i].square().sum().sqrt()
            out[b, :, i] *= math.sqrt(32) / (length + 1e-8)
        return out

    softmax_blocks = (variant, kind) == ("t2", "diag")
    assert_same(
        core, weight, normalised=softmax_blocks, finish=None if softmax_blocks else rms_norm
    )


def test_transnormer_changes_half_way_up():
    for layers, kinds in {
        1: ["norm"],
        4: ["diag", "diag", "norm", "norm"],
        5: ["diag", "diag", "norm", "norm", "norm"],
    }.items():
        made = [
            make("transnormer_t1", layer_index=index, num_layers=layers).core.kind
            for index in range(layers)
        ]
        assert made == kinds


def test_skyformer():
    """The formula with a true inverse, iterated to convergence, on the points of the seed."""
    core = make("skyformer", landmarks=6, iterations=30).core.double()
    q, k, v = heads(TOKENS)
    mask = mask_of()
    got = core(q, k, v, mask)

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (-(x - y).square().sum() / (2 * math.sqrt(16))).exp()

    def gram(rows: list[Tensor], columns: list[Tensor]) -> Tensor:
        return torch.stack([torch.stack([kernel(x, y) for y in columns]) for x in rows])

    for b in range(2):
        seen = [j for j in range(TOKENS) if mask[b, j]]
        picked = [sorted(seen, key=lambda j, turn=turn: int(turn[j]))[:3] for turn in core.turn]
        for h in range(HEADS):
            points = [q[b, h, j] for j in picked[0]] + [k[b, h, j] for j in picked[1]]
            inner = gram(points, points) + 0.1 * torch.eye(6, dtype=torch.float64)
            d = torch.diag(inner.sum(1).rsqrt())
            middle = d @ torch.linalg.inv(d @ inner @ d) @ d
            right = gram(points, [k[b, h, j] for j in seen]) @ v[b, h, seen]
            expected = gram([q[b, h, i] for i in seen], points) @ middle @ right
            torch.testing.assert_close(got[b, h, seen], expected, rtol=1e-6, atol=1e-7)


def test_skyformer_draws_valid_points_and_new_ones_when_training():
    from lln.baselines.skyformer import draw

    core = make("skyformer").core.double()
    seen = torch.tensor([[True, False, True, True], [False, False, True, False]])
    found, there = draw(seen, torch.tensor([3, 0, 2, 1]), 3)
    assert found[0].tolist() == [3, 2, 0] and there[0].all()
    assert found[1, 0] == 2 and there[1].tolist() == [True, False, False]
    q, k, v = heads(60)
    core.train()
    assert not torch.allclose(core(q, k, v), core(q, k, v))


def test_nystromformer_refuses_to_be_softmax():
    with pytest.raises(ValueError, match="would run exact softmax"):
        make("nystromformer", landmarks=64, max_length=64)


def test_nystromformer_with_a_landmark_per_token_is_softmax():
    """The one case where the approximation must be exact, given a converged inverse."""
    core = make("nystromformer", landmarks=13, iterations=40, kernel_size=0).core.double()
    assert_same(core, WEIGHTS["softmax"])


def test_nystromformer_segments_split_the_valid_tokens():
    from lln.baselines.nystromformer import segments

    seen = torch.tensor([[True] * 7, [False, True, True, False, True, True, True]])
    means, full = segments(seen, 3)
    assert full.all()
    torch.testing.assert_close(means.sum(-1), torch.ones(2, 3))
    members = [[row.nonzero().flatten().tolist() for row in sample] for sample in means]
    assert members[0] == [[0, 1, 2], [3, 4], [5, 6]]
    assert members[1] == [[1, 2], [4, 5], [6]]
    few, full = segments(torch.tensor([[True, False, True]]), 3)
    assert full.tolist() == [[True, True, False]] and few[0, 1].tolist() == [0, 0, 1]
