"""The table of mechanisms: a record for LLN and for every baseline. Importing it loads no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Mechanism:
    """What is known of a mechanism of the zoo; see :func:`lln.describe`.

    Attributes:
        made_by: Where the class or function lies that makes it, ``"module:name"``.
        paper: Authors, year and arXiv number.
        time, memory: Cost in N tokens; d is the head size, other letters are options.
        source: Whose the defaults are.
        options: Options of :func:`lln.create` and their defaults.
        core: Whether ``module.core`` maps q, k, v ``[B, H, N, D]`` to an output.
        cross: Whether keys may be those of another sequence (through ``module.core``).
        growth: Power of N with which the largest tensor grows.
        matrix: ``"stochastic"`` if rows of ``attention_matrix`` are non-negative and sum to 1 (or
            to 0 where nothing is seen), else ``"signed"``.
        parameters: What it learns beyond the projections of queries, keys, values and output.
        replaces_ffn: Whether the feed-forward network is left out beside it.
        needs_length: Whether :func:`lln.create` must be told ``max_length``.
    """

    name: str
    made_by: str
    paper: str
    time: str
    memory: str
    source: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    core: bool = True
    cross: bool = True
    growth: int = 1
    matrix: str = "stochastic"
    parameters: str = "none"
    replaces_ffn: bool = False
    note: str = ""
    bidirectional: bool = True
    masks: str = "key padding"
    needs_length: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """Options of :func:`lln.create` and their values."""
        return dict(self.options)

    @property
    def build(self) -> Callable[..., Any]:
        """What makes it from a layer and options: an attention core, or a whole layer."""
        module, _, name = self.made_by.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def causal(self) -> bool:
        """Whether a causal form is offered."""
        return "causal" in self.options

    @property
    def measures(self) -> bool:
        """Whether constants are measured on queries and keys, as LLN measures α and β."""
        return "statistics" in self.options


_LLN_DIAG = {
    "causal": False,
    "near": 64,
    "method": "paper",
    "statistics": "sample",
    "alpha": None,
    "beta": None,
    "sharpness": 1.0,
    "normalize_keys": False,
    "mix": "average",
    "gamma": None,
    "feature_map": "identity",
    "slots": None,
    "center_keys": False,
    "conv": 0,
    "learn_scale": False,
    "dropout": 0.0,
    "impl": None,
}
_LLN_NEARFAR = {name: value for name, value in _LLN_DIAG.items() if name != "mix"}
_LLN = {name: value for name, value in _LLN_DIAG.items() if name not in ("near", "mix", "gamma")}

_THIS_PAPER = "Nahshan et al. 2023, arXiv:2311.13541"
_TRANSNORMER = "Qin et al. 2022, arXiv:2210.10340"

_TABLE = (
    Mechanism(
        "softmax",
        "lln.baselines.softmax:Softmax",
        "Vaswani et al. 2017, arXiv:1706.03762",
        time="N² d",
        memory="N d (N² with impl='matrix')",
        options={"impl": "sdpa", "causal": False, "conv": 0},
        source="the paper",
    ),
    Mechanism(
        "lln",
        "lln.zoo:lln_core",
        _THIS_PAPER,
        time="N d²",
        memory="N d",
        options=_LLN,
        source="the paper; statistics per sample and head",
        note="causal needs statistics='running' or 'fixed'",
    ),
    Mechanism(
        "lln_diag",
        "lln.zoo:lln_core",
        _THIS_PAPER,
        time="N (d² + C d)",
        memory="N d",
        options=_LLN_DIAG,
        source="the paper, which leaves the block C open: 64",
        note="causal needs statistics='running' or 'fixed'",
    ),
    Mechanism(
        "lln_nearfar",
        "lln.zoo:lln_core",
        _THIS_PAPER,
        time="N (d² + C d)",
        memory="N d",
        options={**_LLN_NEARFAR, "near": 128, "method": "entropy"},
        source="ours: one normaliser for both branches",
        note="causal needs statistics='running' or 'fixed'; feature_map='hedgehog', 't2r' or 'elu' "
        "for the far keys, as in LoLCATs",
    ),
    Mechanism(
        "block_diag",
        "lln.baselines.block_diag:BlockDiag",
        _THIS_PAPER + " (Fig. 3)",
        time="N C d",
        memory="N d",
        options={"block": 64, "causal": False},
        source="C = 64, as in TransNormer",
    ),
    Mechanism(
        "elu",
        "lln.baselines.elu:Elu",
        "Katharopoulos et al. 2020, arXiv:2006.16236",
        time="N d²",
        memory="N d",
        options={"causal": False, "calibrate": False},
        source="the paper",
        note="calibrate=True: as concentrated as softmax; for self-attention, not causal",
    ),
    Mechanism(
        "performer",
        "lln.baselines.performer:Performer",
        "Choromanski et al. 2021, arXiv:2009.14794",
        time="N m d",
        memory="N m",
        options={"num_features": None, "eps": 0.0001, "seed": 0, "calibrate": False},
        source="the paper: m = d ln d, orthogonal, positive; performer-pytorch: ε",
        note="features stay as drawn; redraw_(seed) draws others; calibrate=True as in elu",
    ),
    Mechanism(
        "reformer",
        "lln.baselines.reformer:Reformer",
        "Kitaev et al. 2020, arXiv:2001.04451",
        time="N R c d",
        memory="N R c",
        options={"chunk": 64, "rounds": 4, "resample": True, "seed": 0},
        core=False,
        cross=False,
        source="the paper: chunks of 64, 4 rounds",
        note="one projection for queries and keys",
        needs_length=True,
    ),
    Mechanism(
        "longformer",
        "lln.baselines.longformer:Longformer",
        "Beltagy et al. 2020, arXiv:2004.05150",
        time="N (w + g) d",
        memory="N (w + g)",
        parameters="query, key, value projections of the global tokens: 3 dim²",
        options={"window": 512, "global_tokens": 1},
        core=False,
        cross=False,
        source="the paper: window 512, the first token global",
        note="inputs not longer than the window get nearly full attention",
    ),
    Mechanism(
        "transformer_ls",
        "lln.baselines.transformer_ls:TransformerLS",
        "Zhu et al. 2021, arXiv:2107.02192",
        time="N (r + 2w) d",
        memory="N (r + 2w)",
        parameters="projection dim·H·r, two layer norms",
        options={"landmarks": 32, "window": 8},
        core=False,
        cross=False,
        source="bidirectional language models of Qin et al. 2022: r = 32, w = 8",
        note="the matrix leaves out the layer norms of the values",
    ),
    Mechanism(
        "tnn",
        "lln.baselines.tnn:Tnn",
        "Qin et al. 2023, arXiv:2305.04749",
        time="N e log N",
        memory="N e",
        matrix="signed",
        parameters="gate and value of e = 3 dim channels, position network",
        options={"expansion": 3, "decay": 0.99, "position_dim": 64, "position_layers": 6},
        core=False,
        cross=False,
        source="the authors' GLUE model: decay 0.99, position network 6 × 64",
        note="a Toeplitz matrix per channel, not attention; the paper pairs it with a GLU",
    ),
    Mechanism(
        "transnormer_t1",
        "lln.baselines.transnormer_t1:TransNormerT1",
        _TRANSNORMER,
        time="N (C + d) d",
        memory="N (C + d)",
        matrix="signed",
        parameters="d/2 rotation frequencies",
        options={"block": 64, "kind": None, "seed": 0},
        cross=False,
        source="the paper: blocks of 64",
        note="blocks in the first half of the layers; the paper's FFN is a GLU",
    ),
    Mechanism(
        "transnormer_t2",
        "lln.baselines.transnormer_t2:TransNormerT2",
        _TRANSNORMER,
        time="N (C + d) d",
        memory="N (C + d)",
        matrix="signed",
        parameters="d/2 rotation frequencies",
        options={"block": 64, "kind": None, "seed": 0},
        cross=False,
        source="the paper: blocks of 64",
        note="blocks in the first half of the layers; the paper's FFN is a GLU",
    ),
    Mechanism(
        "cosformer",
        "lln.baselines.cosformer:Cosformer",
        "Qin et al. 2022, arXiv:2202.08791",
        time="N d²",
        memory="N d",
        options={"horizon": None, "causal": False},
        cross=False,
        source="the paper, with horizon = max_length instead of the current length",
        needs_length=True,
    ),
    Mechanism(
        "flash",
        "lln.baselines.flash:Flash",
        "Hua et al. 2022, arXiv:2202.10447",
        time="N (C s + C e + s e)",
        memory="N (C + e)",
        matrix="signed",
        parameters="gate and value of e = 2 dim channels, one projection to s, 8 s + 32",
        replaces_ffn=True,
        options={"chunk": 256, "query_dim": 128, "expansion": 2},
        core=False,
        cross=False,
        source="the paper: chunks of 256, s = 128, e = 2 dim",
        note="one head; use twice as many layers",
    ),
    Mechanism(
        "nystromformer",
        "lln.baselines.nystromformer:Nystromformer",
        "Xiong et al. 2021, arXiv:2102.03902",
        time="N m d",
        memory="N m",
        matrix="signed",
        parameters="a convolution of 33 weights per head",
        options={"landmarks": 64, "iterations": 6, "kernel_size": 33},
        cross=False,
        source="the paper: 64 landmarks, 6 iterations, kernel 33",
        note="a max_length that is given must be above the number of landmarks",
    ),
    Mechanism(
        "linformer",
        "lln.baselines.linformer:Linformer",
        "Wang et al. 2020, arXiv:2006.04768",
        time="N r d",
        memory="N r",
        matrix="signed",
        parameters="two projections r × max_length",
        options={"rank": 256, "share": False},
        source="the paper: r = 256, shared by the heads",
        needs_length=True,
    ),
    Mechanism(
        "skyformer",
        "lln.baselines.skyformer:Skyformer",
        "Chen et al. 2021, arXiv:2111.00035",
        time="N m d",
        memory="N m",
        matrix="signed",
        options={"landmarks": 128, "ridge": 0.1, "iterations": 6, "resample": True, "seed": 0},
        cross=False,
        source="the paper: 128 points, ridge 0.1, 6 iterations",
        needs_length=True,
    ),
    Mechanism(
        "relu",
        "lln.baselines.relu:Relu",
        _THIS_PAPER + " (Fig. 2)",
        time="N² d",
        memory="N²",
        growth=2,
        options={"causal": False},
        source="the homogeneous reading of Fig. 2",
    ),
    Mechanism(
        "quadratic",
        "lln.baselines.quadratic:Quadratic",
        _THIS_PAPER + " (Fig. 2)",
        time="N² d",
        memory="N²",
        growth=2,
        options={"causal": False},
        source="the homogeneous reading of Fig. 2",
    ),
    Mechanism(
        "relu_linear",
        "lln.baselines.relu_linear:ReluLinear",
        _THIS_PAPER + " (Fig. 2)",
        time="N d²",
        memory="N d",
        options={"causal": False},
        source="the homogeneous reading of Fig. 2",
    ),
    Mechanism(
        "quadratic_linear",
        "lln.baselines.quadratic_linear:QuadraticLinear",
        _THIS_PAPER + " (Fig. 2)",
        time="N d²",
        memory="N d",
        options={"causal": False},
        source="the homogeneous reading of Fig. 2",
    ),
    Mechanism(
        "knn",
        "lln.baselines.knn:Knn",
        "Wang et al. 2022, arXiv:2106.00515",
        time="N² d",
        memory="N²",
        growth=2,
        options={"neighbours": 100, "causal": False},
        source="the paper: 100 neighbours (of 197 tokens)",
    ),
    Mechanism(
        "rfa",
        "lln.baselines.rfa:Rfa",
        "Peng et al. 2021, arXiv:2103.02143",
        time="N m d",
        memory="N m",
        matrix="signed",
        parameters="dim scales of the random features",
        options={"num_features": 64, "floor": 0.01, "seed": 0, "causal": False},
        source="the paper and its code: m = 64, σ starts at 1, floor 0.01; no gate",
    ),
    Mechanism(
        "hedgehog",
        "lln.baselines.hedgehog:Hedgehog",
        "Zhang et al. 2024, arXiv:2402.04347",
        time="N d²",
        memory="N d",
        parameters="two maps d × d per head",
        options={"causal": False, "calibrate": False},
        source="the paper: maps start as the identity",
        note="distillation from softmax is left to the training loop; calibrate=True as in elu",
    ),
    Mechanism(
        "rebased",
        "lln.baselines.rebased:Rebased",
        "Aksenov et al. 2024, arXiv:2402.10644",
        time="N d'² d",
        memory="N d'²",
        parameters="4 d'; queries and keys have width d'",
        options={"feature_dim": 16, "causal": False},
        source="the paper: d' = 16",
    ),
    Mechanism(
        "efficient",
        "lln.baselines.efficient:Efficient",
        "Shen et al. 2021, arXiv:1812.01243",
        time="N d²",
        memory="N d",
        source="the paper",
    ),
    Mechanism(
        "polaformer",
        "lln.baselines.polaformer:PolaFormer",
        "Meng et al. 2025, arXiv:2501.15061",
        time="N d²",
        memory="N d",
        parameters="a gate dim², 2 dim powers and scales, a convolution of (5 + 1) d",
        options={"alpha": 4.0, "kernel_size": 5},
        core=False,
        cross=False,
        source="the authors' code: α = 4, kernel 5 (theirs is 5×5, over an image)",
        note="two streams per head; the matrix leaves out the gate and the convolution",
    ),
    Mechanism(
        "sliding_window",
        "lln.baselines.sliding_window:SlidingWindow",
        "Beltagy et al. 2020, arXiv:2004.05150",
        time="N w d",
        memory="N w",
        options={"window": 512, "causal": False},
        cross=False,
        source="Longformer's window of 512, no global tokens",
        note="inputs not longer than the window get nearly full attention",
    ),
    Mechanism(
        "landmarks",
        "lln.baselines.landmarks:Landmarks",
        "after Han et al. 2023, arXiv:2312.08874",
        time="N m d",
        memory="N d",
        matrix="signed",
        options={"landmarks": 128, "ridge": 0.03},
        source="ours: landmarks are keys of the context; the inverse as in Nyström's method",
        note="for sets: `core.remember` keeps a context in m (2 d) numbers, whatever its length",
    ),
)

_FOR_STUDIES = (
    Mechanism(
        "lln_authors",
        "lln.baselines.lln_authors:AuthorsLLN",
        _THIS_PAPER,
        time="N d²",
        memory="N d",
        options={"eps": 1e-8, "diag": False},
        cross=False,
        matrix="signed",
        masks="none: padding counts as tokens",
        source="the authors' code",
        note="for studies only: what their code does, defects included; samples of a batch depend "
        "on each other",
    ),
)

HALF_PRODUCTS = "half_products"
# Under an autocast to bfloat16 these may leave their products to it, with an error against float64
# at most twice that of float32 products there, and a rounding (tests/baselines/test_half.py). Not
# among them: what chooses by scores (reformer, knn), what loses more (tnn, transnormer, skyformer),
# and what has half-precision code of its own (softmax, LLN, block_diag).
_MAY_HALVE = frozenset(
    {
        *("elu", "performer", "longformer", "transformer_ls", "cosformer", "flash", "linformer"),
        *("nystromformer", "relu", "quadratic", "relu_linear", "quadratic_linear", "rfa"),
        *("hedgehog", "rebased", "efficient", "polaformer", "sliding_window"),
    }
)


def _complete(entry: Mechanism) -> Mechanism:
    if entry.name not in _MAY_HALVE:
        return entry
    return replace(entry, options={**entry.options, HALF_PRODUCTS: False})


MECHANISMS: Mapping[str, Mechanism] = MappingProxyType(
    {entry.name: _complete(entry) for entry in _TABLE}
)
# Known to `describe`, `create` and `lln train`, listed nowhere: they keep no promise of the zoo.
FOR_STUDIES: Mapping[str, Mechanism] = MappingProxyType(
    {entry.name: entry for entry in _FOR_STUDIES}
)
KNOWN: Mapping[str, Mechanism] = MappingProxyType({**MECHANISMS, **FOR_STUDIES})
