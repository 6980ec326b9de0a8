"""The encoder of the Long Range Arena experiments: two layers of width 64.

The setting of the Skyformer code base, which the paper used: learned positions, norms before the
blocks, mean pooling over the padded length, a hidden layer before the classes. Pairs of sequences
share the encoder, and their pooled vectors x, y are classified as [x, y, x·y, x − y].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import init

from lln import zoo

PADDING = 0


@dataclass(frozen=True)
class LRASizes:
    """Sizes and mechanism.

    Attributes:
        length: Tokens of a sequence, padding included.
        options: Of the mechanism, see ``lln.describe(attention).defaults``.
        dropout: Of embeddings, attention outputs and the feed-forward network; attention weights
            have none, whatever the mechanism.
        pool: "padded" divides the sum over real tokens by the padded length, as the code base does;
            "valid" by their number.
    """

    vocabulary: int
    length: int
    classes: int
    attention: str = "lln_diag"
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2
    width: int = 64
    heads: int = 2
    feed_forward: int = 128
    dropout: float = 0.1
    pool: str = "padded"

    def __post_init__(self) -> None:
        if self.pool not in ("padded", "valid"):
            raise ValueError(f"pool={self.pool!r} is unknown; choose from padded, valid")


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and beside a shortcut."""

    def __init__(self, sizes: LRASizes, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = zoo.create(
            sizes.attention,
            dim=sizes.width,
            num_heads=sizes.heads,
            max_length=sizes.length,
            layer_index=index,
            num_layers=sizes.layers,
            **sizes.options,
        )
        self.dropout = nn.Dropout(sizes.dropout)
        self.feed_forward = None
        if not zoo.describe(sizes.attention).replaces_ffn:
            self.feed_forward = nn.Sequential(
                nn.LayerNorm(sizes.width),
                nn.Linear(sizes.width, sizes.feed_forward),
                nn.GELU(),
                nn.Dropout(sizes.dropout),
                nn.Linear(sizes.feed_forward, sizes.width),
                nn.Dropout(sizes.dropout),
            )

    def forward(
        self, x: Float[Tensor, "B N dim"], key_mask: Bool[Tensor, "B N"]
    ) -> Float[Tensor, "B N dim"]:
        x = x + self.dropout(self.attention(self.attention_norm(x), key_mask))
        return x if self.feed_forward is None else x + self.feed_forward(x)


class Encoder(nn.Module):
    """Sequences of tokens, 0 for padding, to pooled vectors."""

    def __init__(self, sizes: LRASizes) -> None:
        super().__init__()
        self.pool = sizes.pool
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(0.02 * torch.randn(sizes.length, sizes.width))
        init.normal_(self.tokens.weight, std=0.02)
        self.dropout = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(sizes, index) for index in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B dim"]:
        real = tokens != PADDING
        x = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x, real)
        x = self.norm(x).masked_fill(~real[..., None], 0)
        if self.pool == "padded":
            return x.mean(1)
        return x.sum(1) / real.sum(1, keepdim=True).clamp(min=1)


class Classifier(nn.Module):
    """Scores of the classes for sequences ``[B, N]``, or for pairs of them ``[B, 2, N]``.

    Example:
        >>> model = Classifier(LRASizes(vocabulary=16, length=2048, classes=10))
        >>> scores = model(tokens)                        # uint8 or int [32, 2048] -> [32, 10]
    """

    def __init__(self, sizes: LRASizes, *, paired: bool = False) -> None:
        super().__init__()
        self.paired = paired
        self.encoder = Encoder(sizes)
        self.head = nn.Sequential(
            nn.Linear(sizes.width * (4 if paired else 1), sizes.feed_forward),
            nn.ReLU(),
            nn.Linear(sizes.feed_forward, sizes.classes),
        )

    def forward(self, tokens: Int[Tensor, "B *pair N"]) -> Float[Tensor, "B classes"]:
        tokens = tokens.int()
        if not self.paired:
            return self.head(self.encoder(tokens))
        x, y = self.encoder(tokens.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        return self.head(_relation(x, y))


def _relation(x: Tensor, y: Tensor) -> Float[Tensor, "B four_dim"]:
    return torch.cat([x, y, x * y, x - y], dim=-1)
