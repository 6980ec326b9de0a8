"""Tiny Hugging Face models with random weights, made without any file or network."""

from __future__ import annotations

import torch
import transformers

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}


def config(kind: str, **options):
    """Two layers of four heads of 8, a vocabulary of 100, up to 64 tokens."""
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 100}
        return transformers.GPT2Config(**sizes, **SPECIAL, **options)
    if kind == "llama":
        sizes = {"hidden_size": 32, "vocab_size": 100, "num_key_value_heads": 2, **SIZES}
        return transformers.LlamaConfig(**sizes, max_position_embeddings=64, **SPECIAL, **options)
    if kind == "vit":
        sizes = {"hidden_size": 32, "image_size": 16, "patch_size": 4, **SIZES}
        return transformers.ViTConfig(**sizes, **options)
    sizes = {"hidden_size": 32, "vocab_size": 100, "max_position_embeddings": 66, **SIZES}
    return transformers.RobertaConfig(**sizes, **options)


def build(kind: str, *, attention: str = "sdpa", head: str = "base", **options):
    """A model with weights large enough to make its attention uneven."""
    made = config(kind, **options)
    classes = {
        "base": transformers.AutoModel,
        "masked": transformers.AutoModelForMaskedLM,
        "causal": transformers.AutoModelForCausalLM,
    }
    model = classes[head].from_config(made, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model
