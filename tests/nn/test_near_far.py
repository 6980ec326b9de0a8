"""LLNAttention with one normaliser, windows, slots and centred keys."""

from __future__ import annotations

import pytest
import torch

import lln
from lln.moments.levels import match_level
from lln.nn import LLNAttention, LLNMultiheadAttention
from tests.helpers import random_qkv

JOINT = {"near": lln.Near(16, overlap=5, sinks=2, joint=True)}


def inputs(dtype=torch.float64, tokens=50, batch=3):
    q, k, v = random_qkv(batch, 4, tokens, width=8, key_heads=2, dtype=dtype)
    return q, k, v, torch.rand(batch, tokens) > 0.2


def module(**options) -> LLNAttention:
    return LLNAttention(4, 8, num_kv_heads=2, **{"method": "entropy", **options}).double()


def test_the_module_is_the_function():
    q, k, v, mask = inputs()
    out = module(**JOINT)(q, k, v, mask, mask)
    expected = lln.attention(q, k, v, key_mask=mask, query_mask=mask, method="entropy", **JOINT)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_fixed_scales_and_level_are_those_given(causal):
    q, k, v, mask = inputs()
    scales = {"alpha": 1.5, "beta": [1.2, 1.4], "gamma": [-1.0, 0.0, 0.5, 2.0]}
    core = module(statistics="fixed", causal=causal, **JOINT, **scales)
    out = core(q, k, v, mask)
    given = {name: torch.tensor(x, dtype=torch.float32).double() for name, x in scales.items()}
    expected = lln.attention(q, k, v, key_mask=mask, is_causal=causal, **JOINT, **given)
    torch.testing.assert_close(out, expected)


def test_calibration_stores_what_a_sample_would_measure():
    q, k, v, mask = (x[:1] for x in inputs())
    sample = module(**JOINT)(q, k, v, mask, mask)
    for kind in ("fixed", "running"):
        core = module(statistics=kind, **JOINT).calibrate_(q, k, mask, mask).eval()
        torch.testing.assert_close(core(q, k, v, mask, mask), sample, rtol=1e-5, atol=1e-6)


def test_running_levels_are_those_of_the_batch_and_then_their_average():
    core = module(statistics="running", **JOINT)
    levels = []
    for _ in range(3):
        q, k, _, mask = inputs()
        draw = core.draw(q, k, key_mask=mask, query_mask=mask)
        measured = match_level(
            q, k, alpha=draw.alpha, beta=draw.beta, key_mask=mask, query_mask=mask, **JOINT
        ).mean(0)
        torch.testing.assert_close(draw.gamma[0], measured)
        levels.append(measured)
    core.eval()
    stored = core.draw(q, k, key_mask=mask).gamma[0]
    torch.testing.assert_close(stored, torch.stack(levels).mean(0), rtol=1e-5, atol=1e-6)


def test_causal_levels_never_see_the_batch_they_are_used_on():
    core = module(statistics="running", causal=True, **JOINT)
    q, k, v, _ = inputs()
    before = core.level.stored.value.clone()
    first = core.draw(q, k, is_causal=True)
    torch.testing.assert_close(first.gamma, before.double().expand(3, -1))
    assert not torch.equal(core.level.stored.value, before)
    core.eval()
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, 30:] = torch.randn_like(x[:, :, 30:])
    torch.testing.assert_close(core(*changed)[:, :, :30], core(q, k, v)[:, :, :30])


def test_before_the_first_batch_the_level_is_that_of_unit_gaussians():
    core = LLNAttention(
        4, 64, near=lln.Near(128, joint=True), method="entropy", statistics="running"
    )
    q, k = torch.randn(2, 4, 512, 64), torch.randn(2, 4, 512, 64)
    alpha, beta = core.scales()
    scales = {"alpha": alpha.expand(2, -1), "beta": beta.expand(2, -1)}
    measured = match_level(q, k, **scales, near=128)
    assert (core.level.stored.value - measured).abs().max() < 0.3


def test_learned_levels_and_maps_get_gradients():
    q, k, v, mask = inputs()
    options = {"learn_scale": True, "feature_map": "learned", "slots": 12, "center_keys": True}
    core = module(**JOINT, **options)
    core(q, k, v, mask, mask).square().sum().backward()
    for name, parameter in core.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("mix", ["average", "learned", "joint"])
def test_the_identity_map_is_no_map_bit_for_bit(mix):
    q, k, v, mask = inputs(torch.float32)
    options = {"near": lln.Near(16, joint=True)} if mix == "joint" else {"near": 16, "mix": mix}
    plain = LLNAttention(4, 8, num_kv_heads=2, **options)
    near = lln.Near(16, overlap=0, sinks=0, scale=8**-0.5, joint=mix == "joint")
    options |= {"near": near, "feature_map": "identity", "slots": 8}
    spelled = LLNAttention(4, 8, num_kv_heads=2, **options)
    assert torch.equal(plain(q, k, v, mask, mask), spelled(q, k, v, mask, mask))
    assert set(plain.state_dict()) == set(spelled.state_dict())


