"""Image classification with Hugging Face's ViT: recipes, the task, a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lln.records.order import shuffled
from lln.records.rows import Row
from lln.records.seeds import seeded
from lln_study.data import images
from lln_study.data.augment import Augmentation, augment, plain
from lln_study.tasks import experiment
from lln_study.tasks.classify import Classification
from lln_study.tasks.experiment import Asked, InSweeps, Key
from lln_study.tasks.models import softmax
from lln_study.tasks.recipe import changed, settings
from lln_study.train.config import TrainConfig, check_whole

EVALUATION_ROWS = 500
# For a few hundred tokens, where the defaults of the zoo are made for longer inputs; the rank is
# that of the authors' example. options given replace them all.
OPTIONS: dict[str, dict[str, Any]] = {
    "linformer": {"rank": 64},
    "nystromformer": {"landmarks": 32},
}


@dataclass(frozen=True)
class ViTRun:
    """A run; see :data:`RECIPES`.

    Attributes:
        patch: Side of a patch: a side of 64 and patches of 4 make 256 tokens and [CLS].
        side: Of the images; None for 64, or 8 with the embedded digits.
        dropout: Of embeddings and layers; attention has none, whatever the mechanism.
        weight_std: Of the initial weights; None for (3 width)^-1/2, that of torch's linear layers,
            which vit-pytorch leaves as they are. With the 0.02 of Hugging Face attention starts out
            uniform, learns its way from there for a long time, and is matched by α = β = 7.
        position_std: Of the initial position embeddings and [CLS].
        flip, shift, jitter: See :class:`lln_study.data.augment.Augmentation`.
    """

    recipe: str
    layers: int
    width: int
    heads: int
    feed_forward: int
    patch: int
    side: int | None = None
    dropout: float = 0.1
    weight_std: float | None = None
    position_std: float = 0.5
    flip: bool = True
    shift: int = 6
    jitter: float = 0.3
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        check_whole("patch", self.patch, least=1)
        if self.side is not None:
            check_whole("side", self.side, least=8)


def paper() -> ViTRun:
    """12 layers of 128 with 8 heads, as in Table 3; 64² in patches of 4: 257 tokens."""
    return ViTRun(
        "paper",
        layers=12,
        width=128,
        heads=8,
        feed_forward=512,
        patch=4,
        train=TrainConfig(
            steps=8_000,
            batch_size=256,
            learning_rate=1e-3,
            warmup=500,
            schedule="cosine",
            weight_decay=0.05,
            betas=(0.9, 0.999),
            precision="bf16",
            eval_every=400,
            save_every=400,
            keep=1,
        ),
    )


def deit_tiny() -> ViTRun:
    """12 layers of 192 with 3 heads, the model of Fig. 10b, in fp16 to watch the loss scale."""
    start = paper()
    return dataclasses.replace(
        start,
        recipe="deit-tiny",
        width=192,
        heads=3,
        feed_forward=768,
        train=dataclasses.replace(start.train, precision="fp16", log_every=10),
    )


def digits() -> ViTRun:
    """4 layers of 64 on the embedded digits, 17 tokens: a minute on two cores."""
    return ViTRun(
        "digits",
        layers=4,
        width=64,
        heads=4,
        feed_forward=256,
        patch=2,
        dropout=0.0,
        flip=False,
        shift=1,
        jitter=0.0,
        train=TrainConfig(
            steps=300,
            batch_size=32,
            learning_rate=2e-3,
            warmup=30,
            schedule="cosine",
            eval_every=100,
            save_every=100,
            log_every=10,
        ),
    )


RECIPES: dict[str, Callable[[], ViTRun]] = {
    "paper": paper,
    "deit-tiny": deit_tiny,
    "digits": digits,
}


def configure(recipe: str = "paper", **changes: Any) -> ViTRun:
    """A recipe, some of its fields and those of its TrainConfig changed by name.

    Example:
        >>> configure("paper", attention="linformer", options={"rank": 64}, seed=1)
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown; choose from {', '.join(RECIPES)}")
    start = RECIPES[recipe]()
    own = OPTIONS.get(changes.get("attention", start.train.attention), {})
    changes = {**changes, "options": changes.get("options") or own}
    return changed(start, fixed=("recipe",), **changes)


