"""One process of a 2 × 2 mesh.

Every process makes whole tensors, runs them through one process's attention and, as DTensors,
through that of the mesh, and writes how far output and gradients are apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lln

B, H, N, R = Shard(0), Shard(1), Shard(2), Replicate()


@dataclass(frozen=True)
class Case:
    """Where the two dimensions of the mesh lie, sizes, and the options of the call."""

    name: str
    placements: tuple[Any, Any]
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 4
    heads: int = 4
    key_heads: int = 4
    tokens: int = 16
    scales: bool = False
    masked: bool = False


JOINT = {"near": lln.Near(4, joint=True)}
CASES = (
    Case("batch and heads", (B, H)),
    Case("heads and batch, masked", (H, B), masked=True),
    Case("batch twice", (B, B)),
    Case("heads alone", (R, H), {"near": 4}),
    Case("nothing split", (R, R)),
    Case("grouped heads", (B, H), {"near": 8, "method": "entropy"}, heads=8, key_heads=2),
    Case("uneven", (B, H), batch=3, heads=3, key_heads=3, masked=True),
    Case("no head for one", (B, H), batch=1, heads=1, key_heads=1),
    Case("scales and mix", (B, H), {"near": 4}, scales=True),
    Case("causal", (H, B), {"is_causal": True, "near": 4}, scales=True),
    Case("joint", (B, H), JOINT),
    Case("batch and tokens", (B, N), masked=True),
    Case("heads and tokens", (H, N), {"near": 4}, scales=True),
    Case("tokens and heads, causal", (N, H), {"is_causal": True}, scales=True, masked=True),
    Case("uneven tokens", (H, N), heads=3, key_heads=3, tokens=9, scales=True),
    Case("a token for one", (B, N), tokens=1, scales=True),
    Case(
        "one normaliser over tokens",
        (B, N),
        {"near": lln.Near(4, overlap=2, joint=True), "gamma": 0.5},
    ),
)


def tensors(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """What has gradients, masks, and the gradient of the output."""
    draw = torch.Generator().manual_seed(len(case.name))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    learned = {
        "q": normal(case.batch, case.heads, case.tokens, 8),
        "k": normal(case.batch, case.key_heads, case.tokens, 8),
        "v": normal(case.batch, case.key_heads, case.tokens, 5),
    }
    if case.scales:
        learned["alpha"] = 1 + normal(case.heads).abs()
        learned["beta"] = 1 + normal(case.batch, case.key_heads).abs()
        if "near" in case.options:
            learned["mix"] = normal(case.heads).sigmoid()
    masks = {}
    if case.masked:
        seen = torch.rand(case.batch, case.tokens, generator=draw) < 0.6
        seen[:, 0] = True
        masks = {"key_mask": seen, "query_mask": seen}
    return learned, masks, normal(case.batch, case.heads, case.tokens, 5)


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def difference(got: dict[str, Any], exact: dict[str, Tensor]) -> float:
    """The largest error of a tensor, beside its largest value."""
    assert got.keys() == exact.keys()
    errors = []
    for name, truth in exact.items():
        x = whole(got[name])
        assert x.shape == truth.shape, name
        errors.append(((x - truth).abs().max() / truth.abs().max().clamp(min=1)).item())
    return max(errors)


def compare(case: Case, mesh: DeviceMesh) -> float:
    learned, masks, d_out = tensors(case)

    def run(inputs: dict[str, Tensor], d_out: Tensor) -> dict[str, Tensor]:
        own = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        out = lln.attention(**own, **masks, **case.options)
        out.backward(d_out)
        return {"out": out.detach(), **{name: x.grad for name, x in own.items()}}  # type: ignore

    split = {n: distribute_tensor(learned[n], mesh, case.placements) for n in "qkv"}
    got = run(learned | split, distribute_tensor(d_out, mesh, case.placements))
    assert isinstance(got["out"], DTensor) and got["out"].placements == case.placements
    return difference(got, run(learned, d_out))


def frozen(mesh: DeviceMesh) -> float:
    """One process needs no gradient, and the others must not wait for it."""
    learned, _, d_out = tensors(Case("frozen", (R, N), scales=True))
    rank, part = mesh.get_local_rank("inner"), slice(0, 8)
    if rank == 1:
        part = slice(8, 16)
    own = {n: x[:, :, part].clone() if n in "qkv" else x for n, x in learned.items()}
    if rank == 0:
        own = {n: x.requires_grad_() if n in "qkv" else x for n, x in own.items()}
    out = lln.distributed.attention(**own, group=mesh["inner"])
    out.backward(d_out[:, :, part])
    with torch.no_grad():
        assert not lln.distributed.attention(**own, group=mesh["inner"]).requires_grad
    exact = {n: x.detach().requires_grad_() for n, x in learned.items()}
    lln.attention(**exact).backward(d_out)
    if rank == 1:
        return 0.0
    grads = {n: own[n].grad for n in "qkv"}
    return difference(grads, {n: exact[n].grad[:, :, part] for n in "qkv"})  # type: ignore


MODULES: dict[str, tuple[tuple[Any, Any], dict[str, Any]]] = {
    "LLN": ((B, H), {}),
    "recommended": ((B, H), dict(lln.nn.RECOMMENDED) | {"near": 4, "conv": 3}),
    "grouped": ((H, B), {"num_kv_heads": 2, "near": 4, "mix": "learned", "conv": 5}),
    "joint": ((B, H), {"near": lln.Near(4, joint=True)}),
    "fixed mix": ((B, H), {"near": 4, "mix": [0.1, 0.2, 0.3, 0.9]}),
    "causal": (
        (H, N),
        {
            "causal": True,
            "statistics": "fixed",
            "alpha": [1.0, 1.5, 2.0, 2.5],
            "beta": 1.2,
            "learn_scale": True,
        },
    ),
    "running": ((B, N), {"statistics": "running", "near": 4, "mix": "learned"}),
    "learned map": (
        (B, H),
        {"statistics": "running", "feature_map": "learned", "slots": 12, "num_kv_heads": 2},
    ),
    "learned map, tokens": (
        (H, N),
        {
            "statistics": "running",
            "feature_map": "learned",
            "slots": 12,
            "causal": True,
            "near": lln.Near(4, overlap=2, joint=True),
        },
    ),
    "signs, tokens": (
        (N, H),
        {"statistics": "running", "feature_map": "signs", "near": 4, "method": "entropy"},
    ),
    "t2r": ((H, B), {"feature_map": "t2r", "statistics": "fixed", "near": 4}),
}
TRAINED: dict[str, tuple[tuple[Any, Any], dict[str, Any]]] = {
    "batch and heads": ((B, H), {"near": 4}),
    "batch and tokens, grouped": ((B, N), {"num_kv_heads": 2, "learn_scale": True}),
    "tokens and heads, causal": ((N, H), {"causal": True, "feature_map": "signs"}),
}


def gradients(module: nn.Module) -> dict[str, Any]:
    return {name: x.grad for name, x in module.named_parameters()}


def module_error(name: str, mesh: DeviceMesh) -> float:
    """LLNAttention, whose parameters are whole on every process."""
    placements, options = MODULES[name]
    torch.manual_seed(1)
    core = lln.nn.LLNAttention(4, 8, **options, dtype=torch.float64)
    for parameter in core.parameters():
        nn.init.normal_(parameter)
    if options.get("statistics") == "running":
        told = [torch.randn(2, n, 16, 8, dtype=torch.float64) for n in (4, core.num_kv_heads)]
        core.calibrate_(*told).eval()
    other = copy.deepcopy(core)
    heads = 4, core.num_kv_heads, core.num_kv_heads
    inputs = [torch.randn(2, each, 16, 8, dtype=torch.float64) for each in heads]
    valid = torch.arange(16) < torch.tensor([[16], [11]])
    d_out = torch.randn(2, 4, 16, 8, dtype=torch.float64)

    def run(core: nn.Module, inputs: list[Tensor], d_out: Tensor) -> dict[str, Any]:
        own = [x.requires_grad_() for x in inputs]
        out = core(*own, valid, valid)
        out.backward(d_out)
        return {"out": out.detach(), **dict(zip("qkv", (x.grad for x in own), strict=True))}

    split = [distribute_tensor(x, mesh, placements) for x in inputs]
    got = run(other, split, distribute_tensor(d_out, mesh, placements))
    exact = run(core, inputs, d_out)
    return difference(got | gradients(other), exact | gradients(core))


def training_error(name: str, mesh: DeviceMesh) -> float:
    """Three batches with running statistics: outputs, gradients, and what is stored after."""
    placements, options = TRAINED[name]
    torch.manual_seed(4)
    core = lln.nn.LLNAttention(4, 8, **options, statistics="running", dtype=torch.float64)
    other, errors = copy.deepcopy(core), []
    valid = torch.arange(16) < torch.tensor([[16], [11], [7]])
    for size in (1.0, 1.7, 0.6):
        heads = 4, core.num_kv_heads, core.num_kv_heads
        inputs = [size * torch.randn(3, each, 16, 8, dtype=torch.float64) for each in heads]
        whole_run = [x.clone().requires_grad_() for x in inputs]
        split = [distribute_tensor(x, mesh, placements).requires_grad_() for x in inputs]
        outs = core(*whole_run, valid, valid), other(*split, valid, valid)
        for out in outs:
            out.square().sum().backward()
        got = {"out": outs[1].detach(), **{str(i): x.grad for i, x in enumerate(split)}}
        exact = {"out": outs[0].detach(), **{str(i): x.grad for i, x in enumerate(whole_run)}}
        errors.append(difference(got | gradients(other), exact | gradients(core)))  # type: ignore
    errors.append(difference(dict(other.state_dict()), dict(core.state_dict())))
    return max(errors)


class Own(nn.Module):
    """An attention layer as people write it, with four linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32).double() for _ in range(4))
        self.core = lln.nn.LLNAttention(4, 8, near=4, mix="learned").double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


