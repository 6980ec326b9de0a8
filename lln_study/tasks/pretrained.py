"""A pre-trained body: where it lies, what it is, and a model with a new head made from it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lln.records.seeds import seeded
from lln_study.tasks.models import softmax, whole_layer
from lln_study.train import checkpoint, runfolder
from lln_study.train.config import TrainConfig
from lln_study.train.loop import identity
from lln_study.train.task import Task


@dataclass(frozen=True, eq=False)
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
        if (source / runfolder.RUN).exists():
            return Pretrained(folder, **runfolder.read(source))
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        return Pretrained(folder, f"{source.name}-{weights[:12]}", {})

    @staticmethod
    def planned(task: Task, config: TrainConfig, folder: Path) -> Pretrained:
        """What the folder of a pre-training will hold, before it has run."""
        return Pretrained(folder, identity(task, config), {**config.as_dict(), **task.settings})

    def check(self) -> None:
        """Compare a checkpoint with its manifest; a folder of another library has none."""
        if not self.configuration and not (self.folder / checkpoint.MANIFEST).exists():
            return
        owner = self.identity if self.configuration else None
        reason = checkpoint.fault(self.folder, owner, unread=(checkpoint.OPTIMIZER,))
        if reason is not None:
            raise ValueError(
                f"{self.folder} cannot be fine-tuned: {reason}; copy or train it again. If "
                f"you changed it yourself, pass a copy without {checkpoint.MANIFEST}"
            )

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

        config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        return config.max_position_embeddings - config.pad_token_id - 1

    def classifier(self, classes: int, seed: int, *, dropout: float = 0.0) -> nn.Module:
        """The body with a new head for ``classes``.

        Raises:
            ValueError: Weights of the body are missing, left over, or not finite.
        """
        load = self._loader()
        with _quiet(), _readable(self.folder), seeded(seed, "head"):
            model, found = load(self.folder, num_labels=classes, hidden_dropout_prob=dropout)
        _check_body(self.folder, model, found)
        for name, value in model.state_dict().items():
            if not torch.isfinite(value).all():
                raise ValueError(
                    f"{self.folder} has weights that are not finite, {name} to begin with: its "
                    "training diverged; train it again with a smaller learning rate"
                )
        return model

    def _loader(self) -> Callable[..., Any]:
        """A function that gives the model, and what was missing and left over."""
        from transformers import AutoModelForSequenceClassification

        from lln import hf

        if "lln_gated" in self._config():
            return _load_whole_layers
        if self._config().get("lln"):
            load = partial(hf.load, auto_class=AutoModelForSequenceClassification)
        else:
            load = partial(
                AutoModelForSequenceClassification.from_pretrained,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                attn_implementation=softmax.implementation(self.attention[0]),
            )
        return partial(load, output_loading_info=True)

    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def _config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))


def _load_whole_layers(folder: Path, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Load a RoBERTa whose layers :func:`whole_layer.replace_layers` has exchanged."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **changes)
    choice = config.lln_gated
    model = AutoModelForSequenceClassification.from_config(config)
    whole_layer.replace_layers(model, choice["attention"], **choice["options"])
    missing, left = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model, {"missing_keys": missing, "unexpected_keys": left}


def _check_body(folder: Path, model: Any, found: Mapping[str, Any]) -> None:
    """Refuse a body with weights that are not stored, which would be random; a head may be new."""
    own = f"{model.base_model_prefix}."
    for kind, what in (("missing_keys", "no weights"), ("unexpected_keys", "no place for")):
        names = [name for name in found[kind] if name.startswith(own) and ".pooler." not in name]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"{folder} has {what} {', '.join(sorted(names)[:3])}{more}: config.json and "
                "model.safetensors are not of one model; copy both again, or train it again"
            )


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn what the libraries say of a damaged file into an error that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:  # the latter if shapes differ
        raise ValueError(
            f"{folder}/model.safetensors cannot be loaded: {error}; copy it and config.json again"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' bar and its report that a head is new."""
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
