"""Turn a trained softmax encoder into LLN+Diag: python examples/huggingface_convert.py [STEPS]

Train a small RoBERTa with softmax to fill gaps in repeated words, exchange its attention, let the
layers learn what softmax answered there, then fine-tune. The loss on new words tells the worth.
"""

import sys

import torch
from torch import Tensor
from transformers import RobertaConfig, RobertaForMaskedLM

import lln.hf

TOKENS, PERIOD, LETTERS, MASK, PAD = 40, 5, 26, 1, 0


def batch(seed: int) -> dict[str, Tensor]:
    """Random words of five letters, each eight times in a row, a sixth of the letters hidden."""
    generator = torch.Generator().manual_seed(seed)
    word = torch.randint(2, LETTERS + 2, (32, PERIOD), generator=generator)
    text = word.repeat(1, TOKENS // PERIOD)
    hidden = torch.rand(text.shape, generator=generator) < 1 / 6
    return {"input_ids": text.masked_fill(hidden, MASK), "labels": text.masked_fill(~hidden, -100)}


def train(model: RobertaForMaskedLM, steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (1 - step / steps)
        optimizer.zero_grad()
        model(**batch(step)).loss.backward()
        optimizer.step()


@torch.no_grad()
def loss(model: RobertaForMaskedLM) -> float:
    model.eval()
    return sum(model(**batch(10**6 + i)).loss.item() for i in range(8)) / 8


def main(steps: int = 300, more: int = 60) -> dict[str, float]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vocabulary = {"vocab_size": LETTERS + 2, "pad_token_id": PAD}
    model = RobertaForMaskedLM(RobertaConfig(**sizes, **vocabulary, intermediate_size=128))
    train(model, steps, 3e-3)
    losses = {"softmax": loss(model)}

    learned = {"mix": "learned", "learn_scale": True}
    lln.hf.replace(model, "lln_diag", near=4, method="entropy", **learned)
    losses["replaced"] = loss(model)

    rows = lln.hf.transfer(model, [batch(step) for step in range(more)])
    for layer in sorted({row["layer"] for row in rows}):
        errors = [row["error"] for row in rows if row["layer"] == layer]
        print(f"{layer}: error of the output {errors[0]:.3f} -> {errors[-1]:.3f}")
    losses["transferred"] = loss(model)

    train(model, more, 5e-4)
    losses["fine-tuned"] = loss(model)
    print(*(f"{name:11s} loss {value:.3f}" for name, value in losses.items()), sep="\n")
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)  # tiny products: more threads only wait for each other
    main(*map(int, sys.argv[1:]))
