"""A pre-trained body: where it lies, what it is, and a model with a new head made from it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lln.experiments import gated, softmax
from lln.experiments.seeds import seeded


@dataclass(frozen=True)
class Pretrained:
    """Where a body comes from: a run of ``lln train mlm``, or a Hugging Face folder."""

    folder: Path
    identity: str
    configuration: Mapping[str, Any]

    @staticmethod
    def find(source: Path) -> Pretrained:
        """The best checkpoint of a run, or the folder itself."""
        places = (source / "best", source / "last", source)
        folder = next((place for place in places if (place / "config.json").exists()), None)
        if folder is None or not (folder / "tokenizer.json").exists():
            raise ValueError(
                f"{source} is neither a run of `lln train mlm` with a checkpoint nor a Hugging "
                "Face folder with config.json, model.safetensors and tokenizer.json"
            )
        if (source / "run.json").exists():
            run = json.loads((source / "run.json").read_text(encoding="utf-8"))
            return Pretrained(folder, run["identity"], run["configuration"])
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        return Pretrained(folder, f"{source.name}-{weights[:12]}", {})

    @property
    def attention(self) -> tuple[str, dict[str, Any]]:
        """The mechanism and its options."""
        if "attention" in self.configuration:
            return self.configuration["attention"], dict(self.configuration.get("options", {}))
        config = self._config()
        records = [config["lln_gated"]] if "lln_gated" in config else config.get("lln")
        if not records:
            return "softmax", {}
        return records[0]["attention"], records[0]["options"]

    @property
    def longest(self) -> int:
        """Tokens that its position embeddings hold."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.folder)
        return config.max_position_embeddings - config.pad_token_id - 1

    def classifier(self, classes: int, seed: int, *, dropout: float = 0.0) -> nn.Module:
        """The body with a new head for ``classes``; weights that are not finite are refused."""
        from transformers import AutoModelForSequenceClassification

        from lln import hf

        load = partial(
            AutoModelForSequenceClassification.from_pretrained,
            dtype=torch.float32,
            attn_implementation=softmax.implementation(self.attention[0]),
        )
        if self._config().get("lln"):
            load = partial(hf.load, auto_class=AutoModelForSequenceClassification)
        if "lln_gated" in self._config():
            load = _load_gated
        with _quiet(), seeded(seed, "head"):
            model = load(self.folder, num_labels=classes, hidden_dropout_prob=dropout)
        for name, value in model.state_dict().items():
            if not torch.isfinite(value).all():
                raise ValueError(
                    f"{self.folder} has weights that are not finite, {name} to begin with: its "
                    "training diverged; train it again with a smaller learning rate"
                )
        return model

    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def _config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))


def _load_gated(folder: Path, **changes: Any) -> nn.Module:
    """A RoBERTa whose layers :func:`lln.experiments.gated.replace_layers` has exchanged."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(folder, **changes)
    choice = config.lln_gated
    model = AutoModelForSequenceClassification.from_config(config)
    gated.replace_layers(model, choice["attention"], **choice["options"])
    missing, _ = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    lost = [name for name in missing if not name.startswith("classifier.")]
    if lost:
        raise ValueError(f"{folder} has no weights {', '.join(lost[:3])}; it is another model")
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bar, and its report that a head is new."""
    from transformers.utils import logging

    loud, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(loud)
        if bar:
            logging.enable_progress_bar()
