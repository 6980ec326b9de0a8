"""Mechanisms that replace attention and feed-forward network together, in a RoBERTa of their own.

Two units take the place of a layer, which has about as many weights: x ← norm(x + unit(x)) twice.
:func:`lln.hf.replace` refuses them, because nothing is left of the layer it would change.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lln import zoo

UNITS = 2


def replaces_layer(attention: str) -> bool:
    """Whether a mechanism replaces the whole layer; False for names that are not in the zoo."""
    return attention in zoo.MECHANISMS and zoo.describe(attention).replaces_ffn


class WholeLayer(nn.Module):
    """A layer that is called as a RobertaLayer and reads the mask of its arguments."""

    def __init__(self, config: Any, attention: str, index: int, options: dict[str, Any]) -> None:
        super().__init__()
        layers = UNITS * config.num_hidden_layers
        self.units = nn.ModuleList(
            zoo.create(
                attention,
                dim=config.hidden_size,
                num_heads=config.num_attention_heads,
                max_length=config.max_position_embeddings,
                layer_index=UNITS * index + unit,
                num_layers=layers,
                **options,
            )
            for unit in range(UNITS)
        )
        norms = (nn.LayerNorm(config.hidden_size, config.layer_norm_eps) for _ in range(UNITS))
        self.norms = nn.ModuleList(norms)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        from lln.hf.masks import read_mask

        x = hidden_states
        key_mask = read_mask(attention_mask, x.shape[1]).key_mask
        for unit, norm in zip(self.units, self.norms, strict=True):
            x = norm(x + self.dropout(unit(x, key_mask)))
        return x


def replace_layers(model: Any, attention: str, **options: Any) -> None:
    """Exchange every layer of a RoBERTa; config.json keeps the choice as ``lln_gated``."""
    from lln.hf.register import implementation_name, register

    register()
    config, encoder = model.config, model.roberta.encoder
    for index in range(len(encoder.layer)):
        layer = WholeLayer(config, attention, index, options)
        for module in layer.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                model._init_weights(module)
        encoder.layer[index] = layer
    # The mask function of this name gives [B, N] instead of a matrix.
    config._attn_implementation_internal = implementation_name(attention)
    config.lln_gated = {"attention": attention, "options": options}
