"""``torch.onnx.export`` for modules and models that use our operators."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lln.ops.eager  # noqa: F401  registers the operators
from lln.ops.causal import onnx as causal
from lln.ops.linear import onnx as state
from lln.ops.window import onnx as windows

TRANSLATED: dict[str, Callable[..., Any]] = {
    "summarize_eager": state.summarize,
    "read_eager": state.read,
    "causal_eager": causal.causal,
    "near_eager": windows.near,
    "far_eager": windows.far,
}
LARGEST_FILE = 2**31 - 2**20  # of a protocol buffer; weights beyond it go into a file beside it


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The table of our operators for ``torch.onnx.export(..., custom_translation_table=)``."""
    ops = torch.ops.lln
    return {getattr(ops, name).default: function for name, function in TRANSLATED.items()}


def export(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    file: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    optimize: bool = True,
) -> torch.onnx.ONNXProgram:
    """Write a module as an ONNX graph that runs without Python, torch and this package.

    Args:
        module: In evaluation mode, on a CPU: a core, a layer, or a model after ``lln.hf.replace``.
        args, kwargs: Inputs to trace it with; sizes that ``dynamic_shapes`` leaves out are fixed.
        file: Where to write the graph; it appears there whole or not at all. Weights of more than
            2 GB go into FILE.data beside it.
        dynamic_shapes: As of ``torch.export.export``: which sizes are open. A size that the model
            cannot leave open is an error here, where ``torch.onnx.export`` would fix it silently.
        input_names, output_names, opset_version, optimize: As of ``torch.onnx.export``.

    Returns:
        The program of ``torch.onnx``, whose ``model`` holds the graph.

    Raises:
        ValueError: The module is in training mode, or calls an operator that has no translation.

    Example:
        >>> tokens = torch.export.Dim("tokens", min=2, max=65_536)
        >>> sizes = {2: tokens}                                 # q, k, v [1, 4, tokens, 64]
        >>> lln.onnx.export(core.eval(), (q, k, v), "core.onnx", dynamic_shapes=(sizes,) * 3)
    """
    if module.training:
        raise ValueError("the module is in training mode; call module.eval() before exporting it")
    with _quiet(), torch.no_grad():
        # What is wrong is said before tracing, and cores read once whether they are calibrated.
        module(*args, **(kwargs or {}))
        program = torch.export.export(
            module, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes
        )
        _check_operators(program)
        made = torch.onnx.export(
            program,
            custom_translation_table=translations(),
            input_names=input_names,
            output_names=output_names,
            opset_version=opset_version,
            optimize=optimize,
            dynamo=True,
            verbose=False,
        )
        assert made is not None
        if file is not None:
            _write(made, Path(file))
    return made


def _check_operators(program: torch.export.ExportedProgram) -> None:
    """Raise for operators of ours that have no translation."""
    known = {f"lln::{name}" for name in TRANSLATED}
    for node in program.graph.nodes:
        name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
        if name.startswith("lln::") and name not in known:
            raise ValueError(
                f"{name} has no translation to ONNX; export the module on a CPU, with impl=None or "
                "'eager', and packed sequences as a padded batch with a key_mask"
            )


def _write(program: torch.onnx.ONNXProgram, file: Path) -> None:
    """Save beside ``file`` and move it there."""
    weights = program.model.graph.initializers.values()
    size = sum(x.const_value.nbytes for x in weights if x.const_value is not None)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        program.save(Path(folder) / file.name, external_data=size > LARGEST_FILE)
        written = sorted(Path(folder).iterdir(), reverse=True)  # the data before what refers to it
        for path in written:
            path.replace(file.parent / path.name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says of itself and of packages that it does not find."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", message="# The axis name")
            yield
    finally:
        log.setLevel(level)
