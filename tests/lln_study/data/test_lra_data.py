"""Long Range Arena data: generated, from files, in their official layouts, and damaged."""

from __future__ import annotations

import json
import lzma

import numpy as np
import pytest
from PIL import Image

from lln.texts.damage import DamagedData
from lln_study.data.arena import datasets as lra
from lln_study.data.arena import listops


@pytest.fixture
def ask(tmp_path):
    return {"cache": tmp_path / "cache", "workers": 1}


def write_imdb(folder, split: str, count: int = 20, spoil: str = "") -> None:
    rows = [{"text": f"review {i} \u00e9 " * (i + 1), "label": i % 2} for i in range(count)]
    lines = [json.dumps(row) for row in rows] + ([spoil] if spoil else [])
    path = folder / f"imdb_{split}.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(lines).encode()))


def test_text_from_reviews(tmp_path, ask):
    write_imdb(tmp_path, "train", 400)
    write_imdb(tmp_path, "test")
    data = lra.load("text", tmp_path, **ask)
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 360,
        "valid": 40,
        "test": 20,
    }
    first = data.splits["test"].tokens[3]
    assert bytes(first[first > 0]).decode() == "review 3 \u00e9 " * 4
    assert data.splits["train"].tokens.shape[1] == 4000 and data.length == 4096
    again = lra.load("text", tmp_path, **ask)  # from the cache
    np.testing.assert_array_equal(again.splits["test"].tokens, data.splits["test"].tokens)


@pytest.mark.parametrize("spoil", ["{broken", '{"text": 5, "label": 1}', '{"text": "x"}'])
def test_damaged_lines_stop_or_are_left_out(tmp_path, ask, spoil):
    write_imdb(tmp_path, "train", spoil=spoil)
    write_imdb(tmp_path, "test")
    with pytest.raises(DamagedData, match=r"1 of 21 lines of imdb_train.*--on-damaged skip"):
        lra.load("text", tmp_path, **ask)
    with pytest.warns(UserWarning, match="left out"):
        data = lra.load("text", tmp_path, on_damaged="skip", **ask)
    assert len(data.splits["train"]) + len(data.splits["valid"]) == 20


@pytest.mark.parametrize("key", ["train", "test_labels"])
@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_cache_is_made_again(tmp_path, ask, key, missing):
    write_imdb(tmp_path, "train")
    write_imdb(tmp_path, "test")
    whole = np.array(lra.load("text", tmp_path, **ask).splits["test"].tokens)
    (path,) = ask["cache"].rglob(f"{key}.npy")
    path.write_bytes(path.read_bytes()[:-10])
    if missing:
        path.unlink()
    with pytest.warns(UserWarning, match="imdb-.* is damaged and made again"):
        data = lra.load("text", tmp_path, **ask)
    np.testing.assert_array_equal(data.splits["test"].tokens, whole)
    lra.load("text", tmp_path, **ask)  # without a warning


def test_generated_data_that_were_cut_are_made_again(tmp_path, ask, monkeypatch):
    monkeypatch.setattr(listops, "SIZES", {"train": 30, "valid": 5, "test": 5})
    whole = np.array(lra.load("listops", None, **ask).splits["train"].tokens)
    (path,) = ask["cache"].rglob("tokens.npy")
    path.write_bytes(path.read_bytes()[:-10])
    again = lra.load("listops", None, **ask).splits["train"].tokens
    np.testing.assert_array_equal(again, whole)


def test_articles_that_are_too_short_are_named(tmp_path, ask):
    (tmp_path / "wiki2015_train.jsonl.xz").write_bytes(lzma.compress(b'{"text": "short"}'))
    with pytest.raises(DamagedData, match="wiki2015 has no article of 4,000 bytes"):
        lra.load("retrieval_wiki", tmp_path, **ask)


def test_a_cut_file_is_named(tmp_path, ask):
    write_imdb(tmp_path, "train")
    write_imdb(tmp_path, "test")
    path = tmp_path / "imdb_test.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedData, match=r"imdb_test\.jsonl\.xz cannot be read"):
        lra.load("text", tmp_path, **ask)


