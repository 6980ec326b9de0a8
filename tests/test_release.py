"""The scripts behind ``make release-check`` and ``make test-versions``: what they count and say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lln_study.paper.pages import versions as page
from tests import release, versions

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure/></testcase>
<testcase classname="tests.a" name="broken"><error/></testcase>
<testcase classname="tests.a" name="left"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A tree with the files that name the version."""
    for name in ("lln/__init__.py", "CHANGELOG.md", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(release.ROOT / name, tmp_path / name)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("lln/__init__.py", '__version__ = "', '__version__ = "9.', "CITATION.cff does not say"),
        ("lln/__init__.py", '__version__ = "', '__version__ = "x', "is not MAJOR.MINOR.PATCH"),
        ("CHANGELOG.md", "\n## [0", "\n## [7.0.0] - 2030-01-01\n\n## [0", "has no section"),
        ("CITATION.cff", "\nversion: ", "\nversion: 8.", "does not say version"),
        ("CITATION.cff", "\ndate-released: ", "\ndate-released: 1999-", "as CHANGELOG.md does"),
    ],
)
def test_a_version_that_differs_is_found(copied, file, old, new, said):
    assert release.disagreements() == []
    path = copied / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert any(said in each for each in release.disagreements())


def test_every_extra_is_tried_with_the_examples_it_can_run():
    assert {"triton", "cli", "report", "hf", "onnx", "convert", "train"} <= {*release.extras()}
    assert "dev" not in release.extras()
    assert {*release.WITH_TRANSFORMERS, *release.WITH_COMMAND} <= {*release.extras()}
    alone, whole = release.examples(False), release.examples(True)
    assert "lln.attention(" in alone and "transformers" not in alone
    assert "lln.hf.load(" in whole and whole.startswith(alone[:100])


def test_results_of_tests_are_counted(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = versions.counts(tmp_path / "report.xml")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["names"] == ["tests.a::bad", "tests.a::broken"]
    (tmp_path / "empty.xml").write_text("<testsuites/>")
    assert versions.counts(tmp_path / "empty.xml")["failed"] == 1  # nothing is not a pass


def test_combinations_are_those_that_are_declared():
    found = {each.name: each for each in versions.combinations()}
    assert found["oldest"].torch == versions.floor("torch") and found["newest"].torch is None
    assert versions.floor("torch").count(".") == 2
    assert {each.python for each in found.values()} >= {"3.10", "3.13"}
    assert f"torch=={found['pinned'].torch}" in Path("constraints.txt").read_text("utf-8")
    for part in versions.PARTS.values():
        assert all(Path(word).exists() for word in part if word.startswith("tests"))


def test_what_cannot_be_had_is_said_and_is_not_a_pass(tmp_path):
    row = versions.try_out(versions.Combination("none", "3.99", None, None), {})
    assert row["outcome"] == "not available: no Python 3.99 on this machine" and "parts" not in row
    good = {**row, "name": "b", "outcome": "green", "parts": {"zoo": {"passed": 3, "failed": 0}}}
    versions.write([row, good], tmp_path / "versions.json")
    assert len(versions.write([row], tmp_path / "versions.json")) == 2
    assert json.loads((tmp_path / "versions.json").read_text())[0]["name"] == "b"
    assert "not available" in page.versions(tmp_path) and "| b | 3.99 |" in page.versions(tmp_path)
    assert page.versions(tmp_path / "nothing") == page.NOTHING_YET
