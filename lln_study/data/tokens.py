"""Byte-level BPE: trained or loaded here, and a corpus as arrays of ids that are made once.

CACHE/0123456789ab/     name: hash of the files, their contents, and the tokenizer
    tokenizer.json
    train.npy  train_starts.npy  valid.npy ...   uint16 ids; int64 first id of every article
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lln.records import files
from lln.texts.text import Corpus

# As in RoBERTa; the mask comes last there and here fifth, which only config.json has to know.
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
START, PAD, END, UNKNOWN, MASK = range(len(SPECIAL))
LARGEST = 2**16
SAMPLE = 20_000_000  # characters that a tokenizer is trained on
FORMAT = 1


@dataclass(frozen=True)
class Tokens:
    """The ids of a split: articles end to end, each closed by </s>.

    Attributes:
        ids: uint16.
        starts: First id of each article, and the number of ids; int64.
    """

    ids: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Encoded:
    """A corpus as ids."""

    corpus: str
    tokenizer: Any
    splits: dict[str, Tokens]
    digest: str

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.get_vocab_size()


class _Size:
    """A stand-in for a tokenizer where only the number of its ids matters."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def get_vocab_size(self) -> int:
        return self.vocabulary


def random_ids(vocabulary: int, count: int) -> Encoded:
    """Ids that mean nothing, in one split: enough to time training, and nothing has to be read."""
    ids = np.random.default_rng(0).integers(len(SPECIAL), vocabulary, count, dtype=np.uint16)
    split = Tokens(ids, np.array([0, count], dtype=np.int64))
    return Encoded("random ids", _Size(vocabulary), {"train": split}, f"random-{count}")


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer with RoBERTa's special tokens, on all cores.

    At most :data:`SAMPLE` characters are looked at, spread over the texts.
    """
    from tokenizers import ByteLevelBPETokenizer

    if not 256 + len(SPECIAL) <= vocabulary <= LARGEST:
        raise ValueError(
            f"vocabulary={vocabulary} is not possible; choose {256 + len(SPECIAL)} (bytes and "
            f"special tokens) to {LARGEST} (16 bits)"
        )
    total = sum(map(len, texts))
    stride = max(1, round(total / SAMPLE))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts[::stride], vocab_size=vocabulary, special_tokens=list(SPECIAL), show_progress=False
    )
    return bpe._tokenizer


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """A tokenizer.json with RoBERTa's special tokens in our order."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(
            f"tokenizer={path} cannot be read: {error}; pass a tokenizer.json"
        ) from None
    wrong = [
        token for number, token in enumerate(SPECIAL) if tokenizer.token_to_id(token) != number
    ]
    if wrong or tokenizer.get_vocab_size() > LARGEST:
        raise ValueError(
            f"tokenizer={path} does not have {', '.join(SPECIAL)} as its first tokens and at most "
            f"{LARGEST} of them; pass one that was trained here"
        )
    return tokenizer


def cache_folder() -> Path:
    """``LLN_CACHE``, or ``~/.cache/lln``."""
    return Path(os.environ.get("LLN_CACHE") or Path.home() / ".cache" / "lln")


def encode(
    corpus: Corpus,
    vocabulary: int,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    cache: Path | None = None,
) -> Encoded:
    """The ids of a corpus, from the cache if they were made before.

    Args:
        vocabulary: Size of the tokenizer that is trained on the articles.
        tokenizer: A tokenizer.json to use instead.
        cache: Folder; :func:`cache_folder` by default.
    """
    digest = _digest(corpus, vocabulary, tokenizer)
    folder = (cache or cache_folder()) / digest
    found = _load(folder, corpus, digest)
    if found is None:
        # Processes that start together wait for the first instead of all doing the same.
        with files.locked(folder.with_name(f".{digest}.lock")):
            found = _load(folder, corpus, digest)
            if found is None:
                _make(folder, corpus, vocabulary, tokenizer)
                found = _load(folder, corpus, digest)
    if found is None:
        raise ValueError(f"{folder} cannot be read back after it was written; is the disk full?")
    return found


def _load(folder: Path, corpus: Corpus, digest: str) -> Encoded | None:
    """What :func:`_make` wrote; None if it is not there, or damaged since then."""
    if not folder.exists():
        return None
    try:
        bpe = load_tokenizer(folder / "tokenizer.json")
        splits = {
            split: Tokens(
                np.load(folder / f"{split}.npy", mmap_mode="r", allow_pickle=False),
                np.load(folder / f"{split}_starts.npy", allow_pickle=False),
            )
            for split in corpus.splits
        }
        for split, tokens in splits.items():
            _check(split, tokens, bpe.get_vocab_size())
    except (OSError, EOFError, ValueError) as error:
        warnings.warn(f"{folder} is damaged and made again: {error}", stacklevel=3)
        return None
    return Encoded(corpus.name, bpe, splits, digest)


def _check(split: str, tokens: Tokens, vocabulary: int) -> None:
    """Whether ids and articles fit together; a file that lost its middle may still load."""
    ids, starts = tokens.ids, tokens.starts
    fit = ids.dtype == np.uint16 and ids.ndim == starts.ndim == 1 and len(starts) > 1
    if not fit or starts[0] != 0 or starts[-1] != len(ids) or (np.diff(starts) < 1).any():
        raise ValueError(f"{split}_starts.npy does not belong to {split}.npy")
    if ids.max() >= vocabulary or (ids[starts[1:] - 1] != END).any():
        raise ValueError(f"{split}.npy holds other numbers than were written")


def _make(folder: Path, corpus: Corpus, vocabulary: int, given: Any) -> None:
    """Fill a folder beside its place and move it there, so that it is whole or absent."""
    corpus.check()
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        articles = {split: corpus.articles(split) for split in corpus.splits}
        empty = [split for split, texts in articles.items() if not any(texts)]
        if empty:
            raise ValueError(f"corpus {corpus.name!r} has no text for {', '.join(empty)}")
        bpe = load_tokenizer(given) if given else train_tokenizer(articles["train"], vocabulary)
        for split, texts in articles.items():
            tokens = _encoded(bpe, texts)
            np.save(temporary / f"{split}.npy", tokens.ids)
            np.save(temporary / f"{split}_starts.npy", tokens.starts)
        bpe.save(str(temporary / "tokenizer.json"))
        temporary.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)  # what is damaged
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _encoded(tokenizer: Any, texts: Sequence[str], group: int = 256) -> Tokens:
    parts: list[np.ndarray] = []
    for first in range(0, len(texts), group):  # a group at a time: encodings are large objects
        for encoding in tokenizer.encode_batch(list(texts[first : first + group])):
            parts.append(np.array([*encoding.ids, END], dtype=np.uint16))
    starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return Tokens(np.concatenate(parts), starts)


def _digest(corpus: Corpus, vocabulary: int, tokenizer: Any) -> str:
    total = hashlib.sha256(json.dumps([FORMAT, corpus.name, vocabulary]).encode())
    for split in sorted(corpus.files):
        for path in corpus.files[split]:
            total.update(f"{split} {path.name}".encode())
            total.update(_content(path))
    if corpus.files and "valid" not in corpus.files:
        total.update(b"held out by length")  # 0.1 held out all after the last line that ended
    if tokenizer is not None:
        total.update(_content(Path(tokenizer)))
    return total.hexdigest()[:12]


def _content(path: Path) -> bytes:
    digest = hashlib.sha256()
    if path.exists() and not path.is_file():  # a pipe would wait for ever
        raise ValueError(f"{path} is no regular file; pass another path")
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; pass another path") from None
    return digest.digest()
