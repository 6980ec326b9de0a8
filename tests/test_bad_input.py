"""Bad input gets an error that names argument, value and remedy, and nothing else happens."""

from __future__ import annotations

import pytest
import torch

import lln

Q = torch.randn(2, 4, 6, 8)
K = torch.randn(2, 2, 6, 8)
V = torch.randn(2, 2, 6, 5)
MASK = torch.ones(2, 6, dtype=torch.bool)
SCALES = {"alpha": 2.0, "beta": 2.0}

WRONG = {
    "rank": ((Q[0], K, V), {}, ValueError, r"q has shape \[4, 6, 8\].*pass \[batch"),
    "not a tensor": (([1.0], K, V), {}, TypeError, "q is a list"),
    "integers": ((Q.long(), K, V), {}, TypeError, r"int64.*q\.float\(\)"),
    "heads": ((Q[:, :3], K, V), {}, ValueError, "3 heads.*multiple of the 2"),
    "no key heads": ((Q, K[:, :0], V[:, :0]), {}, ValueError, "multiple of the 0"),
    "width": ((Q, K[..., :7], V), {}, ValueError, "width 8 but the keys have 7"),
    "no width": ((Q[..., :0], K[..., :0], V), {}, ValueError, "width 0"),
    "values": ((Q, K, V[:, :, :5]), {}, ValueError, "one value per key"),
    "batch": ((Q[:1], K, V), {}, ValueError, "batch size 1.*2"),
    "dtype": ((Q, K.double(), V), {}, TypeError, "float32 but k is torch.float64"),
    "device": ((Q, K.to("meta"), V), {}, ValueError, "k on meta"),
    "float mask": ((Q, K, V), {"key_mask": MASK.float()}, TypeError, "float32.*True = may be"),
    "list mask": ((Q, K, V), {"key_mask": [True]}, TypeError, "key_mask is a list"),
    "mask shape": ((Q, K, V), {"key_mask": MASK[:, :5]}, ValueError, r"\[2, 5\].*\[2, 6\]"),
    "query mask shape": ((Q, K, V), {"query_mask": MASK[:1]}, ValueError, "query_mask has shape"),
    "pair mask": (
        (Q, K, V),
        {"key_mask": MASK[:, None, None].expand(2, 1, 6, 6)},
        ValueError,
        "linear time.*is_causal",
    ),
    "square mask": ((Q, K, V), {"key_mask": torch.ones(6, 6).bool()}, ValueError, "linear time"),
    "alpha alone": ((Q, K, V), {"alpha": 2.0}, ValueError, "alpha was given without beta"),
    "beta alone": ((Q, K, V), {"beta": 2.0}, ValueError, "beta was given without alpha"),
    "negative": ((Q, K, V), {"alpha": -1.0, "beta": 1.0}, ValueError, r"alpha=-1.*not negative"),
    "nan": ((Q, K, V), {"alpha": 1.0, "beta": float("nan")}, ValueError, "beta=nan"),
    "nan tensor": (
        (Q, K, V),
        {"alpha": torch.tensor([1, 2, torch.nan, 1]), "beta": 1.0},
        ValueError,
        "alpha=.*nan",
    ),
    "alpha string": ((Q, K, V), {"alpha": "2", "beta": 1.0}, TypeError, "alpha is a str"),
    "alpha bool": ((Q, K, V), {"alpha": True, "beta": 1.0}, TypeError, "alpha is a bool"),
    "alpha shape": (
        (Q, K, V),
        {"alpha": torch.ones(3), "beta": 1.0},
        ValueError,
        r"\[3\].*\[heads\] = \[4\]",
    ),
    "beta shape": (
        (Q, K, V),
        {"alpha": 1.0, "beta": torch.ones(4)},
        ValueError,
        r"\[heads\] = \[2\]",
    ),
    "integer alpha": ((Q, K, V), {"alpha": torch.tensor(2), "beta": 1.0}, TypeError, "int64"),
    "method": ((Q, K, V), {"method": "magic"}, ValueError, "magic"),
    "impl": ((Q, K, V), {**SCALES, "impl": "cuda"}, ValueError, "impl='cuda' is unknown"),
    "causal": ((Q, K, V), {"is_causal": True}, ValueError, "future leak.*match_moments"),
    "block zero": ((Q, K, V), {**SCALES, "near": 0}, ValueError, "block=0"),
    "block bool": ((Q, K, V), {**SCALES, "near": {"block": True}}, TypeError, "block is a bool"),
    "block float": ((Q, K, V), {**SCALES, "near": 2.5}, TypeError, "near=2.5 is a float"),
    "scale": (
        (Q, K, V),
        {**SCALES, "near": {"block": 4, "scale": float("inf")}},
        ValueError,
        "scale=inf",
    ),
    "attn_mask": ((Q, K, V), {"attn_mask": MASK}, TypeError, "attn_mask is refused.*key_mask"),
    "dropout_p": ((Q, K, V), {"dropout_p": 0.1}, TypeError, "dropout_p.*lln.nn.LLNAttention"),
    "enable_gqa": ((Q, K, V), {"enable_gqa": True}, TypeError, "enable_gqa.*leave it out"),
    "typo": ((Q, K, V), {"is_casual": True}, TypeError, "is_casual"),
}


