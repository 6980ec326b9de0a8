"""LLN attention in a finished softmax encoder, weights kept: python examples/replace_softmax.py

Prints how far each calibration moves the output, with nothing retrained. The encoder is random, so
the numbers say how the pieces fit together, not how a trained model behaves.
"""

import copy

import torch
from torch import nn

from lln.nn import LLNMultiheadAttention


def softmax_encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def with_lln(encoder: nn.TransformerEncoder, **options) -> nn.TransformerEncoder:
    encoder = copy.deepcopy(encoder)
    for layer in encoder.layers:
        softmax = layer.self_attn
        layer.self_attn = LLNMultiheadAttention(
            softmax.embed_dim, softmax.num_heads, batch_first=softmax.batch_first, **options
        )
        layer.self_attn.load_state_dict(softmax.state_dict())
    return encoder


@torch.no_grad()
def main() -> dict[str, float]:
    torch.manual_seed(0)
    encoder = softmax_encoder().eval()
    for layer in encoder.layers:  # fresh weights attend almost uniformly: sharpen them
        layer.self_attn.in_proj_weight[:128] *= 3
    x = torch.randn(4, 96, 64)
    padding = torch.arange(96) >= torch.tensor([96, 80, 64, 20])[:, None]
    expected = encoder(x, src_key_padding_mask=padding)[~padding]

    errors = {}
    for name, options in {
        "paper": {"method": "paper"},
        "variance": {"method": "variance"},
        "entropy": {"method": "entropy"},
        "entropy + diag": {"method": "entropy", "diag_block": 16},
    }.items():
        out = with_lln(encoder, **options).eval()(x, src_key_padding_mask=padding)[~padding]
        errors[name] = ((out - expected).norm() / expected.norm()).item()
        print(f"{name:15s} relative change of the output {errors[name]:.3f}")
    return errors


if __name__ == "__main__":
    main()