def tensor_parallel(name: str, mesh: DeviceMesh) -> float:
    """The heads of a layer over the inner dimension, samples over the outer, with FSDP or alone."""
    torch.manual_seed(2)
    batch = torch.randn(4, 16, 32, dtype=torch.float64)
    padding = torch.arange(16) >= torch.tensor([[16], [11], [16], [7]])
    if name == "linear layers":
        layer: nn.Module = Own()
        colwise = ColwiseParallel(use_local_output=False)
        plan: Any = {"q": colwise, "k": colwise, "v": colwise, "out": RowwiseParallel()}
    else:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).double()
        layer.self_attn = lln.nn.LLNMultiheadAttention.from_torch(
            layer.self_attn, near=4, mix="learned", conv=3
        )
        plan = {
            "self_attn": lln.distributed.HeadParallel(),
            "linear1": ColwiseParallel(),
            "linear2": RowwiseParallel(),
        }
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    other = copy.deepcopy(layer)

    def loss(layer: nn.Module, part: slice) -> Tensor:
        if name == "linear layers":
            return layer(batch[part]).square().mean()
        return layer(batch[part], src_key_padding_mask=padding[part]).square().mean()

    loss(layer, slice(None)).backward()
    parallelize_module(other, mesh["inner"], plan)
    part = slice(None)
    if name == "encoder layer with FSDP":
        fully_shard(other, mesh=mesh["outer"])
        part = slice(0, 2) if mesh.get_local_rank("outer") == 0 else slice(2, 4)
    loss(other, part).backward()
    exact, got = gradients(layer), gradients(other)
    if "self_attn.in_proj_weight" in exact:
        packed = exact.pop("self_attn.in_proj_weight")
        parts = zip("qkv", packed.chunk(3), strict=True)
        exact |= {f"self_attn.{letter}_proj_weight": grad for letter, grad in parts}
    return difference(got, exact)


