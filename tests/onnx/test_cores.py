"""Cores as ONNX graphs: equal to torch at sizes that were not traced, linear in the length."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lln
from lln.moments.rows import spaced_rows
from lln.nn import RECOMMENDED, LLNAttention
from tests.helpers import assert_matches
from tests.nn.inputs import padding, qkv
from tests.onnx.graphs import BATCH, TOKENS, Graph, Side, steepest_growth

JOINT = {"near": lln.Near(8, joint=True), "statistics": "running"}
# One graph for the cores of a line: names say what is tested, and which are slow to export.
CORES: dict[str, tuple[bool, list[dict]]] = {
    "bidirectional": (
        False,
        [
            {},
            {"statistics": "running", "normalize_keys": True},
            {"statistics": "fixed", "alpha": 1.5, "beta": 2.0, "near": 16},
            {**RECOMMENDED, "statistics": "running"},
            {**JOINT, "near": lln.Near(8, overlap=3, sinks=2, joint=True)},
        ],
    ),
    "causal": (
        True,
        [
            {"statistics": "running"},
            {"statistics": "fixed", "near": 8, "conv": 5, "mix": "learned"},
            {"statistics": "fixed", "near": 4, "causal_block": 8},
        ],
    ),
    "slow bidirectional": (
        False,
        [
            dict(RECOMMENDED),
            {"near": 16, "method": "entropy", "feature_map": "signs"},
            {**RECOMMENDED, "statistics": "running", "near": lln.Near(128, overlap=3, sinks=1)},
            {**JOINT, "statistics": "sample"},
        ],
    ),
    "slow causal": (
        True,
        [
            {**JOINT, "near": lln.Near(8, overlap=11, sinks=1, joint=True)},
            {**JOINT, "normalize_keys": True},
        ],
    ),
}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name.startswith("slow") else ()) for name in CORES
]
OPEN = ({0: BATCH, 2: TOKENS},) * 3


def cores(options: list[dict], **shared) -> Side:
    made = Side([LLNAttention(4, 8, num_kv_heads=2, **each, **shared) for each in options])
    for core in made.all:
        if core.mix_logit is not None:
            nn.init.uniform_(core.mix_logit, -1, 1)
    return made.eval()


def masked(lengths: list[int], tokens: int):
    """Inputs with NaN where nothing may be looked at."""
    q, k, v = qkv(len(lengths), 4, tokens, 8, kv_heads=2)
    mask = padding(lengths, tokens)
    for x in (k, v):
        x.masked_fill_(~mask[:, None, :, None], torch.nan)
    return q, k, v, mask


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Export the cores of a line of the table once; gives them and the file of their graph."""
    folder, made = tmp_path_factory.mktemp("graphs"), {}

    def get(name: str) -> tuple[Side, Path]:
        if name not in made:
            torch.manual_seed(0)
            causal, options = CORES[name]
            module, file = cores(options, causal=causal), folder / f"{name}.onnx"
            sizes = ((*OPEN, {0: BATCH, 1: TOKENS}),)
            optimize = name.startswith("slow")  # onnxruntime does so anyway
            lln.onnx.export(
                module, masked([70, 50], 70), file, dynamic_shapes=sizes, optimize=optimize
            )
            made[name] = module, file
        return made[name]

    return get


def check(module: Side, file: Path, inputs: tuple[Tensor, ...], factor: float = 2.0) -> None:
    """The graph may be ``factor`` times as wrong as torch in float32."""
    with torch.no_grad():
        plain = module(*inputs)
        exact = copy.deepcopy(module).double()(*(x.double() for x in inputs[:3]), *inputs[3:])
    for core, *results in zip(module.all, Graph(file)(*inputs), plain, exact, strict=True):
        assert_matches(str(core), *results, factor=factor)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [[70, 50], [64], [133, 1, 0], [5, 3, 5]], ids=str)
def test_equal_to_torch(exported, name, lengths):
    """Batch and length open, masked keys and values NaN, a sample without any key."""
    check(*exported(name), masked(lengths, max(lengths)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_large_inputs_do_not_overflow(exported, name):
    """Outliers among ordinary keys, one of them in the middle of a tile."""
    q, k, v, mask = masked([100, 90], 100)
    q[:, :, 3] *= 50
    k[:, :, ::33] *= 50
    check(*exported(name), (q, k, v, mask), factor=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_linear_in_the_length(exported, name):
    _, file = exported(name)
    assert steepest_growth(file, masked([256], 256), masked([1024], 1024)) <= 4.2


@pytest.mark.slow
def test_queries_that_count_are_chosen_inside_the_graph(tmp_path):
    """γ of every sample is measured with some of them; models give the mask of padding."""

    class Rows(nn.Module):
        def forward(self, mask):
            return spaced_rows(mask.shape[1], 8, mask, mask.device)

    file, shapes = tmp_path / "rows.onnx", ({0: BATCH, 1: TOKENS},)
    lln.onnx.export(Rows().eval(), (padding([9, 4], 9),), file, dynamic_shapes=shapes)
    graph = Graph(file)
    for lengths in ([9, 4], [40, 1, 17, 0]):
        right = padding(lengths, max(lengths))
        for mask in (right, right.flip(1), right & (torch.arange(max(lengths)) % 3 > 0)):
            assert torch.equal(graph(mask)[0], Rows()(mask))


@pytest.mark.slow
def test_softmax_fails_the_test_of_linearity(tmp_path):
    class Softmax(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    file = tmp_path / "softmax.onnx"
    lln.onnx.export(Softmax().eval(), qkv(2, 4, 70, 8), file, dynamic_shapes=OPEN)
    assert steepest_growth(file, qkv(1, 4, 256, 8), qkv(1, 4, 1024, 8)) > 12


def test_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"call module.eval\(\)"):
        lln.onnx.export(LLNAttention(4, 8), qkv(1, 4, 8, 8))


def test_packed_sequences_are_refused():
    class Packed(nn.Module):
        def forward(self, q, k, v, starts):
            return lln.attention_varlen(q, k, v, starts, alpha=1.0, beta=1.0)

    q, k, v = (x[0].transpose(0, 1) for x in qkv(1, 4, 9, 8))
    with pytest.raises(ValueError, match="lln::varlen_eager has no translation to ONNX"):
        lln.onnx.export(Packed().eval(), (q, k, v, torch.tensor([0, 4, 9])))
