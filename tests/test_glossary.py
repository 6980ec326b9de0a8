"""The glossary is short, and every page leads to it where it first uses one of its words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted([*(DOCS / "guide").glob("*.md"), *(DOCS / "results").glob("*.md")])
MOST_WORDS = 25
# Nobody looks for these first, or they stand beside their entry's other word.
EVERYDAY = {"row", "sample", "running", "mix", "block", "window", "overlap", "joint", "β"}
LINK = "](../glossary.md"
NOT_PROSE = r"^```.*?^```|<!-- measured.*?<!-- end -->|^#.*?$|`[^`\n]*`"


def entries() -> list[tuple[str, str]]:
    """Words and what they mean, without the header; LLN itself is what every page is about."""
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(words, meaning) for words, meaning in rows[1:] if not words.startswith("LLN,")]


def first_use(section: str) -> str | None:
    """A word of the glossary that stands in the sentences of a section."""
    prose = re.sub(NOT_PROSE, "", section, flags=re.M | re.S)
    words = {word.strip(' "') for row, _ in entries() for word in row.split(",")} - EVERYDAY
    found = re.search(rf"\b({'|'.join(map(re.escape, sorted(words)))})s?\b", prose, flags=re.I)
    return None if found is None else found[1]


def test_explanations_are_short():
    for words, meaning in entries():
        plain = re.sub(r"\[More\]\([^)]*\)", "", meaning)
        assert len(plain.split()) <= MOST_WORDS, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_links_the_glossary_where_it_first_uses_one_of_its_words(page):
    sections = re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.M)
    so_far = ""
    for section in sections:
        so_far += section
        word = first_use(section)
        if word is not None:
            assert LINK in so_far, (
                f"{page.name} uses {word!r}: link it, [{word}](../glossary.md), or name the "
                "glossary before"
            )
            return
