"""Classes of questions from a context of labelled rows: a transformer over a set, no positions.

All rows attend to the rows of the context, as cross-attention: a question sees the context and
itself, no question is seen by anyone. LLN measures α and β on the context alone, in training and
afterwards, unless they are stored (``statistics="running"`` or ``"fixed"``).

    scores = model(features, labels)                  # context and questions in one go
    memory = model.remember(features, labels)         # the context once ...
    scores = model.answer(memory, questions)          # ... and questions as they come
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import lln
from lln import zoo
from lln.nn import LLNAttention
from lln_study.data.tables import CLASSES, FEATURES

# They can cross, and look at places: a set has none.
ORDERED = ("lln_diag", "lln_nearfar", "block_diag", "linformer")
CHUNK = 65_536  # rows that `remember` takes at a time, and on which it measures α and β
LARGEST = 6.0  # of a normalised value


@dataclass(frozen=True)
class TableSizes:
    """Sizes and mechanism; ``options`` are those of ``lln.describe(attention).defaults``."""

    attention: str = "lln"
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 6
    width: int = 256
    heads: int = 4
    feed_forward: int = 512

    def __post_init__(self) -> None:
        if not zoo.describe(self.attention).cross or self.attention in ORDERED:
            known = [name for name in zoo.list_mechanisms() if zoo.describe(name).cross]
            known = ", ".join(name for name in known if name not in ORDERED)
            raise ValueError(
                f"attention={self.attention!r} cannot attend from all rows of a table to its "
                f"context, or looks at places, which a set does not have; choose from {known}"
            )

    @staticmethod
    def of(config: Any) -> TableSizes:
        """Those of a run: its fields of the same names and the mechanism of its ``train``."""
        names = ("layers", "width", "heads", "feed_forward")
        own = {name: getattr(config, name) for name in names}
        return TableSizes(config.train.attention, dict(config.train.options), **own)


class Columns(NamedTuple):
    """What the context says of each column; missing values count for nothing."""

    mean: Float[Tensor, "B 1 F"]
    deviation: Float[Tensor, "B 1 F"]

    @staticmethod
    def of(features: Float[Tensor, "B M F"], key_mask: Bool[Tensor, "B M"] | None) -> Columns:
        known = ~features.isnan()
        if key_mask is not None:
            known = known & key_mask[..., None]
        count = known.sum(1, keepdim=True).clamp(min=1)
        mean = features.where(known, 0).sum(1, keepdim=True) / count
        square = (features - mean).square().where(known, 0).sum(1, keepdim=True) / count
        return Columns(mean, square.sqrt())

    def normalized(self, features: Float[Tensor, "B N F"]) -> Float[Tensor, "B N 2F"]:
        """Values with deviation 1, fewer columns larger, and a flag for each that is missing."""
        missing = features.isnan()
        tells = self.deviation > 1e-6 * self.mean.abs()
        value = (features - self.mean) / self.deviation.where(tells, 1)
        value = value.where(tells & ~missing, 0).clamp(-LARGEST, LARGEST)
        share = tells.float().mean(-1, keepdim=True).clamp(min=1 / features.shape[-1])
        return torch.cat([value * share.rsqrt(), missing.to(value.dtype)], dim=-1)


class Summary(NamedTuple):
    """What a layer of LLN keeps of a context."""

    state: lln.State
    alpha: Tensor


class Memory(NamedTuple):
    """A context, read once: of each layer a summary, or what its mechanism remembers."""

    columns: Columns
    layers: list[Any]


def attend_to_context(
    core: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> Float[Tensor, "B H N E"]:
    """Let all rows attend to the context, which the first of them are.

    LLN measures on the queries of the context: those of questions do not count.
    """
    if not isinstance(core, LLNAttention):
        return core(q, k, v, key_mask)
    counted = key_mask
    if counted is None:
        counted = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    counted = F.pad(counted, (0, q.shape[2] - k.shape[2]))
    return core.attend(q, k, v, core.draw(q, k, key_mask=key_mask, query_mask=counted))


class Block(nn.Module):
    """Attention to the context and a feed-forward network, each after a norm."""

    def __init__(self, sizes: TableSizes, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        place = {"layer_index": index, "num_layers": sizes.layers}
        heads = {"dim": sizes.width, "num_heads": sizes.heads}
        self.attention: Any = zoo.create(sizes.attention, **heads, **place, **sizes.options)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(sizes.width),
            nn.Linear(sizes.width, sizes.feed_forward),
            nn.GELU(),
            nn.Linear(sizes.feed_forward, sizes.width),
        )

    def forward(self, x: Tensor, context: int, key_mask: Tensor | None) -> Float[Tensor, "B N W"]:
        y = self.norm(x)
        k, v = self._context(y[:, :context])
        out = attend_to_context(self.attention.core, self._query(y), k, v, key_mask)
        return self._rest(x, out)

    def _query(self, y: Tensor) -> Float[Tensor, "B H N D"]:
        return self.attention.split(self.attention.query(y))

    def _context(self, y: Tensor) -> tuple[Tensor, Tensor]:
        own = self.attention
        return own.split(own.key(y)), own.split(own.value(y))

    def _rest(self, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.attention.out(out.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)

    def keep(self, x: Float[Tensor, "B M W"]) -> Any:
        """Summarise the rows of a context chunk by chunk, or let the mechanism remember them."""
        core = self.attention.core
        parts = (self.norm(part) for part in x.split(CHUNK, dim=1))
        if not isinstance(core, LLNAttention):
            both = [self._context(part) for part in parts]
            k, v = (torch.cat(list(each), dim=2) for each in zip(*both, strict=True))
            return core.remember(k, v)
        if core.center is not None or core.statistics.matching.normalize_keys:
            raise ValueError("center_keys and normalize_keys change the keys; leave both out")
        first = self.norm(x[:, :CHUNK])
        draw = core.draw(self._query(first), self._context(first)[0])
        state: lln.State | None = None
        for part in parts:
            k, v = self._context(part)
            k = core.far_inputs(k[:, :, :0], k, draw.beta)[1]
            added = lln.summarize(k, v, beta=draw.beta)
            state = added if state is None else state.merge(added)
        assert state is not None
        return Summary(state, draw.alpha)

    def read(self, x: Float[Tensor, "B N W"], kept: Any) -> Float[Tensor, "B N W"]:
        """What rows become that attend to a context which was kept."""
        core, q = self.attention.core, self._query(self.norm(x))
        if not isinstance(kept, Summary):
            return self._rest(x, core.recall(q, kept))
        q = core.far_inputs(q, q[:, :, :0], kept.alpha)[0]
        return self._rest(x, lln.read(q, kept.state, alpha=kept.alpha))


class TableModel(nn.Module):
    """Scores of the classes for questions.

    Example:
        >>> model = TableModel(TableSizes(attention="softmax", layers=3, width=64, heads=2))
        >>> scores = model(features, labels)    # [8, 256 + 32, 32], [8, 256] -> [8, 32, 10]
    """

    def __init__(self, sizes: TableSizes) -> None:
        super().__init__()
        self.values = nn.Linear(2 * FEATURES, sizes.width)
        self.labels = nn.Embedding(CLASSES + 1, sizes.width)  # the last: a question
        self.blocks: Any = nn.ModuleList(Block(sizes, index) for index in range(sizes.layers))
        self.head = nn.Sequential(nn.LayerNorm(sizes.width), nn.Linear(sizes.width, CLASSES))

    def forward(
        self,
        features: Float[Tensor, "B N F"],
        labels: Int[Tensor, "B M"],
        key_mask: Bool[Tensor, "B M"] | None = None,
    ) -> Float[Tensor, "B Q C"]:
        """Classify the rows after the labelled ones; ``key_mask`` True = a row of the context."""
        context = labels.shape[1]
        columns = Columns.of(features[:, :context], key_mask)
        asked = features.shape[1] - context
        x = self._embed(features, columns, F.pad(labels, (0, asked), value=CLASSES))
        for block in self.blocks:
            x = block(x, context, key_mask)
        return self.head(x[:, context:])

    def _embed(self, features: Tensor, columns: Columns, labels: Tensor) -> Float[Tensor, "B N W"]:
        return self.values(columns.normalized(features)) + self.labels(labels)

    @torch.no_grad()
    def remember(self, features: Float[Tensor, "B M F"], labels: Int[Tensor, "B M"]) -> Memory:
        """Read a context once, :data:`CHUNK` rows at a time."""
        columns = Columns.of(features, None)
        parts = zip(features.split(CHUNK, dim=1), labels.split(CHUNK, dim=1), strict=True)
        x = torch.cat([self._embed(part, columns, own) for part, own in parts], dim=1)
        layers: list[Any] = []
        for place, block in enumerate(self.blocks):
            layers.append(block.keep(x))
            if place + 1 < len(self.blocks):
                for part in x.split(CHUNK, dim=1):
                    part.copy_(block.read(part, layers[-1]))
        return Memory(columns, layers)

    @torch.no_grad()
    def answer(self, memory: Memory, questions: Float[Tensor, "B Q F"]) -> Float[Tensor, "B Q C"]:
        """Classify questions about a context."""
        unknown = torch.full(questions.shape[:2], CLASSES, device=questions.device)
        x = self._embed(questions, memory.columns, unknown)
        for block, kept in zip(self.blocks, memory.layers, strict=True):
            x = block.read(x, kept)
        return self.head(x)