def test_a_state_dict_without_far_keys_has_no_entry_for_them():
    names = set(LLNAttention(4, 8, near=16, statistics="running", mix="learned").state_dict())
    assert names == {"mix_logit", "statistics.variances", "statistics.batches"}
    running = module(statistics="running", center_keys=True, **JOINT)
    kept = {name.rsplit(".", 1)[1] for name in running.state_dict()}
    assert kept == {"variances", "batches", "value"}  # not the runs of a step


@pytest.mark.parametrize("kind, slots", [("signs", 16), ("rotations", 24), ("learned", 11)])
@pytest.mark.parametrize("causal", [False, True])
def test_maps_give_lln_their_features_and_softmax_none(kind, slots, causal):
    q, k, v, mask = inputs()
    options = {"statistics": "fixed", "alpha": 1.3, "beta": 1.1, "gamma": -1.0, "causal": causal}
    core = module(feature_map=kind, slots=slots, **options, **JOINT)
    q_far, k_far = core.features(q, k)
    assert q_far.shape[-1] == k_far.shape[-1] == slots
    expected = lln.attention(
        q, k, v, features=(q_far, k_far), key_mask=mask, is_causal=causal,
        alpha=torch.tensor(1.3), beta=torch.tensor(1.1), gamma=-1.0, **JOINT,
    )  # fmt: skip
    torch.testing.assert_close(core(q, k, v, mask), expected)


def test_rotations_are_orthogonal_and_the_same_everywhere():
    one, other = (module(feature_map="rotations", slots=24).features for _ in range(2))
    blocks = one.map.unflatten(1, (3, 8)).transpose(0, 1)
    eye = torch.eye(8, dtype=torch.float64).expand(3, 8, 8)
    torch.testing.assert_close(blocks @ blocks.transpose(1, 2), eye, rtol=1e-5, atol=1e-5)
    assert torch.equal(one.map, other.map) and not list(one.parameters())


@pytest.mark.parametrize("mix", ["average", "joint"])
def test_a_shift_of_all_keys_is_not_seen_if_they_are_centred(mix):
    q, k, v, mask = inputs()
    core = module(near=lln.Near(16, joint=mix == "joint"), center_keys=True)
    shift = torch.randn(3, 2, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(core(q, k + shift, v, mask, mask), core(q, k, v, mask, mask))


def test_calibration_does_not_see_a_shift_of_keys_that_are_centred():
    q, k, _, _ = inputs()
    shift = torch.randn(3, 2, 1, 8, dtype=torch.float64).mean(0)
    found = []
    for keys in (k, k + shift):
        core = module(statistics="fixed", center_keys=True, **JOINT).calibrate_(q, keys)
        found.append((core.statistics.alpha, core.statistics.beta, core.level.stored.value))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_causal_keys_are_centred_by_the_stored_mean():
    q, k, v, _ = inputs()
    core = module(causal=True, statistics="running", center_keys=True, **JOINT)
    core.calibrate_(q, k + 3).eval()
    torch.testing.assert_close(
        core.center.stored.value.double(), (k + 3).mean((0, 2)), rtol=1e-5, atol=1e-5
    )
    whole = core(q, k + 3, v)
    short = core(q[:, :, :20], (k + 3)[:, :, :20], v[:, :, :20])
    torch.testing.assert_close(short, whole[:, :, :20])
    decoded, *_ = core.decoding_inputs(q, k + 3, core.scales()[1])
    torch.testing.assert_close(decoded, k + 3 - core.center.stored.value[:, None])


def test_sharpness_multiplies_the_match():
    q, k, *_ = inputs()
    plain, flat = (module(sharpness=s).draw(q, k) for s in (1.0, 0.6))
    torch.testing.assert_close(flat.alpha, 0.6 * plain.alpha)
    torch.testing.assert_close(flat.beta, 0.6 * plain.beta)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_keeps_the_mean_and_the_matrix_is_its_output(causal):
    q, k, v, mask = inputs()
    options = {"statistics": "fixed", "causal": causal, "dropout": 0.3}
    core = module(**JOINT, **options).train()
    draw = core.draw(q, k, key_mask=mask, is_causal=causal)
    matrix = core.attend_identity(q, k, draw)
    heads = v.masked_fill(~mask[:, None, :, None], 0).repeat_interleave(2, 1)
    torch.testing.assert_close(matrix @ heads, core.attend(q, k, v, draw))


def test_sinks_may_outnumber_the_keys():
    q, k, v, _ = inputs(tokens=3)
    for causal in (False, True):
        core = module(
            near=lln.Near(2, sinks=5, joint=True), statistics="fixed", causal=causal, dropout=0.2
        )
        assert core.train()(q, k, v).isfinite().all()


def test_multihead_takes_them_too():
    x = torch.randn(2, 40, 32)
    layer = LLNMultiheadAttention(
        32, 4, batch_first=True, feature_map="signs", center_keys=True, sharpness=0.6, **JOINT
    )
    out, weights = layer(x, x, x)
    assert out.shape == x.shape
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 40))


