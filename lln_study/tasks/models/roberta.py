"""RoBERTa from a configuration, with any attention, and its tokenizer for transformers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lln.records.seeds import seeded
from lln_study.data import tokens
from lln_study.tasks.mlm_recipes import MLMConfig
from lln_study.tasks.models import softmax, whole_layer

BLOCKS = {"lln_diag": "near", "block_diag": "block"}


def build_model(config: MLMConfig, vocabulary: int) -> tuple[Any, int]:
    """RobertaForMaskedLM with fresh weights, and how many it has with softmax attention.

    The weights are the same for every attention; a mechanism may add some of its own.
    """
    from transformers import RobertaConfig, RobertaForMaskedLM

    import lln.hf

    attention = config.train.attention
    is_replaced = softmax.is_replaced(attention, config.train.options)
    sizes = RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.feed_forward,
        max_position_embeddings=config.length + tokens.PAD + 1,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=0.0,
        initializer_range=config.deviation,
        type_vocab_size=1,
        bos_token_id=tokens.START,
        pad_token_id=tokens.PAD,
        eos_token_id=tokens.END,
        architectures=["RobertaForMaskedLM"],
    )
    sizes._attn_implementation = softmax.implementation(attention)
    with seeded(config.train.seed, "weights"):
        model = RobertaForMaskedLM(sizes)
        if config.positions == "sinusoid":
            start_from_sinusoids(model.roberta.embeddings.position_embeddings, config.deviation)
        count = sum(parameter.numel() for parameter in model.parameters())
        if whole_layer.replaces_layer(attention):
            whole_layer.replace_layers(model, attention, **config.train.options)
        elif is_replaced:
            block = {BLOCKS[attention]: config.block} if attention in BLOCKS else {}
            lln.hf.replace(model, attention, quiet=True, **{**block, **config.train.options})
    return model, count


@torch.no_grad()
def start_from_sinusoids(positions: nn.Embedding, deviation: float) -> None:
    """Fill embeddings of positions with sines and cosines whose mean square is ``deviation``².

    Wavelengths rise from 2π to 10,000 · 2π (Vaswani et al. 2017, Sec. 3.5). RoBERTa counts from
    the row after that of padding, which stays as it is.
    """
    rows, width = positions.weight.shape
    first = tokens.PAD + 1
    angle = torch.arange(rows - first, dtype=torch.float64)[:, None] * torch.exp(
        -math.log(10_000.0) * torch.arange(0, width, 2, dtype=torch.float64) / width
    )
    waves = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width]
    positions.weight[first:] = (math.sqrt(2.0) * deviation * waves).to(positions.weight)


def fast_tokenizer(tokenizer: Any, length: int) -> Any:
    """The tokenizer as transformers knows it, <s> and </s> around each text."""
    from tokenizers.processors import RobertaProcessing
    from transformers import PreTrainedTokenizerFast

    start, pad, end, unknown, mask = tokens.SPECIAL
    tokenizer.post_processor = RobertaProcessing((end, tokens.END), (start, tokens.START))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=start,
        cls_token=start,
        pad_token=pad,
        eos_token=end,
        sep_token=end,
        unk_token=unknown,
        mask_token=mask,
        model_max_length=length,
    )
