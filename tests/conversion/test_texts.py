"""Articles from files, and batches that depend on their step alone."""

from __future__ import annotations

import json
import lzma

import numpy as np
import pytest
import torch

from lln.conversion import texts
from lln.conversion.watched import watched
from tests.conversion.tiny_text import article, tokenizer_of

PAD, CLS, SEP = 0, 1, 2


def write(path, rows: list[str]):
    """As .jsonl or .txt, packed if the name says so."""
    lines = [json.dumps({"text": row}) for row in rows] if ".jsonl" in path.name else rows
    content = "\n".join(lines).encode()
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.xz"])
def test_lines_of_json_are_articles(tmp_path, name):
    path = write(tmp_path / name, ["one", "  ", "two"])
    assert list(texts.articles(path)) == ["one", "two"]
    assert texts.whole_text(path) == "one\n\ntwo"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz"])
def test_wikitext_is_cut_at_headings_and_whole_as_it_stands(tmp_path, name):
    content = " = A = \n one \n = B = \n\n two \n"
    path = write(tmp_path / name, [content])
    assert list(texts.articles(path)) == [" = A = \n one \n", " = B = \n\n two \n"]
    assert texts.whole_text(path) == content


def test_a_folder_never_mixes_what_is_held_out(tmp_path):
    write(tmp_path / "w_train.jsonl", ["one", "two"])
    write(tmp_path / "w_valid.jsonl.xz", ["three"])
    assert list(texts.articles(tmp_path)) == ["one", "two"]
    assert list(texts.articles(tmp_path, "valid")) == ["three"]
    with pytest.raises(ValueError, match="split='test' is not in"):
        next(texts.articles(tmp_path, "test"))


def test_one_file_has_its_end_held_out(tmp_path):
    path = write(tmp_path / "a.jsonl", [f"text {i}" for i in range(100)])
    train, valid = (list(texts.articles(path, split)) for split in ("train", "valid"))
    assert [*train, *valid] == list(texts.articles(path)) and len(valid) == 5


def test_articles_are_read_one_at_a_time(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"wrong": 1}\n')
    found = texts.articles(path)
    assert next(found) == "one"
    with pytest.raises(ValueError, match=r'line 2 .*field "text"'):
        next(found)


def test_what_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.txt does not exist"):
        next(texts.articles(tmp_path / "nothing.txt"))
    empty = write(tmp_path / "empty.txt", [" "])
    for read in (lambda: next(texts.articles(empty)), lambda: texts.whole_text(empty)):
        with pytest.raises(ValueError, match=r"empty\.txt has no text"):
            read()
    odd = tmp_path / "odd.txt"
    odd.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="no UTF-8"):
        texts.whole_text(odd)


def test_encoder_sequences_have_special_tokens_and_padding():
    tokenizer = tokenizer_of(frame=True)
    given = [article(30, 0), article(3, 1)]
    [batch] = texts.encoder_batches(tokenizer, given, 10, batch_size=2)
    expected = tokenizer(given, truncation=True, max_length=10, padding=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, 10)
    for name, x in batch.items():
        assert torch.equal(x, expected[name])


def test_pieces_hold_the_whole_article():
    tokenizer, given = tokenizer_of(frame=True), [article(20, 0), article(4, 1)]
    options = {"batch_size": 1, "every_piece": True}
    batches = texts.encoder_batches(tokenizer, given, 10, **options)
    assert [len(ids) for ids in batches.sequences] == [10, 10, 6, 6]
    inside = np.concatenate([ids[1:-1] for ids in batches.sequences[:3]])
    assert inside.tolist() == tokenizer(given[0], add_special_tokens=False)["input_ids"]
    full = texts.encoder_batches(tokenizer, given, 10, fill=0.9, **options)
    assert [len(ids) for ids in full.sequences] == [10, 10]
    with pytest.raises(
        ValueError, match=r"no text fills 90% of length=50 .* longest has 22; .* length$"
    ):
        texts.encoder_batches(tokenizer, given, 50, fill=0.9, **options)


@pytest.mark.parametrize("make", [texts.encoder_batches, texts.decoder_batches])
def test_no_more_is_read_than_wanted(make):
    read = []

    def some():
        for i in range(1000):
            read.append(i)
            yield article(40, i)

    batches = make(tokenizer_of(frame=False), some(), 20, batch_size=2, limit=7)
    assert len(batches.sequences) == 7 and len(read) <= 2 * texts.GROUP


def test_decoder_windows_are_one_stream():
    tokenizer, given = tokenizer_of(frame=False), [article(25, 0), article(18, 1)]
    batches = texts.decoder_batches(tokenizer, given, 10, batch_size=3)
    stream = [token for each in given for token in [*tokenizer(each)["input_ids"], SEP]]
    assert len(batches) == 2 and set(batches[0]) == {"input_ids"}
    assert torch.cat([batch["input_ids"].flatten() for batch in batches]).tolist() == stream[:40]
    with pytest.raises(ValueError, match="45 tokens, which do not fill a window of length=50"):
        texts.decoder_batches(tokenizer, given, 50, batch_size=3)


def test_a_batch_depends_on_its_step_alone():
    tokenizer, given = tokenizer_of(frame=True), [article(5 + i, i) for i in range(10)]
    batches = texts.encoder_batches(tokenizer, given, 30, batch_size=4, seed=3)
    run = list(batches.between(0, 9))
    for step, batch in zip(range(5, 9), batches.between(5, 9), strict=True):
        assert torch.equal(batch["input_ids"], run[step]["input_ids"])
    epochs = [tuple(row[row > 0].tolist()) for batch in run[:5] for row in batch["input_ids"]]
    assert len(set(epochs[:10])) == len(set(epochs[10:])) == 10 and epochs[:10] != epochs[10:]
    parts = [batches.batch(2, slice(0, 2)), batches.batch(2, slice(2, 4))]
    rows = [row[row > 0].tolist() for part in parts for row in part["input_ids"]]
    assert rows == [row[row > 0].tolist() for row in batches[2]["input_ids"]]
    other = texts.encoder_batches(tokenizer, given, 30, batch_size=4, seed=4)
    assert not torch.equal(other[0]["input_ids"][:, :7], run[0]["input_ids"][:, :7])


def test_in_order_there_is_an_end():
    given = [article(8, i) for i in range(5)]
    batches = texts.encoder_batches(tokenizer_of(frame=True), given, 10, batch_size=2)
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
    with pytest.raises(IndexError, match="step 3 is not among the 3"):
        batches[3]
    with pytest.raises(ValueError, match="batch_size=0"):
        texts.encoder_batches(tokenizer_of(frame=True), given, 10, batch_size=0)
    with pytest.raises(ValueError, match="length=2 leaves no room"):
        texts.encoder_batches(tokenizer_of(frame=True), given, 2, batch_size=1)


def test_loops_show_how_far_they_are(monkeypatch, capsys):
    monkeypatch.setattr("lln.report.progress.LINE_SECONDS", 0.0)
    assert list(watched("abc", "letters")) == list(watched("abc")) == ["a", "b", "c"]
    assert capsys.readouterr().out.splitlines() == [f"letters: step {i} of 3" for i in (1, 2, 3)]
