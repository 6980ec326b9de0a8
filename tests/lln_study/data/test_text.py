"""Text of the user: every layout that is promised, and what is said about the others."""

from __future__ import annotations

import json
import lzma
import os

import numpy as np
import pytest

from lln.texts import text
from lln_study.data import tokens

WIKITEXT = (
    " \n = First = \n \n Some text . \n \n = = Section = = \n More . \n = Second = \n \n End . \n"
)


def write(path, content: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(content.encode()) if path.suffix == ".xz" else content.encode())
    return path


def lines(*texts: str) -> str:
    return "".join(json.dumps({"title": "T", "text": each}) + "\n" for each in texts)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLN_DATA", raising=False)


def test_wikitext_is_cut_at_titles_only(tmp_path):
    for split in ("train", "valid", "test"):
        write(tmp_path / f"wiki.{split}.tokens", WIKITEXT)
    corpus = text.find(tmp_path)
    assert corpus.name == "wiki" and corpus.splits == ("train", "valid", "test")
    articles = corpus.articles("valid")
    assert len(articles) == 2 and articles[0].startswith(" = First = ")
    assert "= = Section = =" in articles[0] and articles[1].startswith(" = Second = ")


def test_json_lines_have_titles_and_may_be_packed_and_in_parts(tmp_path):
    write(tmp_path / "w_train.jsonl.xz", lines("a", "b"))
    write(tmp_path / "w_train_b.jsonl.xz", lines("c"))
    write(tmp_path / "w_valid.jsonl.xz", lines("d"))
    corpus = text.find(tmp_path)
    assert corpus.name == "w"
    assert corpus.articles("train") == ["T\na", "T\nb", "T\nc"]
    assert corpus.articles("valid") == ["T\nd"]


def test_of_several_corpora_the_complete_one_is_taken(tmp_path):
    write(tmp_path / "imdb_train.jsonl", lines("a"))
    write(tmp_path / "wiki_train.jsonl", lines("a"))
    write(tmp_path / "wiki_valid.jsonl", lines("a"))
    write(tmp_path / "wikitext2_valid.txt", "a")
    assert text.find(tmp_path).name == "wiki"
    assert text.find(tmp_path, "imdb").name == "imdb"
    write(tmp_path / "imdb_dev.jsonl", lines("a"))
    with pytest.raises(ValueError, match=r"several corpora, imdb, wiki; choose with corpus="):
        text.find(tmp_path)


def test_plain_text_holds_out_its_end(tmp_path, monkeypatch):
    write(tmp_path / "book.txt", "".join(f"line {n}\n" for n in range(1000)))
    monkeypatch.setenv("LLN_DATA", str(tmp_path))
    corpus = text.find(None)
    train, valid = corpus.articles("train"), corpus.articles("valid")
    assert valid[0].endswith("line 999\n") and "line 999" not in train[0]
    assert (train[0] + valid[0]) == (tmp_path / "book.txt").read_text()


@pytest.mark.parametrize(
    ("content", "before"),
    [
        ("word " * 1000, " "),  # one long line is cut after a word
        ("A title\n" + "word " * 1000, " "),
        ("A title\n" + "word " * 1000 + "\nthe end", " "),
        ("字" * 1000, "字"),  # a text without spaces anywhere
        ("line\n" * 1000, "\n"),
        (("word " * 10 + "\n") * 100, "\n"),
    ],
    ids=["one line", "title", "title and end", "no spaces", "lines", "long lines"],
)
def test_a_text_of_few_lines_is_held_out_by_length(tmp_path, content, before):
    write(tmp_path / "book.txt", content)
    corpus = text.find(tmp_path)
    (train,), (valid,) = corpus.articles("train"), corpus.articles("valid")
    assert train + valid == content and train.endswith(before)
    assert 0.04 < len(valid) / len(content) < 0.11


def test_without_data_there_is_shakespeare():
    assert text.find(None, "tinyshakespeare") == text.find(None)
    corpus = text.find(None)
    assert corpus.name == "tinyshakespeare"
    assert 0.04 < len(corpus.articles("valid")[0]) / len(corpus.articles("train")[0]) < 0.06


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nothing.bin", "x", "has no text"),
        ("w_valid.txt", "x", "has no training file among w"),
    ],
)
def test_folders_without_text_are_named(tmp_path, name, content, said):
    write(tmp_path / name, content)
    with pytest.raises(ValueError, match=said) as caught:
        text.find(tmp_path)
    assert str(tmp_path) in str(caught.value) and "wiki.train.tokens" in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist; expected are files such as"):
        text.find(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="corpus='x' has no training file"):
        text.find(tmp_path, "x")


