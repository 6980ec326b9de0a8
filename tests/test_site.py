"""The documentation as a site: it is built without a warning and holds the whole API."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import lln
from tests.waiting import HANGS

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def conf():
    spec = importlib.util.spec_from_file_location("conf", SITE / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (["One line, |x| and all."], [r"One line, \|x\| and all."]),
        (
            ["The mean:", "    |x| = 1", "of all."],
            ["The mean:", "", "::", "", "    |x| = 1", "", "of all."],
        ),
        (
            ["Like this:", "", "    f(x)", "", "    g(x)"],
            ["Like this:", "", "::", "", "    f(x)", "", "    g(x)"],
        ),
        (["Args:", "    x: |x| < 1."], ["Args:", r"    x: \|x\| < 1."]),
        (["- an item", "  of two lines"], ["- an item", "  of two lines"]),
        (["Already::", "", "    x"], ["Already::", "", "    x"]),
    ],
)
def test_docstrings_become_restructured_text(conf, written, shown):
    assert conf.readable(written) == shown


def test_every_page_is_in_the_contents(conf):
    shown = conf.contents((ROOT / "docs" / "index.md").read_text(encoding="utf-8")).split()
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs").with_suffix(""))
        assert name == conf.root_doc or name in shown, f"{name} is not linked in docs/index.md"
    sections = [line for line in shown if line in ("Start", "Guides", "Results", "Maths")]
    assert sections == ["Start", "Guides", "Results", "Maths"] and shown.index("site/api") > 0


def test_every_public_name_is_in_the_api():
    text = (SITE / "api.rst").read_text(encoding="utf-8")
    modules = re.findall(r"automodule:: ([\w.]+)\n   :members:\n", text)  # with all their names
    listed = {name for module in modules for name in getattr(import_module(module), "__all__", ())}
    for name in lln.__all__:
        assert name in listed or name in text, f"lln.{name} is not in docs/site/api.rst"
    documented = re.findall(r"auto\w+:: ([\w.]+)", text)
    assert documented and not [name for name in documented if name.startswith("lln_study")]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "-c", str(SITE)]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path)], capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert "lln.attention" in api and "lln.nn.LLNAttention" in api
    listed = re.sub(r"<[^>]+>", "", api.partition('id="lln.attention"')[2])
    assert "q (Float[Tensor" in listed and "Queries [B, H, N, D]" in listed
    assert "figure_time" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "figure_arena" in (tmp_path / "results" / "long-range-arena.html").read_text("utf-8")
