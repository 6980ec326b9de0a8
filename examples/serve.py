"""Serve many streams from a constant state: python examples/serve.py [MODEL_FOLDER] [SEATS]

Then the time of a step against their length, beside softmax with its cache. MODEL_FOLDER was saved
after `lln.hf.replace`; else a small Llama is made. On a GPU a step is a CUDA graph, for both.
"""

import sys
import time

import torch
import transformers

import lln.hf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def models(folder: str | None) -> list[transformers.PreTrainedModel]:
    """A decoder with our attention, and one with softmax."""
    if folder is not None:
        kind = transformers.AutoModelForCausalLM
        return [lln.hf.load(folder, kind), kind.from_pretrained(folder, attn_implementation="sdpa")]
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    sizes |= {"num_hidden_layers": 4, "vocab_size": 512, "max_position_embeddings": 1 << 20}
    config = transformers.LlamaConfig(**sizes, eos_token_id=None)
    ours, softmax = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    lln.hf.replace(ours, "lln_nearfar", quiet=True, near=lln.Near(64, overlap=64, sinks=1))
    lln.hf.calibrate(ours, [{"input_ids": torch.randint(512, (2, 256))}])
    return [ours, softmax]


def serve(engine: lln.hf.Engine, prompts: list[torch.Tensor]) -> None:
    """The plain loop: a prompt takes a seat as soon as one is free."""
    waiting = dict(enumerate(prompts))
    while waiting or engine.free < engine.seats:
        for n in list(waiting)[: engine.free]:
            engine.add(waiting.pop(n), max_new_tokens=4 + 3 * n, do_sample=True, seed=n)
        for stream, _ in engine.step():
            if stream.ended:
                print(f"stream {stream.seed}, seat {stream.seat}, {stream.ended}:", *stream.tokens)


def milliseconds(engine: lln.hf.Engine, length: int, steps: int) -> float:
    """The time of a step in which every seat is at about this position."""
    for _ in range(engine.seats):
        engine.add(torch.full((length,), 7), max_new_tokens=steps + 3, eos_token_id=())
    # A step waits for its tokens; the first also allocates, and captures.
    ends = [time.perf_counter() for _ in range(steps + 3) if engine.step()]
    return 1e3 * (ends[-1] - ends[2]) / steps


def main(
    folder: str | None = None, seats: int = 4, lengths=(256, 1024, 4096), steps: int = 20
) -> list:
    torch.manual_seed(0)
    ours, softmax = (model.to(DEVICE).eval() for model in models(folder))
    engine = lln.hf.Engine(ours, seats)
    serve(engine, [torch.randint(100, (3 + 2 * i,)) for i in range(2 * seats)])
    print(f"{seats} seats, {engine.nbytes / 2**20:.1f} MiB for streams of any length; on {DEVICE}")
    softmax.set_attn_implementation("lln_mixed")  # transformers' SDPA, in seats
    print("tokens so far | LLN, ms a step | softmax, ms a step | its cache, MiB")
    for length in lengths:
        other = lln.hf.Engine(softmax, seats, max_length=length + steps + 4)
        row = length, milliseconds(engine, length, steps), milliseconds(other, length, steps)
        print("{:13,d} | {:14.2f} | {:18.2f} |".format(*row), f"{other.nbytes / 2**20:14.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
