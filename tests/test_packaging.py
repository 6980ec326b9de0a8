"""What a user installs: names, types, data, version, and how little an import costs."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lln
import lln.texts.bundled
from tests.release import disagreements

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, **options) -> str:
    """Run code in a fresh interpreter in the checkout and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_neither_torch_nor_anything_heavy():
    loaded = python("import sys, lln; print(*sys.modules)").split()
    heavy = {"torch", "numpy", "scipy", "triton", "transformers", "matplotlib", "typer", "rich"}
    assert not heavy & set(loaded)


@pytest.mark.slow
def test_attention_works_without_the_optional_packages():
    blocked = [
        "triton",
        "transformers",
        "matplotlib",
        "jinja2",
        "scipy",
        "typer",
        "rich",
        "beartype",
    ]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "import torch, lln\n"
        "q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()\n"
        "print(lln.attention(q, k, v).shape)\n"
        "print(lln.attention(q, k, v, method='entropy').isfinite().all().item())"
    )
    assert python(code).splitlines() == ["torch.Size([1, 2, 9, 8])", "True"]


def test_public_names_resolve_and_are_few():
    assert len(lln.__all__) <= 18
    for name in lln.__all__:
        assert getattr(lln, name) is not None
        assert name in dir(lln)


def test_unknown_name_is_an_attribute_error_that_lists_the_known():
    with pytest.raises(AttributeError, match=r"no attribute 'atention'.*attention"):
        lln.atention  # noqa: B018


def test_version_is_the_one_of_the_changelog():
    assert disagreements() == []


def test_the_text_comes_with_the_package():
    text = lln.texts.bundled.text()
    assert len(text) == 1_115_394
    assert text.startswith("First Citizen:\nBefore we proceed any further, hear me speak.")


def test_wheel_contains_code_data_types_template_and_nothing_else(tmp_path):
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    wheel = tmp_path / python(code).splitlines()[-1]
    assert wheel.name.startswith(f"lln_attention-{lln.__version__}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    source = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "lln").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == source
    expected = {
        "lln/py.typed",
        "lln/texts/bundled/tinyshakespeare.txt.xz",
        "lln/report/templates/page.html",
    }
    assert expected <= packaged
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_without_the_study_its_commands_say_what_they_need():
    code = (
        "import sys; sys.modules['lln_study'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name: None if name == 'lln_study' else find(name)\n"
        "from typer.testing import CliRunner; from lln.cli.app import app\n"
        "print(CliRunner().invoke(app, ['--help']).output)\n"
        "print(repr(CliRunner().invoke(app, ['train', 'mlm']).exception))"
    )
    *shown, said = python(code).splitlines()
    assert "needs a clone" in said and "lln train" in said
    listed = {line.split()[0] for line in shown if line.startswith("  ") and line.split()}
    assert {"list", "inspect", "convert", "export"} <= listed and "train" not in listed


def test_what_lln_table_names_exists(tmp_path, monkeypatch):
    """In a clone, and from another folder."""
    from lln_study.paper.figures import from_rows
    from lln_study.paper.tables.table import TABLES, nothing

    def named() -> list[str]:
        said = [nothing(number, tmp_path) for number in TABLES]
        said += [from_rows.nothing(name, tmp_path) for name in from_rows.FIGURES]
        return [match for text in said for match in re.findall(r"(\S*sweeps/\w+\.json)", text)]

    monkeypatch.chdir(ROOT)
    assert len(named()) >= 10 and all(path.startswith("sweeps/") for path in named())
    monkeypatch.chdir(tmp_path)
    assert all(Path(path).is_file() for path in named()), named()
