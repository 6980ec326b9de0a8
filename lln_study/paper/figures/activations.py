"""The paper's assumptions on activations of a trained model instead of Gaussian inputs.

A small bidirectional encoder with softmax attention learns to fill in masked characters of Tiny
Shakespeare; its queries and keys then go through the instruments. Small enough for one core, and
still a model whose heads differ and concentrate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from lln.instruments import fit_lognormal, measure, temperature
from lln.records.rows import Row
from lln.texts import bundled as data

MASKED_SHARE = 0.15


@dataclass(frozen=True)
class Setting:
    """The model, its training and what is measured of it."""

    tokens: int = 128
    width: int = 96
    heads: int = 3
    layers: int = 3
    batch: int = 16
    steps: int = 800
    learning_rate: float = 3e-3
    sequences: int = 8
    seed: int = 0


class Encoder(nn.Module):
    """Pre-norm encoder with rotary positions; also returns q and k [B, H, N, D] of every layer."""

    def __init__(self, vocabulary: int, setting: Setting) -> None:
        super().__init__()
        width = setting.width
        self.heads = setting.heads
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * setting.layers))
        self.project = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(setting.layers))
        self.join = nn.ModuleList(nn.Linear(width, width) for _ in range(setting.layers))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(setting.layers)
        )
        self.predict = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, characters: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = self.embed(characters)
        seen = []
        for layer, project in enumerate(self.project):
            parts = project(self.norms[2 * layer](x)).chunk(3, dim=-1)
            q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
            q, k = rotate(q), rotate(k)
            seen.append((q, k))
            out = functional.scaled_dot_product_attention(q, k, v)
            x = x + self.join[layer](out.transpose(1, 2).flatten(2))
            x = x + self.feed[layer](self.norms[2 * layer + 1](x))
        return self.predict(x), seen


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of features by an angle proportional to the position (RoPE)."""
    tokens, width = x.shape[-2:]
    frequency = 100.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.polar(torch.ones(()), torch.arange(tokens)[:, None] * frequency)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * angle).flatten(-2)


def activation_rows(setting: Setting | None = None) -> Iterator[Row]:
    """A row per layer before and after training: means over heads and sequences."""
    setting = setting or Setting()
    torch.manual_seed(setting.seed)
    alphabet, codes = torch.tensor(list(data.text().encode())).unique(return_inverse=True)
    held_out = codes[-setting.tokens * setting.sequences :].reshape(setting.sequences, -1)
    model = Encoder(len(alphabet) + 1, setting)
    loss = math.log(len(alphabet))
    for step in (0, setting.steps):
        if step:
            loss = _train(model, codes[: -held_out.numel()], len(alphabet), setting)
        with torch.no_grad():
            _, seen = model(held_out)
        for layer, (q, k) in enumerate(seen):
            place = {"step": step, "loss": loss, "layer": layer}
            yield place | _describe(q.double(), k.double())


def _train(model: Encoder, codes: Tensor, mask: int, setting: Setting) -> float:
    """Fill in masked characters; returns the mean loss of the last tenth, in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, setting.learning_rate, total_steps=setting.steps
    )
    losses = []
    for _ in range(setting.steps):
        start = torch.randint(len(codes) - setting.tokens, (setting.batch, 1))
        characters = codes[start + torch.arange(setting.tokens)]
        hidden = torch.rand(characters.shape) < MASKED_SHARE
        logits, _ = model(characters.masked_fill(hidden, mask))
        loss = functional.cross_entropy(logits[hidden], characters[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, setting.steps // 10) :]
    return sum(last) / len(last)


def _describe(q: Tensor, k: Tensor) -> Row:
    """What Proposition 3.1 predicts of a layer, and what is found."""
    p = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    fit = fit_lognormal(p)
    product = temperature(q, k).pow(-2)
    scores = temperature(q, k, target="measured").pow(-2)
    soft = measure(q, k, measures=("entropy", "spectral_gap", "column_bias", "log_variance"))
    mean = -math.log(k.shape[2]) - scores / 2
    values = {
        "product_variance": product,
        "score_variance": scores,
        "row_variance": soft.log_variance,
        "mean_error": fit.mu - mean,
        "kolmogorov_smirnov": fit.kolmogorov_smirnov,
        "skew": fit.skew,
        "entropy": soft.entropy,
        "spectral_gap": soft.spectral_gap,
        "column_bias": soft.column_bias,
    }
    return {name: value.mean().item() for name, value in values.items()}
