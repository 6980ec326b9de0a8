"""What is converted: a model from a local folder, and text that it learns from and is judged by."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lln.conversion.masking import Masking
from lln.conversion.texts import (
    Batches,
    TooShort,
    articles,
    decoder_batches,
    encoder_batches,
    whole_text,
)
from lln.inspect.model import (
    PICKLES,
    TOKENIZER_FILES,
    CannotInspect,
    load,
    load_tokenizer,
)
from lln.texts import text

# What the name of an architecture ends with -> the class that loads it.
HEADS = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "Model": "AutoModel",
}
# Tables of positions by the end of their name: BERT and its kin, GPT-2, OPT, the first GPT.
POSITIONS = ("position_embeddings", "wpe", "embed_positions", "positions_embed")
# Files with weights of the softmax model, in whatever form; an index names the parts of one.
WEIGHTS = (
    *("*.safetensors", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite"),
    *("*.index.json", *PICKLES),
)
APART = 4  # batches for the error of layers
USUAL_LENGTH = {"encoder": 512, "decoder": 2048}  # a decoder as long as it is judged at


@dataclass(frozen=True)
class Subject:
    """A softmax model in evaluation mode with its tokenizer.

    Attributes:
        auto_class: Name of the class of transformers that loads it.
        longest: Tokens it was made for; None if its config does not say.
        table: Whether positions beyond ``longest`` do not exist, as they are rows of a table.
    """

    model: Any
    tokenizer: Any
    name: str
    auto_class: str
    longest: int | None
    table: bool

    @property
    def kind(self) -> str:
        """The word "decoder" or "encoder"."""
        return "decoder" if self.auto_class == "AutoModelForCausalLM" else "encoder"

    @property
    def predicts_hidden_tokens(self) -> bool:
        """Whether it is a masked language model that has a token to hide others with."""
        return self.auto_class == "AutoModelForMaskedLM" and Masking.of(self.tokenizer) is not None

    def at_most(self, tokens: int) -> int:
        """So many tokens, or those that the model was made for if they are fewer."""
        return tokens if self.longest is None else min(tokens, self.longest)

    def length(self, wanted: int | None) -> int:
        """Tokens of a sequence in the conversion.

        Raises:
            ValueError: The model has no positions for as many.
        """
        if wanted is None:
            return self.at_most(USUAL_LENGTH[self.kind])
        if self.table and self.longest is not None and wanted > self.longest:
            raise ValueError(
                f"--length {wanted} is more than the {self.longest} positions of {self.name}; "
                f"choose at most {self.longest}"
            )
        return wanted


def load_subject(folder: Path, device: str) -> Subject:
    """Read a model and its tokenizer; safetensors only, no code of the folder is run.

    Raises:
        ValueError: The folder cannot be used; the message says why.
    """
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder} has its weights in {pickles[0]}, a pickle that could run code when "
                "opened; save the model again with model.save_pretrained(folder), which writes "
                "safetensors"
            )
        if (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no *.safetensors: there are no weights to convert")
    auto_class = _auto_class(folder)
    model = load(folder, auto_class=auto_class).model
    if not _takes_text(model):
        raise ValueError(f"{folder} has a {type(model).__name__}, which does not read text")
    tokenizer = _tokenizer(folder)
    longest, table = _positions(model)
    return Subject(model.to(device), tokenizer, folder.absolute().name, auto_class, longest, table)


def _tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; without its files transformers may make one that knows no word."""
    vocabularies = [name for name in TOKENIZER_FILES if name != "tokenizer_config.json"]
    try:
        found = load_tokenizer(folder)
    except CannotInspect:
        if any((folder / name).exists() for name in vocabularies):
            raise
        found = None
    if found is None or len(found) <= len(found.all_special_ids):
        raise ValueError(
            f"{folder} has no tokenizer: a file with its vocabulary, such as tokenizer.json or "
            "vocab.txt, is missing; write it there with tokenizer.save_pretrained(folder)"
        )
    return found


def copy_beside(model: Path, folder: Path, *, leave_out: Path) -> None:
    """Copy what stands beside the weights of a model, such as the modules of sentence-transformers.

    Weights of these modules are copied, other weights and hidden folders are not.

    Args:
        leave_out: A folder, perhaps inside ``model``, that is not looked into.
    """
    modules = _module_folders(model)
    for path in model.rglob("*"):
        place = path.relative_to(model)
        hidden = any(part.startswith(".") for part in place.parts[:-1])
        if not path.is_file() or hidden or path.resolve().is_relative_to(leave_out.resolve()):
            continue
        if place.parent.name in modules or not any(path.match(weights) for weights in WEIGHTS):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / place)


def _module_folders(model: Path) -> set[str]:
    """Folders of the modules of a SentenceTransformer beside its encoder; none of other models."""
    try:
        entries = json.loads((model / "modules.json").read_text(encoding="utf-8"))
        return {entry["path"] for entry in entries} - {""}
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def drawn_anew(model: Any) -> Any:
    """A model of the same kind with weights as its class draws them, from torch's seed."""
    fresh = type(model)(copy.deepcopy(model.config))
    return fresh.to(device=model.device, dtype=model.dtype).eval()


