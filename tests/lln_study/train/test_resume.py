"""Killed at any moment, a run ends as if nothing had happened; bad checkpoints are named."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import warnings

import pytest
import torch

from lln_study.train import checkpoint
from lln_study.train.loop import train
from tests.lln_study.train.processes import curve, finish, kill_when, start, weights
from tests.lln_study.train.toy import Toy, toy_config

TOY = ("-m", "tests.lln_study.train.toy")
SETTINGS = {"steps": 60, "save_every": 7, "log_every": 4, "eval_every": 10}
WORDS = ("dropout=0.2", *(f"{name}={value}" for name, value in SETTINGS.items()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    config = toy_config(**SETTINGS)
    train(Toy(config, dropout=0.2), config, folder, tensorboard=False)
    return folder


def same(a, b) -> None:
    assert curve(a) == curve(b)
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_killed_and_resumed_it_is_bit_identical(whole, tmp_path):
    folder = tmp_path / "killed"
    reached = folder / "checkpoints" / "step-00000021"
    kill_when(start(*TOY, str(folder), *WORDS, "until=24"), reached.exists)
    assert not (folder / "checkpoints" / "step-00000060").exists()
    assert "done 60" in finish(start(*TOY, str(folder), *WORDS))
    same(folder, whole)


@pytest.fixture
def listens():
    """Ctrl-C as in a terminal: what runs in the background may have been told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted(Toy):
    """Ctrl-C in the middle of the update that begins at step 24, as often as ``presses``."""

    presses = 1

    def loss(self, model, batch):
        if model.training and self.step == 24:
            for _ in range(self.presses):
                signal.raise_signal(signal.SIGINT)
        return super().loss(model, batch)

    def batch(self, step, rows):
        self.step = step
        return super().batch(step, rows)


def test_after_ctrl_c_it_is_saved_and_goes_on_the_same(whole, tmp_path, capsys, listens):
    config, before = toy_config(**SETTINGS), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(config, dropout=0.2), config, tmp_path, tensorboard=False)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this update" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / "step-00000025").exists()
    train(Toy(config, dropout=0.2), config, tmp_path, tensorboard=False)
    same(tmp_path, whole)


def test_ctrl_c_twice_stops_at_once(tmp_path, listens):
    config, task = toy_config(**SETTINGS), Interrupted
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(task, "presses", 2)
        train(task(config), config, tmp_path, tensorboard=False)
    assert not (tmp_path / "checkpoints" / "step-00000025").exists()
    assert (tmp_path / "checkpoints" / "step-00000021").exists()


def test_others_may_read_what_is_saved(whole):
    found = [path for path in whole.rglob("*") if path.is_file()]
    assert found and all(path.stat().st_mode & 0o044 == 0o044 for path in found)


