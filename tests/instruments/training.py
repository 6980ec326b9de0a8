"""Small models in training, for the tests of the monitor."""

from __future__ import annotations

import torch
from torch import nn

from lln.nn import LLNMultiheadAttention
from tests.instruments import models


def encoder(**options) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    if options:
        for layer in model.layers:
            layer.self_attn = LLNMultiheadAttention(32, 4, batch_first=True, **options)
    return model


def roberta(**options) -> nn.Module:
    return models.build("roberta", head="masked", **options)


def loss_of(model: nn.Module) -> torch.Tensor:
    """A number to train on, from inputs drawn anew each time."""
    if isinstance(model, nn.TransformerEncoder):
        return model(torch.randn(3, 10, 32)).square().mean()
    ids = torch.randint(5, 100, (3, 20))
    return model(input_ids=ids, labels=ids).loss


def train(model: nn.Module, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def of_heads(rows: list[dict]) -> list[dict]:
    return [row for row in rows if "layer" in row]


def of_steps(rows: list[dict]) -> list[dict]:
    return [row for row in rows if "layer" not in row]
