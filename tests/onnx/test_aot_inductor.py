"""AOTInductor: one compiled program for every size, which calls our operators."""

from __future__ import annotations

import shutil

import pytest
import torch

from lln.nn import RECOMMENDED
from tests.nn.inputs import embeddings, padding
from tests.onnx.test_models import Encoder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def test_compiled_ahead_of_time_for_every_size(tmp_path):
    options = {**RECOMMENDED, "near": 16, "statistics": "running"}
    module = Encoder(**options).eval().requires_grad_(False)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", min=2, max=4096)}
    given = embeddings(2, 70, 32), ~padding([70, 50], 70)
    program = torch.export.export(module, given, dynamic_shapes=(sizes, sizes))
    file = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "encoder.pt2")
    )
    compiled = torch._inductor.aoti_load_package(file)
    for lengths in ([70, 50], [129, 40, 1]):
        x = embeddings(len(lengths), max(lengths), 32), ~padding(lengths, max(lengths))
        torch.testing.assert_close(compiled(*x), module(*x), atol=1e-5, rtol=1e-4)