def test_killed_while_a_checkpoint_is_written(whole, tmp_path):
    """A folder under its temporary name is not looked at, and is cleared away."""
    folder = tmp_path / "torn"
    config = toy_config(**SETTINGS)
    shutil.copytree(whole, folder, symlinks=True)
    newest = folder / "checkpoints" / "step-00000060"
    newest.rename(folder / "checkpoints" / ".writing-step-00000060")
    torn = folder / "checkpoints" / ".writing-step-00000060" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:100])
    with (folder / "curve.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "st')
    train(Toy(config, dropout=0.2), config, folder, tensorboard=False)
    same(folder, whole)
    assert not list((folder / "checkpoints").glob(".*"))


def test_killed_between_a_checkpoint_and_its_links(tmp_path, monkeypatch):
    """Both lead where they should after the next start, though that has nothing left to do."""
    config = toy_config(**SETTINGS)
    original = checkpoint.point

    def killed(link, folder):
        if folder is not None and folder.name == "step-00000060":
            raise KeyboardInterrupt
        original(link, folder)

    monkeypatch.setattr(checkpoint, "point", killed)
    with pytest.raises(KeyboardInterrupt):
        train(Toy(config), config, tmp_path, tensorboard=False)
    monkeypatch.undo()
    assert (tmp_path / "last").resolve().name != "step-00000060"
    summary = train(Toy(config), config, tmp_path, tensorboard=False)
    assert summary.resumed == summary.best[1] == 60
    assert (tmp_path / "last").resolve().name == "step-00000060"
    assert (tmp_path / "best").resolve().name == "step-00000060"


def test_the_best_of_a_checkpoint_that_is_not_used_is_forgotten(tmp_path):
    """The one before had another best, which is not kept here: better no link than a wrong one."""
    config = toy_config(**{**SETTINGS, "steps": 14, "eval_every": 0, "keep": 9})
    train(Toy(config), config, tmp_path, tensorboard=False)
    assert (tmp_path / "best").resolve().name == "step-00000014"
    (tmp_path / "best" / "model.safetensors").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="step-00000014 is not used"),
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(KeyboardInterrupt),
    ):
        patch.setattr(Toy, "batch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        train(Toy(config), config, tmp_path, tensorboard=False)
    assert (tmp_path / "last").resolve().name == "step-00000007"
    assert not (tmp_path / "best").is_symlink()


def test_a_link_that_became_a_folder_is_named(tmp_path):
    config = toy_config()
    train(Toy(config), config, tmp_path, tensorboard=False)
    (tmp_path / "best").unlink()
    (tmp_path / "best").mkdir()
    with pytest.raises(ValueError, match=r"best is a folder and not the link it was.*remove it"):
        train(Toy(config), config, tmp_path, tensorboard=False)


def damage_by(kind):
    def truncate(folder):
        path = folder / "optimizer.safetensors"
        path.write_bytes(path.read_bytes()[:-9])
        return "optimizer.safetensors has"

    def flip(folder):
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return "model.safetensors was changed"

    def lose(folder):
        (folder / "state.json").unlink()
        return "state.json is missing"

    def unmark(folder):
        (folder / "manifest.json").unlink()
        return "has no manifest.json"

    def scramble(folder):
        (folder / "manifest.json").write_text('{"format": ')
        return "manifest.json cannot be read"

    def adopt(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["identity"] = "toy-0123456789ab-seed3"
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return "belongs to another run .toy-0123456789ab-seed3"

    def replace(folder):
        shutil.rmtree(folder)
        folder.mkdir()
        torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
        return "has no manifest.json"

    def age(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, "format": "other 7"}))
        return "its format is 'other 7'"

    def forge(folder, **entries):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"] |= entries
        (folder / "manifest.json").write_text(json.dumps(manifest))

    def lead_out(folder):
        forge(folder, **{"../../run.json": {"bytes": 1, "sha256": ""}})
        return "run.json, which is outside of it"

    def misname(folder):
        forge(folder, **{"a\0b": {"bytes": 1, "sha256": ""}})
        return "cannot be read .embedded null"

    def inflate(folder):
        forge(folder, **{"state.json": {"bytes": float("inf"), "sha256": ""}})
        return "manifest.json cannot be read"

    def nest(folder):
        (folder / "manifest.json").write_text("[" * 100_000)
        return "manifest.json cannot be read"

    def swap_state(folder):
        text = "[]\n"
        (folder / "state.json").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        forge(folder, **{"state.json": {"bytes": len(text), "sha256": digest}})
        return "its state.json is not that of step 60"

    return locals()[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("truncate", "flip", "lose", "unmark", "scramble", "adopt", "replace", "age"),
        *("lead_out", "misname", "inflate", "nest", "swap_state"),
    ],
)
def test_a_bad_checkpoint_is_named_and_the_one_before_is_used(whole, tmp_path, kind):
    folder = tmp_path / kind
    shutil.copytree(whole, folder, symlinks=True)
    newest = folder / "checkpoints" / "step-00000060"
    said = damage_by(kind)(newest)
    config = toy_config(**SETTINGS)
    with pytest.warns(UserWarning, match=f"step-00000060 is not used: .*{said}"):
        summary = train(Toy(config, dropout=0.2), config, folder, tensorboard=False)
    assert summary.resumed == 56
    same(folder, whole)


