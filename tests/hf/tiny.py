"""Tiny models with random weights: every family the integration promises."""

from __future__ import annotations

import torch
import transformers as hf
from torch import Tensor

VOCABULARY = 99
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0}
BOTH_WAYS = {
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
    "d_model": 32,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}
ENDLESS = {"bos_token_id": 1, "eos_token_id": None}
CONFIGS = {
    "roberta": lambda: hf.RobertaConfig(**TEXT),
    "bert": lambda: hf.BertConfig(**TEXT),
    "distilbert": lambda: hf.DistilBertConfig(
        dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=VOCABULARY
    ),
    "vit": lambda: hf.ViTConfig(**SIZES, image_size=32, patch_size=8),
    "gpt2": lambda: hf.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=128, **ENDLESS
    ),
    "llama": lambda: hf.LlamaConfig(**TEXT, num_key_value_heads=2, **ENDLESS),
    "qwen2": lambda: hf.Qwen2Config(**TEXT, num_key_value_heads=2, **ENDLESS),
    "qwen3": lambda: hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=16, **ENDLESS),
    "bart": lambda: hf.BartConfig(**BOTH_WAYS, max_position_embeddings=128),
    "whisper": lambda: hf.WhisperConfig(
        **BOTH_WAYS, num_mel_bins=16, max_source_positions=32, max_target_positions=64
    ),
}
ENCODERS = ("roberta", "bert", "distilbert")
DECODERS = ("gpt2", "llama", "qwen2", "qwen3")
HEADS = {**dict.fromkeys(ENCODERS, "AutoModelForMaskedLM"), "vit": "AutoModel"}


def make(family: str, *, head: str | None = None, **changes) -> hf.PreTrainedModel:
    """A model in evaluation mode; weights louder than freshly drawn, so that attention counts."""
    config = CONFIGS[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    automatic = getattr(hf, head or HEADS.get(family, "AutoModelForCausalLM"))
    torch.manual_seed(0)
    model = automatic.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(4)
    return model


def text(batch: int = 3, tokens: int = 20, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator)


def padded(tokens: Tensor, amount: int, side: str) -> dict[str, Tensor]:
    """The same text with masked noise on one side."""
    noise = text(len(tokens), amount, seed=7)
    kept, dropped = torch.ones_like(tokens), torch.zeros_like(noise)
    both = (
        [(noise, dropped), (tokens, kept)] if side == "left" else [(tokens, kept), (noise, dropped)]
    )
    ids, mask = (torch.cat(parts, 1) for parts in zip(*both, strict=True))
    return {"input_ids": ids, "attention_mask": mask}


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def inputs(family: str) -> dict[str, Tensor]:
    return {"pixel_values": images()} if family == "vit" else {"input_ids": text()}


def first(output) -> Tensor:
    """Logits, or hidden states where a model has no head."""
    return output[0]


@torch.no_grad()
def run(model, **arguments) -> Tensor:
    return first(model(**arguments))
