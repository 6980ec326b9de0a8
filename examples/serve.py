"""Serve many streams from a constant state: python examples/serve.py [MODEL_FOLDER] [SEATS]

Streams start and end at different times, each in its seat. Then the time of a step against the
length of the streams, beside the same model with softmax and its cache. MODEL_FOLDER is a decoder
that was saved after `lln.hf.replace` or by `lln convert`; without one a small Llama with random
weights is made on the spot. On a GPU every step is a CUDA graph, for both.
"""

import sys
import time

import torch
import transformers

import lln.hf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW = {"diag_block": 64, "diag_overlap": 64, "sinks": 1}


def made(attention: str | None) -> transformers.PreTrainedModel:
    """A Llama of 10 million weights, with softmax or ours."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    limits = {"vocab_size": 512, "max_position_embeddings": 1 << 20, "eos_token_id": None}
    config = transformers.LlamaConfig(**sizes, **limits, intermediate_size=1024)
    model = transformers.LlamaForCausalLM(config).eval()
    if attention is not None:
        lln.hf.replace(model, attention, quiet=True, **WINDOW)
        lln.hf.calibrate(model, [{"input_ids": torch.randint(512, (2, 256))}])
    return model


def loaded(folder: str) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
    """The model of a folder, and its weights with softmax."""
    kind = transformers.AutoModelForCausalLM
    return lln.hf.load(folder, kind), kind.from_pretrained(folder, attn_implementation="sdpa")


def serve(engine: lln.hf.Engine, prompts: list[torch.Tensor]) -> None:
    """The plain loop: a prompt takes a seat as soon as one is free."""
    waiting = list(enumerate(prompts))
    names: dict[lln.hf.Stream, int] = {}
    while waiting or engine.free < engine.seats:
        while waiting and engine.free:
            number, prompt = waiting.pop(0)
            stream = engine.add(prompt, max_new_tokens=4 + 3 * number, do_sample=True, seed=number)
            names[stream] = number
        for stream, _ in engine.step():
            if stream.ended:
                said = " ".join(map(str, stream.tokens))
                print(f"stream {names[stream]}, seat {stream.seat}, {stream.ended}: {said}")


def milliseconds(engine: lln.hf.Engine, length: int, steps: int) -> float:
    """The time of a step in which every seat is at about this position."""
    prompt = torch.randint(100, (length,), generator=torch.Generator().manual_seed(length))
    streams = [
        engine.add(prompt, max_new_tokens=steps + 3, eos_token_id=()) for _ in range(engine.seats)
    ]
    for _ in range(3):  # the first allocates, and captures
        engine.step()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()  # waits for the tokens
    took = time.perf_counter() - start
    assert all(stream.ended for stream in streams)
    return 1e3 * took / steps


def main(
    folder: str | None = None,
    seats: int = 4,
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384, 65536)[: 5 if DEVICE == "cuda" else 3],
    steps: int = 20,
) -> list[tuple[int, float, float]]:
    ours, softmax = loaded(folder) if folder else (made("lln_nearfar"), made(None))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(100, (3 + 2 * i,), generator=generator) for i in range(2 * seats)]
    engine = lln.hf.Engine(ours.to(DEVICE).eval(), seats)
    serve(engine, prompts)
    memory = sum(x.nbytes for layer in engine.layers for x in layer.tensors.values())
    print(f"\n{seats} seats, {memory / 2**20:.1f} MiB for streams of any length; on {DEVICE}")
    print("tokens so far | LLN, ms a step | softmax, ms a step | its cache, MiB")
    lln.hf.register()
    softmax.to(DEVICE).eval().set_attn_implementation("lln_mixed")  # transformers' SDPA, in seats
    rows = []
    for length in lengths:
        if length + steps > softmax.config.max_position_embeddings:
            break
        other = lln.hf.Engine(softmax, seats, max_length=length + steps + 4)
        memory = sum(x.nbytes for layer in other.layers for x in layer.tensors.values())
        row = length, milliseconds(engine, length, steps), milliseconds(other, length, steps)
        print(f"{length:13,d} | {row[1]:14.2f} | {row[2]:18.2f} | {memory / 2**20:14.1f}")
        rows.append(row)
    return rows


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(*arguments[:1], *map(int, arguments[1:]))
