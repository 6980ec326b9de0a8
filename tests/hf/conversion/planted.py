"""A decoder with one key head that copies: weights set by hand, so that it is known which."""

from __future__ import annotations

import torch
import transformers as hf

WORDS, WIDTH = 96, 128  # tokens, and the width of a head
LAYER, HEAD = 1, 1  # where the key head is that finds what followed a token before


def planted() -> hf.LlamaForCausalLM:
    """Two layers of 4 query and 2 key heads that continue a repeated piece.

    A hidden state has three parts of ``WORDS`` and a 1: the token, the token before it, the answer.
    The first layer's key head 0 looks one token back, by the fast frequencies of its rotation. The
    second layer's key head 1 looks where the token before was this one, in dimensions that hardly
    rotate, and answers with the token there. All other weights are small noise.
    """
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=3 * WORDS + 4, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=WIDTH, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e30}, bos_token_id=0,
        eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" not in name:
                x.normal_(0, 1e-3)
        token, before, answer = (slice(i * WORDS, (i + 1) * WORDS) for i in range(3))
        eye = torch.eye(WORDS)
        model.model.embed_tokens.weight[:, token] = eye
        model.model.embed_tokens.weight[:, -1] = 1
        model.lm_head.weight[:, answer] = 0.3 * eye
        first, second = (layer.self_attn for layer in model.model.layers)
        _look_back(first, before, token)
        _match(second, token, before, answer)
    return model


def _look_back(layer, to: slice, source: slice) -> None:
    """Query heads 0 and 1 put part ``source`` of the token before into ``to``."""
    half = WIDTH // 2
    angle = 1e30 ** (-torch.arange(half) / half)  # of one position
    for head in (0, 1):
        rows = head * WIDTH + torch.arange(half)
        layer.q_proj.weight[rows, -1] = 3 * torch.cos(angle)
        layer.q_proj.weight[rows + half, -1] = -3 * torch.sin(angle)
        layer.o_proj.weight[to, head * WIDTH : head * WIDTH + WORDS] = 0.05 * torch.eye(WORDS)
    layer.k_proj.weight[:half, -1] = 3
    layer.v_proj.weight[:WORDS, source] = torch.eye(WORDS)


def _match(layer, query: slice, key: slice, to: slice) -> None:
    """Query heads 2 and 3 attend where ``key`` is their ``query``."""
    half = WIDTH // 2
    still = torch.cat([torch.arange(16, half), half + torch.arange(16, half)])
    eye = torch.eye(WORDS)
    for head in (2, 3):
        layer.q_proj.weight[head * WIDTH + still, query] = 3 * eye
        layer.o_proj.weight[to, head * WIDTH : head * WIDTH + WORDS] = eye
    layer.k_proj.weight[HEAD * WIDTH + still, key] = 3 * eye
    layer.v_proj.weight[HEAD * WIDTH : HEAD * WIDTH + WORDS, :WORDS] = eye