class Vision(Classification):
    """Which class an image shows."""

    name = "vit"

    def __init__(self, config: ViTRun, pictures: images.Images) -> None:
        self.config, self.images = config, pictures
        side = pictures.pixels.shape[1]
        if side % config.patch:
            raise ValueError(f"patch={config.patch} does not divide the side {side} of the images")
        self.tokens = (side // config.patch) ** 2 + 1
        counts = {split: len(pictures.rows(split)) for split in ("train", "valid", "test")}
        self.settings = {
            "experiment": "vit",
            **settings(config),
            "side": side,
            "length": self.tokens,
            "data": pictures.source,
            "classes": list(pictures.classes),
            "examples": counts,
        }

    def prepare(self, device: torch.device) -> None:
        """Put all images onto the device as bytes."""
        self.pixels = torch.tensor(self.images.pixels, device=device)
        self.labels = torch.tensor(self.images.labels, device=device)
        self.index = {
            split: torch.tensor(self.images.rows(split)) for split in ("train", "valid", "test")
        }
        self.note_memory(device)

    def build(self) -> nn.Module:
        return build_model(self.config, self.images)

    def batch(self, step: int, rows: slice) -> Mapping[str, Tensor]:
        config, seed = self.config, self.config.train.seed
        own = self.index["train"]
        size = config.train.batch_size
        index = own[shuffled(step, rows, batch_size=size, count=len(own), seed=seed)]
        index = index.to(self.pixels.device, non_blocking=True)
        how = Augmentation(flip=config.flip, shift=config.shift, jitter=config.jitter)
        values = augment(self.pixels[index], how, seed=seed, step=step, rows=rows, batch_size=size)
        return {"pixel_values": values, "labels": self.labels[index]}

    def scores(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(pixel_values=batch["pixel_values"]).logits

    def in_order(self, split: str) -> Iterator[Mapping[str, Tensor]]:
        for part in self.index[split].split(EVALUATION_ROWS):
            index = part.to(self.pixels.device)
            yield {"pixel_values": plain(self.pixels[index]), "labels": self.labels[index]}

    def save(self, model: Any, folder: Path) -> None:
        model.config.save_pretrained(folder)


def build_model(config: ViTRun, pictures: images.Images) -> Any:
    """ViTForImageClassification with fresh weights, the same for every attention."""
    from transformers import ViTConfig, ViTForImageClassification

    import lln.hf

    attention, options = config.train.attention, dict(config.train.options)
    is_replaced = softmax.is_replaced(attention, options)
    side, channels = pictures.pixels.shape[1], pictures.pixels.shape[3]
    sizes = ViTConfig(
        image_size=side,
        patch_size=config.patch,
        num_channels=channels,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.feed_forward,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=0.0,
        initializer_range=config.weight_std or (3 * config.width) ** -0.5,
        id2label=dict(enumerate(pictures.classes)),
        label2id={word: index for index, word in enumerate(pictures.classes)},
        architectures=["ViTForImageClassification"],
    )
    sizes._attn_implementation = softmax.implementation(attention)
    with seeded(config.train.seed, "weights"):
        model = ViTForImageClassification(sizes)
        for embedding in (model.vit.embeddings.position_embeddings, model.vit.embeddings.cls_token):
            nn.init.normal_(embedding, std=config.position_std)
        if is_replaced:
            length = (side // config.patch) ** 2 + 1
            lln.hf.replace(model, attention, quiet=True, max_length=length, **options)
    return model


def reads(config: ViTRun) -> dict[str, Any]:
    """Name the data of a configuration, as arguments of :func:`load`."""
    return {"side": config.side}


def _reads_in_sweeps(config: ViTRun, asked: Asked) -> dict[str, Any]:
    """The digits are no files; other images lie in the folder of the data."""
    source = asked.folder or os.environ.get("LLN_DATA")
    return {"source": Path(source) if source and config.recipe != "digits" else None}


IN_SWEEPS = InSweeps(chosen_by=("valid_accuracy", 1), reads=_reads_in_sweeps)


def load(source: str | os.PathLike[str] | None = None, **how: Any) -> images.Images:
    """Read images; ``how`` are the arguments of :func:`lln_study.data.images.load`."""
    return images.load(source, **how)


def key(config: ViTRun, pictures: images.Images) -> Key:
    """Name the row of a run before it has run: digest and seed."""
    return experiment.key(Vision(config, pictures), config.train)


def run(config: ViTRun, pictures: images.Images, **where: Any) -> Row:
    """Train and test the best weights; see :func:`lln_study.tasks.experiment.run`."""
    return experiment.run(Vision(config, pictures), config.train, **where)
