"""GLUE files: the official layouts, the ``.jsonl.xz`` ones, what is missing, batches."""

from __future__ import annotations

import json
import lzma

import pytest
import torch

from lln.texts import glue
from lln_study.data.pairs import BUCKETS, batches, bucket, cut, encode, in_order
from tests.lln_study.tasks.small_glue import write_glue, write_lines

# Folder, dev file, header, one line, and what is read from it.
OFFICIAL = {
    "sst2": ("SST-2", "dev.tsv", "sentence\tlabel", 'a "quote\t1', ('a "quote',), 1),
    "cola": ("CoLA", "dev.tsv", None, "gj04\t0\t*\tThey drank.", ("They drank.",), 0),
    "mrpc": (
        *("MRPC", "dev.tsv", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"),
        *("1\t7\t8\tOne.\tTwo.", ("One.", "Two."), 1),
    ),
    "qqp": (
        *("QQP", "dev.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"),
        *("5\t1\t2\tWhy?\tHow?\t0", ("Why?", "How?"), 0),
    ),
    "stsb": (
        *("STS-B", "dev.tsv"),
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        *("0\tnews\tf\t2012\t1\ts\tt\tA.\tB.\t2.500", ("A.", "B."), 0.5),
    ),
    "mnli": (
        *("MNLI", "dev_matched.tsv"),
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
        "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        *("0\t1\t2\tg\t(\t(\t(\t(\tP.\tH.\tneutral\tcontradiction", ("P.", "H."), 2),
    ),
    "qnli": (
        *("QNLI", "dev.tsv", "index\tquestion\tsentence\tlabel"),
        *("0\tWho?\tHe.\tnot_entailment", ("Who?", "He."), 1),
    ),
    "rte": (
        *("RTE", "dev.tsv", "index\tsentence1\tsentence2\tlabel"),
        *("0\tOne.\tTwo.\tentailment", ("One.", "Two."), 0),
    ),
}


def write_official(folder, name, lines=20):
    place, dev, header, line, texts, label = OFFICIAL[name]
    (folder / place).mkdir(parents=True)
    content = "\n".join(([header] if header else []) + [line] * lines) + "\n"
    for file in ("train.tsv", dev):
        (folder / place / file).write_text(content)
    return texts, label


@pytest.mark.parametrize("name", glue.TASKS)
def test_official_files_are_read(tmp_path, name):
    texts, label = write_official(tmp_path / "glue", name)
    files = glue.find(name, tmp_path)
    splits = glue.read(files)
    assert (len(splits.train), len(splits.valid), len(splits.test)) == (18, 2, 20)
    assert set(splits.train.texts) == set(splits.test.texts) == {texts}
    assert set(splits.valid.labels) == {label}
    assert files.source.startswith("official")


def test_official_files_come_before_the_others(tmp_path):
    write_glue(tmp_path)
    write_official(tmp_path / "glue", "sst2")
    assert glue.find("sst2", tmp_path).official
    assert not glue.find("stsb", tmp_path).official


def test_valid_is_held_out_of_train_and_always_the_same(tmp_path):
    write_glue(tmp_path, train=200)
    first, second = (glue.read(glue.find("sst2", tmp_path)) for _ in range(2))
    assert first.valid == second.valid and len(first.valid) == 20
    assert len(first.train) == 180
    content = lzma.decompress((tmp_path / "glue" / "sst2_train.jsonl.xz").read_bytes())
    every = sorted((json.loads(line)["sentence"],) for line in content.splitlines())
    assert sorted(first.train.texts + first.valid.texts) == every


def test_quora_pairs_of_all_sources_look_alike(tmp_path):
    row = {"question1": "What's  Up?", "question2": "what 's up ?", "label": 1}
    for file in glue.TASKS["qqp"].jsonl:
        write_lines(tmp_path / f"{file}.jsonl.xz", [row] * 10)
    first, second = glue.read(glue.find("qqp", tmp_path)).train.texts[0]
    assert first == second == "what ' s up ?"


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("LLN_DATA", raising=False)
    with pytest.raises(ValueError, match="set LLN_DATA"):
        glue.find("sst2")
    write_lines(tmp_path / "glue" / "qnli_dev.jsonl.xz", [])
    with pytest.raises(ValueError, match=r"no training split .* only dev.*QNLI/train\.tsv"):
        glue.find("qnli", tmp_path)
    with pytest.raises(ValueError, match="task='wnli' is unknown; choose from sst2"):
        glue.find("wnli", tmp_path)


def test_damaged_official_files_are_named(tmp_path):
    write_official(tmp_path, "rte")
    path = tmp_path / "RTE" / "train.tsv"
    path.write_text(path.read_text() + "7\tcut off\n")
    with pytest.raises(ValueError, match=r"train\.tsv, line 22 has 2 columns, 4 are needed"):
        glue.read(glue.find("rte", tmp_path))
    path.write_text("a\tb\n")
    with pytest.raises(ValueError, match="no column 'sentence1'"):
        glue.read(glue.find("rte", tmp_path))


class Words:
    """A tokenizer of words: their lengths are their numbers."""

    def token_to_id(self, name):
        return {"<s>": 100, "</s>": 102, "<pad>": 101}.get(name)

    def encode_batch(self, texts, add_special_tokens):
        assert not add_special_tokens
        return [type("Found", (), {"ids": [len(word) for word in x.split()]}) for x in texts]


def test_pairs_are_encoded_as_roberta_reads_them():
    found = encode(Words(), [("aa b", "ccc"), ("a", "b")], torch.tensor([1, 0]), max_length=40)
    assert found.ids.shape == (2, 32) and found.lengths.tolist() == [7, 6]
    assert found.ids[0, :8].tolist() == [100, 2, 1, 102, 102, 3, 102, 101]
    batch = found.rows(torch.tensor([1, 0]), 7)
    assert batch["attention_mask"].sum(1).tolist() == [6, 7]
    assert batch["labels"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("lengths", "room", "kept"),
    [((5, 3), 10, (5, 3)), ((9, 3), 10, (7, 3)), ((3, 9), 10, (3, 7)), ((9, 9), 7, (4, 3))],
)
def test_the_longer_text_is_cut_first(lengths, room, kept):
    pieces = cut([list(range(size)) for size in lengths], room)
    assert tuple(map(len, pieces)) == kept
    assert all(piece == list(range(len(piece))) for piece in pieces)


def test_few_lengths_hold_all():
    assert [bucket(length, 100) for length in (1, 32, 33, 96, 97)] == [32, 32, 64, 96, 100]
    assert bucket(500, 512) == 512 and set(BUCKETS) >= {bucket(n, 512) for n in range(1, 513)}


def test_all_examples_in_order_make_few_batches():
    lengths = torch.tensor([(7 * n) % 90 + 1 for n in range(500)])
    found = list(in_order(lengths, max_length=80, tokens=6400))
    assert torch.cat([index for index, _ in found]).sort().values.tolist() == list(range(500))
    assert [size for _, size in found] == [32, 64, 64, 80, 80]
    for index, size in found:
        assert len(index) * size <= 6400
        assert {bucket(n, 80) for n in lengths[index].tolist()} == {size}


def test_batches_are_a_function_of_seed_and_epoch_and_alike_in_length():
    lengths = torch.tensor([(7 * n) % 90 + 1 for n in range(500)])
    options = {"batch_size": 8, "seed": 3}
    first, again, later = (batches(lengths, **options, epoch=epoch) for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, later)
    assert first.shape == (62, 8) and len(first.unique()) == 62 * 8
    spread = lengths[first]
    assert (spread.amax(1) - spread.amin(1)).float().mean() < 12  # of 90
