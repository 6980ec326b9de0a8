"""Documentation that is true: code runs, links lead somewhere, numbers come from results/."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from lln_study.paper.pages import notebook, write
from lln_study.paper.pages.blocks import NOTHING_YET, rewrite

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TUTORIAL = ROOT / notebook.PAGE  # runs as its notebook, in tests/test_tutorial.py
WITH_CODE = [
    page
    for page in PAGES
    if "\n```python\n" in page.read_text(encoding="utf-8") and page != TUTORIAL
]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_blocks(path: Path) -> list[tuple[int, str]]:
    """Line number and text of each Python block."""
    text = path.read_text(encoding="utf-8")
    return [
        (text[: found.start(1)].count("\n"), found[1])
        for found in re.finditer(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_CODE, ids=name)
def test_code_on_the_page_runs(path):
    blocks = code_blocks(path)
    namespace: dict = {}  # blocks of a page build on each other, as a reader takes them
    for line, block in blocks:
        exec(compile("\n" * line + block, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_to_files_resolve(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), f"{name(path)} links to {target}"


def anchors(path: Path) -> set[str]:
    """What headings are linked as: small letters, hyphens for blanks, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_to_headings_resolve(path):
    found = re.findall(r"\]\(([\w./-]*\.md)?#([^)]+)\)", path.read_text(encoding="utf-8"))
    for target, anchor in found:
        page = path.parent / target if target else path
        assert anchor in anchors(page), f"{name(path)} links to {target}#{anchor}"


def test_paths_in_the_table_of_equations_exist():
    text = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    paths = re.findall(r"`(tests/[\w/.]*)", text)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), f"docs/equations.md names {path}"


def test_functions_in_the_table_of_equations_exist():
    import importlib

    text = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    for dotted in set(re.findall(r"`(lln(?:\.\w+)+)", text)):
        parts = dotted.split(".")
        found = importlib.import_module("lln")
        for depth, part in enumerate(parts[1:], start=1):
            if not hasattr(found, part):
                importlib.import_module(".".join(parts[: depth + 1]))
            found = getattr(found, part)


def test_the_tree_in_the_readme_is_the_tree():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"^```\nlln/ [^\n]*\n(.*?)^docs/", text, flags=re.M | re.S)
    assert tree is not None
    shown = {
        word.strip("/")
        for line in tree[1].splitlines()
        if line.startswith("  ")
        for word in itertools.takewhile(lambda word: word.endswith(("/", ".py")), line.split())
    }
    for part in shown:
        assert (ROOT / "lln" / part).exists(), f"the tree shows {part}"
    small = {"__init__.py", "protocols.py", "py.typed", "__pycache__"}
    present = {path.name for path in (ROOT / "lln").iterdir()} - small
    assert present <= shown, f"missing in the tree: {sorted(present - shown)}"


@pytest.mark.slow
@pytest.mark.parametrize("page", write.pages(ROOT), ids=name)
def test_measured_blocks_are_what_the_rows_say(page):
    assert write.written(page, ROOT / "results") == page.read_text(encoding="utf-8"), (
        "run `make pages`"
    )


def test_every_measured_block_is_on_a_page():
    texts = "".join(page.read_text(encoding="utf-8") for page in write.pages(ROOT))
    shown = set(re.findall(r"<!-- measured: (\w+) -->", texts))
    assert shown == set(write.BLOCKS)


def test_the_front_page_stays_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 9_000
    best = text.partition("<!-- measured: best -->")[2].partition("<!-- end -->")[0]
    assert len(best.strip().splitlines()) == 2 + 5


@pytest.mark.slow
def test_the_fitted_lines_are_those_that_are_printed():
    from lln.moments import PAPER, fit_line

    def words(value: float) -> str:
        return f"{value:.3f}".replace("-", "−")

    pages = [ROOT / "docs" / "equations.md", ROOT / "docs" / "guide" / "calibration.md"]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    for fit in (PAPER, fit_line(64), fit_line(64, (1.0, 4.0))):
        for value in (fit.a, fit.b):
            assert all(words(value) in text for text in texts), value


def test_the_recipe_of_wiki2015_makes_a_corpus(tmp_path):
    from lln.texts import text

    names: dict = {}
    exec(code_blocks(ROOT / "docs" / "guide" / "tables.md")[0][1], names)
    articles = [{"id": str(i), "title": f"Word {i}", "text": f"{i:04d} " * 20} for i in range(12)]
    articles += [{"id": "12", "title": "List of words", "text": "word " * 99}]
    articles += [{"id": "13", "title": "Stub", "text": "short"}]
    sizes = {"valid": 100, "test": 200, "train": 300, "train_b": 400}
    names["select"](articles, tmp_path, sizes, shortest=100)
    corpus = text.find(tmp_path)
    found = {split: corpus.articles(split) for split in text.SPLITS}
    assert corpus.name == "wiki2015"
    assert {split: len(own) for split, own in found.items()} == {"train": 7, "valid": 1, "test": 2}
    assert len({article for own in found.values() for article in own}) == 10  # none of them twice


def test_every_mechanism_a_page_creates_exists():
    from lln.zoo import KNOWN

    for page in PAGES:
        for name in re.findall(r'lln\.create\("(\w+)"', page.read_text(encoding="utf-8")):
            assert name in {*KNOWN, "recommended"}, f"{page.name} creates {name}"


def test_an_unknown_block_is_named():
    with pytest.raises(ValueError, match=r"'sped'; there are figure_time, figure_lln_alone"):
        rewrite("<!-- measured: sped -->\n<!-- end -->", ROOT / "results", write.BLOCKS)


@pytest.mark.slow
def test_figures_are_drawn_from_rows(tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    pages = [tmp_path / "README.md", tmp_path / "docs" / "results" / "vision.md"]
    pages[1].parent.mkdir(parents=True)
    for page in pages:
        page.write_text("<!-- measured: figure_10a -->\nold\n<!-- end -->\n", encoding="utf-8")
    write.main(tmp_path)
    assert all(NOTHING_YET in page.read_text(encoding="utf-8") for page in pages)
    assert not list(results.iterdir())
    rows = (ROOT / "results" / "vit.jsonl").read_text(encoding="utf-8")
    (results / "vit.jsonl").write_text(rows, encoding="utf-8")
    write.main(tmp_path)
    assert "(results/figure_10a.svg)" in pages[0].read_text(encoding="utf-8")
    assert "(../../results/figure_10a.svg)" in pages[1].read_text(encoding="utf-8")
    assert "<svg" in (results / "figure_10a.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", write.BLOCKS)
def test_without_rows_a_block_says_so(block, tmp_path):
    assert write.BLOCKS[block](tmp_path) == NOTHING_YET