def test_no_pickle_is_read(whole, tmp_path, monkeypatch):
    import pickle

    def refuse(*_, **__):
        raise AssertionError("a pickle was loaded")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder, symlinks=True)
    config = toy_config(**SETTINGS)
    assert train(Toy(config, dropout=0.2), config, folder, tensorboard=False).resumed == 60
    kinds = {path.suffix for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors"}


def test_with_no_good_checkpoint_it_starts_again(tmp_path):
    config = toy_config()
    train(Toy(config), config, tmp_path, tensorboard=False)
    before = curve(tmp_path)
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        (folder / "model.safetensors").write_bytes(b"")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        summary = train(Toy(config), config, tmp_path, tensorboard=False)
    assert len(said) == 2 and summary.resumed == 0
    assert curve(tmp_path) == before


def test_an_unreadable_run_file_is_named(tmp_path):
    config = toy_config()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run.json cannot be read.*choose another folder"):
        train(Toy(config), config, tmp_path)


def test_a_checkpoint_that_does_not_fit_is_named(whole, tmp_path):
    """Its sums are right, what it says is not."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder, symlinks=True)
    last = folder / "checkpoints" / "step-00000060"
    owner = json.loads((last / "manifest.json").read_text())["identity"]
    options = {"model": weights(folder), "optimizer": {}, "identity": owner}
    config = toy_config(**SETTINGS)
    checkpoint.write(last.parent, state={"step": 60}, **options)
    with pytest.raises(ValueError, match=r"step-00000060 does not fit this run .KeyError: 'sums'"):
        train(Toy(config, dropout=0.2), config, folder, tensorboard=False)
    checkpoint.write(last.parent, state={"step": 60}, **{**options, "model": {}})
    with pytest.raises(ValueError, match=r"does not fit this run .*remove it to continue"):
        train(Toy(config, dropout=0.2), config, folder, tensorboard=False)


OPTIONS = {"model": {"w": torch.ones(3)}, "optimizer": {}, "identity": "a"}


def write_steps(folder, *steps, **options):
    return [checkpoint.write(folder, state={"step": n}, **{**OPTIONS, **options}) for n in steps]


def test_only_what_the_run_wrote_is_pruned(tmp_path):
    (foreign,) = write_steps(tmp_path, 1, identity="b")
    first, second, third = write_steps(tmp_path, 2, 3, 4)
    backup = tmp_path / "step-00000002-backup"
    shutil.copytree(first, backup)
    notes = tmp_path / "step-notes"
    notes.mkdir()
    (tmp_path / "step-00000000").symlink_to(first)
    checkpoint.prune(third, 1, None)
    assert not first.exists() and not second.exists()
    assert all(path.exists() for path in (foreign, backup, notes, third))
    found = checkpoint.newest(tmp_path, "a")
    assert found is not None and found.folder == third  # and nothing is said of the backup


def test_the_newest_sound_checkpoint_is_kept_beside_damaged_ones(tmp_path):
    """They were found damaged when the run continued from an older one, and are later than it."""
    first, second, damaged = write_steps(tmp_path, 1, 2, 9)
    (damaged / "model.safetensors").write_bytes(b"")
    checkpoint.prune(second, 1, None)
    assert second.exists() and not first.exists()
    with pytest.warns(UserWarning, match="step-00000009 is not used"):
        found = checkpoint.newest(tmp_path, "a")
    assert found is not None and found.folder == second


# A file may have 20,000 bytes in this process: a disk that is full.
FULL = """
import resource, sys, torch
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from lln_study.train import checkpoint
for step, size in ((1, 100), (2, 10_000)):
    tensors = {"w": torch.ones(size)}
    try:
        checkpoint.write(Path(sys.argv[1]), model=tensors, optimizer={}, state={"step": step},
                         identity="a")
    except OSError as error:
        print(error)
"""


def test_a_disk_that_is_full_leaves_the_checkpoint_before_and_no_rest(tmp_path):
    said = finish(start("-c", FULL, str(tmp_path)))
    assert "step-00000002 cannot be written" in said and "File too large" in said
    assert "make room on the disk" in said
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failed_write_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    options = OPTIONS
    checkpoint.write(tmp_path, state={"step": 1}, **options)
    monkeypatch.setattr(checkpoint, "_to_disk", lambda path: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        checkpoint.write(tmp_path, state={"step": 2}, **options)
    found = checkpoint.newest(tmp_path, "a")
    assert found is not None and found.step == 1
    assert torch.equal(found.tensors(checkpoint.MODEL)["w"], torch.ones(3))
