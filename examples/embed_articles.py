"""Embed whole articles: python examples/embed_articles.py MODEL_FOLDER TEXT [COUNT] [LENGTH]

MODEL_FOLDER is a local all-MiniLM-L6-v2 or another sentence encoder with BERT's learned positions,
TEXT a file of articles (.txt or .jsonl, also .xz); the longest COUNT are taken, of at most LENGTH
tokens. Needs sentence-transformers. Weights as they are: `lln convert` brings the embeddings of
both closer to each other.
"""

import sys
import tempfile
import time

import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from torch.nn.functional import interpolate

import lln.hf
from lln.conversion.texts import articles


def extend_positions(model: nn.Module, length: int) -> None:
    """Stretch the table of learned positions of a BERT to a greater length, by interpolation."""
    parts = model.embeddings
    table = parts.position_embeddings.weight.detach()
    stretched = interpolate(table.T[None], size=length, mode="linear", align_corners=True)[0].T
    parts.position_embeddings = nn.Embedding.from_pretrained(stretched.contiguous(), freeze=False)
    parts.position_ids = torch.arange(length, device=table.device)[None]
    parts.token_type_ids = torch.zeros_like(parts.position_ids)
    model.config.max_position_embeddings = length


def embed(model: SentenceTransformer, texts: list[str]) -> tuple[torch.Tensor, float]:
    """The embeddings, one article at a time, and the seconds an article takes."""
    model.encode(texts[:1])  # the first call also allocates
    start = time.perf_counter()
    found = model.encode(texts, batch_size=1, convert_to_tensor=True)
    return found.cpu(), (time.perf_counter() - start) / len(texts)


def main(folder: str, text: str, count: int = 8, length: int = 8192) -> dict[str, float]:
    model = SentenceTransformer(folder)
    encoder = model[0].auto_model
    extend_positions(encoder, length)
    model.max_seq_length = length
    texts = sorted(articles(text), key=len)[-count:]
    tokens = [len(ids) for ids in model.tokenizer(texts, truncation=True)["input_ids"]]
    print(f"{len(texts)} articles of {min(tokens):,} to {max(tokens):,} tokens")

    softmax, seconds = embed(model, texts)
    lln.hf.replace(encoder, "lln_nearfar", near=lln.Near(64, overlap=64, sinks=1))
    linear, seconds_linear = embed(model, texts)
    close = torch.cosine_similarity(softmax, linear).mean().item()
    print(f"softmax: {seconds:.2f} s an article")
    print(f"LLN:     {seconds_linear:.2f} s an article, cosine to softmax {close:.3f}")

    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved, create_model_card=False)
        again = lln.hf.load_sentence_transformer(saved)
        equal = torch.equal(again.encode(texts[:1], convert_to_tensor=True).cpu(), linear[:1])
    print(f"saved and loaded model equal: {equal}")
    return {"softmax": seconds, "lln": seconds_linear, "cosine": close, "equal": equal}


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
