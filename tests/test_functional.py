"""The public functions: options, masks, autocast, compile, checkpoint, streaming."""

from __future__ import annotations

import math

import pytest
import torch

import lln
from lln import functional
from lln.ops import eager, reference
from lln.ops.linear.eager_varlen import _groups
from tests.helpers import random_qkv, random_scales


def test_explicit_scales_take_every_documented_shape():
    q, k, v = random_qkv(2, 4, 20, key_heads=2)
    expected = lln.attention(
        q, k, v, alpha=torch.full((2, 4), 1.5).double(), beta=torch.full((2, 2), 2.5).double()
    )
    for alpha, beta in (
        (1.5, 2.5),
        (torch.full((4,), 1.5), torch.full((2,), 2.5)),
        (1.5, torch.tensor(2.5)),
    ):
        torch.testing.assert_close(lln.attention(q, k, v, alpha=alpha, beta=beta), expected)


def test_left_out_scales_are_measured_per_sample_and_head_over_valid_tokens():
    q, k, v = random_qkv(3, 4, 60, key_heads=2)
    q = q * torch.rand(3, 4, 1, 1) * 2
    k = k * torch.rand(3, 2, 1, 1) * 2
    key_mask, query_mask = torch.rand(3, 60) > 0.3, torch.rand(3, 60) > 0.3
    got = lln.attention(q, k, v, key_mask=key_mask, query_mask=query_mask)
    for b in range(3):
        for h in range(4):
            group = q[b, h // 2 * 2 : h // 2 * 2 + 2][:, query_mask[b]]
            keys = k[b, h // 2, key_mask[b]]
            alpha, beta = lln.match_moments(
                group.std(correction=0).item(), keys.std(correction=0).item(), 8
            )
            alone = lln.attention(
                q[b : b + 1, h : h + 1],
                keys[None, None],
                v[b : b + 1, h // 2 : h // 2 + 1, key_mask[b]],
                alpha=alpha,
                beta=beta,
            )
            torch.testing.assert_close(got[b, h], alone[0, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["paper", "variance", "entropy"])
@pytest.mark.parametrize("normalize_keys", [False, True])
def test_measured_scales_are_constants_of_the_backward_pass(method, normalize_keys):
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 2, 30, width=16))
    out = lln.attention(q, k, v, method=method, normalize_keys=normalize_keys)
    alpha, beta = lln.moments.measure_scales(q, k, method=method, normalize_keys=normalize_keys)
    fixed = lln.attention(q, k, v, alpha=alpha, beta=beta, normalize_keys=normalize_keys)
    torch.testing.assert_close(out, fixed)
    for a, b in zip(
        torch.autograd.grad(out.sum(), (q, k, v)),
        torch.autograd.grad(fixed.sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", [None, 4])
def test_gradcheck_with_explicit_scales(is_causal, near):
    q, k, v = (
        x.requires_grad_() for x in random_qkv(1, 2, 7, 9, width=3, value_width=2, key_heads=1)
    )
    alpha, beta = (x.requires_grad_() for x in random_scales(1, 2, 1))
    mask = torch.tensor([[True, False, True, True, True, True, False, True, True]])
    assert torch.autograd.gradcheck(
        lambda q, k, v, a, b: lln.attention(
            q, k, v, alpha=a, beta=b, key_mask=mask, is_causal=is_causal, near=near
        ),
        (q, k, v, alpha, beta),
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("width", [16, 48])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_the_diagonal_branch_is_scaled_by_the_head_size_unless_told(is_causal, width, scale):
    """Fig. 3, right branch: softmax of qᵀk / sqrt(D)."""
    q, k, v = random_qkv(2, 2, 20, width=width)
    alpha, beta = random_scales(2, 2, 2)
    options = {"alpha": alpha, "beta": beta, "is_causal": is_causal}
    used = 1 / math.sqrt(width) if scale is None else scale
    expected = reference.lln_diag(q, k, v, block=8, scale=used, **options)
    out = lln.attention(q, k, v, near=lln.Near(8, scale=scale), **options)
    torch.testing.assert_close(out, expected)
    cu = torch.tensor([0, 20])
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    options |= {"alpha": alpha[:1], "beta": beta[:1]}
    varlen = lln.attention_varlen(*packed, cu, near=lln.Near(8, scale=scale), **options)
    torch.testing.assert_close(varlen.transpose(0, 1), expected[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_output_has_the_dtype_of_the_input(dtype, impl):
    q, k, v = random_qkv(dtype=dtype)
    options = {"alpha": 2.0, "beta": 2.0, "impl": impl}
    assert lln.attention(q, k, v, **options).dtype == dtype
    assert lln.attention(q, k, v, near=4, is_causal=True, **options).dtype == dtype


def test_autocast_behaves_as_for_sdpa():
    q, k, v = random_qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = lln.attention(q, k, v, alpha=2.0, beta=2.0)
        sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        double = lln.attention(q.double(), k.double(), v.double(), alpha=2.0, beta=2.0)
    assert out.dtype == sdpa.dtype == torch.bfloat16
    assert double.dtype == torch.float64
    rounded = lln.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), alpha=2.0, beta=2.0)
    assert torch.equal(out, rounded), "inside, autocast must not lower the float32 sums"


@pytest.mark.parametrize("options", [{}, {"near": 16}, {"is_causal": True}, {"method": "entropy"}])
def test_compile_keeps_one_graph(options):
    if options.get("is_causal"):
        options = {**options, "alpha": 2.0, "beta": 2.0}
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 2, 40, dtype=torch.float32, width=16))
    mask = torch.rand(1, 40) > 0.2
    compiled = torch.compile(
        lambda q, k, v: lln.attention(q, k, v, key_mask=mask, **options),
        fullgraph=True,
        backend="aot_eager",
    )
    out, plain = compiled(q, k, v), lln.attention(q, k, v, key_mask=mask, **options)
    torch.testing.assert_close(out, plain)
    for a, b in zip(
        torch.autograd.grad(out.sum(), (q, k, v)),
        torch.autograd.grad(plain.sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_compile_keeps_packed_sequences_in_one_graph():
    q, k, v = (torch.randn(30, 2, 8) for _ in range(3))
    cu = torch.tensor([0, 10, 30])
    compiled = torch.compile(lln.attention_varlen, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, cu), lln.attention_varlen(q, k, v, cu))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("near", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_packed_sequences_are_those_of_each_by_itself(is_causal, near, dtype):
    q = torch.randn(23, 4, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(23, 2, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    wide = torch.promote_types(dtype, torch.float32)
    alpha, beta = (x.to(wide).requires_grad_() for x in random_scales(5, 4, 2))
    # all but the empty one of like lengths, two with other numbers of keys than of queries
    cu_q, cu_k = torch.tensor([0, 5, 5, 11, 16, 23]), torch.tensor([0, 7, 7, 11, 16, 23])
    options = {"is_causal": is_causal, "near": near}
    packed = lln.attention_varlen(q, k, v, cu_q, cu_k, alpha=alpha, beta=beta, **options)
    alone = torch.cat(
        [
            lln.attention(
                q[cu_q[s] : cu_q[s + 1]].transpose(0, 1)[None],
                k[cu_k[s] : cu_k[s + 1]].transpose(0, 1)[None],
                v[cu_k[s] : cu_k[s + 1]].transpose(0, 1)[None],
                alpha=alpha[s : s + 1],
                beta=beta[s : s + 1],
                **options,
            )[0].transpose(0, 1)
            for s in range(5)
        ]
    )
    torch.testing.assert_close(packed, alone)
    leaves, d_out = (q, k, v, alpha, beta), torch.randn_like(packed)
    for a, b in zip(
        torch.autograd.grad(packed, leaves, d_out),
        torch.autograd.grad(alone, leaves, d_out),
        strict=True,
    ):
        # In half precision the two branches of LLN+Diag are rounded at different places.
        loose = {"rtol": 2e-2, "atol": 4e-3} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(a, b, **loose)


def test_checkpointing_recomputes_the_same():
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 2, 40))

    def run(q, k, v):
        return lln.attention(q, k, v, alpha=2.0, beta=2.0, near=16)

    direct = torch.autograd.grad(run(q, k, v).sum(), (q, k, v))
    out = torch.utils.checkpoint.checkpoint(run, q, k, v, use_reentrant=False)
    for a, b in zip(direct, torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", ["summarize", "read", "causal", "near", "varlen"])
def test_registered_ops_pass_opcheck(op):
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 2, 9))
    scale = torch.full((1, 2), 2.0, dtype=torch.float64)
    log_mass, mean = torch.randn(1, 2, 8).double(), torch.randn(1, 2, 8, 8).double()
    packed = [x[0].transpose(0, 1).detach().requires_grad_() for x in (q, k, v)]
    cu = torch.tensor([0, 4, 9])
    sinks = k[:, :, :1].detach(), v[:, :, :1].detach(), torch.zeros(1, 1, dtype=torch.long)
    arguments = {
        "summarize": (k, v, scale, None),
        "read": (q, scale, log_mass, mean, None, False),
        "causal": (q, k, v, scale, scale, None, log_mass, mean, None, False),
        "near": (q, k, v, *sinks, None, None, 4, 0, 0.5, 0, False),
        "varlen": (
            *packed,
            cu,
            cu,
            scale.expand(2, 2),
            scale.expand(2, 2),
            None,
            0,
            1.0,
            False,
        ),
    }[op]
    torch.library.opcheck(getattr(torch.ops.lln, f"{op}_eager").default, arguments)


def test_streaming_equals_the_whole():
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 4, 50, key_heads=2))
    scales = {"alpha": 1.5, "beta": 2.0}
    whole = lln.attention(q, k, v, is_causal=True, **scales)
    state, pieces = None, []
    for part in (slice(0, 20), slice(20, 21), slice(21, 22), slice(22, 50)):
        out, state = lln.prefill(q[:, :, part], k[:, :, part], v[:, :, part], state, **scales)
        pieces.append(out)
    stream = torch.cat(pieces, dim=2)
    torch.testing.assert_close(stream, whole)
    d_out = torch.randn_like(whole)
    for a, b in zip(
        torch.autograd.grad(stream, (q, k, v), d_out),
        torch.autograd.grad(whole, (q, k, v), d_out),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    complete = lln.summarize(k, v, beta=2.0)
    torch.testing.assert_close(state.log_mass, complete.log_mass)
    torch.testing.assert_close(state.mean, complete.mean)


def test_a_token_with_a_state_is_one_launch_unless_a_gradient_is_wanted(monkeypatch):
    q, k, v = random_qkv(1, 2, 1)
    state = lln.summarize(k, v, beta=1.0)
    monkeypatch.setattr(functional.triton, "refuses", lambda call: None)
    decodes = functional._decodes_in_one_launch
    assert decodes(q, k, v, state, None) and decodes(q, k, v, state, "triton")
    assert not decodes(q, k, v, None, None) and not decodes(q, k, v, state, "eager")
    assert not decodes(*(x.repeat(1, 1, 2, 1) for x in (q, k, v)), state, None)
    v.requires_grad_()
    assert not decodes(q, k, v, state, None)
    with torch.no_grad():
        assert decodes(q, k, v, state, None)


@pytest.mark.parametrize("positions_count, groups", [(False, "04 2 3"), (True, "0 2 3 4")])
def test_packed_sequences_of_like_lengths_are_computed_together(positions_count, groups):
    """Where positions count, not those with other numbers of keys than of queries."""
    queries, keys = ([0, 5, 5, 12, 14, 18], [0, 4, 4, 12, 14, 18])
    found = _groups(torch.tensor(queries), torch.tensor(keys), positions_count)
    assert sorted("".join(map(str, group.members)) for group in found) == groups.split()


def test_the_empty_state_is_the_identity_and_reads_as_zero():
    q, k, v = random_qkv()
    empty = lln.State.empty(2, 2, 8, dtype=torch.float64)
    state = lln.summarize(k, v, beta=2.0)
    for merged in (empty.merge(state), state.merge(empty)):
        torch.testing.assert_close(merged.mean, state.mean)
        torch.testing.assert_close(merged.log_mass, state.log_mass)
    assert (lln.read(q, empty, alpha=2.0) == 0).all()
    assert empty.merge(empty).log_mass.eq(-torch.inf).all()
    assert (lln.read(q, lln.summarize(k[:, :, :0], v[:, :, :0], beta=2.0), alpha=2.0) == 0).all()


@pytest.mark.parametrize("options", [{}, {"near": 4}, {"is_causal": True}])
def test_all_keys_masked_gives_zero_and_finite_gradients(options):
    q, k, v = (x.requires_grad_() for x in random_qkv(2, 2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    out = lln.attention(q, k, v, alpha=2.0, beta=2.0, key_mask=mask, **options)
    assert (out[1] == 0).all() and (out[0] != 0).all()
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert gradient.isfinite().all() and (gradient[1] == 0).all()
    measured = lln.attention(q, k, v, key_mask=mask) if not options else out
    assert measured.isfinite().all()


def test_nan_stays_where_it_is():
    q, k, v = random_qkv(2, 2, 9)
    q[0, 0, 3], k[1, 1, 2] = torch.nan, torch.nan
    out = lln.attention(q, k, v, alpha=2.0, beta=2.0)
    assert out[0, 0, 3].isnan().all() and out[1, 1].isnan().all()
    rest = out.isnan()
    rest[0, 0, 3] = rest[1, 1] = False
    assert not rest.any()
    measured = lln.attention(q, k, v)
    assert not measured[0, 1].isnan().any() and not measured[1, 0].isnan().any()


def test_strided_inputs_are_taken_as_they_are():
    packed = torch.randn(2, 11, 3, 4, 8, dtype=torch.float64)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    copy = [x.contiguous() for x in (q, k, v)]
    for options in ({}, {"is_causal": True}, {"near": 4}):
        got = lln.attention(q, k, v, alpha=2.0, beta=2.0, **options)
        torch.testing.assert_close(got, lln.attention(*copy, alpha=2.0, beta=2.0, **options))


@pytest.mark.parametrize(
    "is_causal, options",
    [
        (False, {}),
        (False, {"near": 4}),
        (True, {}),
        (True, {"near": 4}),
        (True, {"causal_block": 4}),
    ],
)
def test_implementations_are_told_what_is_causal(is_causal, options, monkeypatch):
    told = []
    monkeypatch.setattr(eager, "refuses", lambda call: told.append(call.is_causal))
    options = {**options, "is_causal": is_causal, "alpha": 1.0, "beta": 1.0}
    lln.attention(*random_qkv(1, 2, 9), **options, impl="eager")
    assert told and all(found == is_causal for found in told)


def test_which_tells_what_is_taken():
    q, k, v = random_qkv()
    assert lln.which(q, k, v, impl="eager") == "eager"
    assert lln.which(q, k, v, impl="reference") == "reference"
    assert lln.which(q, k, v) == "eager", "float64 has no kernel"


def test_reference_and_eager_agree_through_the_public_function():
    q, k, v = random_qkv(2, 4, 33, key_heads=2)
    options = {"alpha": 1.5, "beta": 2.0, "near": 8, "is_causal": True}
    torch.testing.assert_close(
        lln.attention(q, k, v, impl="reference", **options),
        lln.attention(q, k, v, impl="eager", **options),
    )
    p = reference.lln_matrix(
        q, k, alpha=torch.full((2, 4), 1.5).double(), beta=torch.full((2, 2), 2.0).double()
    )
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))


def test_numbers_given_in_inference_mode_can_be_trained_with_later():
    q, k, v = (x.requires_grad_() for x in random_qkv())
    with torch.inference_mode():
        lln.attention(q, k, v, alpha=1.23, beta=1.23)
    lln.attention(q, k, v, alpha=1.23, beta=1.23).sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"near": 4}], ids=str)
