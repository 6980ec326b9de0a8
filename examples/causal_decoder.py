"""Train causally with running statistics, then decode token by token in constant memory:
python examples/causal_decoder.py

The outputs of the token loop equal those of the parallel pass: alpha and beta come from buffers,
never from the sequence at hand.
"""

import torch
from torch import Tensor, nn

import lln
from lln.nn import LLNAttention

WIDTH, HEADS, TOKENS, PERIOD = 32, 4, 12, 5


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Embedding(64, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.core = LLNAttention(HEADS, WIDTH // HEADS, causal=True, statistics="running")
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, TOKENS))

    def project(self, tokens: Tensor, first: int = 0) -> list[Tensor]:
        x = self.embed(tokens) + self.place(torch.arange(first, first + tokens.shape[1]))
        return [y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.core(*self.project(tokens)).transpose(1, 2).flatten(2))

    def step(self, token: Tensor, position: int, state: lln.State | None):
        """One more token: O(1) in the length so far."""
        q, k, v = self.project(token, position)
        alpha, beta = self.core.scales()
        out, state = lln.prefill(q, k, v, state, alpha=alpha, beta=beta)
        return self.head(out.transpose(1, 2).flatten(2)), state


def main(steps: int = 200) -> float:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(1, steps + 1):
        tokens = torch.randint(TOKENS, (32, PERIOD)).repeat(1, 4)
        loss = nn.functional.cross_entropy(model(tokens)[:, 9:-1].mT, tokens[:, 10:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    model.eval()
    state, outputs = None, []
    for position in range(tokens.shape[1]):
        logits, state = model.step(tokens[:, position : position + 1], position, state)
        outputs.append(logits)
    difference = (torch.cat(outputs, 1) - model(tokens)).abs().max().item()
    print(f"token loop against parallel pass: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
