"""An encoder block with LLN+Diag attention on padded batches: python examples/encoder_layer.py

Token 0 asks for a kind; the answer is the payload of the one other token of that kind: a lookup by
content over sequences of different lengths.
"""

import torch
from torch import Tensor, nn

from lln.nn import LLNMultiheadAttention

KINDS, PAYLOADS, LENGTH, WIDTH = 6, 8, 16, 32


class EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = LLNMultiheadAttention(WIDTH, 4, batch_first=True, near=8)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y = self.norms[0](x)
        # query is key: padding is also left out of the statistics behind alpha and beta
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


def draw_batch(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kinds, payloads, padding (True = ignore) and answers."""
    order = torch.rand(size, KINDS).argsort(1)
    place = torch.randint(KINDS, (size, 1))
    filler = torch.full((size, LENGTH - KINDS - 1), KINDS)
    kinds = torch.cat([order.gather(1, place), order, filler], dim=1)
    payloads = torch.randint(PAYLOADS, (size, LENGTH))
    padding = torch.arange(LENGTH) > torch.randint(KINDS, LENGTH, (size, 1))
    return kinds, payloads, padding, payloads.gather(1, place + 1)[:, 0]


def main(steps: int = 105) -> float:
    torch.manual_seed(0)
    embed = nn.ModuleList([nn.Embedding(KINDS + 1, WIDTH), nn.Embedding(PAYLOADS, WIDTH)])
    model = nn.ModuleList([embed, EncoderBlock(), EncoderBlock(), nn.Linear(WIDTH, PAYLOADS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accuracy = 0.0
    for step in range(1, steps + 1):
        kinds, payloads, padding, answer = draw_batch(64)
        x = embed[0](kinds) + embed[1](payloads)
        logits = model[3](model[2](model[1](x, padding), padding)[:, 0])
        loss = nn.functional.cross_entropy(logits, answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = (logits.argmax(-1) == answer).float().mean().item()
        if step % 15 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}  accuracy {accuracy:.2f}")
    return accuracy


if __name__ == "__main__":
    main()
