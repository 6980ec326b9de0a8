"""Near keys exactly, far keys by LLN, one normaliser: against the definition, and its limits."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from lln import Near
from lln.ops import reference
from lln.ops.common.parts import blend
from lln.ops.linear.bidirectional import bidirectional
from lln.ops.window import lln_diag as lln_diag_op
from lln.ops.window import near_far as near_far_op
from lln.ops.window.eager_far import far_backward, far_op
from lln.ops.window.eager_near import near_backward, near_op
from lln.ops.window.eager_near_far import far_mask, near_share, sink_positions
from tests.helpers import assert_matches, random_qkv, random_scales, run_with_grads, windowed

near_far = windowed(near_far_op.near_far)
lln_diag = windowed(lln_diag_op.lln_diag)

WINDOWS = [(16, 0, 0), (16, 5, 0), (16, 16, 3), (16, 40, 2), (1, 0, 0), (300, 0, 0)]
windows = pytest.mark.parametrize("block, overlap, sinks", WINDOWS)
causality = pytest.mark.parametrize("is_causal", [False, True])


def tensors(queries: int, keys: int | None = None, slots: int = 8, spread: float = 1.0) -> dict:
    q, k, v = random_qkv(2, 4, queries, keys, value_width=5, key_heads=2)
    alpha, beta = random_scales(2, 4, 2)
    return {
        "q": spread * q,
        "k": spread * k,
        "v": v,
        "q_far": spread * torch.randn(2, 4, queries, slots, dtype=torch.float64),
        "k_far": spread * torch.randn(2, 2, k.shape[2], slots, dtype=torch.float64),
        "alpha": alpha,
        "beta": beta,
        "gamma": torch.randn(2, 4, dtype=torch.float64),
    }


def compare(op, oracle, given, dtype=torch.float64, **options) -> None:
    """`op` in `dtype` against `oracle` in float64; the plain formula sets the tolerance."""
    d_out = torch.randn_like(oracle(**given, **options)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    rounded = {name: x.to(dtype if name[0] in "qkv" else wide) for name, x in given.items()}
    exact_in = {name: x.double() for name, x in rounded.items()}
    exact = run_with_grads(lambda **t: oracle(**t, **options), exact_in, d_out.double())
    plain = run_with_grads(lambda **t: oracle(**t, **options), rounded, d_out)
    got = run_with_grads(lambda **t: op(**t, **options, impl="eager"), rounded, d_out)
    for name in exact:
        if dtype == torch.float64:  # the plain formula is the oracle: there is nothing between them
            torch.testing.assert_close(got[name], exact[name], rtol=1e-10, atol=1e-11)
        else:
            assert_matches(name, got[name], plain[name], exact[name], factor=4)


@causality
@windows
@pytest.mark.parametrize("length", [1, 17, 63])
def test_outputs_and_gradients_are_those_of_the_definition(
    length, block, overlap, sinks, is_causal
):
    mask = torch.rand(2, length) > 0.3
    options = {"block": block, "overlap": overlap, "sinks": sinks, "scale": 0.4}
    compare(
        near_far, reference.near_far, tensors(length), key_mask=mask, is_causal=is_causal, **options
    )


@causality
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(dtype, is_causal):
    options = {"block": 16, "overlap": 7, "sinks": 2, "scale": 0.4}
    compare(near_far, reference.near_far, tensors(100), dtype, is_causal=is_causal, **options)


@causality
@pytest.mark.parametrize("queries, keys", [(5, 100), (70, 100), (100, 30), (0, 9), (9, 0), (0, 0)])
def test_cross_attention_is_aligned_bottom_right(queries, keys, is_causal):
    mask = torch.rand(2, keys) > 0.3
    options = {"block": 16, "overlap": 7, "sinks": 2, "scale": 0.4}
    given = tensors(queries, keys)
    compare(near_far, reference.near_far, given, key_mask=mask, is_causal=is_causal, **options)


@causality
@windows
@pytest.mark.parametrize("queries, keys", [(100, 100), (37, 100), (100, 37)])
def test_the_average_takes_the_same_windows(queries, keys, block, overlap, sinks, is_causal):
    given = {name: x for name, x in tensors(queries, keys).items() if name != "gamma"}
    mask = torch.rand(2, keys) > 0.3
    options = {"block": block, "overlap": overlap, "sinks": sinks, "scale": 0.4}
    compare(lln_diag, reference.lln_diag, given, key_mask=mask, is_causal=is_causal, **options)


@causality
def test_rows_sum_to_one_and_no_weight_is_negative(is_causal):
    given = tensors(60)
    given["v"] = torch.eye(60, dtype=torch.float64).expand(2, 2, 60, 60)
    p = near_far(**given, near=Near(16, overlap=5, sinks=2, scale=0.4), is_causal=is_causal)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))
    assert (p >= 0).all()
    if is_causal:
        assert (p.triu(1) == 0).all()


@causality
def test_a_hidden_key_is_a_key_that_is_not_there(is_causal):
    """Also as a sink: the first valid keys are meant, whatever the hidden ones hold."""
    given = tensors(48)
    keep = torch.ones(2, 48, dtype=torch.bool)
    keep[:, :16] = False  # a whole block, so that the blocks of the others do not move
    nan = {name: given[name].clone() for name in ("k", "v", "k_far")}
    for x in nan.values():
        x[:, :, :16] = torch.nan
    options = {"block": 16, "overlap": 5, "sinks": 3, "scale": 0.4, "is_causal": is_causal}
    hidden = near_far(**{**given, **nan}, key_mask=keep, **options)[:, :, 16:]
    left = {name: x[:, :, 16:] if x.dim() == 4 else x for name, x in given.items()}
    torch.testing.assert_close(hidden, near_far(**left, **options))


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_block_that_holds_every_key_is_softmax_attention(is_causal):
    given = tensors(40)
    heads = {name: given[name].repeat_interleave(2, 1) for name in ("k", "v")}
    expected = F.scaled_dot_product_attention(
        given["q"], heads["k"], heads["v"], scale=0.4, is_causal=is_causal
    )
    out = near_far(**given, near=Near(40, scale=0.4), is_causal=is_causal)
    torch.testing.assert_close(out, expected)


@causality
def test_a_low_level_leaves_the_near_keys_and_a_high_one_the_far_keys(is_causal):
    given = tensors(60)
    options = {"block": 16, "overlap": 5, "sinks": 2, "scale": 0.4, "is_causal": is_causal}
    given["gamma"] = torch.full((2, 4), -1e4, dtype=torch.float64)
    near = reference.near(given["q"], given["k"], given["v"], **options)
    torch.testing.assert_close(near_far(**given, **options), near)
    given["gamma"] = torch.full((2, 4), 1e4, dtype=torch.float64)
    linear = {"alpha": given["alpha"], "beta": given["beta"]}
    others = near_far(**given, **options)
    far_rows = ~reference.near_field(60, 60, Near(16, overlap=5, sinks=2), is_causal=is_causal)
    far_rows &= reference.visible(60, 60, is_causal=is_causal)
    scores = reference.lln_scores(given["q_far"], given["k_far"], **linear)
    p = reference.normalize_rows(scores, far_rows)
    expected = torch.where(far_rows.any(-1, keepdim=True), reference.attend(p, given["v"]), near)
    torch.testing.assert_close(others, expected)


@causality
def test_rows_without_near_or_far_keys_are_zero_where_both_are_missing(is_causal):
    given = tensors(48)
    mask = torch.zeros(2, 48, dtype=torch.bool)
    mask[0, 20:24] = True  # sample 1 has no key; of sample 0 only one block has
    options = {"block": 16, "scale": 0.4, "is_causal": is_causal, "key_mask": mask}
    found = run_with_grads(
        lambda **t: near_far(**t, **options), given, torch.randn(2, 4, 48, 5, dtype=torch.float64)
    )
    assert all(x.isfinite().all() for x in found.values())
    assert (found["out"][1] == 0).all()
    for name in ("d_q", "d_k", "d_v", "d_q_far", "d_k_far"):
        assert (found[name][1] == 0).all(), name
    if is_causal:
        assert (found["out"][0, :, :20] == 0).all()


def test_the_share_of_the_near_keys_at_its_edges():
    none, some = torch.tensor([[[-torch.inf]]]), torch.tensor([[[0.3]]])
    level = torch.zeros(1, 1)
    assert near_share(none, some, level) == 0
    assert near_share(some, none, level) == 1
    assert near_share(none, none, level) == 0
    assert near_share(some, some, level) == 0.5


@causality
def test_large_inputs_stay_finite(is_causal):
    given = {name: x.float() for name, x in tensors(100, spread=50.0).items()}
    d_out = torch.randn(2, 4, 100, 5)
    options = {"block": 16, "overlap": 5, "sinks": 2, "scale": 0.4, "is_causal": is_causal}
    found = run_with_grads(lambda **t: near_far(**t, **options), given, d_out)
    assert all(x.isfinite().all() for x in found.values())


@causality
def test_dropout_acts_inside_each_branch(is_causal):
    """Against the two branches by themselves, each with its mask, mixed by the undropped share."""
    given, block, overlap = tensors(40), 16, 5
    width = block + (1 if is_causal else 2) * overlap + 2
    slots = F.dropout(torch.ones(2, 4, 40, 8, dtype=torch.float64), 0.4)
    weights = F.dropout(torch.ones(2, 4, 40, width, dtype=torch.float64), 0.4)
    options = {"block": block, "overlap": overlap, "sinks": 2, "scale": 0.4}
    out = near_far(
        **given, **options, is_causal=is_causal, slot_dropout=slots, probability_dropout=weights
    )
    eye = {**given, "v": torch.eye(40, dtype=torch.float64).expand(2, 2, 40, 40)}
    p = near_far(**eye, **options, is_causal=is_causal)
    near = reference.near_field(40, 40, Near.of_op(options), is_causal=is_causal)
    keys = torch.arange(40)
    start = keys[:, None] // block * block - overlap
    column = keys[None] - start  # where key j stands in the window of query i
    inside = (column >= 0) & (column < width - 2)
    column = torch.where(inside, column, width - 2 + keys.clamp(max=1)[None])
    near_part = p.masked_fill(~near, 0) * weights.gather(-1, column.expand(2, 4, -1, -1))
    a = given["alpha"][..., None, None] * given["q_far"]
    f = (given["beta"][..., None, None] * given["k_far"]).repeat_interleave(2, 1)
    per_slot = torch.softmax(a[:, :, :, None] + f[:, :, None], -1)  # [B, H, N, M, S]
    far_part = p.masked_fill(near, 0) * (per_slot * slots[:, :, :, None]).sum(-1)
    expected = (near_part + far_part) @ given["v"].repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected)


def test_a_stream_that_is_cut_is_the_stream():
    """The ops take a state and a window of earlier keys: what decoding keeps."""
    block, overlap, sinks, cut, total = 16, 5, 2, 37, 70
    given = tensors(total)
    whole = near_far(
        **given, near=Near(block, overlap=overlap, sinks=sinks, scale=0.4), is_causal=True
    )
    first = cut // block * block - overlap  # where the window of the next query begins
    q, k, v = (given[name] for name in "qkv")
    sink = torch.zeros(2, total, dtype=torch.bool)
    sink[:, :sinks] = True
    early = slice(0, first)
    state = reference.summarize(
        given["k_far"][:, :, early], v[:, :, early], beta=given["beta"], key_mask=~sink[:, early]
    )
    always = k[:, :, :sinks], v[:, :, :sinks], torch.arange(sinks).expand(2, sinks) - first
    rest = slice(first, None)
    local = near_op(
        q[:, :, cut:], k[:, :, rest], v[:, :, rest], *always, None, None,
        block, overlap, 0.4, first, True,
    )  # fmt: skip
    linear = far_op(
        given["q_far"][:, :, cut:], given["k_far"][:, :, rest], v[:, :, rest], given["alpha"],
        given["beta"], *state, None, None, block, overlap, first, True,
    )  # fmt: skip
    share = near_share(local[1], linear[1], given["gamma"])[..., None]
    torch.testing.assert_close(share * local[0] + (1 - share) * linear[0], whole[:, :, cut:])


@pytest.mark.parametrize("op", ["near", "far"])
@causality
def test_operators_are_registered_as_torch_wants_them(op, is_causal):
    """Of tensors as projections leave them: heads inside tokens."""
    given = {
        name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x
        for name, x in tensors(20).items()
    }
    q, k, v = (given[name].requires_grad_() for name in "qkv")
    mask = torch.rand(2, 20) > 0.2
    if op == "near":
        sinks = k[:, :, :2].detach(), v[:, :, :2].detach(), torch.arange(2).expand(2, 2)
        arguments = (q, k, v, *sinks, mask, None, 8, 3, 0.4, 0, is_causal)
        operator = torch.ops.lln.near_eager.default
    else:
        state = torch.zeros(2, 2, 8).double(), torch.zeros(2, 2, 8, 5).double()
        far = given["q_far"].requires_grad_(), given["k_far"].requires_grad_(), v
        scales = given["alpha"], given["beta"]
        arguments = (*far, *scales, *state, mask, None, 8, 3, 0, is_causal)
        operator = torch.ops.lln.far_eager.default
    torch.library.opcheck(operator, arguments)


@causality
@pytest.mark.parametrize("tokens", [16, 20])
def test_gradients_lie_as_the_compiler_was_told(tokens, is_causal):
    """Contiguous, whatever the strides of the inputs; compiled programs on a GPU insist on it."""
    given = {
        name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x
        for name, x in tensors(tokens).items()
    }
    q, k, v = (given[name] for name in "qkv")
    out, row = torch.randn(2, 4, tokens, 5).double(), torch.randn(2, 4, tokens).double()
    sinks = k[:, :, :2], v[:, :, :2], torch.arange(2).expand(2, 2)
    near = near_backward(out, row, q, k, v, *sinks, None, None, 8, 3, 0.4, 0, is_causal)
    state = torch.zeros(2, 2, 8).double(), torch.zeros(2, 2, 8, 5).double()
    far = given["q_far"], given["k_far"], v, given["alpha"], given["beta"], *state
    far = far_backward(out, row, *far, None, None, 8, 3, 0, is_causal)
    assert all(x.is_contiguous() for x in (*near, *far))


@causality
def test_samples_of_a_vmap_are_samples_of_a_batch(is_causal):
    given = tensors(20)
    options = {"block": 8, "overlap": 3, "sinks": 2, "scale": 0.4, "is_causal": is_causal}

    def one(*values):
        single = dict(zip(given, (x[None] for x in values), strict=True))
        return near_far(**single, **options)[0]

    found = torch.func.vmap(one)(*given.values())
    torch.testing.assert_close(found, near_far(**given, **options))


@pytest.mark.slow
def test_compiled_and_plain_agree():
    given = {name: x.float() for name, x in tensors(40).items()}
    options = {"block": 8, "overlap": 3, "sinks": 2, "scale": 0.4}
    given |= {n: given[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v")}
    compiled = torch.compile(near_far, backend="aot_eager", fullgraph=True)
    d_out = torch.randn(2, 4, 40, 5)
    plain = run_with_grads(lambda **t: near_far(**t, **options), given, d_out)
    traced = run_with_grads(lambda **t: compiled(**t, **options), given, d_out)
    for name, expected in plain.items():
        torch.testing.assert_close(traced[name], expected)


def test_memory_is_linear_in_the_length():
    """The largest tensor that the ops make grows with N, not N²."""
    sizes = []
    for length in (256, 512):
        given = {name: x.float() for name, x in tensors(length).items()}
        with torch.profiler.profile(profile_memory=True) as profile:
            near_far(**given, near=Near(16, overlap=5, sinks=2, scale=0.4))
        sizes.append(max(event.self_cpu_memory_usage for event in profile.key_averages()))
    assert sizes[1] < 3 * sizes[0]


@pytest.mark.parametrize("block, overlap", list(itertools.product((1, 7, 16), (0, 3, 20))))
def test_windows_and_their_gradient_are_adjoint(block, overlap):
    from lln.ops.window.eager_near import Grid

    grid = Grid(30, 41, block, overlap, 5, False)
    x = torch.randn(1, 1, 41, 2, dtype=torch.float64)
    y = torch.randn(1, 1, grid.count, grid.width, 2, dtype=torch.float64)
    back = torch.zeros_like(x)
    grid.add_windows_(back, y)
    torch.testing.assert_close((grid.windows(x) * y).sum(), (x * back).sum())


@pytest.mark.parametrize("window", [{}, {"overlap": 3}, {"overlap": 3, "sinks": 2}], ids=str)
@causality
def test_near_keys_alone(window, is_causal):
    q, k, v = (tensors(40)[name] for name in "qkv")
    near = Near(16, **window, scale=0.4)
    options = {"key_mask": torch.rand(2, 40) > 0.3}
    if is_causal:  # else by default
        options["is_causal"] = True
    expected = reference.near(q, k, v, block=16, **window, scale=0.4, **options)
    torch.testing.assert_close(near_far_op.near(q, k, v, near=near, **options), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fake_results_of_near_keys_look_like_real_ones(dtype):
    q, k, v = random_qkv(2, 4, 9, 7, key_heads=2, value_width=5, dtype=dtype)
    sinks = k[:, :, :1], v[:, :, :1], torch.zeros(2, 1, dtype=torch.long)
    fake = [x.to("meta") for x in (q, k, v, *sinks)]
    options = None, None, 4, 2, 0.3, 0, False
    for found, real in zip(
        near_op(*fake, *options), near_op(q, k, v, *sinks, *options), strict=True
    ):
        assert (found.shape, found.dtype) == (real.shape, real.dtype)
        assert found.stride() == real.stride()


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_branches_are_blended_and_rounded_once(wide):
    linear, local = (torch.randn(2, 3, 5, 4).to(wide) for _ in range(2))
    mix = torch.tensor([0.0, 0.3, 1.0])
    for weight, each in ((None, torch.full((3,), 0.5)), (mix, mix)):
        share = each.double()[:, None, None]
        exact = share * linear.double() + (1 - share) * local.double()
        found = blend(linear, local, weight, torch.bfloat16)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, exact.bfloat16(), rtol=1e-2, atol=1e-6)


def test_sinks_are_never_far():
    k, mask = torch.randn(2, 1, 5, 4), torch.tensor([[1, 1, 1, 1, 0], [0, 1, 0, 1, 1]]).bool()
    assert far_mask(k, None, mask) is far_mask(k, torch.empty(2, 0).long(), mask) is mask
    assert far_mask(k, None, None) is None
    first = far_mask(k, sink_positions(k, 2, None), None)
    assert first.tolist() == [[False, False, True, True, True]] * 2
    valid = far_mask(k, sink_positions(k, 2, mask), mask)
    assert valid.int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_features_of_their_own_reach_the_average_too():
    given = {name: x for name, x in tensors(40).items() if name != "gamma"}
    mix = torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=torch.float64)
    out = lln_diag(**given, near=Near(16, scale=0.4), mix=mix)
    linear = bidirectional(
        given["q_far"], given["k_far"], given["v"], alpha=given["alpha"], beta=given["beta"]
    )
    torch.testing.assert_close(out[:, 3], linear[:, 3])
    torch.testing.assert_close(
        out, reference.lln_diag(**given, block=16, scale=0.4, mix=mix), rtol=1e-9, atol=1e-9
    )


def test_attention_is_causal_only_if_told():
    given = tensors(40)
    expected = reference.near_far(**given, block=16, scale=0.4)
    torch.testing.assert_close(near_far(**given, near=Near(16, scale=0.4), impl="eager"), expected)
