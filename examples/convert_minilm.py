"""Make a sentence encoder linear: python examples/convert_minilm.py MODEL_FOLDER TEXT [STEPS]

MODEL_FOLDER is a local all-MiniLM-L6-v2 or another encoder with safetensors, TEXT a file of
articles (.txt or .jsonl, also .xz). `lln convert` does the same with a report.
"""

import sys
from pathlib import Path

import lln.hf
from lln.conversion.encoders import compare_embeddings
from lln.conversion.subject import OnDevice, find_texts, load_subject, training_batches
from lln.conversion.texts import encoder_batches


def main(folder: str, text: str, steps: int = 200, length: int = 512) -> dict[str, float]:
    subject, texts = load_subject(Path(folder), "cpu"), find_texts(Path(text), None)
    sizes = {"length": length, "batch_size": 2}
    lessons = training_batches(subject, texts, **sizes, updates=steps + 4, seed=0)
    teacher = load_subject(Path(folder), "cpu").model
    done = lln.hf.convert(
        subject.model,
        OnDevice(lessons.batches, "cpu"),
        held_out=OnDevice(lessons.apart, "cpu"),
        transfer_steps=steps,
        recover_steps=0,
        progress=lambda stage, step, total, error: print(f"{stage} {step}/{total}: {error:.3f}"),
    )
    for layer, error in done.errors["transfer"].items():
        print(f"layer {layer}: error {done.errors['calibrate'][layer]:.3f} -> {error:.3f}")
    held = encoder_batches(subject.tokenizer, texts.held(), length, batch_size=2, limit=32)
    scores = compare_embeddings(teacher, subject.model, held)
    print(f"cosine to the softmax model on held-out articles: {scores['cosine_mean']:.4f}")
    return scores


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
