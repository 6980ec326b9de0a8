"""Loading what is inspected: a model and its inputs, from a local folder and nothing else.

Weights come from safetensors files only: a pickle can run code when it is opened.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
FIRST_BYTE = 5  # ids below are special tokens in most vocabularies
SHORTEST = 8  # tokens


class CannotInspect(ValueError):
    """The folder or the text cannot be used; the message says why."""


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and in words where its weights come from."""

    model: nn.Module
    config: Any
    weights: str


@dataclass(frozen=True)
class Inputs:
    """Keyword arguments of one forward pass, and in words what they are."""

    arguments: dict[str, Tensor]
    words: str


def load(folder: Path, *, seed: int = 0, auto_class: str = "AutoModel") -> Loaded:
    """Read a checkpoint, or make random weights where there is only a ``config.json``.

    Args:
        auto_class: Of transformers, such as "AutoModelForCausalLM".

    Raises:
        CannotInspect: No folder, no or a broken configuration, weights as pickles or unreadable.
    """
    transformers = _transformers()
    if not folder.is_dir():
        raise CannotInspect(f"{folder} is not a folder; pass one that holds a config.json")
    _check_config(folder)
    local = {"local_files_only": True, "trust_remote_code": False}
    with quiet(transformers):
        config = _reading(folder, lambda: transformers.AutoConfig.from_pretrained(folder, **local))
        if any(folder.glob("*.safetensors")):
            return _load_weights(getattr(transformers, auto_class), folder, config, local)
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise CannotInspect(
                f"{folder} has its weights in {pickles[0]}, a pickle that could run code when "
                "opened; save the model again with model.save_pretrained(folder), which writes "
                "safetensors"
            )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            auto = getattr(transformers, auto_class)
            model = _reading(folder, lambda: auto.from_config(config))
    return Loaded(model.eval(), config, f"random, seed {seed}: the folder has no weights")


def _load_weights(auto_class, folder: Path, config, local: dict[str, Any]) -> Loaded:
    read: Any = auto_class.from_pretrained
    if getattr(config, "lln", None):  # saved after lln.hf.replace
        from lln import hf

        read = functools.partial(hf.load, auto_class=auto_class)
    model, report = _reading(
        folder,
        lambda: read(
            folder,
            config=config,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            **local,
        ),
    )
    _check_finite(folder, model)
    missing = sorted(report["missing_keys"])
    words = "from safetensors"
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        words += f"; random where the file has none: {shown} ({len(missing)} tensors)"
    return Loaded(model.eval(), config, words)


def _check_finite(folder: Path, model: torch.nn.Module) -> None:
    """Refuse weights that are not finite: NaN spreads from one to every measurement after it."""
    for name, weight in model.named_parameters():
        wrong = int((~weight.isfinite()).sum())
        if wrong:
            raise CannotInspect(
                f"{folder} has weights that are not finite: {wrong:,} of {weight.numel():,} in "
                f"{name}; the file is damaged or the training diverged, pass another checkpoint"
            )


def prepare(
    folder: Path, loaded: Loaded, text: str, *, tokens: int, sequences: int, seed: int = 0
) -> Inputs:
    """Turn a text into a batch, with the tokenizer of the folder if it has one.

    Args:
        tokens: Length of each sequence, less where the model or the text allows less.
        sequences: Consecutive pieces of the text that are taken.
    """
    if getattr(loaded.model, "main_input_name", "input_ids") == "pixel_values":
        return _noise_images(loaded.config, sequences, seed)
    limit = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 0:
        tokens = min(tokens, limit - 2)  # some models count positions from the padding token
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        ids, words = _tokenized(folder, text, tokens, sequences)
    else:
        ids, words = _as_bytes(loaded.config, text, tokens, sequences)
    arguments = {"input_ids": ids}
    if getattr(loaded.config, "is_encoder_decoder", False):
        arguments["decoder_input_ids"] = ids
    count = "1 sequence" if ids.shape[0] == 1 else f"{ids.shape[0]} sequences"
    return Inputs(arguments, f"{count} of {ids.shape[1]} tokens, {words}")


def load_tokenizer(folder: Path) -> Any:
    """Read the tokenizer of a folder."""
    transformers = _transformers()
    local = {"local_files_only": True, "trust_remote_code": False}
    with quiet(transformers):
        return _reading(folder, lambda: transformers.AutoTokenizer.from_pretrained(folder, **local))


def _tokenized(folder: Path, text: str, tokens: int, sequences: int) -> tuple[Tensor, str]:
    tokenizer = load_tokenizer(folder)
    with quiet(_transformers()):
        size = max(1, min(12 * tokens, len(text) // sequences))
        pieces = [text[size * n : size * (n + 1)] for n in range(sequences)]

        def encode(length: int) -> list[list[int]]:
            found = tokenizer(pieces, truncation=True, max_length=length)["input_ids"]
            return [list(ids) for ids in found]

        length = min(map(len, encode(tokens)))
        _check_length(length)
        return torch.tensor([ids[:length] for ids in encode(length)]), "by its own tokenizer"


def _as_bytes(config, text: str, tokens: int, sequences: int) -> tuple[Tensor, str]:
    vocabulary = config.get_text_config().vocab_size
    data = text.encode()[: tokens * sequences]
    first = FIRST_BYTE if vocabulary > 2 * FIRST_BYTE else 0
    sequences = max(1, min(sequences, len(data) // tokens))
    length = min(tokens, len(data) // sequences)
    _check_length(length)
    values = torch.tensor(list(data[: length * sequences])) % (vocabulary - first) + first
    words = "bytes as ids, since the folder has no tokenizer: the text means nothing to the model"
    return values.reshape(sequences, length), words


def _noise_images(config, count: int, seed: int) -> Inputs:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(seed)
    shape = (count, getattr(config, "num_channels", 3), height, width)
    words = f"{count} images of Gaussian noise, {height}×{width}: the model sees no text"
    return Inputs({"pixel_values": torch.randn(shape, generator=generator)}, words)


def _check_length(length: int) -> None:
    if length < SHORTEST:
        raise CannotInspect(
            f"the text gives sequences of {length} tokens; pass one with at least {SHORTEST} "
            "tokens per sequence"
        )


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise CannotInspect(
            f"{folder} has no config.json; pass the folder that model.save_pretrained() wrote"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CannotInspect(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise CannotInspect(f"{path} has no model_type, which tells what kind of model it is")


def _reading(folder: Path, read):
    """Say in one way whatever goes wrong in a library while it reads the folder."""
    try:
        return read()
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CannotInspect(f"{folder} cannot be read: {type(error).__name__}: {reason}") from error


def _transformers():
    try:
        import transformers
    except ImportError as error:
        raise ImportError("inspect needs transformers: pip install 'lln-attention[hf]'") from error
    return transformers


@contextlib.contextmanager
def quiet(transformers) -> Iterator[None]:
    """Silence the warnings and bars of the library inside the block: we say what matters."""
    logging = transformers.utils.logging
    kept, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(kept)
        if bars:
            logging.enable_progress_bar()