@pytest.mark.parametrize("name", WRONG)
def test_attention_says_what_is_wrong(name):
    tensors, options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        lln.attention(*tensors, **options)


PACKED = (torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 5))
PACKING = {
    "list": ([0, 6], TypeError, "cu_seqlens_q is a list"),
    "float": (torch.tensor([0.0, 6.0]), TypeError, "float32"),
    "decreasing": (torch.tensor([0, 5, 3, 6]), ValueError, r"\[0, 5, 3, 6\].*never decrease"),
    "short": (torch.tensor([0, 5]), ValueError, "end at the 6 tokens"),
    "start": (torch.tensor([1, 6]), ValueError, "start at 0"),
    "empty": (torch.tensor([], dtype=torch.int32), ValueError, r"sequences \+ 1"),
    "rank": (torch.tensor([[0, 6]]), ValueError, r"\[1, 2\]"),
}


@pytest.mark.parametrize("name", PACKING)
def test_varlen_says_what_is_wrong_with_the_offsets(name):
    offsets, kind, message = PACKING[name]
    with pytest.raises(kind, match=message):
        lln.attention_varlen(*PACKED, offsets, **SCALES)


def test_varlen_says_what_else_is_wrong():
    q, k, v = PACKED
    cu = torch.tensor([0, 6])
    with pytest.raises(ValueError, match="packed"):
        lln.attention_varlen(Q, K, V, cu)
    with pytest.raises(ValueError, match="cu_seqlens_k has 3"):
        lln.attention_varlen(q, k, v, cu, torch.tensor([0, 3, 6]))
    with pytest.raises(TypeError, match="key_mask"):
        lln.attention_varlen(q, k, v, cu, key_mask=torch.ones(6))
    with pytest.raises(ValueError, match=r"key_mask has shape \[5\]"):
        lln.attention_varlen(q, k, v, cu, key_mask=torch.ones(5).bool())
    with pytest.raises(ValueError, match="future leak"):
        lln.attention_varlen(q, k, v, cu, is_causal=True)
    with pytest.raises(ValueError, match=r"k has shape \[6, 2, 8\] but v has \[6, 1, 5\]"):
        lln.attention_varlen(q, k, v[:, :1], cu)
    for heads, message in ((3, "3 heads.*multiple of the 2"), (4, "multiple of the 0")):
        few = (k, v) if heads == 3 else (k[:, :0], v[:, :0])
        with pytest.raises(ValueError, match=message):
            lln.attention_varlen(q[:, :heads], *few, cu)
    with pytest.raises(ValueError, match="q has width 7 but k has 8"):
        lln.attention_varlen(q[..., :7], k, v, cu)


def test_varlen_refuses_what_attention_refuses():
    for name in ("block zero", "attn_mask", "dropout_p", "enable_gqa"):
        _, options, kind, message = WRONG[name]
        with pytest.raises(kind, match=message):
            lln.attention_varlen(*PACKED, torch.tensor([0, 6]), **options)


def test_tensors_of_a_mesh_are_refused_with_the_remedy(one_process):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    q, k, v = (distribute_tensor(x, mesh, [Shard(1)]) for x in (Q, K, V))
    with pytest.raises(TypeError, match=r"q is a DTensor.*to_local.*lln.distributed"):
        lln.attention_varlen(q[0].transpose(0, 1), k[0], v[0], torch.tensor([0, 6]))
    with pytest.raises(TypeError, match="k is a DTensor"):
        lln.summarize(k, v, beta=2.0)


@pytest.fixture
def one_process(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_states_say_what_is_wrong():
    state = lln.summarize(K, V, beta=2.0)
    with pytest.raises(TypeError, match="other is a int"):
        state.merge(3)
    with pytest.raises(ValueError, match="states merge"):
        state.merge(lln.State.empty(2, 2, 8, 4))
    with pytest.raises(TypeError, match="float32"):
        state.merge(lln.State.empty(2, 2, 8, 5, dtype=torch.float64))
    with pytest.raises(TypeError, match="state is a Tensor"):
        lln.read(Q, Q, alpha=2.0)
    with pytest.raises(ValueError, match="batch size"):
        lln.read(Q[:1], state, alpha=2.0)
    with pytest.raises(ValueError, match="width"):
        lln.read(Q[..., :7], state, alpha=2.0)
    with pytest.raises(ValueError, match=r"q is on meta but the state on cpu; move one"):
        lln.read(Q.to("meta"), state, alpha=2.0)
    with pytest.raises(ValueError, match="prefill takes"):
        lln.prefill(Q[:, :, :3], K, V, **SCALES)
    with pytest.raises(TypeError, match="float32, or float64"):
        lln.State.empty(1, 1, 4, dtype=torch.float16)


def test_inputs_are_never_changed():
    tensors = [x.clone() for x in (Q, K, V)]
    mask = MASK.clone()
    mask[0, 2] = False
    before = [x.clone() for x in (*tensors, mask)]
    for options in ({}, {"near": 4}, {**SCALES, "is_causal": True, "near": 4}):
        leaves = [x.requires_grad_() for x in tensors]
        lln.attention(*leaves, key_mask=mask, query_mask=mask, **options).sum().backward()
    for x, y in zip((*tensors, mask), before, strict=True):
        assert torch.equal(x, y)
