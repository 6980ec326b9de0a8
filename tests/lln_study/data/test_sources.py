"""Files of the user that are odd, damaged or made for harm: read, or refused in a line."""

from __future__ import annotations

import io
import json
import lzma
import os
import signal
import tarfile

import numpy as np
import pytest
from typer.testing import CliRunner

from lln.cli.app import app
from lln.texts import glue, sources, text
from lln.texts.damage import DamagedData
from lln_study.data import images
from lln_study.data.arena import datasets as lra
from tests.lln_study.data.test_glue_data import write_official
from tests.lln_study.data.test_images import jpeg


@pytest.fixture
def soon():
    """A reader that waits for a pipe is interrupted."""

    def late(*_):
        raise TimeoutError("still waiting")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def write_sst2(folder, train, dev=None):
    folder.mkdir(exist_ok=True)
    good = '{"sentence": "a", "label": 1}\n'
    (folder / "sst2_train.jsonl").write_bytes((train or good * 20).encode())
    (folder / "sst2_dev.jsonl").write_bytes((dev or good * 20).encode())
    return glue.find("sst2", folder)


def test_only_line_feeds_end_a_line(tmp_path):
    """U+2028, U+0085 and others are characters of a text; str.splitlines() splits at them."""
    odd = "one\u2028two\u0085three\u2029four\x0bfive\x1c"
    row = json.dumps({"sentence": odd, "label": 0}, ensure_ascii=False)
    blank = '\n   \n{"sentence": "b", "label": 1}\r\n\n'
    splits = glue.read(write_sst2(tmp_path, f"{row}\n{blank}" * 10))
    found = {*splits.train.texts, *splits.valid.texts}
    assert found == {(odd,), ("b",)}
    assert len(splits.train) + len(splits.valid) == 20


def test_the_same_of_articles_and_reviews(tmp_path):
    odd = "one\u2028two\u0085three"
    line = json.dumps({"text": odd, "label": 0}, ensure_ascii=False) + "\n\n"
    (tmp_path / "a.jsonl").write_bytes(line.encode() * 2)
    assert list(text.read(tmp_path / "a.jsonl")) == [odd, odd]
    for part in ("train", "test"):
        (tmp_path / f"imdb_{part}.jsonl.xz").write_bytes(lzma.compress(line.encode() * 20))
    found = lra.load("text", tmp_path, cache=tmp_path / "cache").splits["test"]
    assert len(found) == 20 and bytes(found.tokens[0]).rstrip(b"\0").decode() == odd


def test_blank_lines_and_long_fields_of_official_files(tmp_path):
    write_official(tmp_path, "sst2")
    path = tmp_path / "SST-2" / "train.tsv"
    path.write_text(path.read_text() + "\n" + "x" * 200_000 + "\t1\n\n")
    splits = glue.read(glue.find("sst2", tmp_path))
    assert max(len(words) for (words,) in splits.train.texts + splits.valid.texts) == 200_000


DEEP = "[" * 100_000 + "]" * 100_000
NESTED = '{"sentence": "a", "label": 1, "x": ' + DEEP + "}"
BAD_LINES = {
    '{"label": 1}': "has no field \"sentence\", but 'label'",
    '{"sentence": 7, "label": 1}': "has 7 as 'sentence', which is no text",
    '{"sentence": "a"}': "label None is no number",
    '{"sentence": "\\ud800", "label": 1}': "half a character",
    "[1]": "is no object",
    '{"sentence"': "Expecting",
    "\udcff": "utf-8",
    NESTED: "is nested too deeply",
    DEEP: "is nested too deeply",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:30])
def test_lines_that_cannot_be_used_are_named(tmp_path, line):
    good = '{"sentence": "a", "label": 1}\n'
    write_sst2(tmp_path, None)
    (tmp_path / "sst2_train.jsonl").write_bytes(
        (good * 5 + line + "\n" + good * 5).encode(errors="surrogateescape")
    )
    with pytest.raises(DamagedData, match=r"sst2_train\.jsonl, line 6: .*mend that line") as caught:
        glue.read(glue.find("sst2", tmp_path))
    assert BAD_LINES[line] in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("line", [DEEP, '{"text": null}', '{"text": "\\udc00"}', "{}", "7"])
def test_lines_of_articles_that_cannot_be_used_are_named(tmp_path, line):
    path = tmp_path / "a_train.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r'a_train.jsonl, line 2 is not an object with a field "t'):
        list(text.read(path))


def test_too_few_examples_are_named(tmp_path):
    good = '{"sentence": "a", "label": 1}\n'
    with pytest.raises(DamagedData, match=r"sst2_train\.jsonl has 1 examples, 2 are needed"):
        glue.read(write_sst2(tmp_path, good))
    with pytest.raises(DamagedData, match=r"sst2_dev\.jsonl has 0 examples"):
        glue.read(write_sst2(tmp_path, good * 5, dev="\n"))


def test_a_cut_file_is_named_by_every_reader(tmp_path):
    row = lzma.compress(b'{"sentence": "a", "text": "a", "label": 1}\n' * 20)
    for name in ("sst2_train", "sst2_dev", "imdb_train", "imdb_test", "w_train"):
        (tmp_path / f"{name}.jsonl.xz").write_bytes(row[:-20])
    with pytest.raises(DamagedData, match=r"sst2_train\.jsonl\.xz cannot be read: .*Copy it again"):
        glue.read(glue.find("sst2", tmp_path))
    with pytest.raises(DamagedData, match=r"imdb_train\.jsonl\.xz cannot be read: .*Copy it again"):
        lra.load("text", tmp_path, cache=tmp_path / "cache")
    with pytest.raises(DamagedData, match=r"w_train\.jsonl\.xz cannot be read: .*Copy it again"):
        list(text.read(tmp_path / "w_train.jsonl.xz"))


