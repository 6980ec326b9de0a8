"""A small RoBERTa with softmax and with LLN+Diag, trained on masked letters, saved and loaded:
python examples/huggingface_encoder.py [STEPS]

Same weights at the start, same batches: only the attention differs.
"""

import sys
import tempfile

import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM

import lln.hf
import lln.texts.bundled

TOKENS, MASK, PAD = 64, 1, 0
TEXT = lln.texts.bundled.text()
LETTERS = sorted(set(TEXT))
IDS = torch.tensor([LETTERS.index(letter) + 2 for letter in TEXT[:50_000]])


def make() -> RobertaForMaskedLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vocabulary = {"vocab_size": len(LETTERS) + 2, "pad_token_id": PAD}
    return RobertaForMaskedLM(RobertaConfig(**sizes, **vocabulary, intermediate_size=128))


def batch(step: int) -> dict[str, Tensor]:
    """Sixteen pieces of text, 15 % of the letters hidden, the last quarter of some padded."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(len(IDS) - TOKENS, (16, 1), generator=generator)
    labels = IDS[start + torch.arange(TOKENS)]
    real = (torch.arange(TOKENS) < 48) | (torch.rand(16, 1, generator=generator) < 0.5)
    hidden = torch.rand(16, TOKENS, generator=generator) < 0.15
    inputs = labels.masked_fill(hidden, MASK).masked_fill(~real, PAD)
    labels = labels.masked_fill(~(hidden & real), -100)
    return {"input_ids": inputs, "attention_mask": real.long(), "labels": labels}


def train(model: RobertaForMaskedLM, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(**batch(step)).loss.backward()
        optimizer.step()
    with torch.no_grad():
        return sum(model.eval()(**batch(10**6 + i)).loss.item() for i in range(8)) / 8


def main(steps: int = 150) -> dict[str, float]:
    losses = {"softmax": train(make(), steps)}
    model = make()
    lln.hf.replace(model, "lln_diag", near=16, method="entropy")  # prints parameter counts
    losses["lln_diag"] = train(model, steps)
    print(*(f"{name:8s} masked-letter loss {loss:.3f}" for name, loss in losses.items()), sep="\n")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = lln.hf.load(folder, AutoModelForMaskedLM)
        print("loaded model equal:", torch.equal(loaded(**batch(0)).loss, model(**batch(0)).loss))
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)  # tiny products: more threads only wait for each other
    main(*map(int, sys.argv[1:]))