def test_missing_files_are_named(tmp_path, ask, monkeypatch):
    monkeypatch.delenv("LLN_DATA", raising=False)
    for task in ("text", "image", "retrieval"):
        with pytest.raises(DamagedData, match=f"task '{task}' needs .*pass --data"):
            lra.load(task, tmp_path, **ask)
    with pytest.raises(DamagedData, match="no data folder was given"):
        lra.load("image", None, **ask)
    with pytest.raises(ValueError, match="choose from listops"):
        lra.load("lists", tmp_path, **ask)


def write_cifar(folder, count: int = 30) -> np.ndarray:
    pixels = np.arange(count * 1024, dtype=np.int64).reshape(count, 32, 32) % 251
    for split in ("train", "test"):
        with lzma.open(folder / f"cifar10_gray_{split}.npy.xz", "wb") as stream:
            np.save(stream, pixels.astype(np.uint8))
    labels = np.arange(count, dtype=np.uint8) % 10
    np.savez(folder / "cifar10_labels.npz", train=labels, test=labels)
    return pixels


def test_image_from_arrays(tmp_path, ask):
    pixels = write_cifar(tmp_path)
    data = lra.load("image", tmp_path, **ask)
    assert [len(data.splits[part]) for part in lra.PARTS] == [27, 3, 30]
    np.testing.assert_array_equal(data.splits["test"].tokens, pixels.reshape(30, -1))


def test_image_arrays_that_do_not_fit_are_named(tmp_path, ask):
    write_cifar(tmp_path)
    np.savez(tmp_path / "cifar10_labels.npz", train=np.zeros(3), test=np.zeros(30))
    with pytest.raises(DamagedData, match="and 3 labels"):
        lra.load("image", tmp_path, **ask)


def test_image_from_the_official_binary_files(tmp_path, ask):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    record = np.zeros((4, 3073), np.uint8)
    record[:, 0] = [0, 1, 2, 9]
    record[:, 1:1025] = 255  # red
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / f"{name}.bin").write_bytes(record.tobytes())
    data = lra.load("image", tmp_path, **ask)
    assert len(data.splits["train"]) == 18 and data.splits["test"].labels.tolist() == [0, 1, 2, 9]
    assert (data.splits["test"].tokens == int(255.5 * 0.2989)).all()
    (folder / "test_batch.bin").write_bytes(record.tobytes()[:-5])
    with pytest.raises(DamagedData, match=r"no multiple of 3,073"):
        lra.load("image", tmp_path, **ask)


def test_listops_generated_splits_share_nothing_and_keep_their_test(ask, monkeypatch):
    monkeypatch.delenv("LLN_DATA", raising=False)
    monkeypatch.setattr(listops, "SIZES", {"train": 60, "valid": 20, "test": 20})
    data = lra.load("listops", None, **ask)
    assert [len(data.splits[part]) for part in lra.PARTS] == [60, 20, 20]
    small = lra.load("listops", None, train_size=30, **ask)
    np.testing.assert_array_equal(small.splits["test"].tokens, data.splits["test"].tokens)
    np.testing.assert_array_equal(small.splits["train"].tokens, data.splits["train"].tokens[:30])
    rows = [row.tobytes() for split in data.splits.values() for row in split.tokens]
    assert len(set(rows)) == 100


def test_listops_from_the_official_files(tmp_path, ask):
    folder = tmp_path / "lra_release" / "listops-1000"
    folder.mkdir(parents=True)
    lines = ["Source\tTarget", "( ( ( [MAX 2 ) 9 ) ] )\t9", "( ( ( [SM 8 ) 9 ) ] )\t7"]
    for part in ("train", "val", "test"):
        (folder / f"basic_{part}.tsv").write_text("\r\n".join(lines) + "\r\n")
    data = lra.load("listops", tmp_path, **ask)
    assert data.source == "official files"
    split = data.splits["valid"]
    assert split.labels.tolist() == [9, 7]
    assert [listops.evaluate(row) for row in split.tokens] == [9, 7]
    (folder / "basic_test.tsv").write_text("\n".join([*lines, "( [MAX 12 ] )\t1", "[MIN 1 ]"]))
    with pytest.raises(DamagedData, match=r"2 of 4 lines of basic_test\.tsv"):
        lra.load("listops", tmp_path, **ask)


