"""Full attention inside blocks, causal across them: against the definition, and its limits."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from lln.ops import reference
from lln.ops.causal.causal import causal
from lln.ops.linear.bidirectional import bidirectional
from lln.ops.window import lln_diag as lln_diag_op
from tests.helpers import (
    LENGTHS,
    assert_matches,
    random_qkv,
    random_scales,
    run_with_grads,
    windowed,
)

lln_diag = windowed(lln_diag_op.lln_diag)

slow = pytest.mark.slow
blocks = pytest.mark.parametrize(
    "block", [1, 7, 1000, *(pytest.param(n, marks=slow) for n in (2, 16))]
)


def tensors(queries: int, keys: int | None = None, key_heads: int = 2) -> dict:
    q, k, v = random_qkv(2, 4, queries, keys, value_width=5, key_heads=key_heads)
    alpha, beta = random_scales(2, 4, key_heads)
    return {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}


def compare(op, oracle, given, dtype=torch.float64, **options) -> None:
    """`op` in `dtype` against `oracle` in float64; the plain formula sets the tolerance."""
    d_out = torch.randn_like(oracle(**given, **options)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    rounded = {name: x.to(dtype if name in "qkv" else wide) for name, x in given.items()}
    exact_in = {name: x.double() for name, x in rounded.items()}
    exact = run_with_grads(lambda **t: oracle(**t, **options), exact_in, d_out.double())
    plain = run_with_grads(lambda **t: oracle(**t, **options), rounded, d_out)
    got = run_with_grads(lambda **t: op(**t, **options, impl="eager"), rounded, d_out)
    for name in exact:
        assert_matches(name, got[name], plain[name], exact[name], factor=8)


def by_the_rule(q, k, v, *, alpha, beta, causal_block):
    """Row by row: LLN over the keys that stand in the query's block or before it."""
    rows = []
    for i in range(q.shape[2]):
        end = ((i + k.shape[2] - q.shape[2]) // causal_block + 1) * causal_block
        seen = slice(0, max(end, 0))
        rows.append(
            bidirectional(
                q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen], alpha=alpha, beta=beta
            )
        )  # fmt: skip
    return torch.cat(rows, dim=2)


@pytest.mark.parametrize("queries, keys", [(20, 20), (9, 20), (20, 9)])
@pytest.mark.parametrize("block", [1, 3, 8, 50])
def test_the_reference_is_the_rule(block, queries, keys):
    given = tensors(queries, keys)
    expected = by_the_rule(**given, causal_block=block)
    torch.testing.assert_close(reference.block_causal(**given, causal_block=block), expected)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        *(pytest.param(x, marks=slow) for x in (torch.float32, torch.float16)),
    ],
)
@pytest.mark.parametrize("length", LENGTHS)
def test_outputs_and_gradients_are_those_of_the_definition(length, dtype):
    mask = torch.rand(2, length) > 0.3
    options = {"key_mask": mask, "causal_block": 16}
    compare(causal, reference.block_causal, tensors(length), dtype, **options)


@blocks
@pytest.mark.parametrize(
    "queries, keys", [(64, 64), (5, 100), (70, 100), (100, 30), (0, 9), (9, 0), (0, 0)]
)
def test_blocks_are_those_of_the_keys(queries, keys, block):
    mask = torch.rand(2, keys) > 0.3
    options = {"key_mask": mask, "causal_block": block}
    compare(causal, reference.block_causal, tensors(queries, keys), **options)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_groups_of_heads(key_heads):
    given = tensors(40, key_heads=key_heads)
    compare(causal, reference.block_causal, given, causal_block=16)


@pytest.mark.parametrize("queries, keys", [(50, 50), (20, 50), (50, 20)])
def test_blocks_of_one_token_are_causal_attention(queries, keys):
    given = tensors(queries, keys)
    d_out = torch.randn(2, 4, queries, 5, dtype=torch.float64)
    found = run_with_grads(functools.partial(causal, causal_block=1), given, d_out)
    for name, expected in run_with_grads(causal, given, d_out).items():
        torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize("block", [50, 51, 1000])
def test_one_block_is_bidirectional_attention(block):
    given = tensors(50)
    d_out = torch.randn(2, 4, 50, 5, dtype=torch.float64)
    found = run_with_grads(functools.partial(causal, causal_block=block), given, d_out)
    for name, expected in run_with_grads(bidirectional, given, d_out).items():
        torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, *(pytest.param(x, marks=slow) for x in (torch.float32, torch.bfloat16))],
)
@pytest.mark.parametrize("queries, keys", [(100, 100), (37, 100), (100, 37)])
@pytest.mark.parametrize("block, causal_block", [(16, 16), (4, 16), (16, 48), (1, 8)])
def test_lln_diag(block, causal_block, queries, keys, dtype):
    mask = torch.rand(2, keys) > 0.3
    options = {"block": block, "causal_block": causal_block, "scale": 0.4, "is_causal": True}
    compare(lln_diag, reference.lln_diag, tensors(queries, keys), dtype, key_mask=mask, **options)


