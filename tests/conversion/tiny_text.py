"""A tokenizer and texts made on the spot."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
WORDS = [first + second for first in "bcdfgklmnp" for second in "aeiouy"]
EXTRA = ["The", "magic", "number", "of", "is", ".", *"0123456789"]


def tokenizer_of(names=(), *, frame: bool) -> PreTrainedTokenizerFast:
    """A word is a token, a digit too; an encoder's has [CLS] and [SEP] around a text."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS, *EXTRA, *names])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    options = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    if frame:
        ids = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, ids)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[SEP]", **options)


def article(words: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(WORDS), (words,), generator=generator)
    return " ".join(WORDS[i] for i in chosen.tolist())
