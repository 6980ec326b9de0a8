"""More slots for the LLN branch: linear maps of queries and keys, fixed or learned per head."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lln.moments.slots import first_map

FEATURE_MAPS = ("identity", "signs", "rotations", "learned")
#: What the blocks of a map start as, in the words of :mod:`lln.moments.slots`.
FAMILY = {"identity": "rotations", "rotations": "rotations", "signs": "signs", "learned": "signs"}


class FeatureMap(nn.Module):
    r"""W_q q and W_k k, each ``[D] -> [S]`` per head, for the exponents of LLN's features.

    "signs" is [x, −x]; "rotations" [x, R₁x, R₂x, …] with random orthogonal R; "learned" starts at
    [x, −x, Rx, −Rx, …] cut to S slots, and adds a bias per slot, which starts at 0. The maps of
    queries and keys start equal, so that slot l of a query meets slot l of a key.

    Args:
        slots: S; 2 D for "signs", a multiple of D for "rotations", any number for "learned".
        seed: Of the rotations: the same in every process.
    """

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

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        self.bias = None
        if kind == "learned":
            self.q_map: Tensor = nn.Parameter(empty(num_heads, head_dim, slots))
            self.k_map: Tensor = nn.Parameter(empty(num_kv_heads, head_dim, slots))
            self.bias = nn.Parameter(empty(num_heads, slots))
        else:  # one for all heads, stored: a model may be built where nothing is computed
            self.register_buffer("map", empty(head_dim, slots))
        self.reset_parameters()

    map: Tensor

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start again."""
        start = first_map(FAMILY[self.kind], self.head_dim, self.slots, self.seed)
        for weight in self._maps():
            weight.copy_(start)
        if self.bias is not None:
            self.bias.zero_()

    def _maps(self) -> tuple[Tensor, Tensor]:
        return (self.q_map, self.k_map) if self.kind == "learned" else (self.map, self.map)

    def forward(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"]
    ) -> tuple[Float[Tensor, "B H N S"], Float[Tensor, "B Hkv M S"]]:
        """The features of queries and keys, in their dtype."""
        q_map, k_map = self._maps()
        features = q @ q_map.to(q.dtype)
        if self.bias is not None:
            features = features + self.bias.to(q.dtype)[:, None]
        return features, k @ k_map.to(k.dtype)

    def extra_repr(self) -> str:
        """The kind and the number of slots."""
        return f"{self.kind!r}, slots={self.slots}"


def check_feature_map(kind: str, slots: int | None, head_dim: int) -> int:
    """The number of slots, if the map can have it."""
    if kind not in FEATURE_MAPS:
        names = ", ".join(map(repr, FEATURE_MAPS))
        raise ValueError(f"feature_map={kind!r} is unknown; choose from {names}")
    usual = 2 * head_dim if kind != "identity" else head_dim
    slots = usual if slots is None else slots
    if isinstance(slots, bool) or not isinstance(slots, int):
        raise TypeError(f"slots is a {type(slots).__name__}; pass an int")
    possible = {
        "identity": slots == head_dim,
        "signs": slots == 2 * head_dim,
        "rotations": slots > 0 and slots % head_dim == 0,
        "learned": slots > 0,
    }
    if not possible[kind]:
        wanted = {
            "identity": f"head_dim = {head_dim}",
            "signs": f"2 head_dim = {2 * head_dim}",
            "rotations": f"a multiple of head_dim = {head_dim}",
            "learned": "a positive number",
        }
        raise ValueError(f"slots={slots} does not fit feature_map={kind!r}: give {wanted[kind]}")
    return slots