def test_the_weight_of_the_branches_and_features_of_ones_own():
    given = tensors(40)
    given |= {
        "q_far": torch.randn(2, 4, 40, 6, dtype=torch.float64),
        "k_far": torch.randn(2, 2, 40, 6, dtype=torch.float64),
        "mix": torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=torch.float64),
    }
    options = {"block": 8, "causal_block": 16, "scale": 0.4, "is_causal": True}
    compare(lln_diag, reference.lln_diag, given, **options)


@pytest.mark.parametrize("local", [False, True])
def test_later_blocks_change_nothing(local):
    given = tensors(50)
    other = {name: x.clone() for name, x in given.items()}
    for name in "qkv":
        other[name][:, :, 32:] = 7.0
    attend = functools.partial(causal, causal_block=16)
    if local:
        options = {"block": 8, "scale": 0.4, "is_causal": True}
        attend = functools.partial(lln_diag, causal_block=16, **options)
    assert torch.equal(attend(**given)[:, :, :32], attend(**other)[:, :, :32])
    inside = {name: x.clone() for name, x in given.items()}
    inside["v"][:, :, 31] += 1.0  # the last key of a block is seen by the first query of it
    changed = (attend(**inside) != attend(**given)).any(-1).all(1).all(0)
    assert changed.nonzero().flatten().tolist() == list(range(16, 50))


def test_hidden_keys_may_hold_anything():
    given = tensors(40)
    mask = torch.rand(2, 40) > 0.3
    hidden = ~mask[:, None, :, None]
    dirty = {name: given[name].masked_fill(hidden, torch.nan) for name in "kv"}
    options = {"key_mask": mask, "causal_block": 16}
    torch.testing.assert_close(causal(**given | dirty, **options), causal(**given, **options))


def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients():
    given, mask = tensors(40), torch.ones(2, 40, dtype=torch.bool)
    mask[0, :16], mask[1] = False, False
    d_out = torch.randn(2, 4, 40, 5, dtype=torch.float64)
    options = {"key_mask": mask, "causal_block": 16}
    found = run_with_grads(functools.partial(causal, **options), given, d_out)
    assert all(x.isfinite().all() for x in found.values())
    assert (found["out"][0, :, :16] == 0).all() and (found["out"][1] == 0).all()
    assert (found["d_q"][0, :, :16] == 0).all() and (found["d_q"][1] == 0).all()


def test_slot_dropout_drops_whole_slots_after_normalisation():
    given = tensors(40, key_heads=4)
    keep = F.dropout(torch.ones(2, 4, 40, 8, dtype=torch.float64), 0.4)
    a, f = (given[s][..., None, None] * given[x] for s, x in (("alpha", "q"), ("beta", "k")))
    scores = a[:, :, :, None] + f[:, :, None]
    seen = reference.visible(40, 40, is_causal=True, causal_block=16)[..., None]
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf).flatten(3), dim=-1)
    weights = weights.unflatten(3, (40, 8))
    expected = torch.einsum("bhijl,bhil,bhje->bhie", weights, keep, given["v"])
    torch.testing.assert_close(causal(**given, causal_block=16, slot_dropout=keep), expected)


@pytest.mark.parametrize("options", [{}, {"block": 8, "scale": 0.4, "is_causal": True}])
def test_samples_of_a_vmap_are_samples_of_a_batch(options):
    given = tensors(20)
    op = lln_diag if options else causal

    def one(*values):
        single = dict(zip(given, (x[None] for x in values), strict=True))
        return op(**single, causal_block=8, **options)[0]

    found = torch.func.vmap(one)(*given.values())
    torch.testing.assert_close(found, op(**given, causal_block=8, **options))


@pytest.mark.parametrize("options", [{}, {"block": 8, "scale": 0.4, "is_causal": True}])
def test_compiled_and_plain_agree(options):
    op = functools.partial(lln_diag if options else causal, causal_block=8, **options)
    given = {name: x.float() for name, x in tensors(40).items()}
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    d_out = torch.randn(2, 4, 40, 5)
    plain = run_with_grads(op, given, d_out)
    for name, found in run_with_grads(compiled, given, d_out).items():
        torch.testing.assert_close(found, plain[name])


def test_memory_is_linear_in_the_length():
    """The largest tensor that the ops make grows with N, not N²."""
    sizes = []
    for length in (256, 512):
        given = {name: x.float() for name, x in tensors(length).items()}
        with torch.profiler.profile(profile_memory=True) as profile:
            causal(**given, causal_block=16)
        sizes.append(max(event.self_cpu_memory_usage for event in profile.key_averages()))
    assert sizes[1] < 3 * sizes[0]