def _auto_class(folder: Path) -> str:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "AutoModel"  # the loader says what is wrong
    if not isinstance(config, dict):
        return "AutoModel"
    if config.get("lln"):
        raise ValueError(f"{folder} was converted before; pass the folder of the softmax model")
    named = config.get("architectures") or ["Model"]
    for ending, auto_class in HEADS.items():
        if str(named[0]).endswith(ending):
            return auto_class
    raise ValueError(
        f"{folder} has a {named[0]}; encoders, masked language models and decoders can be "
        "converted here, others with lln.hf.convert"
    )


def _takes_text(model: Any) -> bool:
    return model.main_input_name == "input_ids" and not model.config.is_encoder_decoder


def _positions(model: Any) -> tuple[int | None, bool]:
    """How many positions a model has, and whether they are rows of a table."""
    limit = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith(POSITIONS):
            # RoBERTa counts from behind the padding, OPT from an offset.
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - getattr(module, "offset", first), True
    return limit, False


@dataclass(frozen=True)
class Texts:
    """Articles to learn from, read as they are needed, and those to be judged by.

    Attributes:
        train: Where they are; None is the text that comes with the package.
        split: Of ``train``: "train" leaves out the articles that are held out; None takes all.
        held_out: Where articles are that are never learned from.
        held_split: Of ``held_out``.
        corpus: Name of the text to learn from.
    """

    train: Path | None
    split: str | None
    held_out: Path | None
    held_split: str | None
    corpus: str

    def learned(self) -> Iterator[str]:
        """Articles to learn from."""
        return articles(self.train, self.split)

    def held(self) -> Iterator[str]:
        """Articles to be judged by."""
        return articles(self.held_out, self.held_split)

    @property
    def words(self) -> str:
        """Say where both come from."""
        if self.held_split is None and self.held_out is not None:
            return f"learns from {self.corpus}, judged by {self.held_out.name}"
        if self.split is None:
            return f"learns from the files for train of {self.corpus}, judged by those for valid"
        return f"learns from {self.corpus} without its last articles, by which it is judged"

    def judged_text(self, count: int) -> str:
        """The first held-out articles as one text; as it stands in the file where all are taken."""
        found = list(itertools.islice(self.held(), count + 1))
        own = self.held_out if self.held_split is None else None
        if len(found) <= count and own is not None and own.is_file():
            return whole_text(own)
        return "\n\n".join(found[:count])


def find_texts(data: Path | None, held_out: Path | None) -> Texts:
    """Say which text is learned from, and which is held out.

    Args:
        data: A file, or a folder with files per split; None looks at ``LLN_DATA``, then takes the
            text that comes with the package.
        held_out: A file; otherwise the files for validation, or the end of the text.

    Raises:
        ValueError: There is no text, or the same text would be learned from.
    """
    if data is None and os.environ.get("LLN_DATA"):
        data = Path(os.environ["LLN_DATA"])
    corpus = text.find(data)
    if held_out is None:
        split = None if "valid" in corpus.files else "train"
        return Texts(data, split, data, "valid", corpus.name)
    other = text.find(held_out)
    learned = {path.resolve() for path in corpus.files.get("train", ())}
    if any(path.resolve() in learned for path in other.files["train"]):
        raise ValueError(
            f"--held-out {held_out} is among the text to learn from, {data}; pass another file, or "
            "leave it out: then the end of the text is held out"
        )
    return Texts(data, None, held_out, None, corpus.name)


@dataclass(frozen=True)
class Lessons:
    """Text to learn from, and some more of it that is neither learned from nor judged by.

    Attributes:
        batches: Shuffled sequences.
        apart: The sequences that followed, in order: on these layers are compared, and those that
            keep softmax are chosen.
    """

    batches: Batches
    apart: Batches


def training_batches(
    subject: Subject, texts: Texts, *, length: int, batch_size: int, updates: int, seed: int
) -> Lessons:
    """Sequences for so many updates, fewer if the text has fewer, and four batches apart.

    Those of a masked language model have tokens hidden, as it has always seen them.

    Raises:
        TooShort: The text does not fill two sequences.
    """
    limit = (updates + APART) * batch_size
    given = (subject.tokenizer, texts.learned(), length)
    try:
        if subject.kind == "decoder":
            found = decoder_batches(*given, batch_size=batch_size, limit=limit)
        else:
            options = {"batch_size": batch_size, "limit": limit, "every_piece": True, "fill": 0.5}
            found = encoder_batches(*given, **options)
    except TooShort as error:
        source = texts.train or texts.corpus
        raise TooShort(f"{source} is too short to learn from: {error} (--length)") from None
    count = len(found.sequences)
    if count < 2:
        raise TooShort(
            f"{texts.train} fills one sequence of {length} tokens, and one more is needed to "
            "measure errors; pass more text, or a smaller --length"
        )
    if subject.predicts_hidden_tokens:
        found = dataclasses.replace(found, masking=Masking.of(subject.tokenizer, seed=seed))
    cut = count - min(APART * batch_size, count // 2)
    learned, apart = found.sequences[:cut], found.sequences[cut:]
    return Lessons(
        dataclasses.replace(found, sequences=learned, seed=seed),
        dataclasses.replace(found, sequences=apart),
    )


@dataclass(frozen=True)
class OnDevice(Sequence[dict[str, Tensor]]):
    """The same batches on a device."""

    batches: Batches
    device: str

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: Any) -> Any:
        if not 0 <= step < len(self):
            raise IndexError(step)
        return {name: x.to(self.device) for name, x in self.batches[step].items()}