TENSOR_PARALLEL = ("linear layers", "encoder layer", "encoder layer with FSDP")


def parallel(mesh: DeviceMesh, heads: int = 4) -> nn.Module:
    layer = lln.nn.LLNMultiheadAttention(8, heads, batch_first=True)
    return lln.distributed.HeadParallel()._apply(layer, mesh["inner"])


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    x = torch.randn(2, 4, 16, 8)
    split = distribute_tensor(x, mesh, [B, H])
    partial = DTensor.from_local(x, mesh, [R, Partial()], run_check=False)
    width = distribute_tensor(x, mesh, [R, Shard(3)])
    tokens = distribute_tensor(x, mesh, [B, N])
    pair = distribute_tensor(x[:, :1], mesh, [B, H])
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: lln.attention(split, x, x),
        "partial": lambda: lln.attention(partial, partial, partial),
        "width": lambda: lln.attention(width, width, width),
        "others": lambda: lln.attention(split, tokens, tokens),
        "key heads": lambda: lln.attention(split, pair, pair),
        "blocks": lambda: lln.attention(tokens, tokens, tokens, near=16),
        "scale": lambda: lln.attention(split, split, split, alpha=x, beta=x),
        "dropout": lambda: lln.nn.LLNAttention(4, 8, dropout=0.1)(split, split, split),
        "running": lambda: lln.nn.LLNAttention(
            4, 8, statistics="running", near=lln.Near(4, joint=True)
        )(split, split, split),
        "map": lambda: lln.nn.LLNAttention(4, 8, feature_map="signs")(split, split, split),
        "conv": lambda: lln.nn.LLNAttention(4, 8, conv=3)(tokens, tokens, tokens),
        "weights": lambda: parallel(mesh)(*[x[:, 0]] * 3),
        "linear": lambda: lln.distributed.HeadParallel()._apply(nn.Linear(2, 2), mesh["inner"]),
        "odd heads": lambda: parallel(mesh, heads=1),
        "mesh": lambda: lln.distributed.attention(x, x, x, group=mesh),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except (TypeError, ValueError) as error:
            said[name] = str(error)
    return said


def found(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return {
        "errors": {case.name: compare(case, mesh) for case in CASES},
        "trained": {name: training_error(name, mesh) for name in TRAINED},
        "modules": {name: module_error(name, mesh) for name in MODULES},
        "tensor parallel": {name: tensor_parallel(name, mesh) for name in TENSOR_PARALLEL},
        "frozen": frozen(mesh),
        "refusals": refusals(mesh),
    }
