"""Run graphs in onnxruntime, and look at the sizes of all that they compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

BATCH, TOKENS = torch.export.Dim("batch", max=64), torch.export.Dim("tokens", min=2, max=65_536)


class Side(nn.Module):
    """Several modules on the same inputs: one graph for all of them, since each takes seconds."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.all = nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [module(*inputs) for module in self.all]


class Graph:
    """A file in onnxruntime on the CPU; called with tensors."""

    def __init__(self, file: Path | bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # errors alone
        given = file if isinstance(file, bytes) else str(file)
        self.session = onnxruntime.InferenceSession(
            given, options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        names = [entry.name for entry in self.session.get_inputs()]
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(np.array(x)) for x in self.session.run(None, feed)]


def sizes(file: Path, *inputs: Tensor) -> dict[str, int]:
    """Elements of every tensor that the graph computes for these inputs."""
    model = onnx.load(str(file))
    named = {output.name for output in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            if name and name not in named:
                model.graph.output.append(onnx.ValueInfoProto(name=name))
    graph = Graph(model.SerializeToString())
    names = [entry.name for entry in graph.session.get_outputs()]
    return dict(zip(names, (x.numel() for x in graph(*inputs)), strict=True))


def steepest_growth(file: Path, short: tuple[Tensor, ...], long: tuple[Tensor, ...]) -> float:
    """The largest factor by which a tensor of the graph grows from one input to the other."""
    before, after = sizes(file, *short), sizes(file, *long)
    return max(after[name] / before[name] for name in before if before[name])
