"""Tensor parallelism of the projections of :class:`lln.nn.LLNMultiheadAttention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class HeadParallel(ParallelStyle):
    """Give each process of a mesh some heads of a :class:`lln.nn.LLNMultiheadAttention`.

    The projections of q, k and v are split as torch's ``ColwiseParallel`` splits a linear layer,
    the one of the output as ``RowwiseParallel``: one sum over the processes forward, one backward.
    What LLN itself learns stays whole on every process. A packed ``in_proj_weight`` becomes
    ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``.

    Args:
        input_layouts: How the inputs lie on the mesh; default ``Replicate()``.
        output_layouts: How the output shall lie; default ``Replicate()``.
        use_local_output: Return this process's part of the output, not a DTensor.

    Example:
        >>> plan = {"layers.0.self_attn": lln.distributed.HeadParallel()}
        >>> parallelize_module(encoder, mesh["tensor"], plan)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module, device_mesh)
        _split_projections(module)
        for name in PROJECTIONS:
            _distribute(module, name, device_mesh, Shard(0))
        _distribute(module, "in_proj_bias", device_mesh, Replicate())
        out: Any = module.out_proj
        _distribute(out, "weight", device_mesh, Shard(1))
        _distribute(out, "bias", device_mesh, Replicate())

        def spread(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            made: dict[int, Tensor] = {}  # self-attention is told by query is key

            def one(x: Tensor) -> Tensor:
                if id(x) not in made:
                    made[id(x)] = self._spread(x, device_mesh)
                return made[id(x)]

            names = ("query", "key", "value")
            own = {name: one(x) if name in names else x for name, x in options.items()}
            return (*map(one, args[:3]), *args[3:]), own

        def collect(_: nn.Module, args: Any, result: tuple[DTensor, None]) -> tuple[Tensor, None]:
            out = result[0].redistribute(placements=self.output_layouts)
            return (out.to_local() if self.use_local_output else out), None

        module.register_forward_pre_hook(spread, with_kwargs=True)
        module.register_forward_hook(collect)
        return module

    def _spread(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, self.input_layouts, run_check=False)
        return x.redistribute(placements=[Replicate()])


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(module, nn.MultiheadAttention) or not hasattr(module, "attention"):
        raise TypeError(
            f"HeadParallel is for lln.nn.LLNMultiheadAttention, not {type(module).__name__}; for "
            "linear layers take ColwiseParallel(use_local_output=False) and RowwiseParallel, for "
            "torch's module make it ours first: LLNMultiheadAttention.from_torch(module)"
        )
    if mesh.ndim != 1 or module.num_heads % mesh.size():
        raise ValueError(
            f"{module.num_heads} heads cannot be split over a mesh of {tuple(mesh.shape)} "
            "processes; take one dimension whose size divides them"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("add_bias_kv and add_zero_attn are refused here; leave them out")


def _split_projections(module: Any) -> None:
    """Make three parameters of a packed one, whose rows are those of q, then k, then v."""
    packed = module.in_proj_weight
    if packed is None:
        return
    for name, part in zip(PROJECTIONS, packed.detach().chunk(3), strict=True):
        weight = nn.Parameter(part.clone(), requires_grad=packed.requires_grad)
        module.register_parameter(name, weight)
    module.register_parameter("in_proj_weight", None)


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    x = getattr(module, name)
    if x is not None:
        spread = distribute_tensor(x.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(spread, requires_grad=x.requires_grad))
