"""LLN attention in a finished softmax encoder, weights kept: python examples/replace_softmax.py

Calibration keeps the concentration (the entropy of the rows of the first layer) without training.
It cannot keep which tokens are chosen, so the output moves: fine-tune after the swap. The encoder
here is random; "uniform" attends to all tokens alike and shows what no attention at all would give.
"""

import copy
import math

import torch
from torch import Tensor, nn

from lln.nn import LLNMultiheadAttention

VARIANTS = {
    "uniform": {"statistics": "fixed", "alpha": 0.0, "beta": 0.0},
    "paper": {"method": "paper"},
    "entropy": {"method": "entropy"},
    "entropy, diag": {"method": "entropy", "near": 16},
}


def with_lln(encoder: nn.TransformerEncoder, **options) -> nn.TransformerEncoder:
    encoder = copy.deepcopy(encoder)
    for layer in encoder.layers:
        softmax = layer.self_attn
        layer.self_attn = LLNMultiheadAttention(
            softmax.embed_dim, softmax.num_heads, batch_first=softmax.batch_first, **options
        )
        layer.self_attn.load_state_dict(softmax.state_dict())
    return encoder.eval()


def row_entropy(encoder: nn.TransformerEncoder, x: Tensor) -> float:
    """Mean entropy in bits of the attention rows of the first layer."""
    _, p = encoder.layers[0].self_attn(x, x, x, average_attn_weights=False)
    return torch.special.entr(p).sum(-1).mean().item() / math.log(2)


@torch.no_grad()
def main() -> dict[str, tuple[float, float]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for each in encoder.layers:  # fresh weights attend almost uniformly: sharpen them
        each.self_attn.in_proj_weight[:256] *= 2
    x = torch.randn(4, 256, 128)
    expected = encoder(x)
    rows = {"softmax": (row_entropy(encoder, x), 0.0)}
    for name, options in VARIANTS.items():
        ours = with_lln(encoder, **options)
        change = (ours(x) - expected).norm() / expected.norm()
        rows[name] = row_entropy(ours, x), change.item()
    for name, (entropy, change) in rows.items():
        print(f"{name:14s} row entropy {entropy:.2f} bits   output moved by {change:.0%}")
    return rows


if __name__ == "__main__":
    main()
