"""A pre-trained body and data in the format of GLUE that are small enough for tests."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

from lln.records.rows import Row
from lln_study.tasks import glue, mlm

GOOD = ("good", "fine", "lovely", "great")
BAD = ("bad", "poor", "awful", "dull")
OTHER = ("film", "story", "the", "a", "actor", "scene", "ending", "and", "plot", "music")


def sentence(draw: random.Random, words: tuple[str, ...], count: int = 6) -> str:
    """Other words around one that tells."""
    chosen = [draw.choice(OTHER) for _ in range(count)]
    chosen.insert(draw.randrange(count), draw.choice(words))
    return " ".join(chosen)


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(lzma.compress(text.encode()))


def write_glue(folder: Path, *, train: int = 200, dev: int = 60) -> Path:
    """SST-2 (is the telling word good?) and STS-B (number of equal words), as ``.jsonl.xz``."""
    draw = random.Random(0)
    for split, count in (("train", train), ("dev", dev)):
        rows = []
        for number in range(count):
            label = number % 2
            text = sentence(draw, GOOD if label else BAD, count=draw.randint(2, 20))
            rows.append({"sentence": text, "label": label})
        write_lines(folder / "glue" / f"sst2_{split}.jsonl.xz", rows)
        pairs = []
        for _ in range(count):
            first = [draw.choice(OTHER) for _ in range(5)]
            same = draw.randint(0, 5)
            second = first[:same] + [draw.choice(GOOD) for _ in range(5 - same)]
            row = {"sentence1": " ".join(first), "sentence2": " ".join(second)}
            pairs.append({**row, "label": float(same)})
        write_lines(folder / "glue" / f"stsb_{split}.jsonl.xz", pairs)
    return folder


def write_text(folder: Path) -> Path:
    """A corpus of the same words, with a file for validation."""
    draw = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 300), ("valid", 30)):
        lines = [sentence(draw, GOOD + BAD) for _ in range(count)]
        (folder / f"words_{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def fine_tune(config: glue.GlueConfig, body: Path, data: Path, **where) -> Row:
    """Run a fine-tuning of a body on data in the format of GLUE."""
    return glue.run(config, glue.load(data, body=body, **glue.reads(config)), **where)


TINY = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "feed_forward": 64,
    "vocabulary": 300,
    "length": 64,
    "steps": 4,
    "batch_size": 4,
    "eval_every": 0,
    "save_every": 0,
}


def pretrain(folder: Path, attention: str, *, sizes: dict | None = None, **options) -> Path:
    """A few steps of masked language modelling; returns the folder of the run."""
    changes = {**TINY, **(sizes or {}), "attention": attention, "options": options}
    config = mlm.configure("roberta-tiny", **changes)
    text = write_text(folder / "text")
    encoded = mlm.load(text, **mlm.reads(config))
    mlm.run(config, encoded, folder=folder / attention, tensorboard=False)
    return folder / attention
