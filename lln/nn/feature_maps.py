"""Features of the LLN branch: linear maps of queries and keys, and maps of other papers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lln.moments.slots import first_map
from lln.protocols import compute_dtype

#: What the blocks of a map start as, in the words of :mod:`lln.moments.slots`.
FAMILY = {
    "identity": "rotations",
    "rotations": "rotations",
    "signs": "signs",
    "learned": "signs",
    "hedgehog": "rotations",
    "t2r": "signs",
}
LEAST_FEATURE = 1e-6  # of T2R: its features vanish, and the logarithm must not


def _log_hedgehog(x: Tensor) -> Tensor:
    return torch.cat([torch.log_softmax(x, -1), torch.log_softmax(-x, -1)], dim=-1)


def _log_t2r(x: Tensor) -> Tensor:
    return (x.relu() + LEAST_FEATURE).log()


def _log_elu(x: Tensor) -> Tensor:
    """ln(elu(x) + 1), without a cancelling −1 + 1 below zero."""
    return x.clamp(max=0) + x.relu().log1p()


#: Maps that are whole features φ, not exponents: their logarithms, after the linear map if there is
#: one. They set their own scale, so α = β = 1.
LOG_FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "hedgehog": _log_hedgehog,
    "t2r": _log_t2r,
    "elu": _log_elu,
}
FEATURE_MAPS = ("identity", "signs", "rotations", "learned", *LOG_FEATURES)
#: Takes q and k, returns both as they were before rotary positions were applied.
Unrotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class FeatureMap(nn.Module):
    r"""What LLN sees of queries and keys, each ``[D] -> [S]`` per head: exponents of its features.

    "signs" is [x, −x]; "rotations" [x, R₁x, R₂x, …] with random orthogonal R; "learned" starts at
    [x, −x, Rx, −Rx, …] cut to S slots, and adds a bias per slot, which starts at 0. The maps of
    queries and keys start equal, so that slot l of a query meets slot l of a key.

    Features of other papers, as logarithms, so that with α = β = 1 the weights are φ(q)·φ(k):
        "hedgehog" (arXiv:2402.04347)  φ(x) = [softmax(W x), softmax(−W x)], W = I at the start
        "t2r" (arXiv:2103.13076)       φ(x) = relu(W x + b) + 10⁻⁶, W as in "learned", b = 0
        "elu" (arXiv:2006.16236)       φ(x) = elu(x) + 1, nothing is learned
    W and b are learned, those of queries and of keys apart.

    Args:
        slots: S; 2 D for "signs" and "hedgehog", a multiple of D for "rotations", D for "elu", any
            number for "learned" and "t2r".
        seed: Of the rotations: the same in every process.

    Attributes:
        before_rotation: Whether the maps see queries and keys before rotary positions are applied,
            which whoever rotated them takes back in each call; see :func:`lln.hf.replace`. No part
            of the state dict.

    Numerics: logarithms of features are taken in float32 or wider, then rounded to the dtype of the
    input.
    """

    before_rotation: bool = False

    def __init__(
        self,
        kind: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        slots: int,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.head_dim, self.slots, self.seed = kind, head_dim, slots, seed
        self.columns = head_dim if kind == "hedgehog" else slots

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        def learned(*shape: int, wanted: bool) -> nn.Parameter | None:
            return nn.Parameter(empty(*shape)) if wanted else None

        self.bias = learned(num_heads, slots, wanted=kind in ("learned", "t2r"))
        self.k_bias = learned(num_kv_heads, slots, wanted=kind == "t2r")
        if kind in ("learned", "hedgehog", "t2r"):
            self.q_map: Tensor = nn.Parameter(empty(num_heads, head_dim, self.columns))
            self.k_map: Tensor = nn.Parameter(empty(num_kv_heads, head_dim, self.columns))
        elif kind != "elu":  # one for all heads, stored: a model may be built on no device
            self.register_buffer("map", empty(head_dim, slots))
        self.reset_parameters()

    map: Tensor

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start again."""
        maps = self._maps()
        if maps is not None:
            start = first_map(FAMILY[self.kind], self.head_dim, self.columns, self.seed)
            for weight in maps:
                weight.copy_(start)
        for bias in (self.bias, self.k_bias):
            if bias is not None:
                bias.zero_()

    def _maps(self) -> tuple[Tensor, Tensor] | None:
        if self.kind == "elu":
            return None
        return (self.map, self.map) if "map" in self._buffers else (self.q_map, self.k_map)

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        unrotate: Unrotate | None = None,
    ) -> tuple[Float[Tensor, "B H N S"], Float[Tensor, "B Hkv M S"]]:
        """The exponents of queries and keys, in their dtype."""
        if self.before_rotation:
            if unrotate is None:
                raise ValueError(
                    "before_rotation=True: the feature maps see queries and keys before rotary "
                    "positions are applied, which only the model around them can take back; call "
                    "the model, not its attention core"
                )
            q, k = unrotate(q, k)
        q_map, k_map = self._maps() or (None, None)
        return self._of(q, q_map, self.bias), self._of(k, k_map, self.k_bias)

    def _of(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        mapped = x if weight is None else x @ weight.to(x.dtype)
        if bias is not None:
            mapped = mapped + bias.to(x.dtype)[:, None]
        log = LOG_FEATURES.get(self.kind)
        return mapped if log is None else log(mapped.to(compute_dtype(x))).to(x.dtype)

    def extra_repr(self) -> str:
        """The kind and the number of slots."""
        return f"{self.kind!r}, slots={self.slots}"


def mean_feature(kind: str, head_dim: int) -> float:
    """The mean of a feature φ of :data:`LOG_FEATURES` for Gaussian x with σ = 1, at the start."""
    # E relu(x) = 1/√2π; E exp(min(x, 0)) = ½ + √e Φ(−1)
    return {"hedgehog": 1 / head_dim, "t2r": 0.39894, "elu": 1.16052}[kind]


def check_feature_map(kind: str, slots: int | None, head_dim: int) -> int:
    """The number of slots, if the map can have it."""
    if kind not in FEATURE_MAPS:
        names = ", ".join(map(repr, FEATURE_MAPS))
        raise ValueError(f"feature_map={kind!r} is unknown; choose from {names}")
    usual = 2 * head_dim if kind not in ("identity", "elu") else head_dim
    slots = usual if slots is None else slots
    if isinstance(slots, bool) or not isinstance(slots, int):
        raise TypeError(f"slots is a {type(slots).__name__}; pass an int")
    exactly = f"head_dim = {head_dim}"
    possible = {
        "identity": (slots == head_dim, exactly),
        "signs": (slots == 2 * head_dim, f"2 head_dim = {2 * head_dim}"),
        "rotations": (slots > 0 and slots % head_dim == 0, f"a multiple of {exactly}"),
        "learned": (slots > 0, "a positive number"),
        "hedgehog": (slots == 2 * head_dim, f"2 head_dim = {2 * head_dim}"),
        "t2r": (slots > 0, "a positive number"),
        "elu": (slots == head_dim, exactly),
    }
    fits, wanted = possible[kind]
    if not fits:
        raise ValueError(f"slots={slots} does not fit feature_map={kind!r}: give {wanted}")
    return slots
