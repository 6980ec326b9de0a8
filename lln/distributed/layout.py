"""How DTensors of queries, keys and values lie on a mesh, and the parts of each process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

BATCH, HEADS, TOKENS, WIDTH = range(4)
MASK = (BATCH, TOKENS)
QKV = (BATCH, HEADS, TOKENS, WIDTH)


@dataclass(frozen=True)
class Layout:
    """How q, k and v lie on a mesh.

    Attributes:
        axes: For each dimension of the mesh the axis of q that it splits; None splits nothing.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    axes: tuple[int | None, ...]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Layout:
        """Read the layout of the three, or say what is wrong with it."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, DTensor):
                raise TypeError(
                    f"{name} is a plain tensor and another of q, k, v is a DTensor; make it one "
                    "with DTensor.from_local or distribute_tensor, or pass .to_local() of all three"
                )
        assert isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)
        names = q.device_mesh.mesh_dim_names or range(q.device_mesh.ndim)
        for name, x in (("q", q), ("k", k), ("v", v)):
            for dimension, placement in zip(names, x.placements, strict=True):
                _check_placement(name, placement, dimension)
            if (x.device_mesh, x.placements) != (q.device_mesh, q.placements):
                raise ValueError(
                    f"{name} lies as {_shown(x)} on its mesh and q as {_shown(q)}; batch, heads "
                    f"or tokens must be split alike: {name}.redistribute(q.device_mesh, "
                    "q.placements)"
                )
        axes = tuple(p.dim if isinstance(p, Shard) else None for p in q.placements)
        found = cls(q.device_mesh, q.placements, axes)
        found._check_heads(q.shape[HEADS], k.shape[HEADS])
        if axes.count(TOKENS) > 1:
            raise ValueError(
                f"q lies as {_shown(q)}: two dimensions of the mesh split the tokens; give them "
                "one, e.g. by mesh[...]._flatten()"
            )
        return found

    @property
    def over_tokens(self) -> int | None:
        """The dimension of the mesh that splits the tokens."""
        return self.axes.index(TOKENS) if TOKENS in self.axes else None

    def local(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Return this process's part of a tensor with these axes of q.

        A plain tensor is the whole, the same on all processes. Gradients are those of the whole.
        """
        wanted, gradients = [], []
        for axis in self.axes:
            own = Shard(axes.index(axis)) if axis in axes else Replicate()
            wanted.append(own)
            gradients.append(own if axis in axes or axis is None else Partial())
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return x.redistribute(placements=wanted).to_local(grad_placements=gradients)

    def whole(self, x: Tensor, shape: Sequence[int]) -> DTensor:
        """Return the tensor of this shape of which ``x`` is this process's part."""
        stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return DTensor.from_local(
            x, self.mesh, self.placements, run_check=False, shape=torch.Size(shape),
            stride=tuple(stride),
        )  # fmt: skip

    def lengths(self, tokens: int) -> list[int]:
        """Tokens of each process along the dimension that splits them, as DTensor cuts them."""
        dimension = self.over_tokens
        parts = 1 if dimension is None else self.mesh.size(dimension)
        size = -(-tokens // parts)
        return [max(0, min(size, tokens - part * size)) for part in range(parts)]

    def _check_heads(self, heads: int, key_heads: int) -> None:
        parts = math.prod(self.mesh.size(i) for i, axis in enumerate(self.axes) if axis == HEADS)
        if heads != key_heads and key_heads % parts:
            raise ValueError(
                f"{key_heads} key heads cannot be split over {parts} processes beside {heads} "
                "query heads, so that each process has the keys of its queries; repeat them: "
                "k.repeat_interleave(H // Hkv, dim=1), and v"
            )


def _check_placement(name: str, placement: Placement, dimension: str | int) -> None:
    where = f"dimension {dimension!r} of the mesh"
    if placement.is_partial():
        raise ValueError(
            f"{name} is a Partial sum on {where}; add it up first: "
            f"{name}.redistribute(placements=[Replicate(), ...])"
        )
    if isinstance(placement, Shard) and placement.dim == WIDTH:
        raise ValueError(
            f"the width of {name} is split on {where}, and a head needs all of it; split the "
            f"heads: {name}.redistribute(placements=[Shard(1), ...])"
        )
    if not placement.is_replicate() and type(placement) is not Shard:
        raise ValueError(
            f"{name} lies as {placement} on {where}; use Shard or Replicate: {name}.redistribute"
        )


def _shown(x: DTensor) -> str:
    return "(" + ", ".join(map(repr, x.placements)) + ")"