def test_damaged_files_are_named(tmp_path):
    whole = write(tmp_path / "a_train.jsonl.xz", lines("text " * 100)).read_bytes()
    (tmp_path / "a_train.jsonl.xz").write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"a_train.jsonl.xz cannot be read.*Copy it again"):
        list(text.read(tmp_path / "a_train.jsonl.xz"))
    bad = write(tmp_path / "b.jsonl", lines("a") + '{"label": 1}\n')
    with pytest.raises(ValueError, match=r'line 2 is not an object with a field "text"'):
        list(text.read(bad))
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"c.txt cannot be read"):
        list(text.read(tmp_path / "c.txt"))


STORY = "the cat sat on the mat and the dog sat on the log, said the cat to the dog. "


@pytest.fixture
def corpus(tmp_path):
    write(tmp_path / "data" / "s_train.jsonl", lines(*[f"{STORY}{n} " * 3 for n in range(20)]))
    write(tmp_path / "data" / "s_valid.jsonl", lines(STORY, STORY))
    return text.find(tmp_path / "data")


def test_ids_read_back_as_the_text(corpus):
    encoded = tokens.encode(corpus, 300)
    valid = encoded.splits["valid"]
    first = valid.ids[valid.starts[0] : valid.starts[1]]
    assert first[-1] == tokens.END and encoded.vocabulary == 300
    assert encoded.tokenizer.decode(first[:-1].tolist()) == f"T\n{STORY}"
    assert valid.ids.dtype == np.uint16 and valid.starts[-1] == len(valid.ids)


def test_the_cache_is_used_until_something_changes(corpus, tmp_path, monkeypatch):
    first = tokens.encode(corpus, 300)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "train_tokenizer", lambda *_: pytest.fail("trained again"))
        again = tokens.encode(corpus, 300)
    assert again.digest == first.digest
    assert np.array_equal(again.splits["train"].ids, first.splits["train"].ids)
    assert tokens.encode(corpus, 290).digest != first.digest
    write(tmp_path / "data" / "s_valid.jsonl", lines("another"))
    assert tokens.encode(corpus, 300).digest != first.digest
    left = [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]
    assert all(path.suffix == ".lock" for path in left)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def empty(path):
    path.write_bytes(b"")


def zeros(path):
    """As after a crash of the machine: the length is right."""
    content = path.read_bytes()
    path.write_bytes(content[:130] + bytes(len(content) - 130))


DAMAGE = [
    *(("train.npy", how) for how in (cut, empty, zeros, os.remove)),
    *(("valid_starts.npy", how) for how in (cut, zeros, os.remove)),
    *(("tokenizer.json", how) for how in (cut, empty, os.remove)),
]


@pytest.mark.parametrize(("name", "how"), DAMAGE)
def test_a_damaged_cache_is_made_again(corpus, name, how):
    first = tokens.encode(corpus, 300)
    whole = {split: np.array(found.ids) for split, found in first.splits.items()}
    how(tokens.cache_folder() / first.digest / name)
    with pytest.warns(UserWarning, match=f"{first.digest} is damaged and made again"):
        again = tokens.encode(corpus, 300)
    for split, ids in whole.items():
        assert np.array_equal(again.splits[split].ids, ids)
    tokens.encode(corpus, 300)  # without a warning


def test_a_failure_leaves_no_cache(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "_encoded", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tokens.encode(corpus, 300)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_tokenizer_of_the_user(corpus, tmp_path):
    tokens.encode(corpus, 280).tokenizer.save(str(tmp_path / "own.json"))
    assert tokens.encode(corpus, 300, tokenizer=tmp_path / "own.json").vocabulary == 280
    (tmp_path / "own.json").write_text("{}")
    with pytest.raises(ValueError, match=r"own.json cannot be read.*pass a tokenizer.json"):
        tokens.encode(corpus, 300, tokenizer=tmp_path / "own.json")


def test_a_tokenizer_must_be_a_file(corpus, tmp_path):
    with pytest.raises(ValueError, match="is no regular file; pass another path"):
        tokens.encode(corpus, 300, tokenizer=tmp_path)


def test_impossible_vocabularies_are_refused(corpus):
    for size in (100, 70_000):
        with pytest.raises(ValueError, match=rf"vocabulary={size} is not possible; choose 261"):
            tokens.encode(corpus, size)


@pytest.mark.parametrize(
    ("name", "content"),
    [("empty.txt", ""), ("blank.txt", " \n\n"), ("empty.jsonl", "\n\n"), ("empty.jsonl.xz", "")],
)
def test_files_without_text_are_not_replaced_by_another_text(tmp_path, name, content):
    corpus = text.find(write(tmp_path / name, content))
    assert not any(map(str.strip, corpus.articles("train")))
    with pytest.raises(ValueError, match=f"has no text for train: .*{name} is empty; pass files"):
        tokens.encode(corpus, 300)


def test_a_corpus_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"corpus='wiki2015' needs the folder.*set LLN_DATA"):
        text.find(None, "wiki2015")
    path = write(tmp_path / "book_train.txt", "text")
    assert text.find(path, "book").files == text.find(path, "book_train").files
    with pytest.raises(ValueError, match=r"corpus='wiki2015' is not in data=.*'book_train'"):
        text.find(path, "wiki2015")
