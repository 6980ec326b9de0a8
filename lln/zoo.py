"""Every mechanism by name: LLN and the baselines on equal footing.

layer = lln.create("performer", dim=256, num_heads=4, max_length=4096)
out = layer(x, key_mask)                # [B, N, 256] -> the same; key_mask True = a real token
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from lln.baselines.base import Core, Layer, SelfAttention, TokenMixer, merge
from lln.baselines.block_diag import BlockDiag
from lln.baselines.cosformer import Cosformer
from lln.baselines.efficient import Efficient
from lln.baselines.elu import Elu
from lln.baselines.flash import Flash
from lln.baselines.hedgehog import Hedgehog
from lln.baselines.knn import Knn
from lln.baselines.linformer import Linformer
from lln.baselines.longformer import Longformer
from lln.baselines.nystromformer import Nystromformer
from lln.baselines.performer import Performer
from lln.baselines.quadratic import Quadratic
from lln.baselines.quadratic_linear import QuadraticLinear
from lln.baselines.rebased import Rebased
from lln.baselines.reformer import Reformer
from lln.baselines.relu import Relu
from lln.baselines.relu_linear import ReluLinear
from lln.baselines.rfa import Rfa
from lln.baselines.skyformer import Skyformer
from lln.baselines.sliding_window import SlidingWindow
from lln.baselines.softmax import Softmax
from lln.baselines.tnn import Tnn
from lln.baselines.transformer_ls import TransformerLS
from lln.baselines.transnormer_t1 import TransNormerT1
from lln.baselines.transnormer_t2 import TransNormerT2
from lln.nn import LLNAttention
from lln.protocols import Mechanism

# Options of LLNAttention that the layer decides, and those of the diagonal branch.
_LAYER = frozenset({"num_kv_heads", "device", "dtype"})
_DIAGONAL = frozenset({"diag_block", "mix", "diag_dropout", "scale"})


class LLN(LLNAttention):
    """The core of "lln": :class:`lln.nn.LLNAttention` without the diagonal branch."""

    crosses = True
    left_out = _LAYER | _DIAGONAL

    def __init__(self, layer: Layer, **options: Any) -> None:
        super().__init__(layer.num_heads, layer.head_dim, **options)


class LLNDiag(LLNAttention):
    """The core of "lln_diag": averaged with softmax attention inside blocks (Fig. 3)."""

    crosses = True
    left_out = _LAYER

    def __init__(self, layer: Layer, *, diag_block: int = 64, **options: Any) -> None:
        super().__init__(layer.num_heads, layer.head_dim, diag_block=diag_block, **options)


class LLNSelfAttention(SelfAttention):
    """Projections around LLN; masked tokens count neither as keys nor in the statistics."""

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return self.out(merge(self.core(*self.heads(x), key_mask, key_mask)))

    def attention_matrix(
        self, x: Float[Tensor, "B N dim"], key_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B H N N"]:
        """The weights of eq. (9), with the diagonal branch if there is one. O(N²)."""
        q, k, _ = self.heads(self._checked(x, key_mask))
        return self.core.attention_matrix(q, k, key_mask, key_mask)


_THIS_PAPER = "Nahshan et al. 2023, arXiv:2311.13541"
_TRANSNORMER = "Qin et al. 2022, arXiv:2210.10340"

_TABLE = (
    Mechanism(
        "softmax",
        Softmax,
        "Vaswani et al. 2017, arXiv:1706.03762",
        time="N² d",
        memory="N d (N² with impl='matrix')",
        source="the paper",
    ),
    Mechanism(
        "lln",
        LLN,
        _THIS_PAPER,
        time="N d²",
        memory="N d",
        source="the paper; statistics per sample and head",
        note="causal needs statistics='running' or 'fixed'",
    ),
    Mechanism(
        "lln_diag",
        LLNDiag,
        _THIS_PAPER,
        time="N (d² + C d)",
        memory="N d",
        source="the paper, which leaves the block C open: 64",
        note="causal needs statistics='running' or 'fixed'",
    ),
    Mechanism(
        "block_diag",
        BlockDiag,
        _THIS_PAPER + " (Fig. 3)",
        time="N C d",
        memory="N d",
        source="C = 64, as in TransNormer",
    ),
    Mechanism(
        "elu",
        Elu,
        "Katharopoulos et al. 2020, arXiv:2006.16236",
        time="N d²",
        memory="N d",
        source="the paper",
    ),
    Mechanism(
        "performer",
        Performer,
        "Choromanski et al. 2021, arXiv:2009.14794",
        time="N m d",
        memory="N m",
        source="the paper: m = d ln d, orthogonal, positive; performer-pytorch: ε",
        note="features stay as drawn; redraw_(seed) draws others",
    ),
    Mechanism(
        "reformer",
        Reformer,
        "Kitaev et al. 2020, arXiv:2001.04451",
        time="N R c d",
        memory="N R c",
        source="the paper: chunks of 64, 4 rounds",
        note="one projection for queries and keys",
    ),
    Mechanism(
        "longformer",
        Longformer,
        "Beltagy et al. 2020, arXiv:2004.05150",
        time="N (w + g) d",
        memory="N (w + g)",
        parameters="query, key, value projections of the global tokens: 3 dim²",
        source="the paper: window 512, the first token global",
        note="inputs not longer than the window get nearly full attention",
    ),
    Mechanism(
        "transformer_ls",
        TransformerLS,
        "Zhu et al. 2021, arXiv:2107.02192",
        time="N (r + 2w) d",
        memory="N (r + 2w)",
        parameters="projection dim·H·r, two layer norms",
        source="bidirectional language models of Qin et al. 2022: r = 32, w = 8",
        note="the matrix leaves out the layer norms of the values",
    ),
    Mechanism(
        "tnn",
        Tnn,
        "Qin et al. 2023, arXiv:2305.04749",
        time="N e log N",
        memory="N e",
        matrix="signed",
        parameters="gate and value of e = 3 dim channels, position network",
        source="the authors' GLUE model: decay 0.99, position network 6 × 64",
        note="a Toeplitz matrix per channel, not attention; the paper pairs it with a GLU",
    ),
    Mechanism(
        "transnormer_t1",
        TransNormerT1,
        _TRANSNORMER,
        time="N (C + d) d",
        memory="N (C + d)",
        matrix="signed",
        parameters="d/2 rotation frequencies",
        source="the paper: blocks of 64",
        note="blocks in the first half of the layers; the paper's FFN is a GLU",
    ),
    Mechanism(
        "transnormer_t2",
        TransNormerT2,
        _TRANSNORMER,
        time="N (C + d) d",
        memory="N (C + d)",
        matrix="signed",
        parameters="d/2 rotation frequencies",
        source="the paper: blocks of 64",
        note="blocks in the first half of the layers; the paper's FFN is a GLU",
    ),
    Mechanism(
        "cosformer",
        Cosformer,
        "Qin et al. 2022, arXiv:2202.08791",
        time="N d²",
        memory="N d",
        source="the paper, with horizon = max_length instead of the current length",
    ),
    Mechanism(
        "flash",
        Flash,
        "Hua et al. 2022, arXiv:2202.10447",
        time="N (C s + C e + s e)",
        memory="N (C + e)",
        matrix="signed",
        parameters="gate and value of e = 2 dim channels, one projection to s, 8 s + 32",
        replaces_ffn=True,
        source="the paper: chunks of 256, s = 128, e = 2 dim",
        note="one head; use twice as many layers",
    ),
    Mechanism(
        "nystromformer",
        Nystromformer,
        "Xiong et al. 2021, arXiv:2102.03902",
        time="N m d",
        memory="N m",
        matrix="signed",
        parameters="a convolution of 33 weights per head",
        source="the paper: 64 landmarks, 6 iterations, kernel 33",
        note="needs max_length above the number of landmarks",
    ),
    Mechanism(
        "linformer",
        Linformer,
        "Wang et al. 2020, arXiv:2006.04768",
        time="N r d",
        memory="N r",
        matrix="signed",
        parameters="two projections r × max_length",
        source="the paper: r = 256, shared by the heads",
    ),
    Mechanism(
        "skyformer",
        Skyformer,
        "Chen et al. 2021, arXiv:2111.00035",
        time="N m d",
        memory="N m",
        matrix="signed",
        source="the paper: 128 points, ridge 0.1, 6 iterations",
    ),
    Mechanism(
        "relu",
        Relu,
        _THIS_PAPER + " (Fig. 2)",
        time="N² d",
        memory="N²",
        growth=2,
        source="the homogeneous reading of Fig. 2",
    ),
    Mechanism(
        "quadratic",
        Quadratic,
        _THIS_PAPER + " (Fig. 2)",
        time="N² d",
        memory="N²",
        growth=2,
        source="the homogeneous reading of Fig. 2",
    ),
    Mechanism(
        "relu_linear",
        ReluLinear,
        _THIS_PAPER + " (Fig. 2)",
        time="N d²",
        memory="N d",
        source="the homogeneous reading of Fig. 2",
    ),
    Mechanism(
        "quadratic_linear",
        QuadraticLinear,
        _THIS_PAPER + " (Fig. 2)",
        time="N d²",
        memory="N d",
        source="the homogeneous reading of Fig. 2",
    ),
    Mechanism(
        "knn",
        Knn,
        "Wang et al. 2022, arXiv:2106.00515",
        time="N² d",
        memory="N²",
        growth=2,
        source="the paper: 100 neighbours (of 197 tokens)",
    ),
    Mechanism(
        "rfa",
        Rfa,
        "Peng et al. 2021, arXiv:2103.02143",
        time="N m d",
        memory="N m",
        matrix="signed",
        parameters="dim scales of the random features",
        source="the paper and its code: m = 64, σ starts at 1, floor 0.01; no gate",
    ),
    Mechanism(
        "hedgehog",
        Hedgehog,
        "Zhang et al. 2024, arXiv:2402.04347",
        time="N d²",
        memory="N d",
        parameters="two maps d × d per head",
        source="the paper: maps start as the identity",
        note="distillation from softmax is left to the training loop",
    ),
    Mechanism(
        "rebased",
        Rebased,
        "Aksenov et al. 2024, arXiv:2402.10644",
        time="N d'² d",
        memory="N d'²",
        parameters="4 d'; queries and keys have width d'",
        source="the paper: d' = 16",
    ),
    Mechanism(
        "efficient",
        Efficient,
        "Shen et al. 2021, arXiv:1812.01243",
        time="N d²",
        memory="N d",
        source="the paper",
    ),
    Mechanism(
        "sliding_window",
        SlidingWindow,
        "Beltagy et al. 2020, arXiv:2004.05150",
        time="N w d",
        memory="N w",
        source="Longformer's window of 512, no global tokens",
        note="inputs not longer than the window get nearly full attention",
    ),
)

MECHANISMS: dict[str, Mechanism] = {entry.name: entry for entry in _TABLE}


def list_mechanisms() -> list[str]:
    """The names :func:`create` knows."""
    return list(MECHANISMS)


def describe(name: str) -> Mechanism:
    """What is known of a mechanism: paper, cost, forms, parameters, defaults and their source.

    Example:
        >>> lln.describe("nystromformer").defaults
        {'landmarks': 64, 'iterations': 6, 'kernel_size': 33}
    """
    if name not in MECHANISMS:
        raise unknown_name("name", name, MECHANISMS)
    return MECHANISMS[name]


def unknown_name(argument: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that is none of ``known``, with the nearest of them."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ValueError(f"{argument}={name!r} is unknown; {hint}There are {', '.join(names)}")


def create(
    name: str,
    *,
    dim: int,
    num_heads: int,
    max_length: int,
    layer_index: int = 0,
    num_layers: int = 1,
    **options: Any,
) -> TokenMixer:
    """A self-attention layer (or what replaces it) by name, projections included.

    Args:
        max_length: The longest input to come; some methods have weights of that length.
        layer_index, num_layers: Where the layer stands: TransNormer changes half-way up, and random
            features differ from layer to layer.
        options: Those of the mechanism, see ``lln.describe(name).defaults``; others are errors.

    Returns:
        A module called as ``module(x, key_mask)``, x ``[B, N, dim]``, key_mask bool ``[B, N]`` with
        True = a real token, or None. ``module.core`` is the attention on q, k, v ``[B, H, N, D]``
        where the method has one; ``module.attention_matrix(x, key_mask)`` gives its weights.

    Example:
        >>> layer = lln.create("performer", dim=256, num_heads=4, max_length=4096)
        >>> out = layer(x, key_mask)       # [8, 4096, 256] -> the same
    """
    entry = describe(name)
    for option in options:
        if option not in entry.defaults:
            known = ", ".join(entry.defaults) or "none"
            raise TypeError(f"{name!r} has no option {option!r}; it takes {known}")
    layer = Layer(dim, num_heads, max_length, layer_index, num_layers)
    built = entry.build(layer, **options)
    if isinstance(built, LLNAttention):
        return LLNSelfAttention(layer, built)
    return SelfAttention(layer, built) if isinstance(built, Core) else built