@pytest.mark.parametrize("batch, queries, keys", [(0, 8, 8), (0, 3, 8), (2, 0, 5), (2, 5, 0)])
def test_nothing_in_gives_nothing_out(batch, queries, keys, options, impl):
    """An empty batch, no queries or no keys are sizes like any other, for gradients too."""
    q, k, v = random_qkv(batch, 4, queries, keys, 8, 6, key_heads=2)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = lln.attention(q, k, v, alpha=2.0, beta=2.0, impl=impl, **options)
    assert out.shape == (batch, 4, queries, 6) and (out == 0).all()
    for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


def test_a_stream_of_no_samples():
    q, k, v = random_qkv(0, 4, 5, key_heads=2)
    out, state = lln.prefill(q, k, v, alpha=2.0, beta=2.0)
    out, state = lln.prefill(q, k, v, state, alpha=2.0, beta=2.0)
    assert out.shape == q.shape and len(state.mean) == 0


@pytest.mark.parametrize("pieces", [(12,), (5, 7), (11, 1)], ids=str)
def test_a_stream_does_not_keep_masked_keys(pieces):
    q, k, v = random_qkv(2, 2, 12)
    alpha, beta = random_scales(2, 2, 2)
    mask = torch.rand(2, 12) > 0.4
    state, start = None, 0
    for size in pieces:
        part = slice(start, start + size)
        given = [x[:, :, part] for x in (q, k, v)]
        options = {"alpha": alpha, "beta": beta, "key_mask": mask[:, part]}
        _, state = lln.prefill(*given, state, **options)
        start += size
    expected = lln.summarize(k, v, beta=beta, key_mask=mask)
    torch.testing.assert_close(state.mean, expected.mean)
    torch.testing.assert_close(state.log_mass, expected.log_mass)


