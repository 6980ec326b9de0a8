"""LLNMultiheadAttention as a drop-in for torch.nn.MultiheadAttention."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lln import moments
from lln.nn import LLNMultiheadAttention
from lln.ops import reference
from tests.nn.inputs import embeddings, padding

PROJECTIONS = [
    {},
    {"bias": False},
    {"kdim": 6, "vdim": 10},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6},
]


def pair(**options) -> tuple[LLNMultiheadAttention, nn.MultiheadAttention]:
    """Ours and torch's with the same weights, all of them random."""
    torch.manual_seed(0)
    softmax = nn.MultiheadAttention(8, 2, **options)
    for parameter in softmax.parameters():
        nn.init.normal_(parameter)
    ours = LLNMultiheadAttention(8, 2, statistics="fixed", **options)
    ours.load_state_dict(softmax.state_dict())
    return ours, softmax


def inputs(options, queries=5, keys=7, batch=2):
    """query, key, value for the widths in ``options``, batch first."""
    widths = 8, options.get("kdim", 8), options.get("vdim", 8)
    lengths = queries, keys, keys
    return [embeddings(batch, n, w, seed=w + n) for n, w in zip(lengths, widths, strict=True)]


@pytest.mark.parametrize("options", PROJECTIONS, ids=str)
def test_fresh_weights_are_those_of_torch(options):
    """The same laws: biases at 0, matrices by Xavier, up to the random numbers."""
    torch.manual_seed(0)
    ours = dict(LLNMultiheadAttention(64, 2, **options).named_parameters())
    for name, theirs in nn.MultiheadAttention(64, 2, **options).named_parameters():
        assert ours[name].shape == theirs.shape
        assert ours[name].std().item() == pytest.approx(theirs.std().item(), rel=0.3), name
        assert ours[name].mean().item() == pytest.approx(theirs.mean().item(), abs=0.1), name


def test_signatures_extend_those_of_torch():
    def arguments(function):
        return list(inspect.signature(function).parameters.values())

    theirs = arguments(nn.MultiheadAttention.__init__)
    ours = arguments(LLNMultiheadAttention.__init__)
    for own, parameter in zip(ours, theirs, strict=False):
        assert (own.name, own.default, own.kind) == (
            parameter.name,
            parameter.default,
            parameter.kind,
        )
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in ours[len(theirs) :])
    ours, theirs = (
        arguments(LLNMultiheadAttention.forward),
        arguments(nn.MultiheadAttention.forward),
    )
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


@pytest.mark.parametrize("options", PROJECTIONS)
def test_weights_load_both_ways(options):
    _, softmax = pair(**options)
    ours = LLNMultiheadAttention(8, 2, **options)
    ours.load_state_dict(softmax.state_dict())
    back = nn.MultiheadAttention(8, 2, **options)
    back.load_state_dict(ours.state_dict())
    for name, value in softmax.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


