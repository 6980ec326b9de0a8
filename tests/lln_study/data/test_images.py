"""Images from folders, tars and npz files, damaged ones included; augmentation by the step."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from lln.texts.damage import DamagedData
from lln_study.data import images
from lln_study.data.augment import Augmentation, augment, mirror, plain


def jpeg(value: int, side: int = 16) -> bytes:
    pixels = np.full((side, side, 3), value, np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=90)
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Cats are dark and dogs are bright, 20 of each in the Kaggle layout, and a page of notes."""
    place = tmp_path / "kaggle" / "train"
    place.mkdir(parents=True)
    for number in range(20):
        (place / f"cat.{number}.jpg").write_bytes(jpeg(50))
        (place / f"dog.{number}.jpg").write_bytes(jpeg(200))
    (place / "notes.txt").write_text("not an image")
    (place / "100.jpg").write_bytes(jpeg(0))  # unlabelled, as in Kaggle's test folder
    return tmp_path / "kaggle"


def test_folder_in_the_kaggle_layout(folder):
    found = images.load(folder, side=8)
    assert found.pixels.shape == (40, 8, 8, 3) and found.classes == ("cat", "dog")
    assert (found.pixels[found.labels == 0] < 100).all()
    assert (found.pixels[found.labels == 1] > 100).all()
    rows = {split: found.rows(split) for split in ("train", "valid", "test")}
    assert [len(each) for each in rows.values()] == [32, 4, 4]
    assert set(found.number[rows["test"]]) == {0, 10}
    assert len(np.unique(np.concatenate(list(rows.values())))) == 40


def test_folder_per_class(folder, tmp_path):
    for word in ("cat", "dog"):
        place = tmp_path / "classes" / word
        place.mkdir(parents=True)
        for file in sorted((folder / "train").glob(f"{word}.*")):
            (place / f"{file.name.split('.')[1]}.jpg").write_bytes(file.read_bytes())
    found = images.load(tmp_path / "classes", side=8)
    assert found.classes == ("cat", "dog") and len(found.pixels) == 40


def test_tar_equals_folder(folder, tmp_path):
    path = tmp_path / "all.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder / "train", "train")
    found, same = images.load(path, side=8), images.load(folder, side=8)
    np.testing.assert_array_equal(found.pixels, same.pixels)
    np.testing.assert_array_equal(found.labels, same.labels)


def pack(path, payloads: list[bytes], header: bytes = b"") -> None:
    offsets = np.cumsum([0, *map(len, payloads)])
    np.savez(
        path,
        header=np.frombuffer(header, np.uint8),
        payload=np.frombuffer(b"".join(payloads), np.uint8),
        offsets=offsets,
        labels=np.arange(len(payloads)) % 2,
        index=np.arange(len(payloads)) // 2,
    )


def test_npz_with_a_shared_header(tmp_path):
    payloads = [jpeg(50 if i % 2 == 0 else 200) for i in range(40)]
    header = payloads[0][:200]
    assert all(payload[:200] == header for payload in payloads)
    pack(tmp_path / "packed.npz", [payload[200:] for payload in payloads], header)
    found = images.load(tmp_path / "packed.npz", side=16)
    assert found.pixels.shape == (40, 16, 16, 3) and found.classes == ("cat", "dog")
    assert (found.pixels[found.labels == 0] < 100).all()


def test_digits_are_the_embedded_default():
    found = images.load()
    assert found.pixels.shape == (1797, 8, 8, 1) and len(found.classes) == 10
    assert found.pixels.max() == 255


