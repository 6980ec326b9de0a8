"""Labels that are no class stop a run before it trains, with their file and line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from lln.cli.app import app
from lln.texts import glue
from lln.texts.damage import DamagedData
from lln.texts.labels import check_classes, class_of, score_of
from lln_study.data import images
from lln_study.data.arena import datasets as lra
from tests.lln_study.data.test_glue_data import OFFICIAL, write_official
from tests.lln_study.data.test_images import jpeg

WRONG = ["-100", "7", "-1", "NaN", "0.7", "Infinity", "1e400", '"cat"', "null", "[1]", "1" * 400]


@pytest.mark.parametrize("value", ["0", "1", "2", " 1 ", 2, 1.0, True, np.int64(1)])
def test_what_is_a_class(value):
    assert class_of(value, 3) == float(value)


@pytest.mark.parametrize("text", WRONG)
def test_what_is_none(text):
    with pytest.raises(ValueError, match=r"label .* is (no number|none of the classes 0 to 2)$"):
        class_of(json.loads(text), 3)


@pytest.mark.parametrize("value", ["-0.1", "5.01", "nan", "inf", "-100", None])
def test_what_is_no_score(value):
    assert score_of("2.5", 5) == 2.5
    with pytest.raises(ValueError, match="is no number"):
        score_of(value, 5)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, 1, -100], "record 2: label -100"),
        ([0, 7, 1], "record 1: label 7"),
        ([0.0, np.nan, 0.7], r"record 1: label nan .*\(2 of 3 are not\)"),
        ([0.7, 0, 1], r"record 0: label 0.7"),
        ([[0, 1]], r"shape \[1, 2\]"),
        (["0", "1"], "not a row of numbers"),
    ],
)
def test_records_are_counted(tmp_path, labels, said):
    with pytest.raises(DamagedData, match=rf"x\.npz.*{said}"):
        check_classes(np.array(labels), 3, tmp_path / "x.npz")
    assert check_classes(np.array([0.0, 2.0]), 3, tmp_path).dtype == np.int64


@pytest.mark.parametrize("label", WRONG)
def test_lines_of_glue(tmp_path, label):
    good = '{"sentence": "a", "label": 1}\n'
    for file in ("sst2_train", "sst2_dev"):
        (tmp_path / f"{file}.jsonl").write_text(good * 30)
    spoilt = tmp_path / "sst2_dev.jsonl"
    spoilt.write_text(good * 4 + f'{{"sentence": "b", "label": {label}}}\n' + good)
    with pytest.raises(DamagedData, match=r"sst2_dev\.jsonl, line 5: label .*mend that line"):
        glue.read(glue.find("sst2", tmp_path))


@pytest.mark.parametrize("name", glue.TASKS)
@pytest.mark.parametrize("label", ["-100", "7", "nan", "0.7", "inf", "-", ""])
def test_lines_of_official_files(tmp_path, name, label):
    if name == "stsb" and label == "0.7":
        label = "5.7"
    write_official(tmp_path, name)
    folder, _, header, line, *_ = OFFICIAL[name]
    fields = line.split("\t")
    columns = header.split("\t") if header else []
    column = glue.TASKS[name].columns[-1]
    fields[columns.index(column) if columns else column] = label
    path = tmp_path / folder / "train.tsv"
    path.write_text(path.read_text() + "\t".join(fields) + "\n")
    number = 22 if header else 21
    with pytest.raises(DamagedData, match=rf"train\.tsv, line {number}: label .*mend that line"):
        glue.read(glue.find(name, tmp_path))


def write_npz(path, labels, count=40, index=None):
    payload = np.frombuffer(jpeg(50) * count, np.uint8)
    offsets = np.arange(count + 1) * (len(payload) // count)
    index = np.arange(count) if index is None else index
    parts = {"payload": payload, "offsets": offsets, "labels": labels, "index": index}
    np.savez(path, header=np.zeros(0, np.uint8), **parts)


@pytest.mark.parametrize("label", [-100, 7000, -1, np.nan, 0.7, 1e9])
def test_images_of_an_archive(tmp_path, label):
    labels = np.arange(40) // 10 % 2
    write_npz(tmp_path / "a.npz", labels)
    assert images.load(tmp_path / "a.npz", side=8).classes == ("cat", "dog")
    labels = labels.astype(float)
    labels[13] = label
    write_npz(tmp_path / "a.npz", labels)
    with pytest.raises(DamagedData, match=r"a\.npz, record 13: label"):
        images.load(tmp_path / "a.npz", side=8)


def test_numbers_and_offsets_of_an_archive(tmp_path):
    labels = np.arange(40) // 10 % 2
    index = np.where(np.arange(40) == 5, np.nan, np.arange(40))
    write_npz(tmp_path / "a.npz", labels, index=index)
    with pytest.raises(DamagedData, match=r"a\.npz, record 5: number nan"):
        images.load(tmp_path / "a.npz", side=8)


def lines_of(task, label):
    if task == "listops":
        return [f"Source\tTarget\n( ( [MAX 3 ) 4 ) ]\t{value}\n" for value in ("3", label)]
    return [f"{value}\ta\tb\tone\ttwo\n" for value in ("1.0", label)]


@pytest.mark.parametrize("label", ["-100", "17", "-1", "nan", "0.7", "inf", "x", ""])
@pytest.mark.parametrize("task", ["listops", "retrieval"])
def test_lines_of_long_range_tables(tmp_path, task, label):
    names = {
        "listops": [f"basic_{part}.tsv" for part in ("train", "val", "test")],
        "retrieval": [f"new_aan_pairs.{part}.tsv" for part in ("train", "eval", "test")],
    }
    good, bad = lines_of(task, label)
    for name in names[task]:
        (tmp_path / name).write_text(good * 3)
    lra.load(task, tmp_path, cache=tmp_path)
    (tmp_path / names[task][1]).write_text(good * 3 + bad)
    number = 8 if task == "listops" else 4
    with pytest.raises(DamagedData, match=rf"1 of 4 lines of {names[task][1]}.*line {number} \("):
        lra.load(task, tmp_path, cache=tmp_path)


@pytest.mark.parametrize("label", WRONG)
def test_reviews_are_named_by_their_own_line(tmp_path, label):
    good = '{"text": "a", "label": 1}\n'
    for part in ("train", "test"):
        (tmp_path / f"imdb_{part}.jsonl.xz").write_bytes(lzma_of(good * 30))
    bad = f'\n{{"text": "b", "label": {label}}}\n'
    (tmp_path / "imdb_test.jsonl.xz").write_bytes(lzma_of(good * 3 + bad))
    with pytest.raises(DamagedData, match=r"imdb_test\.jsonl\.xz, line 5 \(label"):
        lra.load("text", tmp_path, cache=tmp_path)


def lzma_of(text):
    import lzma

    return lzma.compress(text.encode())


@pytest.mark.parametrize("label", [10, 255])
def test_records_of_cifar(tmp_path, label):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    records = np.zeros((20, 3073), np.uint8)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    lra.load("image", tmp_path, cache=tmp_path / "a")
    records[7, 0] = label
    (folder / "data_batch_3.bin").write_bytes(records.tobytes())
    with pytest.raises(DamagedData, match=rf"data_batch_3\.bin, record 7: label {label} "):
        lra.load("image", tmp_path, cache=tmp_path / "b")


@pytest.mark.parametrize("label", [-1, 10, np.nan, 0.5])
def test_labels_of_gray_images(tmp_path, label):
    import lzma

    for part in ("train", "test"):
        np.save(tmp_path / "x.npy", np.zeros((20, 32, 32), np.uint8))
        packed = lzma.compress((tmp_path / "x.npy").read_bytes())
        (tmp_path / f"cifar10_gray_{part}.npy.xz").write_bytes(packed)
    labels = np.arange(20.0) % 10
    np.savez(tmp_path / "cifar10_labels.npz", train=labels, test=labels)
    lra.load("image", tmp_path, cache=tmp_path / "a")
    spoilt = np.where(np.arange(20) == 11, label, labels)
    np.savez(tmp_path / "cifar10_labels.npz", train=labels, test=spoilt)
    with pytest.raises(DamagedData, match=r"cifar10_labels\.npz, record 11: label"):
        lra.load("image", tmp_path, cache=tmp_path / "b")


def test_the_command_line_says_so_in_a_line(tmp_path):
    labels = np.arange(40) // 10 % 2
    labels[3] = -100
    write_npz(tmp_path / "a.npz", labels)
    words = ["train", "vit", "--recipe", "digits", "--data", str(tmp_path / "a.npz")]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert result.exit_code and isinstance(result.exception, SystemExit)
    assert "a.npz, record 3: label -100" in str(result.exception)