@pytest.mark.parametrize("options", PROJECTIONS[:3])
@pytest.mark.parametrize("batch_first", [False, True])
def test_one_key_gives_what_torch_gives(options, batch_first):
    """With a single key any attention returns its value: only the projections are left."""
    ours, softmax = pair(batch_first=batch_first, **options)
    x = inputs(options, keys=1)
    x = x if batch_first else [part.transpose(0, 1) for part in x]
    for got, expected in zip(ours(*x), softmax(*x), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", PROJECTIONS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_shapes_are_those_of_torch(options, batch_first, average):
    ours, softmax = pair(batch_first=batch_first, **options)
    x = inputs(options)
    batched = x if batch_first else [part.transpose(0, 1) for part in x]
    for arguments in (batched, [part[0] for part in x]):
        got = ours(*arguments, average_attn_weights=average)
        expected = softmax(*arguments, average_attn_weights=average)
        assert [part.shape for part in got] == [part.shape for part in expected]
        assert isinstance(got, tuple)
    assert ours(*batched, need_weights=False)[1] is None


def test_unbatched_and_token_first_inputs_give_the_same_numbers():
    ours, _ = pair(batch_first=True)
    second = copy.deepcopy(ours)
    second.batch_first = False
    x = inputs({})
    ignore = ~padding([7, 4], 7)
    out, weights = ours(*x, key_padding_mask=ignore)
    other, other_weights = second(*(p.transpose(0, 1) for p in x), key_padding_mask=ignore)
    torch.testing.assert_close(other.transpose(0, 1), out)
    torch.testing.assert_close(other_weights, weights)
    single, single_weights = ours(*(part[1] for part in x), key_padding_mask=ignore[1])
    torch.testing.assert_close(single, out[1])
    torch.testing.assert_close(single_weights, weights[1])


@pytest.mark.parametrize("near", [None, 3])
def test_matches_the_reference(near):
    torch.manual_seed(0)
    layer = LLNMultiheadAttention(8, 2, batch_first=True, near=near).double()
    x = embeddings(2, 7, 8).double()
    valid = padding([7, 4], 7)
    out, weights = layer(x, x, x, key_padding_mask=~valid, average_attn_weights=False)

    q, k, v = (
        (x @ w.T).unflatten(-1, (2, 4)).transpose(1, 2) for w in layer.in_proj_weight.chunk(3)
    )
    alpha, beta = moments.measure_scales(q, k, key_mask=valid, query_mask=valid)
    matrix = reference.lln_matrix(q, k, alpha=alpha, beta=beta, key_mask=valid)
    if near is not None:
        local = reference.block_diagonal_matrix(q, k, block=3, scale=0.5, key_mask=valid)
        matrix = (matrix + local) / 2
    torch.testing.assert_close(weights, matrix)
    heads = (matrix @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out, layer.out_proj(heads))


@pytest.mark.parametrize("options", PROJECTIONS[3:])
@pytest.mark.parametrize("is_causal", [False, True])
def test_extra_keys_are_seen_by_every_query(options, is_causal):
    ours, _ = pair(batch_first=True, **options)
    layer = LLNMultiheadAttention(8, 2, batch_first=True, statistics="fixed", **options)
    layer.load_state_dict(ours.state_dict())
    x = inputs(options, queries=7)
    valid = padding([7, 4], 7)
    out, weights = layer(
        *x, key_padding_mask=~valid, average_attn_weights=False, is_causal=is_causal
    )

    weight, bias = layer._projections()
    q, k, v = (
        (part @ w.T + b).unflatten(-1, (2, 4)).transpose(1, 2)
        for part, w, b in zip(x, weight, bias, strict=True)
    )
    mask, seen = valid, torch.ones(7, 7, dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    extras = []
    if options.get("add_bias_kv"):
        extras.append(
            [b.view(1, 2, 1, 4).expand(2, -1, -1, -1) for b in (ours.bias_k, ours.bias_v)]
        )
    if options.get("add_zero_attn"):
        extras.append([torch.zeros(2, 2, 1, 4)] * 2)
    for key, value in extras:
        k, v = torch.cat([k, key], dim=2), torch.cat([v, value], dim=2)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], dim=1)
        seen = torch.cat([seen, torch.ones(7, 1, dtype=torch.bool)], dim=1)
    scales = {name: getattr(layer.attention.statistics, name) for name in ("alpha", "beta")}
    scores = reference.lln_scores(q, k, **{n: s.expand(2, -1) for n, s in scales.items()})
    expected = reference.normalize_rows(scores, seen & mask[:, None, None, :])
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, layer.out_proj((expected @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("bool_mask", [True, False])
def test_padding_equals_truncation(bool_mask):
    torch.manual_seed(0)
    layer = LLNMultiheadAttention(8, 2, batch_first=True, near=4)
    x = embeddings(3, 9, 8)
    ignore = ~padding([9, 6, 1], 9)
    mask = ignore if bool_mask else torch.zeros(3, 9).masked_fill(ignore, -torch.inf)
    out, weights = layer(x, x, x, key_padding_mask=mask)
    for sample, length in enumerate([9, 6, 1]):
        short = x[sample, :length]
        alone, alone_weights = layer(short, short, short)
        torch.testing.assert_close(out[sample, :length], alone)
        torch.testing.assert_close(weights[sample, :length, :length], alone_weights)
    assert (weights.transpose(-1, -2)[ignore] == 0).all()


def test_query_mask_is_taken_from_the_keys_in_self_attention_only():
    layer = LLNMultiheadAttention(8, 2, batch_first=True)
    x = embeddings(1, 6, 8)
    ignore = ~padding([4], 6)
    loud = x.clone()
    loud[:, 4:] *= 100
    quiet = layer(x, x, x, key_padding_mask=ignore)[0][:, :4]
    torch.testing.assert_close(layer(loud, loud, loud, key_padding_mask=ignore)[0][:, :4], quiet)
    measured = []
    for query in (loud, loud.clone()):
        torch.manual_seed(0)
        layer = LLNMultiheadAttention(8, 2, batch_first=True, statistics="running")
        layer(query, loud, loud, key_padding_mask=ignore)
        measured.append(layer.attention.statistics.variances)
    assert (measured[1][0] > 100 * measured[0][0]).all()  # of queries
    torch.testing.assert_close(measured[1][1], measured[0][1])  # of keys


@pytest.mark.parametrize("statistics", ["running", "fixed"])
@pytest.mark.parametrize("bool_mask", [True, False])
def test_the_causal_mask_is_recognised(statistics, bool_mask):
    torch.manual_seed(0)
    layer = LLNMultiheadAttention(8, 2, batch_first=True, statistics=statistics, near=4)
    layer.eval()
    x = embeddings(2, 7, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    mask = mask == -torch.inf if bool_mask else mask
    out, weights = layer(x, x, x, attn_mask=mask, is_causal=True, average_attn_weights=False)
    torch.testing.assert_close(layer(x, x, x, is_causal=True)[0], out)
    assert (weights.triu(1) == 0).all() and (weights.tril() > 0).sum() > 2 * 2 * 7
    changed = x.clone()
    changed[:, 4:] = 9
    torch.testing.assert_close(
        layer(changed, changed, changed, is_causal=True)[0][:, :4], out[:, :4]
    )


def test_masks_that_cannot_be_served_are_refused():
    x = embeddings(2, 7, 8)
    layer = LLNMultiheadAttention(8, 2, batch_first=True, statistics="fixed")
    causal = nn.Transformer.generate_square_subsequent_mask(7)

    def refused(error, message, **arguments):
        with pytest.raises(error, match=message):
            layer(x, x, x, **arguments)

    refused(ValueError, "attn_mask.*key_padding_mask.*is_causal=True", attn_mask=causal)
    refused(ValueError, "attn_mask.*refused", attn_mask=torch.zeros(4, 7, 7))
    refused(ValueError, "not the causal mask", attn_mask=causal.T, is_causal=True)
    refused(ValueError, "not the causal mask", attn_mask=causal + 0.1, is_causal=True)
    refused(ValueError, "not the causal mask", attn_mask=causal.T < 0, is_causal=True)
    refused(ValueError, "square causal mask", attn_mask=causal[:6, :6], is_causal=True)
    refused(ValueError, "other than 0 and -inf", key_padding_mask=torch.full((2, 7), -1e9))
    refused(TypeError, "dtype torch.int64", key_padding_mask=torch.ones(2, 7, dtype=torch.long))
    refused(ValueError, r"shape \[7, 2\]", key_padding_mask=torch.zeros(7, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="5 queries and 7 keys"):
        layer(x[:, :5], x, x, is_causal=True)
    with pytest.raises(ValueError, match=r"running.*fixed"):
        LLNMultiheadAttention(8, 2, batch_first=True)(x, x, x, is_causal=True)


def test_inputs_of_wrong_shape_are_refused():
    layer = LLNMultiheadAttention(8, 2, kdim=6, batch_first=True)
    q, k, v = embeddings(2, 5, 8), embeddings(2, 7, 6), embeddings(2, 7, 8)
    for arguments, message in (
        ((q[None], k, v), r"query has shape \[1, 2, 5, 8\]"),
        ((q, k[0], v), r"key has shape \[7, 6\]"),
        ((q, v, v), r"key has shape \[2, 7, 8\].*size 6"),
        ((q, k, k), r"value has shape \[2, 7, 6\].*size 8"),
        ((q[:1], k, v), "key has batch size 2, query has 1"),
        ((q, k, v[:, :6]), r"key has shape \[2, 7, 6\] and value \[2, 6, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 3}, "embed_dim=8.*num_heads=3"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"near": 4, "add_zero_attn": True}, "near=4.*add_zero_attn"),
        ({"near": 4, "add_bias_kv": True}, "near=4.*add_bias_kv"),
        ({"statistics": "none"}, "statistics='none'"),
    ],
)
def test_bad_options_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LLNMultiheadAttention(**{"embed_dim": 8, "num_heads": 2, **arguments})


def test_softmax_checkpoint_keeps_calibration_but_a_partial_one_is_refused():
    options = {"statistics": "running", "near": 4, "mix": "learned", "learn_scale": True}
    model = nn.ModuleDict({"layer": LLNMultiheadAttention(8, 2, batch_first=True, **options)})
    model["layer"].calibrate_(embeddings(2, 9, 8))
    before = copy.deepcopy(model.state_dict())
    softmax = nn.ModuleDict({"layer": nn.MultiheadAttention(8, 2)})
    model.load_state_dict(softmax.state_dict())
    for name, value in model.state_dict().items():
        source = before if "attention." in name else softmax.state_dict()
        assert torch.equal(value, source[name]), name

    partial = copy.deepcopy(before)
    del partial["layer.attention.mix_logit"]
    with pytest.raises(RuntimeError, match=r"attention\.mix_logit"):
        model.load_state_dict(partial)


def test_assigned_weights_may_be_a_part():
    layer = LLNMultiheadAttention(8, 2, statistics="running")
    layer(*(torch.randn(5, 3, 8) for _ in range(3)))
    before = layer.attention.statistics.variances.clone()
    layer.load_state_dict({"in_proj_bias": torch.ones(24)}, strict=False, assign=True)
    assert layer.in_proj_bias.eq(1).all() and layer.attention.statistics.variances.equal(before)


def test_calibrate_projects_before_measuring():
    torch.manual_seed(0)
    layer = LLNMultiheadAttention(8, 2, batch_first=True, statistics="fixed", kdim=6)
    nn.init.normal_(layer.in_proj_bias)
    query, key = embeddings(2, 5, 8), embeddings(2, 7, 6)
    valid = padding([7, 3], 7)
    assert layer.calibrate_(query, key, key_padding_mask=~valid) is layer
    (q_weight, k_weight, _), (q_bias, k_bias, _) = layer._projections()
    q = (query @ q_weight.T + q_bias).unflatten(-1, (2, 4)).transpose(1, 2)
    k = (key @ k_weight.T + k_bias).unflatten(-1, (2, 4)).transpose(1, 2)
    same = copy.deepcopy(layer.attention).calibrate_(q, k, valid)
    torch.testing.assert_close(layer.attention.statistics.alpha, same.statistics.alpha)
    torch.testing.assert_close(layer.attention.statistics.beta, same.statistics.beta)
    assert not torch.equal(same.statistics.beta, torch.full((2,), same.statistics.beta[0].item()))


def test_calibrate_takes_one_sequence_with_its_padding():
    layer = LLNMultiheadAttention(8, 2, batch_first=True, statistics="fixed")
    x = embeddings(1, 7, 8)
    padded = ~padding([4], 7)
    layer.calibrate_(x[0], key_padding_mask=padded[0])
    alone = copy.deepcopy(layer).calibrate_(x[:, :4])
    torch.testing.assert_close(layer.attention.scales(), alone.attention.scales())
    batch = copy.deepcopy(layer).calibrate_(x, key_padding_mask=padded)
    assert torch.equal(layer.attention.statistics.alpha, batch.attention.statistics.alpha)


def test_reset_draws_new_weights():
    layer = LLNMultiheadAttention(8, 2, add_bias_kv=True)
    before = copy.deepcopy(layer.state_dict())
    layer._reset_parameters()
    assert not torch.equal(layer.in_proj_weight, before["in_proj_weight"])
    assert not torch.equal(layer.bias_k, before["bias_k"])
    assert (layer.in_proj_bias == 0).all()


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"near": 4}])
def test_autocast_matches_full_precision(options):
    torch.manual_seed(0)
    layer = LLNMultiheadAttention(32, 2, batch_first=True, **options)
    x = embeddings(2, 17, 32)
    full, full_weights = layer(x, x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, weights = layer(x, x, x)
    assert out.dtype == weights.dtype == torch.bfloat16
    assert (out - full).abs().max() < 0.03 * full.abs().max()
    assert (weights - full_weights).abs().max() < 0.03
    out.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.slow
def test_compiles_to_one_graph():
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = LLNMultiheadAttention(8, 2, batch_first=True, near=4, statistics="running")
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    x = embeddings(2, 9, 8)
    ignore = ~padding([9, 5], 9)
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    for arguments in (
        {"key_padding_mask": ignore},
        {"attn_mask": mask, "is_causal": True, "need_weights": False},
    ):
        got, expected = compiled(x, x, x, **arguments), layer(x, x, x, **arguments)
        torch.testing.assert_close(got, expected)
        got[0].sum().backward()


def test_moves_dtype_and_device_like_any_module():
    layer = LLNMultiheadAttention(8, 2, device="meta", statistics="running")
    assert {x.device.type for x in (*layer.parameters(), *layer.buffers())} == {"meta"}
    layer = LLNMultiheadAttention(8, 2, dtype=torch.float64, learn_scale=True)
    assert layer.attention.log_alpha.dtype == torch.float64
    x = embeddings(5, 2, 8).double()
    assert layer(x, x, x)[0].dtype == torch.float64


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"bias": False, "batch_first": True},
        {"kdim": 24, "vdim": 12},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_from_torch_shares_the_weights(arguments):
    theirs = nn.MultiheadAttention(32, 4, **arguments).eval()
    options = {"method": "entropy", "learn_scale": True, "statistics": "fixed"}
    ours = LLNMultiheadAttention.from_torch(theirs, **options)
    shared = dict(theirs.named_parameters())
    assert all(ours.get_parameter(name) is parameter for name, parameter in shared.items())
    assert not any(x.is_meta for x in (*ours.parameters(), *ours.buffers()))
    assert not ours.training
    fresh = LLNMultiheadAttention(32, 4, **options, **arguments).eval()
    fresh.load_state_dict(theirs.state_dict())
    dtype = arguments.get("dtype", torch.float32)
    x = [torch.randn(7, 2, size, dtype=dtype) for size in (32, theirs.kdim, theirs.vdim)]
    assert ours(*x)[0].equal(fresh(*x)[0]) and repr(ours) == repr(fresh)


COMPUTED = {
    "pruned": lambda module, name: prune.l1_unstructured(module, name, 0.5),
    "normed": parametrizations.weight_norm,
    "spectral": parametrizations.spectral_norm,
    "old spectral": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize("name", ["in_proj_weight", "k_proj_weight"])
def test_from_torch_refuses_projections_that_are_computed(how, name):
    widths = {"kdim": 24} if name == "k_proj_weight" else {}
    theirs = nn.MultiheadAttention(32, 4, **widths)
    COMPUTED[how](theirs, name)
    with pytest.raises(ValueError, match=rf"{name} .*computed.*prune\.remove.*{name}"):
        LLNMultiheadAttention.from_torch(theirs)


def test_from_torch_after_pruning_was_made_permanent():
    theirs = nn.MultiheadAttention(32, 4)
    for name in ("in_proj_weight", "in_proj_bias"):
        prune.l1_unstructured(theirs, name, 0.5)
        with pytest.raises(ValueError, match=name):
            LLNMultiheadAttention.from_torch(theirs)
        prune.remove(theirs, name)
    ours = LLNMultiheadAttention.from_torch(theirs)
    assert ours.in_proj_weight is theirs.in_proj_weight and (ours.in_proj_weight == 0).sum() > 99


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm.* is deprecated:FutureWarning")
def test_from_torch_shares_an_output_projection_that_is_computed(how):
    theirs = nn.MultiheadAttention(32, 4)
    COMPUTED[how](theirs.out_proj, "weight")
    ours = LLNMultiheadAttention.from_torch(theirs.eval())
    x = torch.randn(7, 2, 32)
    single = x[:1]  # one key: any attention returns its value
    torch.testing.assert_close(ours(single, single, single)[0], theirs(single, single, single)[0])


def test_from_torch_in_a_finished_encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 20, 32)
    softmax = encoder(x)
    options = {"near": 8, "conv": 3, "mix": "learned", "statistics": "running"}
    for name, module in list(encoder.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            encoder.set_submodule(name, LLNMultiheadAttention.from_torch(module, **options))
    out = encoder(x)
    assert out.isfinite().all() and not out.allclose(softmax)
    assert all(not p.any() for name, p in encoder.named_parameters() if "conv_weight" in name)
    encoder.train()(x).sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())


def test_the_repr_shows_what_is_not_usual():
    assert LLNMultiheadAttention(8, 2).extra_repr() == "8, 2, batch_first=False"
    options = {"add_bias_kv": True, "add_zero_attn": True, "kdim": 4, "batch_first": True}
    shown = LLNMultiheadAttention(8, 2, **options).extra_repr()
    added = "add_bias_kv=True, add_zero_attn=True"
    assert shown == f"8, 2, batch_first=True, kdim=4, vdim=8, {added}"
