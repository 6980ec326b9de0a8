"""One of eight processes of a 2 × 2 × 2 mesh: FSDP2, context and tensor parallel at once."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lln
from tests.distributed.mesh_worker import difference, gradients

PROCESSES = 8
WAYS = ("slices and a group", "DTensors of two dimensions")
OPTIONS: dict[str, Any] = {"near": 4}


class Layer(nn.Module):
    """Four linear layers, and attention over tokens that lie on several processes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32).double() for _ in range(4))
        self.way, self.mesh = "", None

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x) for layer in (self.q, self.k, self.v)]
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.mesh is None:
            return lln.attention(q, k, v, **OPTIONS)
        if self.way == WAYS[0]:
            return lln.distributed.attention(q, k, v, group=self.mesh["context"], **OPTIONS)
        both = self.mesh["context", "tensor"]
        wide = (
            DTensor.from_local(x, both, [Shard(2), Shard(1)], run_check=False) for x in (q, k, v)
        )
        return lln.attention(*wide, **OPTIONS).to_local()


def error(way: str, mesh: DeviceMesh) -> float:
    """Gradients of the mean loss, beside those of one process."""
    torch.manual_seed(2)
    layer, batch = Layer(), torch.randn(4, 16, 32, dtype=torch.float64)
    other = copy.deepcopy(layer)
    layer(batch).square().mean().backward()
    columns = ColwiseParallel()
    plan: Any = {"q": columns, "k": columns, "v": columns, "out": RowwiseParallel()}
    parallelize_module(other, mesh["tensor"], plan)
    other.way, other.mesh = way, mesh
    fully_shard(other, mesh=mesh["data", "context"]._flatten(f"parts {WAYS.index(way)}"))
    sample, token = (mesh.get_local_rank(name) for name in ("data", "context"))
    own = batch[2 * sample : 2 * sample + 2, 8 * token : 8 * token + 8]
    other(own).square().mean().backward()
    return difference(gradients(other), gradients(layer))


def found(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "context", "tensor"))
    return {way: error(way, mesh) for way in WAYS}