@pytest.mark.parametrize("damage", ["empty", "cut", "noise"])
def test_a_damaged_image_stops_or_is_left_out(folder, damage):
    broken = folder / "train" / "cat.7.jpg"
    whole = broken.read_bytes()
    content = {"empty": b"", "cut": whole[: len(whole) // 2], "noise": b"\x00" * 500}[damage]
    broken.write_bytes(content)
    with pytest.raises(DamagedData, match=r"1 of 40 images .*cat\.7\.jpg.*--on-damaged skip"):
        images.load(folder, side=8)
    with pytest.warns(UserWarning, match="left out"):
        rest = images.load(folder, side=8, on_damaged="skip")
    assert len(rest.pixels) == 39
    assert 7 not in rest.number[rest.labels == 0]


def test_only_damaged_images_stop_in_any_case(folder):
    for file in (folder / "train").glob("*.jpg"):
        file.write_bytes(b"")
    with pytest.raises(DamagedData, match="40 of 40"):
        images.load(folder, side=8, on_damaged="skip")


def test_a_class_that_is_gone_is_named(folder):
    for file in (folder / "train").glob("dog.*0.jpg"):
        file.write_bytes(b"")
    with pytest.warns(UserWarning), pytest.raises(DamagedData, match="dog is left for the test"):
        images.load(folder, side=8, on_damaged="skip")


def test_a_cut_archive_stops_or_gives_what_came_before(folder, tmp_path):
    path = tmp_path / "all.tar"
    with tarfile.open(path, "w") as archive:
        for file in sorted((folder / "train").glob("*.*.jpg"), key=lambda f: f.name.split(".")[1]):
            archive.add(file, file.name)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * 0.7) // 512 * 512 + 100])
    with pytest.raises(DamagedData, match="everything after"):
        images.load(path, side=8)
    with pytest.warns(UserWarning, match="left out"):
        rest = images.load(path, side=8, on_damaged="skip")
    assert 20 < len(rest.pixels) < 40


def test_damaged_containers_are_named(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(DamagedData, match=r"a\.npz cannot be read"):
        images.load(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", something=np.zeros(3))
    with pytest.raises(DamagedData, match="must hold the arrays header"):
        images.load(tmp_path / "b.npz")
    (tmp_path / "c.tar").write_bytes(b"nothing")
    with pytest.raises(DamagedData, match="neither a folder nor a readable tar"):
        images.load(tmp_path / "c.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DamagedData, match="0 images of 0 classes"):
        images.load(tmp_path / "empty")
    with pytest.raises(ValueError, match="does not exist"):
        images.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="choose from stop, skip"):
        images.load(tmp_path / "empty", on_damaged="maybe")


def some_pixels(count: int = 6, side: int = 8, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, side, side, channels), dtype=torch.uint8)


def test_augmentation_depends_on_seed_step_and_row_only():
    pixels = some_pixels()
    how = Augmentation(shift=2)
    ask = {"seed": 0, "step": 5, "batch_size": 6}
    whole = augment(pixels, how, rows=slice(0, 6), **ask)
    parts = [augment(pixels[i : i + 2], how, rows=slice(i, i + 2), **ask) for i in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts))
    torch.rand(7)  # the global generator has no say
    assert torch.equal(whole, augment(pixels, how, rows=slice(0, 6), **ask))
    assert not torch.equal(whole, augment(pixels, how, rows=slice(0, 6), **{**ask, "step": 6}))
    assert not torch.equal(whole, augment(pixels, how, rows=slice(0, 6), **{**ask, "seed": 1}))


def test_without_changes_augmentation_is_plain():
    pixels = some_pixels()
    still = Augmentation(flip=False, shift=0, jitter=0.0)
    got = augment(pixels, still, seed=0, step=0, rows=slice(0, 6), batch_size=6)
    torch.testing.assert_close(got, plain(pixels))


def test_flips_and_shifts_move_whole_images():
    pixels = some_pixels(64, channels=1)
    how = Augmentation(flip=True, shift=1, jitter=0.0)
    got = augment(pixels, how, seed=0, step=0, rows=slice(0, 64), batch_size=64)
    padded = torch.nn.functional.pad(plain(pixels), (1, 1, 1, 1), mode="reflect")
    seen = set()
    for image, wide in zip(got, padded, strict=True):
        candidates = {
            (dy, dx, flip): (patch.flip(-1) if flip else patch)
            for dy in range(3)
            for dx in range(3)
            for flip in (False, True)
            for patch in [wide[:, dy : dy + 8, dx : dx + 8]]
        }
        matches = [key for key, patch in candidates.items() if torch.allclose(image, patch)]
        assert matches
        seen.add(matches[0])
    assert len(seen) > 10


def test_mirror():
    assert mirror(torch.tensor([-2, -1, 0, 3, 4, 5]), 4).tolist() == [2, 1, 0, 3, 2, 1]