def test_official_files_in_another_encoding_are_named(tmp_path):
    write_official(tmp_path, "sst2")
    path = tmp_path / "SST-2" / "dev.tsv"
    path.write_bytes(path.read_bytes() + b"caf\xe9\t1\n")
    with pytest.raises(DamagedData, match=r"dev\.tsv is no UTF-8 text"):
        glue.read(glue.find("sst2", tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipes_are_refused_or_passed_over(tmp_path, soon):
    write_sst2(tmp_path / "glue", None)
    (tmp_path / "glue" / "sst2_dev.jsonl").unlink()
    os.mkfifo(tmp_path / "glue" / "sst2_dev.jsonl")
    with pytest.raises(DamagedData, match=r"sst2_dev\.jsonl is no regular file"):
        glue.read(glue.find("sst2", tmp_path / "glue"))
    (tmp_path / "text").mkdir()
    os.mkfifo(tmp_path / "text" / "pipe.txt")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        text.find(tmp_path / "text" / "pipe.txt")
    (tmp_path / "text" / "book.txt").write_text("words\n" * 100)
    assert text.find(tmp_path / "text").articles("train")[0].startswith("words")
    os.mkfifo(tmp_path / "imdb_train.jsonl.xz")
    os.mkfifo(tmp_path / "imdb_test.jsonl.xz")
    with pytest.raises(DamagedData, match=r"imdb_train\.jsonl\.xz is no regular file"):
        lra.load("text", tmp_path, cache=tmp_path / "cache")
    os.mkfifo(tmp_path / "all.tar")
    with pytest.raises(DamagedData, match=r"all\.tar is no regular file"):
        images.load(tmp_path / "all.tar")
    for number in range(40):
        path = tmp_path / "images" / f"{'cat' if number % 2 else 'dog'}.{number // 2}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(jpeg(9))
    os.mkfifo(tmp_path / "images" / "cat.77.jpg")
    assert len(images.load(tmp_path / "images", side=8).pixels) == 40


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(sources, "ALWAYS_ALLOWED", 1000)


def test_what_unpacks_to_too_much_is_refused(tmp_path, small_limit):
    path = tmp_path / "w_train.txt.xz"
    path.write_bytes(lzma.compress(b"a" * 50_000_000))
    said = r"w_train\.txt\.xz has [\d,]+ bytes and unpacks to more than .*unpack the file"
    with pytest.raises(DamagedData, match=said):
        list(text.read(path))
    with pytest.raises(DamagedData, match="unpacks to more than"):
        sources.read_bytes(path)
    path.write_bytes(lzma.compress(os.urandom(50_000)))  # larger than allowed at once, and honest
    assert len(sources.read_bytes(path)) == 50_000


def test_archives_that_unpack_to_too_much_are_refused(tmp_path, small_limit):
    np.savez_compressed(tmp_path / "a.npz", payload=np.zeros(10_000_000, np.uint8))
    with pytest.raises(DamagedData, match="unpacks to more than"):
        images.load(tmp_path / "a.npz")
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as archive:
        for name in ("notes.txt", "cat.0.jpg"):
            part = tarfile.TarInfo(name)
            part.size = 5_000_000
            archive.addfile(part, io.BytesIO(bytes(part.size)))
    with pytest.raises(DamagedData, match="unpacks to more than"):
        images.load(tmp_path / "a.tar.xz")


def test_images_of_too_many_pixels_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MOST_PIXELS", 20 * 20)
    for number in range(40):
        path = tmp_path / f"{'cat' if number % 2 else 'dog'}.{number // 2}.jpg"
        path.write_bytes(jpeg(9, side=16))
    (tmp_path / "dog.3.jpg").write_bytes(jpeg(9, side=30))
    with pytest.raises(DamagedData, match=r"dog\.3\.jpg \(30 x 30 pixels are too many\)"):
        images.load(tmp_path, side=8)


def test_an_archive_of_arrays_that_is_cut_is_named(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", labels=np.arange(10_000))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[200:300] = bytes(100)
    (tmp_path / "a.npz").write_bytes(content)
    with (
        pytest.raises(DamagedData, match=r"a\.npz cannot be read"),
        sources.open_npz(tmp_path / "a.npz") as arrays,
    ):
        arrays["labels"]


@pytest.mark.parametrize("line", [NESTED, '{"label": 1}'], ids=["deep", "field"])
def test_the_command_line_says_it_in_a_line(tmp_path, line):
    from tests.lln_study.tasks.small_glue import pretrain

    good = '{"sentence": "a", "label": 1}\n'
    write_sst2(tmp_path / "glue", good * 3 + line + "\n")
    words = ["train", "glue", "--task", "sst2", "--from", str(pretrain(tmp_path, "softmax"))]
    result = CliRunner().invoke(app, [*words, "--data", str(tmp_path), "--set", "max_length=64"])
    assert isinstance(result.exception, SystemExit), result.exception
    assert "sst2_train.jsonl, line 4" in str(result.exception)