@pytest.mark.parametrize(
    ("name", "mask", "error"),
    [
        ("key_mask", torch.ones(2, 11, dtype=torch.bool), ValueError),
        ("key_mask", torch.ones(2, 12), TypeError),
        ("query_mask", torch.ones(1, 12, dtype=torch.bool), ValueError),
    ],
)
def test_masks_are_checked_with_explicit_scales_too(name, mask, error):
    q, k, v = random_qkv(2, 2, 12)
    with pytest.raises(error, match=f"^{name} "):
        lln.attention(q, k, v, alpha=2.0, beta=2.0, **{name: mask})


@pytest.mark.parametrize("value", [math.inf, math.nan, torch.tensor([1.0, -math.inf])], ids=str)
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_scales_must_be_finite(name, value):
    q, k, v = random_qkv(2, 2, 12)
    with pytest.raises(ValueError, match=f"^{name}=.* must be finite and not negative; take"):
        lln.attention(q, k, v, **{"alpha": 1.0, "beta": 1.0, name: value})


@pytest.mark.parametrize("shape", [(12, 12), (2, 1, 12), (2, 1, 12, 12)], ids=str)
def test_a_mask_per_pair_gets_the_remedy(shape):
    q, k, v = random_qkv(2, 2, 12)
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"key_mask has shape .*use is_causal=True for a triangle"):
        lln.attention(q, k, v, key_mask=mask)


def test_a_mask_of_another_length_gets_no_such_remedy():
    q, k, v = random_qkv(2, 2, 12)
    with pytest.raises(ValueError, match="key_mask has shape") as raised:
        lln.attention(q, k, v, key_mask=torch.ones(2, 11, dtype=torch.bool))
    assert "triangle" not in str(raised.value)