WRONG = {
    "an unknown map": ({"feature_map": "cubes"}, "feature_map='cubes'.*'identity'"),
    "slots of the identity": ({"slots": 9}, "slots=9 does not fit.*head_dim = 8"),
    "slots of signs": ({"feature_map": "signs", "slots": 8}, "2 head_dim = 16"),
    "slots of rotations": ({"feature_map": "rotations", "slots": 9}, "a multiple of head_dim"),
    "no slots": ({"feature_map": "learned", "slots": 0}, "a positive number"),
    "no sharpness": ({"sharpness": 0.0}, "sharpness=0.0 must be positive"),
    "a level that is measured": ({**JOINT, "gamma": 1.0}, "gamma=1.0 would be ignored"),
    "a level without joint": ({"near": 4, "gamma": 1.0}, "joint=True"),
    "levels of other heads": (
        {**JOINT, "gamma": [1.0, 2.0], "statistics": "fixed"},
        r"gamma has shape \[2\]",
    ),
    "a weight under one normaliser": ({**JOINT, "mix": 0.3}, "mix=0.3 would be ignored"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_named(name):
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        LLNAttention(4, 8, **options)


@pytest.mark.slow
def test_compiled_training_steps_are_the_same():
    torch.manual_seed(0)
    q, k, v, mask = inputs(torch.float32, tokens=40)
    options = {"statistics": "running", "learn_scale": True, "feature_map": "learned"}
    plain = LLNAttention(4, 8, num_kv_heads=2, **JOINT, **options)
    other = LLNAttention(4, 8, num_kv_heads=2, **JOINT, **options)
    other.load_state_dict(plain.state_dict())
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        plain(q, k, v, mask, mask).square().sum().backward()
        compiled(q, k, v, mask, mask).square().sum().backward()
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(other.level.stored.value, plain.level.stored.value)


@pytest.mark.slow
def test_exported_for_any_length():
    core = LLNAttention(4, 8, num_kv_heads=2, **JOINT).eval()
    q, k, v, mask = inputs(torch.float32, tokens=40, batch=2)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = ({2: tokens}, {2: tokens}, {2: tokens}, {1: tokens})
    program = torch.export.export(core, (q, k, v, mask), dynamic_shapes=shapes)
    longer = inputs(torch.float32, tokens=70, batch=2)
    torch.testing.assert_close(program.module()(*longer), core(*longer))


@pytest.mark.parametrize("kind, slots", [("signs", 64), ("rotations", 128), ("learned", 128)])
@pytest.mark.parametrize("statistics", ["sample", "running"])
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_more_slots_are_as_concentrated_as_softmax(kind, slots, statistics, temperature):
    """By the factor of the table; without it rows are flatter by up to half a bit."""
    q, k = (temperature**-0.5 * torch.randn(2, 4, 512, 32) for _ in range(2))
    core = LLNAttention(
        4, 32, method="entropy", feature_map=kind, slots=slots, statistics=statistics
    )
    with torch.no_grad():
        p = core.train()(q, k, torch.eye(512).expand(2, 4, 512, 512))
    soft = torch.softmax(q @ k.transpose(-1, -2) * 32**-0.5, dim=-1)
    bits = [-(x * x.clamp(min=1e-30).log2()).sum(-1).mean().item() for x in (p, soft)]
    assert abs(bits[0] - bits[1]) < 0.08


@pytest.mark.parametrize("statistics", ["sample", "running", "fixed"])
@pytest.mark.parametrize("kind", ["identity", "rotations", "learned"])
def test_made_on_no_device_and_reset_it_is_as_if_made_here(statistics, kind):
    options = {"near": lln.Near(4, joint=True), "statistics": statistics, "feature_map": kind}
    options |= {"center_keys": True, "learn_scale": True}
    if kind != "identity":
        options["slots"] = 16
    there = LLNAttention(4, 8, **options, device="meta").to_empty(device="cpu")
    there.reset_parameters()
    here = LLNAttention(4, 8, **options)
    expected = here.state_dict()
    assert there.state_dict().keys() == expected.keys()
    for name, value in there.state_dict().items():
        assert torch.equal(value, expected[name]), name
    q = torch.randn(1, 4, 20, 8)
    assert torch.equal(there(q, q, q), here(q, q, q))