def test_pathfinder_from_the_official_folder(tmp_path, ask):
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    (folder / "imgs" / "0").mkdir(parents=True)
    lines = []
    for i in range(20):
        pixels = np.full((32, 32), i, np.uint8)
        Image.fromarray(pixels).save(folder / "imgs" / "0" / f"sample_{i}.png")
        lines.append(f"imgs/0 sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1")
    (folder / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")
    data = lra.load("pathfinder", tmp_path, **ask)
    assert [len(data.splits[part]) for part in lra.PARTS] == [16, 2, 2]
    for split in data.splits.values():
        np.testing.assert_array_equal(split.tokens[:, 0] % 2, split.labels)
    (folder / "imgs" / "0" / "sample_3.png").write_bytes(b"")  # the release has such a file
    with pytest.raises(DamagedData, match=r"1 of 20 images .*sample_3\.png"):
        lra.load("pathfinder", tmp_path, **ask)
    with pytest.warns(UserWarning, match="left out"):
        rest = lra.load("pathfinder", tmp_path, on_damaged="skip", **ask)
    assert sum(map(len, rest.splits.values())) == 19


def test_retrieval_from_the_official_files(tmp_path, ask):
    (tmp_path / "tsv_data").mkdir()
    for part in ("train", "eval", "test"):
        text = '1.0\tP1\tP2\tone "quoted" text\tother\n0.0\tP3\tP4\tthird\tfourth\n'
        (tmp_path / "tsv_data" / f"new_aan_pairs.{part}.tsv").write_text(text)
    split = lra.load("retrieval", tmp_path, **ask).splits["valid"]
    assert split.labels.tolist() == [1, 0]
    assert bytes(split.tokens[split.pairs[1, 0]][:5]) == b"third"


def test_retrieval_wiki_pairs_passages_of_articles(tmp_path, ask):
    rows = [
        {"id": i, "title": str(i), "text": chr(97 + i % 26) * (8000 + 4000 * (i % 3))}
        for i in range(60)
    ]
    packed = lzma.compress("\n".join(json.dumps(row) for row in rows).encode())
    (tmp_path / "wiki2015_train.jsonl.xz").write_bytes(packed)
    data = lra.load("retrieval_wiki", tmp_path, **ask)
    used = {}
    for name, split in data.splits.items():
        one, other = (split.tokens[split.pairs[:, i], 99] for i in (0, 1))
        positive = split.labels == 1
        assert positive.mean() == 0.5
        assert (one[positive] == other[positive]).all()
        assert (split.pairs[:, 0] != split.pairs[:, 1]).all()
        assert (one[~positive] == other[~positive]).mean() < 0.15  # equal letters, other articles
        used[name] = set(split.pairs.ravel().tolist())
    assert not used["train"] & used["test"] and not used["valid"] & used["test"]


def test_retrieval_short_pairs_passages_that_share_most_of_their_text(tmp_path, ask):
    rows = [{"id": i, "title": str(i), "text": "".join(words(i))} for i in range(60)]
    packed = lzma.compress("\n".join(json.dumps(row) for row in rows).encode())
    (tmp_path / "wiki2015_train.jsonl.xz").write_bytes(packed)
    data = lra.load("retrieval_short", tmp_path, **ask)
    assert data.length == 64 and data.paired
    used = {}
    for name, split in data.splits.items():
        one, other = (split.tokens[split.pairs[:, i]] for i in (0, 1))
        shared = (one[:, 16:] == other[:, :-16]).all(1) | (other[:, 16:] == one[:, :-16]).all(1)
        assert (shared == (split.labels == 1)).all() and shared.mean() == 0.5
        used[name] = set(split.pairs.ravel().tolist())
    assert not used["train"] & used["test"] and not used["valid"] & used["test"]
    assert len(data.splits["train"].tokens) == sum(min(20, 3 + i % 30) for i in range(60))


def words(article: int) -> list[str]:
    """An article of 3 to 32 passages, no two stretches of all articles alike."""
    whole = "".join(f"{article:04d}{place:05d} " for place in range(300))
    return [whole[: 64 + 16 * (2 + article % 30)]]


def test_articles_that_are_too_short_to_be_paired_are_named(tmp_path, ask):
    (tmp_path / "wiki2015_train.jsonl.xz").write_bytes(
        lzma.compress("\n".join(json.dumps({"text": "a" * 70}) for _ in range(20)).encode())
    )
    with pytest.raises(DamagedData, match="retrieval_short needs at least two articles of 80 byt"):
        lra.load("retrieval_short", tmp_path, **ask)
