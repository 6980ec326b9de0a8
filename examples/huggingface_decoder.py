"""Put LLN+Diag into a trained decoder: calibrate, fine-tune a little, generate from a state:
python examples/huggingface_decoder.py [STEPS]

A small Llama learns letters; its attention is replaced, with alpha and beta from its activations.
"""

import sys

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import lln.hf
import lln.texts.bundled

TOKENS, TEXT = 96, lln.texts.bundled.text()
LETTERS = sorted(set(TEXT))
IDS = torch.tensor([LETTERS.index(letter) for letter in TEXT[:50_000]])


def make() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vocabulary = {"vocab_size": len(LETTERS), "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **vocabulary, num_key_value_heads=2, intermediate_size=128)
    return LlamaForCausalLM(config)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(len(IDS) - TOKENS, (16, 1), generator=generator)
    return IDS[start + torch.arange(TOKENS)]


def train(model: LlamaForCausalLM, steps: int, first: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=lr)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(step), labels=batch(step)).loss.backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def loss(model: LlamaForCausalLM) -> float:
    return sum(model(batch(10**6 + i), labels=batch(10**6 + i)).loss.item() for i in range(8)) / 8


def main(steps: int = 150) -> dict[str, float]:
    model, losses = make(), {}
    train(model, steps, first=0, lr=3e-3)
    losses["softmax"] = loss(model)
    lln.hf.replace(model, "lln_diag", near=16)
    lln.hf.calibrate(model, [{"input_ids": batch(10**7 + i)} for i in range(4)], method="entropy")
    losses["replaced"] = loss(model)
    train(model, steps // 2, first=steps, lr=1e-3)
    losses["fine-tuned"] = loss(model)
    print(*(f"{name:10s} loss {value:.3f}" for name, value in losses.items()), sep="\n")
    prompt = IDS[None, :40]
    out = model.generate(prompt, max_new_tokens=80, do_sample=False)
    print("".join(LETTERS[i] for i in out[0]))
    again = model.generate(prompt, max_new_tokens=80, do_sample=False, use_cache=False)
    print("equal to generation without cache:", torch.equal(out, again))
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)  # tiny products: more threads only wait for each other
    main(*map(int, sys.argv[1:]))
