"""Encoders beside their teacher: identical ones are equal, disturbed ones are not."""

from __future__ import annotations

import copy
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from scipy import stats

from lln.conversion import encoders
from lln.conversion.texts import articles, encoder_batches
from tests.conversion.tiny_text import WORDS, article, tokenizer_of
from tests.hf.tiny import make

TOKENIZER = tokenizer_of(frame=True)


def teacher():
    return make("bert", head="AutoModel")


def disturbed(model, amount: float):
    student, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)
    for parameter in student.encoder.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += amount * parameter.abs().mean() * noise
    return student


def batches(count: int = 12, batch_size: int = 5):
    given = [article(6 + 3 * i, i) for i in range(count)]
    return encoder_batches(TOKENIZER, given, 30, batch_size=batch_size)


def topics(count: int) -> list[str]:
    """Articles that use few words each, so that their halves are alike."""
    return [f"{WORDS[i]} {WORDS[i + 1]} {WORDS[i + 2]} " * 12 for i in range(count)]


def by_hand(model, text: str) -> torch.Tensor:
    """The embedding of one text without padding."""
    with torch.no_grad():
        states = model(**TOKENIZER(text, return_tensors="pt")).last_hidden_state[0]
    return states.mean(0) / states.mean(0).norm()


def test_padding_does_not_change_an_embedding():
    model, given = teacher(), [article(8 + i, i) for i in range(5)]
    found = encoders.embed(model, encoder_batches(TOKENIZER, given, 40, batch_size=3))
    expected = torch.stack([by_hand(model, text) for text in given])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_copy_is_equal():
    model = teacher()
    found = encoders.compare_embeddings(model, copy.deepcopy(model), batches())
    for name in ("cosine_mean", "cosine_p5", "cosine_min", "similarity_correlation"):
        assert found[name] == pytest.approx(1, abs=1e-6)
    assert found["token_nmse"] == 0 and found["texts"] == 12
    assert found["tokens"] == sum(min(8 + 3 * i, 30) for i in range(12))


def test_more_noise_is_further_away():
    model = teacher()
    rows = [
        encoders.compare_embeddings(model, disturbed(model, amount), batches())
        for amount in (0.0, 0.05, 0.3)
    ]
    for name, sign in (("cosine_mean", -1), ("similarity_correlation", -1), ("token_nmse", 1)):
        values = [sign * row[name] for row in rows]
        assert values[0] < values[1] < values[2], name
    assert all(row["cosine_min"] <= row["cosine_p5"] <= row["cosine_mean"] for row in rows)


def test_the_figures_are_those_of_the_formulas():
    """By hand from embeddings and states of single texts, however they are cut into batches."""
    model, given = teacher(), [article(6 + 3 * i, i) for i in range(12)]
    student = disturbed(model, 0.2)
    found = encoders.compare_embeddings(model, student, batches(batch_size=5))
    cut = [TOKENIZER.decode(ids[1:-1]) for ids in batches().sequences]
    first, second = (
        torch.stack([by_hand(each, text) for text in cut]) for each in (model, student)
    )
    cosines = (first * second).sum(-1)
    assert found["cosine_mean"] == pytest.approx(cosines.mean().item(), abs=1e-5)
    assert found["cosine_min"] == pytest.approx(cosines.min().item(), abs=1e-5)
    pairs = list(itertools.combinations(range(len(given)), 2))
    similar = [[(x[i] @ x[j]).item() for i, j in pairs] for x in (first, second)]
    assert found["similarity_correlation"] == pytest.approx(stats.pearsonr(*similar)[0], abs=1e-4)
    error = size = 0.0
    for text in cut:
        arguments = TOKENIZER(text, return_tensors="pt")
        with torch.no_grad():
            wanted, got = (each(**arguments).last_hidden_state for each in (model, student))
        error, size = error + (got - wanted).square().sum(), size + wanted.square().sum()
    assert found["token_nmse"] == pytest.approx((error / size).item(), rel=1e-3)


def test_half_precision_is_pooled_in_single():
    model = teacher()
    found = encoders.compare_embeddings(model, copy.deepcopy(model).bfloat16(), batches())
    assert 0.99 < found["cosine_mean"] < 1 and 0 < found["token_nmse"] < 0.01
    assert encoders.embed(copy.deepcopy(model).bfloat16(), batches()).dtype == torch.float32


def test_halves_are_neighbours_in_the_article():
    given = [article(30, 0), article(17, 1), article(18, 2)]
    pairs = encoders.halves(TOKENIZER, given, 11, batch_size=4)
    assert len(pairs.first.sequences) == len(pairs.second.sequences) == 2
    for text, first, second in zip(
        (given[0], given[2]), pairs.first.sequences, pairs.second.sequences, strict=True
    ):
        assert first[0] == second[0] == 1 and first[-1] == second[-1] == 2
        words = TOKENIZER.decode([*first[1:-1], *second[1:-1]])
        assert words == " ".join(text.split()[:18])
    with pytest.raises(ValueError, match="2 articles have 18 tokens, 3 are wanted"):
        encoders.halves(TOKENIZER, given, 11, batch_size=4, count=3)


def test_a_first_half_finds_its_second():
    model = teacher()
    pairs = encoders.halves(TOKENIZER, topics(20), 17, batch_size=6)
    found = encoders.retrieval(model, pairs)
    assert found > 0.9
    assert encoders.retrieval(copy.deepcopy(model), pairs) == found
    shifted = encoders.Halves(
        pairs.first, type(pairs.second)([*pairs.second.sequences[1:], pairs.second.sequences[0]], 6)
    )
    assert encoders.retrieval(model, shifted) < 0.1


def test_sts_is_the_rank_correlation_of_cosines(tmp_path):
    model = teacher()
    rows = [
        {"sentence1": article(4 + i % 5, i), "sentence2": article(7, 50 + i), "label": i % 6}
        for i in range(14)
    ]
    for name in ("train", "dev"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"stsb_{name}.jsonl").write_text(lines)
    cosines = [
        (by_hand(model, row["sentence1"]) @ by_hand(model, row["sentence2"])).item() for row in rows
    ]
    expected = stats.spearmanr(cosines, [row["label"] for row in rows])[0]
    found = encoders.sts(model, TOKENIZER, tmp_path, batch_size=4)
    assert found == pytest.approx(expected, abs=1e-6) and abs(found) > 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers, as it loads
def test_minilm_is_what_it_is_known_to_be():
    """all-MiniLM-L6-v2 has 86.72 on STS-B dev; halves of long articles find each other."""
    for name in ("LLN_MODELS", "LLN_DATA"):
        if not os.environ.get(name):
            pytest.skip(f"set {name}: the folder of minilm/, and of wiki2015_*.jsonl.xz and glue/")
    from transformers import AutoModel, AutoTokenizer

    folder, data = Path(os.environ["LLN_MODELS"]) / "minilm", Path(os.environ["LLN_DATA"])
    model, tokenizer = (
        AutoModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    assert encoders.sts(model, tokenizer, data) == pytest.approx(0.8672, abs=5e-4)
    names = ("valid", "test", "train_b")
    held_out = (articles(data / f"wiki2015_{name}.jsonl.xz") for name in names)
    texts = itertools.chain.from_iterable(held_out)
    pairs = encoders.halves(tokenizer, texts, 512, batch_size=8, count=200)
    found = encoders.retrieval(model, pairs, label="halves")
    print(f"first half finds second half: {found:.4f}")
    assert 0.96 < found < 1
